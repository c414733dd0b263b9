"""Sessions: runs that continue each other from the store, one at a time, in any process; and single steps of a run."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from agentfsm import (
    Agent,
    AgentGuardrails,
    Allow,
    ConfigurationError,
    Host,
    ItDidNotRun,
    JournalError,
    MemoryStore,
    Message,
    RunCancelled,
    RunEndedError,
    RunError,
    RunOptions,
    SessionBusyError,
    SessionOpenError,
    SqliteStore,
    TextDelta,
    ToolContext,
    UserInputRequested,
    tool,
)
from agentfsm.journal.replay import replay
from agentfsm.testing import FakeClock, RecordingModel, ScriptedModel, call
from tests.helpers.child_process import child_environment, run_helper
from tests.helpers.session_worker import SECRET, vanish
from tests.helpers.stepped_clock import SteppedClock


def sent(model: RecordingModel, number: int = -1) -> list[tuple[str, str]]:
    """The roles and texts of a request."""
    return [(m.role.value, m.content) for m in model.requests[number].messages]


def agent_of(*script: Any, store: Any = None, **more: Any) -> tuple[Agent[Any, Any], RecordingModel]:
    model = RecordingModel(ScriptedModel(list(script)))
    return Agent(model, host=Host(store=store or MemoryStore()), **more), model


@tool(requires_approval=True)
def pay(usd: int) -> str:
    """Pay."""
    return f"paid {usd}"


# -- continuing -----------------------------------------------------------------------------------


def test_a_run_continues_where_the_last_one_ended_with_and_without_a_message():
    agent, model = agent_of("Hello Ann.", "Ann.", "Anything else?", instructions="Be brief.")
    session = agent.session("ann")
    assert session.run_sync("I am Ann.").output == "Hello Ann."
    assert session.run_sync("Who am I?").output == "Ann."
    begins = [("system", "Be brief."), ("user", "I am Ann."), ("assistant", "Hello Ann."), ("user", "Who am I?")]
    assert sent(model) == begins
    assert session.run_sync().output == "Anything else?"
    assert sent(model) == [*begins, ("assistant", "Ann."), ("user", "Continue.")]


def test_a_session_that_waits_is_answered_without_an_event_loop_and_refuses_inside_one():
    agent, _ = agent_of(call("pay", usd=5), "Paid.", tools=[pay])
    session = agent.session("ann")
    waiting = session.run_sync("Pay 5.")
    assert session.resume_sync(Allow(), to=waiting.outcome.digest).output == "Paid."

    async def inside() -> None:
        for method, work in (("run", lambda: session.run_sync("x")), ("resume", lambda: session.resume_sync(Allow()))):
            with pytest.raises(RunError, match=rf"{method}_sync cannot be .* use 'await session.{method}\(\.\.\.\)'"):
                work()

    asyncio.run(inside())


def test_another_agent_continues_with_its_own_instructions():
    store = MemoryStore()
    one, _ = agent_of("a", store=store, instructions="One.")
    one.session("s").run_sync("x")
    host = one.config.host
    model = RecordingModel(ScriptedModel(["b"]))
    Agent(model, host=host, instructions="Two.").session("s").run_sync("y")
    assert sent(model) == [("system", "Two."), ("user", "x"), ("assistant", "a"), ("user", "y")]


def test_the_newest_run_with_the_id_is_continued_however_it_was_started():
    agent, model = agent_of("a", "b", "c")
    agent.run_sync("x", session_id="s")
    agent.run_sync("not in it", session_id="other")
    agent.session("s").run_sync("y")
    assert sent(model) == [("user", "x"), ("assistant", "a"), ("user", "y")]


def test_what_a_session_says_of_itself():
    async def main() -> None:
        agent, _ = agent_of("b")
        session = agent.session("s")
        assert (await session.last_run(), await session.messages(), await session.waiting()) == (None, [], None)
        run = session.run("a", tags=["t"], metadata={"n": 1}, actor="kim")
        with pytest.raises(RunError, match="gets its id when it is loaded"):
            _ = run.run_id
        await run.load()
        assert await session.last_run() is None  # loading writes nothing
        result = await run
        last = await session.last_run()
        assert last is not None
        assert (last.run_id, last.status, last.session_id, last.tags, last.actor) == (
            run.run_id, "finished", "s", ("t",), "kim"
        )  # fmt: skip
        assert await session.messages() == [Message.user("a"), Message.assistant("b")] == result.messages

    asyncio.run(main())


def test_a_run_of_a_session_streams_like_any_other():
    async def main() -> list[str]:
        agent, _ = agent_of("one two")
        return [event.text async for event in agent.session("s").run("go") if isinstance(event, TextDelta)]

    assert "".join(asyncio.run(main())) == "one two"


def test_a_replay_of_a_later_run_needs_that_run_alone():
    async def main() -> None:
        store = MemoryStore()
        agent, _ = agent_of("a", "b", store=store)
        await agent.session("s").run("x")
        result = await agent.session("s").run("y")
        records = await store.records(result.outcome.run_id)
        assert replay(records, agent.graph).same
        assert [m["content"] for m in result.journal[0].data["messages"]] == ["x", "a", "y"]

    asyncio.run(main())


def test_another_process_begins_and_this_one_continues(tmp_path: Path):
    path = tmp_path / "runs.db"
    assert run_helper("session_worker", str(path), "say", "I am Ann.") == {"output": "Hello Ann."}
    model = RecordingModel(ScriptedModel(["Ann."]))
    agent = Agent(model, host=Host(store=SqliteStore(path), secret=SECRET))
    agent.session("ann").run_sync("Who am I?")
    assert sent(model) == [("user", "I am Ann."), ("assistant", "Hello Ann."), ("user", "Who am I?")]


# -- one run at a time ----------------------------------------------------------------------------


def test_of_two_simultaneous_runs_one_is_refused_and_says_who_runs():
    async def main() -> None:
        agent, model = agent_of("a", "b")
        session = agent.session("s")
        first, second = await asyncio.gather(session.run("x"), session.run("y"), return_exceptions=True)
        assert getattr(first, "output", None) == "a"
        assert isinstance(second, SessionBusyError)
        assert f"held by process {os.getpid()}" in str(second)
        assert f"process {os.getpid()}" in str(second.owner)
        assert second.run_id == first.outcome.run_id
        assert len(model.requests) == 1
        await session.run("y")
        assert sent(model) == [("user", "x"), ("assistant", "a"), ("user", "y")]

    asyncio.run(main())


def test_a_run_that_was_loaded_before_another_one_ended_is_refused():
    """It would answer without knowing what was said meanwhile."""

    async def main() -> None:
        agent, model = agent_of("a", "b")
        session = agent.session("s")
        late = await session.run("y").load()
        await session.run("x")
        with pytest.raises(SessionBusyError, match="was continued in the meantime"):
            await late
        assert len(model.requests) == 1
        last = await session.last_run()
        assert (last and last.prompt) == "x"

    asyncio.run(main())


# -- runs that have not ended ---------------------------------------------------------------------


def test_a_session_that_waits_says_for_what_and_goes_on_after_the_answer():
    async def main() -> None:
        agent, model = agent_of(call("pay", usd=7), "Paid.", "Bye.", tools=[pay])
        session = agent.session("s")
        assert isinstance((await session.run("Pay 7.")).outcome, UserInputRequested)
        for prompt in ("Pay 8.", None):
            with pytest.raises(
                SessionOpenError, match=r'approval: .* pay \{"usd": 7\}. Answer with session.resume'
            ) as e:
                await session.run(prompt)
            assert e.value.request == await session.waiting()
        request = await session.waiting()
        assert request is not None
        assert (request.tool, dict(request.arguments)) == ("pay", {"usd": 7})
        assert (await session.resume(Allow(), to=request.digest)).output == "Paid."
        with pytest.raises(RunEndedError, match=r"has ended: continue with session\.run"):
            await session.resume(Allow())
        await session.run("Bye.")
        assert [role for role, _ in sent(model)] == ["user", "assistant", "tool", "assistant", "user"]

    asyncio.run(main())


def test_a_session_whose_request_has_expired_says_so():
    async def main() -> None:
        clock = FakeClock()
        host = Host(store=MemoryStore(), secret=SECRET, clock=clock)
        limits = AgentGuardrails(validity_s=60)
        agent = Agent(ScriptedModel([call("pay", usd=7), "Bye."]), tools=[pay], host=host, guardrails=limits)
        session = agent.session("s")
        await session.run("Pay 7.")
        clock.advance(61)
        with pytest.raises(SessionOpenError, match=r"It has expired: end that run with session\.dismiss\(\)$"):
            await session.run("Bye.")
        assert (await session.dismiss()).decisions[-1].guard == "expired"
        assert (await session.run("Bye.")).output == "Bye."

    asyncio.run(main())


def test_a_waiting_run_can_be_dismissed_and_its_call_has_a_result():
    async def main() -> None:
        agent, model = agent_of(call("pay", usd=7), "Fine.", tools=[pay])
        session = agent.session("s")
        await session.run("Pay 7.")
        assert isinstance((await session.dismiss("too late")).outcome, RunCancelled)
        await session.run("Never mind.")
        assert [role for role, _ in sent(model)] == ["user", "assistant", "tool", "user"]

    asyncio.run(main())


def test_a_killed_process_leaves_a_run_that_the_session_resumes(tmp_path: Path):
    path = tmp_path / "runs.db"
    command = [sys.executable, "-m", "tests.helpers.session_worker", str(path), "hang"]
    child = subprocess.run(command, env=child_environment(), capture_output=True, check=False)
    assert child.returncode == -signal.SIGKILL, child.stderr
    agent = Agent(ScriptedModel(["Done.", "Bye."]), tools=[vanish], host=Host(store=SqliteStore(path), secret=SECRET))

    async def main() -> None:
        session = agent.session("ann")
        with pytest.raises(
            SessionOpenError, match=r"was interrupted: continue it with session.run\(\) first"
        ) as raised:
            await session.run("Hello?")
        assert raised.value.request is None
        for more in ({"tags": ["t"]}, {"actor": "kim"}, {"options": RunOptions()}):
            with pytest.raises(RunError, match="continues as it was started"):
                await session.run(**more)
        doubt = await session.run()  # nobody knows whether the tool has done its work
        assert doubt.run_state.pending_request.kind == "in_doubt"
        await session.dismiss()
        assert (await session.run("Hello?")).output == "Done."

    asyncio.run(main())


def test_a_run_that_was_tampered_with_is_not_continued(tmp_path: Path):
    run_helper("session_worker", str(tmp_path / "runs.db"), "say", "I am Ann.")
    store = SqliteStore(tmp_path / "runs.db")
    agent = Agent(ScriptedModel(["a"]), host=Host(store=store, secret=b"another secret, which did not seal it"))
    with pytest.raises(JournalError):
        agent.session("ann").run_sync("Who am I?")


@pytest.mark.parametrize("ended", [True, False], ids=["ended", "waiting"])
def test_a_run_that_is_only_listed_in_a_session_is_not_read_or_continued(tmp_path: Path, ended: bool):
    path = tmp_path / "runs.db"
    script = ["Noted."] if ended else [call("pay", usd=4711)]

    async def main() -> None:
        async with SqliteStore(path) as store:
            agent, _ = agent_of(*script, store=store, tools=[pay])
            await agent.session("ann").run("My account is 4711.")
        with closing(sqlite3.connect(path)) as db, db:
            assert db.execute("UPDATE run_info SET session = 'eve' WHERE session = 'ann'").rowcount == 1
        async with SqliteStore(path) as store:
            agent, model = agent_of("x", "x", store=store, tools=[pay])
            session, head = agent.session("eve"), await store.heads()
            tries: list[Any] = [lambda: session.run("What do you know?"), session.run, session.messages]
            if not ended:
                tries += [session.waiting, lambda: session.resume(Allow()), session.dismiss]
            for attempt in tries:
                with pytest.raises(JournalError, match=r"session 'eve'.*agentfsm verify") as caught:
                    await attempt()
                assert "4711" not in str(caught.value)
                assert "ann" not in str(caught.value)
            assert (model.requests, await store.heads()) == ([], head)

    asyncio.run(main())


# -- what a run is given --------------------------------------------------------------------------


def test_dependencies_reach_tools_and_missing_ones_are_refused():
    @tool
    def who(context: ToolContext[str]) -> str:
        """Who asks."""
        return context.deps

    agent, model = agent_of(call("who"), "ok", "ok", tools=[who], deps_type=str)
    session = agent.session("s")
    session.run_sync("x", deps="Ann")
    assert ("tool", "Ann") in sent(model)
    with pytest.raises(RunError, match=r"session.run\(prompt, deps=...\)"):
        session.run_sync("y")
    with pytest.raises(RunError, match="not int"):
        session.run("y", deps=7)


def test_a_secret_of_an_earlier_run_is_withheld_in_later_ones():
    @tool
    def log_in(password: SecretStr) -> str:
        """Log in."""
        return "in"

    async def main() -> None:
        store = MemoryStore()
        agent, _ = agent_of(
            call("log_in", password="hunter2-hunter2"), "ok", "It was hunter2-hunter2.", tools=[log_in], store=store
        )
        await agent.session("s").run("x", options=None)
        result = await agent.session("s").resume() if await agent.session("s").waiting() else None
        assert result is None
        second = await agent.session("s").run("y")
        text = "".join(r.body + r.hidden for r in await store.records(second.outcome.run_id))
        assert "hunter2" not in text

    asyncio.run(main())


@pytest.mark.parametrize("bad", ["", " ", " a", "a\nb", "a  b", "x" * 201, "a\0b", "\ud800", 7])
def test_an_id_by_which_no_run_would_be_found_is_refused(bad: Any):
    agent, _ = agent_of()
    with pytest.raises(RunError, match="session_id"):
        agent.session(bad)


def test_what_cannot_be_a_session_is_refused():
    with pytest.raises(ConfigurationError, match=r"has no store: Host\(store="):
        Agent(ScriptedModel([])).session("s")
    agent, _ = agent_of("a")
    with pytest.raises(RunError, match="give a prompt"):
        agent.session("s").run_sync()
    with pytest.raises(RunError, match=r"has no run yet: begin with session.run\(prompt\)"):
        asyncio.run(_resume(agent))
    with pytest.raises(RunError, match=r"a prompt must be a string, or a list of .* not int"):
        agent.session("s").run(7)  # type: ignore[arg-type]

    async def inside() -> None:
        agent.session("s").run_sync("x")

    with pytest.raises(RunError, match=r"'await session.run\(...\)'"):
        asyncio.run(inside())


async def _resume(agent: Agent[Any, Any]) -> None:
    await agent.session("s").resume()


# -- single steps ---------------------------------------------------------------------------------


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


def test_each_step_is_one_model_call_and_what_follows_from_it():
    async def main() -> None:
        agent, model = agent_of(
            call("add", a=1, b=2), [call("add", a=3, b=4), call("add", a=5, b=6)], "18", tools=[add]
        )
        run = agent.session("s").run("Add up.")
        seen = []
        while not run.finished:
            decisions = await run.step()
            results = [m.content for m in run.run_state.messages if m.role == "tool"]
            seen.append((len(model.requests), results, decisions[-1].transition.target))
        assert seen == [
            (1, ["3"], "call_llm"),
            (2, ["3", "7", "11"], "call_llm"),
            (3, ["3", "7", "11"], "terminal"),
        ]
        assert run.result.output == "18"
        assert await run.step() == ()

    asyncio.run(main())


def test_a_loop_of_ones_own_can_stop_or_leave_the_rest_to_the_run():
    async def main() -> None:
        agent, _ = agent_of(call("add", a=1, b=2), "3", call("add", a=1, b=2), "never", tools=[add])
        run = agent.run("Add.")
        await run.step()
        assert (await run).output == "3"
        stopped = agent.run("Add.")
        await stopped.step()
        stopped.cancel("enough")
        await stopped.step()
        assert isinstance(stopped.result.outcome, RunCancelled)

    asyncio.run(main())


def test_a_step_ends_where_the_run_waits_for_a_person():
    async def main() -> None:
        agent, _ = agent_of(call("pay", usd=7), "Paid.", tools=[pay])
        session = agent.session("s")
        run = session.run("Pay.")
        await run.step()
        assert (run.finished, run.state) == (True, "suspended")
        resumed = session.resume(Allow())
        await resumed.step()
        assert resumed.result.output == "Paid."

    asyncio.run(main())


def test_the_time_between_steps_is_the_callers():
    async def main() -> None:
        clock = SteppedClock()
        model = ScriptedModel([call("add", a=1, b=2), "3"])
        run = Agent(model, tools=[add], host=Host(clock=clock)).run("Add.")
        await run.step()
        clock.advance(10_000)  # longer than the run may take
        await run.step()
        assert run.result.output == "3"
        assert run.run_state.elapsed_s < 100

    asyncio.run(main())


def test_a_step_is_refused_while_the_run_is_awaited_elsewhere():
    async def main() -> None:
        agent, _ = agent_of("a")
        run = agent.run("x")
        first, second = await asyncio.gather(run.step(), run.step(), return_exceptions=True)
        assert not isinstance(first, BaseException)
        assert isinstance(second, RunError)

    asyncio.run(main())


def test_a_call_in_doubt_is_settled_through_the_session():
    async def main() -> None:
        agent, _ = agent_of("unused")
        with pytest.raises(RunError, match="has no run yet"):
            await agent.session("s").resume(ItDidNotRun())

    asyncio.run(main())
