"""Kills a run that has what users add with SIGKILL at every write and effect, and compares what it comes to.

Before its calls, a state of its own asks the model and makes a call that is not repeated. One batch has a sub-agent
whose call waits for a person, beside another one and a tool with a list of parts as its result. Models stream. What a
person says is sent to the store, where the process dies too. Run as ``python -m tests.helpers.changed_crashes STEP
[POSTGRES-URL]``; prints what it did as JSON. See ``signal_crashes`` for the processes.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from agentfsm import (
    LOOP,
    Agent,
    Allow,
    Host,
    Image,
    ItDidNotRun,
    ItRan,
    Message,
    ModelRequest,
    Reply,
    Run,
    Runs,
    StaleLease,
    StateContext,
    StateSpec,
    Tool,
    ToolCall,
    Transition,
    tool,
)
from agentfsm.errors import StaleHumanReplyError
from agentfsm.journal.records import is_kind
from agentfsm.journal.rehydrate import rehydrate
from agentfsm.journal.store import Store
from agentfsm.journal.verification import GOOD, verify
from agentfsm.loop.guards import aborted, cancelled, doubt_settled, expired, in_doubt
from agentfsm.loop.keys import Keyring
from agentfsm.loop.model import TextChunk
from tests.helpers.crash_injection import exited_cleanly, run_forked
from tests.helpers.quorum_crashes import KillPoints, append, read
from tests.helpers.signal_crashes import MAX_ROUNDS, SECRET, process, stored

PICTURE = Image.from_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(64)))
ONCE = ("stamp", "pay")
"""The tools that are not repeated; the others are idempotent."""
TRANSCRIPT = [
    ("user", "Do it."),
    ("assistant", "Two of them, and a look."),
    ("tool", "Paid a."),
    ("tool", f"before\n{PICTURE.text_placeholder}\nafter"),
    ("tool", "Paid b."),
    ("assistant", "Done."),
]


class Streams:
    """A model that streams what follows from the transcript.

    Args:
        points: Where its process may die.
        says: Its replies, one after the other.
    """

    name = "streams"

    def __init__(self, points: KillPoints, says: list[tuple[str, list[ToolCall]]]) -> None:
        self.points, self.says = points, says

    async def reply(self, request: ModelRequest) -> Reply:
        assert not request.tools, "somebody watches, so it streams"
        self.points.passing("asked by a state")
        return Reply(Message.assistant("as asked"))

    async def stream(self, request: ModelRequest) -> AsyncIterator[TextChunk | Reply]:
        """The reply, in two pieces."""
        turn = sum(message.role == "assistant" for message in request.messages)
        text, calls = self.says[turn]
        for piece in (text[:3], text[3:]):
            yield TextChunk(piece)
            self.points.passing("within a stream")
        yield Reply(Message.assistant(text, tuple(calls)))


async def check(context: StateContext) -> None:
    """What the state of its own does before the calls of a reply."""
    said = await context.ask_model("May it?")
    await context.call_tool("stamp", {"text": said.message.content})


def with_check() -> Any:
    """The loop with that state, and with one in which it waits for whoever knows whether its call ran."""
    stops = [
        Transition(state, guard, "terminal", ends=ends)
        for state in ("check", "asks")
        for guard, ends in ((cancelled, "cancelled"), (aborted, "aborted"))
    ]
    rows = [
        *stops,
        Transition("check", in_doubt, "asks"),
        Transition("check", None, "dispatch_tool"),
        Transition("asks", expired, "terminal", ends="cancelled"),
        Transition("asks", doubt_settled, "check"),
    ]
    own = [replace(row, target="check") if row.id == "post_llm.tool_calls" else row for row in LOOP.transitions]
    states = (*LOOP.states, StateSpec("check", effect=check), StateSpec("asks", waits=True))
    return replace(LOOP, states=states, transitions=(*own, *rows))


def make_agent(folder: Path, points: KillPoints, host: Host) -> Agent:
    """The agent, with what its process may die of."""

    def effect(name: str, text: str) -> str:
        points.passing(f"before {name}")
        append(folder / "effects", f"{name} {text}")
        points.passing(f"after {name}")
        return f"{name} {text}"

    @tool
    async def stamp(text: str) -> str:
        """Stamp."""
        return effect("stamp", text)

    @tool(idempotent=True, parallel=True)
    async def look(text: str) -> list[Any]:
        """Look."""
        effect("look", text)
        return ["before", PICTURE, "after"]

    @tool(requires_approval=True)
    async def pay(text: str) -> str:
        """Pay."""
        return effect("pay", text)

    def helper(name: str) -> Tool:
        says: list[tuple[str, list[ToolCall]]] = [
            ("Pay it.", [ToolCall("p", "pay", {"text": name})]),
            (f"Paid {name}.", []),
        ]
        return Agent(Streams(points, says), tools=[pay]).as_tool(f"helper_{name}", "Helps.", parallel=True)

    calls = [
        ToolCall("1", "helper_a", {"task": "a"}),
        ToolCall("2", "look", {"text": "l"}),
        ToolCall("3", "helper_b", {"task": "b"}),
    ]
    model = Streams(points, [("Two of them, and a look.", calls), ("Done.", [])])
    return Agent(model, tools=[stamp, look, helper("a"), helper("b")], graph=with_check(), host=host)


async def answer(runs: Runs, run_id: str, folder: Path) -> None:
    """Send what a person says, unless that was sent before."""
    if (request := (await runs.get(run_id)).request) is None:
        return
    about = f"{request.tool} {request.arguments['text']}"
    doubt = ItRan(about) if about in read(folder / "effects") else ItDidNotRun()
    try:
        await runs.answer(run_id, Allow() if request.kind == "approval" else doubt, by="ann", to=request.digest)
    except StaleHumanReplyError:  # it is in the store already
        return


async def watch(run: Run) -> None:
    """Advance a run as a program that shows it."""
    async for _ in run:
        pass


async def live(folder: Path, run_id: str, store: Store, points: KillPoints) -> None:
    """Start the run or go on with it, until it has finished and nothing is left to act on."""
    runs, agent = Runs(store, secret=SECRET), make_agent(folder, points, Host(store=store, secret=SECRET))
    for _ in range(MAX_ROUNDS):
        head = await store.head(run_id)
        try:
            if head is None or not head.seq:
                await watch(agent.run("Do it.", run_id=run_id))
                continue
            if head.status == "finished" and not await store.signals.pending(run_id):
                break
            if head.status == "suspended":
                await answer(runs, run_id, folder)
            if run := await agent.next_run(run_id):
                await watch(run)
        except StaleLease:  # the server has not noticed yet that its owner was killed
            await asyncio.sleep(0.01)
    else:
        raise AssertionError(f"run {run_id} does not end")
    await store.aclose()


async def require_as_expected(folder: Path, run_id: str, store: Store) -> int:
    """Check what came of a run; returns how many doubts were settled."""
    doubts = 0
    for head in await store.heads():
        records = await store.records(head.run_id)
        assert (head.status, head.owner) == ("finished", None), head
        assert verify(head.run_id, records, head, keyring=Keyring(SECRET)).code == GOOD, head.run_id
        run = rehydrate(records).run
        assert run.ended == "completed", (head.run_id, run.ended, run.aborted)
        asked = [json.loads(each.body)["waiting"]["kind"] for each in records if is_kind(each, "run.suspended")]
        doubts += asked.count("in_doubt") if head.run_id == run_id else 0
        if head.run_id == run_id:
            assert [(message.role, message.content) for message in run.messages] == TRANSCRIPT
            assert [message.images for message in run.messages if message.images] == [(PICTURE,)]
    assert await store.signals.pending() == []
    effects = Counter(read(folder / "effects"))
    assert set(effects) == {"stamp as asked", "look l", "pay a", "pay b"}, effects
    assert all(times == 1 or name.split()[0] not in ONCE for name, times in effects.items()), effects
    return doubts


def life(url: str, kill_at: int) -> tuple[int, int]:
    """A run that is killed at a point, if any: the points that were passed, and the doubts that were settled."""
    folder, run_id, killed = Path(tempfile.mkdtemp(prefix="changed-")), f"r{kill_at}", 0
    while exited_cleanly(
        os.waitpid(run_forked(partial(process, folder, run_id, url, 0 if killed else kill_at, live)), 0)[1]
    ):
        killed += 1
        assert killed == 1
    doubts = asyncio.run(stored(folder, url, partial(require_as_expected, folder, run_id)))
    points = int((folder / "points").read_text())
    shutil.rmtree(folder)
    return points, doubts


def matrix(step: int, url: str) -> dict[str, int]:
    """Every ``step``-th point; returns the counts."""
    points = life(url, 0)[0]
    lives = [life(url, kill_at) for kill_at in range(1, points + 1, step)]
    return {"points": points, "killed": len(lives), "doubts": sum(doubts for _, doubts in lives)}


if __name__ == "__main__":
    print(json.dumps(matrix(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")))
