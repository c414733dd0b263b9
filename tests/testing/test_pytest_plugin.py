"""The pytest plugin: parametrized tests, ids, reports, and what xdist's workers saw together."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

# Everything that the inner runs import is imported here: pytester forgets what they import first.
from agentfsm import diagrams, testing
from agentfsm.loop import transition_table
from agentfsm.testing import coverage, path_runner, pytest_plugin
from agentfsm.testing.coverage import REPORT_FILES

pytest_plugins = ["pytester"]

PRELOADED = (coverage, diagrams.diagram, path_runner, *(getattr(testing, name) for name in testing.__all__))

SMALL = '''
from agentfsm.loop.guards import aborted, cancelled
from agentfsm.loop.transition_table import LOOP
from agentfsm.machine.graph import Counter, Graph, StateSpec, Transition as Row


def sunny(run):
    """It shines."""
    return False


GRAPH = Graph(
    (StateSpec("pre_step", effect=LOOP.states[0].effect), StateSpec("terminal", final=True)),
    (
        Row("pre_step", cancelled, "terminal", ends="cancelled"),
        Row("pre_step", aborted, "terminal", ends="aborted"),
        Row("pre_step", sunny, "pre_step", spends="days"),
        Row("pre_step", None, "terminal", ends="completed"),
    ),
    "small",
    (Counter("days", 5),),
    (cancelled, aborted),
)
'''

TESTS = """
import pytest
from agentfsm.testing import Example, WitnessDriver, default_agent
from tables import GRAPH


@pytest.mark.fsm(graph=GRAPH)
def test_path(fsm_path):
    WitnessDriver(GRAPH, examples={"sunny": Example()}).run(fsm_path)
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makepyfile(tables=SMALL, test_it=TESTS)
    pytester.makeini("[pytest]\npythonpath = .\nmarkers =\n")
    return pytester


def run(project: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    """Run pytest in this process, which has imported everything already."""
    return project.runpytest_inprocess(*plugin_options(), *arguments)


def run_in_subprocess(project: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    """Run pytest in a new interpreter: for what depends on the state of the interpreter."""
    return project.runpytest_subprocess(*plugin_options(), *arguments)


def plugin_options() -> tuple[str, ...]:
    loaded = () if "agentfsm.testing.pytest_plugin" in entry_points() else ("-p", "agentfsm.testing.pytest_plugin")
    return (*loaded, "-p", "no:cacheprovider", "-p", "no:hypothesispytest")  # Hypothesis takes 2 s to import


def entry_points() -> set[str]:
    from importlib.metadata import entry_points as found

    return {e.value for e in found(group="pytest11")}


def test_a_test_runs_once_for_each_path_with_a_readable_id(project: pytest.Pytester) -> None:
    result = run(project, "-v")
    ids = re.findall(r"test_path\[(.+?)\] PASSED", result.stdout.str())
    # by hand: sunny > sunny > otherwise covers three pairs; cancelled and aborted end a run of their own each
    assert ids == ["001-3moves-pre_step.cancelled", "002-2moves-pre_step.aborted", "003-2moves-pre_step.otherwise"]


def test_the_criterion_is_an_option(project: pytest.Pytester) -> None:
    run(project, "--fsm-cover=transitions").assert_outcomes(passed=3)
    run(project, "--fsm-cover=triples").assert_outcomes(passed=3)


@pytest.mark.slow
def test_the_loop_is_the_default_graph(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_loop="from agentfsm.testing import force, default_agent\nfrom agentfsm import LOOP\n"
        "def test_it(fsm_path):\n    force(default_agent(LOOP), fsm_path)\n"
    )
    run(project, "test_loop.py", "--fsm-cover=transitions").assert_outcomes(passed=21)
    run(project, "test_loop.py", "--fsm-graph=agentfsm.loop.presets:STRICT", "--fsm-cover=transitions")


def test_the_report_lists_what_was_not_covered(project: pytest.Pytester) -> None:
    result = run(project, "--fsm-graph=tables:GRAPH", "--fsm-report=term", "--fsm-cover=pairs")
    text = result.stdout.str()
    # `sunny` never holds in truth, so each of the three paths goes straight to the end
    assert re.search(r"transitions +1 of 4 +25.0 %\n +never: pre_step.sunny\n", text)
    assert re.search(r"pairs +0 of 4 +0.0 %", text)
    assert "never: pre_step.sunny (never true)" in text


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_without_an_option_the_report_is_about_the_graph_that_tests_are_marked_with(
    project: pytest.Pytester, workers: int
) -> None:
    arguments = ["-n", str(workers)] if workers else []
    text = run(project, "--fsm-report=term", "--fsm-fail-under=26", *arguments).stdout.str()
    assert "coverage of graph 'small'" in text
    assert re.search(r"transitions +1 of 4 +25.0 %\n", text)
    assert "FAIL: 0.0 % of the pairs were covered, less than 26 %" in text
    assert "coverage of graph 'loop'" not in text


def test_each_graph_that_tests_are_marked_with_has_a_report_of_its_own(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_two=TESTS
        + """
from dataclasses import replace

OTHER = replace(GRAPH, name="other", transitions=(*GRAPH.transitions[:2], *GRAPH.transitions[3:]))


@pytest.mark.fsm(OTHER, cover="transitions")
def test_other(fsm_path):
    WitnessDriver(OTHER).run(fsm_path).check()
"""
    )
    text = run(project, "--fsm-report=term", "--fsm-report=json", "test_two.py").stdout.str()
    assert re.search(r"graph 'small' -+\ntransitions +1 of 4 ", text)
    assert re.search(r"graph 'other' -+\ntransitions +3 of 3 ", text)
    for name, covered in (("small", 1), ("other", 3)):
        data = json.loads((project.path / f"fsm-coverage-{name}.json").read_text())
        assert (data["graph"], data["shares"][0]["covered"]) == (name, covered)


REVIEWED = """
import pytest
from agentfsm.testing import force, default_agent
from tables import GRAPH


MARK
def test_path(fsm_path):
    assert fsm_path.rows
"""


@pytest.mark.parametrize("arguments", [(), ("--fsm-paths=paths.json", "--fsm-graph=tables:GRAPH")])
def test_reviewed_paths_fail_where_the_graph_has_changed(project: pytest.Pytester, arguments: tuple[str, ...]) -> None:
    mark = "" if arguments else '@pytest.mark.fsm(graph=GRAPH, paths="paths.json")'
    project.makepyfile(test_it=REVIEWED.replace("MARK", mark))
    tables: dict[str, Any] = {}
    exec(SMALL, tables)
    (project.path / "paths.json").write_text(testing.ReviewedPaths.generate(tables["GRAPH"]).to_json())
    run(project, *arguments).assert_outcomes(passed=3)
    project.makepyfile(
        tables="\n".join(line for line in SMALL.splitlines() if "Row" not in line or "sunny" not in line)
    )
    result = run(project, *arguments, "-v")
    result.assert_outcomes(failed=4)  # every path goes through sunny
    text = result.stdout.str()
    assert "test_path[paths.json] FAILED" in text
    assert "the row pre_step.sunny -> pre_step, spends=days is gone" in text


ROUNDS = """
import pytest
from agentfsm.loop.guards import aborted, cancelled
from agentfsm.machine.engine import Machine
from agentfsm.machine.graph import Counter, Graph, StateSpec, Transition as Row


def again(run):
    return run.again


GRAPH = Graph(
    (StateSpec("a"), StateSpec("b"), StateSpec("end", final=True)),
    (Row("a", again, "b", spends="rounds"), Row("a", None, "end", ends="completed"), Row("b", None, "a")),
    "rounds",
    (Counter("rounds", 9),),
)


class Run:
    run_id, state, again, guardrails = "r", "a", True, None

    def __init__(self):
        self.counters = {}

    def view(self):
        return self

    def abort(self, by, error):
        raise error

    def view(self):
        return self

    def call(self, role, function):
        return function(self)


@pytest.mark.parametrize("moves", [MOVES])
def test_it(moves):
    run = Run()
    for more in moves:
        run.again = more
        Machine(GRAPH).step(run)
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_prime_paths_are_reported_as_such(project: pytest.Pytester, workers: int) -> None:
    """By hand: a > b > a and b > a > b are round trips, b > a > end leaves; all other ways are part of these."""
    arguments = ["--fsm-cover=prime", "--fsm-graph=rounds:GRAPH", "--fsm-report=term", "--fsm-report=json"]
    arguments += ["-n", str(workers)] if workers else []
    project.makepyfile(rounds=ROUNDS.replace("MOVES", "[True, True]"))
    result = run(project, *arguments, "--fsm-fail-under=34", "rounds.py")
    text = result.stdout.str()
    assert re.search(r"prime +1 of 3 +33.3 %\n +never: b > a > b\n +never: b > a > end\n", text), text
    assert "FAIL: 33.3 % of the prime paths were covered, less than 34 %" in text
    project.makepyfile(rounds=ROUNDS.replace("MOVES", "[True, True, True, True, False]"))
    result = run(project, *arguments, "--fsm-fail-under=100", "rounds.py")
    assert result.ret == 0
    assert re.search(r"prime +3 of 3 +100.0 %", result.stdout.str())
    assert json.loads((project.path / "fsm-coverage.json").read_text())["walks"]["a > b > a"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_counts_are_the_same_in_one_process_and_in_two(project: pytest.Pytester, workers: int) -> None:
    arguments = ["-n", str(workers)] if workers else []
    run(project, "--fsm-graph=tables:GRAPH", "--fsm-report=json:found.json", *arguments)
    data = json.loads((project.path / "found.json").read_text())
    assert data["graph"] == "small"
    assert data["windows"] == data["true"] == {"pre_step.otherwise": 3}
    assert data["false"] == {"pre_step.aborted": 3, "pre_step.cancelled": 3, "pre_step.sunny": 3}


def test_lcov_points_at_the_lines_of_the_table(project: pytest.Pytester) -> None:
    run(project, "--fsm-graph=tables:GRAPH", "--fsm-report=lcov")
    text = (project.path / "fsm-coverage.lcov").read_text()
    source = (project.path / "tables.py").read_text().splitlines()
    assert f"SF:{project.path / 'tables.py'}\n" in text
    taken = {source[int(line) - 1].strip(): int(n) for line, n in re.findall(r"^DA:(\d+),(\d+)$", text, re.M)}
    assert taken == {
        'Row("pre_step", cancelled, "terminal", ends="cancelled"),': 0,
        'Row("pre_step", aborted, "terminal", ends="aborted"),': 0,
        'Row("pre_step", sunny, "pre_step", spends="days"),': 0,
        'Row("pre_step", None, "terminal", ends="completed"),': 3,
    }
    branches = re.findall(r"^BRDA:(\d+),0,(\d),(\d+|-)$", text, re.M)
    assert [(n, count) for _, n, count in branches] == [("0", "-"), ("1", "-")] * 3  # lcov: none on a line without hits
    assert "LF:4\nLH:1\nend_of_record" in text
    assert "BRF:6\nBRH:0" in text


def test_genhtml_shows_an_uncovered_row_as_an_uncovered_line(project: pytest.Pytester) -> None:
    genhtml = shutil.which("genhtml")
    if genhtml is None:
        pytest.skip("genhtml (the package lcov) is not installed")
    run(project, "--fsm-graph=tables:GRAPH", "--fsm-report=lcov")
    command = [genhtml, "--branch-coverage", "--output-directory", "html", "fsm-coverage.lcov"]
    done = subprocess.run(command, cwd=project.path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "25.0% (1 of 4 lines)" in done.stdout
    assert "0.0% (0 of 6 branches)" in done.stdout
    (page,) = (project.path / "html").rglob("tables.py.gcov.html")
    shown = (
        r'class="(lineNoCov|lineCov|tlaUNC|tlaGNC)">[^<]*:\s+Row\(&quot;pre_step&quot;, (\w+),'  # of lcov 1 and of 2
    )
    rows = {name: shade in ("lineCov", "tlaGNC") for shade, name in re.findall(shown, page.read_text())}
    assert rows == {"cancelled": False, "aborted": False, "sunny": False, "None": True}


def test_infeasible_rows_are_left_out_of_the_report(project: pytest.Pytester) -> None:
    """A text is the answer in the standard preset, and its control tools are not registered."""
    run(project, "--fsm-graph=agentfsm.loop.presets:STANDARD", "--fsm-report=lcov", "--fsm-report=json")
    source = Path(transition_table.__file__).read_text().splitlines()
    lines = re.findall(r"^DA:(\d+),", (project.path / "fsm-coverage.lcov").read_text(), re.M)
    shown = " ".join(source[int(line) - 1] for line in lines)
    assert "declared_done" in shown
    assert "declared_unable" not in shown
    rows = json.loads((project.path / "fsm-coverage.json").read_text())["shares"][0]
    assert "post_tool.declared_unable" in rows["impossible"]


def test_the_picture_shows_the_counts(project: pytest.Pytester) -> None:
    run(project, "--fsm-graph=tables:GRAPH", "--fsm-report=svg:covered.svg")
    text = (project.path / "covered.svg").read_text()
    assert text.startswith("<svg")
    assert "never" in text


@pytest.mark.slow
def test_reports_are_the_same_under_any_hash_seed(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    project.makepyfile(
        test_loop="from agentfsm import LOOP\nfrom agentfsm.testing import WitnessDriver\n"
        "def test_it(fsm_path):\n    WitnessDriver(LOOP).run(fsm_path).check()\n"
    )
    forms = [f"--fsm-report={form}" for form in REPORT_FILES]
    found: set[tuple[str, ...]] = set()
    for seed in ("0", "1", "4242"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        told = (
            run_in_subprocess(project, "test_loop.py", "--fsm-cover=transitions", *forms)
            .stdout.str()
            .partition("- coverage of")[2]
        )
        files = [(project.path / name).read_text() for name in REPORT_FILES.values() if name]
        found.add((told.rpartition("=")[0].rpartition("\n")[0], *files))
    assert len(found) == 1


def test_too_little_coverage_fails_the_run(project: pytest.Pytester) -> None:
    good = run(project, "--fsm-graph=tables:GRAPH", "--fsm-cover=transitions", "--fsm-fail-under=50")
    assert good.ret == 0
    bad = run(project, "--fsm-graph=tables:GRAPH", "--fsm-cover=transitions", "--fsm-fail-under=51")
    assert bad.ret == 1
    bad.stdout.fnmatch_lines(["FAIL: 50.0 % of the transitions were covered, less than 51 %"])


def test_the_graph_may_be_in_the_current_folder(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    below = project.mkdir("below")
    (project.path / "tables.py").rename(below / "tables.py")
    (below / "test_below.py").write_text((project.path / "test_it.py").read_text())
    (project.path / "test_it.py").unlink()
    monkeypatch.chdir(below)
    result = run(project, "--fsm-graph=tables:GRAPH", "--fsm-report=term")
    result.assert_outcomes(passed=3)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--fsm-graph=tables", "write it as MODULE:NAME"),
        ("--fsm-graph=tables:NOTHING", "has no attribute 'NOTHING'"),
        ("--fsm-graph=nowhere:GRAPH", "No module named 'nowhere'"),
        ("--fsm-graph=tables:sunny", "neither a graph nor a preset nor an agent"),
        ("--fsm-report=pdf", "unknown format; available: term, json, lcov, svg"),
    ],
)
def test_wrong_usage_is_a_one_line_error(project: pytest.Pytester, argument: str, message: str) -> None:
    result = run(project, argument, "--fsm-report=term")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert message in result.stderr.str()
    assert "Traceback" not in result.stderr.str()


@pytest.mark.slow
def test_without_its_options_the_plugin_imports_nothing(project: pytest.Pytester) -> None:
    loaded = "any(m.startswith('agentfsm.machine') for m in sys.modules)"
    project.makepyfile(test_plain=f"import sys\ndef test_it():\n    assert not {loaded}\n")
    run_in_subprocess(project, "test_plain.py").assert_outcomes(passed=1)
    assert Path(pytest_plugin.__file__).read_text().count("\nimport agentfsm") == 0
