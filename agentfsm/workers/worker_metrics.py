"""What a worker has done: counted for its health, and for OpenTelemetry if that is installed (extra ``otel``)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentfsm.workers.waker import Activation

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider


class WorkerMetrics:
    """The metrics of a worker; without OpenTelemetry they go nowhere.

    ``agentfsm.worker.activations`` counts what was handled, by queue and ``outcome``; how long that took is
    ``agentfsm.worker.activation.duration`` (seconds). ``agentfsm.worker.active`` is how many are being handled, and
    ``agentfsm.worker.cut_off`` counts the runs of other processes that were found cut off.

    Args:
        provider: Receives them; by default the global one.
    """

    def __init__(self, provider: MeterProvider | None = None) -> None:
        try:
            from opentelemetry import metrics
        except ImportError:
            self._instruments: tuple[Any, ...] = ()
            return
        meter = metrics.get_meter("agentfsm", meter_provider=provider)
        self._instruments = (
            meter.create_up_down_counter("agentfsm.worker.active", "{activation}", "Activations being handled"),
            meter.create_counter("agentfsm.worker.activations", "{activation}", "Activations handled"),
            meter.create_histogram("agentfsm.worker.activation.duration", "s", "Time to handle an activation"),
            meter.create_counter("agentfsm.worker.cut_off", "{run}", "Runs of other processes found cut off"),
        )

    def began(self, queue: str) -> None:
        """An activation of a queue is being handled."""
        if self._instruments:
            self._instruments[0].add(1, {"queue": queue})

    def handled(self, queue: str, outcome: str, seconds: float) -> None:
        """An activation of a queue was handled.

        Args:
            queue: The queue.
            outcome: How that went, in a word.
            seconds: How long it took.
        """
        if self._instruments:
            active, activations, duration, _ = self._instruments
            active.add(-1, {"queue": queue})
            activations.add(1, {"queue": queue, "outcome": outcome})
            duration.record(seconds, {"queue": queue, "outcome": outcome})

    def found_cut_off(self, queue: str) -> None:
        """A run of another process was found cut off."""
        if self._instruments:
            self._instruments[3].add(1, {"queue": queue})


@dataclass
class WorkerCounts:
    """What a worker has done since it started.

    Attributes:
        metrics: What is told of it; None for nothing.
        active: How many activations it is handling.
        handled: How many it has handled, by how that went.
        cut_off: How many runs of other processes it has found cut off.
        runs: The runs whose activations it is handling.
    """

    metrics: WorkerMetrics | None = None
    active: int = 0
    handled: dict[str, int] = field(default_factory=dict[str, int])
    cut_off: int = 0
    runs: Counter[str] = field(default_factory=Counter[str])

    def begin(self, activation: Activation) -> None:
        """An activation is being handled."""
        self.active += 1
        self.runs[activation.run_id] += 1
        if self.metrics is not None:
            self.metrics.began(activation.queue)

    def end(self, activation: Activation, outcome: str, seconds: float) -> None:
        """An activation was handled."""
        self.active -= 1
        self.runs -= Counter([activation.run_id])
        self.handled[outcome] = self.handled.get(outcome, 0) + 1
        if self.metrics is not None:
            self.metrics.handled(activation.queue, outcome, seconds)

    def find_cut_off(self, queue: str) -> None:
        """A run of another process was found cut off."""
        self.cut_off += 1
        if self.metrics is not None:
            self.metrics.found_cut_off(queue)
