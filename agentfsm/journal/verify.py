"""Checks a run's journal: that nothing was changed, and that everything in it was allowed.

1. Numbers go up by one, and every hash fits its record and the one before.
2. What stands hidden fits its commitment; what is missing was redacted, and a record says so.
3. The run starts where its pinned graph starts, and every move is a row of that graph, taken because every
   row in front of it said no. A run that was taken over to another graph went on in the same state, or the
   one that the record names; where it says that the path was replayed, every row of it is one there too.
4. Epochs only rise, and only where somebody takes the run up; a run that has ended does nothing more.
5. Every effect was written down before its result; one that may run only once was begun twice only after a
   person had said that it did not run. An answer of a person is to the record that asked, and to no other.
6. The store's own note of the run says the same: its last record, how it stands, its epoch; and so does a
   checkpoint, where there is one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentfsm.journal.chain import BadError, Chain
from agentfsm.journal.course import CannotError, Course
from agentfsm.journal.records import Row
from agentfsm.journal.store import Head

__all__ = ["CANNOT", "GOOD", "OPEN", "TAMPERED", "Report", "verify"]

GOOD, TAMPERED, CANNOT, OPEN = 0, 1, 3, 4
"""Exit codes of ``agentfsm verify``; 2 is wrong usage."""


@dataclass(frozen=True)
class Report:
    """What was found out about one run's journal.

    Attributes:
        run_id: The run.
        code: ``GOOD``, ``TAMPERED``, ``CANNOT`` (it cannot be verified) or ``OPEN`` (good, not at its end).
        records: How many records were looked at.
        seq: The first bad record, or None.
        reason: What is wrong with it, or an empty string.
        open: What is not at its end yet, a line each.
    """

    run_id: str
    code: int
    records: int
    seq: int | None = None
    reason: str = ""
    open: tuple[str, ...] = ()


def verify(
    run_id: str, rows: Sequence[Row], head: Head | None = None, sealed: Mapping[int, str] | None = None
) -> Report:
    """Check a run's journal.

    Args:
        run_id: The run.
        rows: Its rows, in order.
        head: What the store notes of its last record, where there is a store.
        sealed: Hashes of records by number, from checkpoints that were found good.
    """
    chain, course = Chain(), Course(run_id)
    seq = 0
    try:
        for seq, row in enumerate(rows, 1):
            body = chain.row(row, seq)
            course.record(body, row.hash)
            if body["kind"] == "redaction":
                chain.redaction(body)
        seq = len(rows)
        chain.end(head, sealed or {}, rows)
        course.end(head)
    except BadError as bad:
        return Report(run_id, TAMPERED, len(rows), bad.seq or seq or None, str(bad))
    except CannotError as cannot:
        return Report(run_id, CANNOT, len(rows), seq, str(cannot))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        return Report(run_id, TAMPERED, len(rows), seq, f"it is no record: {type(error).__name__}: {error}")
    still = (
        *course.still_open(),
        *(f"hidden value {place} of record {of} is to be redacted, and is still there" for of, place in chain.left()),
    )
    return Report(run_id, OPEN if still else GOOD, len(rows), open=still)
