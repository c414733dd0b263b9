"""One-time links and sessions: who may see what, until when, and how often."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import agentfsm.viewer
from agentfsm import Actor, ConfigurationError, FileReplayGuard, MemoryStore
from agentfsm.loop.keys import KeyPurpose, Keyring
from agentfsm.viewer.passes import Pass, one_time_link, open_pass, seal_pass, viewer_at
from tests.helpers.browser import elsewhere, has_count, has_text, site_page
from tests.helpers.journal_scenarios import finished_run, sample_agent, waiting_run
from tests.helpers.ports import own_port
from tests.helpers.viewer_server import served

SECRET = b"of the tests"
KEYRING = Keyring(SECRET)
ANN = Pass(Actor("ann", ("manager",), verified=True), "waits", 100.0, "0123", "agents.example.org/a")
HERE = "agents.example.org/a"


def test_a_pass_says_what_was_sealed_until_it_expires() -> None:
    text = seal_pass("link", ANN, KEYRING)
    assert open_pass("link", text, KEYRING, 100.0, HERE) == ANN
    assert open_pass("link", text, KEYRING, 100.1, HERE) is None
    assert open_pass("link", text, Keyring(b"new", [SECRET]), 0, HERE) == ANN
    assert open_pass("link", text, Keyring(b"another"), 0, HERE) is None


@pytest.mark.parametrize(
    ("address", "opens"),
    [
        ("agents.example.org:443/a", True),
        ("AGENTS.example.org/a", True),
        ("agents.example.org/a/", True),
        ("https://agents.example.org/%61", True),
        ("agents.example.org:8443/a", False),
        ("agents.example.org", False),
        ("agents.example.org/b", False),
        ("agents.example.org/A", False),
        ("agents.example.org/a/a", False),
        ("example.org/a", False),
        ("agents.example.org.evil.example/a", False),
        ("evil.example/agents.example.org/a", False),
        ("evil.example/a://agents.example.org/a", False),
        ("", False),
    ],
)
def test_a_pass_is_for_one_viewer(address: str, opens: bool) -> None:
    for kind in ("link", "session"):
        assert (open_pass(kind, seal_pass(kind, ANN, KEYRING), KEYRING, 0, address) == ANN) is opens
    assert viewer_at("https://Ann@agents.example.org:443/agents/") == "agents.example.org/agents"
    assert viewer_at("http://[::1]:8642/") == "[::1]:8642/"


def test_a_pass_of_an_earlier_release_is_none() -> None:
    body = base64.urlsafe_b64encode(json.dumps(["link", "ann", [], "person", True, "waits", 100.0, "0"]).encode())
    text = body.decode().rstrip("=")
    sealed = KEYRING.current.seal(KeyPurpose.viewer, f"pass {text}".encode())
    assert open_pass("link", f"{text}.{sealed}", KEYRING, 0, "") is None


def test_a_link_is_no_session_and_a_token_is_neither() -> None:
    assert open_pass("session", seal_pass("link", ANN, KEYRING), KEYRING, 0, HERE) is None
    assert open_pass("link", seal_pass("session", ANN, KEYRING), KEYRING, 0, HERE) is None
    body = seal_pass("link", ANN, KEYRING).partition(".")[0]
    for purpose in (KeyPurpose.record, KeyPurpose.viewer):
        assert open_pass("link", f"{body}.{KEYRING.current.seal(purpose, body.encode())}", KEYRING, 0, HERE) is None


@given(st.data())
def test_a_pass_of_which_anything_is_changed_is_none(data: st.DataObject) -> None:
    text = seal_pass("link", ANN, KEYRING)
    at = data.draw(st.integers(0, len(text) - 1))
    char = data.draw(st.sampled_from("abcXYZ019_-.="))
    changed = text[:at] + char + text[at + 1 :]
    assert changed == text or open_pass("link", changed, KEYRING, 0, HERE) is None


@pytest.mark.parametrize("text", ["", ".", "a.b", "é.0", "x" * 10_000, "." * 100])
def test_what_is_no_pass_is_none(text: str) -> None:
    assert open_pass("link", text, KEYRING, 0, HERE) is None


def test_the_pass_of_a_link_is_where_no_server_and_no_log_sees_it() -> None:
    link = one_time_link("https://agents.example.org/a/", "waits", Actor("ann"), secret=SECRET, validity_s=60, now=0)
    address, _, text = link.partition("#")
    assert address == "https://agents.example.org/a/link"
    opened = open_pass("link", text, KEYRING, 60, HERE)
    assert opened is not None
    assert (opened.run_id, opened.actor) == ("waits", Actor("ann", verified=True))
    assert open_pass("link", text, KEYRING, 61, HERE) is None
    body = json.loads(base64.urlsafe_b64decode(text.partition(".")[0] + "=="))
    assert SECRET.decode() not in str(body)


@pytest.mark.parametrize(
    ("url", "run_id", "validity_s"),
    [
        ("ftp://x/", "a", 1),
        ("javascript:x", "a", 1),
        ("https://x/?a", "a", 1),
        ("https://x/", "", 1),
        ("https://x/", "a", 0),
    ],
)
def test_a_link_that_makes_no_sense_is_refused(url: str, run_id: str, validity_s: float) -> None:
    with pytest.raises(ConfigurationError):
        one_time_link(url, run_id, Actor("ann"), secret=SECRET, validity_s=validity_s)


# -- in a browser ---------------------------------------------------------------------------------------


@pytest.fixture
def store() -> Any:
    def make() -> Any:
        made, _ = waiting_run(MemoryStore(), "waits")
        waiting_run(made, "waits-2")
        finished_run(made, "other")
        return made

    return elsewhere(make)


def viewer(store: Any, folder: Path) -> Any:
    return agentfsm.viewer.app(
        store,
        agents=[sample_agent(store, ["so be it"])],
        authenticate=lambda request: None,
        replay_guard=FileReplayGuard(folder),
    )


def client_of(site: str) -> httpx.Client:
    """A client without a browser."""
    return httpx.Client(base_url=site, trust_env=False, timeout=30)


@pytest.mark.slow
def test_a_link_lets_one_person_answer_one_run_once(browser: Any, store: Any, tmp_path: Path) -> None:
    with served(viewer(store, tmp_path)) as site:
        link = one_time_link(site, "waits", Actor("ann", ("manager",)), secret=SECRET)
        with site_page(browser, site) as (page, events):
            assert page.request.get("/api/inbox").status == 401
            page.goto(link)
            page.get_by_role("button", name="Open").wait_for()
            assert "#" not in page.url  # and nothing is used up yet
            assert page.request.get("/api/inbox").status == 401
            page.get_by_role("button", name="Open").click()
            has_text(page.locator("#person"), "ann (manager), for one run")
            has_count(page.locator("article"), 1)
            assert page.request.get("/api/run?run=waits").status == 200
            for path in ("/", "/api/runs", "/api/runs/count", "/api/run?run=other", "/api/run?run=waits-2"):
                assert page.request.get(path).status == 403
            assert [run["run"]["id"] for run in page.request.get("/api/inbox?run=waits-2").json()["requests"]] == [
                "waits"
            ]
            token = page.request.get("/api/session").json()["token"]
            for path, body in (("answer", {"to": "0" * 64, "reply": {"kind": "allow"}}), ("cancel", {"reason": ""})):
                answer = page.request.post(
                    f"/api/inbox/{path}", data={"run": "waits-2", **body}, headers={"x-agentfsm-token": token}
                )
                assert answer.status == 403
            (cookie,) = page.context.cookies()
            assert cookie["httpOnly"]
            assert cookie["sameSite"] == "Strict"
            page.get_by_role("button", name="Deny…").click()
            page.get_by_role("button", name="Deny", exact=True).click()
            has_text(page.locator("article"), "Sent; the run goes on.")
            assert [each for each in events if "403" not in each and "401" not in each] == []
        with site_page(browser, site) as (page, _):
            page.goto(link)
            page.get_by_role("button", name="Open").click()
            has_text(page.get_by_role("alert"), "opened already")
            assert page.context.cookies() == []


def test_a_link_stays_used_and_a_session_valid_when_the_viewer_is_restarted(
    browser: Any, store: Any, tmp_path: Path
) -> None:
    port = own_port()
    with served(viewer(store, tmp_path), port) as site:
        link = one_time_link(site, "waits", Actor("ann"), secret=SECRET)
        with client_of(site) as client:
            assert client.post("/api/link", json={"token": link.partition("#")[2]}).status_code == 200
            ((name, value),) = client.cookies.items()
    with served(viewer(store, tmp_path), port) as site, client_of(site) as client:
        refused = client.post("/api/link", json={"token": link.partition("#")[2]})
        assert refused.status_code == 403
        assert "opened already" in refused.json()["error"]
        assert client.get("/api/inbox").status_code == 401
        assert client.get("/api/inbox", headers={"cookie": f"{name}={value}"}).status_code == 200
        forged = value[:-1] + ("0" if value[-1] != "0" else "1")
        assert client.get("/api/inbox", headers={"cookie": f"{name}={forged}"}).status_code == 401


@pytest.mark.parametrize(
    "body",
    ["", "[]", "{}", '{"token": 1}', '{"token": "a.b"}', '{"token": "\\ud800.b"}', "x" * 2_000_000, "[" * 100_000],
    ids=range(8),
)
def test_a_forged_link_opens_nothing(store: Any, tmp_path: Path, body: str) -> None:
    with served(viewer(store, tmp_path)) as site, client_of(site) as client:
        answer = client.post("/api/link", content=body)
        assert answer.status_code in (403, 413, 422)
        assert "set-cookie" not in answer.headers


def test_another_site_cannot_open_a_link(store: Any, tmp_path: Path) -> None:
    with served(viewer(store, tmp_path)) as site, client_of(site) as client:
        token = one_time_link(site, "waits", Actor("ann"), secret=SECRET).partition("#")[2]
        refused = client.post("/api/link", json={"token": token}, headers={"origin": "https://evil.example"})
        assert refused.status_code == 403
        assert client.post("/api/link", json={"token": token}).status_code == 200


def test_links_are_refused_where_nothing_remembers_them(store: Any) -> None:
    with (
        served(agentfsm.viewer.app(store, secret=SECRET)) as site,
        client_of(site) as client,
    ):
        token = one_time_link(site, "waits", Actor("ann"), secret=SECRET).partition("#")[2]
        assert client.post("/api/link", json={"token": token}).status_code == 503


@pytest.mark.parametrize("path", ["answer", "cancel"])
def test_a_link_for_a_run_that_was_deleted_is_not_for_one_whose_id_begins_like_it(
    store: Any, tmp_path: Path, path: str
) -> None:
    with served(viewer(store, tmp_path)) as site, client_of(site) as client:
        token = one_time_link(site, "wait", Actor("ann", ("manager",)), secret=SECRET).partition("#")[2]
        assert client.post("/api/link", json={"token": token}).status_code == 200
        header = {"x-agentfsm-token": client.get("/api/session").json()["token"]}
        body = {"run": "wait", "reason": "", "to": "0" * 64, "reply": {"kind": "deny", "text": "no"}}
        refused = client.post(f"/api/inbox/{path}", json=body, headers=header)
        assert refused.status_code == 404
        assert "deleted" in refused.json()["error"]
    assert elsewhere(lambda: asyncio.run(store.signals.pending())) == []
