"""Redacts values from a journal for good; the hash chain stays valid, and a record says what was removed."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any, cast

from agentfsm.errors import JournalError, StoreError, UnknownRunError
from agentfsm.journal.hash_chain import RecordSealer
from agentfsm.journal.journal_writer import owner_name
from agentfsm.journal.store import Store, consistent_read, off_loop
from agentfsm.journal.verification import require_authentic, verify
from agentfsm.loop.canonical_json import encode
from agentfsm.loop.keys import Keyring

__all__ = ["redact"]


async def redact(store: Store, run_id: str, field: str, keyring: Keyring, by: str = "") -> int:
    """Delete hidden values of a record, with their salts.

    Args:
        store: The store that has the run.
        run_id: The run; it must not be in progress.
        field: The record's sequence number, and a field in it (``"4.out.replied.reply.message.content"``); the number
            alone, or a field that contains others, selects every hidden value in it.
        keyring: The keys of the host: one of them sealed the run, and the current one seals the redaction.
        by: Who requested it, for the journal.

    Returns:
        How many values were deleted.

    Raises:
        UnknownRunError: There is no such run or record.
        JournalError: The field has no hidden value, or it was redacted already; or the journal was tampered with, or
            was not sealed under a secret of the host.
        StaleLease: Another owner holds the run.
        StoreError: The store cannot write.
    """
    records, head = await consistent_read(store, run_id)
    number, _, path = field.partition(".")
    if not number.isdecimal() or not 1 <= int(number) <= len(records):
        raise UnknownRunError(
            f"run {run_id!r} has records 1 to {len(records)}; {field!r} does not start with one of these numbers"
        )
    of = int(number)
    record = records[of - 1]
    values: list[Any] = json.loads(record.hidden or "[]")
    places = [
        place for place in _commitment_places(_resolve_path(json.loads(record.body), path)) if values[place] is not None
    ]
    if not places:
        raise JournalError(f"field {field!r} of run {run_id!r} has no hidden value")
    report = await off_loop(lambda rows: verify(run_id, rows, head, keyring=keyring), records)
    require_authentic(report, "redacted")
    lease = await store.acquire(run_id, owner_name(), keyring=keyring)
    try:
        body = {
            "kind": "redaction",
            "of": of,
            "places": places,
            "field": field,
            "seq": lease.seq + 1,
            "epoch": lease.epoch,
            "ts": int(time.time() * 1000),
        }
        if by:
            body["by"] = by
        text = encode(body)
        redaction = RecordSealer(keyring.current).seal(lease.seq + 1, text, lease.hash)
        status = "running" if head is None else head.status
        await store.append(lease, [redaction], status)
        if status != "running":  # the append ended the lease
            lease = await store.acquire(run_id, owner_name(), keyring=keyring)
        await store.redact(lease, of, _remove_hidden(record.hidden, places))
    finally:
        with contextlib.suppress(StoreError):  # the lease is released whether or not the writes succeeded
            await store.release(lease)
    return len(places)


def _resolve_path(value: Any, path: str) -> Any:
    selected = value
    for name in path.split(".") if path else ():
        key: Any = int(name) if isinstance(selected, list) and name.isdigit() else name
        try:
            selected = cast("Any", selected)[key]
        except (KeyError, IndexError, TypeError):
            raise JournalError(f"the record has no field {path!r}") from None
    return selected


def _commitment_places(value: Any) -> list[int]:
    if isinstance(value, list):
        return [place for item in cast("list[object]", value) for place in _commitment_places(item)]
    if not isinstance(value, dict):
        return []
    data = cast("dict[str, Any]", value)
    if len(data) == 1 and "#" in data:
        return [data["#"][0]]
    return [place for item in data.values() for place in _commitment_places(item)]


def _remove_hidden(hidden: str, places: list[int]) -> str:
    """The hidden values of a record, some replaced by null; the others stay as they were, byte for byte."""
    entries: list[str] = []
    place = 1
    decoder = json.JSONDecoder()
    while hidden[place] != "]":
        place += hidden[place] == ","
        _, end = decoder.raw_decode(hidden, place)
        entries.append("null" if len(entries) in places else hidden[place:end])
        place = end
    return f"[{','.join(entries)}]"
