"""Runs the real machine on a run's records, to see what it would have done under another graph, policy or limits.

The recorded run is rehydrated, and beside it a second one makes its own transitions under the other settings. What the
second one needs from a model, a tool or a person comes from the records, or is not known.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from agentfsm.errors import GraphError, JournalError, NoTransitionError, ReadOnlyError
from agentfsm.journal.history_verifier import ENDING_EVENTS
from agentfsm.journal.records import RenameMap, SealedRecord, is_kind, open_record
from agentfsm.journal.rehydrate import RehydratedRun, apply_outcome
from agentfsm.loop.failures import Action, Failure, FailureKind
from agentfsm.loop.guardrails import AgentGuardrails, Behavior
from agentfsm.loop.human_input import PendingRequest
from agentfsm.loop.outcomes import (
    CALL_MODEL,
    CHECK_BUDGETS,
    CHOOSE_RECOVERY,
    JUDGE_RESULTS,
    PARSE_REPLY,
    RUN_CALLS,
    Aborted,
    Cancelled,
    Outcome,
    PreStepDone,
    RecoveryDecided,
    ReplyParsed,
)
from agentfsm.loop.recovery_policy import DefaultPolicy, PolicyError, RecoveryPolicy, decide_recovery
from agentfsm.loop.reducer import on_outcome, on_transition
from agentfsm.loop.reply_reader import read_reply
from agentfsm.loop.state import CallState, RunState
from agentfsm.loop.transition_table import BUILT_IN_GUARDS
from agentfsm.machine.declaration import StateSpec
from agentfsm.machine.engine import Decision, Machine
from agentfsm.machine.graph import Graph

Data = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Divergence:
    """A transition that would have been another one.

    Attributes:
        seq: The record.
        recorded: The transition in it, as ``source.guard -> target``, in the names of the replay's graph.
        instead: The transition that the run would have made, or why it could make none.
        resumed: If the run would then have gone elsewhere, the record from which on recorded outcomes fit again,
            because the run would have asked for the same; None if they never do.
    """

    seq: int
    recorded: str
    instead: str
    resumed: int | None = None


@dataclass(frozen=True)
class Replay:
    """The result of a replay.

    Attributes:
        moves: Number of transitions that were the same as the recorded ones.
        divergences: The transitions that would have been others, in order.
        since: The record from which on guards were evaluated: 1, or the record with which the run was last
            migrated without a replay of its path.
        computed: Number of transitions after a divergence for which nothing recorded was needed.
        recorded_ending: How the recorded run ended: the class of its last event, such as ``RunCompleted``, or
            ``UserInputRequested`` if it waits; empty if it was interrupted or is in progress.
        ending: How the replayed run would have ended; empty if that is not known.
        unknown: Why that is not known, if the run would have asked for something that was not recorded.
    """

    moves: int
    divergences: tuple[Divergence, ...] = ()
    since: int = 1
    computed: int = 0
    recorded_ending: str = ""
    ending: str = ""
    unknown: str = ""

    @property
    def same(self) -> bool:
        """Whether every transition was the same as the recorded one."""
        return not self.divergences

    @property
    def ends_differently(self) -> bool | None:
        """Whether the run would have ended in another way; None if that is not known."""
        if not (self.ending and self.recorded_ending):
            return False if self.same else None
        return self.ending != self.recorded_ending


@dataclass(frozen=True)
class ReplayTotals:
    """The results of the replays of many runs.

    Attributes:
        runs: Number of runs.
        same: Runs with the same transitions and the same ending.
        alike: Runs with other transitions, and the same ending.
        endings: Runs that would end differently: by the ending and the recorded one, their number, the most first.
        unknown: Runs with other transitions of which the ending is not known.
        failed: Runs that cannot be replayed.
    """

    runs: int = 0
    same: int = 0
    alike: int = 0
    endings: tuple[tuple[str, str, int], ...] = ()
    unknown: int = 0
    failed: int = 0

    @classmethod
    def of(cls, replays: Iterable[Replay | None]) -> ReplayTotals:
        """The totals of some replays; None stands for a run that cannot be replayed."""
        kinds: Counter[str] = Counter()
        endings: Counter[tuple[str, str]] = Counter()
        for each in replays:
            if each is not None and each.ends_differently:
                endings[each.ending, each.recorded_ending] += 1
            kinds[_kind_of(each)] += 1
        ordered = tuple((*pair, count) for pair, count in sorted(endings.items(), key=lambda item: (-item[1], item[0])))
        return cls(kinds.total(), kinds["same"], kinds["alike"], ordered, kinds["unknown"], kinds["failed"])

    @property
    def end_differently(self) -> int:
        """How many runs would end differently."""
        return sum(count for _, _, count in self.endings)

    def __str__(self) -> str:
        count = self.end_differently
        listed = ", ".join(f"{n:,} {ending} instead of {recorded}" for ending, recorded, n in self.endings)
        parts = [f"{count:,} of {self.runs:,} runs would end differently" + (f": {listed}" if listed else "")]
        if self.alike:
            parts.append(f"{self.alike:,} would take other transitions and end in the same way")
        if self.unknown:
            parts.append(f"{self.unknown:,} would take other transitions, and how they end is not known")
        if self.failed:
            parts.append(f"{self.failed:,} cannot be replayed")
        return "; ".join(parts)


def _kind_of(replayed: Replay | None) -> str:
    if replayed is None:
        return "failed"
    if replayed.ends_differently:
        return "different"
    if replayed.same:
        return "same"
    return "unknown" if replayed.ends_differently is None else "alike"


MAX_MOVES_ALONE = 10_000
"""Moves that a replayed run makes by itself before it is said never to stop."""

_WAITS = "UserInputRequested"

_CONTROL_TOOLS = frozenset({"ask_user", "return_done", "return_unable"})

_REQUEST_FIELDS = (
    "messages",
    "feedback",
    "pending_instruction",
    "lessons_learned",
    "elided",
    "output_cap",
    "partial_answer",
    "final_turn",
)
"""What a request to the model depends on. Two runs that agree in them send the same one."""

_OWN_FIELDS = frozenset({"batch", "guardrails", "behavior", "counters", "elapsed_s", "silence_s", "state_calls"})
"""Fields in which a replayed run may differ from the recorded one when the effect of a user-defined state is run."""


class _UnknownOutcomeError(Exception):
    """It is not known what an effect would come back with."""


class _ReplayedRun(RehydratedRun):
    """The recorded run, rehydrated, and beside it the same run under other settings.

    The second run makes its own transitions. As long as they are the recorded ones, the model, the tools and people
    are assumed to have answered as recorded. Once they are not, what follows is computed where nothing outside the
    run is needed for it, and a recorded outcome is used only where the second run asks for the same as the recorded
    run did: the same request, the same calls with the same results so far, the same question to a person.

    Args:
        machine: Evaluates the guards.
        policy: Decides about failures instead of the recorded decisions, if given.
        guardrails: Used instead of the recorded ones, if given.
        behavior: Used instead of the recorded behavior, if given.
        rename_maps: What was renamed after record ``since``, in order.
        since: The first record for which guards are evaluated.
    """

    def __init__(
        self,
        machine: Machine,
        policy: RecoveryPolicy | None,
        guardrails: AgentGuardrails | None,
        behavior: Behavior | None,
        rename_maps: list[RenameMap],
        since: int,
    ) -> None:
        super().__init__()
        self.moves = self.computed = 0
        self.divergences: list[Divergence] = []
        self.ending = self.recorded_ending = self.unknown = ""
        self._machine, self._policy, self._guardrails, self._behavior = machine, policy, guardrails, behavior
        self._rename_maps, self._since = rename_maps, since
        self._own: RunState | None = None
        self._apart = False

    def report(self) -> Replay:
        """The result, once every record was added."""
        if not self.finished:
            self.recorded_ending = _WAITS if self.suspension is not None else ""
        ending, own = self.ending, self._own
        if not ending and own is not None and not self.unknown:
            if self._apart:
                ending = _WAITS if self._spec(own).waits else ""
                self.unknown = "" if ending else _describe_need(self._spec(own))
            else:
                ending = self.recorded_ending
        return Replay(
            self.moves, tuple(self.divergences), self._since, self.computed, self.recorded_ending, ending, self.unknown
        )

    # -- the recorded run ---------------------------------------------------------------------------------

    def _created(self, body: Data) -> None:
        super()._created(body)
        if self._since == 1:
            own = self._start()
            began, initial = own.state, str(self._machine.graph.initial)
            if "state" not in body and began != initial:
                own.state, self._apart = initial, True
                self.divergences.append(Divergence(1, f"starts in {began}", f"starts in {initial}"))
                self._run_alone(own)

    def _on_outcome_read(self, body: Data, outcome: Outcome | None) -> None:
        if self._own is not None and not self.ending and not self.unknown:
            try:
                self._follow(self._own, body, outcome)
            except _UnknownOutcomeError as error:
                self.unknown = str(error)

    def _intent(self, body: Data) -> None:
        super()._intent(body)
        _, dot, place = body["eid"].rpartition(".")
        if dot and "request" not in body and self._own is not None and not self._apart:
            self._own.batch[int(place)].started = True

    def _set_guardrails(self, body: Data) -> None:
        super()._set_guardrails(body)
        if self._own is not None and self._guardrails is None:
            self._own.guardrails = self.run.guardrails

    def _suspend(self, body: Data) -> None:
        super()._suspend(body)
        if self._own is not None and not self._apart and self._own.pending_request is None:
            self._own.pending_request = self.run.pending_request

    def _migrate(self, body: Data) -> None:
        super()._migrate(body)
        if self._own is not None:
            del self._rename_maps[0]  # the replayed run has used the new names from the beginning
        elif self.seq + 1 == self._since:
            self._start()

    def _finish(self, body: Data) -> None:
        super()._finish(body)
        self.recorded_ending = str(body.get("ending", ""))
        if (
            self.run.aborted is not None and not self.table.names_endings
        ):  # version 0.1.0 had no event of its own for it
            self.recorded_ending = ENDING_EVENTS["aborted"]

    # -- the replayed run ---------------------------------------------------------------------------------

    def _start(self) -> RunState:
        own = self._own = copy.deepcopy(self.run)
        own.messages = list(self.run.messages)  # the same objects, so that comparing them is quick
        own.guardrails = self._guardrails or own.guardrails
        own.behavior = self._behavior or own.behavior
        for names in self._rename_maps:
            names.rename(own)
        return own

    def _follow(self, own: RunState, body: Data, recorded: Outcome | None) -> None:
        """Let the replayed run make its transition, if the recorded run leaves the state that it is in."""
        row, target, state = body["transition"], body["to"], self.run.state
        for names in self._rename_maps:
            row, target, state = names.transition(row), names.state(target), names.state(state)
        if own.state != state:
            return
        if (
            _needs_the_world(self._spec(own))
            and self.divergences
            and not _asks_the_same(self._spec(own), own, self.run)
        ):
            self._apart = True
            return
        if self._apart:
            self._apart = False
            self.divergences[-1] = replace(self.divergences[-1], resumed=self.seq + 1)
        apply_outcome(own, self._own_outcome(own, recorded), body)
        self._compare(own, f"{row} -> {target}", target)

    def _compare(self, own: RunState, recorded: str, target: str) -> None:
        """Make the transition, and compare it with the recorded one."""
        try:
            instead = str(self._move(own))
        except (NoTransitionError, GraphError) as error:  # no guard holds, or the graph has no such state
            self.divergences.append(Divergence(self.seq + 1, recorded, str(error)))
            self.ending = _WAITS if isinstance(error, NoTransitionError) else ""
            self.unknown = "" if self.ending else str(error)
            return
        if instead == recorded:
            self.moves += 1
            return
        self.divergences.append(Divergence(self.seq + 1, recorded, instead))
        if own.state != target:
            self._apart = True
            self._run_alone(own)

    def _run_alone(self, own: RunState) -> None:
        """Go on as far as nothing outside the run is needed."""
        for _ in range(MAX_MOVES_ALONE):
            if self.ending or _needs_the_world(self._spec(own)):
                return
            outcome = self._own_outcome(own, None)
            on_outcome(own, outcome, outcome.backoff_s if isinstance(outcome, RecoveryDecided) else 0.0)
            self._move(own)
            self.computed += 1
        self.unknown = f"it would make more than {MAX_MOVES_ALONE:,} transitions in a row by itself"

    def _move(self, own: RunState) -> Decision:
        decision = self._machine.step(own)
        on_transition(own, decision, self._machine.graph.specs)
        if decision.transition.ends:
            self.ending = ENDING_EVENTS[decision.transition.ends]
        elif self._spec(own).waits and own.pending_request is None:
            own.pending_request = PendingRequest("question", f"The run waits in {str(own.state)!r}.")
        return decision

    def _own_outcome(self, own: RunState, recorded: Outcome | None) -> Outcome | None:
        """The outcome of the state's effect: the recorded one, or what it would have been."""
        if isinstance(recorded, (Cancelled, Aborted)):
            return recorded
        effect = self._spec(own).effect
        if effect is CHECK_BUDGETS:
            return recorded or PreStepDone()
        if effect is PARSE_REPLY:
            return _read_again(own, self.run, recorded)
        if effect is CHOOSE_RECOVERY:
            return self._decide(own, recorded)
        self._check_tools(recorded)
        if callable(effect):
            own.state_calls = copy.deepcopy(self.run.state_calls)
        return recorded

    def _spec(self, own: RunState) -> StateSpec:
        return self._machine.graph.spec(own.state)

    def _check_tools(self, recorded: Outcome | None) -> None:
        """Under another behavior, a run may have tools that the recorded one did not have, or lack some."""
        if self._behavior is None or self._behavior.control_tools == self.run.behavior.control_tools:
            return
        for result in getattr(recorded, "results", ()):
            given = not self.run.behavior.control_tools and result.name in self.created.get("tools", {})
            if result.name in _CONTROL_TOOLS and not given:  # a tool of the agent's own is one under any behavior
                had = "did not have" if self._behavior.control_tools else "had"
                raise _UnknownOutcomeError(
                    f"it would answer a call of {result.name}, a tool that the recorded run {had}"
                )

    def _decide(self, own: RunState, recorded: Outcome | None) -> Outcome:
        policy = self._policy
        if policy is None and (self._guardrails is not None or self.divergences):
            policy = _described_policy(self.created.get("policy", {}))
        if policy is None:
            if recorded is not None and (not self.divergences or own.failure == self.run.failure):
                return recorded
            raise _UnknownOutcomeError("its policy would decide, and a journal does not hold the code of a policy")
        try:
            return decide_recovery(policy, own, self.created.get("seed"))
        except (PolicyError, ReadOnlyError) as error:
            return Aborted(Failure(kind=FailureKind.aborted, explanation=str(error)))


def replay(
    records: Iterable[SealedRecord],
    graph: Graph,
    *,
    policy: RecoveryPolicy | None = None,
    guardrails: AgentGuardrails | None = None,
    behavior: Behavior | None = None,
    rename_map: RenameMap | None = None,
) -> Replay:
    """Run the machine on the recorded outcomes of a run; no model and no tool is called.

    As long as the transitions are the recorded ones, the model, the tools and people are assumed to have answered as
    recorded, whatever the wording of the requests. After another transition, nothing is supposed: what needs only
    the run is computed, and a recorded outcome is used only where the run would have asked for exactly what was asked
    in the recorded run. Otherwise the ending is reported as not known.

    ::

        found = replay(await store.records("order-7"), STRICT.graph, policy=STRICT.policy, behavior=STRICT.behavior)
        print(found.ending, "instead of", found.recorded_ending)

    Args:
        records: The run's records, from the first.
        graph: The graph to run on, with its guards.
        policy: Decides about failures instead of the recorded decisions, if given.
        guardrails: Used instead of the recorded ones, if given.
        behavior: Used instead of the recorded behavior switches, if given.
        rename_map: New names of the states and transitions of the run's graph, if they differ in this one.

    Returns:
        Which transitions would have been others, and how the run would have ended.

    Raises:
        JournalError: A record cannot be read, or a value in it was redacted.
    """
    journal = list(records)
    since, rename_maps = _renames_to_replay(journal)
    if rename_map is not None:
        rename_maps.append(rename_map)
    run = _ReplayedRun(Machine(graph, BUILT_IN_GUARDS), policy, guardrails, behavior, rename_maps, since)
    for record in journal:
        run.add(record)
    if not run.seq:
        raise JournalError("the journal is empty")
    return run.report()


def _renames_to_replay(records: Sequence[SealedRecord]) -> tuple[int, list[RenameMap]]:
    """The record where the run was last migrated without a replay, or 1; and what was renamed after it."""
    since, rename_maps = 1, list[RenameMap]()
    for record in records:
        if is_kind(record, "run.migrated"):
            body = open_record(record)
            if body["judged"] == "vouched":
                since, rename_maps = record.seq, []
            else:
                rename_maps.append(RenameMap.from_record(body))
    return since, rename_maps


def _described_policy(description: Mapping[str, Any]) -> RecoveryPolicy | None:
    """The policy that a journal describes; None if it is not the default one, whose code is not in the journal."""
    if description.get("type") != f"{DefaultPolicy.__module__}.{DefaultPolicy.__qualname__}":
        return None
    return DefaultPolicy(
        {FailureKind(name): int(count) for name, count in description.get("budgets", {}).items()},
        {FailureKind(name): Action(action) for name, action in description.get("actions", {}).items()},
        float(description.get("jitter", 0.0)),
    )


def _is_plain_text(behavior: Behavior) -> bool:
    return behavior.text_is_answer and not behavior.envelope


def _read_again(own: RunState, recorded_run: RunState, recorded: Outcome | None) -> Outcome:
    """What the reply says. If it is an answer for both runs, the recorded run has applied its output type."""
    parsed = recorded if isinstance(recorded, ReplyParsed) else None
    if parsed is not None and own.behavior == recorded_run.behavior:
        return parsed
    if parsed is None or not (_is_plain_text(own.behavior) and _is_plain_text(recorded_run.behavior)):
        return read_reply(own, None)
    return read_reply(own, lambda _: parsed)


def _needs_the_world(spec: StateSpec) -> bool:
    """Whether the effect of a state asks a model, a tool, a person or a user function."""
    return spec.effect not in (CHECK_BUDGETS, PARSE_REPLY, JUDGE_RESULTS, CHOOSE_RECOVERY)


def _asks_the_same(spec: StateSpec, own: RunState, recorded_run: RunState) -> bool:
    """Whether the replayed run asks for what the recorded run got an answer to."""
    effect = spec.effect
    if effect is CALL_MODEL:
        names: Iterable[str] = _REQUEST_FIELDS
    elif effect is RUN_CALLS:
        names = ("messages",)
    elif spec.waits:
        names = ("pending_request", "messages")
    else:
        names = [each.name for each in fields(RunState) if each.name not in _OWN_FIELDS]
    alike = all(getattr(own, name) == getattr(recorded_run, name) for name in names)
    return alike and (effect is CALL_MODEL or _calls(own) == _calls(recorded_run))


def _describe_need(spec: StateSpec) -> str:
    """What a replayed run in a state needs that was not recorded."""
    effect = spec.effect
    if effect is CALL_MODEL:
        return "it would send the model a request to which no reply was recorded"
    if effect is RUN_CALLS:
        return "it would run tool calls whose results were not recorded"
    return f"it would run the effect of {spec.name!r}, whose outcome was not recorded"


def _calls(run: RunState) -> list[CallState]:
    """The calls of the batch, whether or not they were started: that is not known of calls that never run."""
    return [replace(call, started=False) for call in run.batch]
