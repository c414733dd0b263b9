"""Every error that agentfsm raises, as one tree; outcomes of a run are events, not errors.

::

    AgentfsmError
    +-- ConfigurationError          the program that embeds agentfsm is configured wrongly
    |   +-- GraphError              a graph breaks a rule (.rule, .edge)
    |   +-- ToolDefinitionError     a function cannot be a tool
    |   +-- UnknownModelError       no provider has a model of that name
    |   +-- MissingKeyError         a provider's API key is not in the environment
    |   +-- MissingExtraError       an optional package is not installed
    +-- RunError                    a method does not fit the state of the run
    |   +-- RunEndedError           the run has ended: it takes no reply, and can be neither resumed nor cancelled
    |   +-- NoTransitionError       no row of the table applies; the run is unchanged
    |   +-- BudgetSpentError        nothing is left of a budget for what the effect of a state of yours asks (.kind)
    |   +-- StateEffectError        the effect of a state of yours called what it may not, or changed while it was away
    |   +-- MissingDepsError        a run that was started with dependencies is resumed without any
    |   +-- MissingModelError       a run with a model of its own is resumed, and the model is no longer available
    |   +-- ToolsetError            a toolset failed, or returned what a run cannot have
    |   +-- ModelMismatchError      a run did what the model of its proofs does not allow (Host(monitor="raise"))
    |   +-- SessionBusyError        a session is being run; two runs of it cannot continue at once
    |   +-- SessionOpenError        a session's last run has not ended: it waits for a person, or was interrupted
    +-- ReadOnlyError               user code tried to change a run; it is unchanged, and ends as aborted
    +-- SuspensionRecordError       a suspension record cannot be resumed; the run is unchanged
    |   +-- SuspensionFormatError   not a suspension record, or one of another version
    |   +-- SuspensionTamperedError its signature does not match
    |   +-- SuspensionExpiredError  it has expired
    |   +-- SuspensionUsedError     it was resumed already
    |   +-- SuspensionRegistryError the host cannot know whether it was; the message says what to configure
    |   +-- SuspensionGraphError    it was written under another graph
    |   +-- SuspensionRulesError    the agent has another preset; the message says what differs
    |   +-- SuspensionGuardrailsError the agent has other limits; the message says which
    |   +-- SuspensionApprovalError the agent would run calls that the run's own agent puts to people
    |   +-- SuspensionToolError     the tool of the call that waits is missing, or is not the one that was shown
    |   +-- HumanReplyError         the person's reply does not fit what the run waits for
    |       +-- BlankHumanReplyError    the reply is empty
    |       +-- StaleHumanReplyError    it answers an earlier request, not the current one
    +-- StoreError                  a store operation failed; the stored data is unchanged
    |   +-- StoreFormatError        the file is not an agentfsm store, or a newer release wrote it
    |   +-- StoreLockedError        another process is writing to it; the message names it
    |   +-- StoreFullError          the disk is full; the run can be resumed when there is space
    |   +-- StoreMovedError         the store's file was moved, deleted or replaced while it was open
    |   +-- RunExistsError          the store already has a run with that id
    |   +-- UnknownRunError         the store has no run with that id
    |   +-- RunHeldError            the run is on hold: it can be neither purged nor redacted
    |   +-- StaleLease              another process owns the run; the message names it
    +-- JournalError                a journal cannot be read, or does not allow the operation
    |   +-- JournalGraphError       the run was written under another graph (.differences)
    +-- ModelError                  a model call failed (.kind); the loop catches it
    |   +-- TransientProviderError  a retry may succeed (.retry_after_s)
    |   +-- ProviderError           a retry cannot help
    |   +-- ContextOverflowError    the prompt is too long
    +-- ToolError                   raised by a tool to report how it failed (.kind); the loop catches it
"""

from __future__ import annotations

from collections.abc import Iterable


class AgentfsmError(Exception):
    """The base class of every error that this package raises."""


class ConfigurationError(AgentfsmError, ValueError):
    """The program that embeds agentfsm is configured wrongly; nothing was started."""


class GraphError(ConfigurationError):
    """A graph breaks a rule.

    Attributes:
        rule: The rule, in a few words.
        edge: The transition or state that breaks it, as ``source.guard`` or ``state``.
    """

    def __init__(self, rule: str, edge: str, hint: str = "") -> None:
        self.rule = rule
        self.edge = edge
        super().__init__(f"{edge}: {rule}" + (f"; {hint}" if hint else ""))


class ToolDefinitionError(ConfigurationError):
    """A function cannot be made a tool: no JSON schema describes its parameters."""


class UnknownModelError(ConfigurationError):
    """No provider has a model of that name."""


class MissingKeyError(ConfigurationError):
    """A provider's API key is neither passed nor in the environment."""


class MissingExtraError(ConfigurationError, ImportError):
    """An optional package is not installed; the message names the extra to install."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f"{feature} needs an optional package: pip install 'agentfsm[{extra}]'")
        self.extra = extra


class RunError(AgentfsmError):
    """A method of a run was called that does not fit its state."""


class RunEndedError(RunError):
    """A run that has ended was to be answered, resumed, dismissed or cancelled; it stays as it is."""


class NoTransitionError(RunError):
    """No row of the table applies to the run in its state; the run is unchanged."""


class BudgetSpentError(RunError):
    """The effect of a user-defined state asked for more than the run has left. It may catch this and end without it.

    Attributes:
        kind: The value of the ``FailureKind`` of the limit: ``iteration_limit``, ``time_limit``, ``token_limit`` or
            ``cost_limit``.
    """

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


class StateEffectError(RunError):
    """The effect of a user-defined state called what it may not call, or made other calls when it was run again."""


class ReadOnlyError(AgentfsmError, AttributeError, TypeError):
    """User code tried to change a run, or a value that belongs to one. Nothing was changed.

    A run whose hook, guard, policy or effect tries it ends as aborted, even if that code handles the error.
    """


class MissingDepsError(RunError):
    """A run that was started with dependencies is resumed without any; it stays as it is."""


class MissingModelError(RunError):
    """A run with a model of its own is resumed, and the model is no longer available; the run stays as it is."""


class ToolsetError(RunError):
    """A toolset failed, or returned what a run cannot have; a run that was about to continue stays as it is."""


class ModelMismatchError(RunError):
    """A run did what the model of its proofs does not allow, and its host asked for an error in that case."""


class SessionBusyError(RunError):
    """A session is being run, here or in another process; a second run of it would not know what the first one says.

    Attributes:
        run_id: The run of the session that is being run.
        owner: The process that runs it, or None if it is not known.
    """

    def __init__(self, message: str, run_id: str, owner: str | None = None) -> None:
        self.run_id = run_id
        self.owner = owner
        super().__init__(message)


class SessionOpenError(RunError):
    """A session's last run has not ended: it waits for a person, or was interrupted.

    Attributes:
        run_id: The run.
        request: What it waits for, as ``Session.waiting`` returns it; None if it was interrupted.
    """

    def __init__(self, message: str, run_id: str, request: object = None) -> None:
        self.run_id = run_id
        self.request = request
        super().__init__(message)


class SuspensionRecordError(AgentfsmError):
    """A suspension record cannot be resumed; the run stays suspended, unchanged."""


class SuspensionFormatError(SuspensionRecordError):
    """The text is not a suspension record, or this release cannot read its version."""


class SuspensionTamperedError(SuspensionRecordError):
    """The record's signature does not match: a field was changed, or the host's secret is different."""


class SuspensionExpiredError(SuspensionRecordError):
    """The record has expired."""


class SuspensionUsedError(SuspensionRecordError):
    """The record was resumed already; a record is valid for one reply."""


class SuspensionRegistryError(SuspensionRecordError):
    """The host cannot know whether the record was used already; the message says what to configure."""


class SuspensionGraphError(SuspensionRecordError):
    """The record was written under another graph."""


class SuspensionRulesError(SuspensionRecordError):
    """The agent has another preset than the run; the message says what differs."""


class SuspensionGuardrailsError(SuspensionRecordError):
    """The agent has other limits than the run; the message says which."""


class SuspensionApprovalError(SuspensionRecordError):
    """The agent would run calls that the agent of the run puts to people; the message says which, and what to do."""


class SuspensionToolError(SuspensionRecordError):
    """The tool of the call that waits is missing, or its definition is not the one that the person was shown."""


class HumanReplyError(SuspensionRecordError):
    """A person's reply does not fit what the run waits for."""


class BlankHumanReplyError(HumanReplyError):
    """A person's reply is empty."""


class StaleHumanReplyError(HumanReplyError):
    """A person's reply answers an earlier request, not the current one; nothing was approved or denied."""


class AuthenticationError(HumanReplyError):
    """The host does not vouch for whoever requests or answers a run, or a rule must know who it is and nobody said."""


class ActorRoleError(HumanReplyError):
    """Whoever answers has none of the roles that may answer; the run still waits."""


class ActorIsRequesterError(HumanReplyError):
    """Whoever requested the run may not approve its call; the run still waits."""


class RepeatedVoteError(HumanReplyError):
    """Whoever answers has approved the call already; the run still waits for others."""


class StoreError(AgentfsmError):
    """A store operation failed; the stored data is unchanged."""


class StoreFormatError(StoreError):
    """The file is not an agentfsm store, or a newer release wrote it."""


class StoreLockedError(StoreError):
    """Another process is writing to the store; the message names it."""


class StoreFullError(StoreError):
    """The disk is full; the run can be resumed when there is space again."""


class StoreMovedError(StoreError):
    """The file was moved, deleted or replaced while the store was open; what was written last may be lost."""


class RunExistsError(StoreError):
    """The store already has a run with that id."""


class UnknownRunError(StoreError):
    """The store has no run with that id."""


class RunHeldError(StoreError):
    """The run is on hold: it can be neither purged nor redacted until the hold ends.

    Attributes:
        run_id: The run.
        reason: Why it is held.
    """

    def __init__(self, run_id: str, reason: str) -> None:
        super().__init__(
            f"run {run_id!r} is on hold{f' ({reason})' if reason else ''}: end that with agentfsm store unhold"
        )
        self.run_id = run_id
        self.reason = reason


class StaleLease(StoreError):  # noqa: N818  # its usual name
    """Another process owns the run's lease, or has continued the run; nothing was written (fencing).

    Attributes:
        run_id: The run.
        owner: The process that owns the lease, or None.
        why: What is wrong, after the name of the run.
    """

    def __init__(self, run_id: str, owner: str | None, why: str) -> None:
        self.run_id = run_id
        self.owner = owner
        self.why = why
        super().__init__(f"run {run_id!r} {why}" + (f"; it is held by {owner}" if owner else ""))


class JournalError(AgentfsmError):
    """A journal cannot be read, or does not allow the operation."""


class JournalGraphError(JournalError):
    """A run was written under another graph than the agent's.

    Attributes:
        differences: The differences between the graphs, one line each.
    """

    def __init__(self, message: str, differences: tuple[str, ...] = ()) -> None:
        self.differences = differences
        super().__init__("\n".join((message, *(f"  {line}" for line in differences))))


class ModelError(AgentfsmError):
    """A model call failed. The loop turns it into a ``Failure`` of the same kind.

    Attributes:
        kind: The value of the ``FailureKind`` that it becomes.
        retry_after_s: Seconds to wait as the provider requested (``Retry-After``), or None.
        status: The HTTP status, or None if there was no response.
    """

    kind = "provider_error"

    def __init__(self, message: str, *, retry_after_s: float | None = None, status: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.status = status


class TransientProviderError(ModelError):
    """The provider failed, and a retry may succeed (429, 5xx, a dropped connection...)."""

    kind = "transient_provider"


class ProviderError(ModelError):
    """The provider rejected the request, and a retry cannot help (401, 404, 422...)."""


class ContextOverflowError(ModelError):
    """The provider rejected the prompt as too long."""

    kind = "context_overflow"


class ToolError(AgentfsmError):
    """Raised by a tool to report the kind of its failure, which an ordinary exception cannot.

    Attributes:
        kind: The value of a ``FailureKind`` that a tool may report: ``tool_error`` (default),
            ``ambiguous_input``, ``scope_too_large``, ``capability_gap``, ``kernel_invalidated``,
            ``environment_error`` or ``policy_violation``.
        blockers: Concrete reasons why the work cannot continue; a single one may be given as a string.
    """

    def __init__(self, message: str, *, kind: str = "tool_error", blockers: str | Iterable[str] = ()) -> None:
        super().__init__(message)
        self.kind = kind
        self.blockers = (blockers,) if isinstance(blockers, str) else tuple(blockers)
