"""The lock on a store's file: one process holds it, others get its name, and checking it takes it from no process."""

from __future__ import annotations

import errno
import os
import socket
import sys

import pytest

from agentfsm import StoreFullError, StoreLockedError
from agentfsm.journal.sqlite import store_file
from agentfsm.journal.sqlite.store_file import FileLock

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="flock")

US = f"process {os.getpid()} on {socket.gethostname()}"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs.db-lock"


def refusal(path) -> str:
    with pytest.raises(StoreLockedError) as refused:
        FileLock(path).acquire()
    return str(refused.value)


def test_the_second_process_gets_an_error_that_names_the_owner(path):
    first = FileLock(path)
    first.acquire()
    assert f"runs.db is in use by {US}: " in refusal(path)
    first.release()
    FileLock(path).acquire()


def test_a_second_store_in_one_process_is_told_to_share_the_first(path):
    first = FileLock(path)
    first.acquire()
    assert "it is open in this process as another store; share that one, or close it first" in refusal(path)
    first.release()
    other = FileLock(path)
    other.acquire()
    path.write_text("process 7 on earth\n")
    assert "only one process at a time" in refusal(path)
    other.release()


def test_the_name_of_a_dead_process_is_not_reported(path):
    path.write_text("process 123456789 on a machine with a very long name that is gone\n")
    lock = FileLock(path)
    lock.acquire()
    assert f"is in use by {US}: " in refusal(path)
    assert path.read_text() == f"{US}\n"
    lock.release()
    assert path.read_text() == ""


def test_a_lock_that_cannot_be_written_for_lack_of_space_is_not_kept(path, monkeypatch):
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    lock = FileLock(path)
    with monkeypatch.context() as disk:
        disk.setattr(store_file.os, "write", full)
        with pytest.raises(StoreFullError, match=r"runs\.db-lock cannot be written: .*: make room, and try again"):
            lock.acquire()
    FileLock(path).acquire()


def test_an_owner_that_has_not_written_its_name_yet_is_waited_for(path, monkeypatch):
    lock = FileLock(path)
    lock.acquire()
    path.write_text("")
    waits = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 9:
            path.write_text("process 7 on earth\n")

    monkeypatch.setattr(store_file.time, "sleep", sleep)
    assert "is in use by process 7 on earth: " in refusal(path)
    path.write_text("")
    monkeypatch.setattr(store_file.time, "sleep", lambda seconds: waits.append(seconds))
    assert "is in use by another process: " in refusal(path)
    assert sum(waits) < 0.2


@pytest.mark.parametrize("left", ["", "process 1 on earth\n"])
def test_a_process_that_only_checks_the_lock_is_not_its_owner(path, monkeypatch, left):
    import fcntl

    path.write_text(left)
    asking = os.open(path, os.O_RDWR)
    fcntl.flock(asking, fcntl.LOCK_EX)  # what ``held`` does for an instant
    monkeypatch.setattr(store_file.time, "sleep", lambda seconds: fcntl.flock(asking, fcntl.LOCK_UN))
    FileLock(path).acquire()
    os.close(asking)
    assert path.read_text() == f"{US}\n"


def test_two_concurrent_checks_do_not_see_each_other(path, monkeypatch):
    path.touch()
    one, told = store_file.FileLock(path), []
    close = os.close

    def closing(descriptor: int) -> None:  # the first one is still asking when the second does
        monkeypatch.setattr(store_file.os, "close", close)
        told.append(FileLock(path).held_by_other())
        close(descriptor)

    monkeypatch.setattr(store_file.os, "close", closing)
    told.append(one.held_by_other())
    assert told == [False, False]
    one.acquire()
    assert FileLock(path).held_by_other()
