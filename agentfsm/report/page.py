"""A report as one HTML page that needs no network and, but for stepping through a run, no script; or as a PDF of it."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from agentfsm.errors import ConfigurationError
from agentfsm.report.fragments import (
    DECISION_HEADS,
    costs_html,
    decision_cells,
    decisions_html,
    failures_html,
    graph_html,
    how_to_verify_html,
    ledger_html,
    picture_html,
    prompts_html,
    sub_runs_html,
    summary_html,
    table_html,
    transcript_html,
    verdict_html,
    verification_html,
)
from agentfsm.report.ledger import HumanDecision, RunLedger, read_ledger
from agentfsm.report.reported_run import Findings, ReportedRun, sent_requests, verdict_of
from agentfsm.report.visible_text import escape, format_time

_FILES = files("agentfsm.report")
STYLE = _FILES.joinpath("report.css").read_text("utf-8")
"""The style sheet of every page about runs: of reports, and of the viewer. It has a light and a dark theme."""

_SCRIPT = _FILES.joinpath("report.js").read_text("utf-8")


def run_page(runs: Sequence[ReportedRun], findings: Findings, made_at: float) -> str:
    """A report on runs, as one HTML page.

    Args:
        runs: The runs, each with its records and what its verification found; one that called another as a sub-agent
            links to it.
        findings: How they were verified, and what is wrong with the store.
        made_at: When the report is made, in seconds since the epoch.
    """
    ledgers = [read_ledger(run.run_id, run.sealed) for run in runs]
    names = [f"r{number}" for number in range(1, len(runs) + 1)]
    ids = {run.run_id for run in runs}
    roots = [run for run, ledger in zip(runs, ledgers, strict=True) if ledger.caller not in ids]
    title = f"Report on run {roots[0].run_id}" if len(roots) == 1 else f"Report on {len(runs)} runs"

    def body() -> Iterator[str]:
        if len(runs) > 1:
            rows = (
                [
                    f'<a href="#{name}">{escape(run.run_id)}</a>',
                    verdict_html(verdict_of(run.verification)),
                    escape(ledger.ending.replace("_", " ") or ledger.status),
                    escape(format_time(ledger.started)) if ledger.records else "",
                    str(len(ledger.moves)),
                ]
                for name, run, ledger in zip(names, runs, ledgers, strict=True)
            )
            yield table_html("The runs of this report", ("run", "verification", "ended", "started", "moves"), rows)
        for name, run, ledger in zip(names, runs, ledgers, strict=True):
            called = [each for each in zip(names, ledgers, strict=True) if each[1].caller == run.run_id]
            yield from _run_sections(name, run, ledger, findings, called)
        yield f'<section><h2 id="verify">How this was checked</h2>{how_to_verify_html(runs, findings)}</section>'

    return _page(title, findings.worst(runs), body, findings, made_at)


def _run_sections(
    name: str, run: ReportedRun, ledger: RunLedger, findings: Findings, called: Sequence[tuple[str, RunLedger]]
) -> Iterator[str]:
    verdict = verdict_of(run.verification)
    yield f'<article data-run id="{name}"><h2>Run <span class="said">{escape(run.run_id)}</span></h2>'
    yield summary_html(ledger, verdict)
    sub_agents = [("Sub-agents", sub_runs_html(called))] if called else []
    for title, fragment in (
        ("Who allowed what", decisions_html(ledger.decisions)),
        *sub_agents,
        ("The path of the run", picture_html(ledger)),
        ("Ledger of moves", ledger_html(ledger.moves, name)),
        ("Transcript", transcript_html(ledger.transcript)),
        ("Prompts as sent", prompts_html(sent_requests(run.sealed))),
        ("Failures", failures_html(ledger.failures)),
        ("Costs", costs_html(ledger.costs)),
        ("Graph", graph_html(ledger)),
        ("Verification", verification_html(run, ledger, findings)),
    ):
        yield f"<section><h3>{title}</h3>{fragment}</section>"
    yield "</article>"


@dataclass(frozen=True, slots=True)
class DecisionFilter:
    """Which human decisions a report over a period has.

    Attributes:
        tool: The tool that they are about; an empty string for any.
        since: From when on, in seconds since the epoch; None for the beginning.
        until: Before when, in seconds since the epoch; None for no end.
    """

    tool: str = ""
    since: float | None = None
    until: float | None = None

    def includes(self, decision: HumanDecision) -> bool:
        """Whether a report has a decision."""
        return (
            (not self.tool or decision.tool == self.tool)
            and (self.since is None or decision.time >= self.since)
            and (self.until is None or decision.time < self.until)
        )

    def __str__(self) -> str:
        what = f"approvals and answers about {self.tool}" if self.tool else "approvals and answers"
        start = "" if self.since is None else f" from {format_time(self.since)}"
        end = "" if self.until is None else f" before {format_time(self.until)}"
        return f"All {what}{start}{end}"


_ANSWERED = '"answered"'
"""What the record of every answer contains: the kind of its outcome."""


class PeriodDecision(NamedTuple):
    """A decision, and the run in which it was made."""

    run: ReportedRun
    decision: HumanDecision


def find_decisions(runs: Sequence[ReportedRun], wanted: DecisionFilter) -> list[PeriodDecision]:
    """The decisions of runs that a filter includes, in the order of their times."""
    found = [
        PeriodDecision(run, decision)
        for run in runs
        if any(_ANSWERED in row.body for row in run.sealed)  # most runs have none, and need not be read
        for decision in read_ledger(run.run_id, run.sealed).decisions
        if wanted.includes(decision)
    ]
    return sorted(found, key=lambda each: (each.decision.time, each.run.run_id, each.decision.seq))


def period_page(runs: Sequence[ReportedRun], wanted: DecisionFilter, findings: Findings, made_at: float) -> str:
    """A report on the human decisions of many runs, as one HTML page.

    Args:
        runs: The runs that were searched; one that cannot be read or was tampered with is listed whatever it has.
        wanted: The decisions.
        findings: How the runs were verified, and what is wrong with the store.
        made_at: When the report is made, in seconds since the epoch.
    """
    found = find_decisions(runs, wanted)
    having = {each.run.run_id for each in found}
    listed = [run for run in runs if run.run_id in having or verdict_of(run.verification) in _SUSPECT]

    def body() -> Iterator[str]:
        yield f"<p>{len(found)} decision{'s' * (len(found) != 1)} in {len(having)} of {len(runs)} runs.</p>"
        heads = ("run", "record", *DECISION_HEADS)
        rows = ([f"{escape(run.run_id)}", *decision_cells(decision)] for run, decision in found)
        yield f"<section><h2>Decisions</h2>{table_html(str(wanted), heads, rows)}</section>"
        checked = (
            [
                escape(run.run_id),
                verdict_html(verdict_of(run.verification)),
                escape(run.verification.reason),
                f"<code>{escape(run.sealed[-1].hash)}</code>" if run.sealed else "",
            ]
            for run in listed
        )
        table = table_html("Runs with these decisions, and runs that are suspect", _CHECKED_HEADS, checked)
        yield f"<section><h2>Verification</h2>{table}</section>"
        yield f'<section><h2 id="verify">How this was checked</h2>{how_to_verify_html(listed, findings)}</section>'

    return _page(str(wanted), findings.worst(runs), body, findings, made_at)


_SUSPECT = ("tampered", "cannot be verified")
_CHECKED_HEADS = ("run", "verification", "found", "last hash")


def _page(title: str, verdict: str, body: Callable[[], Iterator[str]], findings: Findings, made_at: float) -> str:
    content = "\n".join(body())
    styles = [STYLE, *dict.fromkeys(re.findall(r"<style>(.*?)</style>", content, re.DOTALL))]
    policy = (
        f"default-src 'none'; style-src {' '.join(map(_hash_source, styles))}; script-src {_hash_source(_SCRIPT)}; "
        "base-uri 'none'; form-action 'none'"
    )
    limits = '<a href="#verify">Not everything was checked</a>. ' if findings.unchecked else ""
    made = f"{format_time(made_at)}, from {escape(findings.store)}" if findings.store else format_time(made_at)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="referrer" content="no-referrer">\n'
        f"<title>{escape(title)}: {escape(verdict)}</title><style>{STYLE}</style></head>\n"
        f"<body><main><h1>{escape(title)}</h1>\n"
        f"<p>{verdict_html(verdict)} <small>{limits}Made {made}. Times are UTC. Texts of models, tools and "
        "people are shown as they are recorded; hidden characters by their codes.</small></p>\n"
        f"{content}\n</main><script>{_SCRIPT}</script></body></html>\n"
    )


def _hash_source(text: str) -> str:
    """What a content security policy calls a style or script with this text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
"""The programs that can print a page, the first one found on the path is used."""

PRINT_TIMEOUT_S = 300

_FLAGS = (
    "--headless", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-extensions",
    "--no-pdf-header-footer", "--host-resolver-rules=MAP * ~NOTFOUND",
)  # fmt: skip
"""The last one keeps the browser from asking any server for anything."""


def render_pdf(page: str) -> bytes:
    """A page as a PDF file.

    Raises:
        ConfigurationError: No browser is installed that can print it, or it failed.
    """
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        raise ConfigurationError(
            f"a PDF needs Chromium or Chrome, and none of {', '.join(BROWSERS)} is on the PATH: install one, or write "
            "the report as HTML and print it from any browser"
        )
    with tempfile.TemporaryDirectory(prefix="agentfsm-") as name:
        folder = Path(name)
        (folder / "report.html").write_text(page, encoding="utf-8")
        target = folder / "report.pdf"
        command = [browser, *_FLAGS, f"--user-data-dir={folder / 'profile'}", f"--print-to-pdf={target}"]
        problem = _print([*command, (folder / "report.html").as_uri()], target)
        if problem and not target.exists():  # a browser that runs as root, as in a container, refuses its sandbox
            problem = _print([*command, "--no-sandbox", (folder / "report.html").as_uri()], target)
        if not target.exists():
            raise ConfigurationError(f"{browser} could not print the report: {problem or 'it wrote no file'}")
        return target.read_bytes()


def _print(command: list[str], target: Path) -> str:
    """Run the browser; what it says if it fails."""
    try:
        done = subprocess.run(  # noqa: S603  # a fixed program and flags, and a file that we wrote
            command, capture_output=True, text=True, errors="replace", timeout=PRINT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if target.exists() else " ".join(done.stderr.split())[-300:]
