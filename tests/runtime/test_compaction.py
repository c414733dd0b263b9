"""A long history is shortened inside the run: as a move of the table, charged, limited, journaled and replayed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from agentfsm import (
    LOOP,
    Agent,
    AgentGuardrails,
    Allow,
    Compaction,
    ConfigurationError,
    GraphError,
    Host,
    KeepAll,
    KeepLast,
    MemoryStore,
    Message,
    Reply,
    RunAborted,
    RunCompleted,
    RunQuery,
    StateContext,
    StateResult,
    StateSpec,
    Summarize,
    Transition,
    Usage,
    UserInputRequested,
    tool,
)
from agentfsm.errors import ProviderError, TransientProviderError
from agentfsm.journal.fork import fork
from agentfsm.journal.replay import replay
from agentfsm.journal.verification import GOOD, verify_stored_run
from agentfsm.loop.presets import PRESETS
from agentfsm.testing import RecordingModel, ScriptedModel, call, force, paths
from tests.helpers.provider_rules import check_requests


def look(n: int) -> str:
    """Look."""
    return f"seen {n}"


@tool(requires_approval=True)
def pay(usd: int) -> str:
    """Pay."""
    return f"paid {usd}"


def looks(count: int) -> Iterator[Any]:
    return (call("look", n=n) for n in range(count))


def agent_of(*script: Any, history: Any, **more: Any) -> tuple[Agent[Any, Any], RecordingModel]:
    model = RecordingModel(ScriptedModel(list(script)))
    host = more.pop("host", None) or Host(store=MemoryStore(), monitor="raise")
    return Agent(model, tools=[look, pay], host=host, history=history, **more), model


def contents(model: RecordingModel, number: int = -1) -> list[str]:
    return [m.content for m in model.requests[number].messages]


def rows(result: Any) -> list[str]:
    return [d.transition.id for d in result.decisions]


def test_a_long_run_keeps_its_question_and_its_last_replies():
    agent, model = agent_of(*looks(5), "done", history=KeepLast(replies=2))
    result = agent.run_sync("Look around.")
    assert contents(model) == ["Look around.", "", "seen 3", "", "seen 4"]
    assert rows(result).count("pre_step.history_too_long") == rows(result).count("compact.otherwise") == 1
    assert len(result.messages) == 12  # the transcript itself is whole
    assert result.run_state.counters["compactions"] == 1
    check_requests(model.requests)


def test_it_is_cut_at_most_as_often_as_the_policy_says():
    agent, model = agent_of(*looks(9), "done", history=KeepLast(replies=1, max_compactions=2))
    result = agent.run_sync("Look around.")
    assert rows(result).count("pre_step.history_too_long") == 2
    assert contents(model)[2::2] == [f"seen {n}" for n in range(4, 9)]  # cut after the third reply and the fifth


def test_a_session_keeps_its_last_turns():
    agent, model = agent_of("a0", "a1", "a2", "a3", history=KeepLast(turns=2))
    session = agent.session("s")
    for n in range(4):
        session.run_sync(f"q{n}")
    assert contents(model) == ["q2", "a2", "q3"]
    assert [m.content for m in asyncio.run(session.messages())] == ["q2", "a2", "q3", "a3"]


PRICED = Usage(input_tokens=70, output_tokens=30, cost_usd=0.5)


def test_a_summary_is_a_model_call_of_the_run_charged_and_journaled():
    async def main() -> None:
        summary = Reply(Message.assistant("They talked about lamps."), usage=PRICED)
        agent, model = agent_of("a" * 500, summary, "b", history=Summarize(above_tokens=100, turns=1))
        session = agent.session("s")
        await session.run("q0")
        result = await session.run("q1")
        asked, sent = contents(model, 1), contents(model, 2)
        assert asked[1] == (
            f"<conversation>\n<user>\nq0\n</user>\n<assistant>\n{'a' * 500}\n</assistant>\n</conversation>"
        )
        assert "They talked about lamps." in sent[0]
        assert sent[1] == "q1"
        run = result.run_state
        assert (run.model_calls, run.iterations, run.usage) == (2, 2, PRICED)
        assert result.journal[0].data["history"]["above_tokens"] == 100
        kinds = [r.data["name"] for r in result.journal if r.kind == "effect.intent"]
        assert kinds == ["compact", "scripted", "scripted"]
        store: Any = agent.config.host.store
        records = await store.records(result.outcome.run_id)
        assert replay(records, agent.graph).same
        assert (await verify_stored_run(store, result.outcome.run_id, keyring=agent.config.host.keyring)).code == GOOD
        assert (await store.find_runs(RunQuery())).runs[0].tokens == 100

    asyncio.run(main())


def test_another_model_may_write_the_summary():
    writer = RecordingModel(ScriptedModel(["In short."]))
    policy = Summarize(above_tokens=10, turns=1, model=writer, max_output_tokens=77, instructions="Be short.")
    agent, model = agent_of("b", history=policy)
    agent.run_sync("q1", message_history=[Message.user("q0"), Message.assistant("a" * 100)])
    assert (len(writer.requests), len(model.requests)) == (1, 1)
    assert writer.requests[0].max_output_tokens == 77
    assert contents(writer)[0] == "Be short."
    assert "In short." in contents(model)[0]


HISTORY = [Message.user("q0"), Message.assistant("a" * 100)]


@pytest.mark.parametrize("answer", [ProviderError("no"), "", "  "])
def test_a_summary_that_fails_leaves_the_history_as_it_is(answer: Any):
    agent, model = agent_of("b", history=Summarize(above_tokens=10, turns=1, model=ScriptedModel([answer])))
    result = agent.run_sync("q1", message_history=HISTORY)
    assert result.output == "b"
    assert rows(result).count("compact.failed") == 1
    assert contents(model) == ["q0", "a" * 100, "q1"]


def test_a_summary_is_retried_as_the_policy_of_the_run_says():
    writer = ScriptedModel([TransientProviderError("busy"), "In short."])
    agent, model = agent_of("b", history=Summarize(above_tokens=10, turns=1, model=writer))

    class NoSleep:
        def __init__(self, clock: Any) -> None:
            self.time, self.monotonic = clock.time, clock.monotonic

        async def sleep(self, seconds: float) -> None:
            """Return at once."""

    host = Host(clock=NoSleep(agent.config.host.clock))
    agent = Agent(model, history=Summarize(above_tokens=10, turns=1, model=writer), host=host)
    result = agent.run_sync("q1", message_history=HISTORY)
    assert "In short." in contents(model)[0]
    assert result.run_state.iterations == 3


def test_no_summary_is_written_beyond_the_runs_limits():
    agent, _ = agent_of(
        call("look", n=1), "never",
        history=Summarize(above_tokens=10, turns=1, model=ScriptedModel(["In short."])),
        guardrails=AgentGuardrails(max_iterations=1, on_limit="stop"),
    )  # fmt: skip
    result = agent.run_sync("q1", message_history=HISTORY)
    assert result.run_state.model_calls == 1  # the summary was the only call
    assert type(result.outcome).__name__ == "PartialRunSummary"


def test_a_run_that_waits_goes_on_with_its_policy_in_another_process():
    """Another agent with the same table stands for the other process: what was cut is in the journal."""

    async def main() -> None:
        host = Host(store=MemoryStore(), secret=b"a secret that is long enough for it")
        policy = Summarize(above_tokens=10, turns=1, model=ScriptedModel(["In short."]))
        agent, _ = agent_of(call("pay", usd=7), history=policy, host=host)
        waiting = await agent.run("q1", message_history=HISTORY)
        assert isinstance(waiting.outcome, UserInputRequested)
        later, model = agent_of("b", history=Summarize(above_tokens=999, turns=1), host=host)
        result = await later.resume(waiting.run_id, Allow())
        assert isinstance(result.outcome, RunCompleted)
        assert "In short." in contents(model)[0]
        assert contents(model)[1:] == ["q1", "", "paid 7"]
        records = await host.store.records(waiting.run_id)
        moved = next(r.seq for r in records if '"transition":"compact.otherwise"' in r.body)
        await fork(host.store, waiting.run_id, moved, "fork", host.keyring)
        forked, copy = agent_of("c", history=policy, host=host)
        await forked.resume("fork")
        assert "In short." in contents(copy)[0]

    asyncio.run(main())


def test_a_run_of_the_agent_without_a_policy_can_be_resumed_with_one():
    async def main() -> None:
        host = Host(store=MemoryStore())
        agent, _ = agent_of(call("pay", usd=7), history=None, host=host)
        waiting = await agent.run("q")
        later, model = agent_of("b", history=KeepLast(turns=1), host=host)
        assert (await later.resume(waiting.run_id, Allow())).output == "b"
        assert contents(model) == ["q", "", "paid 7"]

    asyncio.run(main())


def test_a_sub_agent_has_its_own_policy():
    inner, _ = agent_of("x", history=None)
    model = ScriptedModel([call("ask", task="q"), "b"])
    agent = Agent(model, tools=[inner.as_tool("ask", "Ask.")], history=KeepLast(), host=Host(store=MemoryStore()))

    async def main() -> None:
        await agent.run("q")
        store: Any = agent.config.host.store
        details = []
        for head in await store.heads():
            first = (await store.records(head.run_id))[0]
            details.append('"history"' in first.body)
        assert sorted(details) == [False, True]

    asyncio.run(main())


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_takes_a_policy_and_is_unchanged_without_one(preset: str):
    graph = PRESETS[preset].graph
    plain = Agent(ScriptedModel([]), preset=preset).graph
    assert Agent(ScriptedModel([]), preset=preset, history=KeepAll()).graph == plain == graph
    with_policy = Agent(ScriptedModel([]), preset=preset, history=Summarize()).graph
    assert {spec.name for spec in with_policy.states} - {spec.name for spec in graph.states} == {"compact"}
    assert {row.id for row in with_policy} - {row.id for row in graph} == {
        "pre_step.history_too_long", "compact.cancelled", "compact.aborted", "compact.failed", "compact.otherwise"
    }  # fmt: skip
    assert [r.id for r in with_policy.rows("pre_step")][-2:] == ["pre_step.history_too_long", "pre_step.otherwise"]


def test_the_moves_of_a_compaction_can_be_forced_in_tests():
    agent, _ = agent_of(history=Summarize())
    through = [p for p in paths(agent, "transitions") if any(row.source == "compact" for row in p.rows)]
    assert len(through) >= 3
    assert {str(force(agent, path).run_result.state) for path in through} == {"terminal"}


def shortening(compaction: Compaction) -> Agent[Any, Any]:
    def shorten(context: StateContext) -> StateResult:
        return StateResult(compaction=compaction if len(context.run.messages) == 5 else None)

    graph = LOOP.with_state(
        StateSpec("shorten", effect=shorten), [Transition("shorten", None, "call_llm")], entered_by="pre_step.otherwise"
    )
    return Agent(RecordingModel(ScriptedModel([call("look", n=1), "done"])), tools=[look], graph=graph)


def test_a_state_of_ones_own_may_leave_messages_out():
    agent = shortening(Compaction(3, (2,), "Short."))
    agent.run_sync("q1", message_history=HISTORY)
    model: Any = agent.model
    check_requests(model.requests)
    assert contents(model)[1:] == ["q1", "", "seen 1"]


@pytest.mark.parametrize(
    ("compaction", "words"),
    [
        (Compaction(5), "the transcript has the messages 0 to 4"),
        (Compaction(-1), "the transcript has the messages 0 to 4"),
        (Compaction(4), "that message is a result, and its call would be left out"),
        (Compaction(3, (1,)), "1 is not the index of an earlier user message"),
        (Compaction(2, (3,)), "3 is not the index of an earlier user message"),
    ],
)
def test_a_cut_that_no_model_accepts_aborts_the_run(compaction: Compaction, words: str):
    result = shortening(compaction).run_sync("q1", message_history=HISTORY)
    assert isinstance(result.outcome, RunAborted)
    assert words in str(result.outcome)


def test_what_cannot_be_a_policy_is_refused():
    for wrong in (20, KeepLast, "all"):
        with pytest.raises(ConfigurationError, match=r"history must be"):
            Agent(ScriptedModel([]), history=wrong)  # type: ignore[arg-type]
    own = LOOP.with_state(
        StateSpec("compact", effect=lambda context: None),
        [Transition("compact", None, "pre_step")],
        entered_by="post_tool.otherwise",
    )
    with pytest.raises(GraphError, match="adds the state 'compact' itself"):
        Agent(ScriptedModel([]), graph=own, history=KeepLast())
    with pytest.raises(ConfigurationError, match="nobody"):
        Agent(ScriptedModel([]), history=Summarize(model="nobody:x"))


def test_a_session_may_keep_more_or_less_than_its_agent_and_resumed_runs_keep_that():
    agent, model = agent_of(*(f"a{n}" for n in range(7)), history=KeepLast(turns=2))
    short, whole = agent.session("short", history=KeepLast(turns=1)), agent.session("whole", history=KeepAll())
    for n in range(2):
        short.run_sync(f"q{n}")
    assert contents(model) == ["q1"]
    for n in range(3):
        result = whole.run_sync(f"w{n}")
    assert contents(model) == ["w0", "a2", "w1", "a3", "w2"]
    assert "history" not in result.journal[0].data
    again = agent.session("short")  # the policy is not kept with the session, but with each of its runs
    again.run_sync("q2")
    assert contents(model) == ["q1", "a1", "q2"]


@pytest.mark.parametrize(
    ("agents", "sessions", "reason"),
    [
        (None, KeepLast(turns=1), "give the agent a policy, too"),
        (KeepAll(), KeepLast(turns=1), "give the agent a policy, too"),
        (KeepLast(turns=2), Summarize(), "only an agent with Summarize"),
        (KeepLast(turns=2), KeepLast(turns=1, max_compactions=3), "max_compactions is part of the agent's table"),
        (Summarize(), Summarize(model="ollama:other"), "model is part of the agent's table"),
        (KeepLast(turns=2), "all", r"history must be KeepAll"),
    ],
)
def test_a_session_with_a_policy_for_which_the_table_has_no_place_is_refused(
    agents: Any, sessions: Any, reason: str
) -> None:
    agent, _ = agent_of(history=agents)
    with pytest.raises(ConfigurationError, match=reason):
        agent.session("s", history=sessions)


def test_a_session_of_an_agent_that_summarizes_may_keep_the_last_turns_instead():
    agent, model = agent_of("a0", "a1", "a2", history=Summarize(above_tokens=1, turns=1))
    session = agent.session("s", history=KeepLast(turns=1))
    for n in range(3):
        session.run_sync(f"q{n}")
    assert contents(model) == ["q2"]
