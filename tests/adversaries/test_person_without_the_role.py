"""A person who may answer a request, but may not decide it, attacks the request.

Each attack is what such people send, in order: replies, each with whatever the host authenticates, to a run in a SQLite
file or to a signed record, in a new agent on a newly opened store each time. After each, the payment has not run, no
vote counts that its person may not give, and nobody counts twice.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import secrets
import time
import unicodedata
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from agentfsm import (
    Actor,
    Agent,
    AgentfsmError,
    Allow,
    Approval,
    Deny,
    Edit,
    FileReplayGuard,
    GiveUp,
    Host,
    ItDidNotRun,
    ItRan,
    MemoryStore,
    Runs,
    SqliteStore,
    UserInputRequested,
    tool,
)
from agentfsm.journal.signals import read_signals
from agentfsm.loop.keys import Keyring
from agentfsm.testing import FakeClock, ScriptedModel, call
from agentfsm.viewer import app as viewer_app
from agentfsm.viewer import one_time_link
from agentfsm.viewer.passes import Pass, seal_pass, viewer_at

RULE = Approval(
    n=2, roles=("manager",), not_requester=True, validity_s=1000, escalate_to=("director",), escalate_after_s=600
)
SECRET = b"of the host, 32 bytes at the least"
ROLES = {
    "ann": ("manager",),  # requests
    "bob": ("manager",),
    "cy": ("manager",),
    "dan": ("clerk",),
    "eve": ("director",),
    "nobody": (),
    "upper": ("Manager", "MANAGER"),
    "spaced": ("manager ", " manager", "manager\n"),
    "cyrillic": ("m\u0430nager",),
    "hidden": ("man\u200bager",),
    "pattern": ("*", "manager*", ".*", "man"),
    "joined": ("manager,director", "manager director"),
    "service": ("manager-service",),
}


def plain(name: str) -> str:
    """What a careless directory makes of a name before it looks it up."""
    folded = unicodedata.normalize("NFKC", name).casefold()
    return "".join(c for c in folded if unicodedata.category(c) not in ("Cf", "Cc", "Zs"))


def authenticate(token: Any) -> Actor | None:
    """The person whose password a token has. The directory takes any spelling of a name, and keeps it."""
    if not isinstance(token, str):
        return None
    name, _, password = token.rpartition(":")
    user = plain(name)
    return Actor(name, ROLES[user]) if user in ROLES and password == f"of {user}" else None


def token(name: str) -> str:
    return f"{name}:of {plain(name)}"


class Desk:
    """A run that waits for two managers other than Ann before it pays.

    Args:
        folder: For the file of the store, or of used records.
        stored: Whether the run is in a store; else it is a signed record.
    """

    def __init__(self, folder: Path, *, stored: bool = True) -> None:
        self.folder, self.stored = folder, stored
        self.paid: list[int] = []
        self.clock = FakeClock()
        self.asked: list[UserInputRequested] = []
        self.over = False

    def play(self, work: Callable[[Agent], Any], *script: Any) -> None:
        """Let one new agent do something, as a process of its own would; errors of ours are its refusal."""
        paid = self.paid

        @tool(requires_approval=RULE)
        def pay(amount: int) -> str:
            """Pay."""
            paid.append(amount)
            return "paid"

        async def main() -> Any:
            return await work(Agent(ScriptedModel(script or ["Done."]), tools=[pay], host=host))

        settings: dict[str, Any] = {"clock": self.clock, "secret": SECRET, "authenticate": authenticate}
        if self.stored:
            with SqliteStore(self.folder / "runs.db") as store:
                host = Host(store=store, **settings)
                result = asyncio.run(main())
        else:
            host = Host(replay_guard=FileReplayGuard(self.folder / "used"), **settings)
            result = asyncio.run(main())
        if isinstance(result.outcome, UserInputRequested):
            self.asked.append(result.outcome)
        else:
            self.over = True

    def ask(self, run_id: str = "r") -> UserInputRequested:
        self.play(lambda agent: agent.run("Pay.", run_id=run_id, actor=token("ann")), call("pay", amount=5))
        return self.asked[-1]

    def reply(self, reply: Any, by: Any, run: Any = None, **more: Any) -> bool:
        """Whether the reply was taken."""
        waiting = run or ("r" if self.stored else self.asked[-1].suspension_record.to_json())
        try:
            self.play(lambda agent: agent.resume(waiting, reply, by=by, **more))
        except AgentfsmError:
            return False
        return True

    @property
    def votes(self) -> list[str]:
        quorum = self.asked[-1].quorum
        return [] if quorum is None else [plain(vote.id) for vote in quorum.votes]


class Sent(NamedTuple):
    """One reply.

    Attributes:
        reply: What is replied.
        by: Who says so, as the host gets it.
        later_s: Seconds since the reply before.
    """

    reply: Any
    by: Any
    later_s: float = 0


def allow(*names: str) -> list[Sent]:
    return [Sent(Allow(), token(name)) for name in names]


REPLIES: dict[str, list[Sent]] = {
    # without a role
    "a clerk": allow("dan", "dan"),
    "a director before it is escalated": allow("eve", "bob"),
    "somebody without roles": allow("nobody", "bob"),
    "a role in another case": allow("upper", "bob"),
    "a role with white space": allow("spaced", "bob"),
    "a role with a look-alike letter": allow("cyrillic", "bob"),
    "a role with an invisible character": allow("hidden", "bob"),
    "a role that is a pattern": allow("pattern", "bob"),
    "roles as one text": allow("joined", "bob"),
    "a role that begins like the right one": allow("service", "bob"),
    "a clerk's edit": [Sent(Edit({"amount": 1}), token("dan"))],
    "a manager's edit": [Sent(Edit({"amount": 500}), token("bob")), *allow("cy")],
    "an edit that changes nothing": [Sent(Edit({"amount": 5}), token("bob")), *allow("cy")],
    # the requester
    "the requester": allow("ann", "bob"),
    "the requester in capitals": allow("ANN", "bob"),
    "the requester with a space before": allow(" ann", "bob"),
    "the requester with a space after": allow("ann ", "bob"),
    "the requester with a line break": allow("ann\n", "bob"),
    "the requester full-width": allow("\uff41\uff4e\uff4e", "bob"),
    "the requester with an invisible character": allow("a\u200bnn", "bob"),
    # the same person again
    "one manager twice": allow("bob", "bob"),
    "one manager in two cases": allow("bob", "Bob"),
    "one manager in capitals": allow("BOB", "bob"),
    "one manager with a space": allow("bob", "bob "),
    "one manager with a tab": allow("bob", "\tbob"),
    "one manager with a no-break space": allow("bob", "bob\u00a0"),
    "one manager full-width": allow("bob", "\uff42\uff4f\uff42"),
    "one manager with a zero-width joiner": allow("bob", "b\u200dob"),
    "one manager with a soft hyphen": allow("bob", "bo\u00adb"),
    "one manager under sixteen spellings": allow(*(" " * n + "bob" for n in range(16))),
    # who the host does not vouch for
    "nobody": [Sent(Allow(), None), *allow("bob")],
    "a name": [Sent(Allow(), "bob"), *allow("cy")],
    "an empty name": [Sent(Allow(), ""), *allow("bob")],
    "an actor": [Sent(Allow(), Actor("bob", ("manager",))), *allow("cy")],
    "an actor who says that he is verified": [Sent(Allow(), Actor("bob", ("manager",), verified=True)), *allow("cy")],
    "a wrong password": [Sent(Allow(), "bob:of cy"), *allow("cy")],
    "a token in a list": [Sent(Allow(), [token("bob")]), *allow("cy")],
    "a token as bytes": [Sent(Allow(), token("bob").encode()), *allow("cy")],
    "true": [Sent(Allow(), True), *allow("cy")],
    # other replies
    "the word yes": [Sent("yes", token("bob")), *allow("cy")],
    "the word Allow()": [Sent("Allow()", token("dan"))],
    "that it ran": [Sent(ItRan("paid"), token("dan")), Sent(ItRan("paid"), token("bob"))],
    "that it did not run": [Sent(ItDidNotRun(), token("dan")), Sent(ItDidNotRun(), token("bob"))],
    "that it is given up": [Sent(GiveUp(), token("dan")), Sent(GiveUp(), token("bob"))],
    "a clerk's denial": [Sent(Deny("no"), token("dan")), *allow("bob")],
    "nothing": [Sent(None, token("dan")), *allow("bob")],
    # time
    "the second vote after the request has expired": [*allow("bob"), Sent(Allow(), token("cy"), 1001)],
    "escalated too early": [Sent(None, token("dan"), 599), *allow("eve", "bob")],
    "a clerk after the escalation": [Sent(Allow(), token("dan"), 601), *allow("bob")],
    "the requester after the escalation": [Sent(Allow(), token("ann"), 601), *allow("eve")],
    "a director twice after the escalation": [Sent(Allow(), token("eve"), 601), *allow("Eve")],
    "the clock set back before the second vote": [*allow("bob"), Sent(Allow(), token("bob"), -900)],
}


@pytest.mark.parametrize("name", REPLIES)
@pytest.mark.parametrize("stored", [True, False], ids=["stored", "record"])
def test_no_attack_with_replies_succeeds(name: str, stored: bool, tmp_path: Path) -> None:
    desk = Desk(tmp_path, stored=stored)
    desk.ask()
    for sent in REPLIES[name]:
        desk.clock.jump(sent.later_s)
        desk.reply(sent.reply, sent.by)
    assert (desk.paid, desk.over) == ([], False)
    assert len(set(desk.votes)) == len(desk.votes) <= 1
    assert set(desk.votes) <= {"bob", "cy", "eve"}
    assert "eve" not in desk.votes or sum(sent.later_s for sent in REPLIES[name]) >= 600


def _use_the_first_record_again(desk: Desk) -> None:
    first = desk.asked[0].suspension_record.to_json()
    desk.reply(Allow(), token("bob"))
    for name in ("bob", "cy", "cy"):
        desk.reply(Allow(), token(name), run=first)


def _edited(change: Callable[[Any], None]) -> Callable[[Desk], None]:
    """Change every object of a record, and reply to it as the clerk and as a manager."""

    def walk(node: Any) -> None:
        if isinstance(node, list):
            for item in cast("list[Any]", node):
                walk(item)
        elif isinstance(node, dict):
            change(node)
            for item in cast("dict[str, Any]", node).values():
                walk(item)

    def attack(desk: Desk) -> None:
        record = json.loads(desk.asked[0].suspension_record.to_json())
        walk(record)
        assert record != json.loads(desk.asked[0].suspension_record.to_json())
        for name in ("dan", "ann", "bob"):
            desk.reply(Allow(), token(name), run=json.dumps(record))

    return attack


def _set(name: str, value: Any) -> Callable[[Desk], None]:
    def change(node: Any) -> None:
        if name in node:
            node[name] = value

    return _edited(change)


RECORDS: dict[str, Callable[[Desk], None]] = {
    "a record that was used": _use_the_first_record_again,
    "another number of approvals": _set("n", 1),
    "other roles": _set("roles", ["clerk"]),
    "no roles": _set("roles", []),
    "the requester may approve": _set("not_requester", False),
    "another requester": _set("requester", None),
    "votes added": _set("votes", [{"id": "cy", "roles": ["manager"], "kind": "person", "verified": True}]),
    "escalated": _set("escalated", True),
    "other arguments": _set("arguments", {"amount": 500}),
    "another time of expiry": _set("expires_at", 9e9),
    "no signature": _set("signature", ""),
    "another id": _set("record_id", "0" * 16),
}


@pytest.mark.parametrize("name", RECORDS)
def test_no_attack_with_a_record_succeeds(name: str, tmp_path: Path) -> None:
    desk = Desk(tmp_path, stored=False)
    desk.ask()
    RECORDS[name](desk)
    assert (desk.paid, desk.over) == ([], False)
    assert desk.votes in ([], ["bob"])


BOUND_TO: dict[str, Callable[[str, str], Any]] = {
    "nothing": lambda mine, other: "",
    "white space": lambda mine, other: " ",
    "zeros": lambda mine, other: "0" * 64,
    "false": lambda mine, other: False,
    "zero": lambda mine, other: 0,
    "a list": lambda mine, other: [],
    "a pattern": lambda mine, other: "*",
    "eleven digits": lambda mine, other: mine[:11],
    "the digest of another run": lambda mine, other: other,
    "half of each": lambda mine, other: mine[:12] + other[12:],
    "more than the digest": lambda mine, other: mine + "0",
    "the digest and white space": lambda mine, other: mine + " ",
}


@pytest.mark.parametrize("name", BOUND_TO)
def test_no_vote_counts_that_is_bound_to_something_else(name: str, tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    other, mine = desk.ask("other").digest, desk.ask("r").digest
    for voter in ("bob", "cy"):
        assert not desk.reply(Allow(), token(voter), to=BOUND_TO[name](str(mine), str(other)))
    assert (desk.paid, desk.votes) == ([], [])


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "record"])
@pytest.mark.parametrize("by", [None, "bob", "bob:of cy", token("dan"), token("nobody")])
def test_who_may_not_decide_a_request_cannot_dismiss_it(by: Any, stored: bool, tmp_path: Path) -> None:
    desk = Desk(tmp_path, stored=stored)
    desk.ask()
    waiting = "r" if stored else desk.asked[-1].suspension_record.to_json()
    with pytest.raises(AgentfsmError):
        desk.play(lambda agent: agent.dismiss(waiting, "no", by=by))
    desk.reply(Allow(), token("bob"))
    assert (desk.votes, desk.over) == (["bob"], False)
    desk.play(lambda agent: agent.dismiss(waiting if stored else desk.asked[-1].suspension_record, by=token("cy")))
    assert (desk.paid, desk.over) == ([], True)


def test_two_managers_other_than_the_requester_can_approve(tmp_path: Path) -> None:
    """Without this, a host that refuses everybody would stand every attack."""
    for stored in (True, False):
        desk = Desk(tmp_path, stored=stored)
        desk.ask()
        assert desk.reply(Allow(), token("bob"), to=desk.asked[-1].digest if stored else None)
        assert desk.reply(Allow(), token("Cy"))
        assert desk.paid == [5]


# -- with links to the viewer ---------------------------------------------------------------------------


LinkAttack = Callable[["Mail"], Awaitable[list[httpx.Response]]]
SITE, OTHER_SITE, OTHER_PATH = (
    "https://agents.example.org/agents",
    "https://other.example.org/agents",
    "https://agents.example.org/more/agents",
)


class Mail:
    """Viewers of one store, which another run waits in, and links in the mail to those who may answer.

    Args:
        desk: Where the runs ``r`` and ``r2`` wait for two managers.
        store: Its store, open.
    """

    def __init__(self, desk: Desk, store: SqliteStore) -> None:
        self.desk, self.store = desk, store
        self._clients = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Mail:
        await self._clients.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._clients.__aexit__(None, None, None)

    def link(self, name: str, run_id: str = "r", site: str = SITE, *, age_s: float = 0) -> str:
        """The secret part of a link that was sent to somebody, good for an hour."""
        actor, now = Actor(name, ROLES[plain(name)]), time.time() - age_s
        return one_time_link(f"{site}/", run_id, actor, secret=SECRET, validity_s=3600, now=now).partition("#")[2]

    async def browser(self, site: str = SITE, used: str = "links", store: Any = None) -> httpx.AsyncClient:
        """A browser at a viewer in a process of its own, with a folder of used links."""
        app = viewer_app(
            self.store if store is None else store,
            secret=SECRET,
            authenticate=lambda request: None,
            hosts=["agents.example.org", "other.example.org"],
            replay_guard=FileReplayGuard(self.desk.folder / used),
        )
        mounted = Starlette(routes=[Mount(httpx.URL(site).path, app)])
        client = httpx.AsyncClient(transport=httpx.ASGITransport(mounted), base_url=site)
        return await self._clients.enter_async_context(client)

    async def opens(self, text: str, **where: Any) -> tuple[httpx.AsyncClient, httpx.Response]:
        """A browser in which a link was opened, and what it was answered."""
        browser = await self.browser(**where)
        return browser, await browser.post("/api/link", json={"token": text})

    async def sent(self) -> list[str]:
        """Whose answers and cancellations wait to be acted on."""
        signals = await read_signals(self.store.signals, Keyring(SECRET))
        return [each.actor.id if each.actor is not None else "" for each in signals]

    async def allows(self, browser: httpx.AsyncClient, run_id: str = "r", **changed: Any) -> httpx.Response:
        """The answer to a page that allows what a run waits for."""
        token = (await browser.get("/api/session")).json().get("token", "")
        asked = next(each for each in self.desk.asked if each.run_id == run_id)
        body = {"run": run_id, "to": asked.digest, "reply": {"kind": "allow"}, **changed}
        return await browser.post("/api/inbox/answer", json=body, headers={"x-agentfsm-token": token})


async def _bob(mail: Mail, **where: Any) -> httpx.AsyncClient:
    browser, opened = await mail.opens(mail.link("bob"), **where)
    assert opened.status_code == 200
    return browser


async def _again(mail: Mail) -> list[httpx.Response]:
    text = mail.link("bob")
    await mail.opens(text)
    return [(await mail.opens(text))[1], (await mail.opens(f" {text}"))[1], (await mail.opens(f"{text}="))[1]]


async def _at_once(mail: Mail) -> list[httpx.Response]:
    text = mail.link("bob")
    opened = await asyncio.gather(*(mail.opens(text) for _ in range(8)))
    answers = sorted((answer for _, answer in opened), key=lambda answer: answer.status_code)
    assert answers[0].status_code == 200
    return answers[1:]


def _in_another_viewer(site: str) -> LinkAttack:
    async def attack(mail: Mail) -> list[httpx.Response]:
        text = mail.link("bob")
        await mail.opens(text)
        return [(await mail.opens(text, site=site, used="other"))[1]]

    return attack


def _of_another_viewer(site: str) -> LinkAttack:
    return _opening(lambda mail: mail.link("bob", site=site))


def _for_another_store(site: str) -> LinkAttack:
    async def attack(mail: Mail) -> list[httpx.Response]:
        async with MemoryStore() as store:
            browser, opened = await mail.opens(mail.link("bob", site=site), site=site, used="o", store=store)
            assert opened.status_code == 200
            here = await mail.browser()
            here.cookies.update(dict(browser.cookies.items()))
            return [await here.get("/api/inbox"), await mail.allows(here)]

    return attack


def _opening(change: Callable[[Mail], str]) -> LinkAttack:
    async def attack(mail: Mail) -> list[httpx.Response]:
        return [(await mail.opens(change(mail)))[1]]

    return attack


def _forged(place: int, value: Any) -> LinkAttack:
    """A link to somebody else in which something is changed, under the seal that it had."""

    def change(mail: Mail) -> str:
        body, _, seal = mail.link("dan").partition(".")
        fields = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
        fields[place] = value
        return f"{base64.urlsafe_b64encode(json.dumps(fields).encode()).decode().rstrip('=')}.{seal}"

    return _opening(change)


def _as_somebody(name: str, run_id: str = "r", then: str = "r") -> LinkAttack:
    async def attack(mail: Mail) -> list[httpx.Response]:
        browser, opened = await mail.opens(mail.link(name, run_id))
        assert opened.status_code == 200
        return [await mail.allows(browser, then)]

    return attack


async def _look_at_others(mail: Mail) -> list[httpx.Response]:
    browser = await _bob(mail)
    paths = ("/", "/api/runs", "/api/run?run=r2", "/api/run/records?run=r2", "/api/statistics", "/api/verification")
    return [await browser.get(path) for path in paths]


async def _a_link_as_a_cookie(mail: Mail) -> list[httpx.Response]:
    browser = await _bob(mail)
    (name,) = browser.cookies
    thief = await mail.browser()
    thief.cookies.set(name, mail.link("bob"))
    return [await thief.get("/api/inbox"), (await mail.opens(browser.cookies[name]))[1]]


async def _an_old_session(mail: Mail) -> list[httpx.Response]:
    browser = await _bob(mail)
    (name,) = browser.cookies
    ended = Pass(Actor("bob", ("manager",), verified=True), "r", time.time() - 1, "0", viewer_at(SITE))
    thief = await mail.browser()
    thief.cookies.set(name, seal_pass("session", ended, Keyring(SECRET)))
    return [await thief.get("/api/inbox"), await mail.allows(thief)]


def _with_headers(**headers: str) -> LinkAttack:
    """A page of another site, or one without the token, that has the browser of Bob answer."""

    async def attack(mail: Mail) -> list[httpx.Response]:
        browser = await _bob(mail)
        token = (await browser.get("/api/session")).json()["token"]
        dan, _ = await mail.opens(mail.link("dan"))
        his = (await dan.get("/api/session")).json()["token"]
        sent = {name.replace("_", "-"): value.format(token=token, his=his) for name, value in headers.items()}
        body = {"run": "r", "to": mail.desk.asked[0].digest, "reply": {"kind": "allow"}}
        return [await browser.post("/api/inbox/answer", json=body, headers=sent)]

    return attack


async def _vote_twice(mail: Mail) -> list[httpx.Response]:
    assert (await mail.allows(await _bob(mail))).status_code == 200
    capitals, _ = await mail.opens(mail.link("BOB"))
    return [await mail.allows(await _bob(mail)), await mail.allows(capitals)]


async def _vote_for_another(mail: Mail) -> list[httpx.Response]:
    browser = await _bob(mail)
    assert (await mail.allows(browser, by="cy", actor={"id": "cy", "roles": ["manager"]})).status_code == 200
    return [await mail.allows(browser, by="cy")]


async def _after_a_redaction(mail: Mail) -> list[httpx.Response]:
    browser = await _bob(mail)
    request = (await Runs(mail.store).get("r")).request
    assert request is not None
    assert await Runs(mail.store, secret=SECRET).redact("r", str(request.seq)) > 0
    return [await mail.allows(browser)]


async def _after_a_denial(mail: Mail) -> list[httpx.Response]:
    browser = await _bob(mail)
    await Runs(mail.store, secret=SECRET, authenticate=authenticate).deny("r", "no", by=token("cy"))
    return [await mail.allows(browser)]


async def _use_it_up(mail: Mail) -> list[httpx.Response]:
    """Whatever scans mail or fetches pages ahead: the link works for Bob afterwards."""
    text, scanner = mail.link("bob"), await mail.browser()
    ahead = {"sec-purpose": "prefetch", "purpose": "prefetch"}
    answers = [
        await scanner.request(method, path, headers=ahead, params={"token": text})
        for method in ("HEAD", "GET", "OPTIONS", "PUT", "DELETE")
        for path in ("/link", "/api/link")
    ]
    assert not any("set-cookie" in answer.headers for answer in answers)
    assert (await mail.opens(text))[1].status_code == 200
    return [await scanner.post("/api/link", params={"token": text}, content=b""), await scanner.get("/api/inbox")]


LINKS: dict[str, LinkAttack] = {
    "again": _again,
    "in many processes at once": _at_once,
    "in another viewer, where it is not used": _in_another_viewer(OTHER_SITE),
    "in the viewer at another path, where it is not used": _in_another_viewer(OTHER_PATH),
    "to another viewer": _of_another_viewer(OTHER_SITE),
    "to the viewer at another path": _of_another_viewer(OTHER_PATH),
    "with the session of another viewer": _for_another_store(OTHER_SITE),
    "with the session of the viewer at another path": _for_another_store(OTHER_PATH),
    "of the day before": _opening(lambda mail: mail.link("bob", age_s=86_400)),
    "guessed": _opening(lambda mail: secrets.token_urlsafe(90) + "." + secrets.token_hex(32)),
    "without its seal": _opening(lambda mail: mail.link("bob").partition(".")[0]),
    "with half of its seal": _opening(lambda mail: mail.link("bob")[:-32]),
    "with another's seal": _opening(
        lambda mail: mail.link("bob").partition(".")[0] + "." + mail.link("dan").partition(".")[2]
    ),
    "under another secret": _opening(
        lambda mail: one_time_link(SITE, "r", Actor("bob", ("manager",)), secret=b"guessed").partition("#")[2]
    ),
    "with another name": _forged(1, "bob"),
    "with another role": _forged(2, ["manager"]),
    "with another run": _forged(5, "r2"),
    "with all runs": _forged(5, ""),
    "with more time": _forged(6, 9e12),
    "as a session": _forged(0, "session"),
    "of a clerk": _as_somebody("dan"),
    "of the requester": _as_somebody("ann"),
    "of a director before it is escalated": _as_somebody("eve"),
    "of a role with white space": _as_somebody("spaced"),
    "for another run": _as_somebody("bob", "r2"),
    "for a run whose id begins the same": _as_somebody("bob", "r", "r2"),
    "for this run, to look at others": _look_at_others,
    "as a cookie, and a cookie as a link": _a_link_as_a_cookie,
    "with a session that has ended": _an_old_session,
    "without the token of the page": _with_headers(),
    "with the token of somebody else": _with_headers(x_agentfsm_token="{his}"),
    "from another site": _with_headers(x_agentfsm_token="{token}", origin="https://evil.example"),
    "from a script of another site": _with_headers(
        x_agentfsm_token="{token}", sec_fetch_site="cross-site", sec_fetch_mode="cors"
    ),
    "twice, in two spellings": _vote_twice,
    "in the name of another manager": _vote_for_another,
    "after a redaction": _after_a_redaction,
    "after another's denial": _after_a_denial,
    "by what fetches it ahead": _use_it_up,
}


SENT_BY = {
    "twice, in two spellings": ["bob"],
    "in the name of another manager": ["bob"],
    "after another's denial": ["cy"],
}
"""Whose answers wait after an attack: those that they gave themselves."""


@pytest.mark.parametrize("name", LINKS)
def test_no_attack_with_a_link_succeeds(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    desk = Desk(tmp_path)
    desk.clock = FakeClock(time.time())  # the viewer's
    desk.ask()
    desk.ask("r2")

    async def play() -> tuple[list[httpx.Response], list[str]]:
        async with SqliteStore(tmp_path / "runs.db") as store, Mail(desk, store) as mail:
            return await LINKS[name](mail), await mail.sent()

    answers, sent = asyncio.run(play())
    assert [answer.status_code for answer in answers if answer.status_code < 400] == []
    assert sent == SENT_BY.get(name, [])
    assert not any("canary" in answer.text or "Pay." in answer.text for answer in answers)
    assert desk.paid == []
    assert SECRET.decode() not in caplog.text
    assert "eyJ" not in caplog.text  # as a pass begins, in base64
    assert '"link"' not in caplog.text


def test_a_link_lets_two_managers_approve(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.clock = FakeClock(time.time())
    desk.ask()

    async def play() -> list[int]:
        async with SqliteStore(tmp_path / "runs.db") as store, Mail(desk, store) as mail:
            browsers = [(await mail.opens(mail.link(name)))[0] for name in ("bob", "cy")]
            return [(await mail.allows(browser)).status_code for browser in browsers]

    assert asyncio.run(play()) == [200, 200]


def test_the_attacks_are_counted(counted: Callable[[str], None]) -> None:
    count = 2 * len(REPLIES) + len(RECORDS) + len(BOUND_TO) + len(LINKS)
    assert len(REPLIES) >= 40
    counted(f"a person without the role: {count} attacks, 0 succeeded")
