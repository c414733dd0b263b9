"""Comparisons, in a real browser and in words: a run with its fork, another run, and itself under a preset."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import agentfsm.viewer
from agentfsm import Agent, Host, MemoryStore
from agentfsm.journal.replay import Divergence
from agentfsm.loop.presets import PRESETS
from agentfsm.runs import Runs
from agentfsm.testing import ScriptedModel, call
from agentfsm.viewer.pages.compare_page import PRESETS_IN_WORDS, in_plain_words
from tests.helpers.browser import elsewhere, has_text, site_page
from tests.helpers.viewer_server import served

SECRET = b"0123456789abcdef0123456789abcdef"


def search(query: str) -> str:
    """Search."""
    if query == "broken":
        raise ValueError("no such table")
    return "3 hits"


def runs_and_a_fork() -> Any:
    store = MemoryStore()
    host = Host(store=store, secret=SECRET)
    model = ScriptedModel([call("search", query="broken"), call("search", query="x"), "found"])
    Agent(model, tools=[search], host=host).run_sync("Where?", run_id="first")
    Agent(ScriptedModel(["here"]), tools=[search], host=host).run_sync("Where?", run_id="plain")
    Agent(ScriptedModel(["there"]), tools=[search], host=host).run_sync("Where?", run_id="plain-too")

    async def fork() -> None:
        await Runs(store, secret=SECRET).fork("first", 12, "fork")  # in its second model call
        await Agent(ScriptedModel(["Instead."]), tools=[search], host=host).resume("fork")

    asyncio.run(fork())
    return store


@pytest.fixture(scope="module")
def store() -> Any:
    return elsewhere(runs_and_a_fork)


@pytest.fixture(scope="module")
def site(store: Any) -> Iterator[str]:
    with served(agentfsm.viewer.app(store)) as address:
        yield address


@pytest.mark.slow
def test_a_fork_is_compared_with_what_its_parent_did_afterwards(browser: Any, site: str) -> None:
    with site_page(browser, site) as (page, events):
        page.goto("/compare?a=first&b=fork")
        # pre_step, call_llm, post_llm, dispatch_tool, post_tool, recover, pre_step: the fork starts in call_llm
        has_text(page.get_by_role("status").first, "They have 7 moves in common.")
        has_text(page.locator(".pane").nth(0), "8 (first difference)")
        has_text(page.locator(".pane").nth(1), "1 (first difference)")
        has_text(page.locator(".pane").nth(1), "replied: Instead.")
        page.wait_for_selector(".pane:nth-child(1) g[data-edge='call_llm.otherwise'].now")
        page.wait_for_selector(".pane:nth-child(2) g[data-edge='call_llm.otherwise'].now")
        assert events == []


@pytest.mark.slow
def test_two_runs_part_where_they_take_another_row_or_something_else_was_said(browser: Any, site: str) -> None:
    with site_page(browser, site) as (page, events):
        page.goto("/compare")
        page.get_by_label("Run", exact=True).fill("plain")
        page.get_by_label("With run").fill("plain-too")
        page.get_by_role("button", name="Compare").click()
        has_text(page.get_by_role("status").first, "They have 1 move in common. They take the same row here")
        page.goto("/compare?a=plain&b=plain")
        has_text(page.get_by_role("status").first, "They are the same in every move.")
        assert page.url.endswith("/compare?a=plain&b=plain")
        assert events == []


@pytest.mark.slow
def test_a_run_is_compared_with_what_a_preset_would_have_done(browser: Any, site: str) -> None:
    with site_page(browser, site) as (page, events):
        page.goto("/compare?a=first&preset=strict")
        has_text(page.get_by_role("status").first, "Under strict, the first 4 moves are the same.")
        has_text(page.locator("table").first, "post_tool.tool_error → recover")
        has_text(page.locator("table").first, "post_tool.otherwise → pre_step")
        has_text(page.locator("main"), "But strict has no such row: no guard would have held")
        page.goto("/compare?a=plain&preset=standard")
        has_text(page.get_by_role("status").first, "every move is the same")
        assert events == []


@pytest.mark.slow
def test_a_run_is_compared_with_what_another_policy_or_limit_would_have_done(browser: Any, site: str) -> None:
    with site_page(browser, site) as (page, events):
        page.goto("/compare?a=first")
        page.get_by_label("with the policy of").select_option("strict")
        page.get_by_role("button", name="Compare").click()
        # recover.otherwise: the policy of the run tells the model, that of strict hands the task off
        has_text(page.get_by_role("status").first, "Under the policy of strict, the first 5 moves are the same.")
        has_text(page.locator("main"), "In move 6 the run was in recover (ask the policy, back off).")
        page.goto("/what-if?limits=max_iterations%3D1")
        page.locator("a[href*='compare?a=first']").click()
        has_text(page.get_by_role("status").first, "Under max_iterations=1, the first ")
        assert page.get_by_label("with limits").input_value() == "max_iterations=1"
        assert events == []


@pytest.mark.parametrize(
    ("question", "status"),
    [
        ("compare?a=first", 400),
        ("compare?a=first&b=nobody", 404),
        ("compare/replay?a=first&preset=odd", 400),
        ("compare/picture?run=first&moves=x", 422),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_reason(browser: Any, site: str, question: str, status: int) -> None:
    with site_page(browser, site) as (page, _):
        answer = page.request.get(f"/api/{question}")
        assert answer.status == status
        assert answer.json()["error"]


@pytest.mark.parametrize(
    ("recorded", "instead", "expected"),
    [
        pytest.param(
            "post_tool.tool_error -> recover",
            "post_tool.otherwise -> pre_step",
            "In move 5 the run was in post_tool (judge the batch). The guard tool_error (“A tool raised, returned a "
            "failure, or timed out”) held, so it went to recover (ask the policy, back off). But strict has no such "
            "row: no guard would have held, so it would have gone to pre_step (check budgets).",
            id="a row that the preset does not have",
        ),
        pytest.param(
            "pre_step.iteration_limit -> recover",
            "pre_step.otherwise -> call_llm",
            "In move 5 the run was in pre_step (check budgets). The guard iteration_limit (“max_iterations model calls "
            "were made”) held, so it went to recover (ask the policy, back off). But under strict that guard would "
            "not have held, nor would any other, so it would have gone to call_llm (call the model).",
            id="a guard that does not hold",
        ),
        pytest.param(
            "post_llm.tool_calls -> dispatch_tool",
            "post_llm.output_malformed -> recover",
            "In move 5 the run was in post_llm (read the reply). The guard tool_calls (“The reply calls tools”) held, "
            "so it went to dispatch_tool (run the next call). But under strict the guard output_malformed "
            "(“The envelope or the structured output cannot be parsed or is not valid”), which is evaluated before it, "
            "would have held, so it would have gone to recover (ask the policy, back off).",
            id="a guard that is evaluated before",
        ),
        pytest.param(
            "mine.odd -> other",
            "no transition of 'mine' is possible",
            "Under strict, move 5 would have been another: no transition of 'mine' is possible.",
            id="no row at all",
        ),
        pytest.param(
            "mine.odd -> other",
            "mine.even -> other",
            "In move 5 the run was in mine. The guard odd held, so it went to other. But strict has no such row: the "
            "guard even would have held, so it would have gone to other.",
            id="states and guards of somebody's own",
        ),
    ],
)
def test_the_first_difference_is_told_in_plain_words(recorded: str, instead: str, expected: str) -> None:
    assert in_plain_words(Divergence(9, recorded, instead), 5, "strict", PRESETS["strict"].graph) == expected


def test_every_preset_is_explained_in_a_sentence() -> None:
    assert PRESETS_IN_WORDS.keys() == PRESETS.keys()
    assert all(words.startswith(f"The preset {name} ") for name, words in PRESETS_IN_WORDS.items())
