"""Every error that agentfsm raises, as one tree; outcomes of a run are events, not errors.

::

    AgentfsmError
    +-- ConfigurationError          the program that embeds agentfsm is set up wrongly
    |   +-- GraphError              a graph breaks a rule (.rule, .edge)
    |   +-- ToolDefinitionError     a function cannot be described as a tool
    |   +-- UnknownModelError       a model name that no provider claims
    |   +-- MissingKeyError         a provider's key is not in the environment
    |   +-- MissingExtraError       an optional package is not installed
    +-- RunError                    a run is used in a way that it cannot be used
    |   +-- NoTransitionError       a step was asked for where no row applies; nothing changed
    +-- SuspensionRecordError                 a suspension record cannot be resumed; the run stays as it was
    |   +-- SuspensionFormatError       not a record, or one of another version
    |   +-- SuspensionTamperedError     its signature does not match
    |   +-- SuspensionExpiredError      its time is over
    |   +-- SuspensionUsedError         it was resumed already
    |   +-- SuspensionGraphError        it belongs to another graph
    |   +-- HumanReplyError              the person's reply does not fit what the run waits for
    |       +-- BlankHumanReplyError     the reply is empty
    |       +-- StaleHumanReplyError     it answers something else than what the run asks by now
    +-- StoreError                  a store cannot do what it is asked to; what it holds is unchanged
    |   +-- StoreFormatError        the file is no store of ours, or one of a newer release
    |   +-- StoreLockedError        another process writes to it; the message names it
    |   +-- StoreFullError          there is no room; the run goes on when there is
    |   +-- RunExistsError          it has a run of that id already
    |   +-- UnknownRunError         it has no run of that id
    |   +-- StaleLease              somebody else holds the run; the message names them
    +-- JournalError                a journal cannot be read, or does not allow what is asked
    |   +-- JournalGraphError       the run was written under another graph (.differences)
    +-- ModelError                  a model's call failed (.kind); the loop catches it
    |   +-- TransientProviderError  worth another try (.retry_after_s)
    |   +-- ProviderError           nobody can retry it away
    |   +-- ContextOverflowError    the prompt is too long
    +-- ToolError                   raised by a tool to say how it failed (.kind); the loop catches it
"""

from __future__ import annotations

__all__ = [
    "AgentfsmError",
    "BlankHumanReplyError",
    "ConfigurationError",
    "ContextOverflowError",
    "GraphError",
    "HumanReplyError",
    "JournalError",
    "JournalGraphError",
    "MissingExtraError",
    "MissingKeyError",
    "ModelError",
    "NoTransitionError",
    "ProviderError",
    "RunError",
    "RunExistsError",
    "StaleHumanReplyError",
    "StaleLease",
    "StoreError",
    "StoreFormatError",
    "StoreFullError",
    "StoreLockedError",
    "SuspensionExpiredError",
    "SuspensionFormatError",
    "SuspensionGraphError",
    "SuspensionRecordError",
    "SuspensionTamperedError",
    "SuspensionUsedError",
    "ToolDefinitionError",
    "ToolError",
    "TransientProviderError",
    "UnknownModelError",
    "UnknownRunError",
]


class AgentfsmError(Exception):
    """The base of every error that this package raises."""


class ConfigurationError(AgentfsmError, ValueError):
    """The program that embeds agentfsm is set up wrongly; nothing was started."""


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
    """A function cannot be described to a model as a tool."""


class UnknownModelError(ConfigurationError):
    """A model name that no provider claims."""


class MissingKeyError(ConfigurationError):
    """A provider's key is neither given nor in the environment."""


class MissingExtraError(ConfigurationError, ImportError):
    """An optional package is not installed; the message names the extra that brings it."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f"{feature} needs an optional package: pip install 'agentfsm[{extra}]'")
        self.extra = extra


class RunError(AgentfsmError):
    """A run is used in a way that it cannot be used."""


class NoTransitionError(RunError):
    """A step was asked for where no row of the table applies; the run is unchanged."""


class SuspensionRecordError(AgentfsmError):
    """A suspension record cannot be resumed; the run stays suspended and untouched."""


class SuspensionFormatError(SuspensionRecordError):
    """The text is no suspension record, or one of a version that this release does not read."""


class SuspensionTamperedError(SuspensionRecordError):
    """The record's signature does not match: a field was changed, or the secret is another one."""


class SuspensionExpiredError(SuspensionRecordError):
    """The record's time of validity is over."""


class SuspensionUsedError(SuspensionRecordError):
    """The record was resumed already; each is good for one reply."""


class SuspensionGraphError(SuspensionRecordError):
    """The record was written under another graph."""


class HumanReplyError(SuspensionRecordError):
    """A person's reply does not fit what the run waits for."""


class BlankHumanReplyError(HumanReplyError):
    """A person's reply is empty."""


class StaleHumanReplyError(HumanReplyError):
    """A person's reply is to something else than what the run asks by now; nothing was allowed or denied."""


class StoreError(AgentfsmError):
    """A store cannot do what it is asked to; what it holds is unchanged."""


class StoreFormatError(StoreError):
    """The file is no store of ours, or one that a newer release wrote."""


class StoreLockedError(StoreError):
    """Another process writes to the store; the message names it."""


class StoreFullError(StoreError):
    """There is no room for what was to be written; the run can be taken up when there is."""


class RunExistsError(StoreError):
    """The store has a run of that id already."""


class UnknownRunError(StoreError):
    """The store has no run of that id."""


class StaleLease(StoreError):  # noqa: N818  # a state of affairs, known by this name in the literature
    """Somebody else holds the run, or it has moved on; nothing of ours was written.

    Attributes:
        run_id: The run.
        owner: Who holds it, or None where nobody does.
    """

    def __init__(self, run_id: str, owner: str | None, why: str) -> None:
        self.run_id = run_id
        self.owner = owner
        super().__init__(f"run {run_id!r} {why}" + (f"; it is held by {owner}" if owner else ""))


class JournalError(AgentfsmError):
    """A journal cannot be read, or does not allow what is asked."""


class JournalGraphError(JournalError):
    """A run was written under another graph than the agent's.

    Attributes:
        differences: What differs, a line each.
    """

    def __init__(self, message: str, differences: tuple[str, ...] = ()) -> None:
        self.differences = differences
        super().__init__("\n".join((message, *(f"  {line}" for line in differences))))


class ModelError(AgentfsmError):
    """A model's call failed. The loop turns it into a ``Failure`` of the same kind.

    Attributes:
        kind: The value of the ``FailureKind`` that this becomes.
        retry_after_s: Seconds that the provider asks to wait, or None.
        status: The HTTP status, or None where there was no answer.
    """

    kind = "provider_error"

    def __init__(self, message: str, *, retry_after_s: float | None = None, status: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.status = status


class TransientProviderError(ModelError):
    """The provider failed in a way that another try can mend (429, 5xx, a dropped connection...)."""

    kind = "transient_provider"


class ProviderError(ModelError):
    """The provider refused in a way that nobody can retry away (401, 404, 422...)."""


class ContextOverflowError(ModelError):
    """The provider says that the prompt is too long."""

    kind = "context_overflow"


class ToolError(AgentfsmError):
    """Raised by a tool to say how it failed, where an ordinary exception would not say enough.

    Attributes:
        kind: The value of a ``FailureKind`` that a tool may report: ``tool_error`` (default),
            ``ambiguous_input``, ``scope_too_large``, ``capability_gap``, ``kernel_invalidated``,
            ``environment_error`` or ``policy_violation``.
        blockers: Concrete reasons why the work cannot go on.
    """

    def __init__(self, message: str, *, kind: str = "tool_error", blockers: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.kind = kind
        self.blockers = tuple(blockers)
