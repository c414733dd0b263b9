"""Time and memory of ``analyse`` for LOOP and for large random graphs, each in a process of its own.

A graph has 50 states and 400 rows. Rows that lead back spend one of several counters, so that every run ends. Half of
the graphs are LOOP with states and rows added. With ``--check``, the exit code is 1 if a bound is missed.
"""

from __future__ import annotations

import random
import resource
import subprocess
import sys
import time

from agentfsm import LOOP
from agentfsm.analysis import Analysis, analyse, must_pass
from agentfsm.machine.declaration import Counter
from agentfsm.machine.graph import Graph, StateSpec, Transition
from tests.helpers.graphs import unasked_guard

STATES, ROWS = 50, 400
LIMITS = (2, 7, 25, 60, 300)
SEEDS = range(8)
MAX_SECONDS, MAX_SECONDS_LOOP, MAX_MB = 20.0, 1.0, 500.0


def _spending(dice: random.Random, counters: tuple[Counter, ...], source: int, target: int) -> str:
    leads_back = target <= source
    return dice.choice(counters).name if leads_back or dice.random() < 0.1 else ""


def large_graph(seed: int) -> Graph:
    """A graph that starts anywhere: rows lead forward, or back at a price, or to a wait."""
    dice = random.Random(seed)
    counters = tuple(Counter(f"budget{n}", limit) for n, limit in enumerate(dice.sample(LIMITS, dice.randint(1, 4))))
    inner = STATES - 2
    names = [f"s{n}" for n in range(inner)]
    free: dict[int, list[Transition]] = {n: [] for n in range(inner)}
    for number in range(ROWS - inner - 2):
        source, target = dice.randrange(inner - 1), dice.randrange(inner + 2)
        guard = unasked_guard(f"guard{number}")
        if target == inner:
            row = Transition(names[source], guard, "end", ends="partial")
        elif target > inner:
            row = Transition(names[source], guard, "wait")
        else:
            row = Transition(names[source], guard, names[target], spends=_spending(dice, counters, source, target))
        free[source].append(row)
    rows: list[Transition] = []
    for n, name in enumerate(names):
        last = n == inner - 1
        default = Transition(name, None, "end" if last else names[n + 1], ends="completed" if last else "")
        rows += [*free[n], default]
    rows += [
        Transition("wait", unasked_guard("expired"), "end", ends="cancelled"),
        Transition("wait", unasked_guard("replied"), names[0], spends=counters[0].name),
    ]
    states = [StateSpec(name) for name in names]
    states += [StateSpec("wait", waits=True), StateSpec("end", final=True)]
    return Graph(tuple(states), tuple(rows), f"random {seed}", counters)


def large_loop(seed: int) -> Graph:
    """LOOP with detours of states of its own between its states, up to the same size."""
    dice = random.Random(seed)
    counter = Counter("detours", dice.choice(LIMITS))
    own = [f"own{n}" for n in range(STATES - len(LOOP.states))]
    states = (*LOOP.states[:-1], *(StateSpec(name, effect=print) for name in own), LOOP.states[-1])
    extra = ROWS - len(LOOP.transitions) - 3 * len(own) - 1
    added: dict[str, list[Transition]] = {}
    targets = ["pre_step", "recover", *own]
    for number in range(extra):
        source, target = dice.choice(own), dice.choice(targets)
        row = Transition(source, unasked_guard(f"guard{number}"), target, spends="detours")
        added.setdefault(source, []).append(row)
    rows: list[Transition] = []
    for row in LOOP.transitions:
        if row.id == "post_tool.otherwise":
            rows.append(Transition("post_tool", unasked_guard("detour"), own[0], spends="detours"))
        rows.append(row)
    for n, name in enumerate(own):
        after = own[n + 1] if n + 1 < len(own) else "pre_step"
        rows += [
            *(Transition(name, t.guard, "terminal", ends=t.ends) for t in LOOP.rows("call_llm")[:2]),
            *added.get(name, ()),
            Transition(name, None, after),
        ]
    return Graph(states, tuple(rows), f"loop {seed}", (*LOOP.counters, counter), LOOP.first)


def _graph(name: str) -> Graph:
    kind, _, seed = name.partition(" ")
    return LOOP if name == "LOOP" else large_loop(int(seed)) if kind == "loop" else large_graph(int(seed))


def _measure(name: str) -> None:
    """Analyse one graph, and print seconds, megabytes, states, rows, and what was decided."""
    graph = _graph(name)
    rule = must_pass("terminal" if name.startswith("loop") else "end", through=graph.states[1].name)
    started = time.process_time()
    found: Analysis = analyse(graph) if name == "LOOP" else analyse(graph, rule)
    seconds = time.process_time() - started
    open_ones = sum(v.holds is None for v in found.verdicts) + bool(found.bounds.limit)
    megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(seconds, megabytes, len(graph.states), len(graph.transitions), open_ones)


def bench_proofs() -> int:
    """Print each graph's figures with their bounds; the number of bounds that were missed."""
    print("Proofs about LOOP and random graphs, processor time and memory of the process")
    missed = 0
    for name in ("LOOP", *(f"{kind} {seed}" for seed in SEEDS for kind in ("random", "loop"))):
        command = [sys.executable, "-m", "tests.benchmarks.analysis_benchmark", "--one", name]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        seconds, megabytes = float(output[0]), float(output[1])
        most = MAX_SECONDS_LOOP if name == "LOOP" else MAX_SECONDS
        met = seconds < most and megabytes < MAX_MB
        missed += not met
        print(
            f"{name:>10} {output[2]:>3} states {output[3]:>4} rows {seconds:>6.2f} s (bound {most:.0f} s) "
            f"{megabytes:>4.0f} MB (bound {MAX_MB:.0f} MB) {output[4]} open  {'met' if met else 'MISSED'}"
        )
    print()
    return missed


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        _measure(sys.argv[2])
    else:
        sys.exit(1 if bench_proofs() and "--check" in sys.argv else 0)
