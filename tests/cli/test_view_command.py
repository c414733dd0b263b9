"""``agentfsm view`` serves a store to this machine, and stops with Ctrl-C."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from agentfsm import Actor, SqliteStore
from agentfsm.loop.keys import Keyring
from agentfsm.viewer.passes import open_pass
from tests.helpers.child_process import child_environment
from tests.helpers.journal_scenarios import finished_run, waiting_run


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "agentfsm", "view", *arguments]


def environment() -> dict[str, str]:
    return child_environment() | {"PYTHONPATH": str(Path.cwd())}


def start_viewer(folder: Path, *arguments: str) -> tuple[subprocess.Popen[str], httpx.Client]:
    """A viewer of the store in a folder, and a client of it."""
    viewer = subprocess.Popen(
        command("--store", "runs.db", "--port", "0", *arguments),
        cwd=folder, env=environment(), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert viewer.stderr is not None
    line = viewer.stderr.readline()
    address = re.search(r"http://127\.0\.0\.1:\d+/", line)
    assert address is not None, line
    return viewer, httpx.Client(base_url=address[0], trust_env=False, timeout=30)


@pytest.mark.slow
def test_a_store_is_served_while_it_is_written_and_ctrl_c_stops_it(tmp_path: Path) -> None:
    with SqliteStore(tmp_path / "runs.db") as store:
        finished_run(store, "sample")
        viewer, client = start_viewer(tmp_path)
        with client:
            assert [run["id"] for run in client.get("/api/runs").json()["runs"]] == ["sample"]
            finished_run(store, "second")
            assert [run["id"] for run in client.get("/api/runs").json()["runs"]] == ["second", "sample"]
            with client.stream("GET", "/api/run/events?run=sample") as events:
                assert next(events.iter_lines()).startswith("retry:")
                viewer.send_signal(signal.SIGINT)
                assert viewer.wait(20) in (0, 130)
        assert viewer.stderr.read() == ""
        viewer.stderr.close()


def test_a_store_that_is_not_there_is_wrong_usage_and_is_not_created(tmp_path: Path) -> None:
    done = subprocess.run(
        command("--store", "none.db"), cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "there is no store at none.db" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_person_who_says_who_they_are_gets_a_link_and_can_answer_as_claimed(tmp_path: Path) -> None:
    with SqliteStore(tmp_path / "runs.db") as store:
        waiting_run(store, "waits")
    env = environment() | {"AGENTFSM_SECRET": "of the tests"}
    done = subprocess.run(
        [sys.executable, "-m", "agentfsm", "link", "wai", "--as", "bob", "--role", "manager", "--store", "runs.db"],
        cwd=tmp_path, env=env, capture_output=True, text=True, check=True,
    )  # fmt: skip
    token = done.stdout.strip().removeprefix("http://127.0.0.1:8642/link#")
    opened = open_pass("link", token, Keyring(b"of the tests"), 0, "127.0.0.1:8642")
    assert opened is not None
    assert (opened.run_id, opened.actor) == ("waits", Actor("bob", ("manager",), verified=True))
    viewer = subprocess.Popen(
        command("--store", "runs.db", "--port", "0", "--as", "ann"),
        cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert viewer.stderr is not None
    address, _, token = viewer.stderr.readline().split()[4].partition("link#")
    with httpx.Client(base_url=address, trust_env=False, timeout=30) as client:
        assert client.get("/api/session").json()["actor"] is None
        assert client.post("/api/link", json={"token": token}).json() == {"next": ""}
        session = client.get("/api/session").json()
        assert session["actor"]["id"] == "ann"
        (asked,) = client.get("/api/inbox").json()["requests"]
        body = {"run": "waits", "to": asked["digest"], "reply": {"kind": "deny", "text": "no"}}
        answer = client.post("/api/inbox/answer", json=body, headers={"x-agentfsm-token": session["token"]})
        assert answer.status_code == 200, answer.text
        (asked,) = client.get("/api/inbox").json()["requests"]
        assert asked["sent"][0]["by"] == {"id": "ann", "roles": [], "verified": False}
    viewer.send_signal(signal.SIGINT)
    assert viewer.wait(20) in (0, 130)
    viewer.stderr.close()


@pytest.mark.slow
def test_roles_need_a_name_and_answering_needs_the_secret(tmp_path: Path) -> None:
    with SqliteStore(tmp_path / "runs.db") as store:
        waiting_run(store, "waits")
    for arguments, text in ((("--role", "manager"), "give both"), (("--as", "ann"), "there is no secret")):
        done = subprocess.run(
            command("--store", "runs.db", *arguments),
            cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert done.returncode == 2
        assert text in done.stderr


@pytest.mark.slow
def test_a_checkpoint_and_a_graph_of_the_users_are_taken(tmp_path: Path) -> None:
    with SqliteStore(tmp_path / "runs.db") as store:
        finished_run(store, "sample")
    key = Ed25519PrivateKey.generate()
    (tmp_path / "key.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    (tmp_path / "public.pem").write_bytes(
        key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    )
    (tmp_path / "mine.py").write_text(
        "from dataclasses import replace\nfrom agentfsm import LOOP\nMINE = replace(LOOP, name='mine')\n"
    )
    words = [sys.executable, "-m", "agentfsm", "checkpoint", "--key", "key.pem", "--store", "runs.db"]
    note = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True).stdout
    (tmp_path / "note").write_text(note)
    viewer, client = start_viewer(tmp_path, "--checkpoint", "note", "--key", "public.pem", "--graph", "mine.py:MINE")
    with client:
        assert client.get("/api/what-if/choices").json()["graphs"] == ["mine"]
        said = client.get("/api/verification/store").json()
        assert said["problems"] == []
        assert any("since the checkpoint" in line for line in said["unchecked"])
    viewer.send_signal(signal.SIGINT)
    assert viewer.wait(20) in (0, 130)
    viewer.stderr.close()
