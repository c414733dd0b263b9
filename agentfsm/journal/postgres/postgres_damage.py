"""Finds a changed schema, and records without their run, in a PostgreSQL store.

Whoever owns the database can drop a trigger, put a view in place of a table, or hide rows behind a rule or a policy.
"""

from __future__ import annotations

from agentfsm.journal.commit_encoding import run_id_in
from agentfsm.journal.maintenance import Damage
from agentfsm.journal.postgres.postgres_rows import SELECT_ROWS, rows_of
from agentfsm.journal.postgres.postgres_schema import TABLES, TRIGGERS
from agentfsm.journal.postgres.postgres_session import Connection

__all__ = ["find_row_damage", "find_schema_damage"]

_RELATIONS = """
    SELECT relname, relkind::text, relrowsecurity FROM pg_class
    WHERE relnamespace = 'agentfsm'::regnamespace AND relname = ANY(%s)
"""
_TRIGGERS = """
    SELECT relname, tgname, tgenabled::text, pg_get_triggerdef(pg_trigger.oid), prosrc
    FROM pg_trigger JOIN pg_class ON pg_class.oid = tgrelid JOIN pg_proc ON pg_proc.oid = tgfoid
    WHERE relnamespace = 'agentfsm'::regnamespace AND NOT tgisinternal
"""
_RULES = "SELECT tablename, rulename FROM pg_rules WHERE schemaname = 'agentfsm'"

_ORPHANS = """
    SELECT run, max(seq) FROM agentfsm.journal AS journal
    WHERE NOT EXISTS (SELECT FROM agentfsm.run WHERE run.id = journal.run) GROUP BY run ORDER BY run
"""
_BEFORE_THE_FIRST = "SELECT run, count(*) FROM agentfsm.journal WHERE seq < 1 GROUP BY run ORDER BY run"

_NOT_FOUND = """
    SELECT info.id FROM agentfsm.run_info AS info LEFT JOIN agentfsm.run_prompt ON run_prompt.id = info.id
    WHERE info.prompt <> coalesce(run_prompt.prompt, '') ORDER BY info.id
"""


async def find_schema_damage(db: Connection) -> list[Damage]:
    """One entry if tables or triggers are not those of a store, or are gone, or none.

    Args:
        db: A connection to a database that has the schema.
    """
    changed = [*await _changed_tables(db), *await _changed_triggers(db)]
    if not changed:
        return []
    reason = f"its schema differs from the one that agentfsm created: {', '.join(changed)}"
    return [Damage("(schema)", reason)]


async def _changed_tables(db: Connection) -> list[str]:
    rows = await (await db.execute(_RELATIONS, (list(TABLES),))).fetchall()
    found = {name: (kind, hides_rows) for name, kind, hides_rows in rows}
    rules = await (await db.execute(_RULES)).fetchall()
    return sorted(
        [
            *(f"table {name}" for name in TABLES if found.get(name) != ("r", False)),
            *(f"rule {rule} on {table}" for table, rule in rules),
        ]
    )


async def _changed_triggers(db: Connection) -> list[str]:
    rows = await (await db.execute(_TRIGGERS)).fetchall()
    expected = dict(TRIGGERS)
    changed: list[str] = []
    for table, name, enabled, definition, source in rows:
        wanted = expected.pop(str(name), None)
        if wanted is None or enabled != "O" or not _is_as_created(wanted, definition, source):
            changed.append(f"trigger {name} on {table}")
    return sorted([*changed, *(f"trigger {name}" for name in expected)])


def _is_as_created(wanted: tuple[str, str], definition: str, source: str) -> bool:
    return definition == wanted[0] and " ".join(source.split()) == wanted[1]


async def find_row_damage(db: Connection) -> list[Damage]:
    """An entry for each run whose row was deleted, with a record before its first, or not found by its prompt.

    A number between two runs that no run has means nothing here: the server skips numbers.

    Args:
        db: A connection to a database that has the schema.
    """
    damage: list[Damage] = []
    for number, count in await (await db.execute(_ORPHANS)).fetchall():
        first = await (await db.execute(f"{SELECT_ROWS} LIMIT 1", (number, 0))).fetchall()
        reason = "the store has its records, and the run is missing"
        damage.append(Damage(run_id_in(rows_of(first)) or f"(run {number})", reason, count))
    for number, count in await (await db.execute(_BEFORE_THE_FIRST)).fetchall():
        reason = "it has a record before its first"
        damage.append(Damage(f"(run {number})", reason, count))
    for (number,) in await (await db.execute(_NOT_FOUND)).fetchall():
        damage.append(Damage(f"(run {number})", "it is not found by the prompt that it is listed by"))
    return damage
