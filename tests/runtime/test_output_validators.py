"""Output validators: they check an answer, change it, or refuse it with a lesson, within a budget."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel, Field, ValidationError

from agentfsm import (
    Agent,
    ConfigurationError,
    FinishReason,
    Handoff,
    Host,
    Message,
    Reply,
    RunAborted,
    RunContext,
    SqliteStore,
    tool,
)
from agentfsm.agent.config import proof_traits
from agentfsm.journal.replay import replay
from agentfsm.journal.verification import verify_stored_run
from agentfsm.testing import RecordingModel, ScriptedModel, call


class Town(BaseModel):
    name: str
    people: int = Field(gt=0, alias="inhabitants")


PARIS, ROME = '{"name": "Paris", "inhabitants": 2}', '{"name": "Rome", "inhabitants": 3}'


def not_paris(context: RunContext[str], town: Town) -> Town:
    if town.name == "Paris":
        raise ValueError(f"{context.deps} does not deliver to Paris")
    return town


async def not_paris_later(context: RunContext[str], town: Town) -> Town:
    await asyncio.sleep(0)
    return not_paris(context, town)


def by_assertion(context: RunContext[str], town: Town) -> None:
    if town.name == "Paris":
        raise AssertionError(f"{context.deps} does not deliver to Paris")


LESSON = (
    "Your last answer was checked and refused: the shop does not deliver to Paris. Correct it, and give the whole "
    "answer again."
)


@pytest.mark.parametrize("validator", [not_paris, not_paris_later, by_assertion])
def test_the_model_is_told_why_its_answer_is_refused_and_may_answer_again(validator: Any):
    model = RecordingModel(ScriptedModel([PARIS, ROME]))
    agent = Agent(model, output_type=Town, deps_type=str, output_validators=[validator])
    result = agent.run_sync("Where to?", deps="the shop")
    assert result.output == Town(name="Rome", inhabitants=3)
    assert model.requests[1].messages[-1].content.startswith(LESSON)
    moves = [(d.source, d.guard) for d in result.decisions]
    assert moves[2:4] == [("post_llm", "output_malformed"), ("recover", "otherwise")]
    assert result.run_state.model_calls == 2


def test_refusals_are_bounded_as_malformed_output_is():
    agent = Agent(ScriptedModel([PARIS] * 9), output_type=Town, deps_type=str, output_validators=[not_paris])
    result = agent.run_sync("Where to?", deps="the shop")
    assert isinstance(result.outcome, Handoff)
    assert "the answer was checked and refused: the shop does not deliver to Paris" in result.outcome.rationale
    assert result.run_state.model_calls == 3  # the first, and two more tries


def test_validators_are_called_in_order_with_what_the_one_before_returned():
    seen: list[int] = []

    def double(context: RunContext, number: int) -> int:
        seen.append(number)
        return number * 2

    agent = Agent(ScriptedModel(["7"]), output_type=int, output_validators=[double, double])
    result = agent.run_sync("Count.")
    assert (result.output, seen) == (28, [7, 14])
    assert result.run_state.answer == 28


def test_an_answer_that_is_changed_in_place_is_changed():
    def rename(context: RunContext, town: Town) -> None:
        town.name = town.name.upper()

    result = Agent(ScriptedModel([ROME]), output_type=Town, output_validators=[rename]).run_sync("Where to?")
    assert result.output == Town(name="ROME", inhabitants=3)


def test_a_text_is_validated_too():
    def short(context: RunContext, text: str) -> str:
        if len(text) > 5:
            raise ValueError("say it in at most 5 letters")
        return text.title()

    result = Agent(ScriptedModel(["far too long", "paris"]), output_validators=[short]).run_sync("Where to?")
    assert result.output == "Paris"
    assert result.messages[-1].content == "paris"  # what the model said stays as it said it


def test_a_reply_that_is_no_answer_is_not_validated():
    asked: list[str] = []

    @tool
    def look() -> str:
        """Look."""
        return "seen"

    def note(context: RunContext, text: str) -> None:
        asked.append(text)

    cut_off = Reply(Message.assistant("It is"), finish_reason=FinishReason.LENGTH)
    model = ScriptedModel([call("look"), " ", cut_off, " 42."])
    assert Agent(model, tools=[look], output_validators=[note]).run_sync("go").output == "It is 42."
    assert asked == ["It is 42."]


def refuse_zero(context: RunContext, value: Any) -> None:
    if value in (0, "0"):
        raise ValueError("zero is no answer")


def test_the_result_of_a_tool_that_ends_the_run_is_validated():
    numbers = iter([0, 5])

    @tool(ends_run=True)
    def finish() -> int:
        """Finish."""
        return next(numbers)

    agent = Agent(
        ScriptedModel([call("finish"), call("finish")]),
        tools=[finish],
        output_type=int,
        output_validators=[refuse_zero],
    )
    result = agent.run_sync("go")
    assert result.output == 5
    refused = next(m.content for m in result.messages if m.role == "tool")
    assert "the answer was checked and refused: zero is no answer" in refused


def test_so_is_what_return_done_gives():
    script = [call("return_done", output="0"), call("return_done", output="5")]
    agent = Agent(ScriptedModel(script), preset="funnel", output_validators=[refuse_zero])
    assert agent.run_sync("go").output == "5"


def explode(context: RunContext, value: Any) -> Any:
    raise ConnectionError("no database")


def wrong_type(context: RunContext, value: Any) -> Any:
    return 7


@pytest.mark.parametrize(("validator", "words"), [(explode, "no database"), (wrong_type, "left int as an answer")])
def test_a_validator_that_fails_aborts_the_run(validator: Any, words: str):
    result = Agent(ScriptedModel(["ok"]), output_validators=[validator]).run_sync("go")
    assert isinstance(result.outcome, RunAborted)
    assert words in result.outcome.reason


def test_what_is_changed_must_have_the_output_type():
    def negative(context: RunContext, town: Town) -> None:
        object.__setattr__(town, "people", -1)

    result = Agent(ScriptedModel([ROME]), output_type=Town, output_validators=[negative]).run_sync("Where to?")
    assert isinstance(result.outcome, (RunAborted, Handoff))


def test_a_validation_error_of_pydantics_names_each_field():
    def check(context: RunContext, text: str) -> str:
        Town.model_validate_json(text)
        return text

    model = RecordingModel(ScriptedModel(['{"name": "Paris"}', ROME]))
    result = Agent(model, output_validators=[check]).run_sync("go")
    assert result.output == ROME
    assert "refused: inhabitants: field required." in model.requests[1].messages[-1].content
    assert issubclass(ValidationError, ValueError)


def test_a_run_with_a_refused_answer_is_journaled_and_replayed_without_the_validator(tmp_path: Any):
    store = SqliteStore(tmp_path / "runs.db")
    host = Host(store=store, monitor="raise")
    agent = Agent(
        ScriptedModel([PARIS, ROME]), output_type=Town, deps_type=str, output_validators=[not_paris], host=host
    )
    result = agent.run_sync("Where to?", deps="the shop", run_id="r1")

    async def read() -> Any:
        return replay(await store.records("r1"), agent.graph), await verify_stored_run(store, "r1", None, host.keyring)

    replayed, report = asyncio.run(read())
    assert replayed.same
    assert replayed.ending == type(result.outcome).__name__ == "RunCompleted"
    assert report is not None


def test_an_agent_of_texts_with_validators_is_one_whose_answers_may_be_refused():
    plain = Agent(ScriptedModel(["ok"]))
    checked = Agent(ScriptedModel(["ok"]), output_validators=[refuse_zero])
    assert (proof_traits(plain.config).structured, proof_traits(checked.config).structured) == (False, True)


def test_what_is_no_function_is_refused():
    with pytest.raises(ConfigurationError, match="an output validator must be a function of"):
        Agent(ScriptedModel(), output_validators=[7])  # type: ignore[list-item]
    with pytest.raises(ConfigurationError, match="output_validators must be a list of functions, not function"):
        Agent(ScriptedModel(), output_validators=refuse_zero)  # type: ignore[arg-type]
