"""Runs ``spin`` on many tables at once: one model with all of them, compiled once, one run for each.

The model notes, as it is searched exhaustively, each row and pair of rows that is taken, the longest
stretch between two waits, and each watched property that breaks. None of our own search code is used.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agentfsm.analysis import Facts
from agentfsm.analysis.promela import options
from agentfsm.machine.graph import Graph

CAP = 250
"""A stretch that is longer than this counts as endless here."""


@dataclass
class Case:
    """One table to ask about.

    Attributes:
        passes: For ``must_pass``: triples (target, through, when), with an empty text for no ``when``.
        nevers: For ``never_after``: triples (event, after, until).
    """

    graph: Graph
    facts: Facts
    passes: list[tuple[str, str, str]] = field(default_factory=list)
    nevers: list[tuple[str, str, str]] = field(default_factory=list)


@dataclass
class Found:
    """What spin found out about one table."""

    rows: set[int]
    pairs: set[tuple[int, int]]
    longest: int
    broken: set[int]
    endless: bool


def spin() -> str:
    """Where spin is; the test is skipped where it is not."""
    for tool in ("spin", "gcc"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed: no oracle from outside")
    return str(shutil.which("spin"))


def ask(cases: list[Case], folder: Path) -> list[Found]:
    """What spin finds out about each case."""
    program = spin()
    (folder / "all.pml").write_text(_text(cases), encoding="utf-8")
    subprocess.run([program, "-a", "all.pml"], cwd=folder, check=True, capture_output=True)
    compiler = ["gcc", "-w", "-O0" if len(cases) > 5 else "-O1", "-DMEMLIM=2000", "-DNOFAIR", "-o", "pan", "pan.c"]
    subprocess.run(compiler, cwd=folder, check=True, capture_output=True)
    return [_run(folder, number) for number in range(len(cases))]


def _run(folder: Path, number: int) -> Found:
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
    return Found(
        {int(m) for m in re.findall(r"^row (\d+)$", safety, re.M)},
        {(int(a), int(b)) for a, b in re.findall(r"^pair (\d+) (\d+)$", safety, re.M)},
        max((int(m) for m in re.findall(r"^longest (\d+)$", safety, re.M)), default=0),
        {int(m) for m in re.findall(r"^broken (\d+)$", safety, re.M)},
        "errors: 1" in liveness,
    )


def _text(cases: list[Case]) -> str:
    counters = sorted({c.name for case in cases for c in case.facts.counters})
    watchers = max(len(case.passes) + len(case.nevers) for case in cases)
    lines = [
        "c_decl { static int rows[256], pairs[256][256], longest, broken[64]; }",
        "byte g; byte state = 0; byte row = 255; byte last = 255; bool rest; short n;",
        f"byte owed[{watchers + 1}];",
        "hidden byte bad;",
        *(f"short c_{name}; hidden short n_{name};" for name in counters),
        "active proctype moves() {",
        '  d_step { c_code { now.g = atoi(getenv("CASE")); };',
        "    if",
    ]
    for number, case in enumerate(cases):
        starts = [f"c_{c.name} = {c.start};" for c in case.facts.counters]
        starts += [f"owed[{i}] = {value};" for i, value in enumerate(_first(case))]
        rests = int(case.graph.states[0].waits or case.graph.states[0].final)
        lines.append(f"    :: g == {number} -> {' '.join(starts)} rest = {rests};")
    lines += ["    fi }", "  do"]
    for number, case in enumerate(cases):
        ends = " || ".join(f"state == {i}" for i, s in enumerate(case.graph.states) if s.final)
        lines.append(f"  :: g == {number} && !({ends}) -> atomic {{ if")
        lines += [f"    :: {option}" for option in options(case.graph, case.facts)]
        lines += ["    fi;", f"    d_step {{ {_extra(case)} }} }}"]
        lines.append(f"  :: g == {number} && ({ends}) -> break")
    lines += ["  od", "}", "ltl rests { [] <> (rest) }"]
    return "\n".join(lines) + "\n"


def _extra(case: Case) -> str:
    """What follows each move: the stretch grows or begins anew, the watchers watch, and all is noted."""
    rests = " || ".join(f"state == {i}" for i, s in enumerate(case.graph.states) if s.waits or s.final)
    text = f"n = (rest -> 1 : (n < {CAP} -> n + 1 : n)); rest = ({rests}); "
    text += (
        'c_code { if (!rows[now.row]) { rows[now.row] = 1; printf("row %d\\n", now.row); } '
        "if (now.last != 255 && !pairs[now.last][now.row]) { pairs[now.last][now.row] = 1; "
        'printf("pair %d %d\\n", now.last, now.row); } '
        'if (now.n > longest) { longest = now.n; printf("longest %d\\n", longest); } }; '
    )
    for i, (target, through, when) in enumerate(case.passes):
        # owed by `when` (or from the start, and anew after each target), paid by `through`
        if when:
            text += f"owed[{i}] = ({_is(case, when)} -> 1 : owed[{i}]); "
        text += f"owed[{i}] = ({_is(case, through)} -> 0 : owed[{i}]); "
        text += f"bad = ({_is(case, target)} && owed[{i}]); {_note(i)}"
        if not when:
            text += f"owed[{i}] = ({_is(case, target)} -> 1 : owed[{i}]); "
        else:
            text += f"owed[{i}] = ({_is(case, target)} -> 0 : owed[{i}]); "
    for i, (event, after, until) in enumerate(case.nevers, len(case.passes)):
        if until:
            text += f"owed[{i}] = ({_is(case, until)} -> 0 : owed[{i}]); "
        text += f"bad = ({_is(case, event)} && owed[{i}]); {_note(i)}"
        text += f"owed[{i}] = ({_is(case, after)} -> 1 : owed[{i}]); "
    return text


def _note(i: int) -> str:
    return (
        f'if :: bad -> c_code {{ if (!broken[{i}]) {{ broken[{i}] = 1; printf("broken %d\\n", {i}); }} }} '
        ":: else fi; bad = 0; "
    )


def _first(case: Case) -> list[int]:
    start = case.graph.states[0].name
    owed = [through != start and (not when or when == start) for _, through, when in case.passes]
    armed = [after == start and until != start for _, after, until in case.nevers]
    return [int(value) for value in (*owed, *armed)]


def _is(case: Case, name: str) -> str:
    """Whether the row that was just taken is an event of a name: by its id, its guard or its target."""
    rows = [i for i, t in enumerate(case.graph.transitions) if name in (t.id, t.id.partition(".")[2], t.target)]
    return "(" + (" || ".join(f"row == {i}" for i in rows) or "false") + ")"
