"""Signals: answers and cancellations that wait in a store until a process that has the agent of the run acts on them.

An answer that it cannot act on it replaces by a *refusal*, which says why, for whoever answered to read. If another
process might act on it, which has the tool that was shown, the answer stays beside its refusal, and can be overridden
by a denial.

A signal names a record of its run that whoever sent it had seen, and has a MAC under the secret of the host, so that
nobody without the secret can answer or cancel a run by writing to the store. It is removed once what it led to is
durable. A process that dies between the two leaves a signal that no longer fits its run, and is not acted on again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, cast

from agentfsm.journal.maintenance import Damage
from agentfsm.loop.canonical_json import decode, encode
from agentfsm.loop.human_input import HumanReply
from agentfsm.loop.keys import KeyPurpose, Keyring
from agentfsm.loop.quorum import Actor
from agentfsm.loop.withholding import SecretOpener, seal_value

SignalKind = Literal["answer", "cancel", "refusal"]

_VERSION = 1


class SealedSignal(NamedTuple):
    """A signal as a store keeps it.

    Attributes:
        id: Names it; a store has one signal with an id at a time.
        run_id: The run.
        body: What it says, as JSON.
        mac: The seal of the body under a secret of the host, in hex.
    """

    id: str
    run_id: str
    body: str
    mac: str


@dataclass(frozen=True, slots=True)
class Signal:
    """An answer to a run that waits, the request to cancel a run, or why an answer was refused.

    Attributes:
        id: Names it; see ``signal_id``.
        run_id: The run.
        kind: ``answer``, ``cancel`` or ``refusal``.
        to: Sequence number and hash of the record that the sender had seen: for an answer and its refusal that of the
            request, for a cancellation the last one; 0 and any hash for a run without a record.
        sent_at: When it was sent, in seconds since the epoch.
        actor: Who sent it, or None if nobody said; for a refusal, who sent the answer.
        reply: For an answer, the reply; for a refusal, no more than its kind.
        reason: For a cancellation or a refusal, why.
    """

    id: str
    run_id: str
    kind: SignalKind
    to: tuple[int, str]
    sent_at: float
    actor: Actor | None = None
    reply: HumanReply | None = None
    reason: str = ""

    @property
    def cancel_reason(self) -> str:
        """Why the run is cancelled, and by whom."""
        return self.reason if self.actor is None else f"{self.reason} (by {self.actor})"

    def __str__(self) -> str:
        by = "" if self.actor is None else f" by {self.actor}"
        kind = "" if self.reply is None else f" ({self.reply.kind})"
        match self.kind:
            case "refusal":
                return f"the last answer{kind}{by} was refused: {self.reason}"
            case "cancel":
                return f"cancelled{by}: it waits for a process that has the agent"
            case _:
                return f"answered{kind}{by}: it waits for a process that has the agent"


class SignalQueue(Protocol):
    """The signals of a store. Each is kept until it is removed, durably where the store is durable."""

    async def send(self, signal: SealedSignal) -> bool:
        """Keep a signal, and wake whoever runs the run or listens.

        Returns:
            True once it is durable; False if there is another signal with that id, which stays as it is.

        Raises:
            agentfsm.errors.UnknownRunError: There is no such run.
            agentfsm.errors.StoreError: The store cannot write.
        """
        ...

    async def pending(self, run_id: str | None = None) -> list[SealedSignal]:
        """The signals of one run, or of all runs, that were not removed yet, the oldest first.

        Raises:
            agentfsm.errors.StoreError: The store cannot be read.
        """
        ...

    async def remove(self, signal_id: str) -> None:
        """Remove a signal, and erase what it said; does nothing if there is no such signal.

        Raises:
            agentfsm.errors.StoreError: The store cannot write.
        """
        ...

    def listen(self) -> AsyncGenerator[str]:
        """The ids of runs that have signals: of those that have some now, and then of each that gets one, forever.

        An id may come again, even if nothing of it is left to do. It comes at once if the signal was sent through a
        store that can wake this one, and else after a few seconds.

        Raises:
            agentfsm.errors.StoreError: The store cannot be read.
        """
        ...


def signal_id(run_id: str, kind: SignalKind, digest: str = "", voter: str = "") -> str:
    """The id of a signal, the same for all that say the same: a second answer to a request is refused by the store.

    Args:
        run_id: The run.
        kind: What it is.
        digest: For an answer, the hash of the record with the request; for a refusal, the id of the answer.
        voter: For one of several votes, who votes.
    """
    return hashlib.sha256(encode([run_id, kind, digest, voter]).encode()).hexdigest()[:32]


def refusal_of(answer: Signal, reason: str, now: float) -> Signal:
    """The refusal of an answer."""
    kind: SignalKind = "refusal"
    refused = None if answer.reply is None else HumanReply(answer.reply.kind)
    own_id = signal_id(answer.run_id, kind, answer.id)
    return Signal(own_id, answer.run_id, kind, answer.to, now, answer.actor, refused, reason)


def seal_signal(signal: Signal, keyring: Keyring) -> SealedSignal:
    """A signal as a store keeps it. What it says is encrypted where the package ``cryptography`` is installed."""
    content: dict[str, Any] = {"ts": int(signal.sent_at * 1000)}
    if signal.reply is not None:
        reply = signal.reply
        content["reply"] = {
            "kind": reply.kind,
            "text": reply.text,
            "arguments": reply.arguments,
            "unit": reply.unit,
            "amount": reply.amount,
        }
    if signal.reason:
        content["reason"] = signal.reason
    body: dict[str, Any] = {
        "v": _VERSION,
        "id": signal.id,
        "run": signal.run_id,
        "kind": signal.kind,
        "to": list(signal.to),
        "content": seal_value(keyring.current, content) or content,
    }
    if (actor := signal.actor) is not None:
        body["actor"] = {"id": actor.id, "roles": actor.roles, "kind": actor.kind, "verified": actor.verified}
    text = encode(body)
    mac = keyring.current.seal(KeyPurpose.signal, text.encode("utf-8", "surrogatepass"))
    return SealedSignal(signal.id, signal.run_id, text, mac)


def open_signal(sealed: SealedSignal, keyring: Keyring) -> Signal | None:
    """What a signal says; None if none of the host's secrets sealed it, so that it must not be acted on.

    Raises:
        agentfsm.errors.MissingExtraError: It is encrypted, and the package ``cryptography`` is not installed.
    """
    if not _is_sealed(sealed, keyring):
        return None
    body = cast("Mapping[str, Any]", decode(sealed.body))
    if body["v"] != _VERSION:
        return None  # what a newer release means is not known
    content: Any = body["content"]
    if isinstance(content, str):
        content = SecretOpener(keyring).open(content)
        if isinstance(content, str):
            return None  # it was encrypted under a secret that this host does not have
    seq, digest = body["to"]
    actor = body.get("actor")
    return Signal(
        sealed.id,
        sealed.run_id,
        body["kind"],
        (seq, digest),
        content["ts"] / 1000,
        None if actor is None else Actor(actor["id"], tuple(actor["roles"]), actor["kind"], actor["verified"]),
        HumanReply(**content["reply"]) if "reply" in content else None,
        content.get("reason", ""),
    )


def _is_sealed(sealed: SealedSignal, keyring: Keyring) -> bool:
    """Whether somebody with a secret of the host wrote a row."""
    text = sealed.body.encode("utf-8", "surrogatepass")
    if not keyring.check_seal(KeyPurpose.signal, text, sealed.mac):
        return False
    body = cast("Mapping[str, Any]", decode(sealed.body))
    return (body["id"], body["run"]) == (sealed.id, sealed.run_id)


async def read_signals(signals: SignalQueue, keyring: Keyring, run_id: str | None = None) -> list[Signal]:
    """The signals of one run, or of all runs, that a secret of the host sealed, the oldest first.

    Raises:
        agentfsm.errors.MissingExtraError: One is encrypted, and the package ``cryptography`` is not installed.
        agentfsm.errors.StoreError: The store cannot be read.
    """
    opened = [open_signal(sealed, keyring) for sealed in await signals.pending(run_id)]
    return [signal for signal in opened if signal is not None]


def without_refused(signals: Sequence[Signal]) -> list[Signal]:
    """The answers and cancellations among some signals, except the answers that a process could not act on."""
    ids = {each.id for each in signals}
    return [
        each for each in signals if each.kind != "refusal" and signal_id(each.run_id, "refusal", each.id) not in ids
    ]


async def find_foreign_signals(signals: SignalQueue, keyring: Keyring) -> list[Damage]:
    """An entry for each signal that no secret of the host sealed: somebody else wrote or changed its row.

    Raises:
        agentfsm.errors.StoreError: The store cannot be read.
    """
    return [
        Damage(sealed.run_id, f"somebody without the secret wrote the signal {sealed.id!r}; nothing acts on it")
        for sealed in await signals.pending()
        if not _is_sealed(sealed, keyring)
    ]


def is_about(signal: Signal, digest: str | None) -> bool:
    """Whether the record that a signal names is in the journal of its run."""
    return not signal.to[0] or signal.to[1] == digest


# -- whom a store tells of new signals ------------------------------------------------------------------

RECHECK_S = 30.0
"""Seconds after which all pending signals are listed again, even where each new one is announced: for those that could
not be acted on by whoever held the run."""


class _Listener:
    """One iteration over the runs that get signals."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.notified = asyncio.Event()
        self.run_ids: dict[str, None] = {}

    def notify(self, run_id: str) -> None:
        self.run_ids[run_id] = None
        self.notified.set()

    async def is_notified(self, until: float) -> bool:
        """Whether it is notified before a time of its loop."""
        try:
            async with asyncio.timeout_at(until):
                await self.notified.wait()
        except TimeoutError:
            return False
        return True

    def take(self) -> list[str]:
        run_ids, self.run_ids = list(self.run_ids), {}
        self.notified.clear()
        return run_ids


class _Lease(Protocol):
    def signal(self) -> None:
        """Tell the owner of a run that it has got a signal; see ``Lease.signal``."""


class SignalHub:
    """Notifies whoever in this process has to know of the signals of one store."""

    def __init__(self, lease_of: Callable[[str], _Lease | None]) -> None:
        self._lease_of = lease_of
        self._listeners: set[_Listener] = set()

    def notify(self, run_id: str) -> None:
        """Tell the owner of a run, and every listener, that it has got a signal; may be called from any thread."""
        lease = self._lease_of(run_id)
        if lease is not None:
            lease.signal()
        for listener in tuple(self._listeners):
            with contextlib.suppress(RuntimeError):  # its loop is closed
                listener.loop.call_soon_threadsafe(listener.notify, run_id)

    async def listen(
        self,
        read_pending: Callable[[], Awaitable[Iterable[SealedSignal]]],
        recheck_s: Callable[[], float] = lambda: RECHECK_S,
    ) -> AsyncGenerator[str]:
        """The ids of runs that have signals, and of those that get some, forever."""
        listener = _Listener()
        self._listeners.add(listener)  # before they are read, so that none is missed
        try:
            while True:
                for run_id in dict.fromkeys([signal.run_id for signal in await read_pending()]):
                    yield run_id
                recheck_at = listener.loop.time() + recheck_s()
                while await listener.is_notified(recheck_at):
                    for run_id in listener.take():
                        yield run_id
        finally:
            self._listeners.discard(listener)
