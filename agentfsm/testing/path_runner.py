"""Run a path as a test: ``WitnessDriver`` plays examples to the real guards, ``force`` overrides the guards."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from agentfsm.agent import Agent
from agentfsm.agent.agent_options import missing_rows
from agentfsm.analysis.state_space import StateSpace
from agentfsm.errors import AgentfsmError, ConfigurationError, RunError
from agentfsm.loop import detectors as d
from agentfsm.loop import guards
from agentfsm.loop.detectors import DEFAULT_RESULT, Example
from agentfsm.loop.events import UserInputRequested
from agentfsm.loop.failures import Action, Failure, FailureKind
from agentfsm.loop.guardrails import AgentGuardrails, Behavior
from agentfsm.loop.human_input import Allow, HumanInput, ItDidNotRun
from agentfsm.loop.outcomes import CALL_MODEL, CHOOSE_RECOVERY, JUDGE_RESULTS, RUN_CALLS
from agentfsm.loop.presets import Preset
from agentfsm.loop.reply_reader import parse_json
from agentfsm.loop.state import RunState
from agentfsm.loop.transition_table import BUILT_IN_GUARDS
from agentfsm.machine.declaration import guard_name
from agentfsm.machine.engine import Decision, Machine, Steppable
from agentfsm.machine.graph import Graph, Guard, Transition
from agentfsm.runtime.control_tools import CONTROL_TOOLS
from agentfsm.runtime.result import RunResult
from agentfsm.runtime.run import Run
from agentfsm.testing.fakes import ScriptedModel
from agentfsm.testing.guard_examples import DEFAULT_TOOLS, GuardExamples, GuardExampleSet
from agentfsm.testing.invariants import counted_as_declared
from agentfsm.testing.path_assumptions import loop_guard
from agentfsm.testing.path_generation import (
    Infeasible,
    Path,
    infeasibility_reason,
    paths,
    reachable_configurations,
    requirements,
    shortest_run_through,
    small_guardrails,
    state_space_for,
    traits_of,
)
from agentfsm.testing.path_to_scenario import (
    NoExampleError,
    Step,
    scenario_for_path,
    steps_of,
)
from agentfsm.testing.simulation import (
    RUN_TOOL,
    GuardError,
    ModelTurn,
    Scenario,
    SimulationResult,
    Simulator,
    run_in_own_loop,
)
from agentfsm.testing.tool_calls import OwnCalls, enveloped_call

PERMISSIVE_BEHAVIOR = Behavior(control_tools=True)
"""The behavior under which most rows of the loop can be taken."""


@dataclass(frozen=True, slots=True)
class PathDivergence:
    """Where a run left its path.

    Attributes:
        move_index: How many transitions it took as planned.
        expected: The row that the path takes, as ``row id -> target``.
        actual: The row that was taken; empty if the run had ended or was suspended.
        decided_by: The guard that was true first, or the guard that was not true.
        hint: What the guard found, or what may be wrong with the path rather than with the table.
    """

    move_index: int
    expected: str
    actual: str
    decided_by: str
    hint: str = ""

    def __str__(self) -> str:
        actual = self.actual or "nothing: the run was over"
        hint = f"; {self.hint}" if self.hint else ""
        expected = f"transition {self.move_index + 1} should be {self.expected}"
        return f"{expected}, but it was {actual} (decided by {self.decided_by!r}){hint}"


CALLS_CHECKED = 2
"""For each tool, calls that need approval, and calls that do not, to check."""

MAX_CHECK_MOVES = 50
"""After so many transitions, a run with one call has shown what it can show."""

INFEASIBLE_PATH_HINT = (
    "no run of this agent can take that path: generate its paths with --fsm-graph=MODULE:AGENT, "
    "@pytest.mark.fsm(graph=AGENT) or paths(agent)"
)


class PathDivergenceError(AgentfsmError, AssertionError):
    """A run did not take its path.

    Attributes:
        path_run: The run, with the transition at which it left the path.
    """

    def __init__(self, path_run: PathRun) -> None:
        self.path_run = path_run
        super().__init__(f"{path_run.path.id}: {path_run.divergence}")


@dataclass(frozen=True, slots=True)
class PathRun:
    """The run of a path.

    Attributes:
        path: The path.
        scenario: What the outside world did; None if guards were overridden.
        simulation_result: The result.
        divergence: Where the run left the path; None if it took the whole path.
    """

    path: Path
    scenario: Scenario | None
    simulation_result: SimulationResult
    divergence: PathDivergence | None

    @property
    def run_result(self) -> RunResult[Any]:
        """The last result of the run."""
        return self.simulation_result.run_result

    @property
    def decisions(self) -> list[Decision]:
        """Every transition taken, across suspensions and crashes."""
        return self.simulation_result.decisions

    def check(self) -> PathRun:
        """This object, if the run took its path, and counted on it what is declared.

        Raises:
            PathDivergenceError: The run did not take the path.
            AssertionError: A counter is not what the rows of the path declare (``invariants.counted_as_declared``).
        """
        if self.divergence is not None:
            raise PathDivergenceError(self)
        if self.simulation_result.run_results:
            counted_as_declared(self.simulation_result)
        return self


def find_divergence(path: Path, decisions: list[Decision]) -> PathDivergence | None:
    """Where a run left a path; None if it took the whole path."""
    for index, row in enumerate(path.rows):
        if index >= len(decisions):
            return PathDivergence(index, str(row), "", decisions[-1].guard if decisions else "")
        actual = decisions[index].transition
        if str(actual) != str(row):
            found = decisions[index].guard_result
            why = found.explanation if isinstance(found, Failure) else ""
            return PathDivergence(index, str(row), str(actual), actual.name, why)
    if len(decisions) > len(path.rows):
        actual = decisions[len(path.rows)].transition
        return PathDivergence(len(path.rows), "the end", str(actual), actual.name)
    return None


def default_agent(graph: Graph, behavior: Behavior = PERMISSIVE_BEHAVIOR) -> Agent[Any, Any]:
    """An agent for running the paths of a graph, with those tools of every combination of options that it has rows for.

    Args:
        graph: The graph.
        behavior: The agent's behavior; by default the one under which most rows can be taken.
    """
    output = int if behavior.text_is_answer and not behavior.envelope else None
    tools = [each for each in DEFAULT_TOOLS if not any(missing_rows(graph, each))]
    control = [each for each in CONTROL_TOOLS.values() if not any(missing_rows(graph, each))]
    if behavior.control_tools and len(control) < len(CONTROL_TOOLS):
        behavior = behavior.model_copy(update={"control_tools": False})
        tools += control
    return Agent(
        ScriptedModel(), tools=tools, preset=Preset("bench", behavior=behavior, graph=graph), output_type=output
    )


class WitnessDriver:
    """Runs paths through the real loop: the guards' examples make up a scenario, and a simulated agent runs it.

    ::

        driver = WitnessDriver(my_agent)
        driver.check_examples()
        for path in paths(my_agent, "transitions"):
            driver.run(path).check()  # or a PathDivergenceError that names the guard which decided otherwise

    Args:
        agent: The agent; or a graph, which is then run by ``default_agent(graph)``.
        examples: Examples of guards, by guard, guard name or row id; they take precedence over declared ones.
        final_answer: A final answer of the model that the agent accepts.
        tools: How much of the agent's own tools takes part. ``scripted``: paths call tools made for the purpose, and a
            hook requests the approvals. ``checked``: wherever they have the options that a path needs, they call the
            agent's tools with arguments that fit, so that the approval rules and the validation decide; the results
            are scripted. ``real``: the functions run as well, wherever the path needs a success.
        deps: The dependencies of the runs, for the agent's own hooks, approval rules and tools.

    Raises:
        ConfigurationError: ``tools`` is something else.
    """

    def __init__(
        self,
        agent: Agent[Any, Any] | Graph,
        *,
        examples: Mapping[Any, GuardExamples | Example] | None = None,
        final_answer: Any = None,
        tools: Literal["scripted", "checked", "real"] = "scripted",
        deps: Any = None,
    ) -> None:
        if tools not in ("scripted", "checked", "real"):
            raise ConfigurationError(f"tools={tools!r}: choose 'scripted', 'checked' or 'real'")
        own = default_agent(agent) if isinstance(agent, Graph) else agent
        every_tool = {**{t.name: t for t in DEFAULT_TOOLS}, **own.config.tools}
        self._agent = own.with_config(replace(own.config, tools=every_tool))
        self._final_answer = final_answer if final_answer is not None else "1"
        self._output = "1" if own.config.output_adapter is None else parse_json(self._final_answer)
        self._examples = dict(examples or {})
        self._spaces: dict[AgentGuardrails, StateSpace] = {}
        self._deps = deps
        self._simulator = Simulator(self._agent, final_answer=self._final_answer, deps=deps)
        self._runs_tools = tools == "real"
        self._own_calls: OwnCalls | None = None
        if tools != "scripted":
            named = [e for each in self._examples.values() for e in _every_example(each)]
            self._own_calls = OwnCalls(own.config.tools, own.graph, named)

    @property
    def graph(self) -> Graph:
        """The graph of the agent."""
        return self._agent.graph

    def run(
        self,
        path: Path,
        *,
        overrides: Mapping[int, Example] | None = None,
        probe_moves: frozenset[int] = frozenset(),
        extra_call: bool = False,
    ) -> PathRun:
        """The run of a path, in an event loop of its own; in an async test, await ``run_async`` instead.

        Arguments and errors as for ``run_async``; and:

        Raises:
            RunError: An event loop is running in this thread.
        """
        work = self.run_async(path, overrides=overrides, probe_moves=probe_moves, extra_call=extra_call)
        return run_in_own_loop(work, "await driver.run_async(path)")

    async def run_async(
        self,
        path: Path,
        *,
        overrides: Mapping[int, Example] | None = None,
        probe_moves: frozenset[int] = frozenset(),
        extra_call: bool = False,
    ) -> PathRun:
        """The run of a path. A driver makes one run at a time.

        ::

            async def test_every_path(fsm_path):
                (await WitnessDriver(AGENT).run_async(fsm_path)).check()

        Args:
            path: The path.
            overrides: By transition index, the example to use instead of the guard's first one.
            probe_moves: Before each of these transitions (numbered from 0), every guard of the state is evaluated and
                recorded in the result's ``guard_results``.
            extra_call: Whether each batch has one call more than the path executes.

        Raises:
            agentfsm.testing.path_to_scenario.NoExampleError: A guard has no example.
        """
        scenario = self.scenario_for(path, overrides=overrides, extra_call=extra_call)
        result = await self._simulator.run(scenario, probe_moves=probe_moves, max_moves=len(path.rows) + 1)
        divergence = find_divergence(path, result.decisions)
        if divergence is not None and not self._is_feasible(path):
            divergence = replace(divergence, hint=INFEASIBLE_PATH_HINT)
        elif divergence is not None and divergence.decided_by == "aborted" and result.run_results:
            aborted = result.run_result.run_state.aborted
            divergence = replace(divergence, hint=aborted.explanation if aborted is not None else "")
        return PathRun(path, scenario, result, divergence)

    def _state_space(self, guardrails: AgentGuardrails) -> StateSpace:
        """The state space of the agent under given limits, which is made once."""
        if guardrails not in self._spaces:
            self._spaces[guardrails] = state_space_for(self.graph, guardrails, traits_of(self._agent))
        return self._spaces[guardrails]

    def _is_feasible(self, path: Path) -> bool:
        """Whether a run of this agent can take a path, as far as its behavior and limits tell."""
        agent = self._agent
        row_numbers = {row.id: number for number, row in enumerate(agent.graph.transitions)}
        if any(row.id not in row_numbers for row in path.rows):
            return True  # a path of another graph: nothing is known about it
        space = self._state_space(path.guardrails)
        reached = {space.initial}
        for row in path.rows:
            number = row_numbers[row.id]
            reached = {after for config in reached for taken, after in space.moves(config) if taken == number}
        return bool(reached)

    def check_examples(self) -> int:
        """Evaluate every guard on each of its examples, in an event loop of its own; see ``check_examples_async``."""
        return run_in_own_loop(self.check_examples_async(), "await driver.check_examples_async()")

    async def check_examples_async(self) -> int:
        """Evaluate every guard on each of its examples, in a run of the real loop that reaches the guard's row.

        Returns:
            The number of examples checked.

        Raises:
            AssertionError: A guard is false for an example in ``fires_on``, or true for one in ``silent_on``, or it
                raises.
        """
        checked = 0
        for path, index in self._paths_to_guards():
            row = path.rows[index]
            examples = self.examples_for(path).for_transition(row)
            if examples is None:
                continue
            for expected, group in ((True, examples.fires_on), (False, examples.silent_on)):
                for number, example in enumerate(group, 1):
                    path_run = await self.run_async(path, overrides={index: example}, probe_moves=frozenset((index,)))
                    checked += 1
                    answer = path_run.simulation_result.guard_results.get((index, row.id))
                    if isinstance(answer, GuardError):
                        raise AssertionError(f"{row.id} raises on example {number}: {example}") from answer.error
                    if bool(answer) is not expected:
                        text = "does not fire on its example" if expected else "fires on its silent example"
                        raise AssertionError(f"{row.id} {text} {number}: {example}")
        return checked

    def check_tools(self) -> int:
        """Call each of the agent's own tools, in an event loop of its own; see ``check_tools_async``."""
        return run_in_own_loop(self.check_tools_async(), "await driver.check_tools_async()")

    async def check_tools_async(self) -> int:
        """Call each of the agent's own tools in the real loop, with arguments that need approval and with others.

        The approval that a tool's rule, or a hook, requires is granted. With ``tools="real"`` the functions run.

        Returns:
            The number of calls.

        Raises:
            AssertionError: The agent did not request approval of a call that needs it, or a call failed.
            ConfigurationError: The driver was made with ``tools="scripted"``.
        """
        if self._own_calls is None:
            raise ConfigurationError("to check the agent's tools, make the driver with tools='checked' or tools='real'")
        checked = 0
        for case in self._own_calls.cases(CALLS_CHECKED):
            reply = enveloped_call(case.call) if self._agent.behavior.envelope else [case.call]
            results = (RUN_TOOL,) if self._runs_tools else ()
            scenario = Scenario((ModelTurn(reply),), results, human_replies=(Allow(),))
            simulator = Simulator(self._agent, final_answer=self._final_answer, side_events=False, deps=self._deps)
            result = await simulator.run(scenario, max_moves=MAX_CHECK_MOVES)
            checked += 1
            steps = steps_of(self.graph, [d.transition for d in result.decisions])
            second = [i for i, step in enumerate(steps) if step.effect is CALL_MODEL][1:2]
            decisions = result.decisions[: second[0]] if second else result.decisions  # what the call led to
            if case.required and not any(s.guard is guards.approval_required for s in steps[: len(decisions)]):
                raise AssertionError(f"{case} needs approval, which was not requested")
            failures = (d.guard_result for d in decisions if isinstance(d.guard_result, Failure))
            failure = next(failures, None)
            if failure is not None:
                raise AssertionError(f"{case} failed: {failure.explanation}")
        return checked

    def _paths_to_guards(self) -> Iterator[tuple[Path, int]]:
        """For each row with a guard, a shortest path that takes it, and the row's index in that path."""
        behavior = self._agent.behavior
        guardrails = small_guardrails(behavior)
        space = self._state_space(guardrails)
        for row in self.graph:
            run_through = shortest_run_through(space, row)
            if row.guard is None or run_through is None:
                continue
            rows, index = run_through
            if self.graph.spec(row.source).effect not in (RUN_CALLS, JUDGE_RESULTS):
                rows = rows[: index + 1]  # later rows must not change the reply
            yield Path(0, rows, guardrails, behavior), index

    def undriven_rows(self) -> list[Infeasible]:
        """The rows of the graph that no path of this driver takes, each with the reason, in table order.

        No run of the agent reaches such a row, or its guard or one on the way to it has no example.
        """
        behavior = self._agent.behavior
        guardrails = small_guardrails(behavior)
        space = self._state_space(guardrails)
        reached = reachable_configurations(space, required := requirements(self.graph, "transitions"))
        found: list[Infeasible] = []
        for row, requirement in zip(self.graph, required, strict=True):
            run_through = shortest_run_through(space, row)
            if run_through is None:
                found.append(Infeasible((row.id,), infeasibility_reason(space, requirement, reached)))
                continue
            try:
                self.scenario_for(Path(0, run_through[0], guardrails, behavior))
            except NoExampleError as error:
                found.append(Infeasible((row.id,), str(error)))
        return found

    def examples_for(self, path: Path) -> GuardExampleSet:
        """The examples from which the scenario of a path is built."""
        return GuardExampleSet(self.graph, path.guardrails, self._agent.behavior, self._examples, self._output)

    def scenario_for(
        self, path: Path, *, overrides: Mapping[int, Example] | None = None, extra_call: bool = False
    ) -> Scenario:
        """The scenario in which a run takes a path; arguments as for ``run``.

        Raises:
            agentfsm.testing.path_to_scenario.NoExampleError: A guard has no example.
        """
        scenario = scenario_for_path(
            path,
            self.graph,
            self.examples_for(path),
            tools=self._agent.config.tools,
            envelope=self._agent.behavior.envelope,
            final_answer=self._final_answer,
            overrides=overrides,
            extra_call=extra_call,
            own_calls=self._own_calls,
        )
        if not self._runs_tools:
            return scenario
        results = tuple(RUN_TOOL if result is DEFAULT_RESULT else result for result in scenario.tool_results)
        return replace(scenario, tool_results=results)


LIMITS = frozenset({d.runaway, d.iteration_limit, d.time_limit, d.token_limit, d.cost_limit, d.no_progress}) | {
    d.repeated_error,
    d.loop_detected,
}
"""Guards that are true soon under small guardrails."""


def scenarios_through_rows(agent: Agent[Any, Any]) -> Iterator[Scenario]:
    """For each row that a run of an agent can take, the scenario of a shortest run that takes it.

    It has guardrails of its own if the run reaches a limit. Rows that need a guard without examples are
    left out, and named in a warning.
    """
    behavior = agent.behavior
    guardrails = small_guardrails(behavior)
    space = state_space_for(agent.graph, guardrails, traits_of(agent))
    driver = WitnessDriver(agent)
    left_out: list[str] = []
    for row in agent.graph:
        found = shortest_run_through(space, row)
        if found is not None:
            scenarios = list(_scenarios(driver, [Path(0, found[0], guardrails, behavior)]))
            left_out += [] if scenarios else [row.id]
            yield from scenarios
    if left_out:
        warnings.warn(
            f"no scenario is made for {', '.join(left_out)}: a guard has no example (@detector(fires_on=...)); "
            "WitnessDriver(agent).undriven_rows() gives the reasons",
            stacklevel=2,
        )


def scenarios_along_paths(agent: Agent[Any, Any]) -> Iterator[Scenario]:
    """The scenarios of a few runs that together take every row that a run of an agent can take."""
    return _scenarios(WitnessDriver(agent), paths(agent, "transitions"))


def _scenarios(driver: WitnessDriver, chosen: Iterable[Path]) -> Iterator[Scenario]:
    for path in chosen:
        try:
            scenario = driver.scenario_for(path)
        except NoExampleError:
            continue
        yield scenario if any(loop_guard(row) in LIMITS for row in path.rows) else replace(scenario, guardrails=None)


def _every_example(given: GuardExamples | Example) -> tuple[Example, ...]:
    return (given,) if isinstance(given, Example) else (*given.fires_on, *given.silent_on)


_DECLARED_ENDINGS: Mapping[Guard | None, str] = {guards.declared_done: "done", guards.declared_unable: "unable"}
_DECISIONS: Mapping[Guard | None, Action] = {
    guards.ask_user: Action.ask_user,
    guards.handoff: Action.handoff,
    guards.stop: Action.stop,
}
_HUMAN_REPLIES: Mapping[str, HumanInput] = {"approval": Allow(), "in_doubt": ItDidNotRun()}


def force(agent: Agent[Any, Any], path: Path, prompt: str = "go") -> PathRun:
    """The run of a path whose guards are overridden, in an event loop of its own; see ``force_async``.

    ::

        for path in paths(my_agent.graph, "transitions"):
            assert force(my_agent, path).run_result.state == "terminal"

    Raises:
        RunError: The path is not a path of the agent's graph, or does not lead to an end; or an event loop is running
            in this thread.
    """
    return run_in_own_loop(force_async(agent, path, prompt), "await force_async(agent, path)")


async def force_async(agent: Agent[Any, Any], path: Path, prompt: str = "go") -> PathRun:
    """The run of a path whose guards are overridden: each step takes the next row of the path.

    Model, tools, policy, hooks and store are the agent's own; only guards and clock are replaced. A row that enters
    ``recover`` brings a ``Failure`` of its kind, as its detector would. Each suspension gets a reply that lets the run
    continue, and no time passes.

    Args:
        agent: The agent; it is not changed.
        path: A path of the agent's graph.
        prompt: The user's message.

    Raises:
        RunError: The path is not a path of the agent's graph, or does not lead to an end.
    """
    machine = _ForcedMachine(agent.graph, path)
    result = SimulationResult(decisions=machine.decisions)
    host = replace(agent.config.host, clock=result.clock, monitor="off")  # a forced run is in no model
    forced = agent.with_config(replace(agent.config, machine=machine, host=host))
    run = forced.run(prompt)
    while True:
        run_result = await run
        result.run_results.append(run_result)
        if not isinstance(run_result.outcome, UserInputRequested):
            return PathRun(path, None, result, None)
        run = _continue_run(forced, run_result, machine.next_row)


def _continue_run(agent: Agent[Any, Any], result: RunResult[Any], row: Transition) -> Run[Any, Any]:
    outcome: Any = result.outcome
    if loop_guard(row) in (guards.cancelled, guards.expired):
        return agent.dismiss(outcome.suspension_record)
    return agent.resume(outcome.suspension_record, _HUMAN_REPLIES.get(outcome.kind, "go on"))


class _ForcedMachine(Machine):
    """A machine that evaluates no guard: it takes the rows of a path, one after the other."""

    def __init__(self, graph: Graph, path: Path) -> None:
        super().__init__(graph, BUILT_IN_GUARDS)
        self._path = path
        self.decisions: list[Decision] = []

    @property
    def next_row(self) -> Transition:
        """The row that is taken next."""
        index = len(self.decisions)
        if index >= len(self._path.rows):
            raise RunError(f"{self._path.id} does not lead to an end: all {index} transitions have been taken")
        return self._path.rows[index]

    def would_take(self, trial: Steppable) -> Transition | None:
        """The next row of the path, whatever has happened; the last one at its end."""
        return self._path.rows[min(len(self.decisions), len(self._path.rows) - 1)]

    def step(self, run: Steppable) -> Decision:
        """Take the next row of the path."""
        expected = self.next_row
        row = self.graph.transition(expected.id)
        if (row.target, run.state) != (expected.target, expected.source):
            raise RunError(f"{self._path.id} is not a path of this graph: {expected} cannot be taken in {run.state!r}")
        rows = self.graph.rows(run.state)
        tried = tuple((r.name, False) for r in rows[: rows.index(row)])
        if isinstance(run, RunState):
            (step,) = steps_of(self.graph, [row])
            _prepare_state(step, run)
        decision = Decision(row, (*tried, (row.name, True)), _guard_result(row, run))
        run.state = row.target
        self.decisions.append(decision)
        return decision


def _prepare_state(step: Step, run: RunState) -> None:
    """Set what the row's guard would have seen, so that the run ends like any run that takes this row."""
    if step.guard is guards.cancelled:
        run.cancelled = run.cancelled or "forced"
    elif step.guard is guards.aborted:
        run.abort(step.row.id, RuntimeError("forced"))
    elif step.effect is CALL_MODEL and step.guard is None:
        run.failure = None  # the model may have failed; on this path it does not
    elif step.guard in _DECLARED_ENDINGS:
        run.ending = _DECLARED_ENDINGS[step.guard]
    elif step.effect is CHOOSE_RECOVERY and step.guard in _DECISIONS:
        run.action = _DECISIONS[step.guard]


def _guard_result(row: Transition, run: Steppable) -> Failure | bool:
    """What the row's guard would have returned."""
    guard = loop_guard(row)
    kind = "iteration_limit" if guard is d.runaway else row.name if guard is None else guard_name(guard)
    if kind not in FailureKind.__members__ or kind == "aborted":
        return True
    if isinstance(run, RunState) and run.failure is not None and run.failure.kind == kind:
        return run.failure
    return Failure(kind=FailureKind(kind), explanation=f"forced: {row.id}")
