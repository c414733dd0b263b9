"""How many faults of the package's core the public testing kit notices, used as docs/paths.md says.

    python tests/benchmarks/core_mutants.py [--seed 11] [--sample 34]

Needs cosmic-ray, whose operators make the mutants: ``pip install cosmic-ray``. One place in the core is drawn for each
mutant, and one of the operators that apply there; a mutant that behaves exactly like the core does not count. In a copy
of the package, the app of the page is tested against each by the page's own tests, with reviewed paths and recorded
runs that were written before. The mutants are drawn from the current source, so another version of the core has
others. A draw is fair only as long as nobody has added tests because of it.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import unified_diff
from importlib import import_module
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).resolve().parents[2]
CORE = (
    *(f"machine/{name}" for name in ("declaration", "engine", "graph")),
    *(f"loop/{name}" for name in ("reducer", "detectors", "tool_batch", "recovery_policy", "guards")),
    *(f"runtime/{name}" for name in ("driver", "tool_dispatch", "tool_execution", "approval")),
)
ALIKE = {
    ("@lru_cache(maxsize=16)", ""): "it only saves time",
    ("record_result(run, results[0])", "record_result(run, results[ -1])"): "there is exactly one result",
    (
        'results.extend([""] * (place - len(results)))',
        'results.extend([""] * (place ^ len(results)))',
    ): "there is no result at all where some are missing: the run was stored before results were compared",
    (
        "return sum(pair == entry for pair in zip(run.recent_calls, run.recent_results, strict=False))",
        "return sum(pair == entry for pair in zip(run.recent_calls, run.recent_results, strict=True))",
    ): "the results of the batch have just been noted, so both lists are equally long",
    ("", "@dataclass(frozen=True, slots=False)"): "it only saves memory",
    (
        "def __init__(self, name: str, final: bool = False) -> None:",
        "def __init__(self, name: str, final: bool = True) -> None:",
    ): "the one caller always gives it",
    (
        "self._escalates = False",
        "self._escalates = True",
    ): "it is set anew when the run opens, before anything reads it",
}
"""Lines, and what a mutant may have in their place and behave exactly like the core, each with the reason."""

TESTS = ("test_rules.py", "test_recorded.py", "test_policy.py", "test_data.py")
TIME_LIMIT_S = 600
"""How long the tests may take without a mutant."""

SLOWER = 6
"""Tests that take so many times longer with a mutant count as failed: it makes something wait or repeat for ever."""


@dataclass(frozen=True)
class Place:
    """A mutation of one module: the occurrence of an operator."""

    module: str
    operator: str
    occurrence: int
    line: int
    column: int

    @property
    def id(self) -> str:
        """A name that stays the same while the module does not change."""
        return f"{self.module}:{self.line}:{self.column}:{self.operator.rpartition('/')[2]}"


def places() -> list[Place]:
    """Every mutation of the core."""
    tool, plugins = import_module("cosmic_ray.ast"), import_module("cosmic_ray.plugins")
    found: list[Place] = []
    for module in CORE:
        source = (ROOT / "agentfsm" / f"{module}.py").read_text(encoding="utf-8")
        nodes = list(tool.ast_nodes(tool.get_ast(source)))
        for name in sorted(plugins.operator_names()):
            try:
                operator = plugins.get_operator(name)()
            except TypeError:  # it needs arguments
                continue
            positions = [start for node in nodes for start, _ in operator.mutation_positions(node)]
            found += [Place(module, name, i, line, column) for i, (line, column) in enumerate(positions)]
    return found


def mutated(place: Place) -> tuple[str, str]:
    """The source of a module before and after a mutation."""
    source = (ROOT / "agentfsm" / f"{place.module}.py").read_text(encoding="utf-8")
    operator = import_module("cosmic_ray.plugins").get_operator(place.operator)()
    return source, import_module("cosmic_ray.mutating").mutate_code(source, operator, place.occurrence) or source


def runs_alike(before: str, after: str) -> bool:
    """Whether a change is one of annotations, which are never evaluated, or takes away what only saves time."""
    known, changed = _without_annotations(before), ast.dump(_without_annotations(after))
    return changed == ast.dump(known) or changed in _without_a_shortcut(known)


def _without_annotations(source: str) -> ast.Module:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg | ast.AnnAssign):
            node.annotation = ast.Constant(None)
    return tree


def _without_a_shortcut(tree: ast.Module) -> Iterator[str]:
    """A module without the decorator of a guard that saves asking it where it does not hold, for each such guard."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and sum(map(_is_shortcut, node.decorator_list)) == 1:
            decorators = node.decorator_list
            node.decorator_list = [each for each in decorators if not _is_shortcut(each)]
            yield ast.dump(tree)
            node.decorator_list = decorators


def _is_shortcut(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "silent_while"


def draw(seed: int) -> Iterator[Place]:
    """Mutations in a random order: each at a place of its own, by one of the operators that apply there."""
    by_place: dict[tuple[str, int, int], list[Place]] = {}
    for each in places():
        by_place.setdefault((each.module, each.line, each.column), []).append(each)
    chance = random.Random(seed)
    order = sorted(by_place)
    chance.shuffle(order)
    for key in order:
        place = chance.choice(by_place[key])
        try:
            alike = runs_alike(*mutated(place))
        except (SyntaxError, AttributeError):  # the operator does not apply there after all
            continue
        if not alike:
            yield place


def write_app(folder: Path) -> None:
    """The app and the tests of the page, with paths from a file and more recorded runs."""
    sys.path.insert(0, str(ROOT))
    from tests.test_docs import blocks
    from tests.testing.test_mutation_score import write_app as write_policy

    write_policy(folder)
    page = {b.name: b.text for b in blocks(ROOT / "docs" / "paths.md")}
    for name in ("test_data.py", "test_rules.py"):
        (folder / name).write_text(page[name])
    shutil.copy(ROOT / "tests" / "testing" / "recorded_runs.py", folder / "test_recorded.py")
    record = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "--fsm-record", "test_recorded.py"]
    subprocess.run(record, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, capture_output=True)


def notices(folder: Path, package: Path, limit_s: float = TIME_LIMIT_S) -> str:
    """The first test of the app that fails with a package; empty if none does within some seconds."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *TESTS]
    environment = {**os.environ, "PYTHONPATH": str(package), "PYTHONDONTWRITEBYTECODE": "1"}
    shutil.rmtree(folder / ".hypothesis", ignore_errors=True)
    try:
        done = subprocess.run(
            [*command, "--hypothesis-seed=0"],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "it takes too long"
    if done.returncode == 0:
        return ""
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0][:100] if failed else "the package cannot be imported"


def main() -> int:
    """Draw the mutants, run the tests against each, and print which survive."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--sample", type=int, default=34)
    options = parser.parse_args()
    caught = survived = excluded = 0
    with tempfile.TemporaryDirectory() as name:
        package, app = Path(name) / "package", Path(name) / "app"
        app.mkdir()
        shutil.copytree(ROOT / "agentfsm", package / "agentfsm", ignore=shutil.ignore_patterns("__pycache__"))
        write_app(app)
        started = perf_counter()
        if failing := notices(app, package):
            print(f"the tests fail without a mutant: {failing}")
            return 2
        limit_s = SLOWER * (perf_counter() - started)
        for number, place in enumerate(draw(options.seed), 1):
            if caught + survived == options.sample:
                break
            file = package / "agentfsm" / f"{place.module}.py"
            before, after = mutated(place)
            old, new = before.split("\n"), after.split("\n")
            change = "".join(set(old) - set(new)).strip(), "".join(set(new) - set(old)).strip()
            if why := ALIKE.get(change):
                excluded += 1
                print(f"{number:3} excluded  {place.id}  {why}", flush=True)
                continue
            file.write_text(after, encoding="utf-8")
            by = notices(app, package, limit_s)
            file.write_text(before, encoding="utf-8")
            caught, survived = caught + bool(by), survived + (not by)
            print(f"{number:3} {'caught  ' if by else 'SURVIVED'}  {place.id}  {by}", flush=True)
            if not by:
                print("\n".join(f"      {line}" for line in unified_diff(old, new, n=1, lineterm="")))
    print(f"{caught} caught, {survived} survived, {excluded} excluded")
    return int(bool(survived))


if __name__ == "__main__":
    sys.exit(main())
