"""The reference of the site: one page for each public package, written from its names when the site is built."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType

import agentfsm

PACKAGES = (
    "agentfsm",
    "agentfsm.models",
    "agentfsm.journal",
    "agentfsm.workers",
    "agentfsm.workers.restate_waker",
    "agentfsm.viewer",
    "agentfsm.report",
    "agentfsm.loop.guards",
    "agentfsm.loop.outcomes",
    "agentfsm.diagrams",
    "agentfsm.analysis",
    "agentfsm.testing",
    "agentfsm.testing.invariants",
    "agentfsm.testing.model_conformance",
    "agentfsm.testing.store_conformance",
    "agentfsm.testing.strategies",
    "agentfsm.integrations.mcp",
    "agentfsm.integrations.otel",
    "agentfsm.integrations.pydantic_ai",
    "agentfsm.integrations.langchain",
    "agentfsm.integrations.litellm",
)
"""Whose names are public: see stability.md."""

ONLY = {
    "agentfsm.loop.guards": [
        "aborted",
        "approval_decided",
        "approval_required",
        "ask_user",
        "calls_pending",
        "cancelled",
        "declared_done",
        "declared_unable",
        "doubt_settled",
        "escalated",
        "expired",
        "handoff",
        "in_doubt",
        "question_asked",
        "replied",
        "retry_tool",
        "stop",
        "tool_calls",
        "vote_recorded",
    ],
    "agentfsm.loop.outcomes": [
        "CALL_MODEL",
        "CHECK_BUDGETS",
        "CHOOSE_RECOVERY",
        "JUDGE_RESULTS",
        "PARSE_REPLY",
        "RUN_CALLS",
    ],
    "agentfsm.integrations.langchain": ["from_langchain"],
    "agentfsm.integrations.litellm": ["from_litellm"],
    "agentfsm.integrations.pydantic_ai": ["from_pydantic_ai"],
    "agentfsm.integrations.otel": ["tracing"],
}
"""The public names of modules that define others for their neighbors."""

TOPICS = {
    "agentfsm.agent": "Agents",
    "agentfsm.runtime.run": "Agents",
    "agentfsm.runtime.result": "Agents",
    "agentfsm.runtime.host": "Hosts",
    "agentfsm.loop.guardrails": "Limits and presets",
    "agentfsm.loop.presets": "Limits and presets",
    "agentfsm.runtime.tools": "Tools",
    "agentfsm.runtime.toolsets": "Tools",
    "agentfsm.runtime.control_tools": "Tools",
    "agentfsm.runtime.run_context": "Tools",
    "agentfsm.runtime.permissions": "Permissions",
    "agentfsm.runtime.argument_matcher": "Permissions",
    "agentfsm.loop.human_input": "Asking people",
    "agentfsm.loop.quorum": "Asking people",
    "agentfsm.loop.suspension": "Asking people",
    "agentfsm.runtime.hooks": "Hooks",
    "agentfsm.loop.events": "Events",
    "agentfsm.loop.messages": "Messages and models",
    "agentfsm.loop.model": "Messages and models",
    "agentfsm.loop.failures": "Failures and recovery",
    "agentfsm.loop.recovery_policy": "Failures and recovery",
    "agentfsm.loop": "The table",
    "agentfsm.machine": "The table",
    "agentfsm.runtime.state_context": "The table",
    "agentfsm.journal": "Journal and stores",
    "agentfsm.runs": "Journal and stores",
    "agentfsm.errors": "Errors",
}
"""Sections of the page of ``agentfsm``, in order, by the module that defines a name; the longest prefix counts."""


def write_reference(folder: Path) -> None:
    """Write one page for each public package, and their index."""
    folder.mkdir(exist_ok=True)
    sys.modules.setdefault("litellm", ModuleType("litellm"))  # too large to be installed where the site is built
    for page in folder.glob("agentfsm*.md"):
        if page.stem not in PACKAGES:
            page.unlink()
    for package in PACKAGES:
        _write(folder / f"{package}.md", "\n".join(_package_page(importlib.import_module(package))))
    listed = "\n".join(["examples", *PACKAGES])
    _write(
        folder / "index.md",
        "# Reference\n\nEvery public name, from its docstring. [What is stable](../stability.md) says which names are"
        f" public.\n\n```{{toctree}}\n:maxdepth: 1\n\n{listed}\n```\n",
    )


def write_examples(page: Path, folder: Path) -> None:
    """Write the page with the programs of a folder."""
    parent = folder
    lines = ["# Examples\n\nEach runs as it is, with no key unless it says so.\n"]
    paths = [p for p in folder.rglob("*") if p.suffix in {".py", ".yml", ".yaml", ".ini"}]
    for path in sorted(paths, key=lambda p: (p.parent != folder, p)):
        name = path.relative_to(folder).as_posix()
        if path.parent not in (folder, parent):
            parent = path.parent
            lines += [f"({example_anchor(parent.name)})="]
        lines += [f"({example_anchor(name)})=", f"## {name}\n"]
        language = {".py": "python", ".ini": "ini"}.get(path.suffix, "yaml")
        lines += [f"```{{literalinclude}} ../../examples/{name}", f":language: {language}", "```\n"]
    _write(page, "\n".join(lines))


def example_anchor(name: str) -> str:
    """The anchor of a program, or of a folder of them, on that page."""
    return re.sub(r"[^a-z]", "-", name)


def public_names(package: str) -> list[str]:
    """The public names of such a package, sorted."""
    return ONLY[package] if package in ONLY else sorted(importlib.import_module(package).__all__)


def is_inherited(name: str, value: object) -> bool:
    """Whether a member comes from pydantic, and says nothing about the class that inherits it."""
    return name.startswith(("model_", "__pydantic")) or getattr(value, "__module__", "").startswith("pydantic")


def _package_page(module: ModuleType) -> list[str]:
    lines = [f"# {module.__name__}", "", *_directive(f"automodule:: {module.__name__}"), ""]
    names = public_names(module.__name__)
    if module.__name__ != "agentfsm":
        return [*lines, *(line for name in names for line in _entry(module, name, 2))]
    topic_of = {name: _topic(getattr(getattr(module, name), "__module__", "")) for name in names}
    for topic in dict.fromkeys([*TOPICS.values(), *topic_of.values()]):
        lines += [f"## {topic}", ""]
        lines += [line for name in names if topic_of[name] == topic for line in _entry(module, name, 3)]
    return lines


def _topic(module: str) -> str:
    prefixes = [prefix for prefix in TOPICS if module == prefix or module.startswith(prefix + ".")]
    return TOPICS[max(prefixes, key=len)] if prefixes else "The table"


def _entry(module: ModuleType, name: str, level: int) -> list[str]:
    value = getattr(module, name)
    title = [f"{'#' * level} {name}", ""]
    target = f"{module.__name__}.{name}"
    if module is not agentfsm and name in agentfsm.__all__ and getattr(agentfsm, name) is value:
        return [*title, f"[`agentfsm.{name}`](agentfsm.md#{name.lower()}), which this package exports too.", ""]
    if inspect.isclass(value):
        return [*title, *_directive(f"autoclass:: {target}", ":members:"), ""]
    if callable(value):
        return [*title, *_directive(f"autofunction:: {target}"), ""]
    if isinstance(value, ModuleType):
        return [*title, *_directive(f"automodule:: {target}"), ""]
    return [*title, *_directive(f"autodata:: {target}", ":no-value:"), ""]


def _directive(*lines: str) -> list[str]:
    first, *options = lines
    return ["```{eval-rst}", f".. {first}", *(f"   {option}" for option in options), "```"]


def _write(path: Path, text: str) -> None:
    """Write a file if it changed, so that Sphinx reads only pages that did."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
