"""A run with a sub-agent that crashes at a given point and is resumed: a program that ``test_subagent`` runs.

    python -m tests.helpers.subagent_crash FOLDER WHERE STEP

``WHERE`` is where the process dies (exit code 9) in step 1; step 2 takes up what was cut off, step 3 answers what
a person is asked. Each step prints the last event, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from agentfsm import Agent, Event, Host, ItRan, RunCompleted, RunResult, UserInputRequested, observer
from agentfsm.journal.sqlite import SqliteStore
from agentfsm.testing import ScriptedModel, call

FOLDER, WHERE, STEP = Path(sys.argv[-3]), sys.argv[-2], sys.argv[-1]


def crash_at(here: str) -> None:
    if here == WHERE and STEP == "1":
        os._exit(9)


def count_calls(what: str) -> int:
    """How often something has happened in all processes, including this time."""
    path = FOLDER / what
    path.write_text(path.read_text() + "x" if path.exists() else "x")
    return len(path.read_text())


def act(n: int) -> str:
    """Do something that must not be done twice."""
    count_calls("acted")
    crash_at("tool")
    return f"done {n}"


def last_text(messages: Any) -> str:
    return str(messages[-1].content)


class SubagentModel(ScriptedModel):
    """The sub-agent's model: one call, then an answer, depending on the transcript alone."""

    def __init__(self) -> None:
        super().__init__([self.say] * 9)

    def say(self, messages: Any) -> Any:
        if messages[-1].role == "user":
            return call("ask_user", question="Which?") if WHERE == "answered" else call("act", n=1)
        count_calls("thought")
        crash_at("model")
        crash_at("answered")
        return call("return_done", output=f"below: {last_text(messages)}")


@observer
def at_the_end(event: Event) -> None:
    if isinstance(event, RunCompleted):
        crash_at("end")


def parent_reply(messages: Any) -> Any:
    return call("h", task="x") if messages[-1].role == "user" else f"above: {last_text(messages)}"


async def main() -> None:
    store = SqliteStore(FOLDER / "runs.db")
    helper = Agent(SubagentModel(), tools=[act], preset="funnel", hooks=[at_the_end])
    agent = Agent(
        ScriptedModel([parent_reply] * 9),
        tools=[helper.as_tool("h", "Helps.")],
        host=Host(secret=b"shared", store=store),
    )
    if STEP == "3":
        result = await agent.resume("top", ItRan("it was done"))
    elif STEP == "2":
        runs = await agent.unfinished_runs()
        assert [r.run_id for r in runs] == ["top"], runs
        result = await runs[0]
    else:
        result = await agent.run("go", run_id="top")
        if isinstance(result.outcome, UserInputRequested):
            result = await agent.resume("top", "the left one")
    print_result(result)
    store.close()


def print_result(result: RunResult) -> None:
    asked = result.outcome if isinstance(result.outcome, UserInputRequested) else None
    told = {
        "output": result.output,
        "model_calls": result.run_state.model_calls,
        "outcome": type(result.outcome).__name__,
        "asked": None if asked is None else [asked.kind, asked.asker, asked.tool],
        "acted": len((FOLDER / "acted").read_text()) if (FOLDER / "acted").exists() else 0,
        "thought": len((FOLDER / "thought").read_text()) if (FOLDER / "thought").exists() else 0,
    }
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    asyncio.run(main())
