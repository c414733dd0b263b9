"""``agentfsm show``, ``export``, ``fork`` and ``adopt``: what is done with one stored run."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import click

from agentfsm.cli.console import sanitize, shorten, single_line, utc
from agentfsm.cli.local_store import (
    await_result,
    complete_run_id,
    full_run_ids,
    open_existing_store,
    open_runs,
    require_keyring,
    store_option,
    tenant_option,
    write_for_a_moment,
)
from agentfsm.cli.runs_command import listed_line
from agentfsm.errors import JournalError, StoreError, UnknownRunError
from agentfsm.journal.adoption import adopt as adopt_run
from agentfsm.journal.listing import find_listing, find_run_id
from agentfsm.journal.records import Record, SealedRecord, export_lines, open_record, read_record
from agentfsm.journal.rehydrate import rehydrate
from agentfsm.journal.run_info import spent_before
from agentfsm.journal.store import Store
from agentfsm.journal.store_url import StoreLocation
from agentfsm.loop.messages import Usage
from agentfsm.loop.quorum import Actor
from agentfsm.report.ledger import HumanDecision, read_ledger
from agentfsm.testing.evaluation import CaseEnding, case_of_run

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

    The beginning of an id is enough if it is unique.

    A record that cannot be read is reported in its place, and the exit code is 1; agentfsm verify says what was
    changed.
    """
    store = open_existing_store(location)
    run_id = await_result(find_run_id(store, run_id))
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
        return "" if info is None else listed_line(store, location, info)
    except (StoreError, TypeError, ValueError, OverflowError, OSError):
        return ""


def _total_usage(rows: Sequence[SealedRecord]) -> Usage | None:
    """The tokens and cost of a run, from its fork on if it is one; None if its journal cannot be rehydrated."""
    try:
        return rehydrate(rows).run.usage - spent_before(rows[0])
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
    return f"{record.seq:>5}  {utc(record.time)}  {_describe_record(record, graph)}" + (
        "  (redacted)" if record.redacted else ""
    )


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
    guards = [guard for state, guard, *_ in graph["transitions"] if state == source]
    answers = list(zip(guards, data["tried"][:-1], strict=False))
    not_taken = "".join(
        f"  {what}: {', '.join(names)}"
        for what, digit in (("not", "0"), ("raised", "e"))
        if (names := [guard for guard, answer in answers if answer == digit])
    )
    failure = f"  {data['failure']['kind']}: {data['failure'].get('explanation')}" if "failure" in data else ""
    ((kind, outcome),) = data["out"].items()
    describe = _REPLY_FORMATTERS.get(kind)
    reply = f"  {describe(outcome['reply'])}" if describe else ""
    if kind == "ran":
        reply = "".join(map(_describe_call_that_was_not_run, outcome.get("results", ())))
    action = f"  action: {outcome['action']}" if "action" in outcome else ""
    duration = f"  {data['us'][0] / 1000:.1f} ms" if "us" in data else ""
    return f"{data['transition']} -> {data['to']}{duration}{reply}{failure}{action}{not_taken}"


def _describe_call_that_was_not_run(result: Any) -> str:
    """Its result; that of a call that ran is only named here, and has a record of its own."""
    if not isinstance(result, dict):
        return ""
    fields = cast("dict[str, Any]", result)
    return f"  {fields['name']}: {_preview(fields.get('content'))}"


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

    At a terminal, control characters and invisible characters are shown by their codes.

    agentfsm verify --file checks such a file; so does examples/verify_journal.py, with Python's standard library
    alone.

    --case writes one line for agentfsm eval: the conversation so far, what was asked, what people answered, how the
    run ended, and the tools that it called. For a fork this includes what the run that it was forked from did before.
    """
    store = open_existing_store(location)
    run_id = await_result(find_run_id(store, run_id))
    records = await_result(store.records(run_id))
    if case is None:
        is_terminal = sys.stdout.isatty()
        for line in export_lines(records):
            click.echo(sanitize(line) if is_terminal else line, nl=False)
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
