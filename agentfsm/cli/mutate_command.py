"""``agentfsm mutate``: run a test suite against faulty tables, and list the faults that it does not notice."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import click

from agentfsm.agent import Agent
from agentfsm.cli.options import collect_options, option
from agentfsm.cli.paths_command import load_path_source
from agentfsm.errors import ConfigurationError, MissingExtraError
from agentfsm.loop.presets import Preset
from agentfsm.machine.graph import Graph
from agentfsm.testing.path_generation import graph_of

try:
    from agentfsm.testing.coverage import row_lines
    from agentfsm.testing.table_mutants import KINDS, MUTANT_VARIABLE, Mutant, refusal_of, table_mutants
except ImportError as reason:  # pytest is missing
    raise MissingExtraError("agentfsm mutate", "testing") from reason

_EXAMPLES = """\b
Examples:
  agentfsm mutate my_agent:AGENT               every mutant, against all tests in this folder
  agentfsm mutate my_agent:AGENT tests/test_paths.py -k path    the arguments of pytest come last
  agentfsm mutate my_agent:AGENT --jobs 4 --json
  agentfsm mutate my_agent:AGENT --only '*:post_llm.*' --kind drop --kind swap
  agentfsm mutate my_agent:AGENT --sample 30 --seed 7 --fail-under 90    a quick look, for CI
  agentfsm mutate my_agent:AGENT --exclude 'swap:a.x,a.y=x and y never hold together'
"""

HANGS_AFTER = 10
"""A mutant hangs if its tests take this many times as long as without it,"""

HANGS_AT_LEAST_S = 30
"""and so many seconds more."""


@dataclass(frozen=True, kw_only=True)
class _MutateOptions:
    """Which mutants to try, and what is good enough."""

    kinds: tuple[str, ...] = option(
        "--kind", type=click.Choice(KINDS), multiple=True, help="Only this kind; repeatable."
    )
    only: tuple[str, ...] = option(
        "--only", metavar="PATTERN", multiple=True, help="Only ids that match, such as '*:post_llm.*'."
    )
    sample: int | None = option("--sample", type=click.IntRange(1), help="Only this many mutants, drawn at random.")
    seed: int = option("--seed", type=int, default=0, show_default=True, help="The seed of --sample.")
    exclude: tuple[str, ...] = option(
        "--exclude", metavar="ID=REASON", multiple=True, help="Leave out an equivalent mutant; repeatable."
    )
    exclusions: Path | None = option(
        "--exclusions",
        metavar="FILE",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="Leave out those of a file, one ID=REASON per line.",
    )


@dataclass(frozen=True, slots=True)
class MutantResult:
    """What became of one mutant.

    Attributes:
        mutant: The mutant.
        result: ``caught``, ``refused`` (by the library, when the graph is built), ``excluded`` or ``survived``.
        by: The test that failed, the error, or the reason for leaving it out.
    """

    mutant: Mutant
    result: str
    by: str = ""


@dataclass(frozen=True, slots=True)
class _Suite:
    """The user's tests.

    Attributes:
        target: ``MODULE:NAME``, as the user wrote it.
        file: The file that declares the table.
        attribute: The name in it.
        arguments: The arguments for pytest.
        folder: Where the tests report, which is removed when the command ends.
        limit_s: After how many seconds a run hangs; None for no limit.
    """

    target: str
    file: str
    attribute: str
    arguments: tuple[str, ...]
    folder: str
    limit_s: float | None = None

    def run(self, mutant: Mutant | None) -> tuple[int, list[str], str]:
        """The exit code of pytest (-1 if it hangs), what the plugin reported, and pytest's output."""
        descriptor, report = tempfile.mkstemp(dir=self.folder)
        os.close(descriptor)
        task = {
            "file": self.file,
            "attribute": self.attribute,
            "mutant": None if mutant is None else asdict(mutant),
            "report": report,
        }
        command = [sys.executable, "-m", "pytest", "-p", "agentfsm.testing.table_mutants", "-p", "no:cacheprovider"]
        environment = {
            **os.environ,
            MUTANT_VARIABLE: json.dumps(task),
            "HYPOTHESIS_STORAGE_DIRECTORY": self.folder,  # examples that fail with a mutant are not to be kept
        }
        try:
            done = subprocess.run(  # noqa: S603  # pytest, with the user's own arguments
                [*command, "-x", *self.arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=self.limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return -1, [], ""
        return done.returncode, Path(report).read_text(encoding="utf-8").splitlines(), done.stdout + done.stderr


@click.command(epilog=_EXAMPLES, context_settings={"ignore_unknown_options": True})
@click.argument("target", metavar="MODULE:GRAPH_OR_AGENT")
@click.argument("pytest_arguments", nargs=-1, type=click.UNPROCESSED, metavar="[PYTEST ARGUMENTS]...")
@collect_options(_MutateOptions, "which")
@click.option(
    "--jobs", type=click.IntRange(1), default=1, show_default=True, help="How many mutants are tested in parallel."
)
@click.option(
    "--fail-under",
    type=click.FloatRange(0, 100),
    default=100.0,
    show_default=True,
    metavar="PERCENT",
    help="Exit 1 if a smaller share is caught.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def mutate(
    ctx: click.Context,
    target: str,
    pytest_arguments: tuple[str, ...],
    which: _MutateOptions,
    jobs: int,
    fail_under: float,
    as_json: bool,
) -> None:
    """Run your tests against faulty copies of a table, and list the faults that no test notices.

    Each mutant has one fault: a row is dropped, evaluated after the next one, or leads elsewhere; a guard is
    negated; or a tool's approval rule is removed. The arguments after MODULE:GRAPH_OR_AGENT are pytest's. The
    mutant is made as soon as the tests import the module, whichever way they import it. What the library refuses
    to build counts as caught.

    Some mutants behave exactly like the table. Leave those out, with the reason:
    --exclude 'swap:post_llm.a,b=a and b never hold together', or a file of such lines with --exclusions.

    Exit codes: 0 enough was caught, 1 some survived, 2 wrong usage, or the tests fail without a mutant.
    """
    source = load_path_source(target)
    folder = ctx.with_resource(tempfile.TemporaryDirectory(prefix="agentfsm-mutate-"))
    suite = _Suite(target, _file_of(target), target.rpartition(":")[2], pytest_arguments, folder)
    excluded = _read_exclusions(which)
    chosen = _choose(table_mutants(source), which, excluded)
    click.echo("running the tests without a mutant", err=True)
    suite = _check_suite(suite)
    results = [MutantResult(m, "excluded", excluded[m.id]) for m in chosen if m.id in excluded]
    to_run: list[Mutant] = []
    for mutant in (m for m in chosen if m.id not in excluded):
        refusal = refusal_of(source, mutant)
        if refusal:
            results.append(MutantResult(mutant, "refused", refusal))
        else:
            to_run.append(mutant)
    results += _run_all(suite, to_run, jobs)
    order = {mutant: number for number, mutant in enumerate(chosen)}
    results.sort(key=lambda each: order[each.mutant])
    percent = _print_results(target, source, results, as_json=as_json)
    ctx.exit(int(percent < fail_under))


def _file_of(target: str) -> str:
    """The file of the module that a target names; it has been imported."""
    name = target.rpartition(":")[0]
    return str(Path(name).resolve()) if name.endswith(".py") else str(sys.modules[name].__file__)


def _read_exclusions(which: _MutateOptions) -> dict[str, str]:
    """The reason for each mutant that is left out."""
    lines = list(which.exclude)
    if which.exclusions is not None:
        text = which.exclusions.read_text(encoding="utf-8")
        lines += [line for line in map(str.strip, text.splitlines()) if line and not line.startswith("#")]
    reasons: dict[str, str] = {}
    for line in lines:
        mutant_id, _, reason = (part.strip() for part in line.partition("="))
        if not reason:
            raise ConfigurationError(f"{line!r} gives no reason: write ID=REASON")
        reasons[mutant_id] = reason
    return reasons


def _choose(every: list[Mutant], which: _MutateOptions, excluded: dict[str, str]) -> list[Mutant]:
    """The mutants to try, in their order."""
    unknown = sorted(excluded.keys() - {mutant.id for mutant in every})
    if unknown:
        raise ConfigurationError(f"there is no mutant {unknown[0]!r}: an exclusion names one that does not exist")
    chosen = [
        mutant
        for mutant in every
        if (not which.kinds or mutant.kind in which.kinds)
        and (not which.only or any(fnmatchcase(mutant.id, pattern) for pattern in which.only))
    ]
    if which.sample is None or which.sample >= len(chosen):
        return chosen
    drawn = random.Random(which.seed).sample(range(len(chosen)), which.sample)  # noqa: S311  # not for security
    return [chosen[number] for number in sorted(drawn)]


def _check_suite(suite: _Suite) -> _Suite:
    """The suite with its time limit."""
    begun = time.monotonic()
    code, report, output = suite.run(None)
    if code != 0:
        click.echo(output.rstrip(), err=True)
        last = [line for line in output.splitlines() if line.strip()][-1:] or [f"pytest ended with {code}"]
        raise ConfigurationError(f"the tests must pass before anything is changed: {last[0]}")
    if "applied" not in report:
        raise ConfigurationError(f"the tests do not import {suite.file}, which {suite.target} names")
    return replace(suite, limit_s=HANGS_AFTER * (time.monotonic() - begun) + HANGS_AT_LEAST_S)


def _run_all(suite: _Suite, mutants: Sequence[Mutant], jobs: int) -> Iterator[MutantResult]:
    """The result of each mutant. On stderr a terminal shows a line of progress, and a log gets one for each mutant."""
    survived, terminal = 0, sys.stderr.isatty()
    with ThreadPoolExecutor(jobs) as pool:
        waiting = {pool.submit(_run_one, suite, mutant) for mutant in mutants}
        try:
            for done, future in enumerate(as_completed(waiting), 1):
                result = future.result()
                survived += result.result == "survived"
                if terminal:
                    click.echo(f"\r{done} of {len(mutants)} mutants, {survived} survived", nl=False, err=True)
                else:
                    click.echo(f"{done} of {len(mutants)}: {result.result} {result.mutant.id}", err=True)
                yield result
        finally:
            for future in waiting:
                future.cancel()
            if terminal:
                click.echo("", err=True)


def _run_one(suite: _Suite, mutant: Mutant) -> MutantResult:
    code, report, output = suite.run(mutant)
    if code == -1:
        return MutantResult(mutant, "caught", "the tests do not end")
    if code == 0:
        return MutantResult(mutant, "survived" if "applied" in report else "caught")
    failed = next((line.removeprefix("failed ") for line in report if line.startswith("failed ")), "")
    last = [line for line in output.splitlines() if line.strip()][-1:] or [f"pytest ended with {code}"]
    return MutantResult(mutant, "caught", failed or last[0])


def _print_results(
    target: str, source: Graph | Preset | Agent, results: Sequence[MutantResult], *, as_json: bool
) -> float:
    """Print the results, and return the percentage of mutants that were caught."""
    counts = Counter(each.result for each in results)
    judged = len(results) - counts["excluded"]
    percent = 100.0 * (judged - counts["survived"]) / judged if judged else 100.0
    where = _locate(source, target)
    if as_json:
        rows = [
            {"id": e.mutant.id, "result": e.result, "by": e.by, "where": where(e.mutant), "fault": str(e.mutant)}
            for e in results
        ]
        totals = {name: counts[name] for name in ("caught", "refused", "excluded", "survived")}
        data: dict[str, Any] = {"target": target, "percent": round(percent, 1), **totals, "mutants": rows}
        click.echo(json.dumps(data, indent=1))
        return percent
    for each in (e for e in results if e.result == "survived"):
        click.echo(f"survived  {each.mutant.id:<50} {where(each.mutant)}  {each.mutant}")
    total = "1 mutant" if len(results) == 1 else f"{len(results)} mutants"
    click.echo(
        f"{total}: {counts['caught']} caught by tests, {counts['refused']} refused by the library, "
        f"{counts['excluded']} excluded, {counts['survived']} survived; {percent:.1f} % caught"
    )
    return percent


def _locate(source: Graph | Preset | Agent, target: str) -> Callable[[Mutant], str]:
    """A function that says in which line a mutant's row, or its tool, is declared."""
    name = target.rpartition(":")[0]
    module = sys.modules.get(f"agentfsm_user_{Path(name).stem}" if name.endswith(".py") else name)
    lines = row_lines(graph_of(source)[0], module)

    def where(mutant: Mutant) -> str:
        if mutant.kind == "approval" and isinstance(source, Agent):
            code = getattr(source.config.tools[mutant.subject].function, "__code__", None)
            found = None if code is None else (code.co_filename, code.co_firstlineno)
        else:
            found = lines.get(mutant.subject)
        if found is None:
            return "?"
        file = Path(found[0])
        return f"{os.path.relpath(file) if file.is_relative_to(Path.cwd()) else file}:{found[1]}"

    return where
