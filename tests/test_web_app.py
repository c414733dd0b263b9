"""``examples/web_app.py``: a real server that is killed with approvals open, and answered afterwards over HTTP."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentfsm import Agent, Host, Runs, open_store, tool
from tests.helpers.browser import has_count, has_text, running_browser, site_page
from tests.helpers.child_process import child_environment
from tests.helpers.ports import own_port

pytest.importorskip("uvicorn", reason="uvicorn is not installed")
pytest.importorskip("starlette", reason="starlette is not installed")

EXAMPLES = Path(__file__).parents[1] / "examples"
SECRET = "the secret of the desk"


@contextmanager
def server(folder: Path, *, kill: bool = False) -> Iterator[httpx.Client]:
    """The app of the example in a process of its own, which is ended, or killed, at the end of the block."""
    port = own_port()
    command = [sys.executable, "-m", "uvicorn", "web_app:app", "--port", str(port), "--log-level", "info"]
    env = child_environment() | {
        "PYTHONPATH": os.pathsep.join([str(EXAMPLES), str(EXAMPLES.parent)]),
        "DESK_STORE": "sqlite:///desk.db",
        "DESK_SECRET": SECRET,
    }
    with subprocess.Popen(command, cwd=folder, env=env, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "Uvicorn running on" in line:
                break
        rest = threading.Thread(target=process.stderr.read, daemon=True)
        rest.start()
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False) as client:
                yield client
        finally:
            process.send_signal(signal.SIGKILL if kill else signal.SIGINT)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:  # a page is open that follows its events
                process.kill()


def waiting(client: httpx.Client, count: int) -> list[dict[str, Any]]:
    """What waits, once so many runs do."""
    while len(found := client.get("/waiting").json()) != count:
        pass
    return found


@pytest.mark.slow
def test_approvals_that_are_open_when_the_server_is_killed_are_answered_afterwards(tmp_path: Path) -> None:
    with server(tmp_path, kill=True) as client:
        for order in "ABCD":
            assert client.post("/runs", json={"prompt": f"Refund order {order}."}).status_code == 202
        before = waiting(client, 4)
    with server(tmp_path) as client:
        assert waiting(client, 4) == before
        assert [each["arguments"]["order"] for each in before] == ["D", "C", "B", "A"]

        def reply(run: dict[str, Any], decision: str, digest: str | None = None) -> int:
            body = {"decision": decision, "digest": digest or run["digest"]}
            return client.post(f"/runs/{run['run_id']}/reply", json=body).status_code

        assert reply(before[0], "allow", before[1]["digest"]) == 409  # it is the answer to another request
        with ThreadPoolExecutor(2) as pool:
            assert sorted(pool.map(lambda _: reply(before[0], "allow"), range(2))) == [200, 409]
        decisions = zip(before[1:], ("allow", "deny", "allow"), strict=True)
        assert [reply(run, decision) for run, decision in decisions] == [200, 200, 200]
        assert waiting(client, 0) == []
        assert reply({"run_id": "nobody", "digest": "0" * 64}, "allow") == 404


@pytest.mark.slow
def test_approvals_that_were_open_when_the_server_was_killed_are_answered_in_a_browser(
    tmp_path: Path,
) -> None:
    with running_browser() as browser:
        with server(tmp_path, kill=True) as client:
            for order in "ABCD":
                client.post("/runs", json={"prompt": f"Refund order {order}."})
            waiting(client, 4)
        with server(tmp_path) as client, site_page(browser, str(client.base_url).rstrip("/")) as (page, events):
            page.goto("/")
            requests = page.locator("#waiting li")
            has_count(requests, 4)
            for order, decision in zip("BDAC", ("allow", "deny", "allow", "allow"), strict=True):
                item = requests.filter(has_text=f'"order":"{order}"')
                item.get_by_role("button", name=decision).click()
                has_count(item, 0)
            for order in "BAC":
                has_text(page.locator("#events"), f"Done: refunded {order}")
            assert "refunded D" not in page.locator("#events").inner_text()
            assert [each for each in events if "404" not in each] == []  # the browser asks for an icon


def agentfsm(folder: Path, *words: str) -> str:
    """What a command prints that works on the app's store in a process of its own, while the app runs."""
    done = subprocess.run(
        [sys.executable, "-m", "agentfsm", *words, "--store", "desk.db"],
        cwd=folder,
        env=child_environment() | {"AGENTFSM_SECRET": SECRET, "PYTHONPATH": str(EXAMPLES.parent)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode in (0, 4), done.stderr
    return done.stdout


@pytest.mark.slow
def test_commands_reach_the_app_while_it_runs(tmp_path: Path) -> None:
    with server(tmp_path) as client:
        for order in "ABC":
            client.post("/runs", json={"prompt": f"Refund order {order}."})
        last, middle, first = waiting(client, 3)
        assert "was answered" in agentfsm(tmp_path, "answer", first["run_id"], "allow", "--by", "Ann")
        assert [each["run_id"] for each in waiting(client, 2)] == [last["run_id"], middle["run_id"]]
        assert "is cancelled" in agentfsm(tmp_path, "cancel", middle["run_id"])
        waiting(client, 1)
        fork_id = agentfsm(tmp_path, "fork", last["run_id"], "--at", "1").strip()
        assert "deleted" in agentfsm(tmp_path, "redact", "--text", "order C", "--yes")
        shown = json.loads(agentfsm(tmp_path, "runs", "--json", "--status", "finished").splitlines()[0])
        assert shown["ending"] == "cancelled"
        assert fork_id in agentfsm(tmp_path, "verify")


def test_a_page_follows_the_events_of_all_runs(tmp_path: Path) -> None:
    with server(tmp_path) as client, client.stream("GET", "/events") as stream:
        assert "EventSource" in client.get("/").text
        client.post("/runs", json={"prompt": "Refund order A."})
        seen = []
        for line in stream.iter_lines():
            if line.startswith("data: "):
                seen.append(json.loads(line.removeprefix("data: ")))
            if seen and seen[-1]["type"] == "UserInputRequested":
                break
    assert seen[0]["type"] == "RunStarted"
    assert (seen[-1]["tool"], seen[-1]["arguments"]) == ("refund", {"order": "A"})


def test_a_reply_to_a_run_that_has_ended_is_refused_as_too_late(tmp_path: Path) -> None:
    with server(tmp_path) as client, client.stream("GET", "/events") as stream:
        run_id = client.post("/runs", json={"prompt": "Refund order A."}).json()["run_id"]
        (asked,) = waiting(client, 1)
        body = {"decision": "allow", "digest": asked["digest"]}
        assert client.post(f"/runs/{run_id}/reply", json=body).status_code == 200
        for line in stream.iter_lines():
            if '"type": "RunCompleted"' in line:
                break
        late = client.post(f"/runs/{run_id}/reply", json=body)
    assert (late.status_code, late.json()) == (410, {"error": f"run {run_id!r} has ended"})


def test_a_desk_that_closes_leaves_the_run_of_a_call_in_progress_to_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setenv("DESK_STORE", "sqlite:///unused.db")
    monkeypatch.setenv("DESK_SECRET", SECRET)
    desk_module: Any = importlib.import_module("web_app")

    async def first() -> str:
        begun = asyncio.Event()

        @tool(idempotent=True)
        async def refund(order: str) -> str:
            """Refund an order."""
            begun.set()
            await asyncio.Event().wait()
            return "never"

        desk = desk_module.Desk(str(tmp_path / "desk.db"), SECRET.encode())
        host = Host(store=desk.store, secret=SECRET.encode())
        desk.agent = Agent(desk_module.StandIn(), tools=[refund], host=host)
        await desk.open()
        run = desk.agent.run("Refund order A.")
        await desk.start(run)
        await begun.wait()
        await desk.close()
        return run.run_id

    async def place(run_id: str) -> tuple[str, str | None]:
        async with open_store(tmp_path / "desk.db") as store:
            info = (await Runs(store).get(run_id)).info
            return info.status, info.owner

    assert asyncio.run(place(asyncio.run(first()))) == ("running", None)
