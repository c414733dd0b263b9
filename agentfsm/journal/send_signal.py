"""Sends answers and cancellations to stored runs, after checking that they still fit what the run waits for."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from agentfsm.errors import (
    JournalError,
    MissingExtraError,
    RepeatedVoteError,
    RunEndedError,
    RunError,
    StaleHumanReplyError,
    SuspensionExpiredError,
    UnknownRunError,
)
from agentfsm.journal.load import StoredRequest, is_subagent_run, pending_request
from agentfsm.journal.signals import (
    Signal,
    SignalKind,
    SignalQueue,
    read_signals,
    seal_signal,
    signal_id,
    without_refused,
)
from agentfsm.journal.store import Head, Store
from agentfsm.loop.canonical_json import encode
from agentfsm.loop.human_input import HumanReply
from agentfsm.loop.keys import KeyPurpose, Keyring
from agentfsm.loop.quorum import Actor
from agentfsm.loop.suspension import check_digest, check_human_reply
from agentfsm.loop.withholding import environment_secrets, lacks_values, mask_secrets, seal_value


@dataclass(frozen=True, slots=True)
class SentSignal:
    """An answer or a cancellation that a store keeps until a process acts on it.

    Attributes:
        run_id: The run.
        kind: ``answer`` or ``cancel``.
        owner: The process that runs the run and was told; None if it waits for the next process that has its agent.
    """

    run_id: str
    kind: SignalKind
    owner: str | None


async def send_answer(
    store: Store,
    run_id: str,
    reply: HumanReply,
    keyring: Keyring,
    *,
    actor: Actor | None = None,
    to: str | None = None,
    secrets: Iterable[str] = (),
    authenticated: bool = False,
) -> SentSignal:
    """Send a reply to what a stored run waits for.

    Args:
        store: The store that has the run.
        run_id: The run.
        reply: The reply.
        keyring: The keys of the host: one of them sealed the run, and the current one seals the reply.
        actor: Who replies, or None.
        to: The digest of the request that was shown to them, or at least its first 12 digits; None for whatever the
            run asks now.
        secrets: What the host declares to be secret, in addition to what the environment says.
        authenticated: Whether the host authenticates people.

    Raises:
        UnknownRunError: There is no such run.
        RunEndedError: It has ended.
        RunError: It is a sub-agent's.
        HumanReplyError: The reply does not fit what the run waits for, whoever replies may not, the request was
            answered already, or the run asks nothing or something else; each has a class of its own.
        SuspensionExpiredError: The request has expired.
        MissingExtraError: The reply has secret arguments, or a secret of the host, and cannot be encrypted.
        JournalError: The run was not sealed under a secret of the host, or was tampered with; or what it asks was
            redacted.
        StoreError: The store cannot be read or written.
    """
    head = await _head(store, run_id, keyring)
    request = await pending_request(store, head)
    if request is None:
        doing = f"{head.owner} is running it" if head.owner else "it was interrupted"
        raise StaleHumanReplyError(f"run {run_id!r} asks nothing now: {doing}")
    if to is not None:
        check_digest(to, run_id, (request.seq, request.digest), str(request))
    if request.is_redacted:
        raise JournalError(f"what run {run_id!r} asks was redacted, so it cannot continue: cancel it")
    if request.has_expired(now := time.time()):
        raise SuspensionExpiredError(f"the request of run {run_id!r} expired without a reply; cancel the run")
    check_human_reply(request.kind, reply)
    secret_arguments = reply.kind == "edit" and lacks_values(request.arguments)
    _check_encryption(secret_arguments, encode([reply.text, reply.arguments]), keyring, secrets)
    sent = await read_signals(store.signals, keyring, run_id)
    waiting, standing = ([each for each in some if each.kind == "answer"] for some in (sent, without_refused(sent)))
    overrides = reply.kind == "deny" and waiting != standing  # what the others allow is of a tool that was replaced
    voter = _check_votes(request, reply, actor, standing if overrides else waiting, now, authenticated)
    signal = Signal(
        signal_id(run_id, "answer", f"denial of {request.digest}" if overrides else request.digest, voter),
        run_id,
        "answer",
        (request.seq, request.digest),
        now,
        actor,
        reply,
    )
    if any(each.id == signal.id for each in waiting):
        raise _answered(run_id, waiting)
    await store.signals.remove(signal_id(run_id, "refusal", signal.id))  # of an earlier answer of the same voter
    if not await store.signals.send(seal_signal(signal, keyring)):
        raise _answered(run_id, await read_signals(store.signals, keyring, run_id))
    return SentSignal(run_id, "answer", None)


async def send_cancel(
    store: Store,
    run_id: str,
    reason: str,
    keyring: Keyring,
    *,
    actor: Actor | None = None,
    secrets: Iterable[str] = (),
) -> SentSignal:
    """Send a stored run the request to cancel itself. Sending it twice is sending it once.

    Args:
        store: The store that has the run.
        run_id: The run.
        reason: Why; becomes ``RunCancelled.reason``, with the actor.
        keyring: The keys of the host: one of them sealed the run, and the current one seals the request.
        actor: Who cancels it, or None.
        secrets: What the host declares to be secret, in addition to what the environment says.

    Raises:
        UnknownRunError: There is no such run.
        RunEndedError: It has ended.
        RunError: It is a sub-agent's.
        HumanReplyError: The run waits for people with a role, and the actor has none of these roles.
        MissingExtraError: The reason has a secret of the host, and cannot be encrypted.
        JournalError: The run was not sealed under a secret of the host, or was tampered with.
        StoreError: The store cannot be read or written.
    """
    _check_encryption(False, encode(reason), keyring, secrets)
    head = await _head(store, run_id, keyring, submitted=True)
    request = await pending_request(store, head)
    if request is not None and request.quorum is not None and actor is not None:
        request.quorum.check_reply("deny", actor)
    signal = Signal(
        signal_id(run_id, "cancel"), run_id, "cancel", (head.seq, head.hash), time.time(), actor, reason=reason
    )
    await store.signals.send(seal_signal(signal, keyring))  # an earlier one stays
    return SentSignal(run_id, "cancel", head.owner)


async def find_refusal(signals: SignalQueue, keyring: Keyring, request: StoredRequest) -> Signal | None:
    """Why an answer to a request was refused by a process that has the agent, the last one; None if none was.

    Raises:
        MissingExtraError: A signal is encrypted, and the package ``cryptography`` is not installed.
        StoreError: The store cannot be read.
    """
    found = await read_signals(signals, keyring, request.run_id)
    return next((each for each in reversed(found) if each.kind == "refusal" and each.to[1] == request.digest), None)


async def _head(store: Store, run_id: str, keyring: Keyring, *, submitted: bool = False) -> Head:
    """The head of a run that has not ended, or of one that was submitted and has not begun."""
    head = await store.head(run_id)
    begun_or_ended = head is not None and (head.seq or head.status == "finished")
    if head is None or not (begun_or_ended or (submitted and head.status == "suspended")):
        raise UnknownRunError(f"there is no run {run_id!r}")
    is_sealed = keyring.check_seal(KeyPurpose.run, head.row.encode(), head.mac) if head.mac else None
    if is_sealed is None:
        raise JournalError(
            f"run {run_id!r} was not sealed under this secret, so no process with its agent would believe what is sent "
            "to it: give the secret of the host that runs it"
        )
    if not is_sealed:
        raise JournalError(f"run {run_id!r} was changed by somebody without the secret: agentfsm verify shows how")
    if head.status == "finished":
        raise RunEndedError(f"run {run_id!r} has ended")
    if await is_subagent_run(store, run_id):
        raise RunError(f"run {run_id!r} is a sub-agent's run: answer or cancel the run that called it")
    return head


def _check_encryption(secret_arguments: bool, text: str, keyring: Keyring, secrets: Iterable[str]) -> None:
    """Refuse to write secret arguments, or a text with a secret of the host or the environment, as they are."""
    if seal_value(keyring.current, "") is None:
        known = [*environment_secrets(os.environ), *secrets]
        if secret_arguments or mask_secrets(text, known) != text:
            raise MissingExtraError("what waits in a store and has secrets in it", "sealing")


def _check_votes(
    request: StoredRequest,
    reply: HumanReply,
    actor: Actor | None,
    waiting: Sequence[Signal],
    now: float,
    authenticated: bool,
) -> str:
    """Check that an actor may reply; returns what tells the vote from the other votes on the request."""
    quorum = request.quorum
    if quorum is None:
        return ""
    quorum = replace(quorum, escalated=quorum.escalated or quorum.is_due(now))
    quorum.check_reply(reply.kind, actor, authenticated=authenticated)
    if quorum.rule.n == 1:
        return ""
    for each in waiting:  # votes on their way count, too
        if each.actor is None or each.reply is None or each.reply.kind == "deny" or not quorum.missing:
            raise _answered(request.run_id, waiting)
        if actor is not None and each.actor.is_same_as(actor) and reply.kind != "deny":
            raise RepeatedVoteError(f"{actor.id!r} has approved this call already, and the vote is on its way")
        quorum = quorum.with_vote(each.actor)
    if waiting and not quorum.missing:
        raise _answered(request.run_id, waiting)
    return "" if actor is None or reply.kind == "deny" else actor.id


def _answered(run_id: str, waiting: Sequence[Signal]) -> StaleHumanReplyError:
    by = next((str(each.actor) for each in waiting if each.kind == "answer" and each.actor is not None), "")
    return StaleHumanReplyError(
        f"run {run_id!r} was answered already{f' by {by}' if by else ''}; a process with its agent will act on that"
    )
