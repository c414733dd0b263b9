"""The columns of a SQLite store by which runs are listed and searched."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from agentfsm.journal.run_info import LISTED_COLUMNS, RunInfo, RunQuery, fold_case, from_columns, to_columns
from agentfsm.journal.sqlite.sqlite_schema import LISTED, METADATA, PROMPT_FILTERS

_UPDATE = f"UPDATE run_info SET {', '.join(f'{name} = ?' for name in LISTED_COLUMNS)} WHERE id = ?"  # noqa: S608  # our own names
_COLUMNS = ", ".join(f"info.{name}" for name in LISTED_COLUMNS)


def write_run_info(db: sqlite3.Connection, number: int, info: RunInfo) -> None:
    """Write what a run is listed by."""
    tags, metadata = _write_index(db, number, info.prompt, info.tags, info.metadata)
    columns = to_columns(info)
    roles = json.dumps(columns["waiting_roles"]) if columns["waiting_roles"] else ""
    columns |= {"tags": tags, "metadata": metadata, "waiting_roles": roles}
    db.execute(_UPDATE, (*columns.values(), number))


def _write_index(
    db: sqlite3.Connection, number: int, prompt: str, tags: Sequence[str], metadata: Mapping[str, str] | None
) -> tuple[str, str | None]:
    """The tags and the metadata of a run as text, after what changed of them and of its prompt was indexed."""
    text, entries = json.dumps(tags) if tags else "", None if metadata is None else json.dumps(metadata)
    old_prompt, old_text, old_entries = db.execute(
        "SELECT prompt, tags, metadata FROM run_info WHERE id = ?", (number,)
    ).fetchone()
    if old_prompt != prompt:
        _filter_prompt(db, number, old_prompt, prompt)
    if old_text != text:
        db.executemany("DELETE FROM run_tag WHERE tag = ? AND id = ?", [(tag, number) for tag in _loaded(old_text)])
        _insert_index(db, number, tags, {})
    if old_entries != entries:
        gone = [(*entry, number) for entry in _loaded(old_entries).items()]
        db.executemany("DELETE FROM run_metadata WHERE name = ? AND value = ? AND id = ?", gone)
        _insert_index(db, number, (), metadata or {})
    return text, entries


def delete_run_info(db: sqlite3.Connection, number: int) -> None:
    """Delete what a run is listed by, its tags and its metadata included."""
    if db.execute("SELECT 1 FROM run_info WHERE id = ?", (number,)).fetchone() is not None:
        _write_index(db, number, "", (), None)
        db.execute("DELETE FROM run_info WHERE id = ?", (number,))


def update_texts(db: sqlite3.Connection, number: int, info: RunInfo) -> None:
    """Replace the prompt, the actor, the session, the tags and the metadata by which a run is listed."""
    texts = (info.prompt, info.actor, info.session_id, *_write_index(db, number, info.prompt, info.tags, info.metadata))
    db.execute(
        "UPDATE run_info SET prompt = ?, actor = ?, session = ?, tags = ?, metadata = ? WHERE id = ?", (*texts, number)
    )


def find_index_damage(db: sqlite3.Connection, version: int = METADATA) -> list[int]:
    """The numbers of the runs that are found by other tags or metadata than they are listed by, in order."""
    found: set[tuple[Any, ...]] = set()
    if version >= LISTED:
        listed = db.execute("SELECT id, tags FROM run_info WHERE tags <> ''")
        found |= {(number, tag) for number, text in listed for tag in _loaded(text)}
        found ^= set(db.execute("SELECT id, tag FROM run_tag"))
    if version >= METADATA:
        listed = db.execute("SELECT id, metadata FROM run_info WHERE metadata IS NOT NULL")
        entries = {(number, *entry) for number, text in listed for entry in _loaded(text).items()}
        found |= entries ^ set(db.execute("SELECT id, name, value FROM run_metadata"))
    return sorted({number for number, *_ in found})


def rebuild_index(db: sqlite3.Connection) -> list[str]:
    """Rewrite the index of tags and metadata of each run that is found by others than it is listed by.

    Returns:
        The ids of these runs.
    """
    found: list[str] = []
    for number in find_index_damage(db):
        db.execute("DELETE FROM run_tag WHERE id = ?", (number,))
        db.execute("DELETE FROM run_metadata WHERE id = ?", (number,))
        for tags, metadata in db.execute("SELECT tags, metadata FROM run_info WHERE id = ?", (number,)).fetchall():
            _insert_index(db, number, _loaded(tags), _loaded(metadata))
        found += [run_id for (run_id,) in db.execute("SELECT run_id FROM run WHERE id = ?", (number,))]
    return found


def _insert_index(db: sqlite3.Connection, number: int, tags: Iterable[str], metadata: Mapping[str, str]) -> None:
    """Have a run found by tags and metadata; somebody may have changed the listing, and not the index."""
    db.executemany("INSERT OR IGNORE INTO run_tag (tag, id) VALUES (?, ?)", [(tag, number) for tag in tags])
    entries = [(*entry, number) for entry in metadata.items()]
    db.executemany("INSERT OR IGNORE INTO run_metadata (name, value, id) VALUES (?, ?, ?)", entries)


def _loaded(text: Any) -> dict[str, str]:
    """Listed tags or metadata by name; nothing if the column was changed to what nobody can read."""
    try:
        loaded: Any = json.loads(text)
    except (TypeError, ValueError):
        return {}
    match loaded:
        case dict():
            return {name: str(value) for name, value in cast("dict[str, object]", loaded).items()}
        case list():
            return {str(tag): "" for tag in cast("list[object]", loaded)}
        case _:
            return {}


_ANY_NUMBER = 2**63 - 1
_BLOCK = 128
"""How many runs, by their numbers, share a Bloom filter of their prompts: 64 bytes of it for each."""

_FILTER_BITS = 65_519
"""A prime, so that the remainder of a number is as good as a hash. Filters of another length are not used."""

_FILTER_BYTES = _FILTER_BITS // 8 + 1
_HASHES = ((40_503, 5), (25_111, 3))
"""The factors of the hashes, and the longest parts that each is for: short ones are in most filters by chance."""


def _filter_prompt(db: sqlite3.Connection, number: int, old: str, prompt: str) -> None:
    """Have the filter of a run's block say that the prompt is there.

    A filter cannot forget, so that of a block in which a prompt was redacted or purged is deleted. A search reads the
    prompts of a block without a filter, until the file is compacted.
    """
    block = number // _BLOCK
    if old:
        db.execute("DELETE FROM prompt_filter WHERE block = ?", (block,))
        return
    row = db.execute("SELECT bits FROM prompt_filter WHERE block = ?", (block,)).fetchone()
    if row is not None or _prompts(db, block).fetchone() is None:
        _write_filter(db, block, bytes(_FILTER_BYTES) if row is None else row[0], [prompt])


def _write_filter(db: sqlite3.Connection, block: int, bits: bytes, prompts: Iterable[str]) -> None:
    """Write the filter of a block, with prompts added to those that it has."""
    changed = bytearray(bits)
    for bit in {bit for prompt in prompts for part in _hashed_parts(prompt) for bit in part}:
        changed[bit >> 3] |= 1 << (bit & 7)
    db.execute(
        "INSERT INTO prompt_filter (block, bits) VALUES (?, ?) ON CONFLICT (block) DO UPDATE SET bits = excluded.bits",
        (block, bytes(changed)),
    )


def _hashed_parts(text: str) -> list[list[int]]:
    """The bits in a filter of each character of a text, of each two in a row, and so on; in any ASCII case."""
    chars = [ord(char) % _FILTER_BITS for char in fold_case(text)]
    parts = [chars]
    for factor, longest in _HASHES:
        bits = chars
        for length in range(1, longest):
            longer = zip(bits, chars[length:], strict=False)
            bits = [(bit * factor + char) % _FILTER_BITS for bit, char in longer]
            parts.append(bits)
    return parts


def _has_all(bits: bytes, wanted: Iterable[int]) -> bool:
    return all(bits[bit >> 3] >> (bit & 7) & 1 for bit in wanted)


def _prompts(db: sqlite3.Connection, block: int) -> sqlite3.Cursor:
    """The numbers and the prompts of the runs of a block that have one."""
    bounds = (block * _BLOCK, (block + 1) * _BLOCK - 1)
    listed = "SELECT id, prompt FROM run_info WHERE id BETWEEN ? AND ? AND prompt <> '' AND typeof(prompt) = 'text'"
    return db.execute(listed, bounds)


_SELECT_FILTERS = (
    f"SELECT block, bits FROM prompt_filter WHERE block <= ? AND length(bits) = {_FILTER_BYTES} ORDER BY block DESC"  # noqa: S608
)


def find_filter_damage(db: sqlite3.Connection) -> list[int]:
    """The numbers of the runs that are not found by the prompt that they are listed by, in order."""
    filters = db.execute(_SELECT_FILTERS, (_ANY_NUMBER,))
    return sorted(number for block, bits in filters for number in _missed(db, block, bits))


def _missed(db: sqlite3.Connection, block: int, bits: bytes) -> list[int]:
    """The runs of a block whose prompts its filter excludes."""
    prompts = _prompts(db, block)
    return [number for number, prompt in prompts if not all(_has_all(bits, part) for part in _hashed_parts(prompt))]


def rebuild_prompt_filter(db: sqlite3.Connection, block: int) -> list[str]:
    """Rewrite the filter of a block from its prompts, which takes about ten milliseconds.

    Returns:
        The ids of the runs that were not found by their prompts.
    """
    filters = db.execute(f"{_SELECT_FILTERS} LIMIT 1", (block,)).fetchall()
    missed = [number for each, bits in filters if each == block for number in _missed(db, block, bits)]
    _write_filter(db, block, bytes(_FILTER_BYTES), (prompt for _, prompt in _prompts(db, block)))
    return [run_id for number in missed for (run_id,) in db.execute("SELECT run_id FROM run WHERE id = ?", (number,))]


def unfiltered_blocks(db: sqlite3.Connection, *, every: bool = False) -> list[int]:
    """The blocks of runs without a filter of their prompts."""
    blocks = {number // _BLOCK for (number,) in db.execute("SELECT id FROM run_info")}
    filtered = () if every else db.execute(_SELECT_FILTERS, (_ANY_NUMBER,))
    return sorted(blocks.difference(block for block, _ in filtered))


def _ranges(db: sqlite3.Connection, query: RunQuery, version: int) -> Iterator[tuple[int, int]]:
    """The first and the last number of runs that a query may find, from the newest on, without what filters exclude."""
    last = int(query.after) - 1 if query.after else _ANY_NUMBER
    size = _BLOCK
    if query.text is not None and version >= PROMPT_FILTERS:
        wanted = [bit for part in reversed(_hashed_parts(query.text)) for bit in part]  # the longest exclude most
        for block, bits in db.execute(_SELECT_FILTERS, (last // _BLOCK,)):
            first = block * _BLOCK
            if not _has_all(bits, wanted):
                if first + _BLOCK <= last:
                    yield first + _BLOCK, last
                last = first - 1
            elif last - first >= size:  # what is found there may be enough
                yield first, last
                last, size = first - 1, 2 * size
    yield 0, last


def select_run_infos(db: sqlite3.Connection, query: RunQuery, version: int) -> list[tuple[int, RunInfo]]:
    """The runs that a query finds, with their numbers: one more than its page has, if there are as many.

    Args:
        db: The file.
        query: The query.
        version: The version of the file's schema: before 3, only ids and statuses are known, and before 6 no metadata.
    """
    if version < _oldest_version(query):
        return []
    where, values = _conditions(query)
    source, number = _source(query, version)
    where.append(f"{number} BETWEEN ? AND ?")
    sql = f"SELECT run.id, run.run_id, run.owner, {_COLUMNS} FROM {source}{_AND_RUN}{_where(where)}"  # noqa: S608
    newest = f"{sql} ORDER BY {number} DESC LIMIT ?"
    found: list[tuple[int, RunInfo]] = []
    for bounds in _ranges(db, query, version):
        rows = db.execute(newest, (*values, *bounds, query.limit + 1 - len(found)))
        found += [(row[0], _info(row[1:])) for row in rows]
        if len(found) > query.limit:
            break
    return found


def count_run_infos(db: sqlite3.Connection, query: RunQuery, version: int) -> int:
    """How many runs a query finds on all its pages; arguments as for ``select_run_infos``."""
    if version < _oldest_version(query):
        return 0
    where, values = _conditions(query)
    source, number = _source(query, version)
    if query.run_id is not None or query.exact_id is not None:
        source += _AND_RUN
    if query.text is None:
        return int(db.execute(f"SELECT count(*) FROM {source}{_where(where)}", values).fetchone()[0])  # noqa: S608
    sql = f"SELECT count(*) FROM {source}{_where([*where, f'{number} BETWEEN ? AND ?'])}"  # noqa: S608
    ranges = _ranges(db, replace(query, after=""), version)
    return sum(int(db.execute(sql, (*values, *bounds)).fetchone()[0]) for bounds in ranges)


_AND_RUN = " JOIN run ON run.id = info.id"
_UNLISTED = (
    "(SELECT id, status, '' AS ending, '' AS prompt, '' AS actor, '' AS session, '' AS tags, '' AS model, '' AS parent,"
    " '' AS waiting_kind, '' AS waiting_tool, '' AS waiting_roles, NULL AS started, NULL AS updated, NULL AS cost_usd,"
    " NULL AS tokens, NULL AS expires, NULL AS metadata FROM run)"
)
_WITHOUT_METADATA = "(SELECT *, NULL AS metadata FROM run_info)"


def _oldest_version(query: RunQuery) -> int:
    """The first version of the schema in which a query can find anything."""
    if query.metadata:
        return METADATA
    return 1 if query.tag is None and query.any_tag is None else LISTED


def _indexed(query: RunQuery) -> list[tuple[str, str, tuple[str, ...]]]:
    """The tables in which a query looks up runs, with the condition there and its values."""
    found: list[tuple[str, str, tuple[str, ...]]] = []
    found += [("run_metadata", "name = ? AND value = ?", entry) for entry in query.entries.items()]
    found += [] if query.tag is None else [("run_tag", "tag = ?", (query.tag,))]
    return found


def _source(query: RunQuery, version: int) -> tuple[str, str]:
    """The tables to search, and the column by which their rows are numbered: the first index finds them, in order.

    One run is found by its id, and not among all with its tag.
    """
    infos = f"{_UNLISTED if version < LISTED else _WITHOUT_METADATA if version < METADATA else 'run_info'} AS info"
    for table, *_ in _indexed(query) if query.exact_id is None else ():
        return f"{table} AS found CROSS JOIN {infos} ON info.id = found.id", "found.id"
    return infos, "info.id"


def _where(parts: Sequence[str]) -> str:
    return f" WHERE {' AND '.join(parts)}" if parts else ""


def _conditions(query: RunQuery) -> tuple[list[str], list[Any]]:
    """The conditions of a query, and their values. An empty value never uses the partial index on what is not empty."""
    parts: list[str] = []
    values: list[Any] = []

    def add(part: str, *given: Any) -> None:
        parts.append(part)
        values.extend(given)

    for place, (table, condition, given) in enumerate(_indexed(query)):
        other = f"EXISTS (SELECT 1 FROM {table} WHERE {condition} AND {table}.id = info.id)"  # noqa: S608
        add(condition if not place and query.exact_id is None else other, *given)
    exact = {
        "status": query.status,
        "ending": query.ending,
        "actor": query.actor,
        "session": query.session_id,
        "model": query.model,
        "parent": query.parent,
    }
    for name, wanted in exact.items():
        if wanted is not None:
            add(f"info.{name} = ?" + (f" AND info.{name} <> ''" if wanted and name != "status" else ""), wanted)
    if query.any_tag is not None:
        one_of = ", ".join("?" * len(query.any_tag))
        add(f"EXISTS (SELECT 1 FROM run_tag WHERE run_tag.tag IN ({one_of}) AND run_tag.id = info.id)", *query.any_tag)  # noqa: S608
    if query.since is not None:
        add("info.started >= ?", query.since * 1000)
    if query.until is not None:
        add("info.started < ?", query.until * 1000)
    if query.text is not None:
        add("info.prompt LIKE ? ESCAPE '\\'", f"%{_escaped(query.text)}%")
    if query.waiting_role is not None:
        add(
            "info.waiting_kind <> '' AND info.waiting_roles LIKE ? ESCAPE '\\'",
            f"%{_escaped(json.dumps(query.waiting_role))}%",
        )
    if query.run_id is not None:
        add("run.run_id >= ? AND run.run_id < ?", query.run_id, f"{query.run_id}\U0010ffff")  # finds it by its index
    if query.exact_id is not None:
        add("run.run_id = ?", query.exact_id)
    return parts, values


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")


def _info(row: tuple[Any, ...]) -> RunInfo:
    run_id, owner, *values = row
    columns = dict(zip(LISTED_COLUMNS, values, strict=True))
    columns |= {name: _texts(columns[name]) for name in ("tags", "waiting_roles")}
    if columns["metadata"] is not None:
        columns["metadata"] = _loaded(columns["metadata"])
    return from_columns(run_id, owner, columns)


def _texts(text: str) -> tuple[str, ...]:
    """Listed tags or roles; nothing if the column was changed to what nobody can read, which verification reports."""
    try:
        return tuple(map(str, json.loads(text))) if text else ()
    except (TypeError, ValueError):
        return ()
