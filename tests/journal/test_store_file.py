"""A store's file: every way to it leads to one lock, nothing is acknowledged once it is gone, and forks are refused."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agentfsm import SqliteStore, StaleLease, StoreError, StoreLockedError, StoreMovedError
from agentfsm.testing.store_conformance import sealed_records

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="fork, and moving open files")

RECORDS = sealed_records(6)


def begin(store: SqliteStore, run_id: str = "run") -> None:
    asyncio.run(write(store, run_id, 2))


async def write(store: SqliteStore, run_id: str, count: int) -> None:
    lease = await store.acquire(run_id, "me", new=True)
    for record in RECORDS[:count]:
        await store.append(lease, [record], "running")
    await store.release(lease)


def in_child(work: Callable[[], object]) -> str:
    """What a forked child says: a result, or an error."""
    read, write_end = os.pipe()
    child = os.fork()
    if not child:
        try:
            text = repr(work())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write_end, text.encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text


def in_other_process(path: Path | str, cwd: Path) -> str:
    """What a process says that wants to write the file."""
    code = (
        "import sys; from agentfsm import SqliteStore, AgentfsmError\n"
        "try: SqliteStore(sys.argv[1]).claim(); print('writes')\n"
        "except AgentfsmError as error: print(type(error).__name__, error)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], cwd=cwd, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.parametrize("way", ["link.db", "folder/runs.db", "linked/runs.db", "../{name}/runs.db", "chain.db"])
def test_every_symbolic_link_and_relative_path_to_a_file_leads_to_its_lock(tmp_path, way):
    store = SqliteStore(tmp_path / "runs.db")
    store.claim()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "runs.db").symlink_to(tmp_path / "runs.db")
    (tmp_path / "linked").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "link.db").symlink_to("runs.db")
    (tmp_path / "chain.db").symlink_to("linked/link.db")
    said = in_other_process(way.format(name=tmp_path.name), tmp_path)
    assert said.startswith("StoreLockedError runs.db is in use by process ")
    assert sorted(p.name for p in tmp_path.glob("**/*-lock")) == ["runs.db-lock"]
    store.close()


def test_a_link_to_a_file_that_does_not_exist_yet_leads_to_its_lock(tmp_path):
    (tmp_path / "link.db").symlink_to("runs.db")
    with SqliteStore(tmp_path / "link.db") as store:
        begin(store)
        assert in_other_process("runs.db", tmp_path).startswith("StoreLockedError")
        assert (tmp_path / "runs.db").stat().st_size


def test_a_relative_path_stays_where_it_was_when_the_folder_changes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = SqliteStore("runs.db")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    begin(store)
    assert [head.run_id for head in asyncio.run(store.heads())] == ["run"]
    assert store.path == tmp_path / "runs.db"
    store.close()
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_file_with_two_names_is_refused_for_reading_and_writing(tmp_path):
    with SqliteStore(tmp_path / "runs.db") as store:
        begin(store)
        (tmp_path / "other.db").hardlink_to(tmp_path / "runs.db")
        for name in ("runs.db", "other.db"):
            with pytest.raises(StoreError, match=r"has 2 names \(hard links\).*copy the file"):
                SqliteStore(tmp_path / name)
        begin(store, "goes on")  # a backup that is made with hard links does not stop an open store
    late = SqliteStore(tmp_path / "late.db")
    (tmp_path / "late.db").touch()
    (tmp_path / "late2.db").hardlink_to(tmp_path / "late.db")
    with pytest.raises(StoreError, match="hard links"):
        late.claim()


def moved(path: Path) -> None:
    path.rename(path.with_name("elsewhere.db"))


def replaced(path: Path) -> None:
    shutil.copy(path, path.with_name("copy"))
    path.with_name("copy").replace(path)


def folder_moved(path: Path) -> None:
    path.parent.rename(path.parent.with_name("elsewhere"))


def log_deleted(path: Path) -> None:
    path.with_name("runs.db-wal").unlink()


def lock_deleted(path: Path) -> None:
    path.with_name("runs.db-lock").unlink()


def log_replaced(path: Path) -> None:
    log = path.with_name("runs.db-wal")
    shutil.copy(log, path.with_name("copy"))
    path.with_name("copy").replace(log)


GONE = {
    moved: "runs.db was moved or deleted",
    Path.unlink: "runs.db was moved or deleted",
    folder_moved: "runs.db was moved or deleted",
    replaced: "runs.db was replaced by another file",
    log_deleted: "runs.db-wal was deleted",
    log_replaced: "runs.db-wal was replaced",
    lock_deleted: "runs.db-lock was deleted",
}


LONG_AGO = 1_700_000_000_123_456_789
"""In nanoseconds: when a folder changed last whose next change will show."""


@pytest.mark.parametrize("changed", [None, LONG_AGO], ids=["new folder", "old folder"])
@pytest.mark.parametrize("level", ["full", "normal"])
@pytest.mark.parametrize("happening", GONE, ids=lambda f: f.__name__)
def test_nothing_is_acknowledged_after_the_file_is_gone(tmp_path, happening, level, changed):
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "runs.db"
    store = SqliteStore(path, synchronous=level)

    async def live() -> None:
        lease = await store.acquire("run", "me", new=True)
        if changed is not None:
            os.utime(path.parent, ns=(changed, changed))
        await store.append(lease, RECORDS[:1], "running")
        happening(path)
        for record in RECORDS[1:3]:
            with pytest.raises(StoreMovedError, match=rf"{GONE[happening]}.*open the store again"):
                await store.append(lease, [record], "running")
        with pytest.raises(StoreMovedError):
            await store.acquire("other", "me", new=True)
        with pytest.raises(StoreMovedError):
            await store.heads()

    asyncio.run(live())
    store.close()
    assert (
        not (tmp_path / "in").exists()
        or not path.exists()
        or asyncio.run(SqliteStore(path).records("run"))[:1] == RECORDS[:1]
    )


@pytest.mark.parametrize("changed", ["just now", "at a whole second"])
def test_a_file_is_missed_although_the_clock_of_the_folder_is_too_coarse_to_show_it(tmp_path, changed):
    path = tmp_path / "runs.db"
    store = SqliteStore(path)
    at = LONG_AGO - LONG_AGO % 10**9 if changed == "at a whole second" else time.time_ns() + 10**12

    async def live() -> None:
        lease = await store.acquire("run", "me", new=True)
        os.utime(tmp_path, ns=(at, at))
        await store.append(lease, RECORDS[:1], "running")
        log_deleted(path)
        os.utime(tmp_path, ns=(at, at))
        with pytest.raises(StoreMovedError, match=r"runs\.db-wal was deleted"):
            await store.append(lease, RECORDS[1:2], "running")

    asyncio.run(live())
    store.close()


def test_a_link_that_leads_elsewhere_is_noticed(tmp_path):
    for name in ("one.db", "two.db"):
        with SqliteStore(tmp_path / name) as store:
            begin(store)
    (tmp_path / "runs.db").symlink_to("one.db")
    store = SqliteStore(tmp_path / "runs.db")
    (tmp_path / "runs.db").unlink()
    (tmp_path / "runs.db").symlink_to("two.db")
    with pytest.raises(StoreMovedError, match="replaced by another file"):
        asyncio.run(store.heads())
    with pytest.raises(StoreMovedError, match="replaced by another file"):
        store.claim()
    store.close()
    with SqliteStore(tmp_path / "runs.db") as fresh:
        begin(fresh, "new")


def test_an_error_of_a_job_is_reported_rather_than_the_missing_file(tmp_path):
    store = SqliteStore(tmp_path / "runs.db")

    async def live() -> None:
        lease = await store.acquire("run", "me", new=True)
        moved(tmp_path / "runs.db")
        with pytest.raises(StaleLease):
            await store.append(lease, RECORDS[3:4], "running")

    asyncio.run(live())
    store.close()


@pytest.mark.slow
def test_a_store_refuses_to_work_in_a_forked_child_and_the_parent_goes_on(tmp_path):
    store = SqliteStore(tmp_path / "runs.db")
    begin(store)
    for work in (
        lambda: asyncio.run(store.heads()),
        lambda: asyncio.run(store.records("run")),
        lambda: begin(store, "child"),
        store.claim,
    ):
        said = in_child(work)
        assert said.startswith("StoreError: ")
        assert "does not work in a forked child" in said
    assert in_child(store.close) == "None"
    said = in_child(lambda: SqliteStore(tmp_path / "runs.db"))
    assert said.startswith("StoreError")
    assert "close the store before the fork" in said
    begin(store, "parent")
    assert [head.run_id for head in asyncio.run(store.heads())] == ["run", "parent"]
    store.close()
    assert in_child(lambda: begin(SqliteStore(tmp_path / "runs.db"), "after")) == "None"
    with SqliteStore(tmp_path / "runs.db") as again:
        assert [head.run_id for head in asyncio.run(again.heads())] == ["run", "parent", "after"]


def test_a_child_that_ends_normally_leaves_the_parents_file_alone(tmp_path):
    code = """
import asyncio, os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tests.journal.test_store_file import SqliteStore, begin
store = SqliteStore(sys.argv[2])
begin(store)
if not os.fork():
    sys.exit()  # with all finalizers
os.wait()
assert Path(sys.argv[2] + "-wal").exists()
begin(store, "second")
print([head.run_id for head in asyncio.run(store.heads())])
store.close()
"""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(root), str(tmp_path / "runs.db")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("['run', 'second']\n", "")


def test_an_orphan_does_not_keep_the_lock(tmp_path):
    told, stop = os.pipe(), os.pipe()
    owner = os.fork()
    if not owner:
        store = SqliteStore(tmp_path / "runs.db")
        begin(store)
        if not os.fork():  # the orphan lives until the test ends it
            os.write(told[1], b"orphan")
            os.read(stop[0], 1)
            os._exit(0)
        os._exit(0)
    os.waitpid(owner, 0)
    assert os.read(told[0], 6) == b"orphan"
    try:
        with SqliteStore(tmp_path / "runs.db") as store:
            begin(store, "heir")
            assert [head.run_id for head in asyncio.run(store.heads())] == ["run", "heir"]
    finally:
        os.write(stop[1], b"x")
        for end in (*told, *stop):
            os.close(end)


def test_a_program_that_a_tool_starts_does_not_inherit_the_lock(tmp_path):
    store = SqliteStore(tmp_path / "runs.db")
    store.claim()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False)
    store.close()
    assert in_other_process("runs.db", tmp_path) == "writes\n"
    child.communicate(b"\n")


def test_two_processes_cannot_both_write_through_different_names(tmp_path):
    (tmp_path / "link.db").symlink_to("runs.db")
    with SqliteStore(tmp_path / "link.db") as store:
        begin(store)
        with pytest.raises(StoreLockedError):
            SqliteStore(tmp_path / "runs.db").claim()


@pytest.mark.skipif(sys.platform == "win32", reason="no such permissions")
def test_a_new_store_and_the_files_beside_it_are_readable_by_their_owner_only(tmp_path):
    async def write(store):
        await store.acquire("r", "p", new=True)

    old = os.umask(0o022)
    try:
        with SqliteStore(tmp_path / "runs.db") as store:
            asyncio.run(write(store))
            modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}
    finally:
        os.umask(old)
    assert "runs.db" in modes
    assert set(modes.values()) == {0o600}


@pytest.mark.parametrize("planted", ["symbolic link", "hard link", "pipe"])
def test_a_lock_that_leads_to_another_file_does_not_overwrite_it(tmp_path, planted):
    precious, lock = tmp_path / "precious.txt", tmp_path / "runs.db-lock"
    precious.write_text("many words of somebody else")
    if planted == "symbolic link":
        lock.symlink_to(precious)
    elif planted == "hard link":
        lock.hardlink_to(precious)
    else:
        os.mkfifo(lock)
    with pytest.raises(StoreError, match=r"runs.db-lock is (a symbolic link|not a file of its own)"):
        SqliteStore(tmp_path / "runs.db").claim()
    assert precious.read_text() == "many words of somebody else"
