"""The columns of a SQLite store by which runs are listed and searched."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from typing import Any

from agentfsm.journal.run_info import RunInfo, RunQuery, WaitingFor

__all__ = ["count_run_infos", "delete_run_info", "select_run_infos", "update_texts", "write_run_info"]

_FIELDS = (
    "status", "started", "updated", "ending", "prompt", "actor", "session", "tags", "model", "cost_usd", "tokens",
    "waiting_kind", "waiting_tool", "waiting_roles", "expires", "parent",
)  # fmt: skip
_UPDATE = f"UPDATE run_info SET {', '.join(f'{name} = ?' for name in _FIELDS)} WHERE id = ?"  # noqa: S608  # our own names
_COLUMNS = ", ".join(f"info.{name}" for name in _FIELDS)


def write_run_info(db: sqlite3.Connection, number: int, info: RunInfo) -> None:
    """Write what a run is listed by.

    Args:
        db: The file.
        number: The number of the run.
        info: What it is listed by.
    """
    waiting, tags = info.waiting_for or WaitingFor(""), _write_tags(db, number, info.tags)
    values = (
        info.status,
        _milliseconds(info.started),
        _milliseconds(info.updated),
        info.ending,
        info.prompt,
        info.actor,
        info.session,
        tags,
        info.model,
        info.cost_usd,
        info.tokens,
        waiting.kind,
        waiting.tool,
        json.dumps(waiting.roles) if waiting.roles else "",
        _milliseconds(info.expires),
        info.parent,
    )
    db.execute(_UPDATE, (*values, number))


def _write_tags(db: sqlite3.Connection, number: int, tags: Sequence[str]) -> str:
    """The tags of a run as text, after their index was written if they are not what they were."""
    text = json.dumps(tags) if tags else ""
    (before,) = db.execute("SELECT tags FROM run_info WHERE id = ?", (number,)).fetchone()
    if before != text:
        old = dict.fromkeys(json.loads(before or "[]"))
        db.executemany("DELETE FROM run_tag WHERE tag = ? AND id = ?", [(tag, number) for tag in old])
        db.executemany("INSERT INTO run_tag (tag, id) VALUES (?, ?)", [(tag, number) for tag in dict.fromkeys(tags)])
    return text


def delete_run_info(db: sqlite3.Connection, number: int) -> None:
    """Delete what a run is listed by, its tags included."""
    if db.execute("SELECT 1 FROM run_info WHERE id = ?", (number,)).fetchone() is not None:
        _write_tags(db, number, ())
        db.execute("DELETE FROM run_info WHERE id = ?", (number,))


def update_texts(db: sqlite3.Connection, number: int, info: RunInfo) -> None:
    """Replace the prompt, the actor, the session and the tags by which a run is listed."""
    tags = _write_tags(db, number, info.tags)
    texts = (info.prompt, info.actor, info.session, tags)
    db.execute("UPDATE run_info SET prompt = ?, actor = ?, session = ?, tags = ? WHERE id = ?", (*texts, number))


def select_run_infos(db: sqlite3.Connection, query: RunQuery, *, listed: bool) -> list[tuple[int, RunInfo]]:
    """The runs that a query finds, with their numbers: one more than its page has, if there are as many.

    Args:
        db: The file.
        query: The query.
        listed: Whether the file has the columns; without them only ids and statuses are known.
    """
    where, values = _conditions(query, paged=True, listed=listed)
    source, number = _source(query, listed)
    sql = f"SELECT run.id, run.run_id, run.owner, {_COLUMNS} FROM {source}{where} ORDER BY {number} DESC LIMIT ?"  # noqa: S608
    return [(row[0], _info(row[1:])) for row in db.execute(sql, (*values, query.limit + 1))]


def count_run_infos(db: sqlite3.Connection, query: RunQuery, *, listed: bool) -> int:
    """How many runs a query finds on all its pages; arguments as for ``select_run_infos``."""
    where, values = _conditions(query, paged=False, listed=listed)
    source, _ = _source(query, listed)
    if query.run_id is None:
        source = source.removesuffix(_AND_RUN)
    return int(db.execute(f"SELECT count(*) FROM {source}{where}", values).fetchone()[0])  # noqa: S608


_AND_RUN = " JOIN run ON run.id = info.id"
_UNLISTED = (
    "(SELECT id, status, '' AS ending, '' AS prompt, '' AS actor, '' AS session, '' AS tags, '' AS model, '' AS parent,"
    " '' AS waiting_kind, '' AS waiting_tool, '' AS waiting_roles, NULL AS started, NULL AS updated, NULL AS cost_usd,"
    " NULL AS tokens, NULL AS expires FROM run)"
)


def _source(query: RunQuery, listed: bool) -> tuple[str, str]:
    """The tables to search, and the column by which their rows are numbered; a tag is found by its index, in order."""
    infos = f"{'run_info' if listed else _UNLISTED} AS info"
    if query.tag is None:
        return infos + _AND_RUN, "info.id"
    tags = "run_tag" if listed else "(SELECT '' AS tag, 0 AS id WHERE false)"
    return f"{tags} AS tagged CROSS JOIN {infos} ON info.id = tagged.id{_AND_RUN}", "tagged.id"


def _conditions(query: RunQuery, *, paged: bool, listed: bool) -> tuple[str, list[Any]]:
    """The WHERE clause of a query, and its values. An empty value never uses the partial index on what is not empty."""
    parts: list[str] = []
    values: list[Any] = []

    def add(part: str, *given: Any) -> None:
        parts.append(part)
        values.extend(given)

    for name in ("status", "ending", "actor", "session", "model", "parent"):
        wanted = getattr(query, name)
        if wanted is not None:
            add(f"info.{name} = ?" + (f" AND info.{name} <> ''" if wanted and name != "status" else ""), wanted)
    if query.tag is not None:
        add("tagged.tag = ?", query.tag)
    if query.any_tag is not None and not (query.any_tag and listed):
        add("false")
    elif query.any_tag is not None:
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
    if paged and query.after:
        add(f"{'info' if query.tag is None else 'tagged'}.id < ?", int(query.after))
    return (f" WHERE {' AND '.join(parts)}" if parts else ""), values


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")


def _info(row: tuple[Any, ...]) -> RunInfo:
    run_id, owner, status, started, updated, ending, prompt, actor, session, tags, model, cost, tokens = row[:13]
    kind, tool, roles, expires, parent = row[13:]
    return RunInfo(
        run_id,
        status,
        owner,
        _seconds(started),
        _seconds(updated),
        ending,
        prompt,
        actor,
        session,
        tuple(json.loads(tags)) if tags else (),
        model,
        cost,
        tokens,
        WaitingFor(kind, tool, tuple(json.loads(roles)) if roles else ()) if kind else None,
        _seconds(expires),
        parent,
    )


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1000)


def _seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
