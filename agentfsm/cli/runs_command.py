"""``agentfsm runs``: the runs of a store, with what each waits for or how it ended."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, get_args

import click

from agentfsm.cli.console import shorten, single_line, utc
from agentfsm.cli.local_store import (
    await_result,
    open_existing_store,
    store_keyring,
    store_option,
    tenant_option,
)
from agentfsm.cli.options import TIME, collect_options, option, to_timestamp
from agentfsm.errors import AgentfsmError, JournalError, MissingExtraError, StoreError
from agentfsm.journal.load import StoredRequest, pending_request
from agentfsm.journal.run_info import RunInfo, RunQuery, Status
from agentfsm.journal.signals import Signal, read_signals
from agentfsm.journal.store import Head, Store
from agentfsm.journal.store_url import StoreLocation
from agentfsm.machine.declaration import ENDINGS
from agentfsm.runs import Runs

if TYPE_CHECKING:
    from agentfsm.workers import SetAside

_RUNS_EXAMPLES = """\b
Examples:
  agentfsm runs
  agentfsm runs --status suspended
  agentfsm runs --tag billing --since 2026-10-01
  agentfsm runs --metadata order=7
  agentfsm runs --text "invoice 7" --json --store runs.db
"""


def _parse_entries(_ctx: click.Context, _parameter: click.Parameter, texts: tuple[str, ...]) -> dict[str, str]:
    entries: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise click.BadParameter(f"{text!r}: write NAME=VALUE, as in order=7")
        entries[name] = value
    return entries


@dataclass(frozen=True, kw_only=True)
class _Search:
    """The options that say which runs are listed."""

    status: Status | None = option("--status", type=click.Choice(get_args(Status)), help="Only runs with this status.")
    ending: str | None = option("--ending", type=click.Choice(ENDINGS), help="Only runs with this ending.")
    actor: str | None = option("--actor", metavar="ID", help="Only runs requested by this id.")
    session: str | None = option("--session", metavar="ID", help="Only runs of this conversation.")
    tag: str | None = option("--tag", metavar="TAG", help="Only runs with this tag.")
    metadata: Mapping[str, str] = option(
        "--metadata",
        metavar="NAME=VALUE",
        multiple=True,
        callback=_parse_entries,
        help="Only runs with this entry in their metadata; repeatable.",
    )
    model: str | None = option("--model", metavar="NAME", help="Only runs that called this model first.")
    role: str | None = option("--role", metavar="ROLE", help="Only runs that wait for somebody with this role.")
    text: str | None = option("--text", metavar="TEXT", help="Only runs whose prompt contains this text.")
    since: datetime | None = option(
        "--since", type=TIME, metavar="TIME", help="Only runs that started at this time or later, in UTC."
    )
    until: datetime | None = option(
        "--until", type=TIME, metavar="TIME", help="Only runs that started before this time, in UTC."
    )
    limit: int = option(
        "--limit", type=click.IntRange(min=1), default=50, show_default=True, help="Maximum number of runs."
    )
    after: str = option(
        "--after",
        metavar="MARK",
        default="",
        help="Continue a list that was cut off, from the mark that it ended with.",
    )

    def query(self) -> RunQuery:
        """What the store is asked."""
        return RunQuery(
            status=self.status,
            ending=self.ending,
            actor=self.actor,
            session_id=self.session,
            tag=self.tag,
            metadata=self.metadata,
            model=self.model,
            waiting_role=self.role,
            text=self.text,
            since=to_timestamp(self.since),
            until=to_timestamp(self.until),
            limit=self.limit,
            after=self.after,
        )


@click.command(epilog=_RUNS_EXAMPLES)
@collect_options(_Search, "search")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
@store_option
@tenant_option
def runs(search: _Search, as_json: bool, location: StoreLocation) -> None:
    """List the runs of a store, the newest first.

    Each line has the run's id, its status, when it started (UTC), how long it took, what it cost, what was asked, and
    how it ended or what it waits for. agentfsm show has the rest.

    An answer or a cancellation that no process has acted on yet is shown, and so is why the last answer was refused, if
    the secret of the store is known. A run that workers have set aside is marked as such, with the reason and how to
    put it back, if the extra dbos is installed.

    A request that has expired is marked: no reply is accepted any more, and agentfsm resume RUN --dismiss REASON ends
    the run.

    A run that is "running" without an owner was interrupted: agentfsm resume continues it.
    """
    store = open_existing_store(location)
    page = await_result(Runs(store).list(search.query()))
    for each in _listed_runs(store, location, page.runs):
        click.echo(json.dumps(each.as_json(), default=str) if as_json else each.as_line())
    if not page.runs:
        which = "" if search.status is None else f"{search.status} "
        click.echo(f"agentfsm: there is no {which}run in {location.name}", err=True)
    elif page.next:
        click.echo(f"agentfsm: there are more: --after {page.next}", err=True)


@dataclass(frozen=True)
class _ListedRun:
    """A run, and what is known of it besides what it is listed by.

    Attributes:
        info: What it is listed by.
        head: Its head; None if it was purged in the meantime.
        request: What it waits for, the error of a journal that cannot be read, or an empty string.
        sent: What no process has acted on, and why the last answer was refused.
        aside: That workers have set it aside, or None.
    """

    info: RunInfo
    head: Head | None
    request: StoredRequest | str
    sent: Sequence[str]
    aside: SetAside | None = None

    @property
    def expired(self) -> bool:
        """Whether its request has expired."""
        return isinstance(self.request, StoredRequest) and self.request.has_expired(time.time())

    @property
    def is_left_to_workers(self) -> bool:
        """Whether it is for a worker to begin, to continue or to end, and none does."""
        return self.head is not None and self.head.is_left_to_workers(has_news=bool(self.sent) or self.expired)

    def as_json(self) -> dict[str, Any]:
        """As an object of JSON."""
        head = {} if self.head is None else _head_json(self.head, self.request)
        aside = None if self.aside is None else {"reason": self.aside.reason, "until": self.aside.until}
        return asdict(self.info) | head | {"sent": self.sent, "set_aside": aside}

    def as_line(self) -> str:
        """On one line."""
        info = self.info
        started = "-" if info.started is None else utc(info.started)
        took = "" if info.started is None or info.updated is None else _duration(info.updated - info.started)
        cost = "" if info.tokens is None else "unpriced" if info.cost_usd is None else f"{info.cost_usd:.4f} USD"
        prompt = f'"{shorten(info.prompt, 60)}"' if info.prompt else ""
        parts = (f"{info.status:<9}", started, took, cost, prompt, self._doing(), *self.sent, self._why_aside())
        run_id = str(info.run_id)  # in a changed file it may have any type
        return "  ".join([single_line(run_id), *(single_line(part) for part in parts if part)])

    def _doing(self) -> str:
        """Who runs it, what it waits for, or how it ended."""
        if self.info.status == "running":
            return f"owned by {self.info.owner}" if self.info.owner else "interrupted"
        if self.request:
            expired = "expired  " if self.expired else ""
            return f"{expired}{_deadlines(self.request).strip()}  {shorten(self.request, 200)}".strip()
        if self.info.waiting_for is not None and self.info.waiting_for.kind == "worker":
            return "waits for a worker"
        return self.info.ending.replace("_", " ")

    def _why_aside(self) -> str:
        """Why workers have set it aside, and what ends that; empty if they have not."""
        if self.aside is None:
            return ""
        reason, until = self.aside.reason, self.aside.until
        if until is not None:
            return f"set aside until {utc(until)}: {reason}"
        return f"set aside: {reason}; to try it again: agentfsm worker --put-back {self.info.run_id}"


def _listed_runs(store: Store, location: StoreLocation, infos: Sequence[RunInfo]) -> list[_ListedRun]:
    """What is known of some runs."""
    signals = _read_signals(store, location)
    found: list[_ListedRun] = []
    for info in infos:
        head = await_result(store.head(info.run_id))
        request = "" if head is None else _pending_request(store, head)
        found.append(_ListedRun(info, head, request, _describe_sent(signals.get(info.run_id, ()), request)))
    aside = _find_set_aside(location, [each.head for each in found if each.head and each.is_left_to_workers])
    return [replace(each, aside=aside.get(each.info.run_id)) for each in found]


def listed_line(store: Store, location: StoreLocation, info: RunInfo) -> str:
    """A run on one line, as it is listed."""
    return _listed_runs(store, location, [info])[0].as_line()


def _find_set_aside(location: StoreLocation, heads: Sequence[Head]) -> Mapping[str, SetAside]:
    """Which of some runs workers have set aside, and why; a note on stderr if the queues cannot be read."""
    if not heads:
        return {}
    from agentfsm.workers import find_set_aside  # only if some run may be set aside

    try:
        return await_result(find_set_aside(location.url, heads))
    except MissingExtraError:  # there may be no queues either
        return {}
    except StoreError as error:
        click.echo(f"agentfsm: it is not known which runs are set aside: {error}", err=True)
        return {}


def _read_signals(store: Store, location: StoreLocation) -> dict[str, list[Signal]]:
    """The signals of each run, as far as the secret can read them."""
    found: dict[str, list[Signal]] = {}
    try:
        keyring = store_keyring(location)
        signals = [] if keyring is None else await_result(read_signals(store.signals, keyring))
    except AgentfsmError:
        return found
    for each in signals:
        found.setdefault(each.run_id, []).append(each)
    return found


def _describe_sent(signals: Iterable[Signal], request: StoredRequest | str) -> list[str]:
    """What no process has acted on, and why the last answer to what the run waits for was refused."""
    digest = request.digest if isinstance(request, StoredRequest) else ""
    return [str(each) for each in signals if each.kind != "refusal" or each.to[1] == digest]


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _pending_request(store: Store, head: Head) -> StoredRequest | str:
    """What a run waits for, the error of a journal that cannot be read, or an empty string."""
    try:
        return await_result(pending_request(store, head)) or ""
    except (JournalError, StoreError) as error:
        return f"cannot be read: {error}"


def _deadlines(request: StoredRequest | str) -> str:
    """When the votes on a request end, and when it is escalated."""
    if isinstance(request, str) or request.quorum is None:
        return ""
    times = {"expires": request.expires_at, "escalates": request.quorum.escalates_at}
    return "".join(f"  {name} {utc(at)}" for name, at in times.items() if at is not None)


def _head_json(head: Head, request: StoredRequest | str) -> dict[str, Any]:
    data = {name: getattr(head, name) for name in ("run_id", "status", "seq", "hash", "epoch", "owner")}
    if isinstance(request, StoredRequest):
        request_json = {name: getattr(request, name) for name in ("kind", "question", "digest", "expires_at")}
        votes = {} if request.quorum is None else {"quorum": asdict(request.quorum)}
        return data | request_json | {"expired": request.has_expired(time.time()), **votes}
    return data | ({"error": request} if request else {})
