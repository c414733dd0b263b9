"""``WorkerSettings``: how a worker works."""

from __future__ import annotations

from dataclasses import dataclass

from agentfsm.errors import ConfigurationError
from agentfsm.workers.notices import Notify
from agentfsm.workers.spend_limits import SpendLimit


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """How a worker works.

    Attributes:
        sweep_s: Seconds between two searches of the store for runs that were cut off.
        settle_s: Seconds after which an activation that was delivered, and whose run nobody has acquired, counts as
            lost with its worker.
        max_attempts: How often a run is tried without progress before it is set aside.
        grace_s: Seconds for which effects that have begun may go on when the worker is to stop.
        forget_s: Seconds after which an activation that was handled is deleted from the engine's tables.
        spend_limits: What the runs with a tag may cost a day before no more of them are started.
        notify: Sends a notice of each request that a run of the store waits for, such as a ``Webhook``; None for no
            notices.
        remind_after_s: Seconds after which people are reminded of a request, again and again, unless its ``Approval``
            says another time; None for no reminders.
        viewer_url: Where the viewer is, for a link in each notice; empty for no link.

    Raises:
        ConfigurationError: A number is too small, or something about notices is given without ``notify``.
    """

    sweep_s: float = 0.25
    settle_s: float = 2.0
    max_attempts: int = 5
    grace_s: float = 30.0
    forget_s: float = 3600.0
    spend_limits: tuple[SpendLimit, ...] = ()
    notify: Notify | None = None
    remind_after_s: float | None = None
    viewer_url: str = ""

    def __post_init__(self) -> None:
        if not (self.sweep_s > 0 and self.settle_s > 0 and self.max_attempts >= 1):
            raise ConfigurationError("sweep_s and settle_s must be greater than 0, and max_attempts at least 1")
        if not (self.grace_s >= 0 and self.forget_s >= 0):
            raise ConfigurationError("grace_s and forget_s must not be negative")
        if self.notify is None and (self.remind_after_s is not None or self.viewer_url):
            raise ConfigurationError("remind_after_s and viewer_url are for notices: say with notify= where they go")
