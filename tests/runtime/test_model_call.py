"""The model call: its request, its failures, and replies made safe for the transcript."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from agentfsm import (
    Agent,
    AgentGuardrails,
    ContextOverflowError,
    DefaultPolicy,
    Failure,
    FailureKind,
    FinishReason,
    Handoff,
    Host,
    Message,
    ModelError,
    ProviderError,
    Reply,
    Role,
    RunResult,
    SqliteStore,
    ToolCall,
    TransientProviderError,
    Usage,
    observer,
    tool,
)
from agentfsm.loop.events import RunWarning
from agentfsm.loop.state_json import dump_state, load_state
from agentfsm.testing import FakeClock, call
from tests.helpers.scenarios import (
    await_run,
    check_result,
    look,
    recovered_kinds,
    run_async,
    run_script_with_requests,
    scripted_agent,
    tool_texts,
)

K = FailureKind


# -- the model call: what it is asked -----------------------------------------------------------------


def test_a_request_holds_the_transcript_the_tools_and_the_limits():
    limits = AgentGuardrails(llm_timeout_s=7, max_output_tokens=99)
    _, (first, second) = run_script_with_requests(
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
    result, _ = run_script_with_requests(error, "done")
    found = next(d.guard_result for d in result.decisions if d.guard_result is not None)
    assert found.kind is kind
    assert found.blockers == (found.explanation,)
    assert result.decisions[1].transition.id == f"call_llm.{kind}"
    assert result.ok is (kind is not K.provider_error)
    assert result.run_state.model_calls == (1 if kind is K.provider_error else 2)


def test_what_the_provider_reported_is_kept():
    result, _ = run_script_with_requests(TransientProviderError("busy", retry_after_s=7, status=429), "done")
    found = next(d.guard_result for d in result.decisions if d.guard_result is not None)
    assert found.metadata == {"retry_after_s": 7, "status": 429}
    assert found.explanation == "busy"


class OddKindError(ModelError):
    """A model's error of a kind that is none, or not a model's to report."""

    def __init__(self, kind: str) -> None:
        super().__init__("odd")
        self.kind = kind


@pytest.mark.parametrize("kind", ["bad_luck", "", "tool_error", "output_refused", "loop_detected"])
def test_a_kind_that_a_model_may_not_report_is_a_provider_error(kind):
    ran: list[int] = []

    @tool
    def count() -> str:
        ran.append(1)
        return ""

    result, _ = run_script_with_requests(call("count"), OddKindError(kind), tools=[count])
    assert isinstance(result.outcome, Handoff)
    assert result.outcome.failure.kind is K.provider_error
    assert ran == [1]


def test_a_model_that_does_not_answer_in_time_is_retried():
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

    result = check_result(run_async(scene))
    assert result.output == "at last"
    (failed,) = [d.guard_result for d in result.decisions if d.target == "recover"]
    assert isinstance(failed, Failure)
    assert failed.explanation == "slow sent no reply within 0.02 s"


class NoWait(DefaultPolicy):
    def backoff(self, kind: FailureKind, attempt: int) -> float:
        return 0.0


NO_WAIT = NoWait()


def test_backoffs_follow_the_policy_and_never_less_than_asked():
    clock = FakeClock()
    script = (TransientProviderError("a"), TransientProviderError("b", retry_after_s=20), TransientProviderError("c"))
    result, _ = run_script_with_requests(*script, "done", clock=clock)
    assert result.ok
    assert clock.slept == [2, 20, 8]


def test_four_failures_in_a_row_are_handed_off_and_a_success_resets_the_count():
    clock = FakeClock()
    busy = TransientProviderError("busy")
    result, _ = run_script_with_requests(busy, busy, busy, busy, clock=clock)
    assert isinstance(result.outcome, Handoff)
    result, _ = run_script_with_requests(busy, busy, busy, call("look"), busy, busy, busy, "done", tools=[look])
    assert result.ok


def test_a_prompt_that_is_too_long_is_shortened_once():
    script = (*[call("look", where=str(n)) for n in range(5)], ContextOverflowError("too long"), "done")
    result, requests = run_script_with_requests(*script, tools=[look])
    assert result.ok
    shown = [m.content for m in requests[-1].messages if m.role == "tool"]
    assert shown[-2] == "seen 3"
    assert shown[-1].startswith("seen 4\n\nThe conversation had grown too long")
    assert all("left out" in text for text in shown[:3])
    assert tool_texts(result) == [f"seen {n}" for n in range(5)]
    again, _ = run_script_with_requests(ContextOverflowError("too long"), ContextOverflowError("too long"))
    assert isinstance(again.outcome, Handoff)


# -- the reply: its calls -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ids", [("", ""), ("a", "a"), ("a", ""), ("", "a"), ("a", "a", "a"), ("call_1_1", "", ""), ("", "call", "call")]
)
def test_every_call_has_an_id_of_its_own(ids):
    calls = tuple(ToolCall(i, "look", {"where": str(n)}) for n, i in enumerate(ids))
    result, _ = run_script_with_requests(Message.assistant("", calls), "done", tools=[look])
    found = [c.id for m in result.messages for c in m.tool_calls]
    assert len(set(found)) == len(ids)
    assert tool_texts(result) == [f"seen {n}" for n in range(len(ids))]
    assert found[0] == (ids[0] or found[0])


def test_ids_are_unique_in_the_whole_conversation():
    """Servers that count from one in every reply, and wires that want no id twice in a conversation."""
    same = Message.assistant("", (ToolCall("call_1", "look"), ToolCall("", "look", {"where": "b"})))
    result, _ = run_script_with_requests(same, same, same, "done", tools=[look])
    ids = [c.id for m in result.messages for c in m.tool_calls]
    assert len(set(ids)) == len(ids) == 6

    async def scene() -> RunResult:
        agent, model = scripted_agent(same, "done", tools=[look])
        return check_result(await agent.run("more", message_history=result.messages), model)

    assert run_async(scene).ok


@pytest.mark.parametrize("calls", [(), (ToolCall("a", "look", {"where": "x"}),)])
def test_null_content_is_an_empty_string(calls):
    """So servers write it beside calls, and whoever passes their words on may leave it so."""
    odd: Any = None
    said = Message(Role.ASSISTANT, odd, calls)
    result, _ = run_script_with_requests(said, "done", tools=[look])
    assert result.output == "done"
    assert recovered_kinds(result) == ([] if calls else ["no_progress"])
    assert load_state(dump_state(result.run_state)).messages == result.messages


def test_content_that_is_not_a_string_is_a_failed_call():
    odd: Any = [{"type": "text", "text": "hi"}]
    result, _ = run_script_with_requests(Message.assistant(odd))
    assert isinstance(result.outcome, Handoff)
    assert "not a string but list" in result.outcome.rationale


@pytest.mark.parametrize(
    "usage",
    [Usage(10**30), Usage(1, -5), Usage(cost_usd=math.inf), Usage(cost_usd=math.nan), Usage(cached_tokens=2**70)],
)
def test_a_usage_that_no_reply_can_have_is_not_counted(usage, tmp_path):
    """A store could not hold it, or the limits of the run would be met by nothing."""
    warned: list[str] = []
    note = observer(lambda event: warned.append(event.text) if isinstance(event, RunWarning) else None)
    with SqliteStore(tmp_path / "runs.db") as store:
        host = Host(secret=b"x" * 32, store=store)
        script = [Reply(Message.assistant("done"), usage=usage)]
        agent, _ = scripted_agent(*script, host=host, hooks=[note])
        result = asyncio.run(await_run(agent.run("go")))
    assert result.output == "done"
    assert result.usage == Usage()
    assert ["impossible usage" in text for text in warned] == [True]


@pytest.mark.parametrize("odd", [None, 7])
def test_ids_and_names_that_are_not_strings_are_converted(odd):
    result, _ = run_script_with_requests(Message.assistant("", (ToolCall(odd, odd),)), "done", tools=[look])
    assert result.output == "done"
    assert recovered_kinds(result) == ["unknown_tool"]
    assert load_state(dump_state(result.run_state)).messages == result.messages


@pytest.mark.parametrize("bad", [math.nan, {1, 2}, object(), b"raw"])
def test_arguments_that_are_not_json_never_run_the_tool(bad):
    result, _ = run_script_with_requests(
        Message.assistant("", (ToolCall("a", "look", {"where": bad}),)), "done", tools=[look]
    )
    assert result.ok
    assert recovered_kinds(result) == ["invalid_arguments"]


def test_a_call_whose_arguments_did_not_parse_never_runs_the_tool():
    result, _ = run_script_with_requests(
        Message.assistant("", (ToolCall("a", "look", {}, malformed="Expecting ','"),)), "done", tools=[look]
    )
    assert "Expecting ','" in tool_texts(result)[0]
    assert recovered_kinds(result) == ["invalid_arguments"]


def test_calls_over_the_wire_are_calls_in_envelope_mode_too():
    """A model that can call tools may do so although it was told to write envelopes."""
    result, requests = run_script_with_requests(
        call("look", where="x"), '{"kind": "final", "content": "done"}', tools=[look], preset="feedback"
    )
    assert result.output == "done"
    assert requests[0].tools == ()


def test_half_a_character_in_an_envelope_is_malformed():
    result, _ = run_script_with_requests(
        '{"kind": "final", "content": "\ud800"}', '{"kind": "final", "content": "x"}', preset="feedback"
    )
    assert result.output == "x"
    assert recovered_kinds(result) == ["output_malformed"]


def test_a_truncated_call_is_never_run():
    cut = Reply(Message.assistant("", (ToolCall("a", "look", {"where": "hal"}),)), FinishReason.LENGTH)
    result, requests = run_script_with_requests(cut, "done", tools=[look])
    assert "truncated" in tool_texts(result)[0]
    assert result.ok
    assert "truncated" in requests[1].messages[-1].content
