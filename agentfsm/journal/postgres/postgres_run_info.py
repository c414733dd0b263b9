"""The columns of a PostgreSQL store by which runs are listed and searched."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, LiteralString, NamedTuple

from agentfsm.journal.postgres.postgres_session import Connection
from agentfsm.journal.run_info import LISTED_COLUMNS, RunInfo, RunQuery, fold_case, from_columns, to_columns

_UPDATE_PROMPT: LiteralString = """
    INSERT INTO agentfsm.run_prompt (id, prompt) SELECT id, prompt FROM listed
    WHERE NOT EXISTS (SELECT FROM agentfsm.run_prompt AS old WHERE (old.id, old.prompt) = (listed.id, listed.prompt))
    ON CONFLICT (id) DO UPDATE SET prompt = EXCLUDED.prompt
"""
_WITH_PROMPT: LiteralString = (
    "WITH listed (id, prompt) AS (VALUES (%s::bigint, %s::text)), searched AS (" + _UPDATE_PROMPT + ")"
)
_REBUILD_PROMPTS: LiteralString = (
    "WITH listed AS (SELECT id, prompt FROM agentfsm.run_info), mended AS (" + _UPDATE_PROMPT + " RETURNING id)"  # noqa: S608
    " SELECT run_id FROM agentfsm.run WHERE id IN (SELECT id FROM mended) ORDER BY id"
)

WRITE_LISTED: LiteralString = (
    """
    listed AS (
        SELECT info.* FROM unnest(%(listed)s::text[]) AS given,
            jsonb_populate_record(NULL::agentfsm.run_info, given::jsonb) AS info JOIN fence USING (id)
    ), searched AS ("""  # noqa: S608  # our own names
    + _UPDATE_PROMPT
    + """), shown AS (
        INSERT INTO agentfsm.run_info SELECT * FROM listed
        ON CONFLICT (id) DO UPDATE SET (started, updated, ending, prompt, actor, session, tags, model, cost_usd, tokens,
            waiting_kind, waiting_tool, waiting_roles, expires, parent, metadata) = (EXCLUDED.started, EXCLUDED.updated,
            EXCLUDED.ending, EXCLUDED.prompt, EXCLUDED.actor, EXCLUDED.session, EXCLUDED.tags, EXCLUDED.model,
            EXCLUDED.cost_usd, EXCLUDED.tokens, EXCLUDED.waiting_kind, EXCLUDED.waiting_tool, EXCLUDED.waiting_roles,
            EXCLUDED.expires, EXCLUDED.parent, EXCLUDED.metadata)
    )"""
)
"""Parts of a statement that write what runs are listed by, as ``listed_row`` has it, of those that are in ``fence``."""

_UPDATE_TEXTS: LiteralString = (
    _WITH_PROMPT  # noqa: S608  # our own names
    + """
    UPDATE agentfsm.run_info SET prompt = %s, actor = %s, session = %s, tags = %s::text[], metadata = %s::jsonb
    WHERE id = %s
    """
)

_FROM: LiteralString = " FROM agentfsm.run AS run LEFT JOIN agentfsm.run_info AS info ON info.id = run.id"

_SELECT: LiteralString = (
    """
    SELECT run.id, run.run_id, run.status, run.owner, run.owner_key, run.owner_key IN (SELECT key FROM agentfsm.alive),
        info.started, info.updated, coalesce(info.ending, ''), coalesce(info.prompt, ''), coalesce(info.actor, ''),
        coalesce(info.session, ''), coalesce(info.tags, '{}'), coalesce(info.model, ''), info.cost_usd, info.tokens,
        coalesce(info.waiting_kind, ''), coalesce(info.waiting_tool, ''), coalesce(info.waiting_roles, '{}'),
        info.expires, coalesce(info.parent, ''), info.metadata
    """  # noqa: S608  # our own names
    + _FROM
)

_TEXTS: dict[str, LiteralString] = {
    "ending": "info.ending",
    "actor": "info.actor",
    "session_id": "info.session",
    "model": "info.model",
    "parent": "info.parent",
}


class ListedRun(NamedTuple):
    """A run that a query found.

    Attributes:
        number: Its number.
        info: The run; its owner is that of its row, whether or not that process lives.
        owner_key: The process that owns it, or None.
        is_alive: Whether that process lives.
    """

    number: int
    info: RunInfo
    owner_key: int | None
    is_alive: bool


def listed_row(number: int, info: RunInfo) -> str:
    """What a run is listed by, as the JSON of its row."""
    row = {"id": number, **to_columns(info)}
    del row["status"]  # which the run itself has
    return json.dumps(row, ensure_ascii=False)


async def update_texts(db: Connection, number: int, info: RunInfo) -> None:
    """Replace the prompt, the actor, the session, the tags and the metadata by which a run is listed."""
    texts = (info.prompt, info.actor, info.session_id)
    values = (number, info.prompt, *texts, list(info.tags), _jsonb(info.metadata or {}), number)
    await db.execute(_UPDATE_TEXTS, values)


async def rebuild_prompts(db: Connection) -> list[str]:
    """Have runs found by the prompts that they are listed by; returns the ids of those that were not."""
    return [run_id for (run_id,) in await (await db.execute(_REBUILD_PROMPTS)).fetchall()]


async def select_run_infos(db: Connection, query: RunQuery) -> list[ListedRun]:
    """The runs that a query finds: one more than its page has, if there are as many."""
    where, values = await _indexed_conditions(db, query)
    after, rows = int(query.after) if query.after else _ANY_NUMBER, query.limit + 1
    entries, wanted = _entry_conditions(query, _BEFORE)
    if entries == _BEFORE:
        found = await db.execute(_SELECT + _and(where, "run.id < %s") + _NEWEST_FIRST, (*values, after, rows))
        return list(map(_listed_run, await found.fetchall()))
    looked_up = None if where else rows  # more only where not each of them is on the page
    listed: list[tuple[Any, ...]] = []
    searched: tuple[tuple[LiteralString, tuple[int, ...]], ...] = ((_NEWEST, (after, WINDOW)), (_ALL, ()))
    for source, bounds in searched:
        numbers: LiteralString = "SELECT id FROM " + source + " AS info" + entries + _SORTED  # noqa: S608  # our own names
        having = _and(where, "run.id = ANY(ARRAY(" + numbers + "))")
        given = (*values, *bounds, after, *wanted, looked_up, rows)
        listed = await (await db.execute(_SELECT + having + _NEWEST_FIRST, given)).fetchall()
        if len(listed) == rows:
            break
    return list(map(_listed_run, listed))


_HAS_TEXT: LiteralString = """strpos(lower(info.prompt COLLATE "C"), %s) > 0"""
"""The server expects this of a third of the runs, and so reads the newest first; of LIKE it would expect it of few."""

WINDOW = 500
"""Among how many runs, from the newest on, a text, a tag or metadata is looked for before its index is asked.

The server keeps no statistics of them (they would outlive what is redacted), so it cannot know whether a tag is that of
two runs, which only the index finds quickly, or of all, of which the newest are quickly found without it.
"""

FREQUENT = 0.02
"""The share of the newest runs from which on a text is looked for without its index."""

_NEWEST: LiteralString = "(SELECT * FROM agentfsm.run_info WHERE id < %s ORDER BY id DESC LIMIT %s)"
_ALL: LiteralString = "agentfsm.run_info"
_BEFORE: LiteralString = " WHERE info.id < %s"
_ANY_NUMBER = 2**63 - 1
_NEWEST_FIRST: LiteralString = " ORDER BY run.id DESC LIMIT %s"
_SORTED: LiteralString = " ORDER BY id + 0 DESC LIMIT %s"
"""An expression, so that the index of tags or metadata is asked, and not all runs are read in this order."""


def _listed_run(row: tuple[Any, ...]) -> ListedRun:
    number, run_id, status, owner, owner_key, is_alive, *values = row
    info = from_columns(run_id, owner, dict(zip(LISTED_COLUMNS, (status, *values), strict=True)))
    return ListedRun(number, info, owner_key, bool(is_alive))


async def count_run_infos(db: Connection, query: RunQuery) -> int:
    """How many runs a query finds on all its pages."""
    where, values = await _indexed_conditions(db, query)
    entries, wanted = _entry_conditions(query, where)
    row = await (await db.execute("SELECT count(*)" + _FROM + entries, (*values, *wanted))).fetchone()
    return 0 if row is None else int(row[0])


_COUNT_NEWEST: LiteralString = (
    "SELECT count(*), count(*) FILTER (WHERE " + _HAS_TEXT + ") FROM " + _NEWEST + " AS info"  # noqa: S608  # our own names
)
_PARTS: LiteralString = "ARRAY(SELECT hashtext(part) FROM unnest(%s::text[]) AS part)"
_MAY_HAVE_TEXT: LiteralString = (
    "run.id = ANY(ARRAY(SELECT id FROM agentfsm.run_prompt WHERE agentfsm.text_parts(prompt) @> " + _PARTS + "))"  # noqa: S608
)


async def _indexed_conditions(db: Connection, query: RunQuery) -> tuple[LiteralString, list[Any]]:
    """The conditions on a run, with the index of prompts if a text is rare; a frequent one is soon found without."""
    where, values = _conditions(query)
    if not query.text:
        return where, values
    text = fold_case(query.text)
    newest = await (await db.execute(_COUNT_NEWEST, (text, _ANY_NUMBER, WINDOW))).fetchone()
    if newest is None or newest[0] < WINDOW or newest[1] > FREQUENT * WINDOW:
        return where, values
    size = min(len(text), 3)
    parts = {text[first : first + size] for first in range(len(text) - size + 1)}
    return _and(where, _MAY_HAVE_TEXT), [*values, sorted(parts)]


def _and(where: LiteralString, part: LiteralString) -> LiteralString:
    return where + (" AND " if where else " WHERE ") + part


def _conditions(query: RunQuery) -> tuple[LiteralString, list[Any]]:
    where: LiteralString = ""
    values: list[Any] = []
    if query.status is not None:
        where, values = _and(where, "run.status = %s"), [*values, query.status]
    for name, column in _TEXTS.items():
        wanted: str | None = getattr(query, name)
        if wanted:
            where, values = _and(where, column + " = %s AND " + column + " <> ''"), [*values, wanted]
        elif wanted is not None:
            where = _and(where, "coalesce(" + column + ", '') = ''")
    if query.since is not None:
        where, values = _and(where, "info.started >= %s"), [*values, query.since * 1000]
    if query.until is not None:
        where, values = _and(where, "info.started < %s"), [*values, query.until * 1000]
    if query.text is not None:
        where, values = _and(where, _HAS_TEXT), [*values, fold_case(query.text)]
    if query.waiting_role is not None:
        suspended: LiteralString = "run.status = 'suspended' AND info.waiting_kind <> ''"  # which has an index
        where = _and(where, suspended + " AND info.waiting_roles @> ARRAY[%s]::text[]")
        values = [*values, query.waiting_role]
    if query.run_id is not None:
        where, values = _and(where, "starts_with(run.run_id, %s)"), [*values, query.run_id]
    if query.exact_id is not None:
        where, values = _and(where, "run.run_id = %s"), [*values, query.exact_id]
    return where, values


def _entry_conditions(query: RunQuery, where: LiteralString = "") -> tuple[LiteralString, list[Any]]:
    """The conditions on tags and metadata, after others, and their own values."""
    values: list[Any] = []
    if query.tag is not None:
        where, values = _and(where, "info.tags @> ARRAY[%s]::text[]"), [*values, query.tag]
    if query.any_tag is not None:
        where, values = _and(where, "info.tags && %s::text[]"), [*values, list(query.any_tag)]
    if query.metadata:
        where, values = _and(where, "info.metadata @> %s::jsonb"), [*values, _jsonb(query.entries)]
    return where, values


def _jsonb(metadata: Mapping[str, str]) -> str:
    return json.dumps(dict(metadata), ensure_ascii=False)
