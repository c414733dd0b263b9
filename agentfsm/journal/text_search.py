"""Finds a text, or what names an actor, wherever it occurs in a store: in records, signals, holds and tombstones."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from agentfsm.errors import AgentfsmError, JournalError
from agentfsm.journal.listing import find_listing
from agentfsm.journal.records import SealedRecord, open_record
from agentfsm.journal.run_info import RunInfo
from agentfsm.journal.signals import SealedSignal, open_signal, read_signals
from agentfsm.journal.store import Store, off_loop
from agentfsm.loop.canonical_json import encode
from agentfsm.loop.escapes import has_escapes, read_plain, text_forms
from agentfsm.loop.keys import Keyring
from agentfsm.loop.quorum import is_same_id
from agentfsm.loop.withholding import SecretOpener

MIN_TEXT_CHARS = 3
"""Shorter texts occur nearly everywhere."""
_EXCERPT_CHARS = 30


@dataclass(frozen=True, slots=True)
class RunFilter:
    """Which runs are searched; an empty field selects all.

    Attributes:
        run_id: The run.
        session_id: The conversation that they belong to.
        tag: A tag that they were started with.
    """

    run_id: str = ""
    session_id: str = ""
    tag: str = ""

    def selects(self, run_id: str, first: SealedRecord) -> bool:
        """Whether a run is selected.

        Args:
            run_id: The run.
            first: Its first record.
        """
        if self.run_id not in ("", run_id):
            return False
        if not self.session_id and not self.tag:
            return True
        body = open_record(first)
        tags: Any = body.get("tags", ())
        has_tag = not self.tag or (isinstance(tags, list) and self.tag in tags)
        return has_tag and self.session_id in ("", body.get("session", ""))

    def selects_listed(self, listed: RunInfo) -> bool:
        """Whether a run that has no record yet is selected.

        Args:
            listed: What it is listed by.
        """
        return (
            self.run_id in ("", listed.run_id)
            and self.session_id in ("", listed.session_id)
            and (not self.tag or self.tag in listed.tags)
        )


@dataclass(frozen=True, slots=True)
class Occurrence:
    """A place in which a text occurs.

    Attributes:
        run_id: The run.
        seq: The sequence number of the record; 0 for what is not in the records of a run.
        field: Where it is in the record, as ``redact`` takes it: ``out.replied.reply.message.content``.
        excerpt: The text with what is around it; empty for a run that cannot be read.
        reason: Why it cannot be deleted, or an empty string.
        place: The number of the hidden value that has it, or None.
        signal_id: The answer or cancellation that has it and that nothing has acted on yet, or an empty string.
    """

    run_id: str
    seq: int
    field: str
    excerpt: str
    reason: str = ""
    place: int | None = None
    signal_id: str = ""

    @property
    def is_deletable(self) -> bool:
        """Whether it can be deleted."""
        return self.place is not None or bool(self.signal_id)

    def __str__(self) -> str:
        where = f"{self.run_id}  {self.seq}.{self.field}" if self.seq else self.run_id
        return f"{where}  {self.excerpt}" + (f"  ({self.reason})" if self.reason else "")


async def find_text(
    store: Store, text: str, keyring: Keyring | None = None, runs: RunFilter | None = None
) -> list[Occurrence]:
    """Every place in the journals of a store in which a text occurs.

    It is found in any case, inside other texts, in keys and in numbers, escaped in JSON and URLs, in other normal forms
    of Unicode and with other white space, and in base16 and base64 (there only as it is given). With the keys of the
    host it is also found in values that are stored encrypted.

    Returns:
        The places in records, in what waits to be acted on, in holds, and in what is left of purged runs.

    Raises:
        JournalError: The text is too short, or a tombstone cannot be read.
        StoreError: The store cannot be read.
    """
    if len(text.strip()) < MIN_TEXT_CHARS:
        raise JournalError(f"{text!r} is too short to be deleted wherever it occurs: give {MIN_TEXT_CHARS} characters")
    text_search, found = _search_for(text), list[Occurrence]()
    wanted, selected = runs or RunFilter(), set[str]()
    signals: dict[str, list[SealedSignal]] = {}
    for sealed in await store.signals.pending():
        signals.setdefault(sealed.run_id, []).append(sealed)
    for head in await store.heads():
        try:
            records = await store.records(head.run_id)
            listed = None if records else await find_listing(store, head.run_id)
            if not (wanted.selects(head.run_id, records[0]) if records else listed and wanted.selects_listed(listed)):
                continue
            selected.add(head.run_id)
            if listed is not None:
                found += _search_texts(head.run_id, text_search, "listing", _texts_of(listed), _NOT_BEGUN)
            search = partial(_search_run, head.run_id, text_search=text_search, keyring=keyring)
            found += await off_loop(search, records)
            found += [
                match for each in signals.get(head.run_id, ()) for match in _search_signal(each, text_search, keyring)
            ]
        except AgentfsmError as error:
            found.append(Occurrence(head.run_id, 0, "", "", f"the run cannot be read: {error}"))
    for run_id, hold in (await store.maintenance.holds()).items():
        if run_id in selected:
            found += _search_texts(run_id, text_search, "hold", (hold.reason, hold.by), _HELD)
    if wanted.run_id or not (wanted.session_id or wanted.tag):  # of a purged run, nobody can say what it belonged to
        for each in await store.maintenance.tombstones():
            if wanted.run_id in ("", each.run_id):
                found += _search_texts(
                    each.run_id, text_search, "tombstone", (each.run_id, each.by, each.reason), _BURIED
                )
    return found


def _texts_of(listed: RunInfo) -> tuple[str, ...]:
    metadata = [text for entry in (listed.metadata or {}).items() for text in entry]
    return (listed.run_id, listed.prompt, listed.actor, listed.session_id, *listed.tags, *metadata)


def _search_texts(
    run_id: str, text_search: _TextSearch, field: str, texts: Iterable[str], reason: str
) -> Iterator[Occurrence]:
    """Where a text occurs in what a store has of a run besides its records, which has no hidden values."""
    if found := next(filter(None, (text_search.search(each) for each in texts)), None):
        yield Occurrence(run_id, 0, field, _excerpt(found), reason)


@dataclass(frozen=True, slots=True)
class _TextSearch:
    """A text that is looked for.

    Attributes:
        forms: Finds it in a form in which it may be written.
        alike: Finds it in a text in which what looks alike is the same (``_fold``).
        has_spaces: Whether white space in it may be of another kind.
    """

    forms: re.Pattern[str]
    alike: re.Pattern[str]
    has_spaces: bool

    def search(self, text: str) -> re.Match[str] | None:
        """Where a text has it: as written there, with more escapes than it needs, or as it looks."""
        found = self.forms.search(text)
        if found is None and has_escapes(text):
            text = read_plain(text).decode("utf-8", "replace")
            found = self.forms.search(text)
        if found is None and (self.has_spaces or not text.isascii()):
            found = self.alike.search(_fold(text))
        return found


def _search_for(text: str) -> _TextSearch:
    forms = sorted(text_forms(text), key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, forms)), re.IGNORECASE)
    folded = _fold(text)
    return _TextSearch(pattern, re.compile(re.escape(folded)), " " in folded)


def _fold(text: str) -> str:
    """A text in one case and one normal form of Unicode, without invisible characters, with single spaces."""
    if not text.isascii():
        visible = "".join(char for char in text if unicodedata.category(char) != "Cf")
        text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", visible).casefold())
    return " ".join(re.sub(r"\\[nrt]", " ", text).casefold().split())


def _search_run(
    run_id: str, records: Iterable[SealedRecord], *, text_search: _TextSearch, keyring: Keyring | None
) -> list[Occurrence]:
    opener, found = None if keyring is None else SecretOpener(keyring), list[Occurrence]()
    for record in records:
        try:
            found += _search_record(run_id, record, text_search, opener)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            found.append(Occurrence(run_id, record.seq, "", "", f"the record cannot be read: {error}"))
    return found


def _search_signal(sealed: SealedSignal, text_search: _TextSearch, keyring: Keyring | None) -> Iterator[Occurrence]:
    signal = None if keyring is None else open_signal(sealed, keyring)
    texts = [sealed.body]
    if signal is not None:
        texts += [
            signal.reason,
            *([] if signal.reply is None else [encode([signal.reply.text, signal.reply.arguments])]),
        ]
    found = next(filter(None, (text_search.search(each) for each in texts)), None)
    if found is not None:
        yield Occurrence(sealed.run_id, 0, "", f"a signal that waits: {_excerpt(found)}", signal_id=sealed.id)


def _search_record(
    run_id: str, record: SealedRecord, text_search: _TextSearch, opener: SecretOpener | None
) -> Iterator[Occurrence]:
    if not ("[sealed " in record.hidden or text_search.search(record.hidden) or text_search.search(record.body)):
        return
    body, hidden = json.loads(record.body), cast("list[Any]", json.loads(record.hidden or "[]"))
    for path, place in commitment_places(body):
        if hidden[place] is None:
            continue
        value = hidden[place][1]
        texts = [encode(value)] + ([] if opener is None else [encode(opener.open(value))])
        found = next(filter(None, (text_search.search(each) for each in texts)), None)
        if found is not None:
            yield Occurrence(run_id, record.seq, path, _excerpt(found), place=place)
    for path, text in _visible_texts(body):
        found = text_search.search(text)
        if found is not None:
            reason = _ACTOR_REASON if _ACTOR_ID.search(path) else _HASHED
            yield Occurrence(run_id, record.seq, path, _excerpt(found), reason)


async def find_actor(store: Store, actor_id: str, keyring: Keyring | None = None) -> list[Occurrence]:
    """Every place that names a person as an actor, however the id is spelt.

    Args:
        store: The store.
        actor_id: The person.
        keyring: The keys of the host, without which nobody knows who sent what waits to be acted on.

    Returns:
        Where records say that the person requested, answered, cancelled or redacted a run, and who sent what waits,
        and who held or purged runs. What users, models and tools wrote is not searched: see ``find_text``.

    Raises:
        JournalError: A tombstone cannot be read.
        StoreError: The store cannot be read.
    """
    found = list[Occurrence]()
    for head in await store.heads():
        try:
            search = partial(_search_actor, head.run_id, actor_id=actor_id)
            found += await off_loop(search, await store.records(head.run_id))
        except AgentfsmError as error:
            found.append(Occurrence(head.run_id, 0, "", "", f"the run cannot be read: {error}"))
    signals = [] if keyring is None else await read_signals(store.signals, keyring)
    beside = [(each.run_id, "signal", each.actor.id, _SENT) for each in signals if each.actor is not None]
    beside += [(run_id, "hold", hold.by, _HELD) for run_id, hold in (await store.maintenance.holds()).items()]
    beside += [(each.run_id, "tombstone", each.by, _BURIED) for each in await store.maintenance.tombstones()]
    found += [Occurrence(run_id, 0, field, by, why) for run_id, field, by, why in beside if is_same_id(by, actor_id)]
    return found


def _search_actor(run_id: str, records: Iterable[SealedRecord], *, actor_id: str) -> list[Occurrence]:
    text_search, found = _search_for(actor_id), list[Occurrence]()
    for record in records:
        body = json.loads(record.body)
        for path, text in _visible_texts(body):
            is_actor = _ACTOR_ID.search(path) is not None
            if (is_actor or _NAMED_AS.search(path)) and is_same_id(text, actor_id):
                found.append(Occurrence(run_id, record.seq, path, text, _ACTOR_REASON if is_actor else _HASHED))
        for path, place in commitment_places(body):
            if _CANCEL_REASON.search(path) is None:
                continue
            hidden = json.loads(record.hidden)[place]
            if hidden is not None and (match := text_search.search(encode(hidden[1]))) is not None:
                found.append(Occurrence(run_id, record.seq, path, _excerpt(match), place=place))
    return found


_HASHED = "it is part of the record itself, which is hashed: only purging the whole run deletes it"
_ACTOR_REASON = "votes are checked by the ids of actors, so it is hashed: only purging the whole run deletes it"
_NOT_BEGUN = "the run has not begun: only cancelling and purging it deletes it"
_HELD = "it stands in the hold of the run: hold the run again without it"
_BURIED = "it is part of what shows that the run was purged, which is sealed"
_SENT = (
    "it stands in an answer or a cancellation that waits, and will be part of the run: only purging the run deletes it"
)
_ACTOR_ID = re.compile(r"(?:\A|\.)(?:requester|actor|votes\.\d+)\.id\Z")
_NAMED_AS = re.compile(r"(?:\A|\.)by\Z")
_CANCEL_REASON = re.compile(r"(?:\A|\.)cancelled\.reason\Z")  # names who cancelled


def _excerpt(found: re.Match[str]) -> str:
    text, start, end = found.string, found.start(), found.end()
    around = text[max(0, start - _EXCERPT_CHARS) : end + _EXCERPT_CHARS]
    return " ".join("".join(char if char.isprintable() else " " for char in around).split())


def _visible_texts(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """The keys and values of a body that are not commitments, as text, with where they stand."""
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        if len(fields) == 1 and "#" in fields:
            return
        for name, item in fields.items():
            inner = f"{path}.{name}" if path else name
            yield inner, name
            yield from _visible_texts(item, inner)
    elif isinstance(value, list):
        for index, item in enumerate(cast("list[object]", value)):
            yield from _visible_texts(item, f"{path}.{index}" if path else str(index))
    else:
        yield path, value if isinstance(value, str) else encode(value)


_CHUNK_BYTES = 1 << 22


def files_with_text(files: Iterable[Path], text: str) -> list[Path]:
    """Those of some files that have a text, in any of the forms in which it is found in journals."""
    forms = sorted(text_forms(text), key=len, reverse=True)
    encoded = [form.encode("utf-8", "surrogatepass") for form in forms]
    pattern = re.compile(b"|".join(map(re.escape, encoded)), re.IGNORECASE)
    overlap = max(map(len, encoded)) - 1
    return [file for file in files if _file_has(file, pattern, overlap)]


def _file_has(file: Path, pattern: re.Pattern[bytes], overlap: int) -> bool:
    try:
        with file.open("rb") as opened:
            tail = b""
            while chunk := opened.read(_CHUNK_BYTES):
                if pattern.search(tail + chunk):
                    return True
                tail = (tail + chunk)[-overlap:] if overlap else b""
    except OSError:
        return False
    return False


def commitment_places(value: Any, path: str = "") -> Iterator[tuple[str, int]]:
    """Where the commitments in a body stand, with the places of their values."""
    if isinstance(value, list):
        for index, item in enumerate(cast("list[object]", value)):
            yield from commitment_places(item, f"{path}.{index}" if path else str(index))
    elif isinstance(value, dict):
        data = cast("dict[str, Any]", value)
        if len(data) == 1 and "#" in data:
            yield path, data["#"][0]
            return
        for name, item in data.items():
            yield from commitment_places(item, f"{path}.{name}" if path else name)
