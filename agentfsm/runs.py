"""``Runs``: the stored runs: submit, answer, cancel, list, search, read, verify, draw, replay, export, fork, redact."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr

from agentfsm.diagrams import diagram
from agentfsm.errors import ConfigurationError, JournalError, RunError, StoreError, UnknownRunError
from agentfsm.journal.erasure import ErasureQuery, ErasureReport, erase
from agentfsm.journal.fork import fork
from agentfsm.journal.listing import find_listing, find_run_id, iterate_runs, verify_listed_run
from agentfsm.journal.load import StoredRequest, pending_request
from agentfsm.journal.purge import PurgeReport, RetentionRule, apply_retention, purge_runs
from agentfsm.journal.records import export_lines
from agentfsm.journal.redact import TextRedaction, redact, redact_text
from agentfsm.journal.replay import Replay
from agentfsm.journal.replay_settings import ReplaySettings
from agentfsm.journal.run_info import RunInfo, RunPage, RunQuery
from agentfsm.journal.send_signal import SentSignal, find_refusal, send_answer, send_cancel
from agentfsm.journal.signals import read_signals, without_refused
from agentfsm.journal.store import Head, Store, consistent_read, off_loop
from agentfsm.journal.tenant_store import TenantStore, tenant_tag
from agentfsm.journal.text_search import RunFilter, find_text
from agentfsm.journal.verification import (
    GOOD,
    OPEN,
    CheckpointHashes,
    VerificationReport,
    verify,
    with_doubt,
)
from agentfsm.loop.human_input import Allow, Deny, HumanInput, to_human_reply
from agentfsm.loop.keys import Keyring
from agentfsm.loop.quorum import Actor
from agentfsm.report.ledger import RunLedger, read_ledger
from agentfsm.report.reported_run import graph_of_run, path_of_run
from agentfsm.runtime.host import Clock, Host

if TYPE_CHECKING:
    from agentfsm.workers.waker import SetAside, Waker


_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
"""Seconds between two looks at the head of a run that is waited for, first and later."""


def runs_on(runs: Runs, store: Store) -> Runs:
    """The same on another store, such as one with the runs of some tenants only: with the same secrets and waker."""
    other = copy(runs)
    other._store = store  # pyright: ignore[reportPrivateUsage]  # a method too many for Runs
    return other


def runs_for(runs: Runs, *, host_authenticates: bool) -> Runs:
    """The same for a host that authenticates people or does not, whether or not ``runs`` itself does."""
    other = copy(runs)
    other._host_authenticates = host_authenticates  # pyright: ignore[reportPrivateUsage]
    return other


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A stored run.

    Attributes:
        info: What it is listed by: status, ending, times, cost, tags and more.
        ledger: What its journal says: what was asked, each move with its guards, what people decided, the transcript,
            failures and costs.
        request: What it waits for: tool, exact arguments, digest, who may answer, until when; None if it waits for
            nobody.
        refused: Why the last answer to that was refused by the process that has the agent, and whose it was; empty if
            none was, or without the secret.
        set_aside: That workers have set it aside, why and until when; None if they have not, or if ``Runs`` was made
            without a waker.
    """

    info: RunInfo
    ledger: RunLedger
    request: StoredRequest | None
    refused: str = ""
    set_aside: SetAside | None = None


class Runs:
    """The runs of a store. Nothing here needs an agent, and nothing blocks the event loop.

    ::

        runs = Runs(open_store("sqlite:///runs.db"))
        page = await runs.list(RunQuery(tag="billing", status="suspended"))
        run = await runs.get(page.runs[0].run_id)
        print(run.request.tool, run.request.arguments)

    To answer a run that waits, or to cancel one, no agent is needed: ``runs.approve(run_id)``. The process that
    has the agent acts on it, at once if it waits for it (``store.signals.listen()``).

    Args:
        store: The store.
        secret: The secret of the host that writes it. Without it, ``verify`` cannot say who wrote a record, and
            everything that writes is refused.
        old_secrets: Secrets that the host had before.
        authenticate: What the host has, if it has it: see ``Host``.
        waker: The engine of the workers, from ``agentfsm.workers.open_waker``. Without it, ``submit`` is refused, and
            ``get`` does not say which runs are set aside.
        tenant: The name of a tenant, whose runs are those with the tag ``tenant:NAME``. Runs of others are unknown to
            whatever is called here, and those that are submitted get the tag.
        secrets: What the host has as ``secrets``: what is written for a run is listed without these values, and an
            answer with one of them is stored encrypted or not at all.

    Raises:
        ConfigurationError: It is not a store, or not the name of a tenant, or a secret is empty or not a string.
    """

    def __init__(
        self,
        store: Store,
        *,
        secret: bytes | None = None,
        old_secrets: Sequence[bytes] = (),
        authenticate: Callable[[Any], Actor | Awaitable[Actor | None] | None] | None = None,
        waker: Waker | None = None,
        tenant: str | None = None,
        secrets: Sequence[SecretStr] = (),
    ) -> None:
        if not hasattr(store, "find_runs"):  # for untyped callers
            raise ConfigurationError(
                f"a store is needed, as in Runs(open_store('runs.db')), not {type(store).__name__}"
            )
        self._store = store if tenant is None else TenantStore(store, [tenant])
        self._tenant = tenant
        self._waker = waker
        self._host = Host(authenticate=authenticate, secrets=secrets)
        self._host_authenticates = authenticate is not None
        if secret is not None:
            self._host = replace(self._host, secret=secret, old_secrets=old_secrets)
        self._keyring = None if secret is None else self._host.keyring

    async def submit(
        self,
        agent: str,
        prompt: str,
        *,
        session_id: str = "",
        actor: Actor | str | None = None,
        tags: Iterable[str] = (),
        metadata: Mapping[str, Any] = MappingProxyType({}),
        idempotency_key: str | None = None,
        priority: int = 0,
        delay_s: float = 0.0,
    ) -> str:
        """Have a worker run an agent (``agentfsm worker``). When this returns, the request is stored.

        Until a worker starts it, the run is listed as suspended, waiting for a ``worker``.

        Args:
            agent: The name under which workers serve the agent.
            prompt: The user's message.
            session_id: The id of the session in which it is listed; it begins without that session's messages.
            actor: Who requests it, as ``agent.run`` takes it: an ``Actor``, a name or a token.
            tags: Short texts by which the run is found. One such as ``tenant:acme`` says whose run it is, for limits
                by tenant.
            metadata: A JSON object, from which the agent's ``deps_factory`` may make the run's dependencies.
            idempotency_key: Submitting again with the same key and agent returns the same run, which is started once.
            priority: Runs with lower numbers are started first; from -1000 to 1000.
            delay_s: Seconds to wait before it is started.

        Returns:
            The id of the run.

        Raises:
            ConfigurationError: ``Runs`` was made without a secret or without a waker.
            RunError: An argument is not what it must be; the error says which.
            agentfsm.errors.MissingExtraError: The package that encrypts requests is not installed.
            agentfsm.errors.StoreError: The store or the engine cannot be reached.
        """
        from agentfsm.workers.submission import Submission, submit  # only where workers are used

        if self._waker is None:
            raise ConfigurationError("nobody would start it: give the waker, as in Runs(store, waker=open_waker(url))")
        if self._tenant is not None:
            own = tenant_tag(self._tenant)
            tags = dict.fromkeys((own, *tags))
            if other := next((tag for tag in tags if tag.startswith("tenant:") and tag != own), None):
                raise RunError(f"tag {other!r}: a run that is submitted for {own!r} cannot belong to another tenant")
            if idempotency_key is not None:  # the same key of two tenants is two runs
                idempotency_key = f"{own}\n{idempotency_key}"
        submission = Submission(
            agent=agent,
            prompt=prompt,
            session_id=session_id,
            actor=actor,
            tags=tuple(tags),
            metadata=metadata,
        )
        return await submit(
            self._store,
            self._waker,
            _required(self._keyring),
            submission,
            idempotency_key=idempotency_key,
            priority=priority,
            delay_s=delay_s,
            secrets_of_host=_secrets_of(self._host),
        )

    async def list(self, query: RunQuery | None = None) -> RunPage:
        """The runs that a query finds, the newest first, a page at a time.

        Args:
            query: Which runs; by default all that no other run called, the newest 50.

        Raises:
            agentfsm.errors.StoreError: The store cannot be read.
        """
        return await self._store.find_runs(RunQuery(parent="") if query is None else query)

    async def iterate(self, query: RunQuery | None = None) -> AsyncIterator[RunInfo]:
        """All runs that a query finds, the newest first; pages are read as they are needed.

        Args:
            query: Which runs, as for ``list``.

        Raises:
            agentfsm.errors.StoreError: The store cannot be read.
        """
        async for info in iterate_runs(self._store, RunQuery(parent="") if query is None else query):
            yield info

    async def count(self, query: RunQuery | None = None) -> int:
        """How many runs a query finds.

        Args:
            query: Which runs, as for ``list``.

        Raises:
            agentfsm.errors.StoreError: The store cannot be read.
        """
        return await self._store.count_runs(RunQuery(parent="") if query is None else query)

    async def get(self, run_id: str, *, wait_s: float = 0.0) -> StoredRun:
        """A run with all that its journal says, as it is now or when nobody works on it any more.

        Args:
            run_id: Its id, or the beginning of it.
            wait_s: How many seconds to wait, at most, until the run has ended, waits for a person or is set aside,
                whatever process works on it; ``math.inf`` for as long as it takes, which is forever if no process that
                has its agent ever runs. A run that was answered counts as worked on, but without the secret only once a
                process has acted on the answer; one whose request has expired does not. When the time is over, the run
                is returned as it is then.

        Raises:
            UnknownRunError: There is no such run, or there are several.
            JournalError: What it waits for cannot be read.
            agentfsm.errors.StoreError: The store or the engine cannot be read.
        """
        full_id = await find_run_id(self._store, run_id)
        if wait_s > 0:
            await _wait(self._store, full_id, self._keyring, self._waker, wait_s, self._host.clock)
        records, head = await consistent_read(self._store, full_id)
        info = await find_listing(self._store, full_id)
        if head is None or info is None:
            raise UnknownRunError(f"there is no run {full_id!r}")
        ledger = await off_loop(lambda found: read_ledger(full_id, found), records)
        request = await pending_request(self._store, head)
        aside = None if self._waker is None else await _find_set_aside(self._waker, self._store, head, request)
        refusal = None
        if request is not None and self._keyring is not None:
            refusal = await find_refusal(self._store.signals, self._keyring, request)
        return StoredRun(info, ledger, request, "" if refusal is None else str(refusal), aside)

    async def request(self, run_id: str) -> StoredRequest | None:
        """What a run waits for, or None if it asks nobody. Unlike ``get``, it takes the same however long the run is.

        Args:
            run_id: Its id, or the beginning of it.

        Raises:
            UnknownRunError: There is no such run, or there are several.
            JournalError: What it waits for cannot be read.
            agentfsm.errors.StoreError: The store cannot be read.
        """
        full_id = await find_run_id(self._store, run_id)
        head = await self._store.head(full_id)
        return None if head is None else await pending_request(self._store, head)

    async def verify(self, run_id: str, *, checkpoint: CheckpointHashes | None = None) -> VerificationReport:
        """Whether the journal of a run is intact and legal, and, with the secret, whether its host wrote it.

        Args:
            run_id: Its id, or the beginning of it.
            checkpoint: What a checkpoint signed, if there is one: the hashes of records of each run.

        Raises:
            UnknownRunError: There is no such run, or there are several.
            agentfsm.errors.StoreError: The store cannot be read.
        """
        full_id = await find_run_id(self._store, run_id)
        return with_doubt(await verify_listed_run(self._store, full_id, checkpoint, self._keyring))

    async def replay(self, run_id: str, under: str | ReplaySettings) -> Replay:
        """How a run would have gone under a preset or other settings; no model and no tool is called.

        Args:
            run_id: Its id, or the beginning of it.
            under: The name of the preset, or the settings.

        Raises:
            ConfigurationError: There is no such preset.
            UnknownRunError: There is no such run, or there are several.
            JournalError: The journal does not verify, or it needs a graph that the settings do not name.
            agentfsm.errors.StoreError: The store cannot be read.
        """
        settings = ReplaySettings.of_preset(under) if isinstance(under, str) else under
        full_id = await find_run_id(self._store, run_id)
        records, head = await consistent_read(self._store, full_id)
        if not records:
            raise JournalError("the journal is empty")
        report = await off_loop(lambda found: verify(full_id, found, head), records)
        if report.code not in (GOOD, OPEN):
            raise JournalError(f"record {report.seq}: {report.reason}")
        return await off_loop(settings.replay, records)

    async def diagram(self, run_id: str, format: str = "svg") -> str:  # noqa: A002  # the conventional name for it
        """The graph that a run's journal pins, with the run's path on it.

        Args:
            run_id: Its id, or the beginning of it.
            format: ``svg``, ``dot``, ``mermaid``, ``markdown``, ``text`` or ``plantuml``.

        Raises:
            ConfigurationError: There is no such format, or it cannot show a path.
            UnknownRunError: There is no such run, or there are several.
            JournalError: It has not begun, so it has no graph yet.
            agentfsm.errors.StoreError: The store cannot be read.
        """
        run = await self.get(run_id)
        if not run.ledger.records:
            raise JournalError("the journal is empty")
        graph = graph_of_run(run.ledger.records)
        return diagram(graph, format, overlay=path_of_run(run.ledger.records, graph))

    async def export(self, run_id: str) -> str:
        """The journal of a run as JSON lines, each record as it was hashed.

        Args:
            run_id: Its id, or the beginning of it.

        Raises:
            UnknownRunError: There is no such run, or there are several.
            agentfsm.errors.StoreError: The store cannot be read.
        """
        records, _ = await consistent_read(self._store, await find_run_id(self._store, run_id))
        return "".join(export_lines(records))

    async def answer(self, run_id: str, reply: HumanInput, *, by: Any = None, to: str | None = None) -> SentSignal:
        """Answer what a run waits for, from any process; one that has its agent acts on it.

        The answer is durable when this returns. It is acted on once, even if processes die in the meantime. If the run
        waits for something else by then, as after an answer that was given in another way, it is dropped. If the
        process that has the agent refuses it, as it does edited arguments that are not valid, ``StoredRun.refused``
        says why. It also says so of an approval that waits for a process which has the tool as it was shown: until
        there is one, a ``Deny`` counts in its place.

        Args:
            run_id: The run's id, or the beginning of it.
            reply: What ``agent.resume`` takes: a string, ``Allow()``, ``Deny(reason)``, ``Edit(arguments)`` and so on.
            by: Who answers: what ``authenticate`` takes, such as a token; without it an ``Actor`` or a name, which is
                recorded as claimed, not verified.
            to: The digest of the request that was shown (``StoredRun.request.digest``), or at least its first 12
                digits; None for whatever the run asks now.

        Raises:
            ConfigurationError: ``Runs`` was made without a secret.
            UnknownRunError: There is no such run, or there are several.
            agentfsm.errors.RunEndedError: The run has ended.
            agentfsm.errors.RunError: The run is a sub-agent's.
            agentfsm.errors.StaleHumanReplyError: The run asks something else, or nothing, or was answered already.
            agentfsm.errors.HumanReplyError: The reply does not fit what it waits for, or whoever answers may not; each
                case has its own class.
            agentfsm.errors.SuspensionExpiredError: The request has expired.
            agentfsm.errors.MissingExtraError: It is an edit of secret arguments, and the extra ``sealing`` is missing.
            JournalError: The run was sealed under another secret, or was tampered with; or what it asks was redacted.
            agentfsm.errors.StoreError: The store cannot be read or written.
        """
        keyring, answer = _required(self._keyring), to_human_reply(reply)
        actor = await self._host.identify(by)
        return await send_answer(
            self._store,
            await find_run_id(self._store, run_id),
            answer,
            keyring,
            actor=actor,
            to=to,
            secrets=_secrets_of(self._host),
            authenticated=self._host_authenticates,
        )

    async def approve(self, run_id: str, *, by: Any = None, to: str | None = None) -> SentSignal:
        """Allow the call that a run waits to make: ``answer`` with ``Allow()``, whose arguments and errors it has."""
        return await self.answer(run_id, Allow(), by=by, to=to)

    async def deny(self, run_id: str, reason: str = "", *, by: Any = None, to: str | None = None) -> SentSignal:
        """Deny the call that a run waits to make: ``answer`` with ``Deny(reason)``, whose errors it has.

        Args:
            run_id: The run's id, or the beginning of it.
            reason: Why; the model is told.
            by: Who denies it, as for ``answer``.
            to: The digest of the request that was shown, as for ``answer``.
        """
        return await self.answer(run_id, Deny(reason), by=by, to=to)

    async def cancel(self, run_id: str, reason: str = "cancelled", *, by: Any = None) -> SentSignal:
        """Cancel a run, whatever process runs it. One that waits or was interrupted ends when one takes it up.

        One that was submitted, has not begun and is in no queue of the engine any more ends without a journal.

        Args:
            run_id: The run's id, or the beginning of it.
            reason: Why; becomes ``RunCancelled.reason``, with who cancelled it.
            by: Who cancels it, as for ``answer``.

        Raises:
            ConfigurationError: ``Runs`` was made without a secret.
            UnknownRunError: There is no such run, or there are several.
            agentfsm.errors.RunEndedError: The run has ended.
            agentfsm.errors.RunError: The run is a sub-agent's.
            agentfsm.errors.HumanReplyError: Whoever cancels may not deny what the run waits for.
            JournalError: The run was sealed under another secret, or was tampered with.
            agentfsm.errors.StoreError: The store cannot be read or written.
        """
        keyring, actor = _required(self._keyring), await self._host.identify(by)
        full_id, known = await find_run_id(self._store, run_id), _secrets_of(self._host)
        sent = await send_cancel(self._store, full_id, reason, keyring, actor=actor, secrets=known)
        if self._waker is not None:
            from agentfsm.workers.submission import end_if_lost  # only where workers are used

            with contextlib.suppress(StoreError):  # else a worker does it
                await end_if_lost(self._store, self._waker, keyring, full_id)
        return sent

    async def fork(self, run_id: str, at: int, new_id: str | None = None) -> str:
        """Start a new run from a run as it was after one of its records; ``agent.resume(new_id)`` continues it.

        Calls that people had approved, and that had no result yet, need approval again. What the run waits for is asked
        anew, with as much time as the request had at first.

        Args:
            run_id: The run's id, or the beginning of it.
            at: The sequence number of the last record that both have.
            new_id: The id of the new run; by default a random one.

        Returns:
            The id of the new run.

        Raises:
            ConfigurationError: ``Runs`` was made without a secret.
            UnknownRunError: There is no such run, there are several, or it has no such record.
            agentfsm.errors.RunExistsError: A run with the new id exists.
            JournalError: The run had ended by then, or its journal cannot be trusted.
            agentfsm.errors.StoreError: The store cannot be read or written.
        """
        keyring = _required(self._keyring)
        fork_id = secrets.token_hex(8) if new_id is None else new_id
        full_id = await find_run_id(self._store, run_id)
        async with self._store.maintenance.writable(self._store) as writable:
            await fork(writable, full_id, at, fork_id, keyring, now=self._host.clock.time())
        return fork_id

    async def redact(self, run_id: str, field: str, *, by: str = "") -> int:
        """Permanently delete content of a record. The run verifies afterwards, and cannot be resumed past the record.

        Args:
            run_id: The run's id, or the beginning of it.
            field: The record's sequence number and a path in it, as in ``4.out.replied.reply.message.content``; the
                number alone for all content of the record.
            by: Who requested it, for the journal.

        Returns:
            How many values were deleted.

        Raises:
            ConfigurationError: ``Runs`` was made without a secret.
            UnknownRunError: There is no such run, there are several, or it has no such record.
            JournalError: There is no content in the field, or it was redacted already; or the journal cannot be
                trusted.
            agentfsm.errors.StoreError: The run is in progress or on hold, or the store cannot be read or written.
        """
        keyring = _required(self._keyring)
        full_id = await find_run_id(self._store, run_id)
        async with self._store.maintenance.writable(self._store) as writable:
            return await redact(writable, full_id, field, keyring, by)

    async def redact_text(
        self, text: str, *, runs: RunFilter | None = None, by: str = "", dry_run: bool = False
    ) -> TextRedaction:
        """Permanently delete every value that contains a text, in any case and encoding. The runs verify afterwards.

        Args:
            text: The text, such as a person's mail address.
            runs: Which runs are searched; all by default.
            by: Who requested it, for the journals.
            dry_run: Whether to delete nothing, and only say what would be; the secret is not required then.

        Returns:
            What was deleted, and what remains and why.

        Raises:
            ConfigurationError: ``Runs`` was made without a secret.
            JournalError: The text is too short.
            agentfsm.errors.StoreError: The store cannot be read or written.
        """
        if dry_run:
            found = await find_text(self._store, text, self._keyring, runs)
            would = {each: tuple(place for place in found if place.is_deletable is each) for each in (True, False)}
            return TextRedaction(deleted=would[True], remaining=would[False])
        keyring = _required(self._keyring)
        async with self._store.maintenance.writable(self._store) as writable:
            return await redact_text(writable, text, keyring, runs=runs, by=by)

    async def purge(
        self, what: Iterable[str] | RetentionRule, *, by: str = "", reason: str = "", dry_run: bool = False
    ) -> PurgeReport:
        """Delete whole runs that ended, with the runs that they called; a sealed tombstone of each remains.

        Runs that are held (``agentfsm.journal.maintenance``), are running, wait for somebody or do not verify remain,
        and the report says why. ``store.maintenance.compact()`` then returns the space.

        Args:
            what: The ids of the runs; or for how long runs are kept, to purge those that ended before.
            by: Who requested it, for the tombstones.
            reason: Why, for the tombstones; a rule is its own reason by default.
            dry_run: Whether to purge nothing, and only say what would be.

        Raises:
            ConfigurationError: ``Runs`` was made without a secret.
            agentfsm.errors.StoreError: The store cannot be read or written.
        """
        keyring = _required(self._keyring)
        if isinstance(what, RetentionRule):
            report = await apply_retention(self._store, what, keyring, by=by, reason=reason, dry_run=dry_run)
        else:
            report = await purge_runs(self._store, what, keyring, by=by, reason=reason, dry_run=dry_run)
        if not dry_run:
            await _withdraw(self._store, self._waker, report.purged)
        return report

    async def erase(self, person: ErasureQuery, *, by: str = "", dry_run: bool = False) -> ErasureReport:
        """Erase a person's data: purge their runs, delete a text from all others, find their id there, and compact.

        Args:
            person: By what the runs and the text are found.
            by: Who requested it, for tombstones and journals.
            dry_run: Whether to erase nothing, and only say what would be.

        Returns:
            What was erased, and what remains and why.

        Raises:
            ConfigurationError: ``Runs`` was made without a secret.
            JournalError: The text is too short.
            agentfsm.errors.StoreError: The store cannot be read or written.
        """
        report = await erase(self._store, person, _required(self._keyring), by=by, dry_run=dry_run)
        if not dry_run:
            await _withdraw(self._store, self._waker, report.purged)
        return report


def _secrets_of(host: Host) -> Iterator[str]:
    return (each.get_secret_value() for each in host.secrets)


def _required(keyring: Keyring | None) -> Keyring:
    if keyring is None:
        raise ConfigurationError("what is written has to be sealed: give the secret, as in Runs(store, secret=...)")
    return keyring


async def _wait(
    store: Store, run_id: str, keyring: Keyring | None, waker: Waker | None, wait_s: float, clock: Clock
) -> None:
    """Wait until a run has ended, is gone or set aside, or waits for a person and has no answer; at most ``wait_s``."""
    deadline, pause = clock.monotonic() + wait_s, _FIRST_PAUSE_S
    while True:
        sent = [] if keyring is None else await read_signals(store.signals, keyring, run_id)
        head = await store.head(run_id)  # after the signals: one is removed only when the head shows what it led to
        has_news = bool(without_refused(sent))
        if head is None or head.status == "finished":
            return
        if head.owner is None and not head.is_left_to_workers(has_news=has_news):
            return
        if head.owner is None and waker is not None:
            from agentfsm.workers import find_set_aside  # only where workers are used

            aside = (await find_set_aside(waker, [head])).get(run_id)
            if aside is not None and aside.until is None:  # else a worker puts it back
                return
        if (left := deadline - clock.monotonic()) <= 0:
            return
        await clock.sleep(min(pause, left))
        pause = min(pause * 1.5, _LONGEST_PAUSE_S)


async def _find_set_aside(waker: Waker, store: Store, head: Head, request: StoredRequest | None) -> SetAside | None:
    """That workers have set a run aside; the queues are asked only about a run that a worker should be working on."""
    from agentfsm.workers import find_set_aside  # only where workers are used

    expired = request is not None and request.has_expired(time.time())
    if not head.is_left_to_workers(has_news=expired or bool(await store.signals.pending(head.run_id))):
        return None
    return (await find_set_aside(waker, [head])).get(head.run_id)


async def _withdraw(store: Store, waker: Waker | None, purged: Iterable[str]) -> None:
    """Take runs that were purged out of the queues."""
    if waker is not None:
        from agentfsm.workers.submission import withdraw  # only where workers are used

        await withdraw(store, waker, purged)
