"""Redacts values from journals permanently: one field, a text wherever it occurs, or what names an actor.

The hash chain stays valid, because it covers commitments and not the values, and a record says what was removed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from agentfsm.errors import AgentfsmError, JournalError, RunHeldError, UnknownRunError
from agentfsm.journal.hash_chain import RecordSealer
from agentfsm.journal.maintenance import why_held
from agentfsm.journal.records import SealedRecord
from agentfsm.journal.run_info import first_info
from agentfsm.journal.store import Head, Store, acquired, consistent_read
from agentfsm.journal.text_search import Occurrence, RunFilter, commitment_places, find_actor, find_text
from agentfsm.journal.verification import require_verified
from agentfsm.loop.keys import Keyring


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
        RunHeldError: The run is on hold.
        StoreError: The store cannot write.
    """
    records, head = await consistent_read(store, run_id)
    number, _, path = field.partition(".")
    if not number.isdecimal() or not 1 <= int(number) <= len(records):
        raise UnknownRunError(
            f"{field!r} does not begin with the number of a record of run {run_id!r} (1 to {len(records)}), as "
            f"'1.messages.0.content' does"
        )
    of = int(number)
    record = records[of - 1]
    values: list[Any] = json.loads(record.hidden or "[]")
    selected = _resolve_path(json.loads(record.body), path)
    places = [place for _, place in commitment_places(selected) if values[place] is not None]
    if not places:
        raise JournalError(f"field {field!r} of run {run_id!r} has no hidden value")
    await _delete(store, run_id, (records, head), {of: (field, places)}, keyring, by)
    return len(places)


async def _delete(
    store: Store,
    run_id: str,
    read: tuple[Sequence[SealedRecord], Head | None],
    targets: Mapping[int, tuple[str, list[int]]],
    keyring: Keyring,
    by: str,
) -> None:
    """Delete hidden values of one run, by record: what is selected in it, and the places of the values."""
    records, head = read
    if (why := why_held(run_id, (await store.maintenance.holds()).get(run_id), keyring)) is not None:
        raise RunHeldError(run_id, why)
    await require_verified(run_id, records, head, keyring, "redacted")
    async with AsyncExitStack() as leases:
        lease = await leases.enter_async_context(acquired(store, run_id, keyring))
        if lease.seq != len(records):
            raise JournalError(f"run {run_id!r} cannot be redacted: it has new records")
        requester = {"by": by} if by else {}
        redactions = [
            ({"kind": "redaction", "of": of, "places": places, "field": field, **requester}, "")
            for of, (field, places) in targets.items()
        ]
        written = RecordSealer(keyring.current).seal_next(lease, int(time.time() * 1000), redactions)
        status = "running" if head is None else head.status
        await store.append(lease, written, status)
        if status != "running":  # the append ended the lease
            lease = await leases.enter_async_context(acquired(store, run_id, keyring))
        for of, (_, places) in targets.items():
            hidden = _remove_hidden(records[of - 1].hidden, places)
            listed = first_info(run_id, records[0]._replace(hidden=hidden)) if of == 1 else None
            await store.redact(lease, of, hidden, listed)


@dataclass(frozen=True, slots=True)
class TextRedaction:
    """What was deleted, and what remains.

    Attributes:
        deleted: The occurrences whose values were deleted.
        remaining: Those that are still there, each with the reason.
    """

    deleted: tuple[Occurrence, ...]
    remaining: tuple[Occurrence, ...]


async def redact_text(
    store: Store,
    text: str,
    keyring: Keyring,
    *,
    runs: RunFilter | None = None,
    by: str = "",
) -> TextRedaction:
    """Delete every hidden value that contains a text; for how it is found see ``find_text``.

    A whole value is deleted: the message, the arguments or the result that has the text, and an answer or a
    cancellation that waits to be acted on, which has to be sent again without it. The runs verify afterwards. They
    cannot be resumed or replayed past these records.

    Args:
        store: The store.
        text: The text.
        keyring: The keys of the host: one of them sealed the runs, and the current one seals the redactions.
        runs: Which runs are searched; all by default.
        by: Who requested it, for the journals.

    Returns:
        What was deleted, and what remains and why: a run that is in progress or was tampered with, or a place outside
        of hidden values, such as a run's id.

    Raises:
        JournalError: The text is too short.
        StoreError: The store cannot be read.
    """
    found = partial(find_text, store, text, keyring, runs)
    would = await found()
    waiting = [each for each in would if each.signal_id]
    for each in waiting:
        await store.signals.remove(each.signal_id)
    done = await _redact_found(store, would, found, keyring, by)
    return replace(done, deleted=(*waiting, *done.deleted))


async def redact_actor(store: Store, actor_id: str, keyring: Keyring, *, by: str = "") -> TextRedaction:
    """Delete what can be deleted of what ``find_actor`` finds; for arguments and errors see ``redact_text``.

    The ids of those who requested a run, or answered it, remain: votes are checked by them.
    """
    found = partial(find_actor, store, actor_id, keyring)
    return await _redact_found(store, await found(), found, keyring, by)


async def _redact_found(
    store: Store,
    would: Sequence[Occurrence],
    find: Callable[[], Awaitable[list[Occurrence]]],
    keyring: Keyring,
    by: str,
) -> TextRedaction:
    """Delete the hidden values among what was found, and find again."""
    by_run: dict[str, list[Occurrence]] = {}
    for each in would:
        if each.place is not None:
            by_run.setdefault(each.run_id, []).append(each)
    deleted, failed = list[Occurrence](), dict[str, str]()
    for run_id, occurrences in by_run.items():
        try:
            read = await consistent_read(store, run_id)
            await _delete(store, run_id, read, _targets(occurrences), keyring, by)
        except AgentfsmError as error:
            failed[run_id] = str(error)
            continue
        deleted += occurrences
    later = "it was written in the meantime"
    remaining = (each if each.reason else replace(each, reason=failed.get(each.run_id, later)) for each in await find())
    return TextRedaction(tuple(deleted), tuple(remaining))


def _targets(occurrences: Iterable[Occurrence]) -> dict[int, tuple[str, list[int]]]:
    """By record: what is selected in it, and the places of its values."""
    targets: dict[int, tuple[str, list[int]]] = {}
    for each in occurrences:
        field, places = targets.get(each.seq, (f"{each.seq}.{each.field}", []))
        places = sorted({*places, cast("int", each.place)})
        targets[each.seq] = field if len(places) == 1 else str(each.seq), places
    return targets


def _resolve_path(value: Any, path: str) -> Any:
    selected = value
    for name in path.split(".") if path else ():
        key: Any = int(name) if isinstance(selected, list) and name.isdigit() else name
        try:
            selected = cast("Any", selected)[key]
        except (KeyError, IndexError, TypeError):
            raise JournalError(f"the record has no field {path!r}") from None
    return selected


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
