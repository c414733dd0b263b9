"""The host: a secret that is never shown, a clock, and suspension records that can be used once."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from agentfsm.errors import ConfigurationError
from agentfsm.runtime.host import FileReplayGuard, Host, InMemoryReplayGuard, SystemClock


@pytest.fixture(params=["process", "folder"])
def used(request, tmp_path):
    return InMemoryReplayGuard() if request.param == "process" else FileReplayGuard(tmp_path / "deep" / "used")


def test_a_record_is_claimed_once(used):
    assert not used.is_used("a")
    assert used.claim("a")
    assert used.is_used("a")
    assert not used.claim("a")
    assert not used.is_used("b")
    assert used.claim("b")


def test_of_many_threads_one_claims_a_record(used):
    barrier, wins = threading.Barrier(8), []

    def race() -> None:
        barrier.wait()
        wins.append(used.claim("a"))

    threads = [threading.Thread(target=race) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sorted(wins) == [False] * 7 + [True]


def test_of_two_processes_one_claims_a_record(tmp_path):
    code = (
        "import sys\n"
        "from agentfsm.runtime.host import FileReplayGuard\n"
        "used = FileReplayGuard(sys.argv[1])\n"
        "print('ready', flush=True)\n"
        "sys.stdin.readline()\n"
        "print(sum(used.claim(f'record{n}') for n in range(200)))\n"
    )
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "used")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    for racer in racers:
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        racer.stdin.write("go\n")
        racer.stdin.flush()
    won = [int(racer.communicate(timeout=60)[0]) for racer in racers]
    assert sum(won) == 200
    assert len(list((tmp_path / "used").glob("record*"))) == 200


def test_a_folder_is_shared_by_all_that_name_it(tmp_path):
    assert FileReplayGuard(tmp_path).claim("a")
    assert FileReplayGuard(str(tmp_path)).is_used("a")


def test_a_folder_that_cannot_be_written_claims_nothing(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises(OSError, match="file"):
        FileReplayGuard(blocked / "used").claim("a")


def test_the_secret_is_not_shown_and_never_empty():
    assert "hush" not in repr(Host(secret=b"hush", old_secrets=[b"hush hush"]))
    for empty in ({"secret": b""}, {"secret": b"hush", "old_secrets": [b"old", b""]}):
        with pytest.raises(ValueError, match="secret"):
            Host(**empty)


def test_by_default_each_process_has_a_random_secret(monkeypatch):
    monkeypatch.delenv("AGENTFSM_SECRET", raising=False)
    assert Host().secret == Host().secret
    code = "from agentfsm import Host; print(Host().secret.hex())"
    others = {subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout for _ in range(2)}
    texts = {Host().secret.hex(), *(other.decode().strip() for other in others)}
    assert len(texts) == 3
    assert {len(text) for text in texts} == {64}


def test_the_environment_names_the_secret_of_hosts_that_are_given_none(monkeypatch):
    monkeypatch.setenv("AGENTFSM_SECRET", " from the environment\n")
    assert Host().secret == b"from the environment"
    assert Host(secret=b"given").secret == b"given"
    monkeypatch.setenv("AGENTFSM_SECRET", "  ")
    assert len(Host().secret) == 32


def test_a_secret_may_be_a_string():
    host = Host(secret="hush", old_secrets=["old"])  # type: ignore[arg-type,list-item]
    assert (host.secret, host.old_secrets) == (b"hush", (b"old",))


def test_a_host_has_the_keys_of_all_its_secrets():
    old = Host(secret=b"old")
    host = Host(secret=b"new", old_secrets=[b"old"])
    assert host.keyring.current.key_id == Host(secret=b"new").keyring.current.key_id != old.keyring.current.key_id
    assert host.keyring.find(old.keyring.current.key_id) is not None
    assert old.keyring.find(host.keyring.current.key_id) is None
    replaced = dataclasses.replace(host, secret=b"newer", old_secrets=[host.secret])
    assert replaced.keyring.find(host.keyring.current.key_id) is not None


def test_ids_are_sixteen_hex_digits_and_differ():
    ids = {Host().new_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(len(i) == 16 and int(i, 16) >= 0 for i in ids)


def test_the_systems_clock_is_the_systems():
    clock = SystemClock()
    assert abs(clock.time() - time.time()) < 60
    assert abs(clock.monotonic() - time.monotonic()) < 60
    asyncio.run(clock.sleep(0))
    assert isinstance(Host().clock, SystemClock)


def test_the_hosts_of_a_process_share_a_guard_that_no_other_process_has():
    one, other = Host(), Host()
    assert one.replay_guard.claim("of this process")
    assert other.replay_guard.is_used("of this process")
    assert one.replay_guard.scope == other.replay_guard.scope
    code = "from agentfsm import Host; print(Host().replay_guard.scope)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() != one.replay_guard.scope


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_has_a_guard_of_its_own():
    """It would not see what its parent and the other children claim."""
    guard, (reader, writer) = InMemoryReplayGuard(), os.pipe()
    before = guard.scope
    child = os.fork()
    if child == 0:
        os.write(writer, guard.scope.encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 100).decode() not in ("", before)
    assert guard.scope == before
    os.close(reader)
    os.close(writer)


@pytest.mark.slow
def test_a_folder_has_one_scope_whoever_names_it_first(tmp_path):
    code = "import sys; from agentfsm import FileReplayGuard; print(FileReplayGuard(sys.argv[1]).scope)"
    racers = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "a")], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    scopes = {racer.communicate(timeout=60)[0].strip() for racer in racers}
    assert scopes == {FileReplayGuard(tmp_path / "a").scope}
    assert FileReplayGuard(tmp_path / "b").scope not in scopes
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["folder-id"]


def test_the_files_of_a_folder_are_private(tmp_path):
    FileReplayGuard(tmp_path / "used").claim("a")
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "used").iterdir()} == {0o600}


def test_a_host_names_no_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Host().replay_guard.claim("a")
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"secrets": "hunter2hunter2"}, r"secrets must be a list, as in secrets=\[...\], not a single secret"),
        ({"secrets": SecretStr("hunter2hunter2")}, "secrets must be a list"),
        ({"secrets": [7]}, "secrets must be strings, not int"),
        ({"old_secrets": b"the last secret"}, "old_secrets must be a list"),
        ({"secret": SecretStr("the secret")}, "a secret must be bytes, not SecretStr"),
        ({"old_secrets": [b""]}, "a secret is empty"),
        ({"store": "runs.db"}, r"store must be a store, as in store=open_store\('runs.db'\), not str"),
        ({"watchdog_s": 0}, "watchdog_s must be greater than 0 seconds, or None, not 0"),
        ({"monitor": "loud"}, "it must be one of off, warn, raise"),
    ],
)
def test_what_a_host_cannot_have_is_refused_at_once(wrong: Any, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        Host(**wrong)
