"""The SPIN model checker as an oracle: it checks many graphs in one compiled model, and walks their whole state space.

The model of each graph is the public export (``agentfsm.diagrams.promela``); properties and measures are added here.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agentfsm.analysis import Assumptions
from agentfsm.diagrams.promela import state_constant, step_options
from agentfsm.loop.guards import approval_required, in_doubt
from agentfsm.loop.outcomes import CALL_MODEL, RUN_CALLS
from agentfsm.machine.graph import Graph

MAX_COUNTER = 250
"""A stretch between two waits that is longer than this counts as endless here."""


@dataclass
class SpinCase:
    """One graph to check.

    Attributes:
        passes: For ``must_pass``: triples (target, through, when), with an empty text for no ``when``.
        nevers: For ``never_after``: triples (event, after, until).
    """

    graph: Graph
    assumptions: Assumptions
    passes: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])
    nevers: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])


@dataclass
class SpinResult:
    """What SPIN found out about one graph."""

    rows: set[int]
    pairs: set[tuple[int, int]]
    longest: int
    broken: set[int]
    endless: bool


def require_spin() -> str:
    """The path of spin; skips the test where spin or a C compiler is not installed."""
    for tool in ("spin", "gcc"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed, and it is the oracle of this test")
    return str(shutil.which("spin"))


def run_spin(cases: list[SpinCase], folder: Path) -> list[SpinResult]:
    """SPIN's result for each case."""
    program = require_spin()
    (folder / "all.pml").write_text(_model_text(cases), encoding="utf-8")
    subprocess.run([program, "-a", "all.pml"], cwd=folder, check=True, capture_output=True)
    compiler = ["gcc", "-w", "-O0" if len(cases) > 5 else "-O1", "-DMEMLIM=2000", "-DNOFAIR", "-o", "pan", "pan.c"]
    subprocess.run(compiler, cwd=folder, check=True, capture_output=True)
    return [_run_case(folder, number) for number in range(len(cases))]


def _run_case(folder: Path, number: int) -> SpinResult:
    def pan(*arguments: str) -> str:
        done = subprocess.run(
            ["./pan", "-m2000000", *arguments],
            cwd=folder,
            env={**os.environ, "CASE": str(number)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert "max search depth too small" not in done.stdout
        return done.stdout

    safety = pan("-noclaim", "-E")
    assert "errors: 0" in safety, safety
    liveness = pan("-a", "-N", "rests")
    return SpinResult(
        {int(m) for m in re.findall(r"^row (\d+)$", safety, re.M)},
        {(int(a), int(b)) for a, b in re.findall(r"^pair (\d+) (\d+)$", safety, re.M)},
        max((int(m) for m in re.findall(r"^longest (\d+)$", safety, re.M)), default=0),
        {int(m) for m in re.findall(r"^broken (\d+)$", safety, re.M)},
        "errors: 1" in liveness,
    )


def _model_text(cases: list[SpinCase]) -> str:
    counters = sorted({c.name for case in cases for c in case.assumptions.counters})
    watchers = max(len(case.passes) + len(case.nevers) for case in cases)
    lines = [
        "c_decl { static int rows[256], pairs[256][256], longest, broken[64]; }",
        _state_constants(cases),
        "byte g; mtype state; short row = -1; short last = -1; bool rest; short n;",
        f"byte owed[{watchers + 1}];",
        "hidden byte bad;",
        *(f"short c_{name}; hidden short n_{name};" for name in counters),
        "active proctype moves() {",
        '  d_step { c_code { now.g = atoi(getenv("CASE")); };',
        "    if",
    ]
    for number, case in enumerate(cases):
        starts = _initial_assignments(case)
        starts += [f"owed[{i}] = {value};" for i, value in enumerate(_initial_obligations(case))]
        rests = int(case.graph.states[0].waits or case.graph.states[0].final)
        lines.append(f"    :: g == {number} -> {' '.join(starts)} rest = {rests};")
    lines += ["    fi }", "  do"]
    for number, case in enumerate(cases):
        finals = _final_test(case)
        lines.append(f"  :: g == {number} && !({finals}) -> atomic {{ if")
        lines += [f"    :: {option}" for _, option in step_options(case.graph, case.assumptions)]
        lines += ["    fi;", f"    d_step {{ {_monitor_text(case)} }} }}"]
        lines.append(f"  :: g == {number} && ({finals}) -> break")
    lines += ["  od", "}", "ltl rests { [] <> (rest) }"]
    return "\n".join(lines) + "\n"


def _state_constants(cases: list[SpinCase]) -> str:
    names = dict.fromkeys(state_constant(s.name) for case in cases for s in case.graph.states)
    return f"mtype = {{ {', '.join(names)} }};"


def _initial_assignments(case: SpinCase) -> list[str]:
    start = f"state = {state_constant(case.graph.initial)};"
    return [start, *(f"c_{name} = {value};" for name, value in case.assumptions.initial_values().items())]


def _final_test(case: SpinCase) -> str:
    return " || ".join(f"state == {state_constant(s.name)}" for s in case.graph.states if s.final)


def _resting_test(case: SpinCase) -> str:
    return " || ".join(f"state == {state_constant(s.name)}" for s in case.graph.states if s.waits or s.final)


def _monitor_text(case: SpinCase) -> str:
    """Run after each move: measure the stretch, step the properties' automata, and print what is new."""
    rests = _resting_test(case)
    text = f"n = (rest -> 1 : (n < {MAX_COUNTER} -> n + 1 : n)); rest = ({rests}); "
    text += (
        'c_code { if (!rows[now.row]) { rows[now.row] = 1; printf("row %d\\n", now.row); } '
        "if (now.last >= 0 && !pairs[now.last][now.row]) { pairs[now.last][now.row] = 1; "
        'printf("pair %d %d\\n", now.last, now.row); } '
        'if (now.n > longest) { longest = now.n; printf("longest %d\\n", longest); } }; '
    )
    for i, (target, through, when) in enumerate(case.passes):
        # `when` (or the start, and each target) creates the obligation, `through` meets it
        if when:
            text += f"owed[{i}] = ({_row_test(case, when)} -> 1 : owed[{i}]); "
        text += f"owed[{i}] = ({_row_test(case, through)} -> 0 : owed[{i}]); "
        text += f"bad = ({_row_test(case, target)} && owed[{i}]); {_record_violation(i)}"
        if not when:
            text += f"owed[{i}] = ({_row_test(case, target)} -> 1 : owed[{i}]); "
        else:
            text += f"owed[{i}] = ({_row_test(case, target)} -> 0 : owed[{i}]); "
    for i, (event, after, until) in enumerate(case.nevers, len(case.passes)):
        if until:
            text += f"owed[{i}] = ({_row_test(case, until)} -> 0 : owed[{i}]); "
        text += f"bad = ({_row_test(case, event)} && owed[{i}]); {_record_violation(i)}"
        text += f"owed[{i}] = ({_row_test(case, after)} -> 1 : owed[{i}]); "
    return text + "last = row;"


def _record_violation(i: int) -> str:
    return (
        f'if :: bad -> c_code {{ if (!broken[{i}]) {{ broken[{i}] = 1; printf("broken %d\\n", {i}); }} }} '
        ":: else fi; bad = 0; "
    )


def _initial_obligations(case: SpinCase) -> list[int]:
    start = case.graph.states[0].name
    owed = [through != start and (not when or when == start) for _, through, when in case.passes]
    armed = [after == start and until != start for _, after, until in case.nevers]
    return [int(value) for value in (*owed, *armed)]


def _row_test(case: SpinCase, name: str) -> str:
    """Whether the row just taken has a name as its id, its guard or its target."""
    rows = [i for i, t in enumerate(case.graph.transitions) if name in (t.id, t.id.partition(".")[2], t.target)]
    return "(" + (" || ".join(f"row == {i}" for i in rows) or "false") + ")"


MAX_CALLS = 60
"""This many calls count as an unbounded number here."""

MOVES, MODEL_IN_ALL, TOOLS_IN_ALL, MODEL_BETWEEN, TOOLS_BETWEEN = range(5)
"""What a run of the compiled model measures."""


@dataclass(frozen=True)
class Exploration:
    """What walking the state space of one graph found.

    Attributes:
        ends: Whether the end can be reached from every configuration.
        configurations: How many there are.
        most: The most model calls and tool calls in total, then between two waits; None means unbounded.
    """

    ends: bool
    configurations: int
    most: tuple[int | None, ...]


def explore(cases: list[SpinCase], folder: Path) -> list[Exploration]:
    """SPIN's walk of each case; skips the test where spin is not installed."""
    program = require_spin()
    (folder / "walk.pml").write_text(_walk_model_text(cases), encoding="utf-8")
    subprocess.run([program, "-a", "walk.pml"], cwd=folder, check=True, capture_output=True)
    compiler = ["gcc", "-w", "-O1", "-DMEMLIM=2000", "-DNOREDUCE", "-DSAFETY", "-o", "walk", "pan.c"]
    subprocess.run(compiler, cwd=folder, check=True, capture_output=True)
    return [_explore_case(folder, number) for number in range(len(cases))]


def _explore_case(folder: Path, number: int) -> Exploration:
    lines = [line.split() for line in _run_walk(folder, number, MOVES)]
    moves = [(words[1], words[2]) for words in lines if words[0] == "move"]
    ends = {words[2] for words in lines if words[0] == "move" and words[3] == "1"}
    (start,) = {words[1] for words in lines if words[0] == "start"}
    ends |= {start for words in lines if words == ["start", start, "1"]}
    before: dict[str, set[str]] = {}
    for here, there in moves:
        before.setdefault(there, set()).add(here)
    todo, good = list(ends), set(ends)
    while todo:
        for here in before.get(todo.pop(), ()):
            if here not in good:
                good.add(here)
                todo.append(here)
    every = {start}.union(*moves)
    most = tuple(_most_calls(folder, number, what) for what in range(MODEL_IN_ALL, TOOLS_BETWEEN + 1))
    return Exploration(every == good, len(every), most)


def _most_calls(folder: Path, number: int, what: int) -> int | None:
    found = max(int(line.split()[1]) for line in _run_walk(folder, number, what) if line.startswith("most"))
    return found if found < MAX_CALLS else None


def _run_walk(folder: Path, number: int, what: int) -> list[str]:
    done = subprocess.run(
        ["./walk", "-m200000", "-w18", "-E"],
        cwd=folder,
        env={**os.environ, "CASE": str(number), "WHAT": str(what)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "errors: 0" in done.stdout, done.stdout[-500:]
    assert "max search depth too small" not in done.stdout
    return [line for line in done.stdout.splitlines() if line.startswith(("move ", "start ", "most "))]


def _walk_model_text(cases: list[SpinCase]) -> str:
    counters = sorted({c.name for case in cases for c in case.assumptions.counters})
    mixed = " ".join(f"h = (h ^ (unsigned short) now.c_{name}) * 1099511628211ull;" for name in counters)
    lines = [
        "c_decl { static unsigned long long from; static int most = -1; }",
        _state_constants(cases),
        "byte g; byte what; mtype state; bool rest; short sum;",
        "hidden short row; hidden byte ended;",
        *(f"short c_{name}; hidden short n_{name};" for name in counters),
        "c_code { static unsigned long long here(void) { unsigned long long h = 14695981039346656037ull;"
        f" h = (h ^ now.state) * 1099511628211ull; {mixed} return h; }} }};",
        "active proctype moves() {",
        '  d_step { c_code { now.g = atoi(getenv("CASE")); now.what = atoi(getenv("WHAT")); };',
        "    if",
    ]
    for number, case in enumerate(cases):
        starts = _initial_assignments(case)
        first = case.graph.states[0]
        rests = int(first.waits or first.final)
        report = f'c_code {{ printf("start %llx {int(first.final)}\\n", here()); printf("most 0\\n"); }};'
        lines.append(f"    :: g == {number} -> {' '.join(starts)} rest = {rests}; {report}")
    lines += ["    fi }", "  do"]
    for number, case in enumerate(cases):
        finals = _final_test(case)
        lines.append(f"  :: g == {number} && !({finals}) -> atomic {{ if")
        for _, option in step_options(case.graph, case.assumptions):
            guard, arrow, effect = option.partition(" -> ")
            lines.append(f"    :: {guard}{arrow}c_code {{ from = here(); }}; {effect}")
        lines += ["    fi;", f"    d_step {{ {_after_move(case, finals)} }} }}"]
        lines.append(f"  :: g == {number} && ({finals}) -> break")
    lines += ["  od", "}"]
    return "\n".join(lines) + "\n"


def _after_move(case: SpinCase, finals: str) -> str:
    """Run after each move: count calls, in total or since the last wait, and print the move and the count."""
    table = case.graph.transitions
    effects = [case.graph.spec(t.source).effect for t in table]
    model = [i for i, effect in enumerate(effects) if effect is CALL_MODEL]
    blocked = (approval_required, in_doubt)
    tools = [i for i, effect in enumerate(effects) if effect is RUN_CALLS and table[i].guard not in blocked]
    rests = _resting_test(case)
    counted = [
        f"((what == {a} || what == {b}) && ({' || '.join(f'row == {i}' for i in rows) or 'false'}))"
        for a, b, rows in ((MODEL_IN_ALL, MODEL_BETWEEN, model), (TOOLS_IN_ALL, TOOLS_BETWEEN, tools))
    ]
    return (
        f"sum = ((what >= {MODEL_BETWEEN} && rest) -> 0 : sum); "
        f"sum = (({' || '.join(counted)}) && sum < {MAX_CALLS} -> sum + 1 : sum); rest = ({rests}); "
        f"if :: ({finals}) -> ended = 1 :: else -> ended = 0 fi; "
        "c_code { if (now.sum > most) { most = now.sum; "
        'printf("most %d\\n", most); } '
        f'if (now.what == {MOVES}) printf("move %llx %llx %d\\n", from, here(), ended); }}'
    )
