"""An insider changes the file of a run that waits for its second vote, and the host goes on with it.

He writes what he likes past the triggers, with hashes that fit, and has no secret. After each edit the host carries on
interrupted runs, and a manager who has voted votes again: nothing is paid. Then the second manager votes: what is paid,
if anything, is what was shown. ``tests/journal/test_insider_edits.py`` says which edits ``agentfsm verify`` finds.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from agentfsm import Actor, Agent, AgentfsmError, Allow, Approval, Host, SqliteStore, tool
from agentfsm.cli.app import app
from agentfsm.journal.hash_chain import GENESIS_HASH, record_hash
from agentfsm.testing import FakeClock, ScriptedModel, call
from tests.helpers.journal_rows import unpack_rows

SECRET = b"of the host, 32 bytes at the least"
ANN, BOB, CY = (Actor(name, ("manager",)) for name in ("ann", "bob", "cy"))


def host(path: Path, paid: list[int], work: Callable[[Agent], Any], *script: Any) -> None:
    """Let the host do something with the file, as a new process would; a refusal is an error of ours."""

    @tool(requires_approval=Approval(n=2, roles=("manager",), not_requester=True))
    def pay(amount: int) -> str:
        """Pay."""
        paid.append(amount)
        return "paid"

    async def main() -> None:
        with SqliteStore(path) as store:
            settings = Host(clock=FakeClock(), secret=SECRET, store=store)
            await work(Agent(ScriptedModel(script or ["Done."]), tools=[pay], host=settings))

    asyncio.run(main())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs "r" and "s", each of which has the vote of Bob."""
    path = tmp_path_factory.mktemp("made") / "runs.db"
    for run in ("r", "s"):
        host(path, [], lambda agent, run=run: agent.run("Pay.", run_id=run, actor=ANN), call("pay", amount=5))
        host(path, [], lambda agent, run=run: agent.resume(run, Allow(), by=BOB))
    unpack_rows(path)
    return path


Rows = list[tuple[str, Any, Any]]
"""The body, the hidden values and the MAC of each record."""


def rewrite(path: Path, change: Callable[[Rows], Rows], *statements: str) -> None:
    """Change the records of the run "r", with hashes that fit, and then the tables."""
    db = sqlite3.connect(path, isolation_level=None)
    for (name,) in db.execute("SELECT name FROM sqlite_schema WHERE type = 'trigger'").fetchall():
        db.execute(f"DROP TRIGGER {name}")
    query = "SELECT body, hidden, mac FROM journal WHERE key >> 32 = 1 ORDER BY key"
    old: Rows = [(body, hidden, mac) for body, hidden, mac in db.execute(query)]
    rows, head = change(old), GENESIS_HASH
    if rows != old:
        db.execute("DELETE FROM journal WHERE key >> 32 = 1")
        for seq, (given, hidden, mac) in enumerate(rows, 1):
            body = re.sub(r'"seq":\d+,"t', f'"seq":{seq},"t', given)
            head = record_hash(head, body)
            row = (1 << 32 | seq, body, bytes.fromhex(head), hidden, mac)
            db.execute("INSERT INTO journal (key, body, hash, hidden, mac) VALUES (?, ?, ?, ?, ?)", row)
        db.execute("UPDATE run SET seq = ?, hash = ? WHERE id = 1", (len(rows), bytes.fromhex(head)))
    for statement in statements:
        db.execute(statement)
    db.close()


def same(rows: Rows) -> Rows:
    return rows


def text(old: str, new: str) -> Callable[[Path], None]:
    def change(rows: Rows) -> Rows:
        changed = [(body.replace(old, new), hidden, mac) for body, hidden, mac in rows]
        assert changed != rows, old
        return changed

    return lambda path: rewrite(path, change)


def sql(*statements: str) -> Callable[[Path], None]:
    return lambda path: rewrite(path, same, *statements)


def records(change: Callable[[Rows], Rows], *statements: str) -> Callable[[Path], None]:
    return lambda path: rewrite(path, change, *statements)


def without(place: int) -> Callable[[Path], None]:
    return records(lambda rows: rows[:place] + rows[place + 1 :])


def twice(place: int) -> Callable[[Path], None]:
    return records(lambda rows: rows[: place + 1] + rows[place:])


def unsigned(place: int) -> Callable[[Path], None]:
    return records(lambda rows: [(b, h, None if n == place else m) for n, (b, h, m) in enumerate(rows)])


def cut(place: int) -> Callable[[Path], None]:
    return records(lambda rows: rows[:place], "UPDATE run SET status = 'running' WHERE id = 1")


ATTACKS: dict[str, Callable[[Path], None]] = {
    "one vote is enough": text('"n":2', '"n":1'),
    "another amount": records(lambda rows: [(b, h and h.replace('"amount":5', '"amount":500'), m) for b, h, m in rows]),
    "no values beside the records": records(lambda rows: [(b, None, m) for b, _, m in rows]),
    "another voter": text('"bob"', '"cy"'),
    "another requester": text('"ann"', '"eve"'),
    "other roles": text('"manager"', '"clerk"'),
    "the requester may approve": text('"not_requester":true', '"not_requester":false'),
    "another tool": text('"pay"', '"payout"'),
    "status finished": sql("UPDATE run SET status = 'finished' WHERE id = 1"),
    "status running": sql("UPDATE run SET status = 'running' WHERE id = 1"),
    "another owner": sql("UPDATE run SET owner = 'me' WHERE id = 1"),
    "an epoch of the future": sql("UPDATE run SET epoch = epoch + 1 WHERE id = 1"),
    "no MAC of the run": sql("UPDATE run SET mac = NULL WHERE id = 1"),
    "the MAC of another run": sql("UPDATE run SET mac = (SELECT mac FROM run WHERE id = 2) WHERE id = 1"),
    "two runs under each other's name": sql(
        "UPDATE run SET run_id = 'x' WHERE id = 1",
        "UPDATE run SET run_id = 'r' WHERE id = 2",
        "UPDATE run SET run_id = 's' WHERE id = 1",
    ),
    "the records of another run": sql(
        "DELETE FROM journal WHERE key >> 32 = 1",
        "INSERT INTO journal (key, body, hash, hidden, mac) SELECT (1 << 32) | (key & 4294967295), body, hash, hidden, "
        "mac FROM journal WHERE key >> 32 = 2",
    ),
    "no pinned approval": text('"approvals"', '"approvale"'),
    "no MAC at all": sql("UPDATE journal SET mac = NULL", "UPDATE run SET mac = NULL"),
    **{f"without record {n + 1}": without(n) for n in range(10)},
    **{f"record {n + 1} twice": twice(n) for n in range(10)},
    **{f"record {n + 1} without its MAC": unsigned(n) for n in range(10)},
    **{f"cut off after record {n}": cut(n) for n in range(1, 10)},
}


@pytest.mark.parametrize("name", ATTACKS)
def test_no_edit_of_the_file_is_acted_on(name: str, made: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(made, tmp_path / "runs.db"))
    ATTACKS[name](path)
    paid: list[int] = []

    async def carry_on(agent: Agent) -> None:
        for run in await agent.unfinished_runs():
            await run

    works: list[Callable[[Agent], Any]] = [
        carry_on,
        lambda agent: agent.resume("r", None),
        lambda agent: agent.resume("r", Allow(), by=BOB),
    ]
    for work in works:
        try:
            host(path, paid, work)
        except AgentfsmError:
            continue
    assert paid == []
    try:
        host(path, paid, lambda agent: agent.resume("r", Allow(), by=CY))
    except AgentfsmError:
        assert paid == []
    assert paid in ([], [5])


def test_an_untouched_run_pays_after_its_second_vote(made: Path, tmp_path: Path) -> None:
    """Without this, a host that refuses every file would stand every attack."""
    path, paid = Path(shutil.copy(made, tmp_path / "runs.db")), list[int]()
    host(path, paid, lambda agent: agent.resume("r", Allow(), by=CY))
    assert paid == [5]


def test_a_key_that_he_puts_beside_the_store_is_not_the_hosts(made: Path, tmp_path: Path) -> None:
    """He forges a whole run under a secret of his own, and leaves that where the command line looks for one."""
    path, his = Path(shutil.copy(made, tmp_path / "runs.db")), "a secret of the insider, 32 bytes and more"

    async def forge() -> None:
        with SqliteStore(path) as store:
            settings = Host(clock=FakeClock(), secret=his.encode(), store=store)
            await Agent(ScriptedModel(["Paid."]), host=settings).run("Pay.", run_id="forged", actor=ANN)

    asyncio.run(forge())
    key = path.with_name("runs.db.key")
    key.write_text(his)
    key.chmod(0o600)

    def command(*words: str, **environment: str) -> Result:
        given = {"AGENTFSM_SECRET": SECRET.decode(), **environment}
        return CliRunner().invoke(app, [*words, "--store", str(path)], env=given)

    verified = command("verify", "forged")
    assert (verified.exit_code, "another secret" in verified.stdout) == (3, True)
    assert command("verify", "r").exit_code == 4  # it waits
    assert command("verify", "forged", AGENTFSM_OLD_SECRETS=f"an-earlier-one {his.replace(' ', '-')}").exit_code == 3
    for mode in (0o660, 0o606, 0o640, 0o604):
        key.chmod(mode)
        refused = command("verify", "forged", AGENTFSM_SECRET="")
        assert (refused.exit_code, "is not yours alone to read and write" in refused.stderr) == (2, True)
    key.unlink()
    key.symlink_to("/etc/passwd")  # of root, and everybody knows what is in it
    for words in (("verify", "forged"), ("store", "hold", "r")):
        refused = command(*words, AGENTFSM_SECRET="")
        assert (refused.exit_code, "is not yours alone" in refused.stderr) == (2, True)


def test_the_attacks_are_counted(counted: Callable[[str], None]) -> None:
    assert len(ATTACKS) >= 40
    counted(f"an insider with the file: {len(ATTACKS)} attacks, 0 succeeded")
