"""Breaks one module in a process of its own, and sees whether the tests that are named find it out.

The process is forked from one that has imported everything but our own code, so a mutant costs little more than
its tests; the tree is never touched.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import hypothesis
import pydantic  # noqa: F401  # so that no child imports it anew
import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 120


class Mutant(NamedTuple):
    """One way to break the code: in ``file``, ``old`` becomes ``new``; ``tests`` must then fail.

    ``tests`` is a test file; or ``crashes`` and the names of scenarios, which are killed at every point; or
    ``simulation`` and a number of seeds.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str


class Found(NamedTuple):
    """What became of a mutant.

    Attributes:
        caught: Whether a test failed.
        by: Which, or what happened instead.
    """

    caught: bool
    by: str


def tried(mutant: Mutant) -> Found:
    """Break the code in a child, and run the tests there.

    Raises:
        SystemExit: What is to be replaced does not stand in the file, or more than once.
    """
    path = ROOT / mutant.file
    whole = path.read_text(encoding="utf-8")
    if whole.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.name}: {mutant.old!r} stands {whole.count(mutant.old)} times in {mutant.file}")
    assert not any(name.partition(".")[0] == "agentfsm" for name in sys.modules), "what is imported cannot be broken"
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _in_child(path, whole.replace(mutant.old, mutant.new), mutant.tests, writing)
    os.close(writing)
    _, status = os.waitpid(child, 0)
    told = os.read(reading, 1000).decode()
    os.close(reading)
    if os.WIFSIGNALED(status):
        return Found(os.WTERMSIG(status) == signal.SIGALRM, "it hangs")
    return Found(told.startswith("caught "), told.partition(" ")[2])


def _in_child(path: Path, broken: str, tests: str, writing: int) -> None:
    try:
        signal.alarm(LIMIT_S)
        for descriptor in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
        hypothesis.settings.register_profile("mutants", phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate))
        hypothesis.settings.load_profile("mutants")  # nobody wants to see the smallest example
        loaded = _break(path, broken)
        told = " ".join(_run(tests))
        os.write(writing, told.encode() if loaded else b"error it was never loaded")
    except BaseException as error:
        os.write(writing, f"error {type(error).__name__}: {error}"[:900].encode())
    finally:
        os._exit(0)


def _break(path: Path, broken: str) -> list[str]:
    """Have a module loaded from another text than the one in its file; its name is in the list once it is."""
    loaded: list[str] = []
    read = SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, fullname: str) -> CodeType | None:
        if Path(self.path) == path:
            loaded.append(fullname)
            return self.source_to_code(broken, self.path)
        return read(self, fullname)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]
    return loaded


def _run(tests: str) -> Iterator[str]:
    """Whether they fail (``caught`` or ``missed``), and what failed."""
    kind, *names = tests.split()
    if not importlib.util.find_spec("agentfsm"):
        raise RuntimeError("agentfsm is not on the path")
    if kind.endswith(".py"):
        first = _First()
        already = "-Wignore::pytest.PytestAssertRewriteWarning"  # hypothesis was imported in front of pytest's start
        ours = ["-x", "-q", "-p", "no:cacheprovider", "--assert=plain", already]  # pytest has a loader of its own
        code = pytest.main([*ours, str(ROOT / kind)], plugins=[first])
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            raise RuntimeError(f"pytest ended with {code}")
        yield from ("caught", first.failed) if code else ("missed", "")
        return
    from agentfsm import AgentfsmError
    from tests.journal import crashes, simulation

    try:
        if kind == "crashes":
            crashes.warm_up()
            crashes.matrix(scenarios=tuple(names))
        else:
            for seed in range(int(names[0])):
                simulation.simulate(seed)
    except (AssertionError, AgentfsmError) as error:
        yield from ("caught", f"{kind}: {error}"[:200])
    else:
        yield from ("missed", "")


class _First:
    """Notes the first test that fails."""

    failed = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid
