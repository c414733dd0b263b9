"""Images that tools return: sent with the result, journaled once, and restored after a restart."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from agentfsm import Agent, Allow, Host, Image, MemoryStore, Message, RunResult, UserInputRequested, tool
from agentfsm.journal.rehydrate import rehydrate
from agentfsm.testing import RecordingModel, ScriptedModel, call

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 4
RED = Image.from_bytes(PNG)
BIG = Image.from_bytes(b"\x89PNG\r\n\x1a\n" + b"\x01\x02\x03" * 100_000)


class Odd:
    """No JSON."""

    def __str__(self) -> str:
        return "odd"


def shown(value: Any, **agent: Any) -> RunResult:
    """A run whose tool returns a value."""

    def look() -> Any:
        """Look."""
        return value

    return asyncio.run(_run(Agent(ScriptedModel([call("look"), "ok"]), tools=[look], **agent)))


async def _run(agent: Agent) -> RunResult:
    return await agent.run("go")


@pytest.mark.parametrize(
    ("value", "text", "images"),
    [
        (RED, "[image, image/png, 1,032 bytes]", 1),
        ([RED], "[image, image/png, 1,032 bytes]", 1),
        (
            ("left:", RED, {"n": 1}, RED),
            'left:\n[image, image/png, 1,032 bytes]\n{"n":1}\n[image, image/png, 1,032 bytes]',
            2,
        ),
        (
            [None, RED, Odd()],
            f"{RED.text_placeholder}\nodd",
            1,
        ),  # nothing says nothing; what is no JSON is told as it is
        (["no", "picture", None], '["no","picture",null]', 0),
        ([], "[]", 0),
        (None, "done", 0),
    ],
)
def test_a_tool_may_return_images_between_text(value: Any, text: str, images: int) -> None:
    message = shown(value).messages[2]
    assert message.content == text
    assert message.images == (RED,) * images


def test_the_next_request_has_the_image() -> None:
    model = RecordingModel(ScriptedModel([call("look"), "ok"]))

    def look() -> Image:
        """Look."""
        return RED

    asyncio.run(_run(Agent(model, tools=[look])))
    assert [message.images for message in model.requests[1].messages] == [(), (), (RED,)]


def test_the_journal_stores_an_image_once_and_redacted() -> None:
    store = MemoryStore()
    result = shown(BIG, host=Host(store=store))
    rows = asyncio.run(store.records(result.outcome.run_id))
    assert sum(BIG.data in row.body for row in rows) == 0
    assert [row.hidden.count(BIG.data) for row in rows if BIG.data in row.hidden] == [1]
    assert sum(len(row.body) + len(row.hidden) for row in rows) < len(BIG.data) + 20_000


def test_a_run_that_waits_resumes_from_the_store_and_from_its_record_with_its_images() -> None:
    @tool(requires_approval=True)
    def send() -> str:
        """Send it."""
        return "sent"

    def look() -> Image:
        """Look."""
        return RED

    async def main(stored: bool) -> RunResult:
        host = Host(secret=b"x", store=MemoryStore() if stored else None)

        def agent(*script: Any) -> Agent:
            return Agent(RecordingModel(ScriptedModel(script)), tools=[look, send], host=host)

        first = await agent(call("look"), call("send")).run("go")
        assert isinstance(first.outcome, UserInputRequested)
        then = agent("done")
        if stored:
            return await then.resume(first.outcome.run_id, Allow())
        return await then.resume(first.outcome.suspension_record.to_json(), Allow())

    for stored in (True, False):
        result = asyncio.run(main(stored))
        assert result.output == "done"
        assert [message.images for message in result.messages if message.images] == [(RED,)]


def test_nothing_of_it_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        result = shown(RED)
    assert RED.data[:24] not in caplog.text + repr(result) + repr(result.messages)


def test_images_of_an_earlier_conversation_are_kept_hidden_and_come_back() -> None:
    store = MemoryStore()
    earlier = [Message.user("look", [BIG]), Message.assistant("seen")]
    agent = Agent(ScriptedModel(["ok"]), host=Host(store=store))

    async def main() -> RunResult:
        return await agent.run("and now?", message_history=earlier)

    run_id = asyncio.run(main()).outcome.run_id
    rows = asyncio.run(store.records(run_id))
    assert not any(BIG.data in row.body for row in rows)
    assert sum(row.hidden.count(BIG.data) for row in rows) == 1
    assert rehydrate(rows).run.messages[:2] == earlier
