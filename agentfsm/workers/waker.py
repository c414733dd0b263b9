"""``Waker``: what an engine of durable queues and timers has to do for workers.

A waker delivers *activations*: each is a reason to look at one run and to continue it. It knows nothing of what the
run is or how far it has come; the store does. So an activation that is delivered twice, late, or to a worker that dies
does no harm: whoever acquires the run first, in a new epoch, continues it, and all others find that they came too late.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agentfsm.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class StartRate:
    """How many new runs of an agent workers start, all of them together.

    Attributes:
        runs: How many.
        seconds: In how many seconds, whenever those begin.

    Raises:
        ConfigurationError: One of them is not greater than 0.
    """

    runs: int
    seconds: float

    def __post_init__(self) -> None:
        if self.runs < 1 or not 0 < self.seconds < float("inf"):
            raise ConfigurationError(f"a rate must be at least one run in more than 0 seconds, not {self}")


LONGEST_SHARED_POLL_S = 1.5
"""The longest time between two polls of a queue by a process that shares the polling, in seconds."""


@dataclass(frozen=True, kw_only=True)
class QueueSettings:
    """How the queues of an engine are served.

    Attributes:
        concurrency: How many activations of a queue a process handles at a time.
        tenant_concurrency: How many of a queue are handled at a time for one tenant, by all processes together; None
            for no such limit.
        rate: How many new runs of an agent are started in how many seconds, by all processes together; None for no
            such limit.
        poll_s: Seconds between two polls of a queue by a process, while at most two processes are at work; more of them
            share the polling.

    Raises:
        ConfigurationError: A number is too small.
    """

    concurrency: int = 10
    tenant_concurrency: int | None = None
    rate: StartRate | None = None
    poll_s: float = 0.2

    def __post_init__(self) -> None:
        if self.concurrency < 1 or (self.tenant_concurrency is not None and self.tenant_concurrency < 1):
            raise ConfigurationError("concurrency and tenant_concurrency must be at least 1")
        if not 0 < self.poll_s < float("inf"):
            raise ConfigurationError(f"poll_s must be greater than 0 seconds, not {self.poll_s}")

    def shared_poll_s(self, processes: int) -> float:
        """Seconds between two polls of a queue by a process, so that all that are at work poll as often as two would.

        What is queued is then found as soon on average, and the cost of polling does not grow with the processes. But
        each polls at least every 1.5 seconds: all others may have as many runs as they handle at a time.

        Args:
            processes: How many processes handle activations of the queues.
        """
        return max(self.poll_s, min(self.poll_s * processes / 2, LONGEST_SHARED_POLL_S))


MAX_PRIORITY = 1000
"""A priority is a whole number from minus this to this."""


def timer_key(run_id: str, epoch: int) -> str:
    """The key of the timer of a run, which has one in an epoch."""
    return f"{run_id}:{epoch}:due"


@dataclass(frozen=True, slots=True)
class Activation:
    """A reason to look at a run.

    Attributes:
        run_id: The run.
        epoch: The epoch in which the run was seen; 0 for a run that was submitted and has not begun.
        queue: The queue whose workers know its agent.
        request: For a run that has not begun, what was submitted, sealed; else empty.
        priority: Lower numbers come first, where the engine has priorities; 0 is the default.
        tenant: Whose run it is, where the engine has limits by tenant; empty for nobody's.
        is_timer: Whether it is for a time: when a request of the run expires or is escalated, or a wait is over.
        notice: For a notice of what the run waits for, its place in the chain of these, from 1; else 0.
        reminder: For a notice, the number of the reminder; 0 for the first notice.
        attempt: For a notice, how often it could not be sent.
    """

    run_id: str
    epoch: int
    queue: str
    request: str = ""
    priority: int = 0
    tenant: str = ""
    is_timer: bool = False
    notice: int = 0
    reminder: int = 0
    attempt: int = 0

    @property
    def key(self) -> str:
        """``RUN:EPOCH``, with ``:due`` for a timer and ``:notice-N`` for a notice: two with the same key are one."""
        if self.is_timer:
            return timer_key(self.run_id, self.epoch)
        return f"{self.run_id}:{self.epoch}{f':notice-{self.notice}' if self.notice else ''}"


@dataclass(frozen=True, slots=True)
class DeliveredActivation:
    """An activation that was delivered to a worker, which has not finished it."""

    activation: Activation
    deliveries: int


@dataclass(frozen=True, slots=True)
class SetAside:
    """A run that no worker continues until it is put back.

    Attributes:
        activation: The activation that was set aside.
        reason: Why.
        until: When a worker puts it back, in seconds since the epoch; None for when a person does.
    """

    activation: Activation
    reason: str
    until: float | None = None


Deliver = Callable[[Activation], Coroutine[Any, Any, str]]
"""Handles one activation. Returns a word on how that went, for the engine's own display, and never raises."""


class Waker(Protocol):
    """Wakes runs, through an engine whose queues and timers survive a crash."""

    async def wake(self, activation: Activation, *, delay_s: float = 0.0) -> bool:
        """Have an activation delivered, to one of the workers that serve its queue.

        Args:
            activation: The activation. One whose key is queued, being handled or set aside is not queued again; if it
                waits for its time, it is brought forward. One that was handled is queued again, and
                one that is in the queue of another version of its agent is moved.
            delay_s: Seconds to wait before that.

        Returns:
            Whether it was queued.

        Raises:
            agentfsm.errors.StoreError: The engine cannot be reached.
        """
        ...

    async def bring_forward(self, key: str) -> None:
        """Deliver an activation now if it waits for its time; do nothing if there is none with that key."""
        ...

    async def due(self, keys: Collection[str] = (), *, prefix: str | None = None) -> dict[str, float]:
        """When each of some activations is delivered, by key, in seconds since the epoch.

        Args:
            keys: The keys of the activations.
            prefix: How their keys begin, instead of the keys.

        Returns:
            The times of those that are unfinished; 0 for one that is queued or being handled now.
        """
        ...

    async def unfinished(self, older_than_s: float) -> list[DeliveredActivation]:
        """The activations that were delivered at least so many seconds ago, to any worker, and are not finished."""
        ...

    async def redeliver(self, activation: Activation, older_than_s: float) -> None:
        """Deliver an activation again that was delivered at least so many seconds ago and is not finished."""
        ...

    async def drop(self, activation: Activation) -> None:
        """Finish an unfinished activation whose worker died."""
        ...

    async def forget(self, older_than_s: float) -> None:
        """Delete activations that were finished at least so many seconds ago, without those that are set aside."""
        ...

    async def set_aside(self, activation: Activation, reason: str, until: float | None = None) -> None:
        """Keep an activation that was delivered, with a reason, so that it is not delivered again.

        Args:
            activation: The activation.
            reason: Why.
            until: When a worker is to put it back, in seconds since the epoch; None for when a person does.
        """
        ...

    async def list_set_aside(self, keys: Collection[str] | None = None) -> list[SetAside]:
        """The activations that are set aside, the oldest first; those with some keys, or all of them."""
        ...

    async def put_back(self, run_id: str) -> bool:
        """Have a run that is set aside delivered again; False if it is not set aside."""
        ...

    async def was_put_back(self, activation: Activation) -> bool:
        """Whether an activation was set aside and put back since."""
        ...

    async def serve(self, queues: Sequence[str], deliver: Deliver) -> None:
        """Deliver activations of some queues to this process, until ``stop``. Returns as soon as it does so."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Accept no more activations, and wait for those that are being handled.

        Args:
            grace_s: Seconds to wait at most.
        """
        ...

    async def aclose(self) -> None:
        """Release all resources."""
        ...
