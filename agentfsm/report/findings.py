"""What verification found about a run, and how far it could look: what a report states beside what happened."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from agentfsm.journal.records import VOUCHED_BY_NEXT, SealedRecord
from agentfsm.journal.verification import GOOD, OPEN, TAMPERED, VerificationReport

__all__ = ["Findings", "ReportedRun", "key_ids_of", "verdict_of"]


_VERDICTS = {GOOD: "intact", OPEN: "intact, not finished", TAMPERED: "tampered"}
_KEY_ID_DIGITS = 8


@dataclass(frozen=True, slots=True)
class ReportedRun:
    """A run of a report.

    Attributes:
        run_id: The run.
        sealed: Its records, as the store keeps them; empty if they cannot be read.
        verification: What its verification found.
    """

    run_id: str
    sealed: tuple[SealedRecord, ...]
    verification: VerificationReport


@dataclass(frozen=True, slots=True)
class Findings:
    """How the runs of a report were verified, and what was found in the store beside them.

    Attributes:
        store: The name of the store's file.
        key_ids: The ids of the secrets with which MACs were checked; empty if there was no secret.
        checkpoint: The checkpoint that the runs were compared with, in words; empty if there was none.
        unchecked: What could not be checked, one line each.
        problems: What is wrong with the store itself, such as a trigger that is missing.
    """

    store: str = ""
    key_ids: tuple[str, ...] = ()
    checkpoint: str = ""
    unchecked: tuple[str, ...] = ()
    problems: tuple[VerificationReport, ...] = ()

    def worst(self, runs: Iterable[ReportedRun]) -> str:
        """The verdict over the store and all runs of the report: ``tampered`` if one of them is."""
        verdicts = {verdict_of(each) for each in (*self.problems, *(run.verification for run in runs))}
        order = ("tampered", "cannot be verified", "intact, not finished")
        return next((verdict for verdict in order if verdict in verdicts), "intact")


def verdict_of(report: VerificationReport) -> str:
    """``intact``, ``intact, not finished``, ``tampered`` or ``cannot be verified``."""
    return _VERDICTS.get(report.code, "cannot be verified")


def key_ids_of(sealed: Iterable[SealedRecord]) -> tuple[str, ...]:
    """The ids of the secrets under which records were sealed, 8 hex digits each, in order."""
    return tuple(dict.fromkeys(row.mac[:_KEY_ID_DIGITS] for row in sealed if row.mac not in ("", VOUCHED_BY_NEXT)))
