"""``RunState``: the whole state of a run, and ``RunView``, what user code sees of it.

Guards read it and the reducer changes it. Effects never change it: they return an outcome, which
``reducer.on_outcome`` applies. ``state_json`` has its JSON format.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter, itemgetter
from typing import Any, NoReturn, Self, TypeVar, dataclass_transform

from agentfsm.loop.canonical_json import canonical_json
from agentfsm.loop.failures import Action, Failure, FailureKind, describe_exception
from agentfsm.loop.guardrails import AgentGuardrails, Behavior
from agentfsm.loop.human_input import HumanReply, PendingRequest, SuspendedSubRun
from agentfsm.loop.messages import Compaction, Message, Reply, ToolCall, ToolResult, Transcript, Usage, round_usd
from agentfsm.loop.quorum import Actor, Quorum
from agentfsm.loop.read_only import FrozenDict, FrozenList, freeze_field, read_only, refuse_change, user_code
from agentfsm.loop.withholding import Withholder, contains_placeholder
from agentfsm.machine.graph import State

MAX_LESSONS = 5
"""How many kinds of failure ``lessons_learned`` keeps; the oldest is dropped."""


@dataclass(slots=True)
class CallState:
    """One call of the current batch.

    Attributes:
        call: The call; a person may have edited its arguments.
        signature: The signature of the call as the model made it.
        result: Its result, or None while it is pending.
        started: Whether it was started and its end is not known; after a crash such a call is in doubt.
        approved: Whether a person has approved it.
        edited: Whether a person has changed its arguments.
        denied: What the model sees as its result once a person has denied it.
        retries: How many times it was run again unchanged.
        held: For the call of a sub-agent, the suspended run that works on it, or None.
        answer: A person's answer that has not been passed to that run yet, or None.
        approved_tool: The digest of the tool for which it was approved; an approval holds for that tool only.
        quorum: The votes with which it was approved, if its approval has a rule about that, or None.
    """

    call: ToolCall
    signature: str
    result: ToolResult | None = None
    started: bool = False
    approved: bool = False
    edited: bool = False
    denied: str | None = None
    retries: int = 0
    held: SuspendedSubRun | None = None
    answer: HumanReply | None = None
    approved_tool: str = ""
    quorum: Quorum | None = None


@dataclass(slots=True)
class StateCall:
    """One call that the effect of a user-defined state made through its ``StateContext``.

    Attributes:
        name: The model or the tool.
        digest: SHA-256 (hex) of what it was given; empty if that held a secret, which the journal does not have.
        reply: A model's reply, or None.
        failure: Why a model call failed, or None.
        tool: For a tool call, its state; else None.
        model_calls: For a model call, how many calls it took, with models to fall back to.
        charged: Whether the run was charged for it.
    """

    name: str
    digest: str
    reply: Reply | None = None
    failure: Failure | None = None
    tool: CallState | None = None
    model_calls: int = 1
    charged: bool = False


def request_digest(request: Any) -> str:
    """SHA-256 (hex) of what a call was given, as JSON; empty if it holds the placeholder of a secret."""
    text = canonical_json(request)
    return "" if contains_placeholder(text) else hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


def state_call_number(effect_id: str) -> int | None:
    """The number of a call that the effect of a user-defined state made; None for the id of any other effect."""
    state, _, number = effect_id.rpartition(":")
    return int(number) if ":" in state else None


@read_only
@dataclass(frozen=True, slots=True)
class RunDetails:
    """What a run was given when it was started, besides its prompt and its conversation; it never changes.

    Attributes:
        tags: Short texts by which the run is found.
        metadata: A JSON object of the caller's.
        has_deps: Whether it has dependencies, which no journal holds.
        model: The name of its own model, or an empty string if it has its agent's.
        model_is_object: Whether that model was given as an object, which no journal holds.
        settings: Settings of its model, as JSON; empty for the model's own.
        own_guardrails: Whether its limits are its own, and not its agent's.
        history: What is kept of a long history, as JSON (``agentfsm.loop.history``); empty if everything is.
        approvals: Which calls people have to approve, as JSON (``agentfsm.agent.pinned_approvals``).
    """

    tags: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=FrozenDict)
    has_deps: bool = False
    model: str = ""
    model_is_object: bool = False
    settings: Mapping[str, Any] = field(default_factory=FrozenDict)
    own_guardrails: bool = False
    history: Mapping[str, Any] = field(default_factory=FrozenDict)
    approvals: Mapping[str, Any] = field(default_factory=FrozenDict)

    def __post_init__(self) -> None:
        freeze_field(self, "approvals")
        freeze_field(self, "history")
        freeze_field(self, "metadata")
        freeze_field(self, "settings")


NO_DETAILS = RunDetails()
"""The details of a run that was given nothing but a prompt."""


class _BatchSnapshot:
    """The calls of a batch as views show them, copied when somebody first reads them, or just before they change."""

    __slots__ = ("__weakref__", "_calls", "_source")

    def __init__(self, source: list[CallState]) -> None:
        self._source = source
        self._calls: FrozenList | None = None

    def read(self) -> FrozenList:
        if self._calls is None:
            self._calls = FrozenList(map(_call_view, self._source))
        return self._calls


class _HiddenSlots:
    """What is neither compared nor stored of a run, and the field values of a view.

    Attributes:
        change_attempts: What user code has tried to change, and who; the run ends as aborted if there is anything.
        unread: How many messages, from the first, may be ``UNREAD``: the run was loaded from a snapshot.
    """

    __slots__ = ("_values", "batch_snapshot", "change_attempts", "unread")
    change_attempts: list[str]
    unread: int
    batch_snapshot: weakref.ref[_BatchSnapshot] | None
    _values: tuple[Any, ...]

    def __new__(cls, *fields: Any, **named_fields: Any) -> Self:
        new = object.__new__(cls)
        _set_attempts(new, [])
        _set_batch_snapshot(new, None)
        _set_unread(new, 0)
        return new


_set_attempts: Callable[[_HiddenSlots, list[str]], None] = _HiddenSlots.__dict__["change_attempts"].__set__
_set_unread: Callable[[_HiddenSlots, int], None] = _HiddenSlots.__dict__["unread"].__set__
_set_values: Callable[[_HiddenSlots, tuple[Any, ...]], None] = _HiddenSlots.__dict__["_values"].__set__
_set_batch_snapshot: Callable[[_HiddenSlots, weakref.ref[_BatchSnapshot] | None], None] = _HiddenSlots.__dict__[
    "batch_snapshot"
].__set__


@dataclass(slots=True)
class RunState(_HiddenSlots):
    """The whole state of one run, as plain data. Only the loop has it; user code gets its ``RunView``.

    Attributes:
        run_id: The run's id.
        session_id: The conversation that it belongs to, or an empty string.
        parent: For the run of a sub-agent, the ids of the parent run and of the call that it works on; else None.
        requester: Who requested it, or None.
        state: The name of its current state.
        guardrails: Its limits.
        behavior: Its behavior switches.
        messages: The transcript; append-only.
        deferred_messages: Messages from user-defined states, appended once every call of the batch has a result.
        reply: The model's last reply.
        reply_judged: Whether the guards have read that reply, and the run has left the state that parsed it.
        malformed: Why that reply could not be parsed, or None.
        batch: The calls of that reply.
        first_pending: An index in ``batch``: every call before it has a result.
        answer: The final answer that was parsed from that reply, or None.
        counters: How often each counter of the graph was spent since it was last refilled; only the engine changes it.
        model_calls: All model calls made for the run: by ``call_llm``, by sub-agents and by the effects of
            user-defined states.
        turns: How many times ``call_llm`` has called the model; the ids of effects begin with it.
        usage: Tokens and USD of all model calls.
        granted_tokens: Tokens that a person has granted beyond ``max_tokens``.
        granted_usd: USD that a person has granted beyond ``max_cost_usd``.
        granted_s: Seconds of active time that a person named when they last extended that budget, in place of
            ``max_execution_time_s``; None if they named none.
        elapsed_s: Seconds of active time since the run began or a person last extended that budget.
        silence_s: The longest silence between two phases since the last model call, in seconds.
        final_turn: ``""``, ``now`` during the last turn that ``finalize_grace_s`` grants, then ``used``.
        failure: The failure that is being recovered from, or the one that ended the run.
        action: What the policy decided about it.
        retry_calls: Whether that is to run the failed calls of the batch again.
        failure_attempts: Consecutive failures by kind.
        lessons_learned: The newest failure of each kind, five kinds at most, oldest first.
        pending_instruction: The instruction that the next request (only) adds after ``narrow_scope``.
        feedback: Feedback on the last reply that the next request (only) adds, when no tool result carries it.
        output_cap: The cap on the next reply after a truncated one, in tokens, or None.
        partial_answer: The beginning of a truncated answer, while the model is asked to continue it.
        compaction: What is left out of the requests to the model, or None.
        elided: How many of the oldest messages no longer show tool results (the prompt was too long).
        call_failures: The first failure of each kind in the current batch.
        recent_calls: Signatures of the last calls, oldest first.
        recent_results: A digest of the result of each of them; an empty string, or missing, where it is not known.
        error_key: The key of the last tool error; ``error_streak`` counts its consecutive occurrences.
        denials: Denials in a row.
        pending_request: What a suspended run waits for, or None.
        human_reply: A person's answer that has not been acted on yet, or None.
        ended: How the run ended, as the row into the final state says; an empty string until then.
        ending: ``done``, ``unable`` or ``ask`` once a tool declared it; ``ending_value`` has its details.
        cancelled: The reason of a cancellation, or None.
        aborted: The failure that aborted the run, or None.
        expired: Whether the deadline for an answer has passed.
        state_results: What the effects of user-defined states returned, by state; JSON. A view lacks that of a state
            whose call waits for a person, so that no guard acts on the result of an earlier visit.
        state_calls: What the effect of the current user-defined state has called, while it waits or after a crash.
        calling_state: The user-defined state that made these calls, while the run waits for a person.
        state_visits: How many times the effect of each user-defined state has ended.
        state_outcome: Which declared outcome the last of these effects came back with, or an empty string.
        event_seq: The number of the event with which the run was last suspended; its events continue from there.
        details: What else it was given when it was started.
        withheld: Texts and numbers that became known to be secret by calls, and are not their arguments.
    """

    run_id: str
    session_id: str = ""
    parent: tuple[str, str] | None = None
    requester: Actor | None = None
    state: str = State.PRE_STEP
    guardrails: AgentGuardrails = field(default_factory=AgentGuardrails)
    behavior: Behavior = field(default_factory=Behavior)
    messages: list[Message] = field(default_factory=list[Message])
    deferred_messages: list[Message] = field(default_factory=list[Message])
    reply: Reply | None = None
    reply_judged: bool = False
    malformed: str | None = None
    batch: list[CallState] = field(default_factory=list[CallState])
    first_pending: int = 0
    answer: Any = None
    counters: dict[str, int] = field(default_factory=dict[str, int])
    model_calls: int = 0
    turns: int = 0
    usage: Usage = field(default_factory=Usage)
    granted_tokens: int = 0
    granted_usd: float = 0.0
    granted_s: float | None = None
    elapsed_s: float = 0.0
    silence_s: float = 0.0
    final_turn: str = ""
    failure: Failure | None = None
    action: Action | None = None
    retry_calls: bool = False
    failure_attempts: dict[FailureKind, int] = field(default_factory=dict[FailureKind, int])
    lessons_learned: list[Failure] = field(default_factory=list[Failure])
    pending_instruction: str | None = None
    feedback: str | None = None
    output_cap: int | None = None
    partial_answer: str = ""
    elided: int = 0
    compaction: Compaction | None = None
    call_failures: dict[FailureKind, Failure] = field(default_factory=dict[FailureKind, Failure])
    recent_calls: list[str] = field(default_factory=list[str])
    recent_results: list[str] = field(default_factory=list[str])
    error_key: tuple[str, str, str, str] | None = None
    error_streak: int = 0
    denials: int = 0
    pending_request: PendingRequest | None = None
    human_reply: HumanReply | None = None
    ended: str = ""
    ending: str | None = None
    ending_value: Any = None
    cancelled: str | None = None
    aborted: Failure | None = None
    expired: bool = False
    state_results: dict[str, Any] = field(default_factory=dict[str, Any])
    state_calls: dict[int, StateCall] = field(default_factory=dict[int, StateCall])
    calling_state: str = ""
    state_visits: dict[str, int] = field(default_factory=dict[str, int])
    state_outcome: str = ""
    event_seq: int = 0
    details: RunDetails = NO_DETAILS
    withheld: tuple[Any, ...] = field(default=(), repr=False)

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags that it was started with."""
        return self.details.tags

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The metadata that it was started with: a JSON object."""
        return self.details.metadata

    @property
    def steps(self) -> int:
        """How many times ``pre_step`` was entered."""
        return self.counters.get("steps", 0)

    @property
    def iterations(self) -> int:
        """Model calls since the run began or a person last extended that budget, whoever made them."""
        return self.counters.get("iterations", 0)

    @property
    def continues(self) -> int:
        """How many times a person has extended a spent budget."""
        return self.counters.get("continues", 0)

    def fill_in(self, messages: Sequence[Message]) -> None:
        """Put the messages that were not read yet in their places.

        Args:
            messages: The transcript as it was when the run was loaded.
        """
        self.messages[: self.unread] = messages[: self.unread]
        _set_unread(self, 0)

    def set_messages(self, messages: list[Message], unread: int = 0) -> None:
        """Give the run another transcript.

        Args:
            messages: Its messages.
            unread: How many of them, from the first, may be ``UNREAD``.
        """
        self.messages = messages
        _set_unread(self, unread)

    def view(self) -> RunView:
        """What user code may see of the run as it is now."""
        return _make_view(self)

    def keep_views(self) -> None:
        """Let the views that exist copy what is about to change."""
        if self.batch_snapshot is not None:
            snapshot = self.batch_snapshot()
            _set_batch_snapshot(self, None)
            if snapshot is not None:
                snapshot.read()

    @property
    def done(self) -> bool:
        """Whether the run has ended."""
        return bool(self.ended)

    @property
    def time_limit(self) -> float | None:
        """Seconds of active time that the run may take now; None for no limit.

        A sub-agent's run never gets more than its caller has left.
        """
        limit, granted_s = self.guardrails.max_execution_time_s, self.granted_s
        if granted_s is None or limit is None:
            return limit
        return granted_s if self.parent is None else min(granted_s, limit)

    @property
    def token_limit(self) -> int | None:
        """Tokens that the run may use, with those that a person has granted; None for no limit."""
        limit = self.guardrails.max_tokens
        return None if limit is None else limit + self.granted_tokens

    @property
    def cost_limit(self) -> float | None:
        """USD that the run may use, with those that a person has granted; None for no limit."""
        limit = self.guardrails.max_cost_usd
        return None if limit is None else round_usd(limit + self.granted_usd)

    @property
    def next_call(self) -> int:
        """The index in ``batch`` of the first call without a result; the length of ``batch`` if each has one."""
        batch, index = self.batch, self.first_pending
        while index < len(batch) and batch[index].result is not None:
            index += 1
        return index

    @property
    def last_repeat_counts(self) -> dict[str, int]:
        """How many times each signature occurs in ``recent_calls``. For loop detection; unrelated to ``attempts``."""
        return dict(Counter(self.recent_calls))

    def attempts(self, kind: FailureKind) -> int:
        """Consecutive failures of a kind so far."""
        return self.failure_attempts.get(kind, 0)

    def record_failure_attempt(self, kind: FailureKind) -> None:
        """Count one failure of a kind."""
        self.failure_attempts[kind] = self.attempts(kind) + 1

    def add_lesson(self, failure: Failure) -> None:
        """Keep a failure as a lesson: the newest of each kind, at most ``MAX_LESSONS`` kinds."""
        others = [lesson for lesson in self.lessons_learned if lesson.kind != failure.kind]
        self.lessons_learned = [*others, failure][-MAX_LESSONS:]

    def withdraw_approvals(self) -> None:
        """Have people asked again about the calls that they have approved, and that have no result yet.

        The rules remain, without votes: those who may approve a call say whether it ran.
        """
        state_tools = (each.tool for each in self.state_calls.values() if each.tool is not None)
        for call in (*self.batch, *state_tools):
            if call.result is None:
                call.approved, call.approved_tool = False, ""
                call.quorum = None if call.quorum is None else replace(call.quorum, votes=())
        request = self.pending_request
        if request is not None and request.quorum is not None:
            self.pending_request = replace(request, quorum=replace(request.quorum, votes=()))

    def abort(self, by: str, error: BaseException) -> None:
        """Record that user code raised; the first exception wins."""
        if self.aborted is None:
            text = f"{by} raised {describe_exception(error)}"
            self.aborted = Failure(
                kind=FailureKind.aborted,
                explanation=text,
                metadata={"by": by, "error_class": type(error).__name__},
            )


_T = TypeVar("_T")


@dataclass_transform(frozen_default=True)
def _with_read_only_fields(cls: type[_T]) -> type[_T]:
    """Make a property of each field of a ``RunState``, and of each method that changes one a refusal."""
    for index, name in enumerate(_FIELD_ORDER):
        setattr(cls, name, property(_getter(index, name), doc=f"``{name}`` of the run, when the view was made."))
    return cls


def _getter(index: int, name: str) -> Callable[[Any], Any]:
    get = itemgetter(index)
    if name == "batch":
        return lambda view: get(view._values).read()
    return lambda view: get(view._values)


_FIELD_ORDER = tuple(each.name for each in fields(RunState))
_values_of = attrgetter(*_FIELD_ORDER)
_new = object.__new__


@_with_read_only_fields  # pyright: ignore[reportGeneralTypeIssues]  # it is frozen, and a run is not
class RunView(RunState):  # type: ignore[misc]  # it is frozen, and a run is not
    """An immutable snapshot of a run, which guards, hooks, policies and effects receive.

    It has the attributes of ``RunState`` as they were when the view was made, and never changes. An attempt to change
    it raises ``ReadOnlyError``, and ends the run as aborted.
    """

    __slots__ = ()

    def __init__(self, **changes: Any) -> None:
        """A view with other values, as ``dataclasses.replace`` makes it."""
        _set_values(self, _make_view(RunState(**changes))._values)

    def call(self, role: str, function: Callable[..., _T], *arguments: Any) -> _T:
        """What a user function returns for this view.

        Args:
            role: What the function is, such as ``guard``; its name is added.
            function: The function.
            arguments: Its arguments after the view.

        Raises:
            ReadOnlyError: User code has tried to change the run, even if it has handled that error.
        """
        with user_code(role, function, self.change_attempts):
            return function(self, *arguments)

    def view(self) -> RunView:
        """The view itself."""
        return self

    def record_failure_attempt(self, kind: FailureKind) -> NoReturn:
        """Refused: a view cannot be changed.

        Raises:
            ReadOnlyError: Always.
        """
        refuse_change("count a failure", self.change_attempts)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        refuse_change(f"set {name!r} of the run", self.change_attempts)

    def __delattr__(self, name: str) -> NoReturn:
        refuse_change(f"delete {name!r} of the run", self.change_attempts)

    def __copy__(self) -> RunView:
        return self

    def __deepcopy__(self, memo: object) -> RunView:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore_view, (tuple(getattr(self, name) for name in _FIELD_ORDER),)


class _CallView(CallState):
    """A call of the batch as user code sees it."""

    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> NoReturn:
        refuse_change(f"set {name!r} of a call of the batch")

    def __delattr__(self, name: str) -> NoReturn:
        refuse_change(f"delete {name!r} of a call of the batch")

    def __reduce__(self) -> tuple[Any, ...]:
        return _call_view, (CallState(*_call_values(self)),)

    def __copy__(self) -> _CallView:
        return self

    def __deepcopy__(self, memo: object) -> _CallView:
        return self


_CALL_SETTERS = tuple(CallState.__dict__[each.name].__set__ for each in fields(CallState))
_call_values = attrgetter(*(each.name for each in fields(CallState)))
_NO_ITEMS, _NO_ENTRIES = FrozenList(), FrozenDict()
_MESSAGES, _BATCH = _FIELD_ORDER.index("messages"), _FIELD_ORDER.index("batch")
_STATE_CALLS, _STATE_RESULTS = _FIELD_ORDER.index("state_calls"), _FIELD_ORDER.index("state_results")
_LISTS = tuple(
    i for i, f in enumerate(fields(RunState)) if str(f.type).startswith("list") and i not in (_MESSAGES, _BATCH)
)
_DICTS = tuple(i for i, f in enumerate(fields(RunState)) if str(f.type).startswith("dict"))


def _make_view(run: RunState) -> RunView:
    """A snapshot in constant time: messages are only ever appended, and the batch is copied when it is needed."""
    values = list(_values_of(run))
    for index in _LISTS:
        values[index] = FrozenList(values[index]) if values[index] else _NO_ITEMS
    for index in _DICTS:
        values[index] = FrozenDict(values[index]) if values[index] else _NO_ENTRIES
    values[_MESSAGES] = Transcript(run.messages, len(run.messages))
    values[_STATE_CALLS] = _NO_ENTRIES  # records of the run's own: whether a person has approved a call, for one
    if run.calling_state in run.state_results:  # while its call waits
        current = {state: value for state, value in run.state_results.items() if state != run.calling_state}
        values[_STATE_RESULTS] = FrozenDict(current)
    snapshot = run.batch_snapshot and run.batch_snapshot()
    if snapshot is None:
        snapshot = _BatchSnapshot(run.batch)
        _set_batch_snapshot(run, weakref.ref(snapshot))
    values[_BATCH] = snapshot
    view = _new(RunView)
    _set_values(view, tuple(values))
    _set_attempts(view, run.change_attempts)
    _set_unread(view, run.unread)
    return view


def _call_view(call: CallState) -> CallState:
    view = _new(_CallView)
    for set_field, value in zip(_CALL_SETTERS, _call_values(call), strict=True):
        set_field(view, value)
    return view


def _restore_view(values: tuple[Any, ...]) -> RunView:
    return RunView(**dict(zip(_FIELD_ORDER, values, strict=True)))


def withhold_secrets_of(run: RunState, withholder: Withholder) -> None:
    """Withhold what a run knows to be secret: arguments of its calls, and what became known by them."""
    calls = [call for message in run.messages[run.unread :] for call in message.tool_calls]
    for call in (*calls, *(each.call for each in run.batch)):
        withholder.add_arguments(call.name, call.arguments)
    if run.pending_request is not None:
        withholder.add_arguments(run.pending_request.tool, run.pending_request.arguments)
    for value in run.withheld:
        withholder.add(value)
    for signature, result in zip(run.recent_calls, run.recent_results, strict=False):
        if withholder.has_secrets(signature.rpartition(":")[0]):
            withholder.add(result)  # a digest, from which a short secret could be guessed
