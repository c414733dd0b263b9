"""Reports on stored runs: what was asked, who allowed what, every move, and whether the journal is intact.

::

    records = tuple(await store.records(run_id))
    ledger = read_ledger(run_id, records)
    page = run_page([ReportedRun(run_id, records, verify(run_id, records))], Findings(), made_at=time.time())

``ledger`` reads a journal as data, ``fragments`` renders the parts of a run as HTML for any page, ``page`` puts them
together in one file that needs no network, and ``markdown_report`` writes a comment for a pull request. Nothing here
reads a store or a clock.
"""

from agentfsm.report.ledger import HumanDecision, LedgerRow, RunLedger, TranscriptEntry, read_ledger
from agentfsm.report.markdown_report import run_markdown
from agentfsm.report.page import DecisionFilter, period_page, run_page
from agentfsm.report.reported_run import Findings, ReportedRun

__all__ = [
    "DecisionFilter",
    "Findings",
    "HumanDecision",
    "LedgerRow",
    "ReportedRun",
    "RunLedger",
    "TranscriptEntry",
    "period_page",
    "read_ledger",
    "run_markdown",
    "run_page",
]
