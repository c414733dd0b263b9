"""The inbox in a real browser: answers of every kind, votes of two people, and what comes too late."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

import agentfsm.viewer
from agentfsm import Actor, Agent, AgentGuardrails, Approval, Deny, Host, MemoryStore, SqliteStore, tool
from agentfsm.integrations.mcp import MCPSettings, MCPTools
from agentfsm.testing import ScriptedModel, call
from tests.helpers import company_runs
from tests.helpers.browser import elsewhere, has_count, has_text, site_page
from tests.helpers.mcp_servers import SdkServer
from tests.helpers.ports import own_port
from tests.helpers.viewer_server import served

SECRET = b"of the tests"


@tool(requires_approval=True)
def pay(to: str, amount: int, express: bool = False) -> str:
    """Pay somebody.

    Args:
        to: Who is paid.
        amount: Cents.
        express: Today.
    """
    return f"paid {amount} to {to}{' at once' if express else ''}"


@tool(requires_approval=Approval(n=2, roles=("manager",), not_requester=True))
def remove(path: str) -> str:
    """Remove a file."""
    return f"removed {path}"


class LastWord:
    """Plays the model after an answer: it says what the last message was."""

    name = "last word"

    async def reply(self, request: Any) -> Any:
        from agentfsm import Message, Reply

        return Reply(Message.assistant(f"Heard: {request.messages[-1].content}"))


def by_header(request: Request) -> Actor | None:
    """Authentication of the tests: the header ``who`` names somebody, and after a colon their roles."""
    name, _, roles = request.headers.get("who", "").partition(":")
    return Actor(name, tuple(filter(None, roles.split(",")))) if name else None


def asking(store: Any, *script: Any, preset: str = "standard", **more: Any) -> Agent[Any, Any]:
    host = Host(store=store, secret=SECRET)
    return Agent(ScriptedModel(script), tools=[pay, remove], host=host, preset=preset, **more)


def answering(store: Any, **more: Any) -> Agent[Any, Any]:
    return Agent(LastWord(), tools=[pay, remove], host=Host(store=store, secret=SECRET), **more)  # type: ignore[arg-type]


@pytest.fixture
def store() -> Any:
    return MemoryStore()


@pytest.fixture
def site(store: Any) -> Iterator[str]:
    with served(agentfsm.viewer.app(store, agents=[answering(store)], authenticate=by_header)) as address:
        yield address


def asks(store: Any, run_id: str, *script: Any, actor: str = "ann", **more: Any) -> None:
    elsewhere(lambda: asking(store, *script, **more).run_sync("Pay Bob.", run_id=run_id, actor=actor))


def output(store: Any, run_id: str) -> str:
    """What a run said at its end."""
    from agentfsm.report import read_ledger

    return read_ledger(run_id, elsewhere(lambda: asyncio.run(store.records(run_id)))).answer


def decisions(store: Any, run_id: str) -> list[tuple[str, str, bool]]:
    from agentfsm.report import read_ledger

    ledger = read_ledger(run_id, elsewhere(lambda: asyncio.run(store.records(run_id))))
    return [(each.by, each.answer, each.verified) for each in ledger.decisions]


@pytest.mark.slow
def test_an_approval_shows_exactly_what_is_asked_and_allow_runs_it(browser: Any, site: str, store: Any) -> None:
    asks(store, "one", call("pay", to="Bob\u202e", amount=500))
    with site_page(browser, site, headers={"who": "mia:manager"}) as (page, events):
        page.goto("/inbox")
        card = page.locator("article[data-run=one]")
        has_text(card, "May 'pay' run with these arguments?")
        assert card.locator(".arguments").inner_text().split() == ["amount", "500", "to", "Bob\u27e8U+202E\u27e9"]
        assert "ann" in card.inner_text()
        card.get_by_role("button", name="Allow").click()
        has_text(card, "Sent; the run goes on.")
        card.get_by_role("button", name="Put away").click()
        page.get_by_role("link", name="Runs").click()
        has_text(page.locator("tr[data-run=one]"), "completed")
        assert events == []
    assert output(store, "one") == "Heard: paid 500 to Bob\u202e"
    assert decisions(store, "one") == [("mia (manager)", "allow", True)]


@pytest.mark.slow
def test_two_people_vote_and_nobody_twice(browser: Any, site: str, store: Any) -> None:
    asks(store, "two", call("remove", path="old.txt"), actor="mia")
    with ExitStack() as stack:
        mia, bob, cy, eve = (
            stack.enter_context(site_page(browser, site, headers={"who": who})).page
            for who in ("mia:manager", "bob:manager", "cy:manager", "eve:clerk")
        )
        eve.goto("/inbox")
        has_text(eve.locator("main"), "Nothing waits for you.")
        eve.get_by_label("Only what I may answer").uncheck()
        has_text(eve.locator("article"), "may answer")
        has_count(eve.get_by_role("button", name="Allow"), 0)
        mia.goto("/inbox")
        has_text(mia.locator("main"), "Nothing waits for you.")
        mia.get_by_label("Only what I may answer").uncheck()
        has_text(mia.locator("article"), "whoever requests the run may not approve")
        cy.goto("/inbox")
        has_text(cy.locator("article"), "0 of 2 approvals by manager, not by the requester")
        has_count(cy.get_by_role("button", name="Edit…"), 0)
        bob.goto("/inbox")
        bob.get_by_role("button", name="Allow").click()
        has_text(bob.locator("article").first, "Sent")
        has_text(cy.locator("article"), "1 of 2 approvals")
        has_text(cy.locator("article"), "approved by bob (manager)")
        bob.reload()
        has_text(bob.locator("article"), "has approved this call already")
        cy.get_by_role("button", name="Allow").click()
        has_text(cy.locator("article").first, "Sent")
        cy.goto("/run?id=two")
        has_text(cy.locator(".about"), "completed")
    assert decisions(store, "two") == [("bob (manager)", "allow", True), ("cy (manager)", "allow", True)]
    assert output(store, "two") == "Heard: removed old.txt"


@pytest.mark.slow
def test_a_call_of_a_requester_who_is_only_claimed_can_be_denied_and_not_allowed(browser: Any, store: Any) -> None:
    asks(store, "claimed", call("remove", path="old.txt"), actor="mia")
    host = Host(store=store, secret=SECRET, authenticate=lambda token: None)
    agent = Agent(LastWord(), tools=[pay, remove], host=host)  # type: ignore[arg-type]
    viewer = agentfsm.viewer.app(store, agents=[agent], authenticate=by_header)
    with (
        served(viewer) as site,
        site_page(browser, site, headers={"who": "eve:clerk"}) as (eve, _),
        site_page(browser, site, headers={"who": "bob:manager"}) as (bob, events),
    ):
        eve.goto("/inbox")
        has_text(eve.locator("main"), "Nothing waits for you.")
        bob.goto("/inbox")
        has_text(bob.locator("article"), "nobody vouched for its requester (mia, claimed, not verified)")
        has_count(bob.get_by_role("button", name="Allow"), 0)
        token = bob.request.get("/api/session").json()["token"]
        digest = bob.request.get("/api/inbox").json()["requests"][0]["digest"]
        body = {"run": "claimed", "to": digest, "reply": {"kind": "allow"}}
        refused = bob.request.post("/api/inbox/answer", data=body, headers={"x-agentfsm-token": token})
        assert "nobody vouched for its requester" in refused.text()
        bob.get_by_role("button", name="Deny…").click()
        bob.get_by_role("button", name="Deny", exact=True).click()
        has_text(bob.locator("article"), "Sent; the run goes on.")
        bob.goto("/run?id=claimed")
        has_text(bob.locator(".about"), "completed")
        assert events == []
    assert decisions(store, "claimed") == [("bob (manager)", "deny", True)]


@pytest.mark.slow
def test_an_answer_that_comes_too_late_is_refused_and_says_so(browser: Any, site: str, store: Any) -> None:
    asks(store, "late", call("pay", to="Bob", amount=1))
    with site_page(browser, site, headers={"who": "mia"}) as (page, _):
        page.goto("/inbox")
        page.get_by_role("button", name="Deny…").click()
        page.get_by_label("Why, for the model").fill("not today")
        digest = json.loads(page.request.get("/api/inbox").text())["requests"][0]["digest"]
        again = asking(store, call("pay", to="Carl", amount=2))
        elsewhere(lambda: again.resume_sync("late", Deny("by somebody else"), by="cy"))
        has_text(page.locator("article").first, "does not ask this any more")
        has_text(page.locator("article").nth(1), "Carl")
        token = page.request.get("/api/session").json()["token"]
        answer = page.request.post(
            "/api/inbox/answer",
            data={"run": "late", "to": digest, "reply": {"kind": "allow"}},
            headers={"x-agentfsm-token": token},
        )
        assert answer.status == 409
        assert "now asks something else" in answer.json()["error"]
    assert [answer for _, answer, _ in decisions(store, "late")] == ["deny"]


def test_a_click_that_is_overtaken_is_refused_in_the_page(browser: Any, site: str, store: Any) -> None:
    asks(store, "late", call("pay", to="Bob", amount=1))
    with site_page(browser, site, headers={"who": "mia"}) as (page, _):
        page.route("**/api/inbox/events*", _once_only())
        page.goto("/inbox")
        page.get_by_role("button", name="Allow").wait_for()
        again = asking(store, call("pay", to="Carl", amount=2))
        elsewhere(lambda: again.resume_sync("late", Deny("by somebody else"), by="cy"))
        page.get_by_role("button", name="Allow").first.click()
        has_text(page.locator("article").first, "Refused, nothing was answered: the run now asks something else")


def _once_only() -> Any:
    """The first events of a page get through; its news does not, as on a slow network: it asks again in an hour."""

    def handle(route: Any) -> None:
        answer = route.fetch(url=route.request.url.replace("/inbox/events", "/inbox"))
        route.fulfill(body=f"retry: 3600000\ndata: {answer.text()}\n\n", content_type="text/event-stream")

    return handle


@pytest.mark.slow
def test_an_edit_marks_what_is_changed_and_keeps_what_is_not(browser: Any, site: str, store: Any) -> None:
    asks(store, "edit", call("pay", to="Bob", amount=12345678901234567890))
    with site_page(browser, site, headers={"who": "mia"}) as (page, events):
        page.goto("/inbox")
        page.get_by_role("button", name="Edit…").click()
        form = page.get_by_role("form", name="Allow with these arguments")
        assert "Who is paid." in form.inner_text()
        assert form.get_by_label("amount").input_value() == "12345678901234567890"
        form.get_by_label("amount").fill("lots")
        form.get_by_role("button", name="Allow with these arguments").click()
        assert form.locator(":invalid").count() >= 1
        form.get_by_label("amount").fill("12345678901234567890")
        has_count(form.locator(".field.changed"), 0)
        form.get_by_label("to", exact=False).first.fill("Carla")
        form.get_by_label("express").check()
        has_count(form.locator(".field.changed"), 2)
        assert 'was: "Bob"' in form.inner_text()
        form.get_by_role("button", name="Allow with these arguments").click()
        has_text(page.locator("article"), "Sent")
        page.goto("/run?id=edit")
        has_text(page.locator(".about"), "completed")
        assert events == []
    assert "paid 12345678901234567890 to Carla at once" in output(store, "edit")


@pytest.mark.slow
def test_a_question_is_answered_and_a_run_is_cancelled(browser: Any, store: Any) -> None:
    funnel = answering(store, preset="funnel")
    with served(agentfsm.viewer.app(store, agents=[funnel], authenticate=by_header)) as site:
        asks(store, "asks", call("ask_user", question="Which Bob?"), preset="funnel")
        asks(store, "drop", call("ask_user", question="Really?"), preset="funnel")
        with site_page(browser, site, headers={"who": "mia"}, width=390) as (page, events):
            page.goto("/inbox")
            card = page.locator("article[data-run=asks]")
            card.get_by_role("button", name="Answer…").click()
            page.keyboard.type("The one in sales")
            card.get_by_role("button", name="Answer", exact=True).click()
            has_text(card, "Sent")
            card = page.locator("article[data-run=drop]")
            card.get_by_role("button", name="Cancel the run…").click()
            page.keyboard.type("no longer needed")
            card.get_by_role("button", name="Cancel the run", exact=True).click()
            has_text(card, "Sent")
            page.goto("/run?id=drop")
            has_text(page.locator(".about"), "cancelled")
            assert page.evaluate("document.documentElement.scrollWidth") <= 390
            assert events == []
    assert ("mia", "text", True) in decisions(store, "asks")


@pytest.mark.slow
def test_an_edit_that_the_process_with_the_agent_refuses_can_be_made_again(browser: Any, store: Any) -> None:
    asks(store, "one", call("pay", to="Bob", amount=500))
    viewer = agentfsm.viewer.app(store, secret=SECRET, authenticate=by_header)  # without the agent, which is elsewhere

    async def act() -> None:
        run = await answering(store).next_run("one")
        if run is not None:
            await run

    def edit(card: Any, amount: str) -> None:
        card.get_by_role("button", name="Edit…").click()
        card.get_by_label("amount").fill(amount)
        card.get_by_role("button", name="Allow with these arguments").click()

    with served(viewer) as site, site_page(browser, site, headers={"who": "mia"}) as (page, events):
        page.goto("/inbox")
        card = page.locator("article[data-run=one]")
        edit(card, "5.5")
        has_text(card, "Sent. A process that has the agent acts on it.")
        elsewhere(lambda: asyncio.run(act()))
        has_text(card, "The last answer, by mia (edit), was refused")
        has_text(card, "not valid for 'pay'")
        edit(card, "501")
        has_text(card, "Sent. A process that has the agent acts on it.")
        elsewhere(lambda: asyncio.run(act()))
        assert events == []
    assert output(store, "one").splitlines()[0] == "Heard: paid 501 to Bob"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("button", "text", "sent", "result"),
    [
        ("It ran…", "The bank has booked it.", "It ran", "The bank has booked it."),
        ("Nobody knows: go on without it", "", "", "It is not known whether this call ran, and it was given up."),
    ],
)
def test_a_call_in_doubt_is_settled(
    browser: Any, tmp_path: Path, button: str, text: str, sent: str, result: str
) -> None:
    file = tmp_path / "runs.db"
    elsewhere(lambda: company_runs.crash(file))
    with elsewhere(lambda: SqliteStore(file)) as store:
        agent = elsewhere(lambda: company_runs.accountant(store, company_runs.says("So be it.")))
        viewer = agentfsm.viewer.app(store, agents=[agent], authenticate=by_header)
        with served(viewer) as site, site_page(browser, site, headers={"who": "mia"}) as (page, events):
            page.goto("/inbox")
            card = page.locator("article[data-run=transfer]")
            has_text(card, "it is not known whether it ran")
            assert "DE89 3704 0044 0532 0130 00" in card.locator(".arguments").inner_text()
            card.get_by_role("button", name=button).click()
            if text:
                page.keyboard.type(text)
                card.get_by_role("button", name=sent, exact=True).click()
            has_text(card, "Sent; the run goes on.")
            page.goto("/run?id=transfer")
            has_text(page.locator(".about"), "completed")
            has_text(
                page.locator("[data-part=decisions]"),
                "stopped by dispatch_tool.in_doubt (did not hold: cancelled, aborted, approval_required)",
            )
            page.locator("[data-part=transcript] summary").click()
            has_text(page.locator("[data-part=transcript]"), result)
            assert events == []


def test_a_choice_of_a_tool_that_asks_is_a_button(browser: Any, tmp_path: Path) -> None:
    store = MemoryStore()
    question = company_runs.says("", ("choose_account", {"customer": "Ray"}))
    asking = elsewhere(lambda: company_runs.accountant(store, question, company_runs.says("Closed.")))
    elsewhere(lambda: asking.run_sync("Close the account of Ray.", run_id="choice"))
    viewer = agentfsm.viewer.app(store, agents=[asking], authenticate=by_header)
    with served(viewer) as site, site_page(browser, site, headers={"who": "mia"}) as (page, events):
        page.goto("/inbox")
        card = page.locator("article[data-run=choice]")
        has_text(card, "Which account of Ray is meant?")
        card.get_by_role("button", name="USD", exact=True).click()
        has_text(card, "Sent; the run goes on.")
        page.goto("/run?id=choice")
        has_text(page.locator(".about"), "completed")
        assert events == []
    assert decisions(store, "choice") == [("mia", "text", True)]


HOLD_ANSWERS = """
const ask = window.fetch;
window.fetch = async (...asked) => {
  const answer = await ask(...asked);
  if (String(asked[0]).includes('/inbox/answer')) await new Promise((done) => { window.letAnswerThrough = done; });
  return answer;
};
"""
"""A page with it does not see what the server says to an answer before the test lets it through."""


def test_a_request_whose_run_goes_on_before_the_answer_is_confirmed_says_that_it_was_sent(browser: Any) -> None:
    store = MemoryStore()
    question = company_runs.says("", ("choose_account", {"customer": "Ray"}))
    asking = elsewhere(lambda: company_runs.accountant(store, question, company_runs.says("Closed.")))
    elsewhere(lambda: asking.run_sync("Close the account of Ray.", run_id="quick"))
    viewer = agentfsm.viewer.app(store, agents=[asking], authenticate=by_header)
    with served(viewer) as site, site_page(browser, site, headers={"who": "mia"}) as (page, events):
        page.add_init_script(HOLD_ANSWERS)
        page.goto("/inbox")
        card = page.locator("article[data-run=quick]")
        card.get_by_role("button", name="USD", exact=True).click()
        has_text(page.locator("main > p[role=status]"), "0 waiting")
        has_count(card, 1)
        page.wait_for_function("() => Boolean(window.letAnswerThrough)")
        page.evaluate("() => window.letAnswerThrough()")
        has_text(card, "Sent; the run goes on.")
        assert events == []


@pytest.mark.slow
def test_the_form_of_a_server_is_filled_in_from_its_schema(browser: Any, tmp_path: Path) -> None:
    """A real MCP server asks when to travel; the run goes on in the process that has its tools."""
    pytest.importorskip("mcp", reason="the extra 'mcp' is not installed")
    server = SdkServer(tmp_path)
    server.start()
    store = MemoryStore()

    async def travel(*script: Any, answered: bool = False) -> None:
        tools = MCPTools.http(server.url, settings=MCPSettings(elicitation=True))
        async with tools:
            agent = Agent(ScriptedModel(script), tools=tools, host=Host(store=store, secret=SECRET))
            if answered:
                run = await agent.next_run("trip")
                assert run is not None
                await run
            else:
                await agent.run("Book a trip to Rome.", run_id="trip")

    try:
        elsewhere(lambda: asyncio.run(travel(call("reserve", city="Rome"))))
        viewer = agentfsm.viewer.app(store, secret=SECRET, authenticate=by_header)
        with served(viewer) as site, site_page(browser, site, headers={"who": "mia"}) as (page, events):
            page.goto("/inbox")
            card = page.locator("article[data-run=trip]")
            has_text(card, "When do you go to Rome?")
            card.get_by_role("button", name="Fill in…").click()
            form = card.get_by_role("form", name="Send")
            assert "The day of the departure" in form.inner_text()
            assert form.get_by_label("Bags").input_value() == "1"
            form.get_by_role("button", name="Send").click()
            assert form.locator(":invalid").count() >= 1  # the day is needed
            form.get_by_label("Day").fill("2027-01-02")
            form.get_by_label("Seat").select_option("aisle")
            form.get_by_label("Bags").fill("2")
            form.get_by_role("button", name="Send").click()
            has_text(card, "A process that has the agent acts on it.")
            elsewhere(lambda: asyncio.run(travel("It is booked.", answered=True)))
            page.goto("/run?id=trip")
            has_text(page.locator(".about"), "completed")
            assert events == []
    finally:
        server.kill()
    assert server.done == ["reserve Rome"]
    assert decisions(store, "trip") == [("mia", "fill", True)]


@pytest.mark.slow
def test_a_limit_is_extended_by_the_amount_that_is_given(browser: Any, store: Any) -> None:
    limits = AgentGuardrails(max_iterations=1)
    asks(store, "limit", call("look", page=1), guardrails=limits)
    agent = answering(store, guardrails=limits)
    with (
        served(agentfsm.viewer.app(store, agents=[agent], authenticate=by_header)) as site,
        site_page(browser, site, headers={"who": "mia"}) as (page, events),
    ):
        page.goto("/inbox")
        card = page.locator("article[data-run=limit]")
        has_text(card, "1 of 1 model calls are used up")
        card.get_by_role("button", name="Go on…").click()
        card.get_by_label("What the model is told").fill("one more")
        card.get_by_role("button", name="Go on", exact=True).click()
        has_text(card, "Sent; the run goes on.")
        page.goto("/run?id=limit")
        has_text(page.locator(".about"), "completed")
        assert events == []
    assert decisions(store, "limit") == [("mia", "text", True)]


@pytest.mark.slow
def test_a_run_in_progress_is_cancelled_from_its_page(browser: Any, store: Any) -> None:
    started, released = threading.Event(), threading.Event()

    @tool
    def work() -> str:
        """Work."""
        started.set()
        released.wait(60)
        return "worked"

    def play() -> Any:
        agent = Agent(ScriptedModel([call("work"), "done"]), tools=[work], host=Host(store=store, secret=SECRET))
        return agent.run_sync("Work.", run_id="works")

    with (
        served(agentfsm.viewer.app(store, secret=SECRET, authenticate=by_header)) as site,
        site_page(browser, site, headers={"who": "mia"}) as (page, events),
        ThreadPoolExecutor(1) as pool,
    ):
        done = pool.submit(play)
        try:
            assert started.wait(30)
            page.goto("/run?id=works")
            page.get_by_role("button", name="Cancel the run…").click()
            page.get_by_label("Why").fill("no longer needed")
            page.get_by_role("button", name="Cancel the run", exact=True).click()
            has_text(page.locator(".about"), "cancelled")
            has_count(page.get_by_role("button", name="Cancel the run…"), 0)
        finally:
            released.set()
        assert not done.result(30).ok
        assert events == []


def test_without_an_agent_an_answer_waits_for_the_process_that_has_it(browser: Any, store: Any) -> None:
    asks(store, "waits", call("pay", to="Bob", amount=1))
    with (
        served(agentfsm.viewer.app(store, secret=SECRET, authenticate=by_header)) as site,
        site_page(browser, site, headers={"who": "mia"}) as (page, events),
    ):
        page.goto("/inbox")
        page.get_by_role("button", name="Allow").click()
        has_text(page.locator("article"), "A process that has the agent acts on it.")
        page.reload()
        has_text(page.locator("article"), "mia answered: allow")

        async def act() -> None:
            run = await answering(store).next_run("waits")
            assert run is not None
            await run

        elsewhere(lambda: asyncio.run(act()))
        has_text(page.locator("main"), "Nothing waits for you.")
        assert events == []
    assert decisions(store, "waits") == [("mia", "allow", True)]


def test_nobody_answers_who_is_not_signed_in(browser: Any, store: Any) -> None:
    asks(store, "waits", call("pay", to="Bob", amount=1))
    with (
        served(agentfsm.viewer.app(store, secret=SECRET)) as site,
        site_page(browser, site) as (page, events),
    ):
        page.goto("/inbox")
        has_text(page.locator("article"), "sign in to answer")
        has_count(page.locator("article button"), 0)
        token = page.request.get("/api/session").json()["token"]
        body = {"run": "waits", "to": "0" * 64, "reply": {"kind": "allow"}}
        answer = page.request.post("/api/inbox/answer", data=body, headers={"x-agentfsm-token": token})
        assert answer.status == 401
        assert events == []


@pytest.mark.slow
def test_an_inbox_goes_on_after_the_viewer_was_restarted(browser: Any, store: Any) -> None:
    asks(store, "waits", call("pay", to="Bob", amount=1))

    def viewer() -> Any:
        return agentfsm.viewer.app(store, agents=[answering(store)], authenticate=by_header)

    port = own_port()
    with ExitStack() as stack:
        with served(viewer(), port) as address:
            page = stack.enter_context(site_page(browser, address, headers={"who": "mia"})).page
            page.goto("/inbox")
            page.get_by_role("button", name="Deny…").click()
            page.get_by_label("Why, for the model").fill("not today")
        has_text(page.locator("main"), "the viewer cannot be reached")
        stack.enter_context(served(viewer(), port))
        has_text(page.locator("main"), "1 waiting")
        page.get_by_role("button", name="Deny", exact=True).click()
        has_text(page.locator("article"), "Sent; the run goes on.")
        page.goto("/run?id=waits")
        has_text(page.locator(".about"), "completed")
    assert decisions(store, "waits") == [("mia", "deny", True)]
    assert "not today" in output(store, "waits")
