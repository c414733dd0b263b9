"""Evaluation: good runs are counted, bad ones say what is wrong, and what failed and what it cost is summed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from agentfsm import (
    Agent,
    Allow,
    ConfigurationError,
    Image,
    Message,
    Reply,
    Role,
    TransientProviderError,
    Usage,
    tool,
)
from agentfsm.cli.terminal_prompt import parse_reply
from agentfsm.testing import Case, ScriptedModel, call, evaluate
from agentfsm.testing.evaluation import case_of_run, read_cases


def look(place: str) -> str:
    """Look."""
    return "nothing"


@tool(requires_approval=True)
def pay(amount: int) -> str:
    """Pay."""
    return "paid"


def agent(*script: Any) -> Agent:
    return Agent(ScriptedModel(list(script)), tools=[look, pay])


def run(an_agent: Agent, *cases: Case, repeat: int = 1) -> Any:
    return asyncio.run(evaluate(an_agent, cases, repeat=repeat, concurrency=1))


@pytest.mark.parametrize(
    ("case", "problem"),
    [
        (Case(name="a", prompt="p"), ""),
        (Case(name="a", prompt="p", contains=("FOUND", "it")), ""),
        (Case(name="a", prompt="p", contains=("lost",)), "the answer does not contain 'lost'"),
        (Case(name="a", prompt="p", tools=("look",)), ""),
        (Case(name="a", prompt="p", tools=("look", "pay")), "pay was not called"),
        (Case(name="a", prompt="p", ending="handed_off"), "completed, not handed off: it has an answer"),
        (Case(name="a", prompt="p", check=lambda result: result.ok), ""),
        (Case(name="a", prompt="p", check=lambda result: None), ""),
        (Case(name="a", prompt="p", check=lambda result: False), "the check failed"),
        (Case(name="a", prompt="p", check=lambda result: "too short"), "too short"),
    ],
)
def test_a_run_is_good_or_says_what_is_wrong(case: Case, problem: str) -> None:
    (attempt,) = run(agent(call("look", place="x"), "I found it."), case).attempts
    assert (attempt.problem, attempt.passed, attempt.ending) == (problem, not problem, "completed")


def test_a_check_may_assert() -> None:
    def check(result: Any) -> None:
        assert result.output == "no", "it says yes"

    (attempt,) = run(agent("yes"), Case(name="a", prompt="p", check=check)).attempts
    assert attempt.problem.startswith("check: it says yes")


@pytest.mark.slow
def test_failures_rows_and_costs_are_summed_over_all_runs() -> None:
    usage = Usage(input_tokens=10, output_tokens=5, cost_usd=0.25)
    script = [TransientProviderError("busy"), Reply(Message.assistant("one"), "stop", usage), "two"]
    an_agent = agent(*script)
    result = run(an_agent, Case(name="a", prompt="p", contains=("one",)), repeat=2)
    assert [attempt.passed for attempt in result.attempts] == [True, False]
    assert result.pass_rate == 0.5
    assert result.failures == {"transient_provider": 1}
    assert result.rows["call_llm.transient_provider"] == 1
    assert result.rows["post_llm.otherwise"] == 2
    assert (result.usage.cost_usd, result.usage.total_tokens) == (0.25, 15)
    data = json.loads(json.dumps(result.to_dict()))
    assert (data["pass_rate"], data["failures"], data["cost_usd"]) == (0.5, {"transient_provider": 1}, 0.25)
    assert [each["problem"] for each in data["attempts"]] == ["", "the answer does not contain 'one'"]


def test_a_cost_without_a_known_price_is_null_in_json() -> None:
    reply = Reply(Message.assistant("one"), "stop", Usage(input_tokens=10, unpriced_tokens=10))
    data = run(agent(reply, "two"), Case(name="a", prompt="p"), repeat=2).to_dict()
    assert (data["cost_usd"], data["unpriced_tokens"]) == (None, 10)
    assert [each["cost_usd"] for each in data["attempts"]] == [None, 0.0]


def test_a_request_is_answered_by_the_case_or_leaves_the_run_suspended() -> None:
    script = [call("pay", amount=1), "Paid."]
    answered = Case(name="a", prompt="p", tools=("pay",), replies={"approval": Allow()})
    (attempt,) = run(agent(*script), answered).attempts
    assert attempt.passed
    assert attempt.rows["suspended.approval_decided"] == 1  # the moves before and after the wait are counted
    assert attempt.rows["post_llm.tool_calls"] == 1
    (attempt,) = run(agent(*script), Case(name="a", prompt="p")).attempts
    assert attempt.ending == "suspended"
    assert attempt.problem.startswith("suspended, not completed: ")


def test_an_error_that_keeps_a_run_from_running_is_a_bad_run_and_the_others_go_on() -> None:
    cases = [Case(name="a", prompt="p", message_history=["no message"]), Case(name="b", prompt="p")]  # type: ignore[list-item]
    first, second = run(agent("done"), *cases).attempts
    assert first.problem.startswith("RunError: ")
    assert second.passed


@pytest.mark.parametrize(
    ("cases", "repeat", "message"),
    [
        ([], 1, "needs a case"),
        ([Case(name="a", prompt="p")], 0, "at least 1"),
        ([Case(name="a", prompt="p")] * 2, 1, "two cases are called 'a'"),
    ],
)
def test_a_wrong_evaluation_is_refused(cases: list[Case], repeat: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        run(agent(), *cases, repeat=repeat)


def test_a_prompt_that_is_more_than_text_does_not_become_a_case() -> None:
    picture = Message(Role.USER, "What is it?", images=(Image(media_type="image/png", data="iVBORw0KGgo="),))
    for messages in ([picture], [Message(Role.ASSISTANT, "Hello.")]):
        with pytest.raises(ConfigurationError, match="the prompt of a case is a text"):
            case_of_run("picture", messages, "completed")


def test_a_run_becomes_a_case_that_it_passes(tmp_path: Path) -> None:
    script = [call("look", place="x"), "I found it."]
    result = agent(*script).run_sync("Where is it?")
    data = case_of_run("where", result.messages, "completed")
    assert data == {"name": "where", "prompt": "Where is it?", "ending": "completed", "tools": ["look"]}
    file = tmp_path / "cases.jsonl"
    file.write_text(json.dumps(data) + "\n\n" + json.dumps({"name": "b", "prompt": "p", "replies": {"approval": "no"}}))
    first, second = read_cases(file, parse_reply)
    assert run(agent(*script), first).pass_rate == 1
    assert run(agent("It is here."), first).attempts[0].problem == "look was not called"
    assert (second.name, type(second.replies["approval"]).__name__) == ("b", "Deny")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1 is not valid JSON"),
        ("[]", "needs a name and a prompt"),
        ('{"name": "a"}', "needs a name and a prompt"),
        ('{"name": "a", "prompt": "p", "promt": 1}', "unknown field 'promt'"),
        ('{"name": "a", "prompt": "p", "ending": "done"}', "the ending is one of completed"),
        ('{"name": "a", "prompt": "p", "tools": "look"}', "tools is a list of texts"),
        ('{"name": "a", "prompt": "p", "replies": ["allow"]}', "replies is an object"),
        ('{"name": "a", "prompt": "p", "message_history": [{"role": "nobody"}]}', "message_history is not a list of"),
    ],
)
def test_a_line_that_is_no_case_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "cases.jsonl"
    file.write_text(line)
    with pytest.raises(ConfigurationError, match=message):
        read_cases(file, parse_reply)


def test_runs_go_on_beside_each_other_up_to_the_limit() -> None:
    at_once: list[int] = []
    running = 0

    class Slow:
        name = "slow"

        async def reply(self, request: Any) -> Reply:
            nonlocal running
            running += 1
            at_once.append(running)
            for _ in range(5):
                await asyncio.sleep(0)
            running -= 1
            return Reply(Message.assistant("done"), "stop")

    cases = [Case(name=str(n), prompt="p") for n in range(6)]
    result = asyncio.run(evaluate(Agent(Slow()), cases, concurrency=3))
    assert max(at_once) == 3
    assert [attempt.case for attempt in result.attempts] == ["0", "1", "2", "3", "4", "5"]
