"""Drivers that make an agent follow a path: ``WitnessDriver`` by examples and real guards, ``force`` by overriding the guards."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from agentfsm.agent import Agent
from agentfsm.errors import AgentfsmError, RunError
from agentfsm.loop.detectors import Example
from agentfsm.loop.envelope import parse_json
from agentfsm.loop.events import UserInputRequested
from agentfsm.loop.failures import Action, Failure, FailureKind
from agentfsm.loop.guardrails import Behavior
from agentfsm.loop.presets import Preset
from agentfsm.loop.state import RunState
from agentfsm.machine.engine import Decision, Machine, Steppable
from agentfsm.machine.graph import Graph, Guard, State, Transition
from agentfsm.runtime.approval import Allow, HumanInput, ItDidNotRun
from agentfsm.runtime.result import RunResult
from agentfsm.runtime.run import Run
from agentfsm.testing.fakes import ScriptedModel
from agentfsm.testing.guard_examples import DEFAULT_TOOLS, GuardExamples, GuardExampleSet
from agentfsm.testing.path_generation import Path, shortest_run_through, small_guardrails, state_space_for
from agentfsm.testing.path_to_scenario import scenario_for_path
from agentfsm.testing.simulation import Scenario, SimulationResult, Simulator

__all__ = ["PathDivergence", "PathDivergenceError", "PathRun", "WitnessDriver", "default_agent", "force", "force_async"]


PERMISSIVE_BEHAVIOR = Behavior(control_tools=True)
"""The rules under which most of the loop's rows can be taken."""


@dataclass(frozen=True, slots=True)
class PathDivergence:
    """Where a run left its path.

    Attributes:
        move_index: How many moves it had made as planned.
        expected: The id of the row that was to be taken, and its target.
        actual: The row that was taken; empty where the run had ended or waited.
        decided_by: The guard that held first, or that did not hold.
        hint: What may be wrong with the path and not with the table.
    """

    move_index: int
    expected: str
    actual: str
    decided_by: str
    hint: str = ""

    def __str__(self) -> str:
        took = self.actual or "nothing: the run was over"
        hint = f"; {self.hint}" if self.hint else ""
        return f"move {self.move_index + 1} was to be {self.expected}, but it was {took} (decided by {self.decided_by!r}){hint}"


INFEASIBLE_PATH_HINT = (
    "no run of this agent takes that path, under its rules: find its paths with --fsm-graph=MODULE:AGENT, "
    "@pytest.mark.fsm(graph=AGENT) or paths(agent)"
)


class PathDivergenceError(AgentfsmError, AssertionError):
    """A run did not take its path.

    Attributes:
        path_run: What happened.
    """

    def __init__(self, path_run: PathRun) -> None:
        self.path_run = path_run
        super().__init__(f"{path_run.path.id}: {path_run.divergence}")


@dataclass(frozen=True, slots=True)
class PathRun:
    """A path, and the run that was to take it.

    Attributes:
        path: The path.
        scenario: What the outside did, or None where guards were forced.
        simulation_result: What became of it.
        divergence: Where the run left the path, or None.
    """

    path: Path
    scenario: Scenario | None
    simulation_result: SimulationResult
    divergence: PathDivergence | None

    @property
    def run_result(self) -> RunResult:
        """What the run came to in the end."""
        return self.simulation_result.run_result

    @property
    def decisions(self) -> list[Decision]:
        """Every move, across waits and power cuts."""
        return self.simulation_result.decisions

    def check(self) -> PathRun:
        """The walk itself.

        Raises:
            PathDivergenceError: The run did not take the path.
        """
        if self.divergence is not None:
            raise PathDivergenceError(self)
        return self


def find_divergence(path: Path, decisions: list[Decision]) -> PathDivergence | None:
    """Where a run left a path, or None."""
    for place, row in enumerate(path.rows):
        if place >= len(decisions):
            return PathDivergence(place, str(row), "", decisions[-1].guard if decisions else "")
        took = decisions[place].transition
        if str(took) != str(row):
            return PathDivergence(place, str(row), str(took), took.name)
    if len(decisions) > len(path.rows):
        took = decisions[len(path.rows)].transition
        return PathDivergence(len(path.rows), "the end", str(took), took.name)
    return None


def default_agent(graph: Graph, behavior: Behavior = PERMISSIVE_BEHAVIOR) -> Agent:
    """An agent to walk a graph with, where nobody has one of their own: with tools of every trait.

    Args:
        graph: The graph.
        behavior: Its rules; by default those under which most rows can be taken.
    """
    output = int if behavior.text_is_answer and not behavior.envelope else None
    return Agent(
        ScriptedModel(), tools=DEFAULT_TOOLS, preset=Preset("bench", behavior=behavior, graph=graph), output_type=output
    )


class WitnessDriver:
    """Walks paths with the real loop: an agent on a stage, and the examples of its guards.

    ::

        witness = WitnessDriver(my_agent)
        witness.check_examples()
        for path in paths(my_agent, "transitions"):
            witness.walk(path).check()  # or a PathDivergenceError that names the guard which stole the path

    Args:
        agent: The agent, or a graph, which is then walked with an agent of the bench.
        examples_for: Examples of guards, by guard, name or row id, beside those that are declared.
        final_answer: A final answer of the model that the agent takes.
    """

    def __init__(
        self,
        agent: Agent | Graph,
        *,
        examples: Mapping[Guard | str, GuardExamples | Example] | None = None,
        final_answer: Any = None,
    ) -> None:
        own = default_agent(agent) if isinstance(agent, Graph) else agent
        tools = {**{t.name: t for t in DEFAULT_TOOLS}, **own.config.tools}
        self._agent = own.with_config(replace(own.config, tools=tools))
        self._final_answer = final_answer if final_answer is not None else "1"
        self._output = "1" if own.config.output_adapter is None else parse_json(self._final_answer)
        self._examples = dict(examples or {})
        self._simulator = Simulator(self._agent, final_answer=self._final_answer)

    def run(
        self,
        path: Path,
        *,
        overrides: Mapping[int, Example] | None = None,
        probe_moves: frozenset[int] = frozenset(),
        extra_call: bool = False,
    ) -> PathRun:
        """Take a path, in an event loop of its own.

        Args:
            path: The path.
            overrides: Examples to use at some moves in place of the guard's first.
            probe_moves: Numbers of moves; before each of these, every guard of the state is asked, for the record.
            extra_call: Whether each batch has a call more than the path runs.

        Raises:
            agentfsm.testing.path_to_scenario.NoExampleError: A guard has no example.
        """
        script = self.scenario_for(path, overrides=overrides, extra_call=extra_call)
        played = self._simulator.run_sync(script, probe_moves=probe_moves, max_moves=len(path.rows) + 1)
        found = find_divergence(path, played.decisions)
        if found is not None and not self._is_feasible(path):
            found = replace(found, hint=INFEASIBLE_PATH_HINT)
        return PathRun(path, script, played, found)

    def _is_feasible(self, path: Path) -> bool:
        """Whether a run of this agent can take a path, as far as its rules tell."""
        agent = self._agent
        places = {row.id: place for place, row in enumerate(agent.graph.transitions)}
        if any(row.id not in places for row in path.rows):
            return True  # it is of another graph, which is another matter
        product = state_space_for(agent.graph, path.guardrails, agent.behavior, agent.config.output_adapter is not None)
        here = {product.initial}
        for row in path.rows:
            here = {after for config in here for taken, after in product.moves(config) if taken == places[row.id]}
        return bool(here)

    def check_examples(self) -> int:
        """Ask every guard on each of its examples, in a run of the real loop that comes to its row.

        Returns:
            How many examples were asked about.

        Raises:
            AssertionError: A guard does not hold with an example of it, or holds with one of what it is not.
        """
        asked = 0
        rules = self._agent.behavior
        product = state_space_for(
            self._agent.graph, small_guardrails(rules), rules, self._agent.config.output_adapter is not None
        )
        for row in self._agent.graph:
            way = shortest_run_through(product, row)
            if row.guard is None or way is None:
                continue
            rows, place = way
            if row.source not in (State.DISPATCH_TOOL, State.POST_TOOL):  # what comes later must not shape the reply
                rows = rows[: place + 1]
            path = Path(0, rows, 1, small_guardrails(rules), rules)
            examples = self.examples_for(path).for_transition(row)
            if examples is None:
                continue
            for wanted, each in ((True, examples.fires_on), (False, examples.silent_on)):
                for number, example in enumerate(each, 1):
                    walk = self.run(path, overrides={place: example}, probe_moves=frozenset((place,)))
                    asked += 1
                    if bool(walk.simulation_result.guard_results.get((place, row.id))) is not wanted:
                        text = "does not fire on its example" if wanted else "fires on its silent example"
                        raise AssertionError(f"{row.id} {text} {number}: {example}")
        return asked

    def examples_for(self, path: Path) -> GuardExampleSet:
        """The examples from which scripts for a path are put together."""
        return GuardExampleSet(path.guardrails, self._agent.behavior, self._examples, self._output)

    def scenario_for(
        self, path: Path, *, overrides: Mapping[int, Example] | None = None, extra_call: bool = False
    ) -> Scenario:
        """What must happen outside for a path to be taken; see ``walk``."""
        return scenario_for_path(
            path,
            self.examples_for(path),
            tools=self._agent.config.tools,
            envelope=self._agent.behavior.envelope,
            final_answer=self._final_answer,
            overrides=overrides,
            extra_call=extra_call,
        )


_DECLARED_ENDINGS = {"declared_done": "done", "declared_unable": "unable"}
_HUMAN_REPLIES: Mapping[str, HumanInput] = {"approval": Allow(), "in_doubt": ItDidNotRun()}


def force(agent: Agent, path: Path, prompt: str = "go") -> PathRun:
    """Make an agent take a path, in an event loop of its own; see ``force_async``.

    ::

        for path in paths(my_agent.graph, "transitions"):
            assert force(my_agent, path).result.state == "terminal"
    """
    return asyncio.run(force_async(agent, path, prompt))


async def force_async(agent: Agent, path: Path, prompt: str = "go") -> PathRun:
    """Make an agent take a path, whatever its guards would say.

    Everything but the guards and the clock is the agent's own: model, tools, policy, hooks and store. A
    move to ``recover`` brings a ``Failure`` of its kind, as its detector would. Waits are answered with
    whatever lets the run go on, and no time passes.

    Args:
        agent: The agent; it is left as it is.
        path: The path, of the agent's graph.
        prompt: The user's message.

    Raises:
        RunError: The path is not one of the agent's graph.
    """
    machine = _ForcedMachine(agent.graph, path)
    played = SimulationResult(decisions=machine.decisions)
    host = replace(agent.config.host, clock=played.clock)
    forced = agent.with_config(replace(agent.config, machine=machine, host=host))
    run = forced.run(prompt)
    while True:
        result = await run
        played.run_results.append(result)
        if not isinstance(result.outcome, UserInputRequested):
            return PathRun(path, None, played, None)
        run = _continue_run(forced, result, machine.next_row)


def _continue_run(agent: Agent, result: RunResult, row: Transition) -> Run:
    outcome: Any = result.outcome
    if row.name in ("cancelled", "expired"):
        return agent.dismiss(outcome.suspension_record)
    return agent.resume(outcome.suspension_record, _HUMAN_REPLIES.get(outcome.kind, "go on"))


class _ForcedMachine(Machine):
    """A machine that asks no guard: it takes the rows of a path, one after the other."""

    def __init__(self, graph: Graph, path: Path) -> None:
        super().__init__(graph)
        self._path = path
        self.decisions: list[Decision] = []

    @property
    def next_row(self) -> Transition:
        """The row that is taken next."""
        place = len(self.decisions)
        if place >= len(self._path.rows):
            raise RunError(f"{self._path.id} does not lead to an end: {len(self._path.rows)} moves, and none is left")
        return self._path.rows[place]

    def would_move(self, trial: Steppable) -> bool:
        """Whatever comes, the path goes on."""
        return True

    def step(self, run: Steppable) -> Decision:
        """Take the path's next row."""
        wanted = self.next_row
        row = self.graph.transition(wanted.id)
        if (row.target, run.state) != (wanted.target, wanted.source):
            raise RunError(f"{self._path.id} is no path of this graph: {wanted} cannot be taken in {run.state!r}")
        rows = self.graph.rows(run.state)
        tried = tuple((r.name, False) for r in rows[: rows.index(row)])
        if isinstance(run, RunState):
            _prepare_state(row, run)
        decision = Decision(row, (*tried, (row.name, True)), _guard_result(row, run))
        run.state = row.target
        self.decisions.append(decision)
        return decision


def _prepare_state(row: Transition, run: RunState) -> None:
    """Let the run know what the row's guard would have seen, so that it ends as such a run does."""
    if row.name == "cancelled":
        run.cancelled = run.cancelled or "forced"
    elif row.name == "aborted":
        run.abort(row.id, RuntimeError("forced"))
    elif row.source == State.CALL_LLM and row.guard is None:
        run.failure = None  # should the model have failed, it did not
    elif row.name in _DECLARED_ENDINGS:
        run.ending = _DECLARED_ENDINGS[row.name]
    elif row.source == State.RECOVER and row.name in Action.__members__:
        run.action = Action(row.name)


def _guard_result(row: Transition, run: Steppable) -> Failure | bool:
    """What the row's detector would have found."""
    kind = {"runaway": "iteration_limit"}.get(row.name, row.name)
    if kind not in FailureKind.__members__ or kind == "aborted":
        return True
    if isinstance(run, RunState) and run.failure is not None and run.failure.kind == kind:
        return run.failure
    return Failure(kind=FailureKind(kind), explanation=f"forced: {row.id}")
