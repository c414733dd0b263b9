"""Calls that another run answers: a sub-agent's, or one that an MCP server starts when it asks a model or a person."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentfsm.loop.events import Event
from agentfsm.loop.human_input import SuspendedSubRun
from agentfsm.loop.messages import Message, ToolResult, Usage
from agentfsm.loop.state import CallState, RunState
from agentfsm.runtime.host import Host


class AnsweringRun(Protocol):
    """The run that answers a call or a request, and what it has used."""

    @property
    def run_id(self) -> str:
        """The id of the run; empty until it exists, and if there is none."""
        ...

    @property
    def usage(self) -> Usage:
        """What it has used since it was started or resumed for this."""
        ...

    @property
    def model_calls(self) -> int:
        """How many model calls were made for it since then, the one that was cut off included."""
        ...


class Delegation(AnsweringRun, Protocol):
    """One call that is answered by a sub-agent's run, or by a server that may ask a person or a model."""

    @property
    def secrets(self) -> tuple[Any, ...]:
        """What that run knows to be secret."""
        ...

    async def execute(self, arguments: Mapping[str, Any]) -> ToolResult | SuspendedSubRun:
        """The call's result; or what is suspended, if it waits for a human.

        Raises:
            agentfsm.errors.ToolError: The call failed.
        """
        ...


@dataclass(frozen=True, slots=True)
class BudgetShare:
    """A sub-agent's share of the calling run's remaining budget.

    Attributes:
        shared_by: How many sub-agents start together; each gets an equal share.
        uncharged: What other calls of the batch have used that the run has not been charged for yet.
        uncharged_model_calls: How many model calls these have made.
    """

    shared_by: int = 1
    uncharged: Usage = field(default_factory=Usage)
    uncharged_model_calls: int = 0


@dataclass(frozen=True, slots=True)
class CallingRun:
    """The run that calls a sub-agent, and what it imposes on the sub-agent's run.

    Attributes:
        run: The run.
        host: Its host.
        share: The sub-agent's share of what is left of its budgets.
        uncharged_s: Seconds that have passed since the run was last charged for its time.
        permissions: Its permission policies: they decide about the sub-agent's calls too.
        on_event: Receives the events of the sub-agent's run; None if nobody receives those of the calling run.
        on_run: Receives the sub-agent's run before it begins, and raises if the calling run was handed over.
        deps: Its dependencies, or None.
        secrets: What it knows to be secret.
        progress: Says how far the call is, as ``ToolContext.progress``; None if nobody follows the calling run.
        longest_wait_s: How long the sub-agent's run is held while it waits before a retry; None for any time.
    """

    run: RunState
    host: Host
    share: BudgetShare
    uncharged_s: float = 0.0
    permissions: tuple[Callable[[Any], Any], ...] = ()
    on_event: Callable[[Event], None] | None = None
    on_run: Callable[[Any], None] | None = None
    deps: Any = field(default=None, repr=False)
    secrets: tuple[Any, ...] = ()
    progress: Callable[[str, float | None], None] | None = None
    longest_wait_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """What a server asks a model during a call of one of its tools.

    Attributes:
        messages: The conversation; the last message is the user's.
        instructions: The system prompt that it asks for, or an empty string.
        settings: The sampling settings that it asks for, by the names of ``ModelSettings``.
        max_tokens: The maximum length of the reply, in tokens.
    """

    messages: tuple[Message, ...]
    instructions: str
    settings: Mapping[str, Any]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class SampledReply:
    """What a model replied.

    Attributes:
        text: The text.
        truncated: Whether it reached the maximum length.
        model: The model's name.
    """

    text: str
    truncated: bool
    model: str


class Sample(AnsweringRun, Protocol):
    """One request of a server for a model's reply, which is answered by a run."""

    async def reply(self, spent: Usage, model_calls: int, elapsed_s: float) -> SampledReply:
        """The reply.

        Args:
            spent: What the call has used before, for which the calling run is not charged yet.
            model_calls: How many model calls were made for it.
            elapsed_s: Seconds for which the call runs.

        Raises:
            ToolError: There is none; the text says why.
        """
        ...


class Sampler(Protocol):
    """Answers what servers ask a model, within the budgets of the runs that call them."""

    def sample(self, caller: CallingRun, call_id: str, run_id: str, request: SampleRequest) -> Sample:
        """Answer one request.

        Args:
            caller: The calling run.
            call_id: The id of the call during which the server asks.
            run_id: The id of the run that answers it; the same if the call is repeated after a crash.
            request: The request.
        """
        ...

    async def left_runs(self, caller: CallingRun) -> Sequence[str]:
        """As ``Delegate.left_runs``."""
        ...

    async def dismiss(self, caller: CallingRun, run_id: str, reason: str) -> None:
        """As ``Delegate.dismiss``."""
        ...


def run_id_for_call(run: RunState, call_state: CallState) -> str:
    """The id of the first run that answers a call of a run's batch."""
    index = next(i for i, each in enumerate(run.batch) if each is call_state)
    return f"{run.run_id}-{run.turns}.{index}"


def run_id_for_request(run: RunState, call_state: CallState, request: str) -> str:
    """The id of the run that answers a request of a server during a call; ``request`` tells which."""
    return f"{run_id_for_call(run, call_state)}-{request}"
