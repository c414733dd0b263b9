"""Checks a run where it is found, be it readable or not: in its store, or in an exported journal."""

from __future__ import annotations

import json
from collections.abc import Mapping

from agentfsm.errors import JournalError, StoreError, UnknownRunError
from agentfsm.journal.export import read_line
from agentfsm.journal.moment import as_it_stands
from agentfsm.journal.records import Row
from agentfsm.journal.store import Store
from agentfsm.journal.verify import CANNOT, TAMPERED, Report, verify

__all__ = ["Known", "check_export", "check_run"]

Known = Mapping[str, tuple[int, str]]
"""Number and hash of the last record of each run that a checkpoint knows."""


def check_run(store: Store, run_id: str, known: Known) -> Report:
    """Check one run of a store.

    Args:
        store: Where it is.
        run_id: The run.
        known: What a checkpoint knows; empty where there is none.

    Raises:
        UnknownRunError: There is no such run, and no checkpoint knows one.
    """
    try:
        if run_id in known and store.head(run_id) is None:
            return Report(run_id, TAMPERED, 0, None, "a checkpoint knows it, and the store does not")
        rows, head = as_it_stands(store, run_id)
    except UnknownRunError:
        raise
    except StoreError as error:
        return _unreadable(store, run_id, str(error))
    told = verify(run_id, rows, head, _sealed(known, run_id))
    if told.code == TAMPERED or not rows or '"kind":"run.forked"' not in rows[0].body:
        return told
    why = _forked(store, rows[0])
    return Report(run_id, TAMPERED, len(rows), 1, why) if why else told


def _forked(store: Store, first: Row) -> str:
    """What is wrong with where a run says that it is forked from, or an empty string."""
    try:
        parent = json.loads(first.body)["parent"]
        run_id, seq, seal = str(parent["run"]), int(parent["seq"]), parent["hash"]
        found = store.rows(run_id, seq - 1)
    except StoreError:  # it is kept elsewhere; or it cannot be read, which is said where it is checked itself
        return ""
    except (LookupError, TypeError, ValueError):
        return "it does not say what it is forked from"
    if found and found[0].hash == seal:
        return ""
    return f"it is forked from record {seq} of run {run_id}, and that is another one"


def _unreadable(store: Store, run_id: str, why: str) -> Report:
    """What is known of a run of which some record cannot be read: the last such record."""
    try:
        head = store.head(run_id)
        high = 0 if head is None else head.seq
        store.rows(run_id, high)
    except StoreError as error:
        return Report(run_id, CANNOT, 0, None, str(error))
    low, records = 0, high
    while low < high:
        middle = (low + high) // 2
        try:
            store.rows(run_id, middle)
        except StoreError:
            low = middle + 1
        else:
            high = middle
    if not low:
        return Report(run_id, CANNOT, records, None, why)  # by now it can be read
    return Report(run_id, TAMPERED, records, low, f"it cannot be read: {why}")


def check_export(text: str, known: Known | None) -> Report:
    """Check an exported journal.

    Args:
        text: The file's.
        known: What a checkpoint knows, or None where there is none.

    Raises:
        JournalError: It holds no journal.
    """
    lines = text.rstrip("\n").split("\n")
    rows: list[Row] = [read_line(1, lines[0])]
    try:
        run_id = str(json.loads(rows[0].body)["run"])
    except (LookupError, ValueError, TypeError):
        raise JournalError("line 1 does not say whose journal this is") from None
    for number, line in enumerate(lines[1:], 2):
        try:
            rows.append(read_line(number, line))
        except JournalError as error:
            so_far = verify(run_id, rows)
            return so_far if so_far.code == TAMPERED else Report(run_id, TAMPERED, len(lines), number, str(error))
    told = verify(run_id, rows, None, _sealed(known or {}, run_id))
    if known is not None and run_id not in known and told.code != TAMPERED:
        return Report(run_id, CANNOT, len(rows), None, "the checkpoint does not know this run")
    return told


def _sealed(known: Known, run_id: str) -> dict[int, str]:
    seq, seal = known.get(run_id, (0, ""))
    return {seq: seal} if seq else {}
