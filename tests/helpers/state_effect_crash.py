"""A run whose own state is killed inside its effect and resumed: a program that ``test_state_context`` runs.

    python -m tests.helpers.state_effect_crash FOLDER WHERE STEP

``WHERE`` is where the process dies (exit code 9) in step 1; step 2 continues the run, step 3 answers what a person is
asked, with the answer that ``WHERE`` names. Each step prints what has happened, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from agentfsm import (
    LOOP,
    Agent,
    Host,
    ItDidNotRun,
    ItRan,
    StateContext,
    StateSpec,
    ToolContext,
    Transition,
    UserInputRequested,
    tool,
)
from agentfsm.journal.sqlite import SqliteStore
from agentfsm.loop.guards import approval_decided, approval_required, doubt_settled, expired, in_doubt
from agentfsm.testing import ScriptedModel

FOLDER, WHERE, STEP = Path(sys.argv[-3]), sys.argv[-2], sys.argv[-1]


def crash_at(here: str) -> None:
    if here == WHERE and STEP == "1":
        os._exit(9)


def add_line(name: str, line: str = "x") -> None:
    """Write a line of what has happened in all processes."""
    with (FOLDER / name).open("a") as file:
        file.write(f"{line}\n")


def lines(name: str) -> list[str]:
    path = FOLDER / name
    return path.read_text().splitlines() if path.exists() else []


@tool(idempotent=True)
def look(context: ToolContext) -> str:
    """Look, which may be done twice."""
    add_line("looked", context.idempotency_key)
    crash_at("in look")
    return "seen"


@tool
def send() -> str:
    """Send, which cannot be taken back."""
    add_line("sent")
    crash_at("in send")
    return "sent"


def critic_reply(messages: Any) -> str:
    text = str(messages[-1].content)
    add_line("asked")
    if text == "second":
        crash_at("second question")
    return text


CRITIC = ScriptedModel([critic_reply] * 9)


async def review(context: StateContext) -> list[str]:
    first = await context.ask_model("first", model=CRITIC)
    crash_at("after the first question")
    looked = await context.call_tool("look", {})
    sent = await context.call_tool("send", {})
    crash_at("after send")
    second = await context.ask_model("second", model=CRITIC)
    return [first.message.content, looked.content, sent.content, second.message.content]


def make_agent(store: SqliteStore) -> Agent:
    rows = [
        Transition("asking", expired, "terminal", ends="cancelled"),
        Transition("asking", approval_decided, "review"),
        Transition("asking", doubt_settled, "review"),
    ]
    own = [Transition("review", None, "terminal", ends="completed")]
    graph = LOOP.with_state(StateSpec("review", effect=review), own, entered_by="post_llm.otherwise")
    entrance = Transition("review", approval_required, "asking")
    graph = graph.with_state(StateSpec("asking", waits=True), rows, entered_by=entrance)
    graph = graph.with_transition(Transition("review", in_doubt, "asking"))
    host = Host(secret=b"shared", store=store)
    return Agent(ScriptedModel(["draft"]), graph=graph, tools=[look, send], host=host)


async def main() -> None:
    store = SqliteStore(FOLDER / "runs.db")
    agent = make_agent(store)
    if STEP == "1":
        result = await agent.run("go", run_id="one")
    elif STEP == "2":
        (unfinished,) = await agent.unfinished_runs()
        result = await unfinished
    else:
        result = await agent.resume("one", ItRan("it was sent") if WHERE == "ran" else ItDidNotRun())
    waits = result.outcome if isinstance(result.outcome, UserInputRequested) else None
    told = {
        "noted": result.run_state.state_results.get("review"),
        "kind": "" if waits is None else waits.kind,
        "tool": "" if waits is None else waits.tool,
        "asked": len(lines("asked")),
        "looked": len(lines("looked")),
        "keys": lines("looked"),
        "sent": len(lines("sent")),
        "model_calls": result.run_state.model_calls,
    }
    sys.stdout.write(json.dumps(told))
    store.close()


if __name__ == "__main__":
    asyncio.run(main())
