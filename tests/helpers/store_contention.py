"""Trials: processes that compete for one run, owners that are suspended, and disks without space.

Run as ``python -m tests.helpers.store_contention race ROUNDS``, ``frozen``, ``fenced``, ``file-limit STEP`` or
``small-disk STEP``; prints what it did as JSON.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentfsm import Allow, SqliteStore, StaleLease, StoreError, StoreLockedError
from agentfsm.testing import call
from tests.helpers.crash_injection import (
    RUN,
    check_against_uninterrupted,
    exited_cleanly,
    outcome,
    run_all_lives,
    run_forked,
    run_in_fork,
    run_life,
    warm_up,
)
from tests.helpers.journal_scenarios import SCENARIOS, CrashWorld, make_agent

SCENARIOS["race"] = ("standard", [call("careful", n=1), "done"])


def temporary_folder() -> Path:
    """A new temporary folder."""
    return Path(tempfile.mkdtemp(prefix="crash-"))


def race_for_run(rounds: int, racers: int = 4) -> dict[str, Any]:
    """Several processes resume one run at the same time: one succeeds, the others get an error."""
    told, why = Counter[str](), Counter[str]()
    for _ in range(rounds):
        here = temporary_folder()
        asyncio.run(_suspend_run(here))
        begin, go = os.pipe()
        children = [_race_worker(here, begin, go) for _ in range(racers)]
        os.close(begin)
        os.close(go)  # all of them see the end of the pipe at the same time
        for child in children:
            assert not exited_cleanly(os.waitpid(child, 0)[1])
        world = CrashWorld(here)
        assert len(world.lines("effects")) == 1, (world.lines("effects"), here)
        lines = [line.split(" ", 1) for line in world.lines("raced")]
        assert [name for name, _ in lines].count("RunResult") == 1, (lines, here)
        holders = {f"runs.db is in use by process {child} on " for child in children}
        for name, words in lines:
            assert name != "StoreLockedError" or any(words.startswith(h) for h in holders), (words, children)
        told.update(name for name, _ in lines)
        why.update(f"{name} {words}" for name, words in lines if name not in ("RunResult", "StoreLockedError"))
        shutil.rmtree(here)
    return {"rounds": rounds, "told": told, "why": why}


async def _suspend_run(here: Path) -> None:
    store = SqliteStore(here / "runs.db")
    await make_agent(CrashWorld(here), "race", store).run("go", run_id=RUN)
    store.close()


def _race_worker(here: Path, begin: int, go: int) -> int:
    world = CrashWorld(here)

    async def resume() -> object:
        return await make_agent(world, "race", SqliteStore(here / "runs.db")).resume(RUN, Allow())

    def racing() -> None:
        os.close(go)
        os.read(begin, 1)
        try:
            came: object = asyncio.run(resume())
        except Exception as error:
            came = error
        world.write("raced", f"{type(came).__name__} {' '.join(str(came).split())}")

    return run_forked(racing)


def _freeze_during(here: Path, doing: Callable[[CrashWorld], None]) -> int:
    """A process that runs "linear" and is stopped (SIGSTOP) after the effect of its first call."""
    world = CrashWorld(here)
    passing = world.passing

    def freeze(where: str) -> None:
        os.kill(os.getpid(), signal.SIGSTOP) if where == "after once" else passing(where)

    world.passing = freeze  # type: ignore[method-assign]
    child = run_forked(lambda: doing(world))
    os.waitpid(child, os.WUNTRACED)
    return child


def frozen_owner() -> dict[str, Any]:
    """An owner that is stopped during a call: no other process can write, and it continues once it is resumed."""
    here = temporary_folder()
    child = _freeze_during(here, lambda world: asyncio.run(run_life(world, "linear")))
    store = SqliteStore(here / "runs.db")
    head = asyncio.run(store.head(RUN))
    assert head is not None
    refused = ""
    try:
        asyncio.run(store.acquire(RUN, "somebody else"))
    except StoreLockedError as error:
        refused = str(error)
    left = asyncio.run(make_agent(CrashWorld(here), "linear", store).unfinished_runs())
    os.kill(child, signal.SIGCONT)
    _, status = os.waitpid(child, 0)
    got = outcome(here, "linear")
    store.close()
    shutil.rmtree(here)
    return {"owner": head.owner, "child": child, "refused": refused, "left": len(left), "code": status, **got}


def fenced_owner() -> dict[str, Any]:
    """An owner that is stopped while its lock is removed and another process ends the run: it cannot write any more."""
    here = temporary_folder()

    def owner(world: CrashWorld) -> None:
        try:
            asyncio.run(run_life(world, "linear"))
        except StaleLease as error:
            world.write("fenced", str(error))

    whole = run_all_lives("linear", [], None)
    child = _freeze_during(here, owner)
    (here / "runs.db-lock").unlink()
    assert not run_in_fork(here, "linear")
    before = outcome(here, "linear")
    os.kill(child, signal.SIGCONT)
    assert not exited_cleanly(os.waitpid(child, 0)[1])
    assert outcome(here, "linear") == before
    check_against_uninterrupted(here, 1, whole, "linear")
    told = CrashWorld(here).lines("fenced")
    shutil.rmtree(here)
    return {"fenced": told, "doubts": before["doubts"], "finished": before["finished"]}


def _run_without_space(here: Path, whole: dict[str, Any], limit: Callable[[], None], room: Callable[[], None]) -> str:
    """A run without space, and the same run with space again; the error, if there was one."""
    world = CrashWorld(here)

    def stopped() -> None:
        limit()
        try:
            asyncio.run(run_life(world, "linear"))
        except StoreError as error:
            room()
            world.write("refused", f"{type(error).__name__} {error}")

    child = run_forked(stopped)
    assert not exited_cleanly(os.waitpid(child, 0)[1])
    room()
    told = world.lines("refused")
    assert all("runs.db" in line for line in told), told
    assert not run_in_fork(here, "linear")
    assert check_against_uninterrupted(here, 1, whole, "linear")["finished"]
    return " ".join(told)


def file_limit(step: int) -> dict[str, Any]:
    """File size limits (RLIMIT_FSIZE), a different one each time."""
    whole, told = run_all_lives("linear", [], None), Counter[str]()
    for size in range(28_672, 200_000, 4096 * step):
        here = temporary_folder()
        error = _run_without_space(here, whole, functools.partial(_limit_file_size, size), _limit_file_size)
        shutil.rmtree(here)
        if not error:
            break
        told[error.split()[0]] += 1
    return {"told": told}


def _limit_file_size(size: int = resource.RLIM_INFINITY) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def small_disk(step: int) -> dict[str, Any]:
    """Small file systems: each time with a different amount of space, which is then increased."""
    here = temporary_folder()
    if not _mount_small_disk(here, 1 << 20):
        return {"skipped": "no file system can be mounted here"}
    whole, told = run_all_lives("linear", [], None), Counter[str]()
    for left in range(24, 400, 4 * step):
        inside, ballast = temporary_folder(), here / "ballast"
        (inside / "runs.db").symlink_to(here / "runs.db")  # the other files of the world are outside
        ballast.write_bytes(bytes((1 << 20) - (left << 10)))
        error = _run_without_space(inside, whole, lambda: None, functools.partial(ballast.unlink, missing_ok=True))
        for path in here.iterdir():
            path.unlink()
        shutil.rmtree(inside)
        told[error.split()[0] if error else "there was room"] += 1
        if not error:
            break
    ctypes.CDLL(None).umount2(str(here).encode(), 0)
    here.rmdir()
    return {"told": told}


def _mount_small_disk(here: Path, size: int) -> bool:
    """Mount a file system of a size that only this process and its children see; False if that is not possible."""
    libc, uid, gid = ctypes.CDLL(None), os.getuid(), os.getgid()
    user, mounts, private = 0x10000000, 0x00020000, 1 << 18 | 1 << 14  # CLONE_NEWUSER, CLONE_NEWNS, MS_PRIVATE|MS_REC
    if not hasattr(libc, "unshare"):
        return False
    if libc.unshare(mounts):
        if libc.unshare(user | mounts):
            return False
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            Path("/proc/self", name).write_text(text)
    if libc.mount(None, b"/", None, private, None):
        return False
    return not libc.mount(b"none", str(here).encode(), b"tmpfs", 0, f"size={size}".encode())


def main(arguments: list[str]) -> None:
    """Run one of the trials."""
    warm_up()
    match arguments:
        case ["race", rounds]:
            told = race_for_run(int(rounds))
        case ["frozen"]:
            told = frozen_owner()
        case ["fenced"]:
            told = fenced_owner()
        case ["file-limit", step]:
            told = file_limit(int(step))
        case ["small-disk", step]:
            told = small_disk(int(step))
        case _:
            sys.exit(__doc__)
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1:])
