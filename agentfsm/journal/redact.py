"""Redacts values from a journal for good; the hash chain stays valid, and a record says what was removed."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any, cast

from agentfsm.errors import JournalError, StoreError, UnknownRunError
from agentfsm.journal.hash_chain import record_hash
from agentfsm.journal.journal_writer import owner_name
from agentfsm.journal.records import SealedRecord
from agentfsm.journal.store import Store
from agentfsm.loop.canonical_json import encode

__all__ = ["redact"]


async def redact(store: Store, run_id: str, field: str, by: str = "") -> int:
    """Delete values that stand hidden beside a record, with their salts.

    Args:
        store: Where the run is.
        run_id: The run; it must not be being run.
        field: The record's number, and the field in it (``"4.out.replied.reply.message.content"``); the number
            alone, or a field that has others in it, stands for all that is hidden there.
        by: Who wants it so, for the record.

    Returns:
        How many values are gone.

    Raises:
        UnknownRunError: There is no such run or record.
        JournalError: Nothing is hidden there, or it is gone already.
        StaleLease: Somebody runs it.
        StoreError: The store cannot write.
    """
    rows = store.records(run_id)
    number, _, path = field.partition(".")
    if not number.isdecimal() or not 1 <= int(number) <= len(rows):
        raise UnknownRunError(f"run {run_id!r} has records 1 to {len(rows)}; {field!r} names none of them")
    of = int(number)
    row = rows[of - 1]
    kept: list[Any] = json.loads(row.hidden or "[]")
    places = [
        place for place in _commitment_places(_resolve_path(json.loads(row.body), path)) if kept[place] is not None
    ]
    if not places:
        raise JournalError(f"nothing is hidden in {field!r} of run {run_id!r}")
    head = store.head(run_id)
    lease = await store.acquire(run_id, owner_name())
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
        said = SealedRecord(lease.seq + 1, text, record_hash(lease.hash, text))
        status = "running" if head is None else head.status
        await store.append(lease, [said], status)
        if status != "running":  # with that, the run was given back
            lease = await store.acquire(run_id, owner_name())
        await store.redact(lease, of, _remove_hidden(row.hidden, places))
    finally:
        with contextlib.suppress(StoreError):  # whatever came of it, nobody holds the run
            await store.release(lease)
    return len(places)


def _resolve_path(value: Any, path: str) -> Any:
    found = value
    for name in path.split(".") if path else ():
        key: Any = int(name) if isinstance(found, list) and name.isdigit() else name
        try:
            found = cast("Any", found)[key]
        except (KeyError, IndexError, TypeError):
            raise JournalError(f"the record has no field {path!r}") from None
    return found


def _commitment_places(value: Any) -> list[int]:
    if isinstance(value, list):
        return [place for item in cast("list[object]", value) for place in _commitment_places(item)]
    if not isinstance(value, dict):
        return []
    found = cast("dict[str, Any]", value)
    if len(found) == 1 and "#" in found:
        return [found["#"][0]]
    return [place for item in found.values() for place in _commitment_places(item)]


def _remove_hidden(hidden: str, places: list[int]) -> str:
    """What stands beside a record, with some of it gone; the rest stays as it was, to the byte."""
    entries: list[str] = []
    place = 1
    decoder = json.JSONDecoder()
    while hidden[place] != "]":
        place += hidden[place] == ","
        _, end = decoder.raw_decode(hidden, place)
        entries.append("null" if len(entries) in places else hidden[place:end])
        place = end
    return f"[{','.join(entries)}]"
