"""A viewer shows people the runs of their tenants, and those of others as if they did not exist, on every page."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.routing import Route

import agentfsm.viewer
from agentfsm import Actor, Agent, FileReplayGuard, Host, MemoryStore, tool
from agentfsm.testing import ScriptedModel, call
from agentfsm.viewer import EVERY_TENANT, ByTenant, one_time_link
from agentfsm.viewer.pages import PAGES
from agentfsm.viewer.viewer_context import KEPT_TENANTS

SECRET = b"the secret of this host, long enough"
OWN, OTHER, NOBODYS = "acme-run-1", "evil-run-1", "none-run-1"
CANARY = "the-canary-of-another-tenant"

GETS = [f"/api{route.path}" for page in PAGES for route in page.routes if "GET" in (route.methods or ())]
STREAMS = [path for path in GETS if path.endswith("/events")]

DIRECTORY: dict[str, Any] = {
    "ann": ["acme"],
    "eve": ["evil"],
    "both": ["acme", "evil"],
    "root": [EVERY_TENANT],
    "nobody": [],
    "none": None,
    "letters": "acme",
}


@tool(requires_approval=True)
def pay(note: str) -> str:
    """Pay."""
    return "paid"


async def tenants_of(actor: Actor) -> Collection[str] | None:
    found: Collection[str] | None = DIRECTORY[actor.id]
    return found


def by_header(request: Request) -> Actor | None:
    who = request.headers.get("who")
    return Actor(who) if who else None


@pytest.fixture(scope="module")
def viewer() -> Any:
    """The viewer of a store with a run of each of two tenants that waits, and one of nobody."""

    async def fill() -> MemoryStore:
        store = MemoryStore()
        for run_id, tags in ((OWN, ["tenant:acme"]), (OTHER, ["tenant:evil"]), (NOBODYS, [])):
            model = ScriptedModel([call("pay", note=CANARY if run_id == OTHER else "own")])
            agent = Agent(model, tools=[pay], host=Host(store=store, secret=SECRET))
            prompt = f"{CANARY}: pay." if run_id == OTHER else "Pay."
            await agent.run(prompt, run_id=run_id, tags=tags, session_id=f"{run_id}-talk", actor=Actor(f"by-{run_id}"))
        return store

    store = asyncio.run(fill())
    return agentfsm.viewer.app(store, secret=SECRET, authenticate=ByTenant(by_header, tenants_of))


def ask(viewer: Any, who: str, path: str, body: Any = None, **query: str) -> httpx.Response:
    """The answer to a request of somebody."""

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(viewer, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers={"who": who}) as http:
            if body is None:
                return await http.get(path, params=query)
            token = (await http.get("/api/session")).json()["token"]
            return await http.post(path, json=body, headers={"x-agentfsm-token": token})

    return asyncio.run(send())


@pytest.mark.parametrize("path", [path for path in GETS if path not in STREAMS])
def test_a_run_of_another_tenant_is_on_every_page_what_a_run_is_that_does_not_exist(viewer: Any, path: str) -> None:
    """Also by prefixes, as a filter of a list, and beside an own run on the page that compares two."""
    wanted = [(name, other) for name in ("run", "a", "b") for other in (OTHER, OTHER[:4], NOBODYS)]
    wanted += [(name, OTHER) for name in ("parent", "session", "actor", "text", "tag")]

    async def scenario() -> None:
        transport = httpx.ASGITransport(viewer, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers={"who": "ann"}) as http:
            known = {"a": OWN, "b": OWN, "preset": "standard", "name": "guards", "seq": "1", "record": "1"}
            for name, other in wanted:
                there = await http.get(path, params=known | {name: other})
                missing = await http.get(path, params=known | {name: "x" * len(other)})
                same = missing.text.replace("x" * len(other), other)
                assert (there.status_code, there.text) == (missing.status_code, same), (name, other)
                assert CANARY not in there.text

    asyncio.run(scenario())


@pytest.mark.parametrize("path", [path for path in GETS if path not in STREAMS])
def test_no_page_names_a_run_of_another_tenant_that_nobody_asked_for(viewer: Any, path: str) -> None:
    for who in ("ann", "eve"):
        text = ask(viewer, who, path, run=OWN, a=OWN, b=OWN, preset="standard").text
        if who == "ann":
            assert CANARY not in text
            assert OTHER not in text
        assert NOBODYS not in text


def test_everybody_finds_their_own_runs(viewer: Any) -> None:
    found = {"ann": [OWN], "eve": [OTHER], "both": [OTHER, OWN], "root": [NOBODYS, OTHER, OWN]}
    for who, runs in found.items():
        assert [each["id"] for each in ask(viewer, who, "/api/runs").json()["runs"]] == runs
        waiting = ask(viewer, who, "/api/inbox").json()["requests"]
        assert sorted(each["run"]["id"] for each in waiting) == sorted(runs)
    for who, run_id in (("ann", OWN), ("eve", OTHER), ("both", OTHER), ("root", NOBODYS)):
        assert ask(viewer, who, "/api/run", run=run_id).status_code == 200


@pytest.mark.parametrize("path", STREAMS)
def test_no_stream_has_anything_of_another_tenant(viewer: Any, path: str) -> None:
    """What a stream sends before it waits, for each run that can be asked for."""

    async def first(run_id: str) -> bytes:
        sent = bytearray()
        done = asyncio.Event()
        scope = {
            "type": "http",
            "method": "GET",
            "path": path,
            "root_path": "",
            "query_string": f"run={run_id}".encode(),
            "headers": [(b"host", b"localhost"), (b"who", b"ann")],
            "client": ("127.0.0.1", 1),
            "server": ("localhost", 80),
            "scheme": "http",
            "http_version": "1.1",
        }
        looks = 0

        async def receive() -> Any:
            await done.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            nonlocal looks
            sent.extend(message.get("body", b""))
            looks += 1
            if looks >= 2:
                done.set()

        async def give_up() -> None:
            await asyncio.sleep(0.3)  # a stream that has nothing to say sends nothing
            done.set()

        watching = asyncio.create_task(give_up())
        await asyncio.wait_for(viewer(scope, receive, send), 10)
        watching.cancel()
        return bytes(sent)

    for run_id in ("", OTHER, OTHER[:4], NOBODYS):
        sent = asyncio.run(first(run_id))
        assert CANARY.encode() not in sent
        assert OTHER.encode() not in sent.replace(f"{OTHER!r}".encode(), b"")  # an error repeats what was asked for


@pytest.mark.parametrize("action", ["answer", "cancel"])
def test_a_run_of_another_tenant_can_be_neither_answered_nor_cancelled(viewer: Any, action: str) -> None:
    digest = next(
        each["digest"] for each in ask(viewer, "root", "/api/inbox").json()["requests"] if each["run"]["id"] == OTHER
    )
    said = {"to": digest, "reply": {"kind": "allow"}, "reason": "no"}
    for run_id in (OTHER, NOBODYS, "missing", OTHER[:4]):
        answer = ask(viewer, "ann", f"/api/inbox/{action}", {"run": run_id, **said})
        assert answer.status_code == 404
    sent = ask(viewer, "root", "/api/inbox").json()["requests"]
    assert [each["sent"] for each in sent] == [[], [], []]


@pytest.mark.parametrize("who", ["nobody", "none", "letters", "unknown"])
def test_somebody_without_a_tenant_sees_nothing(viewer: Any, who: str) -> None:
    for path in ("/", "/api/runs", "/api/session", "/api/inbox"):
        answer = ask(viewer, who, path, run=OWN)
        assert answer.status_code == 403
        assert OWN not in answer.text


def test_a_link_for_one_run_shows_that_run_to_whoever_got_it(viewer: Any, tmp_path: Path) -> None:
    link = one_time_link("http://localhost/", OTHER, Actor("guest"), secret=SECRET)

    async def open_it() -> tuple[int, int]:
        transport = httpx.ASGITransport(
            agentfsm.viewer.app(
                viewer.state.viewer.store,
                secret=SECRET,
                authenticate=ByTenant(by_header, tenants_of),
                replay_guard=FileReplayGuard(tmp_path),
            )
        )
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            opened = await http.post("/api/link", json={"token": link.partition("#")[2]})
            http.cookies.update(opened.cookies)
            granted = await http.get("/api/run", params={"run": OTHER})
            other = await http.get("/api/run", params={"run": OWN})
            return granted.status_code, other.status_code

    assert asyncio.run(open_it()) == (200, 403)


def test_what_is_kept_for_tenants_is_bounded(viewer: Any) -> None:
    context = viewer.state.viewer
    for number in range(KEPT_TENANTS + 5):
        context.seen_by(frozenset({f"tenant-{number}"}))
    assert len(context.for_tenants) == KEPT_TENANTS
    latest = frozenset({f"tenant-{KEPT_TENANTS + 4}"})
    assert context.seen_by(latest) is context.seen_by(latest)
    assert context.seen_by(frozenset({"acme"})).figures is not context.figures


def test_every_route_is_asked() -> None:
    posts = {"/api/inbox/answer", "/api/inbox/cancel", "/api/link"}
    routes = {f"/api{route.path}" for page in PAGES for route in page.routes if isinstance(route, Route)}
    assert routes == {*GETS, *posts}
    assert json.dumps(STREAMS).count("events") == 3
