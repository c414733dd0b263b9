"""``agentfsm runs``, ``show``, ``export``, ``fork`` and ``adopt``: the runs of a store."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, cast, get_args

import click

from agentfsm.cli.console import shorten, single_line
from agentfsm.cli.local_store import (
    await_result,
    complete_run_id,
    full_run_ids,
    open_existing_store,
    open_runs,
    require_keyring,
    store_keyring,
    store_option,
    tenant_option,
    write_for_a_moment,
)
from agentfsm.cli.options import CommandFunction, collect_options
from agentfsm.errors import AgentfsmError, JournalError, MissingExtraError, StoreError, UnknownRunError
from agentfsm.journal.adoption import adopt as adopt_run
from agentfsm.journal.listing import find_listing
from agentfsm.journal.load import StoredRequest, pending_request
from agentfsm.journal.records import Record, SealedRecord, export_lines, open_record, read_record
from agentfsm.journal.rehydrate import rehydrate
from agentfsm.journal.run_info import RunInfo, RunQuery, Status
from agentfsm.journal.signals import Signal, read_signals
from agentfsm.journal.store import Head, Store
from agentfsm.journal.store_url import StoreLocation
from agentfsm.loop.messages import Usage
from agentfsm.loop.quorum import Actor
from agentfsm.machine.declaration import ENDINGS
from agentfsm.report.ledger import HumanDecision, read_ledger
from agentfsm.runs import Runs
from agentfsm.testing.evaluation import CaseEnding, case_of_run

if TYPE_CHECKING:
    from agentfsm.workers import SetAside

__all__ = ["adopt", "export", "fork", "runs", "show"]


_RUNS_EXAMPLES = """\b
Examples:
  agentfsm runs
  agentfsm runs --status suspended
  agentfsm runs --tag billing --since 2026-10-01
  agentfsm runs --metadata order=7
  agentfsm runs --text "invoice 7" --json --store runs.db
"""


@dataclass(frozen=True, kw_only=True)
class _Search:
    """The options that say which runs are listed."""

    status: Status | None
    ending: str | None
    actor: str | None
    session: str | None
    tag: str | None
    metadata: Mapping[str, str]
    model: str | None
    role: str | None
    text: str | None
    since: datetime | None
    until: datetime | None
    limit: int
    after: str

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
            since=_seconds(self.since),
            until=_seconds(self.until),
            limit=self.limit,
            after=self.after,
        )


def _seconds(at: datetime | None) -> float | None:
    return None if at is None else (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


_TIME = click.DateTime(["%Y-%m-%d", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M:%S%z"])


def _parse_entries(_ctx: click.Context, _parameter: click.Parameter, texts: tuple[str, ...]) -> dict[str, str]:
    entries: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise click.BadParameter(f"{text!r}: write NAME=VALUE, as in order=7")
        entries[name] = value
    return entries


def _search_options(command: CommandFunction) -> CommandFunction:
    """Add the options of ``_Search`` to a command, which gets them as ``search``."""
    return collect_options(
        _Search,
        "search",
        [
            click.option("--status", type=click.Choice(get_args(Status)), help="With this status."),
            click.option("--ending", type=click.Choice(ENDINGS), help="That ended so."),
            click.option("--actor", metavar="ID", help="That somebody with this id requested."),
            click.option("--session", metavar="ID", help="Of this conversation."),
            click.option("--tag", metavar="TAG", help="With this tag."),
            click.option(
                "--metadata",
                metavar="NAME=VALUE",
                multiple=True,
                callback=_parse_entries,
                help="With this entry in their metadata; repeatable.",
            ),
            click.option("--model", metavar="NAME", help="That first called this model."),
            click.option("--role", metavar="ROLE", help="That wait for somebody with this role."),
            click.option("--text", metavar="TEXT", help="Whose prompt contains this."),
            click.option("--since", type=_TIME, metavar="TIME", help="That started then or later, in UTC."),
            click.option("--until", type=_TIME, metavar="TIME", help="That started before then, in UTC."),
            click.option(
                "--limit", type=click.IntRange(min=1), default=50, show_default=True, help="How many at most."
            ),
            click.option("--after", metavar="MARK", default="", help="Continue a list that was cut off."),
        ],
    )(command)


@click.command(epilog=_RUNS_EXAMPLES)
@_search_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
@store_option
@tenant_option
def runs(search: _Search, as_json: bool, location: StoreLocation) -> None:
    """List the runs of a store, the newest first.

    Each line has the run's id, its status, when it started (UTC), how long it took, what it cost, what was asked, and
    how it ended or what it waits for. agentfsm show has the rest.

    An answer or a cancellation that no process has acted on yet is shown, and so is why the last answer was refused, if
    the secret of the store is known. A run that workers have set aside is shown so, with the reason and how to put it
    back, if the extra dbos is installed.

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
    """A run, and what is known of it beside what it is listed by.

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
        """Whether it is for a worker to begin, to go on with or to end, and none does."""
        if self.head is None or self.head.owner is not None or self.head.status == "finished":
            return False
        return self.head.status == "running" or not self.head.seq or bool(self.sent) or self.expired

    def as_json(self) -> dict[str, Any]:
        """As an object of JSON."""
        head = {} if self.head is None else _head_json(self.head, self.request)
        aside = None if self.aside is None else {"reason": self.aside.reason, "until": self.aside.until}
        return asdict(self.info) | head | {"sent": self.sent, "set_aside": aside}

    def as_line(self) -> str:
        """On one line."""
        info = self.info
        started = "-" if info.started is None else f"{datetime.fromtimestamp(info.started, UTC):%Y-%m-%d %H:%M:%S}"
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
            return f"set aside until {datetime.fromtimestamp(until, UTC):%Y-%m-%d %H:%M:%S}: {reason}"
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
    return "".join(
        f"  {name} {datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S}" for name, at in times.items() if at is not None
    )


def _head_json(head: Head, request: StoredRequest | str) -> dict[str, Any]:
    data = {name: getattr(head, name) for name in ("run_id", "status", "seq", "hash", "epoch", "owner")}
    if isinstance(request, StoredRequest):
        request_json = {name: getattr(request, name) for name in ("kind", "question", "digest", "expires_at")}
        votes = {} if request.quorum is None else {"quorum": asdict(request.quorum)}
        return data | request_json | {"expired": request.has_expired(time.time()), **votes}
    return data | ({"error": request} if request else {})


_SHOW_EXAMPLES = """\b
Examples:
  agentfsm show 3f9c0a1b2c3d4e5f
  agentfsm show 3f9c0a1b2c3d4e5f --json --store runs.db
"""


@click.command(epilog=_SHOW_EXAMPLES)
@click.argument("run_id", metavar="RUN", shell_complete=complete_run_id)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per record.")
@store_option
@tenant_option
@click.pass_context
def show(ctx: click.Context, run_id: str, as_json: bool, location: StoreLocation) -> None:
    """Show RUN: its line of agentfsm runs, and each record with transitions, guards that did not hold, and times.

    The beginning of an id is enough where no other run begins so.

    A record that cannot be read is reported in its place, and the exit code is 1; agentfsm verify says what was
    changed.
    """
    store = open_existing_store(location)
    run_id = await_result(Runs(store).find_id(run_id))
    rows = await_result(store.records(run_id))
    if not as_json and (summary := _summary(store, location, run_id)):
        click.echo(summary)
    graph: Any = {}
    readable, redacted = True, False
    for row in rows:
        try:
            record = read_record(row, run_id)
            graph = record.data.get("graph", graph)
            line = _record_json(record) if as_json else _record_line(record, graph)
            redacted |= record.redacted
        except (JournalError, LookupError, TypeError, ValueError, AttributeError) as error:
            readable = False
            why = str(error) if isinstance(error, JournalError) else f"record {row.seq} is not a valid record"
            broken = {"run": run_id, "seq": row.seq, "hash": row.hash, "error": why}
            line = json.dumps(broken) if as_json else f"{row.seq:>5}  {why}"
        click.echo(line if as_json else single_line(line))
    usage = None if as_json or redacted or not readable else _total_usage(rows)
    if usage is not None:
        cost = _describe_cost(usage.cost_usd, usage.unpriced_tokens)
        click.echo(f"{usage.input_tokens} tokens in, {usage.output_tokens} out, {cost}")
    if not readable:
        click.echo(f"agentfsm: some records cannot be read; agentfsm verify {run_id} says what was changed", err=True)
        ctx.exit(1)


def _summary(store: Store, location: StoreLocation, run_id: str) -> str:
    """The run as it is listed; empty if somebody changed that to what cannot be read, which verification reports."""
    try:
        info = await_result(find_listing(store, run_id))
        listed = [] if info is None else _listed_runs(store, location, [info])
        return "".join(each.as_line() for each in listed)
    except (StoreError, TypeError, ValueError, OverflowError, OSError):
        return ""


def _total_usage(rows: Sequence[SealedRecord]) -> Usage | None:
    """The tokens and cost of a run; None if its journal cannot be rehydrated."""
    try:
        return rehydrate(rows).run.usage
    except JournalError:
        return None


def _describe_cost(cost_usd: float, unpriced_tokens: int) -> str:
    """What tokens cost; their price is not known for every model."""
    if not unpriced_tokens:
        return f"{cost_usd:.4f} USD"
    return f"{cost_usd:.4f} USD, {unpriced_tokens} tokens unpriced" if cost_usd else "unpriced"


def _record_json(record: Record) -> str:
    return json.dumps({**record.data, "run": record.run_id, "hash": record.hash}, default=lambda _: None)


def _record_line(record: Record, graph: Any) -> str:
    time = datetime.fromtimestamp(record.time, UTC).strftime("%Y-%m-%d %H:%M:%S")
    return f"{record.seq:>5}  {time}  {_describe_record(record, graph)}" + ("  (redacted)" if record.redacted else "")


def _describe_request(request: Any) -> str:
    """What a call of a user-defined state's effect was given: the last message, or the arguments."""
    if request is None:
        return ""
    messages = request.get("messages")
    return f": {_preview(messages[-1].get('content') if messages else request.get('arguments'))}"


def _describe_record(record: Record, graph: Any) -> str:
    data = record.data
    match record.kind:
        case "transition":
            return _describe_transition(data, graph)
        case "effect.intent":
            attempt = f", attempt {data['attempt']}" if "attempt" in data else ""
            return f"effect {data['eid']} of {data['name']} starts{attempt}{_describe_request(data.get('request'))}"
        case "effect.result":
            out = data["out"]
            if "reply" in out:
                return f"effect {data['eid']}: reply: {_preview(out['reply']['message'].get('content'))}"
            if "name" not in out:
                return f"effect {data['eid']}: failed: {_preview(out['failure'].get('explanation'))}"
            return f"effect {data['eid']} of {out['name']}: {out.get('status', 'done')}: {_preview(out.get('content'))}"
        case "run.suspended":
            waiting = data["waiting"]
            call = f"  {waiting['tool']} {_preview(waiting.get('arguments'))}" if waiting.get("tool") else ""
            question = _preview(waiting.get("question"))
            return f"waits for a person ({waiting['kind']}): {question}{call}  (--to {record.hash[:12]})"
        case "run.resumed":
            request = f", in reply to record {data['to']['seq']} ({data['to']['hash'][:12]})" if "to" in data else ""
            return f"resumed ({data['from']}){request}"
        case "run.migrated":
            return _describe_migration(data, graph)
        case "run.created" | "run.forked":
            parent = data.get("parent")
            origin = f" from {parent['run']}" + (f" at {parent['seq']}" if "seq" in parent else "") if parent else ""
            requester = f", requested by {_describe_actor(data['requester'])}" if "requester" in data else ""
            return f"{record.kind}{origin} on graph {graph['name']} ({graph['fingerprint'][:12]}){requester}"
        case _:
            rest = {k: v for k, v in data.items() if k not in ("kind", "seq", "ts", "epoch", "salt")}
            return f"{record.kind} {json.dumps(rest, default=str) if rest else ''}".rstrip()


def _describe_transition(data: Any, graph: Any) -> str:
    source = data["transition"].rpartition(".")[0]
    false_guards = [guard for state, guard, *_ in graph["transitions"] if state == source][: len(data["tried"]) - 1]
    not_taken = f"  not: {', '.join(false_guards)}" if false_guards else ""
    failure = f"  {data['failure']['kind']}: {data['failure'].get('explanation')}" if "failure" in data else ""
    ((kind, outcome),) = data["out"].items()
    describe = _REPLY_FORMATTERS.get(kind)
    reply = f"  {describe(outcome['reply'])}" if describe else ""
    action = f"  action: {outcome['action']}" if "action" in outcome else ""
    duration = f"  {data['us'][0] / 1000:.1f} ms" if "us" in data else ""
    return f"{data['transition']} -> {data['to']}{duration}{reply}{failure}{action}{not_taken}"


def _describe_migration(data: Any, graph: Any) -> str:
    checked = f"path replayed, {data['moves']} transitions" if "moves" in data else "path check skipped"
    renames = (pair for group in ("states", "transitions") for pair in data.get(group, ()))
    names = "".join(f"; {old} is now {new}" for old, new in renames)
    return (
        f"run.migrated to graph {graph['name']} ({graph['fingerprint'][:12]}) from {data['from'][:12]}, "
        f"in {data['to']}: {checked}{names}"
    )


def _describe_human_reply(reply: Any) -> str:
    """What a person replied, and who it was."""
    content = f" {reply['unit']}={reply['amount']:.10g}" if "unit" in reply else ""
    content += "".join(f" {_preview(reply[name])}" for name in ("text", "arguments") if name in reply)
    by = f" by {_preview(reply['by'])}, claimed, not verified" if "by" in reply else ""
    if "actor" in reply:
        by = f" by {_describe_actor(reply['actor'])}"
    return f"{reply['kind']}{content}{by}"


def _describe_actor(actor: Any) -> str:
    return str(Actor(actor["id"], actor.get("roles", ()), verified=actor.get("verified", False)))


def _describe_model_reply(reply: Any) -> str:
    """What a model replied, and what it cost."""
    message, usage = reply["message"], reply.get("usage", {})
    calls = (f"{call['name']} {_preview(call.get('arguments'))}" for call in message.get("tool_calls", ()))
    text = _preview(message.get("content") or "")
    cost = _describe_cost(float(usage.get("cost_usd", 0)), usage.get("unpriced_tokens", 0))
    tokens = f"({usage.get('input_tokens', 0)} tokens in, {usage.get('output_tokens', 0)} out, {cost})"
    return "; ".join(each for each in (text, *calls) if each) + (f" {tokens}" if usage else "")


_REPLY_FORMATTERS = {"answered": _describe_human_reply, "replied": _describe_model_reply}
"""How the outcomes that are replies are described, by kind."""


def _preview(value: Any) -> str:
    """The start of a value, on one line."""
    return shorten(json.dumps(value, ensure_ascii=False, default=repr) if isinstance(value, dict) else value, 80)


_EXPORT_EXAMPLES = """\b
Examples:
  agentfsm export 3f9c0a1b2c3d4e5f > run.jsonl
  agentfsm export 3f9c0a1b2c3d4e5f --store runs.db | gzip > run.jsonl.gz
  agentfsm export 3f9c0a1b2c3d4e5f --case refund >> cases.jsonl
"""


@click.command(epilog=_EXPORT_EXAMPLES)
@click.argument("run_id", metavar="RUN", shell_complete=complete_run_id)
@click.option("--case", metavar="NAME", help="Write it as a case for agentfsm eval instead, with this name.")
@store_option
@tenant_option
def export(run_id: str, case: str | None, location: StoreLocation) -> None:
    """Write the journal of RUN to stdout as JSON lines, each record exactly as it was hashed.

    agentfsm verify --file checks such a file; so does examples/verify_journal.py, with Python's standard library
    alone.

    --case writes one line for agentfsm eval: the conversation so far, what was asked, what people answered, how the
    run ended, and the tools that it called. For a fork this includes what the run that it was forked from did before.
    """
    store = open_existing_store(location)
    run_id = await_result(Runs(store).find_id(run_id))
    records = await_result(store.records(run_id))
    if case is None:
        for line in export_lines(records):
            click.echo(line, nl=False)
        return
    run = rehydrate(records).run
    if not run.ended:
        raise click.UsageError(f"{run_id} has not ended, so nobody knows yet what a good run of it is")
    parts = await_result(_lineage(store, records))
    replies = _replies([each for part in parts for each in read_ledger(run_id, part).decisions])
    given = len(rehydrate(parts[0][:1]).run.messages)
    click.echo(json.dumps(case_of_run(case, run.messages, cast("CaseEnding", run.ended), replies, given=given)))


async def _lineage(store: Store, records: Sequence[SealedRecord]) -> list[Sequence[SealedRecord]]:
    """The records of a run, and before them those of the runs that it was forked from, up to where it was."""
    first, parts = open_record(records[0]), [records]
    while first["kind"] == "run.forked":
        parent = first["parent"]
        try:
            before = (await store.records(parent["run"]))[: parent["seq"]]
        except UnknownRunError:  # it was purged
            break
        parts.insert(0, before)
        first = open_record(before[0])
    return parts


def _replies(decisions: Sequence[HumanDecision]) -> dict[str, str]:
    """What people answered to each kind of request, as it is typed; only where they always answered the same."""
    typed: dict[str, set[str]] = {}
    for each in decisions:
        words = _TYPED_REPLIES.get(each.answer)
        typed.setdefault(each.kind, set()).add("" if words is None else words.format(text=each.text).strip())
    return {kind: text for kind, texts in typed.items() for text in texts if text and len(texts) == 1}


_TYPED_REPLIES = {
    "allow": "allow",
    "deny": "deny {text}",
    "edit": "{text}",
    "text": "{text}",
    "ran": "ran {text}",
    "did_not_run": "did-not-run",
    "give_up": "give-up",
}
"""How replies are typed, by kind; those that are not here cannot be given again to another run."""


_FORK_EXAMPLES = """\b
Examples:
  agentfsm fork 3f9c0a1b2c3d4e5f --at 12
  agentfsm fork 3f9c0a1b2c3d4e5f --at 12 --as another-try
"""


@click.command(epilog=_FORK_EXAMPLES)
@click.argument("run_id", metavar="RUN", shell_complete=complete_run_id)
@click.option("--at", required=True, type=int, metavar="SEQ", help="The last record that the new run shares with RUN.")
@click.option("--as", "new_id", metavar="ID", help="The new run's id; default: a random one.")
@store_option
@tenant_option
def fork(run_id: str, at: int, new_id: str | None, location: StoreLocation) -> None:
    """Start a new run from RUN as it was after record SEQ, and print its id; agentfsm resume continues it.

    What RUN did up to that record is not done again.
    """
    if new_id is not None and not (new_id.strip() and new_id.isprintable()):
        raise click.BadParameter(f"{new_id!r} is not a valid id", param_hint="--as")
    store, stored_runs = open_runs(location)
    click.echo(await_result(stored_runs.fork(run_id, at, new_id)))
    await_result(store.aclose())


_ADOPT_EXAMPLES = """\b
Examples:
  agentfsm adopt 3f9c0a1b2c3d4e5f --by Ann
  agentfsm adopt --store runs.db              every run of the store
"""


@click.command(epilog=_ADOPT_EXAMPLES)
@click.argument("run_ids", metavar="[RUN]...", nargs=-1, shell_complete=complete_run_id)
@click.option("--by", default="", metavar="NAME", help="Who trusts the runs; recorded in their journals.")
@store_option
def adopt(run_ids: tuple[str, ...], by: str, location: StoreLocation) -> None:
    """Seal RUNs, or all runs of a store, as they are, under the store's secret, so that they can be resumed.

    For journals of an earlier release, which are not sealed, and for those whose secret is lost. Whoever could write
    the file may have changed them: adopt only what you trust. What was approved and has not run yet is asked again.
    RUN may be the beginning of an id.
    """
    store = open_existing_store(location)
    keyring = require_keyring(location, create=True)
    for run_id in full_run_ids(store, run_ids) or [head.run_id for head in await_result(store.heads()) if head.seq]:
        adopted = write_for_a_moment(store, partial(adopt_run, run_id=run_id, keyring=keyring, by=by))
        click.echo(single_line(f"{run_id}  {'adopted' if adopted else 'was sealed already'}"))
    await_result(store.aclose())
