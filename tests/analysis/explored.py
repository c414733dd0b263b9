"""What ``spin`` sees of a table when it walks all of it: every move between configurations, and the most calls.

Whether the end can still be reached from everywhere is no property of single runs, so no formula of spin's
says it. Spin walks the whole model here and prints each move; from those, ten plain lines find out.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from agentfsm.analysis.promela import options
from tests.analysis.spin import Case, spin

MOST = 60
"""So many calls are any number of calls here."""

MOVES, MODEL_IN_ALL, TOOLS_IN_ALL, MODEL_BETWEEN, TOOLS_BETWEEN = range(5)
"""What a run of the model is asked for."""


@dataclass(frozen=True)
class Explored:
    """What came out about one table.

    Attributes:
        ends: Whether the end can be reached from every configuration.
        configurations: How many there are.
        most: Model calls and tool calls in all, then between two waits; None stands for any number.
    """

    ends: bool
    configurations: int
    most: tuple[int | None, ...]


def explore(cases: list[Case], folder: Path) -> list[Explored]:
    """What spin sees of each case; the test is skipped where spin is not."""
    program = spin()
    (folder / "walk.pml").write_text(_text(cases), encoding="utf-8")
    subprocess.run([program, "-a", "walk.pml"], cwd=folder, check=True, capture_output=True)
    compiler = ["gcc", "-w", "-O1", "-DMEMLIM=2000", "-DNOREDUCE", "-DSAFETY", "-o", "walk", "pan.c"]
    subprocess.run(compiler, cwd=folder, check=True, capture_output=True)
    return [_explored(folder, number) for number in range(len(cases))]


def _explored(folder: Path, number: int) -> Explored:
    lines = [line.split() for line in _walk(folder, number, MOVES)]
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
    most = tuple(_most(folder, number, what) for what in range(MODEL_IN_ALL, TOOLS_BETWEEN + 1))
    return Explored(every == good, len(every), most)


def _most(folder: Path, number: int, what: int) -> int | None:
    found = max(int(line.split()[1]) for line in _walk(folder, number, what) if line.startswith("most"))
    return found if found < MOST else None


def _walk(folder: Path, number: int, what: int) -> list[str]:
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


def _text(cases: list[Case]) -> str:
    counters = sorted({c.name for case in cases for c in case.facts.counters})
    mixed = " ".join(f"h = (h ^ (unsigned short) now.c_{name}) * 1099511628211ull;" for name in counters)
    lines = [
        "c_decl { static unsigned long long from; static int most = -1; }",
        "byte g; byte what; byte state = 0; bool rest; short sum;",
        "hidden byte row; hidden byte last;",
        *(f"short c_{name}; hidden short n_{name};" for name in counters),
        "c_code { static unsigned long long here(void) { unsigned long long h = 14695981039346656037ull;"
        f" h = (h ^ now.state) * 1099511628211ull; {mixed} return h; }} }};",
        "active proctype moves() {",
        '  d_step { c_code { now.g = atoi(getenv("CASE")); now.what = atoi(getenv("WHAT")); };',
        "    if",
    ]
    for number, case in enumerate(cases):
        starts = [f"c_{c.name} = {c.start};" for c in case.facts.counters]
        first = case.graph.states[0]
        rests = int(first.waits or first.final)
        said = f'c_code {{ printf("start %llx {int(first.final)}\\n", here()); printf("most 0\\n"); }};'
        lines.append(f"    :: g == {number} -> {' '.join(starts)} rest = {rests}; {said}")
    lines += ["    fi }", "  do"]
    for number, case in enumerate(cases):
        finals = " || ".join(f"state == {i}" for i, s in enumerate(case.graph.states) if s.final)
        lines.append(f"  :: g == {number} && !({finals}) -> atomic {{ if")
        for option in options(case.graph, case.facts):
            guard, arrow, effect = option.partition(" -> ")
            lines.append(f"    :: {guard}{arrow}c_code {{ from = here(); }}; {effect}")
        lines += ["    fi;", f"    d_step {{ {_after(case, finals)} }} }}"]
        lines.append(f"  :: g == {number} && ({finals}) -> break")
    lines += ["  od", "}"]
    return "\n".join(lines) + "\n"


def _after(case: Case, finals: str) -> str:
    """What follows each move: calls are summed up, or from the last wait on, and all is told."""
    table = case.graph.transitions
    model = [i for i, t in enumerate(table) if t.source == "call_llm"]
    tools = [i for i, t in enumerate(table) if t.source == "dispatch_tool" and t.guard is None]
    rests = " || ".join(f"state == {i}" for i, s in enumerate(case.graph.states) if s.waits or s.final)
    counted = [
        f"((what == {a} || what == {b}) && ({' || '.join(f'row == {i}' for i in rows) or 'false'}))"
        for a, b, rows in ((MODEL_IN_ALL, MODEL_BETWEEN, model), (TOOLS_IN_ALL, TOOLS_BETWEEN, tools))
    ]
    return (
        f"sum = ((what >= {MODEL_BETWEEN} && rest) -> 0 : sum); "
        f"sum = (({' || '.join(counted)}) && sum < {MOST} -> sum + 1 : sum); rest = ({rests}); "
        f"if :: ({finals}) -> last = 1 :: else -> last = 0 fi; "
        "c_code { if (now.sum > most) { most = now.sum; "
        'printf("most %d\\n", most); } '
        f'if (now.what == {MOVES}) printf("move %llx %llx %d\\n", from, here(), last); }}'
    )
