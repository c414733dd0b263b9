"""A report as Markdown that fits a comment on a pull request, with the picture as Mermaid."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from agentfsm.diagrams import diagram
from agentfsm.errors import AgentfsmError
from agentfsm.report.ledger import LedgerRow, RunLedger, read_ledger
from agentfsm.report.reported_run import Findings, ReportedRun, graph_of_run, path_of_run, sent_requests, verdict_of
from agentfsm.report.visible_text import clip, code_span, format_time, visible

MAX_COMMENT = 60_000
"""Characters of a report; GitHub accepts comments of up to 65,536."""

MAX_TEXT = 400
"""Characters of a text that somebody else wrote."""

MAX_CELL = 120
"""Characters of such a text in a table."""

MAX_LISTED = 40
"""Answers, failures and problems that are listed; of more, the number is given."""


def run_markdown(runs: Sequence[ReportedRun], findings: Findings) -> str:
    """A report on runs as Markdown; moves and prompts that would not fit are left out.

    Args:
        runs: The runs, each with its records and what its verification found.
        findings: How they were verified, and what is wrong with the store.
    """
    ledgers = [read_ledger(run.run_id, run.sealed) for run in runs]
    fixed = [
        "\n".join(_head(run, ledger, [each for each in ledgers if each.caller == run.run_id]))
        for run, ledger in zip(runs, ledgers, strict=True)
    ]
    foot = "\n".join(_foot(findings))
    room = MAX_COMMENT - len(foot) - 200
    kept: list[str] = []
    for head in fixed:
        if len(head) + 100 > room:
            kept.append(f"\n{len(fixed) - len(kept)} runs more do not fit.\n")
            break
        kept.append(head)
        room -= len(head)
    whole = [place for place, head in enumerate(kept) if head == fixed[place]]
    for table in (_moves, _prompts):  # of all runs the moves first
        for place in whole:
            more = "\n".join(table(runs[place], ledgers[place], room))
            if len(more) <= room:
                kept[place] += more
                room -= len(more)
    return "\n".join([*kept, foot])


def _head(run: ReportedRun, ledger: RunLedger, called: Sequence[RunLedger]) -> Iterator[str]:
    report = run.verification
    ending = ledger.ending.replace("_", " ") or ledger.status
    at = f" in record {report.seq}" if report.seq is not None else ""
    found = f": {code_span(clip(report.reason, MAX_TEXT))}{at}" if report.reason else ""
    yield f"### Run {code_span(clip(run.run_id, MAX_CELL))}: {code_span(ending)}"
    yield ""
    yield f"- Verification: **{verdict_of(report)}**{found}"
    yield f"- Asked: {_said(ledger.asked)}"
    if ledger.requester:
        yield f"- Asked by: {_said(ledger.requester)}"
    if ledger.ending == "completed":
        yield f"- Answer: {_said(ledger.answer)}"
    if ledger.cost:
        yield f"- Cost: {ledger.cost}"
    if ledger.waiting_for:
        yield f"- Waits for: {_said(ledger.waiting_for)}"
    for each in called[:MAX_LISTED]:
        name, end = code_span(clip(each.run_id, MAX_CELL)), code_span(each.ending.replace("_", " ") or each.status)
        cost = sum(line.cost_usd for line in each.costs)
        yield f"- Sub-agent {name}: {code_span(clip(each.asked, MAX_CELL)) or 'nothing'}; {end}, {cost:.4f} USD"
    if len(called) > MAX_LISTED:
        yield f"- and {len(called) - MAX_LISTED} sub-agents more"
    digest = code_span(ledger.last_hash[:16]) or "none"
    yield f"- {len(ledger.moves)} moves in {ledger.last_seq} records; last hash {digest}"
    for failure in ledger.failures[:MAX_LISTED]:
        what = code_span(clip(f"{failure.kind}: {failure.explanation}", MAX_CELL))
        action = code_span(clip(failure.action, MAX_CELL)) or "no action"
        yield f"- Failure in {code_span(failure.state)}: {what}; {action}"
    if len(ledger.failures) > MAX_LISTED:
        yield f"- and {len(ledger.failures) - MAX_LISTED} failures more"
    yield ""
    yield from _decisions(ledger)
    yield from _picture(ledger)


def _decisions(ledger: RunLedger) -> Iterator[str]:
    if not ledger.decisions:
        return
    yield "| when | who | answer | to | what came of it |"
    yield "| --- | --- | --- | --- | --- |"
    for decision in ledger.decisions[:MAX_LISTED]:
        who = code_span(clip(decision.by, MAX_CELL)) or "not recorded"
        result = "" if decision.is_counted else code_span(clip(decision.result, MAX_CELL))
        cells = [
            format_time(decision.time),
            who if decision.verified or not decision.by else f"{who}, not verified",
            " ".join(filter(None, (f"**{code_span(decision.answer)}**", code_span(clip(decision.text, MAX_CELL))))),
            code_span(clip(f"{decision.tool} {decision.arguments or decision.question}".strip(), MAX_CELL)),
            "; ".join(filter(None, (decision.vote, result))) if result else decision.came_to,
        ]
        yield f"| {' | '.join(cells)} |"
    if len(ledger.decisions) > MAX_LISTED:
        yield f"| | | | | {len(ledger.decisions) - MAX_LISTED} more |"
    yield ""


def _picture(ledger: RunLedger) -> Iterator[str]:
    try:
        graph = graph_of_run(ledger.records)
        picture = diagram(graph, "mermaid", overlay=path_of_run(ledger.records, graph))
    except (AgentfsmError, LookupError, TypeError, ValueError, AttributeError, StopIteration):
        yield "The graph cannot be drawn: the journal does not pin one that can be read."
        return
    if "```" not in picture:
        yield f"```mermaid\n{picture}```"


def _moves(run: ReportedRun, ledger: RunLedger, room: int) -> Iterator[str]:
    """The moves of a run, folded."""

    def cells(row: LedgerRow) -> list[str]:
        what = clip(" ".join(filter(None, (row.outcome, row.summary, row.failure, row.action))), MAX_CELL)
        spans = map(code_span, (row.source, row.guard, row.target, ", ".join(row.did_not_hold), what))
        return [str(row.number), *spans]

    heads = ("n", "from", "guard that held", "to", "did not hold", "outcome")
    return _folded("moves", heads, list(map(cells, ledger.moves)), room)


def _prompts(run: ReportedRun, ledger: RunLedger, room: int) -> Iterator[str]:
    """Every request to the model as it was sent, folded; what it has in common with the one before is not repeated."""
    rows: list[list[str]] = []
    for number, request in enumerate(sent_requests(run.sealed), 1):
        begins = [
            str(number),
            str(request.seq),
            f"the first {request.same} of request {number - 1}" * bool(request.same),
        ]
        if not request.added:  # the same request again
            rows.append([*begins, "", ""])
        for message in request.added:
            calls = (f"{call.name} {json.dumps(call.arguments, ensure_ascii=False)}" for call in message.tool_calls)
            text = clip(visible(" ".join(filter(None, (message.content, *calls)))), MAX_TEXT)
            rows.append([*begins, message.role.value, code_span(text)])
            begins[2] = ""
    return _folded("rows of prompts as sent", ("request", "record", "begins with", "role", "text"), rows, room)


def _folded(what: str, heads: Sequence[str], rows: Sequence[Sequence[str]], room: int) -> Iterator[str]:
    """A table that is opened with a click, with as many rows as there is room for."""
    yield ""
    yield f"<details><summary>{len(rows)} {what}</summary>"
    yield ""
    yield f"| {' | '.join(heads)} |"
    yield f"| {' | '.join(['---:', *['---'] * (len(heads) - 1)])} |"
    used = 300
    for place, row in enumerate(rows):
        line = f"| {' | '.join(row)} |"
        used += len(line) + 1
        if used > room:
            yield f"{'| ' * len(heads)}{len(rows) - place} more do not fit |"
            break
        yield line
    yield ""
    yield "</details>"


def _foot(findings: Findings) -> Iterator[str]:
    yield ""
    for problem in findings.problems[:MAX_LISTED]:
        yield f"- **{verdict_of(problem)}**: {code_span(clip(f'{problem.run_id}: {problem.reason}', MAX_TEXT))}"
    checkpoint = f"compared with {findings.checkpoint}" if findings.checkpoint else "without a checkpoint"
    keys = f"with key {', '.join(findings.key_ids)}" if findings.key_ids else "without the host's secret"
    yield ""
    yield f"Verified {keys}, {checkpoint}."


def _said(text: str) -> str:
    return code_span(clip(text, MAX_TEXT)) or "nothing"
