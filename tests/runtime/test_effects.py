"""The one thing that each state does: the model call, the reading of its reply, the calls of a batch."""

from __future__ import annotations

import asyncio
import datetime
import enum
import json
import math
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field, SecretStr, computed_field

from agentfsm import (
    Agent,
    AgentGuardrails,
    ContextOverflowError,
    DefaultPolicy,
    FailureKind,
    FinishReason,
    Handoff,
    Message,
    ModelError,
    ProviderError,
    Reply,
    RunResult,
    ToolCall,
    ToolContext,
    ToolError,
    TransientProviderError,
    UserInputRequested,
    tool,
)
from agentfsm.runtime.effects import EFFECTS
from agentfsm.testing import FakeClock, call
from tests.runtime.scenes import agent_on, checked, drive, said

K = FailureKind


@tool
def look(where: str = "") -> str:
    """Look somewhere."""
    return f"seen {where}"


def lessons(result: RunResult) -> list[str]:
    return [x.kind.value for x in result.run.lessons_learned]


def tool_texts(result: RunResult) -> list[str]:
    return [text for role, text in said(result) if role == "tool"]


def with_model(*script: Any, **parts: Any) -> tuple[RunResult, list[Any]]:
    agent, model = agent_on(*script, **parts)

    async def scene() -> RunResult:
        return await agent.run("go")

    return checked(drive(scene), model), model.requests


def test_every_state_that_does_something_has_its_effect():
    assert set(EFFECTS) == {"pre_step", "call_llm", "post_llm", "dispatch_tool", "post_tool", "recover"}


# -- the model call: what it is asked -----------------------------------------------------------------


def test_a_request_holds_the_transcript_the_tools_and_the_limits():
    limits = AgentGuardrails(llm_timeout_s=7, max_output_tokens=99)
    _, (first, second) = with_model(
        call("look", where="x"), "done", tools=[look], guardrails=limits, instructions="be good"
    )
    assert [m.content for m in first.messages] == ["be good", "go"]
    assert [m.content for m in second.messages] == ["be good", "go", "", "seen x"]
    assert [t.name for t in first.tools] == ["look"]
    assert (first.timeout_s, first.max_output_tokens, first.output_schema) == (7, 99, None)


# -- the model call: how it fails ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TransientProviderError("429"), K.transient_provider),
        (ProviderError("401"), K.provider_error),
        (ContextOverflowError("too long"), K.context_overflow),
        (ValueError("a bug"), K.provider_error),
        (KeyError("choices"), K.provider_error),
        (OSError("no route"), K.provider_error),
        (TimeoutError("its own"), K.transient_provider),
        (asyncio.CancelledError(), K.provider_error),
    ],
)
def test_a_failed_call_has_its_kind_and_counts_as_a_call(error, kind):
    result, _ = with_model(error, "done")
    found = next(d.found for d in result.decisions if d.found is not None)
    assert found.kind is kind
    assert found.blockers == (found.explanation,)
    assert result.decisions[1].transition.id == f"call_llm.{kind}"
    assert result.ok is (kind is not K.provider_error)
    assert result.run.model_calls == (1 if kind is K.provider_error else 2)


def test_what_the_provider_said_of_itself_is_kept():
    result, _ = with_model(TransientProviderError("busy", retry_after_s=7, status=429), "done")
    found = next(d.found for d in result.decisions if d.found is not None)
    assert found.metadata == {"retry_after_s": 7, "status": 429}
    assert found.explanation == "busy"


class OddKindError(ModelError):
    """A model's error of a kind that is none, or not a model's to report."""

    def __init__(self, kind: str) -> None:
        super().__init__("odd")
        self.kind = kind


@pytest.mark.parametrize("kind", ["bad_luck", "", "tool_error", "output_refused", "loop_detected"])
def test_a_kind_that_is_no_models_to_report_is_a_provider_error(kind):
    ran: list[int] = []

    @tool
    def count() -> str:
        ran.append(1)
        return ""

    result, _ = with_model(call("count"), OddKindError(kind), tools=[count])
    assert isinstance(result.outcome, Handoff)
    assert result.outcome.failure.kind is K.provider_error
    assert ran == [1]


def test_a_model_that_does_not_answer_in_time_is_tried_again():
    class Slow:
        name = "slow"

        def __init__(self) -> None:
            self.asked = 0

        async def reply(self, request: Any) -> Reply:
            self.asked += 1
            if self.asked == 1:
                await asyncio.Event().wait()
            return Reply(Message.assistant("at last"))

    agent = Agent(Slow(), guardrails=AgentGuardrails(llm_timeout_s=0.02), policy=NO_WAIT)

    async def scene() -> RunResult:
        return await agent.run("go")

    result = checked(drive(scene))
    assert result.output == "at last"
    assert result.run.lessons_learned[0].explanation == "slow gave no reply within 0.02 s"


class NoWait(DefaultPolicy):
    def backoff(self, kind: FailureKind, attempt: int) -> float:
        return 0.0


NO_WAIT = NoWait()


def test_back_offs_are_the_numbers_of_the_rules_and_never_less_than_asked():
    clock = FakeClock()
    script = (TransientProviderError("a"), TransientProviderError("b", retry_after_s=20), TransientProviderError("c"))
    result, _ = with_model(*script, "done", clock=clock)
    assert result.ok
    assert clock.slept == [2, 20, 8]


def test_four_failures_in_a_row_are_handed_off_and_a_success_starts_anew():
    clock = FakeClock()
    busy = TransientProviderError("busy")
    result, _ = with_model(busy, busy, busy, busy, clock=clock)
    assert isinstance(result.outcome, Handoff)
    result, _ = with_model(busy, busy, busy, call("look"), busy, busy, busy, "done", tools=[look])
    assert result.ok


def test_a_prompt_that_is_too_long_is_shortened_once():
    script = (*[call("look", where=str(n)) for n in range(5)], ContextOverflowError("too long"), "done")
    result, requests = with_model(*script, tools=[look])
    assert result.ok
    shown = [m.content for m in requests[-1].messages if m.role == "tool"]
    assert shown[-2:] == ["seen 3", "seen 4"]
    assert all("left out" in text for text in shown[:3])
    assert tool_texts(result) == [f"seen {n}" for n in range(5)]
    again, _ = with_model(ContextOverflowError("too long"), ContextOverflowError("too long"))
    assert isinstance(again.outcome, Handoff)


# -- the reply: its calls -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ids", [("", ""), ("a", "a"), ("a", ""), ("", "a"), ("a", "a", "a"), ("call_1_1", "", ""), ("", "call", "call")]
)
def test_every_call_has_an_id_of_its_own(ids):
    calls = tuple(ToolCall(i, "look", {"where": str(n)}) for n, i in enumerate(ids))
    result, _ = with_model(Message.assistant("", calls), "done", tools=[look])
    found = [c.id for m in result.messages for c in m.tool_calls]
    assert len(set(found)) == len(ids)
    assert tool_texts(result) == [f"seen {n}" for n in range(len(ids))]
    assert found[0] == (ids[0] or found[0])


def test_ids_are_of_one_call_alone_over_the_whole_conversation():
    """Servers that count from one in every reply, and wires that want no id twice in a conversation."""
    same = Message.assistant("", (ToolCall("call_1", "look"), ToolCall("", "look", {"where": "b"})))
    result, _ = with_model(same, same, same, "done", tools=[look])
    ids = [c.id for m in result.messages for c in m.tool_calls]
    assert len(set(ids)) == len(ids) == 6

    async def scene() -> RunResult:
        agent, model = agent_on(same, "done", tools=[look])
        return checked(await agent.run("more", message_history=result.messages), model)

    assert drive(scene).ok


@pytest.mark.parametrize("bad", [math.nan, {1, 2}, object(), b"raw"])
def test_arguments_that_no_json_can_hold_never_run_the_tool(bad):
    result, _ = with_model(Message.assistant("", (ToolCall("a", "look", {"where": bad}),)), "done", tools=[look])
    assert result.ok
    assert lessons(result) == ["invalid_arguments"]


def test_a_call_whose_arguments_did_not_parse_never_runs_the_tool():
    result, _ = with_model(
        Message.assistant("", (ToolCall("a", "look", {}, malformed="Expecting ','"),)), "done", tools=[look]
    )
    assert "Expecting ','" in tool_texts(result)[0]
    assert lessons(result) == ["invalid_arguments"]


def test_calls_over_the_wire_are_calls_in_envelope_mode_too():
    """A model that can call tools may do so although it was told to write envelopes."""
    result, requests = with_model(
        call("look", where="x"), '{"kind": "final", "content": "done"}', tools=[look], preset="feedback"
    )
    assert result.output == "done"
    assert requests[0].tools == ()


def test_half_a_character_in_an_envelope_is_malformed():
    result, _ = with_model(
        '{"kind": "final", "content": "\ud800"}', '{"kind": "final", "content": "x"}', preset="feedback"
    )
    assert result.output == "x"
    assert lessons(result) == ["output_malformed"]


def test_a_truncated_call_is_never_run():
    cut = Reply(Message.assistant("", (ToolCall("a", "look", {"where": "hal"}),)), FinishReason.LENGTH)
    result, requests = with_model(cut, "done", tools=[look])
    assert "cut off" in tool_texts(result)[0]
    assert result.ok
    assert "cut off" in requests[1].messages[-1].content


# -- the reply: a structured answer -------------------------------------------------------------------


class Color(enum.Enum):
    RED = "red"


class Report(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    day: datetime.date
    color: Color = Color.RED
    tags: tuple[str, ...] = ()

    @computed_field
    @property
    def year(self) -> int:
        return self.day.year


GOOD_REPORT = '{"day": "2024-02-29", "tags": ["a"]}'
REPORT = Report(day=datetime.date(2024, 2, 29), tags=("a",))


@pytest.mark.parametrize("text", [GOOD_REPORT, f"```json\n{GOOD_REPORT}\n```", f"\n {GOOD_REPORT}"])
def test_a_structured_answer_is_a_value_of_the_agents_type(text):
    result, (request,) = with_model(text, output_type=Report)
    assert result.output == REPORT
    assert request.output_schema == Report.model_json_schema()
    assert "JSON schema" in request.messages[0].content


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("The report follows.", "not valid JSON"),
        ('{"day": "yesterday"}', "day: "),
        ('{"day": "2024-02-29", "mood": 1}', "mood: "),
        ("{}", "day: field required"),
        ('{"day": "\ud800"}', "not valid JSON"),
    ],
)
def test_an_answer_that_does_not_fit_is_fed_back_and_mended(text, wrong):
    result, requests = with_model(text, GOOD_REPORT, output_type=Report)
    assert result.output == REPORT
    assert lessons(result) == ["output_malformed"]
    assert wrong in requests[1].messages[-1].content
    assert [text for _, text in said(result)][-2:] == [text, GOOD_REPORT]


def test_a_structured_answer_may_come_in_an_envelope():
    def envelope(content: str) -> str:
        return json.dumps({"kind": "final", "content": content})

    result, _ = with_model(envelope("no report"), envelope(GOOD_REPORT), output_type=Report, preset="feedback")
    assert result.output == REPORT
    assert lessons(result) == ["output_malformed"]


def test_an_answer_that_never_fits_is_handed_off():
    result, requests = with_model(*["{}"] * 9, output_type=Report)
    assert isinstance(result.outcome, Handoff)
    assert len(requests) == 3


@pytest.mark.parametrize(
    ("wanted", "text", "value"),
    [
        (int, "42", 42),
        (list[int], "[1, 2]", [1, 2]),
        (bool, "false", False),
        (int | None, "0", 0),
        (dict[str, int], "{}", {}),
    ],
)
def test_any_type_that_json_can_describe_will_do(wanted, text, value):
    result, _ = with_model(text, output_type=wanted)
    assert result.output == value
    assert result.ok


def test_a_value_that_hides_itself_in_json_still_comes_out_whole():
    class Login(BaseModel):
        password: SecretStr
        alias: int = Field(alias="otherName", default=0)

    result, _ = with_model('{"password": "hush", "otherName": 3}', output_type=Login)
    assert result.output.password.get_secret_value() == "hush"
    assert result.output.alias == 3


@pytest.mark.parametrize("preset", ["funnel", "breaker"])
def test_return_done_brings_a_structured_answer(preset):
    bad, good = {"day": "yesterday"}, {"day": "2024-02-29", "tags": ["a"]}
    result, _ = with_model(
        call("return_done", output=bad), call("return_done", output=good), output_type=Report, preset=preset
    )
    assert result.output == REPORT
    assert lessons(result) == ["invalid_arguments"]


def test_a_tool_that_ends_the_run_must_bring_what_the_agent_promises():
    values: list[Any] = ["no report", REPORT]

    @tool(ends_run=True)
    def report() -> Any:
        """Report."""
        return values.pop(0)

    result, _ = with_model(call("report"), call("report"), output_type=dict[str, Any], tools=[report])
    assert result.output["day"] == "2024-02-29"
    assert lessons(result) == ["tool_error"]


# -- the calls of a batch -----------------------------------------------------------------------------


def test_calls_run_one_after_the_other_unless_all_may_run_together():
    running: list[int] = [0, 0]

    def counting(name: str, parallel: bool) -> Any:
        @tool(name=name, parallel=parallel)
        async def work(n: int) -> str:
            running[0] += 1
            running[1] = max(running)
            for _ in range(3):
                await asyncio.sleep(0)
            running[0] -= 1
            return f"{name} {n}"

        return work

    tools = [counting("alone", False), counting("together", True)]
    for names, most in [(["alone"] * 3, 1), (["together"] * 3, 3), (["together", "alone", "together"], 1)]:
        running[:] = [0, 0]
        result, _ = with_model([call(name, n=n) for n, name in enumerate(names)], "done", tools=tools)
        assert running == [0, most]
        assert tool_texts(result) == [f"{name} {n}" for n, name in enumerate(names)]


def test_results_stand_in_the_order_of_the_calls_whatever_ends_first():
    gates = [asyncio.Event() for _ in range(3)]

    @tool(parallel=True)
    async def work(n: int) -> str:
        if n < 2:
            await gates[n + 1].wait()
        gates[n].set()
        return str(n)

    result, _ = with_model([call("work", n=n) for n in range(3)], "done", tools=[work])
    assert tool_texts(result) == ["0", "1", "2"]


def test_one_that_fails_does_not_stop_the_others():
    @tool(parallel=True)
    async def work(n: int) -> str:
        if n == 1:
            raise ValueError("bad one")
        for _ in range(5):
            await asyncio.sleep(0)
        return str(n)

    result, _ = with_model([call("work", n=n) for n in range(3)], "done", tools=[work])
    assert tool_texts(result) == ["0", "ValueError: bad one", "2"]
    assert lessons(result) == ["tool_error"]


def test_one_that_raises_a_cancellation_of_its_own_does_not_stop_the_others_or_run_for_ever():
    @tool(parallel=True)
    async def work(n: int) -> str:
        if n == 1:
            raise asyncio.CancelledError
        return str(n)

    result, _ = with_model([call("work", n=n) for n in range(3)], "done", tools=[work])
    assert [text if "Cancelled" not in text else "x" for text in tool_texts(result)] == ["0", "x", "2"]


def test_each_of_several_has_its_own_time():
    @tool(parallel=True, timeout=0.02)
    async def work(n: int) -> str:
        if n == 1:
            await asyncio.Event().wait()
        return str(n)

    result, _ = with_model([call("work", n=n) for n in range(3)], "done", tools=[work])
    assert tool_texts(result) == ["0", "timed out after 0.02 s", "2"]


def test_five_failing_calls_of_a_batch_are_one_recovery():
    @tool
    def fail(n: int) -> str:
        raise ValueError(f"broken {n}")

    result, _ = with_model([call("fail", n=n) for n in range(5)], "done", tools=[fail])
    assert [d.transition.id for d in result.decisions].count("post_tool.tool_error") == 1
    assert result.run.lessons_learned[0].explanation == "fail: ValueError: broken 0"


def test_the_first_kind_in_the_order_of_the_table_is_the_batchs_failure():
    @tool
    def fail(kind: str) -> str:
        raise ToolError(f"it is {kind}", kind=kind)

    kinds = ["tool_error", "environment_error", "capability_gap"]
    result, _ = with_model([call("fail", kind=k) for k in kinds], tools=[fail])
    assert result.outcome.failure.kind is K.capability_gap
    assert result.outcome.failure.metadata["others"] == {
        "tool_error": "fail: it is tool_error",
        "environment_error": "fail: it is environment_error",
    }


@pytest.mark.parametrize(
    ("kind", "ending"),
    [("ambiguous_input", UserInputRequested), ("capability_gap", Handoff), ("policy_violation", Handoff)],
)
def test_what_a_tool_says_of_itself_is_acted_on(kind, ending):
    @tool
    def fail() -> str:
        raise ToolError("cannot", kind=kind)

    result, _ = with_model([call("fail"), call("look")], tools=[fail, look])
    assert isinstance(result.outcome, ending)
    assert result.run.lessons_learned[0].kind.value == kind


def test_what_a_tool_may_know_of_its_call():
    seen: list[ToolContext] = []

    @tool
    async def who(context: ToolContext, n: int) -> str:
        seen.append(context)
        return "me"

    agent, _ = agent_on([call("who", n=1), call("who", n=2)], call("who", n=3), "done", tools=[who])

    async def scene() -> RunResult:
        return await agent.run("go", session_id="s", run_id="r")

    checked(drive(scene))
    assert [(c.run_id, c.session_id, c.call_id, c.attempt) for c in seen] == [
        ("r", "s", "call_1_1", 1), ("r", "s", "call_1_2", 1), ("r", "s", "call_2_1", 1),
    ]  # fmt: skip
    assert len({c.idempotency_key for c in seen}) == 3


def test_a_retryable_call_is_run_again_as_it_stands_with_the_same_key():
    seen: list[tuple[str, int]] = []

    @tool(idempotent=True, retryable=True)
    def fetch(context: ToolContext) -> str:
        seen.append((context.idempotency_key, context.attempt))
        if len(seen) == 1:
            raise ConnectionError("dropped")
        return "fetched"

    result, requests = with_model(call("fetch"), "done", tools=[fetch])
    assert [attempt for _, attempt in seen] == [1, 2]
    assert len({key for key, _ in seen}) == 1
    assert tool_texts(result) == ["fetched"]
    assert len(requests) == 2
    assert "recover.retry_tool" in [d.transition.id for d in result.decisions]


def test_a_call_is_run_again_only_so_often_and_then_the_model_is_told():
    seen: list[int] = []

    @tool(idempotent=True, retryable=True)
    def fetch() -> str:
        seen.append(1)
        raise ConnectionError("dropped")

    result, requests = with_model(call("fetch"), "done", tools=[fetch], guardrails=AgentGuardrails(max_tool_retries=1))
    assert len(seen) == 2
    assert len(requests) == 2
    assert tool_texts(result) == ["ConnectionError: dropped"]


def test_a_policy_may_back_off_before_a_call_is_run_again():
    class Patient(DefaultPolicy):
        def backoff(self, kind: FailureKind, attempt: int) -> float:
            return 3.0

    clock, seen = FakeClock(), []

    @tool(idempotent=True, retryable=True)
    def fetch() -> str:
        seen.append(clock.monotonic())
        if len(seen) == 1:
            raise ConnectionError("dropped")
        return "fetched"

    result, _ = with_model(call("fetch"), "done", tools=[fetch], policy=Patient(), clock=clock)
    assert clock.slept == [3.0]
    assert seen[1] - seen[0] == 3.0
    assert result.ok


def test_only_the_calls_that_failed_are_run_again():
    seen: list[int] = []

    @tool(idempotent=True, retryable=True, parallel=True)
    async def fetch(n: int) -> str:
        seen.append(n)
        if n == 1 and seen.count(1) == 1:
            raise ConnectionError("dropped")
        return str(n)

    result, _ = with_model([call("fetch", n=n) for n in range(3)], "done", tools=[fetch])
    assert sorted(seen) == [0, 1, 1, 2]
    assert tool_texts(result) == ["0", "1", "2"]


# -- control tools in a batch -------------------------------------------------------------------------


def test_a_batch_that_ends_the_run_runs_nothing_behind_the_end():
    script = [call("look", where="a"), call("return_done", output="finished"), call("look", where="b")]
    result, _ = with_model(script, tools=[look], preset="funnel")
    assert result.output == "finished"
    assert tool_texts(result)[0] == "seen a"
    assert "ended the run" in tool_texts(result)[2]


def test_giving_up_says_why_and_what_to_do():
    result, _ = with_model(
        call("return_unable", rationale="no key", blockers=["key"], suggested_next_steps=["get one"]), preset="funnel"
    )
    assert isinstance(result.outcome, Handoff)
    assert (result.outcome.rationale, result.outcome.blockers) == ("no key", ("key",))
    assert result.outcome.suggested_next_steps == ("get one",)
    assert result.outcome.failure is None


def test_a_question_in_a_batch_waits_and_its_answer_is_its_result():
    script = ([call("look", where="a"), call("ask_user", question="Which?", choices=["x", "y"]), call("look")],)
    agent, model = agent_on(*script, call("return_done", output="ok"), tools=[look], preset="funnel")

    async def scene() -> RunResult:
        first = checked(await agent.run("go"), model)
        assert (first.outcome.question, first.outcome.choices) == ("Which?", ("x", "y"))
        return checked(await agent.resume(first.outcome.suspension_record, "x"), model)

    result = drive(scene)
    assert tool_texts(result)[:3] == ["seen a", "x", "Not run: the user was asked a question first."]
    assert result.output == "ok"
