"""Replays a counterexample of ``agentfsm check`` on the real loop: does a real run do what the model allows?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import islice, product
from typing import Any

from agentfsm.agent import Agent
from agentfsm.analysis import Verdict
from agentfsm.errors import ConfigurationError
from agentfsm.loop.detectors import Example
from agentfsm.loop.guardrails import AgentGuardrails
from agentfsm.loop.presets import Preset
from agentfsm.machine.graph import Graph, Transition
from agentfsm.testing.guard_examples import GuardExamples, GuardExampleSet
from agentfsm.testing.path_generation import (
    Path,
    graph_of,
    shortest_run_to_end,
    small_guardrails,
    state_space_for,
    traits_of,
)
from agentfsm.testing.path_runner import WitnessDriver, default_agent
from agentfsm.testing.path_to_scenario import NoExampleError
from agentfsm.testing.tool_calls import approval_cases

MAX_ATTEMPTS = 100
"""Runs in which events are tried that might make guards without examples hold."""

CALLS_PER_TOOL = 8
"""Calls of each tool that are tried."""


@dataclass(frozen=True, slots=True)
class CounterexampleReplay:
    """What became of a counterexample on the real loop.

    Attributes:
        real: Whether a run took it; None if it could not be replayed.
        reason: Why not.
        taken: The ids of the rows that the run took.
        found: By the id of a row, an event that made its guard hold; for guards without examples.
    """

    real: bool | None
    reason: str
    taken: tuple[str, ...]
    found: Mapping[str, Example] = field(default_factory=dict[str, Example])

    def __str__(self) -> str:
        word = {True: "real", False: "spurious", None: "not replayed"}[self.real]
        found = "".join(f"; {row} held with {_short(example)}" for row, example in self.found.items())
        return f"{word}: {self.reason or 'a run took ' + ', '.join(self.taken)}{found}"


def replay_counterexample(
    source: Graph | Preset | Agent[Any, Any],
    rows: Sequence[str],
    loop: Sequence[str] = (),
    *,
    times: int = 3,
    guardrails: AgentGuardrails | None = None,
    examples: Mapping[Any, GuardExamples | Example] | None = None,
) -> CounterexampleReplay:
    """Replay a counterexample on the real loop, in an event loop of its own.

    The examples of its guards make up a scenario (``WitnessDriver``). If a run in it takes other rows, the
    counterexample is spurious: a guard depends on something that the model does not know, and an assumption about it
    (``agentfsm.analysis.Assumptions``) rules it out. For guards without examples, calls of the agent's tools, replies
    and results are tried; if a run takes the counterexample with any of them, it is real, and otherwise nobody knows.

    Args:
        source: The graph, preset or agent that was checked.
        rows: The ids of its rows, from the first move (``Verdict.path``).
        loop: The ids of rows that can then repeat forever (``Verdict.loop``).
        times: How many times to go round the loop.
        guardrails: The limits of the run; by default an agent's own, else small ones.
        examples: Examples of guards, by guard, guard name or row id.

    Raises:
        GraphError: A row does not exist.
        ConfigurationError: ``source`` is not a graph, a preset or an agent.
        RunError: An event loop is running in this thread.
    """
    graph, behavior, _ = graph_of(source)
    wanted = tuple(graph.transition(row) for row in (*rows, *tuple(loop) * times))
    limits = guardrails or (source.guardrails if isinstance(source, Agent) else small_guardrails(behavior))
    space = state_space_for(graph, limits, traits_of(source))
    places = {row.id: place for place, row in enumerate(graph.transitions)}
    here = {space.initial}
    for row in wanted:
        here = {after for config in here for taken, after in space.moves(config) if taken == places[row.id]} or {
            (space.state_index[row.target], *space.initial[1:])
        }
    end = tuple(graph.transitions[place] for place in shortest_run_to_end(space, min(here)))
    agent = source if isinstance(source, Agent) else _agent_for(source, graph)
    path = Path(1, (*wanted, *end), limits, behavior)
    known = GuardExampleSet(graph, limits, agent.config.behavior, examples)
    unknown = list(dict.fromkeys(row.id for row in path.rows if known.for_transition(row) is None))
    if not unknown:
        return _replay(agent, path, wanted, examples or {})
    for tried in islice(product(_possible_events(agent), repeat=len(unknown)), MAX_ATTEMPTS):
        found = dict(zip(unknown, tried, strict=True))
        replay = _replay(agent, path, wanted, {**(examples or {}), **found})
        if replay.real:
            return replace(replay, found=found)
    return CounterexampleReplay(None, _lacking(graph, unknown), ())


def _replay(
    agent: Agent[Any, Any], path: Path, wanted: Sequence[Transition], examples: Mapping[Any, GuardExamples | Example]
) -> CounterexampleReplay:
    try:
        run = WitnessDriver(agent, examples=examples, tools="checked").run(path)
    except NoExampleError as error:
        return CounterexampleReplay(None, str(error), ())
    taken = tuple(str(d.transition.id) for d in run.decisions)
    left = next((i for i, row in enumerate(wanted) if i >= len(taken) or taken[i] != row.id), None)
    if left is None:
        return CounterexampleReplay(True, "", taken[: len(wanted)])
    return CounterexampleReplay(False, _why(wanted[left], taken, left), taken)


def _possible_events(agent: Agent[Any, Any]) -> Iterator[Example]:
    """Events that might make a guard hold of which nothing is known."""
    yield Example()
    for own in agent.config.tools.values():
        if own.control is None:
            yield from (Example(call=case.call) for case in approval_cases(own, agent.graph)[:CALLS_PER_TOOL])
    yield from (Example(result=result) for result in (RuntimeError("it broke"), OSError("the disk is full"), "none"))
    yield from (Example(reply=reply) for reply in ("done", "  "))


def _lacking(graph: Graph, rows: Sequence[str]) -> str:
    guards = [graph.transition(row).name for row in rows]
    wanted = ", ".join(f"{guard!r}: Example(...)" for guard in guards)
    return (
        f"no event that was tried made {' and '.join(guards)} hold where the counterexample needs it: give an example, "
        f"as EXAMPLES = {{{wanted}}} here or as @detector(fires_on=[Example(...)]) on the guard"
    )


def _short(example: Example) -> str:
    """An example without what it leaves as it is by default."""
    given = [
        f"{each.name}={getattr(example, each.name)!r}"
        for each in fields(example)
        if getattr(example, each.name) != each.default
    ]
    return f"Example({', '.join(given)})"


def _agent_for(source: Graph | Preset, graph: Graph) -> Agent[Any, Any]:
    return default_agent(graph) if isinstance(source, Graph) else default_agent(graph, source.behavior)


def _why(expected: Transition, taken: Sequence[str], index: int) -> str:
    instead = taken[index] if index < len(taken) else "nothing"
    return f"move {index + 1} should be {expected.id}, and the run took {instead}"


def counterexample_test(source: str, verdict: Verdict, limits: Mapping[str, Any] | None = None) -> str:
    """The text of a pytest file that replays a counterexample, and fails if a real run takes it.

    Args:
        source: What was checked, as ``MODULE:NAME`` or ``FILE.py:NAME``.
        verdict: The property that does not hold.
        limits: The limits with which it was checked, as arguments of ``AgentGuardrails``; None for those of the source.

    Raises:
        ConfigurationError: The verdict has no counterexample.
    """
    if not verdict.path and not verdict.loop:
        raise ConfigurationError(f"there is no counterexample to {verdict.text!r}")
    given = ", ".join(f"{name}={value!r}" for name, value in (limits or {}).items())
    guardrails = f"AgentGuardrails({given})" if limits else "None"
    return f'''"""Replays a counterexample to: {verdict.text}. Written by ``agentfsm check``."""

from agentfsm import AgentGuardrails
from agentfsm.cli.user_code import load_graph_and_owner
from agentfsm.testing import Example, call
from agentfsm.testing.counterexample import replay_counterexample

SOURCE = {source!r}
ROWS = {_listed(verdict.path)}
REPEATED = {_listed(verdict.loop)}
GUARDRAILS = {guardrails}
# When guards of yours hold, as {{"my_guard": Example(call=call("my_tool", n=1))}}; for others, events are tried.
EXAMPLES = {{}}


def test_no_run_takes_the_counterexample():
    """It fails if a real run takes it; then the graph is wrong, and not only the model."""
    graph = load_graph_and_owner(SOURCE)[1]
    replay = replay_counterexample(graph, ROWS, REPEATED, guardrails=GUARDRAILS, examples=EXAMPLES)
    print(replay)
    assert replay.real is False, str(replay)
'''


def _listed(rows: Sequence[str]) -> str:
    return "[" + "".join(f"\n    {str(row)!r}," for row in rows) + "\n]" if rows else "[]"
