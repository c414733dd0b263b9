"""The witnessed driver: the real loop takes a path, because everything outside plays its part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from agentfsm.agent import Agent
from agentfsm.core.envelope import parse_json
from agentfsm.core.examples import Example
from agentfsm.core.presets import Preset
from agentfsm.core.rules import Rules
from agentfsm.errors import AgentfsmError
from agentfsm.machine.engine import Decision
from agentfsm.machine.graph import Graph, Guard, State
from agentfsm.runtime.result import RunResult
from agentfsm.testing.compose import compose
from agentfsm.testing.models import ScriptedModel
from agentfsm.testing.pathfinder import Path, short
from agentfsm.testing.scripts import Script
from agentfsm.testing.stage import Played, Stage
from agentfsm.testing.ways import first_way, product_of
from agentfsm.testing.witnesses import BENCH, Examples, Witnesses

__all__ = ["Clash", "ClashError", "Walk", "Witness", "bench"]

OPEN = Rules(control_tools=True)
"""The rules under which most of the loop's rows can be taken."""


@dataclass(frozen=True, slots=True)
class Clash:
    """Where a run left its path.

    Attributes:
        place: How many moves it had made as planned.
        wanted: The id of the row that was to be taken, and its target.
        took: The row that was taken; empty where the run had ended or waited.
        stolen_by: The guard that held first, or that did not hold.
        hint: What may be wrong with the path and not with the table.
    """

    place: int
    wanted: str
    took: str
    stolen_by: str
    hint: str = ""

    def __str__(self) -> str:
        took = self.took or "nothing: the run was over"
        hint = f"; {self.hint}" if self.hint else ""
        return f"move {self.place + 1} was to be {self.wanted}, but it was {took} (decided by {self.stolen_by!r}){hint}"


OTHER_RULES = (
    "no run of this agent takes that path, under its rules: find its paths with --fsm-graph=MODULE:AGENT, "
    "@pytest.mark.fsm(graph=AGENT) or paths(agent)"
)


class ClashError(AgentfsmError, AssertionError):
    """A run did not take its path.

    Attributes:
        walk: What happened.
    """

    def __init__(self, walk: Walk) -> None:
        self.walk = walk
        super().__init__(f"{walk.path.id}: {walk.clash}")


@dataclass(frozen=True, slots=True)
class Walk:
    """A path, and the run that was to take it.

    Attributes:
        path: The path.
        script: What the outside did, or None where guards were forced.
        played: What became of it.
        clash: Where the run left the path, or None.
    """

    path: Path
    script: Script | None
    played: Played
    clash: Clash | None

    @property
    def result(self) -> RunResult:
        """What the run came to in the end."""
        return self.played.result

    @property
    def decisions(self) -> list[Decision]:
        """Every move, across waits and power cuts."""
        return self.played.decisions

    def check(self) -> Walk:
        """The walk itself.

        Raises:
            ClashError: The run did not take the path.
        """
        if self.clash is not None:
            raise ClashError(self)
        return self


def clash(path: Path, decisions: list[Decision]) -> Clash | None:
    """Where a run left a path, or None."""
    for place, row in enumerate(path.rows):
        if place >= len(decisions):
            return Clash(place, str(row), "", decisions[-1].guard if decisions else "")
        took = decisions[place].transition
        if str(took) != str(row):
            return Clash(place, str(row), str(took), took.name)
    if len(decisions) > len(path.rows):
        took = decisions[len(path.rows)].transition
        return Clash(len(path.rows), "the end", str(took), took.name)
    return None


def bench(graph: Graph, rules: Rules = OPEN) -> Agent:
    """An agent to walk a graph with, where nobody has one of their own: with tools of every trait.

    Args:
        graph: The graph.
        rules: Its rules; by default those under which most rows can be taken.
    """
    output = int if rules.text_is_answer and not rules.envelope else None
    return Agent(ScriptedModel(), tools=BENCH, preset=Preset("bench", rules=rules, graph=graph), output_type=output)


class Witness:
    """Walks paths with the real loop: an agent on a stage, and the examples of its guards.

    ::

        witness = Witness(my_agent)
        witness.check_examples()
        for path in paths(my_agent, "transitions"):
            witness.walk(path).check()  # or a ClashError that names the guard which stole the path

    Args:
        agent: The agent, or a graph, which is then walked with an agent of the bench.
        examples: Examples of guards, by guard, name or row id, beside those that are declared.
        answer: A final answer of the model that the agent takes.
    """

    def __init__(
        self,
        agent: Agent | Graph,
        *,
        examples: Mapping[Guard | str, Examples | Example] | None = None,
        answer: Any = None,
    ) -> None:
        own = bench(agent) if isinstance(agent, Graph) else agent
        tools = {**{t.name: t for t in BENCH}, **own.parts.tools}
        self._agent = own.made_of(replace(own.parts, tools=tools))
        self._answer = answer if answer is not None else "1"
        self._output = "1" if own.parts.output is None else parse_json(self._answer)
        self._examples = dict(examples or {})
        self._stage = Stage(self._agent, answer=self._answer)

    def walk(
        self,
        path: Path,
        *,
        instead: Mapping[int, Example] | None = None,
        watch: frozenset[int] = frozenset(),
        spare: bool = False,
    ) -> Walk:
        """Take a path, in an event loop of its own.

        Args:
            path: The path.
            instead: Examples to use at some moves in place of the guard's first.
            watch: Numbers of moves; before each of these, every guard of the state is asked, for the record.
            spare: Whether each batch has a call more than the path runs.

        Raises:
            agentfsm.testing.compose.NoExampleError: A guard has no example.
        """
        script = self.script(path, instead=instead, spare=spare)
        played = self._stage.play(script, watch=watch, most=len(path.rows) + 1)
        found = clash(path, played.decisions)
        if found is not None and not self._can_happen(path):
            found = replace(found, hint=OTHER_RULES)
        return Walk(path, script, played, found)

    def _can_happen(self, path: Path) -> bool:
        """Whether a run of this agent can take a path, as far as its rules tell."""
        agent = self._agent
        places = {row.id: place for place, row in enumerate(agent.graph.transitions)}
        if any(row.id not in places for row in path.rows):
            return True  # it is of another graph, which is another matter
        product = product_of(agent.graph, path.guardrails, agent.rules, agent.parts.output is not None)
        here = {product.start}
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
        rules = self._agent.rules
        product = product_of(self._agent.graph, short(rules), rules, self._agent.parts.output is not None)
        for row in self._agent.graph:
            way = first_way(product, row)
            if row.guard is None or way is None:
                continue
            rows, place = way
            if row.source not in (State.DISPATCH_TOOL, State.POST_TOOL):  # what comes later must not shape the reply
                rows = rows[: place + 1]
            path = Path(0, rows, 1, short(rules), rules)
            examples = self.examples(path).of(row)
            if examples is None:
                continue
            for wanted, each in ((True, examples.fires_on), (False, examples.silent_on)):
                for number, example in enumerate(each, 1):
                    walk = self.walk(path, instead={place: example}, watch=frozenset((place,)))
                    asked += 1
                    if bool(walk.played.asked.get((place, row.id))) is not wanted:
                        text = "does not fire on its example" if wanted else "fires on its silent example"
                        raise AssertionError(f"{row.id} {text} {number}: {example}")
        return asked

    def examples(self, path: Path) -> Witnesses:
        """The examples from which scripts for a path are put together."""
        return Witnesses(path.guardrails, self._agent.rules, self._examples, self._output)

    def script(self, path: Path, *, instead: Mapping[int, Example] | None = None, spare: bool = False) -> Script:
        """What must happen outside for a path to be taken; see ``walk``."""
        return compose(
            path,
            self.examples(path),
            tools=self._agent.parts.tools,
            envelope=self._agent.rules.envelope,
            answer=self._answer,
            instead=instead,
            spare=spare,
        )
