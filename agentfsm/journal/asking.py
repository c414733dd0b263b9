"""What a stored run waits for, read from the record that asks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentfsm.errors import JournalError
from agentfsm.journal.canonical import decode
from agentfsm.journal.records import Missing, Row, open_row
from agentfsm.journal.store import Head, Store

__all__ = ["Asked", "asked", "works_for_another"]


@dataclass(frozen=True)
class Asked:
    """What a person is asked by a run.

    Attributes:
        run_id: The run.
        seq: The record that asks.
        digest: That record's hash, to which an answer can be bound.
        kind: ``question``, ``approval``, ``limit`` or ``in_doubt``.
        question: The question; an empty string where it was redacted.
        tool: The tool that it is about, or an empty string.
        arguments: The arguments of its call, as the journal has them.
        expires_at: Until when an answer is good, in seconds since the epoch.
    """

    run_id: str
    seq: int
    digest: str
    kind: str
    question: str
    tool: str
    arguments: Mapping[str, Any]
    expires_at: float

    def __str__(self) -> str:
        about = f"  {self.tool} {json.dumps(self.arguments, ensure_ascii=False, default=repr)}" if self.tool else ""
        return f"{self.kind}: {self.question}{about}"


def asked(store: Store, head: Head) -> Asked | None:
    """What a run of a store asks, or None where it does not wait for anybody.

    Raises:
        JournalError: A record cannot be read.
        agentfsm.errors.StoreError: The store cannot be read.
    """
    if head.status != "suspended":
        return None
    row = _asking(store.rows(head.run_id, head.seq - 1)) or _asking(store.rows(head.run_id))
    if row is None:
        return None
    body = open_row(row)
    try:
        waiting = body["waiting"]
        question, arguments = waiting.get("question", ""), waiting.get("arguments", {})
        return Asked(
            head.run_id,
            row.seq,
            row.hash,
            waiting["kind"],
            "" if isinstance(question, Missing) else question,
            waiting.get("tool", ""),
            {} if isinstance(arguments, Missing) else arguments,
            body["expires"] / 1000,
        )
    except (LookupError, TypeError, AttributeError) as error:
        raise JournalError(f"record {row.seq} does not say what it asks") from error


def _asking(rows: Sequence[Row]) -> Row | None:
    """The last row that asks; most often it is the last of all."""
    return next((row for row in reversed(rows) if '"kind":"run.suspended"' in row.body), None)


def works_for_another(store: Store, run_id: str) -> bool:
    """Whether a run is a sub-agent's; the run for which it works asks what it asks, and goes on with it.

    Raises:
        JournalError: Its first record cannot be read.
        agentfsm.errors.StoreError: The store does not have it, or cannot be read.
    """
    rows = store.rows(run_id)
    try:
        return bool(rows) and "call" in decode(rows[0].body).get("parent", ())
    except (ValueError, TypeError, AttributeError) as error:
        raise JournalError("record 1 cannot be read") from error
