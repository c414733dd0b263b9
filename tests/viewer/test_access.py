"""Who is let in: requests of this machine, of known people, and of the viewer's own pages."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Mount

import agentfsm.viewer
from agentfsm import Actor, ConfigurationError, MemoryStore
from agentfsm.loop.keys import Keyring
from agentfsm.viewer.access import Access, Visitor
from agentfsm.viewer.viewer_page import PageError
from tests.helpers.journal_scenarios import waiting_run

SITE = "http://localhost"


def ask(app: Any, path: str, method: str = "GET", client: str = "127.0.0.1", **headers: str) -> httpx.Response:
    """The answer to a request, with headers whose underscores are dashes."""

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app, client=(client, 5000), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url=SITE) as http:
            return await http.request(method, path, headers={k.replace("_", "-"): v for k, v in headers.items()})

    return asyncio.run(send())


def by_header(request: Request) -> Actor | None:
    """Authentication of the tests: the header ``who`` names somebody."""
    who = request.headers.get("who")
    if who == "boom":
        raise ValueError("the token s3cret is wrong")
    return Actor(who, ("manager",)) if who else None


@pytest.fixture(scope="module")
def store() -> Any:
    return waiting_run(MemoryStore(), "waits")[0]


@pytest.fixture(scope="module")
def local(store: Any) -> Starlette:
    return agentfsm.viewer.app(store)


@pytest.fixture(scope="module")
def known(store: Any) -> Starlette:
    return agentfsm.viewer.app(store, authenticate=by_header, hosts=["agents.example.org"])


@pytest.mark.parametrize("path", ["/", "/run?id=waits", "/api/runs", "/api/run?run=waits", "/static/common.js"])
def test_every_answer_forbids_framing_inline_code_and_what_is_not_from_here(local: Starlette, path: str) -> None:
    answer = ask(local, path)
    assert answer.status_code == 200
    policy = dict(rule.strip().split(" ", 1) for rule in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert answer.headers["x-frame-options"] == "DENY"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "", "localhost@evil.example", "evil.example:80"]
)
def test_a_name_that_is_not_the_viewers_is_refused(local: Starlette, host: str) -> None:
    assert ask(local, "/api/runs", host=host).status_code == 421


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8642", "127.0.0.1:1", "[::1]:8642", "[::1]"])
def test_the_names_of_this_machine_are_the_viewers(local: Starlette, host: str) -> None:
    assert ask(local, "/api/runs", host=host).status_code == 200


def test_a_name_that_was_given_is_the_viewers(known: Starlette, local: Starlette) -> None:
    assert ask(known, "/api/runs", host="agents.example.org", who="ann").status_code == 200
    assert ask(local, "/api/runs", host="agents.example.org").status_code == 421
    with pytest.raises(ConfigurationError, match="without scheme and path"):
        agentfsm.viewer.app(MemoryStore(), hosts=["https://agents.example.org/"])


def test_without_authentication_only_this_machine_is_answered(local: Starlette, known: Starlette) -> None:
    assert ask(local, "/api/runs", client="192.0.2.7").status_code == 403
    assert ask(local, "/api/runs", client="::1").status_code == 200
    assert ask(known, "/api/runs", client="192.0.2.7", who="ann").status_code == 200


@pytest.mark.parametrize("header", ["forwarded", "via", "x_forwarded_for", "x_forwarded_host", "x_real_ip"])
def test_without_authentication_what_a_proxy_on_this_machine_passes_on_is_refused(
    local: Starlette, known: Starlette, header: str
) -> None:
    assert ask(local, "/api/runs", **{header: "192.0.2.7"}).status_code == 403
    assert ask(known, "/api/runs", **{header: "192.0.2.7"}, who="ann").status_code == 200


@pytest.mark.parametrize("path", ["/", "/api/runs", "/api/run?run=waits", "/api/run/events?run=waits", "/api/session"])
def test_somebody_unknown_sees_nothing(known: Starlette, path: str) -> None:
    answer = ask(known, path)
    assert answer.status_code == 401
    assert answer.json() == {"error": "sign in to see the runs"}


def test_somebody_who_opens_a_page_is_told_in_a_page(known: Starlette) -> None:
    answer = ask(known, "/inbox", accept="text/html")
    assert answer.status_code == 401
    assert answer.headers["content-type"].startswith("text/html")
    assert "sign in to see the runs" in answer.text
    assert "frame-ancestors" in answer.headers["content-security-policy"]


def test_what_an_authentication_raises_is_not_told(known: Starlette) -> None:
    answer = ask(known, "/api/runs", who="boom")
    assert answer.status_code == 401
    assert "s3cret" not in answer.text


def test_an_actor_is_who_the_app_says(known: Starlette) -> None:
    assert ask(known, "/api/session", who="ann").json()["actor"] == {"id": "ann", "roles": ["manager"]}


@pytest.mark.parametrize(
    "headers",
    [
        {"sec_fetch_site": "cross-site", "sec_fetch_mode": "no-cors"},
        {"sec_fetch_site": "cross-site", "sec_fetch_mode": "cors"},
        {"sec_fetch_site": "same-site", "sec_fetch_mode": "cors"},
        {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "iframe"},
        {"sec_fetch_site": "same-origin", "sec_fetch_mode": "navigate", "sec_fetch_dest": "object"},
    ],
)
def test_another_site_can_neither_ask_nor_frame(local: Starlette, headers: dict[str, str]) -> None:
    assert ask(local, "/api/runs", **headers).status_code == 403


def test_a_link_from_another_site_opens(local: Starlette) -> None:
    headers = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "document"}
    assert ask(local, "/", **headers).status_code == 200


def test_only_a_page_of_the_viewer_changes_something(known: Starlette) -> None:
    token = ask(known, "/api/session", who="ann").json()["token"]
    # there is nothing to post to here: 405 says that the request was let in

    def post(**headers: str) -> int:
        return ask(known, "/api/session", "POST", who=headers.pop("who", "ann"), **headers).status_code

    assert post(x_agentfsm_token=token, origin=SITE) == 405
    assert post(x_agentfsm_token=token, origin="http://evil.example") == 403
    assert post(x_agentfsm_token=token, origin="null") == 403
    assert post(x_agentfsm_token=token, sec_fetch_site="cross-site") == 403
    assert post() == 403
    assert post(x_agentfsm_token=token[:-1] + ("0" if token[-1] != "0" else "1")) == 403
    assert post(x_agentfsm_token=token, who="bob") == 403


def test_a_token_is_valid_for_its_period_and_the_next_and_under_the_same_secret_only() -> None:
    now = [0.0]

    def access(secret: bytes) -> Access:
        return Access(by_header, ("localhost",), Keyring(secret), lambda: now[0])

    first, again, other = access(b"one"), access(b"one"), access(b"two")
    ann = Visitor(Actor("ann"))

    def accepts(access: Access, token: str) -> bool:
        scope = {"type": "http", "method": "POST", "headers": [(b"x-agentfsm-token", token.encode())]}
        try:
            access.check_token(Request(scope), ann)
        except PageError:
            return False
        return True

    token = first.token(ann)
    assert accepts(again, token)
    assert not accepts(other, token)
    now[0] = 13 * 3600
    assert accepts(again, token)
    now[0] = 25 * 3600
    assert not accepts(again, token)


@pytest.mark.parametrize(
    "path", ["/nobody", "/static/nobody.js", "/static/..%2Faccess.py", "/api/run?run=nobody", "/api/run"]
)
def test_what_is_not_there_is_not_found(local: Starlette, path: str) -> None:
    answer = ask(local, path)
    assert answer.status_code == 404
    assert "content-security-policy" in answer.headers


def test_the_viewer_works_inside_another_app(store: Any) -> None:
    outer = Starlette(routes=[Mount("/agents", agentfsm.viewer.app(store))])
    page = ask(outer, "/agents/")
    assert 'src="/agents/static/runs.js"' in page.text
    assert ask(outer, "/agents/api/runs").json()["runs"][0]["id"] == "waits"
    assert ask(outer, "/agents/static/common.js").status_code == 200


def test_a_file_that_the_browser_has_is_not_sent_again(local: Starlette) -> None:
    tag = ask(local, "/static/viewer.css").headers["etag"]
    assert ask(local, "/static/viewer.css", if_none_match=tag).status_code == 304
