"""HTML for the parts of a run: its picture, ledger, transcript, decisions, failures, costs, graph and verification.

Each function returns a fragment for any page, without styles or scripts of its own. Whatever a model, a tool, a user
or a server produced is text in it, never markup. Cells and rows have no end tags, which HTML leaves out, because the
ledger of a long run has thousands.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from agentfsm.diagrams import diagram
from agentfsm.errors import AgentfsmError
from agentfsm.loop.messages import Message
from agentfsm.machine.graph import Graph
from agentfsm.report.ledger import (
    CostLine,
    FailureEntry,
    HumanDecision,
    LedgerRow,
    RunLedger,
    TranscriptEntry,
    json_of,
)
from agentfsm.report.reported_run import (
    Findings,
    ReportedRun,
    SentRequest,
    graph_of_run,
    key_ids_of,
    path_of_run,
    verdict_of,
)
from agentfsm.report.visible_text import clip, escape, format_time

MAX_SUMMARY = 160
"""Characters of an outcome that a row of the ledger shows; the transcript has all of it."""

SHOWN_SECONDS = 0.001
"""The shortest duration of an effect that a row shows."""

Cell = str
"""HTML of one cell; made with ``escape`` or from it."""


def table_html(caption: str, heads: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """A table in a box that scrolls by itself where the page is narrow."""
    head = "".join(f"<th scope=col>{escape(name)}" for name in heads)
    body = "".join(f"<tr>{''.join(f'<td>{cell}' for cell in row)}" for row in rows)
    return _scroll(caption, f"<table><caption>{escape(caption)}</caption><thead><tr>{head}<tbody>{body}</table>")


def _scroll(label: str, content: str, *, long: bool = False) -> str:
    classes = "scroll long" if long else "scroll"
    return f'<div class="{classes}" role="region" aria-label="{escape(label)}" tabindex="0">{content}</div>'


def _definitions(pairs: Iterable[tuple[str, Cell]]) -> str:
    return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{value}</dd>' for name, value in pairs if value)}</dl>"


def _text(value: str) -> str:
    """Text of somebody else's, in an element of its own, so that its direction stays inside."""
    return f'<span class="said" dir="auto">{escape(value)}</span>' if value else ""


def text_html(value: str) -> str:
    """Somebody else's text with its line breaks."""
    return f'<pre class="said" dir="auto">{escape(value)}</pre>' if value else ""


def list_html(lines: Sequence[str], otherwise: str) -> str:
    """Some lines as a list."""
    return f"<ul>{''.join(f'<li>{_text(line)}' for line in lines)}</ul>" if lines else f"<p>{escape(otherwise)}</p>"


def verdict_html(verdict: str) -> str:
    """A verdict as a badge: ``intact``, ``intact, not finished``, ``tampered`` or ``cannot be verified``."""
    kind = {"intact": "good", "tampered": "bad"}.get(verdict, "open" if verdict.startswith("intact") else "unknown")
    return f'<strong class="verdict {kind}">{escape(verdict)}</strong>'


def summary_html(ledger: RunLedger, verdict: str) -> str:
    """What was asked, how it ended, when, who asked, and what it cost."""
    ending = ledger.ending.replace("_", " ") or {"suspended": "not yet: it waits for a person"}.get(
        ledger.status, f"not yet: in {ledger.state}" if ledger.state else "not yet"
    )
    seconds = ledger.ended - ledger.started
    return _definitions(
        [
            ("Verification", verdict_html(verdict)),
            ("Asked", text_html(ledger.asked)),
            ("Asked by", _text(ledger.requester)),
            ("Ended", _text(ending)),
            ("Answer", text_html(ledger.answer if ledger.ending == "completed" else "")),
            ("Waits for", text_html(ledger.waiting_for)),
            ("Started", escape(format_time(ledger.started)) if ledger.records else ""),
            ("Last record", escape(f"{format_time(ledger.ended)}, {seconds:.1f} s later") if ledger.records else ""),
            ("Moves", escape(f"{len(ledger.moves)}, in {ledger.last_seq} records")),
            ("Cost", escape(ledger.cost)),
            ("Called by", _text(ledger.caller)),
            ("Forked from", _text(ledger.forked_from)),
        ]
    )


def picture_html(ledger: RunLedger) -> str:
    """The graph of a run with its path, for wide and for narrow screens; says so if it cannot be drawn."""
    try:
        graph = graph_of_run(ledger.records)
        path = path_of_run(ledger.records, graph)
        wide, narrow = (diagram(graph, layout=layout, overlay=path) for layout in ("wide", "vertical"))
    except (AgentfsmError, LookupError, TypeError, ValueError, AttributeError, StopIteration):
        return "<p>The graph cannot be drawn: the journal does not pin one that can be read.</p>"
    return (
        f'<figure class="wide">{_scroll("Picture of the run", wide)}</figure>'
        f'<figure class="narrow">{_scroll("Picture of the run", narrow)}</figure>'
    )


def ledger_html(rows: Sequence[LedgerRow], prefix: str = "") -> str:
    """The moves of a run: for each, the guards that did not hold, the one that did, and what came of it.

    Args:
        rows: The moves.
        prefix: Goes before the id of each row (``m1``), where a page has several runs.
    """
    heads = ("move", "record", "time", "from", "guard that held", "to", "guards that did not hold, in order", "outcome")
    head = "".join(f"<th scope=col>{name}" for name in heads)
    body = "".join(_ledger_row(row, prefix) for row in rows)
    caption = "Every move, with the guards that were evaluated before it"
    table = f'<table class="ledger"><caption>{caption}</caption><thead><tr>{head}<tbody>{body}</table>'
    return _scroll(caption, table, long=True)


def _ledger_row(row: LedgerRow, prefix: str) -> str:
    raised = [each.name for each in row.tried if each.answer == "raised"]
    not_held = ", ".join(row.did_not_hold) + (f"; raised an error: {', '.join(raised)}" if raised else "")
    parts = [
        escape(row.outcome.replace("_", " ")) + (f": {_text(clip(row.summary, MAX_SUMMARY))}" if row.summary else ""),
        f"<em>failure</em> {_text(clip(row.failure, MAX_SUMMARY))}" if row.failure else "",
        f"<em>action</em> {_text(row.action)}" if row.action else "",
        f"<em>ends</em> {escape(row.ends.replace('_', ' '))}" if row.ends else "",
        f"<em>left</em> {escape(_budgets(row))}" if row.budgets else "",
        f"<em>took</em> {_duration(row.seconds)}" if row.seconds is not None and row.seconds >= SHOWN_SECONDS else "",
        "<em>redacted</em>" if row.redacted else "",
    ]
    return (
        f'<tr id="{prefix}m{row.number}"><td>{row.number}<td><span title="{row.hash}">{row.seq}</span>'
        f"<td>{escape(format_time(row.time)[11:19])}<td>{escape(row.source)}<td><b>{escape(row.guard)}</b>"
        f"<td>{escape(row.target)}<td>{escape(not_held) or 'none'}<td>{'<br>'.join(filter(None, parts))}"
    )


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def _budgets(row: LedgerRow) -> str:
    return ", ".join(f"{name} {'no limit' if left is None else left}" for name, left in row.budgets)


def decisions_html(decisions: Sequence[HumanDecision]) -> str:
    """Who allowed, denied or answered what, and when."""
    if not decisions:
        return "<p>Nobody was asked for anything, or nobody has answered yet.</p>"
    heads = ("record", *DECISION_HEADS)
    return table_html("What people allowed, denied and answered", heads, map(decision_cells, decisions))


DECISION_HEADS = ("when", "who", "answer", "to", "what came of it", "guards")
"""The columns of a decision after its record."""


_ANSWERS = {"edit": "edit and allow", "ran": "it ran", "did_not_run": "it did not run", "give_up": "give up"}


def decision_cells(decision: HumanDecision) -> list[Cell]:
    """One decision as the cells of a row."""
    who = decision.by and f"{_text(decision.by)}<br>{'' if decision.verified else 'claimed, not verified'}"
    request = [
        f"{escape(decision.kind)} {_text(decision.tool)}",
        text_html(decision.arguments or decision.question),
        escape(decision.rule),
        f"request: record {decision.requested_seq}, {escape(decision.requested_hash[:12])}",
    ]
    happened = decision.came_to
    if decision.result and not decision.is_counted:
        happened = decision.vote + text_html(clip(decision.result, 400))
    return [
        str(decision.seq),
        escape(format_time(decision.time)),
        who or "not recorded",
        f"<b>{escape(_ANSWERS.get(decision.answer, decision.answer))}</b>{text_html(decision.text)}",
        "".join(f"<div>{part}</div>" for part in request if part),
        happened,
        "<br>".join(
            f"{what} {_held(row)}"
            for what, row in (
                ("stopped by", decision.asked_in),
                ("counted by" if decision.is_counted else "decided by", decision.decided_in),
            )
            if row is not None
        ),
    ]


def _held(row: LedgerRow) -> Cell:
    """The guard that held in a move, and those before it that did not."""
    others = escape(", ".join(row.did_not_hold))
    before = f"did not hold: {others}" if others else "evaluated first"
    return f"<b>{escape(row.transition)}</b> ({before})"


def transcript_html(entries: Sequence[TranscriptEntry]) -> str:
    """Every message of a run: texts, tool calls and results."""
    items = "".join(_message(entry) for entry in entries)
    return f'<ol class="transcript">{items}</ol>' if items else "<p>There is no message.</p>"


def _message(entry: TranscriptEntry) -> str:
    calls = "".join(f"<div>calls {_text(name)}{text_html(arguments)}</div>" for name, arguments in entry.calls)
    plural = "s" * (entry.images != 1)
    images = f"<div>{entry.images} image{plural} or file{plural}, not shown</div>" if entry.images else ""
    name = f" {_text(entry.name)}" if entry.name else ""
    failed = " <em>failed</em>" if entry.failed else ""
    by = f", by run {_text(entry.run_id)}" if entry.run_id else ""
    head = f"<b>{escape(entry.role)}</b>{name}{failed} <small>record {entry.seq}{by}</small>"
    return f"<li class={_ROLES.get(entry.role, 'other')}>{head}{text_html(entry.text)}{calls}{images}"


_ROLES = {"user": "user", "assistant": "model", "tool": "tool", "system": "user", "person": "person"}


def prompts_html(requests: Iterable[SentRequest]) -> str:
    """Every request to the model as it was sent; what a request has in common with the one before is not repeated."""
    found = "".join(
        f"<details><summary>Request {number}, record {request.seq}: {_common(request)}</summary>"
        f'<ol class="transcript">{"".join(map(_sent, request.added))}</ol></details>'
        for number, request in enumerate(requests, 1)
    )
    return found or "<p>No model was called, or what it was sent was redacted.</p>"


def _common(request: SentRequest) -> str:
    total = f"{request.same + len(request.added):,} messages"
    return f"{total}, the first {request.same:,} as in the request before" if request.same else total


def _sent(message: Message) -> str:
    calls = "".join(
        f"<div>calls {_text(call.name)}{text_html(json_of(call.arguments))}</div>" for call in message.tool_calls
    )
    head = f"<b>{escape(message.role.value)}</b>{f' {_text(message.name)}' if message.name else ''}"
    return f"<li class={_ROLES.get(message.role.value, 'other')}>{head}{text_html(message.content)}{calls}"


def sub_runs_html(runs: Sequence[tuple[str, RunLedger]]) -> str:
    """The runs that a run called as sub-agents."""
    items = (
        f'<li><a href="#{escape(name)}">{escape(ledger.run_id)}</a>: {_text(clip(ledger.asked, MAX_SUMMARY))} '
        f"<small>{escape(ledger.ending.replace('_', ' ') or ledger.status)}, "
        f"{sum(line.cost_usd for line in ledger.costs):.4f} USD</small>"
        for name, ledger in runs
    )
    return f"<ul>{''.join(items)}</ul>"


def failures_html(failures: Sequence[FailureEntry]) -> str:
    """The failures that a run met, and what was done about each."""
    if not failures:
        return "<p>None.</p>"
    rows = (
        [str(f.seq), escape(f.state), escape(f.kind), text_html(f.explanation), escape(f.action) or "none"]
        for f in failures
    )
    return table_html("Failures and what was done", ("record", "in", "kind", "explanation", "action"), rows)


def costs_html(costs: Sequence[CostLine]) -> str:
    """What each model cost, and the sum."""
    if not costs:
        return "<p>No model replied.</p>"
    total = CostLine(
        "all",
        sum(c.calls for c in costs),
        sum(c.input_tokens for c in costs),
        sum(c.output_tokens for c in costs),
        sum(c.cost_usd for c in costs),
    )
    rows = (
        [_text(c.name), str(c.calls), f"{c.input_tokens:,}", f"{c.output_tokens:,}", f"{c.cost_usd:.6f}"]
        for c in (*costs, *([total] if len(costs) > 1 else []))
    )
    return table_html("Replies, tokens and USD", ("model", "replies", "tokens in", "tokens out", "USD"), rows)


def graph_html(ledger: RunLedger) -> str:
    """The pinned graph: its fingerprint, and its table with how often each row was taken."""
    try:
        graph = graph_of_run(ledger.records)
    except (AgentfsmError, LookupError, TypeError, ValueError, AttributeError, StopIteration):
        return "<p>The journal does not pin a graph that can be read.</p>"
    taken = Counter(row.transition for row in ledger.moves)
    heads = ("in", "n", "guard", "to", "ends the run", "spends", "taken")
    table = table_html(
        "The rows of the graph, in the order in which they are evaluated", heads, _graph_rows(graph, taken)
    )
    stated = escape(str(ledger.table.get("fingerprint", "")))
    return f"<p>{_text(graph.name)}, fingerprint <code>{stated}</code> (SHA-256 of the table).</p>{table}"


def _graph_rows(graph: Graph, taken: Counter[str]) -> Iterator[list[Cell]]:
    for state in graph.states:
        for number, row in enumerate(graph.rows(state.name), 1):
            yield [
                escape(str(state.name)),
                str(number),
                escape(row.name),
                escape(str(row.target)),
                escape(row.ends.replace("_", " ")),
                escape(", ".join(row.spends)),
                str(taken[row.id] or ""),
            ]


def verification_html(run: ReportedRun, ledger: RunLedger, findings: Findings) -> str:
    """What verification found about a run, with which keys and checkpoint, and what could not be checked."""
    report = run.verification
    found = ""
    if report.reason:
        found = f"record {report.seq}: {report.reason}" if report.seq is not None else report.reason
    sealed = key_ids_of(run.sealed)
    known = [each for each in sealed if each in findings.key_ids]
    keys = f"{', '.join(sealed)}{'' if known else ' (not checked: the secret was not given)'}" if sealed else "none"
    return _definitions(
        [
            ("Result", verdict_html(verdict_of(report))),
            ("Found", _text(found)),
            ("Open", _text("; ".join(report.open))),
            ("Doubt", _text(report.doubt)),
            ("Claimed, not verified", _text(", ".join(report.claimed))),
            ("Records", escape(str(report.records))),
            ("Last hash", f"<code>{escape(ledger.last_hash)}</code>" if ledger.last_hash else ""),
            ("Sealed under", escape(f"key {keys}")),
            ("Checkpoint", escape(findings.checkpoint or "none was given")),
            ("Redacted", "<br>".join(_text(each) for each in ledger.redactions)),
            ("Cannot be read", "<br>".join(_text(each) for each in ledger.problems)),
        ]
    )


def how_to_verify_html(runs: Sequence[ReportedRun], findings: Findings) -> str:
    """How a reader checks a run without this report, and without agentfsm."""
    first = runs[0].run_id if runs else "RUN"
    unchecked = "".join(f"<li>{_text(line)}" for line in findings.unchecked)
    problems = "".join(f"<li>{_text(f'{each.run_id}: {each.reason}')}" for each in findings.problems)
    run_id, file = (escape(shlex.quote(each)) for each in (first, findings.store or "agentfsm.db"))
    return (
        (f"<h3>Wrong with the store</h3><ul>{problems}</ul>" if problems else "")
        + (f"<h3>Not checked</h3><ul>{unchecked}</ul>" if unchecked else "")
        + "<h3>Check it yourself</h3>"
        "<p>This page is a copy; the store is the original. Export a run, and check it with a script that needs only "
        "Python's standard library (<code>examples/verify_journal.py</code> in the sources of agentfsm):</p>"
        f"<pre>agentfsm export {run_id} --store {file} &gt; run.jsonl\n"
        "python verify_journal.py run.jsonl                  # hashes, and that every move is legal\n"
        "python verify_journal.py run.jsonl checkpoint log   # and that nothing was cut off</pre>"
        "<p>With the host's secret in <code>AGENTFSM_SECRET</code> it also checks who wrote each record. The hash of "
        "the last line must be the last hash that this report names; what it says about moves, guards, answers and "
        "times is in the lines.</p>"
    )
