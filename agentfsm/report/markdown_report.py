"""A report as Markdown that fits a comment on a pull request, with the picture as Mermaid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from agentfsm.diagrams import diagram
from agentfsm.errors import AgentfsmError
from agentfsm.report.findings import Findings, ReportedRun, verdict_of
from agentfsm.report.ledger import RunLedger, read_ledger
from agentfsm.report.run_graph import graph_of_run, path_of_run
from agentfsm.report.visible_text import clip, code_span, format_time

__all__ = ["MAX_COMMENT", "run_markdown"]


MAX_COMMENT = 60_000
"""Characters of a report; GitHub accepts comments of up to 65,536."""

MAX_TEXT = 400
"""Characters of a text that somebody else wrote."""

MAX_CELL = 120
"""Characters of such a text in a table."""

MAX_LISTED = 40
"""Answers, failures and problems that are listed; of more, the number is given."""


def run_markdown(runs: Sequence[ReportedRun], findings: Findings) -> str:
    """A report on runs as Markdown; the moves of long runs are left out where it would not fit.

    Args:
        runs: The runs, each with its records and what its verification found.
        findings: How they were verified, and what is wrong with the store.
    """
    ledgers = [read_ledger(run.run_id, run.sealed) for run in runs]
    fixed = ["\n".join(_head(run, ledger)) for run, ledger in zip(runs, ledgers, strict=True)]
    foot = "\n".join(_foot(findings))
    room = MAX_COMMENT - len(foot) - 200
    kept: list[str] = []
    for head in fixed:
        if len(head) + 100 > room:
            kept.append(f"\n{len(fixed) - len(kept)} runs more do not fit.\n")
            break
        kept.append(head)
        room -= len(head)
    for place, ledger in enumerate(ledgers[: len(kept)]):
        moves = "\n".join(_moves(ledger, room))
        if len(moves) <= room and kept[place] == fixed[place]:
            kept[place] += moves
            room -= len(moves)
    return "\n".join([*kept, foot])


def _head(run: ReportedRun, ledger: RunLedger) -> Iterator[str]:
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
    if ledger.waiting_for:
        yield f"- Waits for: {_said(ledger.waiting_for)}"
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
        cells = [
            format_time(decision.time),
            who if decision.verified or not decision.by else f"{who}, not verified",
            " ".join(filter(None, (f"**{code_span(decision.answer)}**", code_span(clip(decision.text, MAX_CELL))))),
            code_span(clip(f"{decision.tool} {decision.arguments or decision.question}".strip(), MAX_CELL)),
            code_span(clip(decision.result, MAX_CELL)) or decision.came_to,
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


def _moves(ledger: RunLedger, room: int) -> Iterator[str]:
    yield ""
    yield f"<details><summary>{len(ledger.moves)} moves</summary>"
    yield ""
    yield "| n | from | guard that held | to | said no before it | outcome |"
    yield "| ---: | --- | --- | --- | --- | --- |"
    used = 300
    for row in ledger.moves:
        no = ", ".join(row.said_no)
        what = clip(" ".join(filter(None, (row.outcome, row.summary, row.failure, row.action))), MAX_CELL)
        cells = [str(row.number), *(code_span(each) for each in (row.source, row.guard, row.target, no, what))]
        line = f"| {' | '.join(cells)} |"
        used += len(line) + 1
        if used > room:
            yield f"| | | | | | {len(ledger.moves) - row.number + 1} moves more do not fit |"
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
