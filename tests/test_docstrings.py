"""The examples in the docstrings of analysis, diagrams and testing run unchanged, given an agent."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given

import agentfsm
from agentfsm import Agent
from agentfsm import analysis as analysis_kit
from agentfsm import diagrams as diagrams_kit
from agentfsm import testing as testing_kit
from agentfsm.analysis import exported_model
from agentfsm.diagrams.promela import promela_model
from agentfsm.loop.transition_table import LOOP
from agentfsm.testing import ScriptedModel, invariants, strategies
from agentfsm.testing.model_conformance import checks

ROOT = Path(agentfsm.__file__).parent
FILES = [*(f for kit in ("analysis", "diagrams", "testing") for f in sorted((ROOT / kit).glob("*.py")))]
FILES += [ROOT / "loop" / "detectors.py"]


def examples() -> Iterator[tuple[str, str]]:
    """Every block after two colons, with its location."""
    for file in FILES:
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "::\n" in text else ():
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (ast.get_docstring(node) or "").splitlines()
                for number, line in enumerate(lines):
                    if line.endswith("::"):
                        name = f"{file.parent.name}/{file.stem}.{getattr(node, 'name', '')}"
                        yield name, "\n".join(_indented(lines[number + 1 :]))


def _indented(lines: list[str]) -> Iterator[str]:
    for line in lines:
        if line and not line.startswith(" "):
            return
        yield line


EXAMPLES = list(examples())
MARKS = SimpleNamespace(mark=SimpleNamespace(fsm=lambda graph: lambda test: test, parametrize=pytest.mark.parametrize))
"""What the examples need of pytest: ``mark.fsm`` exists only where the plugin is installed."""


def namespace() -> dict[str, Any]:
    """The public names, and the few that the examples take as given."""
    kits = (agentfsm, analysis_kit, diagrams_kit, testing_kit, strategies)
    return {
        **{name: getattr(kit, name) for kit in kits for name in kit.__all__},
        "agentfsm": agentfsm, "exported_model": exported_model, "promela_model": promela_model, "given": given,
        "invariants": invariants, "pytest": MARKS, "CHECKS": {}, "counts": {},
        "asynccontextmanager": asynccontextmanager, "checks": checks,
        "my_agent": Agent(ScriptedModel()), "reviewed": LOOP, "mine": LOOP.without("post_llm.loop_detected"),
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("code", [code for _, code in EXAMPLES], ids=[name for name, _ in EXAMPLES])
def test_an_example_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "diagrams").mkdir()
    exec(compile(textwrap.dedent(code), "<docstring>", "exec"), namespace())


def test_every_feature_has_an_example() -> None:
    shown = {name.rpartition(".")[2] for name, _ in EXAMPLES}
    features = {
        "paths",
        "WitnessDriver",
        "force",
        "guard_conflicts",
        "scenarios",
        "AgentStateMachine",
        "analyse",
        "diff",
        "must_pass",
    }
    features |= {"never_after", "detector", "RunPath", "Counterexample", "Coverage", "DiffOverlay", "HooksOverlay"}
    assert features <= shown
