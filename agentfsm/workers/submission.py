"""``Submission``: a run for a worker to start, and its sealed form for the queue.

A queue is kept by an engine in tables of its own, which other people may browse and back up than those of the store. So
what was submitted is encrypted there under the host's sealing key, and bound to its run.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from agentfsm.agent.run_options import run_details
from agentfsm.errors import JournalError, MissingExtraError, RunError, RunExistsError, StaleLease, StoreLockedError
from agentfsm.journal.listing import find_listing
from agentfsm.journal.run_info import RunInfo, WaitingFor, listed_metadata, listed_text
from agentfsm.journal.signals import read_signals
from agentfsm.journal.store import Store
from agentfsm.loop.canonical_json import decode, encode
from agentfsm.loop.keys import KeyPurpose, Keyring, SecretKeys
from agentfsm.loop.quorum import Actor
from agentfsm.loop.withholding import environment_secrets, mask_secrets
from agentfsm.workers.waker import MAX_PRIORITY, Activation, Waker

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESSIV

QUEUED = "worker"
"""What a submitted run is listed as waiting for, until a worker starts it."""

SUBMITTER = "a process that submits it"
"""The owner of a run while it is being submitted."""

_TENANT = "tenant:"
_LONGEST_NAME = 100


def agent_tag(name: str) -> str:
    """The tag of the runs of an agent that workers serve under a name."""
    return f"agent:{name}"


def submission_queue(agent: str, key_id: str) -> str:
    """The queue of the new runs of an agent: a worker without the secret that sealed them never gets them."""
    return f"{agent}:{key_id}"


def tenant_of(tags: Iterable[str]) -> str:
    """The tenant that a tag such as ``tenant:acme`` names; empty if none does."""
    return next((tag.removeprefix(_TENANT) for tag in tags if tag.startswith(_TENANT)), "")


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A run for a worker to start.

    Attributes:
        agent: The name under which workers serve its agent.
        prompt: The user's message.
        session_id: The conversation's id.
        actor: Who requests it, as ``agent.run`` takes it: an ``Actor``, a name or a token.
        tags: Its tags. One such as ``tenant:acme`` says whose run it is, for limits by tenant. None begins with
            ``agent:``: that tag is added by agentfsm.
        metadata: A JSON object, from which the agent's ``deps_factory`` may make its dependencies.

    Raises:
        RunError: One of them is not what it must be.
    """

    agent: str
    prompt: str
    session_id: str = ""
    actor: Actor | str | None = field(default=None, repr=False)
    tags: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        for name, value in (("agent", self.agent), ("prompt", self.prompt)):
            if not isinstance(value, str) or not value.strip():  # pyright: ignore[reportUnnecessaryIsInstance]
                raise RunError(f"{name} must be a string that is not blank, not {value!r}")
        if len(self.agent) > _LONGEST_NAME or ":" in self.agent or "@" in self.agent:
            raise RunError(
                f"agent {self.agent!r}: a name has at most {_LONGEST_NAME} characters, and no ':' and no '@'"
            )
        details = run_details(self.tags, self.metadata, None)
        if reserved := [tag for tag in details.tags if tag.startswith(agent_tag(""))]:
            raise RunError(
                f"tag {reserved[0]!r}: tags that begin with {agent_tag('')!r} say which agent a run belongs to, and "
                f"are set by agentfsm; name the agent instead (agent={self.agent!r})"
            )
        object.__setattr__(self, "tags", details.tags)
        object.__setattr__(self, "metadata", dict(details.metadata))

    @property
    def all_tags(self) -> tuple[str, ...]:
        """Its own tags, and the one for its agent."""
        return tuple(dict.fromkeys((*self.tags, agent_tag(self.agent))))


_SUBMISSION: TypeAdapter[Submission] = TypeAdapter(Submission)


def _cipher(keys: SecretKeys) -> AESSIV:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESSIV  # only workers and those who submit need it
    except ImportError as error:
        raise MissingExtraError("submitting runs", "dbos") from error
    return AESSIV(keys.key(KeyPurpose.sealing))


def seal_submission(submission: Submission, run_id: str, keyring: Keyring) -> str:
    """A submission, encrypted for the queue.

    Raises:
        MissingExtraError: The package that encrypts is not installed.
    """
    keys = keyring.current
    text = encode(_SUBMISSION.dump_python(submission))
    sealed = _cipher(keys).encrypt(text.encode(), [b"submission", run_id.encode()])
    return f"{keys.key_id} {base64.urlsafe_b64encode(sealed).decode()}"


def open_submission(sealed: str, run_id: str, keyring: Keyring) -> Submission:
    """A submission that was sealed.

    Raises:
        JournalError: It was not sealed under a secret of the host, or not for that run.
        MissingExtraError: The package that decrypts is not installed.
    """
    key_id, _, text = sealed.partition(" ")
    keys = keyring.find(key_id)
    if keys is None:
        raise JournalError(f"run {run_id!r} was submitted under another secret: give its workers the same one")
    cipher = _cipher(keys)
    try:
        opened = cipher.decrypt(base64.urlsafe_b64decode(text), [b"submission", run_id.encode()])
        return _SUBMISSION.validate_python(decode(opened.decode()))
    except (ValueError, ValidationError, RunError) as error:
        raise JournalError(f"what was submitted for run {run_id!r} cannot be read") from error
    except Exception as error:  # cryptography's InvalidTag, which is not imported where nothing is sealed
        raise JournalError(f"what was submitted for run {run_id!r} was changed since") from error


def run_id_for(agent: str, idempotency_key: str) -> str:
    """The id of the run that an idempotency key stands for.

    Args:
        agent: The name of the agent.
        idempotency_key: The key; the same key with the same agent is the same run.
    """
    if not idempotency_key.strip():
        raise RunError("an idempotency key is a text that is not blank")
    return hashlib.sha256(f"{agent}\n{idempotency_key}".encode(errors="surrogatepass")).hexdigest()[:16]


async def submit(
    store: Store,
    waker: Waker,
    keyring: Keyring,
    submission: Submission,
    *,
    idempotency_key: str | None = None,
    priority: int = 0,
    delay_s: float = 0.0,
    secrets_of_host: Iterable[str] = (),
) -> str:
    """Submit a run for the workers of an agent. When this returns, the request is stored.

    Args:
        store: The store in which the run is listed.
        waker: The engine that delivers it.
        keyring: The keys of the host.
        submission: The run.
        idempotency_key: Submitting again with the same key returns the same run, which is started once.
        priority: Lower numbers are started first.
        delay_s: Seconds to wait before it is started.
        secrets_of_host: What the host declares to be secret, in addition to what the environment says: the run is
            listed without it.

    Returns:
        The id of the run.

    Raises:
        RunError: The key is blank, the delay is negative, or there is no such priority.
        agentfsm.errors.StoreError: The store or the engine cannot be reached.
        MissingExtraError: A package is not installed.
    """
    if abs(priority) > MAX_PRIORITY or not 0 <= delay_s < float("inf"):
        raise RunError(f"a priority must be from -{MAX_PRIORITY} to {MAX_PRIORITY}, and a delay 0 s or more")
    run_id = secrets.token_hex(8) if idempotency_key is None else run_id_for(submission.agent, idempotency_key)
    head = await store.head(run_id)
    if head is not None and (head.seq or head.status == "finished"):
        return run_id  # it has begun, or was cancelled
    sealed = seal_submission(submission, run_id, keyring)
    if head is None:
        await waker.due([Activation(run_id, 0, "").key])  # an engine that is not there would leave it listed for good
        known = [*environment_secrets(os.environ), *secrets_of_host]
        await _list_as_queued(store, keyring, submission, run_id, known)
    queue = submission_queue(submission.agent, keyring.current.key_id)
    activation = Activation(run_id, 0, queue, sealed, priority, tenant_of(submission.tags))
    await waker.wake(activation, delay_s=delay_s)
    return run_id


async def withdraw(store: Store, waker: Waker, purged: Iterable[str]) -> None:
    """Take runs that were purged out of the queues, and with them the reasons for which they were set aside.

    Raises:
        agentfsm.errors.StoreError: The store or the engine cannot be reached.
    """
    gone = set(purged)
    for aside in await waker.list_set_aside():
        if aside.activation.run_id in gone:
            await waker.put_back(aside.activation.run_id)  # the worker that gets it finds no run
    for each in await store.maintenance.tombstones():
        if each.run_id in gone and not each.seq:
            await waker.drop(Activation(each.run_id, 0, ""))


async def end_if_lost(store: Store, waker: Waker, keyring: Keyring, run_id: str) -> bool:
    """End a run that is cancelled, has not begun and is in no queue, as after the loss of the engine's database.

    Returns:
        Whether it was one.

    Raises:
        agentfsm.errors.StoreError: The store or the engine cannot be reached.
    """
    head, key = await store.head(run_id), Activation(run_id, 0, "").key
    if head is None or head.seq or head.status != "suspended" or head.owner is not None:
        return False
    cancellations = [each for each in await read_signals(store.signals, keyring, run_id) if each.kind == "cancel"]
    listed = await find_listing(store, run_id)
    if not cancellations or listed is None or await waker.due([key]) or await waker.list_set_aside([key]):
        return False
    ended = replace(listed, status="finished", updated=time.time(), ending="cancelled", waiting_for=None)
    with contextlib.suppress(RunExistsError, StaleLease, StoreLockedError):  # somebody begins it, or ends it
        async with store.maintenance.writable(store) as writable:
            lease = await writable.acquire(run_id, SUBMITTER, new=True, keyring=keyring)
            await writable.append(lease, (), "finished", ended)
        for each in cancellations:
            await store.signals.remove(each.id)
        return True
    return False


async def _list_as_queued(
    store: Store, keyring: Keyring, submission: Submission, run_id: str, known: Sequence[str]
) -> None:
    """Enter a run without records in the store, by which it is listed until a worker starts it."""
    actor, now = submission.actor, time.time()
    entries = {
        mask_secrets(name, known): mask_secrets(value, known) if isinstance(value, str) else value
        for name, value in submission.metadata.items()
    }
    info = RunInfo(
        run_id,
        "suspended",
        started=now,
        updated=now,
        prompt=listed_text(mask_secrets(submission.prompt, known)),
        actor=listed_text(actor.id) if isinstance(actor, Actor) else "",  # a text may be a token
        session_id=listed_text(submission.session_id),
        tags=tuple(map(listed_text, submission.all_tags)),
        waiting_for=WaitingFor(QUEUED),
        metadata=listed_metadata(entries),
    )
    # Another process may send the same request; and what writes a file may not listen: it lists the run once it begins
    with contextlib.suppress(RunExistsError, StaleLease, StoreLockedError):
        async with store.maintenance.writable(store) as writable:
            lease = await writable.acquire(run_id, SUBMITTER, new=True, keyring=keyring)
            await writable.append(lease, (), "suspended", info)
