"""Replays a counterexample of ``agentfsm check`` on the real loop: does a real run do what the model allows?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentfsm.agent import Agent
from agentfsm.analysis import Verdict
from agentfsm.errors import ConfigurationError
from agentfsm.loop.guardrails import AgentGuardrails
from agentfsm.loop.presets import Preset
from agentfsm.machine.graph import Graph, Transition
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

__all__ = ["CounterexampleReplay", "counterexample_test", "replay_counterexample"]


@dataclass(frozen=True, slots=True)
class CounterexampleReplay:
    """What became of a counterexample on the real loop.

    Attributes:
        real: Whether a run took it; None if it could not be replayed.
        reason: Why not.
        taken: The ids of the rows that the run took.
    """

    real: bool | None
    reason: str
    taken: tuple[str, ...]

    def __str__(self) -> str:
        word = {True: "real", False: "spurious", None: "not replayed"}[self.real]
        return f"{word}: {self.reason or 'a run took ' + ', '.join(self.taken)}"


def replay_counterexample(
    source: Graph | Preset | Agent[Any, Any],
    rows: Sequence[str],
    loop: Sequence[str] = (),
    *,
    times: int = 3,
    guardrails: AgentGuardrails | None = None,
) -> CounterexampleReplay:
    """Replay a counterexample on the real loop, in an event loop of its own.

    The examples of its guards make up a scenario (``WitnessDriver``). If a run in it takes other rows, the
    counterexample is spurious: a guard depends on something that the model does not know, and an assumption about it
    (``agentfsm.analysis.Assumptions``) rules it out.

    Args:
        source: The graph, preset or agent that was checked.
        rows: The ids of its rows, from the first move (``Verdict.path``).
        loop: The ids of rows that can then repeat forever (``Verdict.loop``).
        times: How many times to go round the loop.
        guardrails: The limits of the run; by default an agent's own, else small ones.

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
    path = Path(1, (*wanted, *end), 0, limits, behavior)
    try:
        run = WitnessDriver(agent).run(path)
    except NoExampleError as error:
        return CounterexampleReplay(None, str(error), ())
    taken = tuple(str(d.transition.id) for d in run.decisions)
    left = next((i for i, row in enumerate(wanted) if i >= len(taken) or taken[i] != row.id), None)
    if left is None:
        return CounterexampleReplay(True, "", taken[: len(wanted)])
    return CounterexampleReplay(False, _why(wanted[left], taken, left), taken)


def _agent_for(source: Graph | Preset, graph: Graph) -> Agent[Any, Any]:
    return default_agent(graph) if isinstance(source, Graph) else default_agent(graph, source.behavior)


def _why(expected: Transition, taken: Sequence[str], index: int) -> str:
    instead = taken[index] if index < len(taken) else "nothing"
    return f"move {index + 1} should be {expected.id}, and the run took {instead}"


def counterexample_test(source: str, verdict: Verdict) -> str:
    """The text of a pytest file that replays a counterexample, and fails if a real run takes it.

    Args:
        source: What was checked, as ``MODULE:NAME`` or ``FILE.py:NAME``.
        verdict: The property that does not hold.

    Raises:
        ConfigurationError: The verdict has no counterexample.
    """
    if not verdict.path and not verdict.loop:
        raise ConfigurationError(f"there is no counterexample to {verdict.text!r}")
    rows = "".join(f"\n    {str(row)!r}," for row in verdict.path)
    loop = "".join(f"\n    {str(row)!r}," for row in verdict.loop)
    return f'''"""Replays a counterexample to: {verdict.text}. Written by ``agentfsm check``."""

from agentfsm.cli.user_code import load_graph_and_owner
from agentfsm.testing.counterexample import replay_counterexample

SOURCE = {source!r}
ROWS = ({rows}
)
LOOP = ({loop}
)


def test_no_run_takes_the_counterexample():
    """It fails if a real run takes it; then the graph is wrong, and not only the model."""
    replay = replay_counterexample(load_graph_and_owner(SOURCE)[1], ROWS, LOOP)
    print(replay)
    assert replay.real is False, str(replay)
'''
