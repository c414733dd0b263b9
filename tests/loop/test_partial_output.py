"""``PartialOutput``: what of a structured answer has been streamed so far."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
from pydantic import BaseModel

from agentfsm import Agent, ModelRequest, PartialOutput, Reply
from agentfsm.loop import partial_output
from agentfsm.loop.events import Event, ModelReplied, ReplyRestarted, TextDelta
from agentfsm.loop.messages import FinishReason, Message, ToolCall, Usage
from agentfsm.loop.model import StreamChunk, TextChunk, ToolCallChunk


class Town(BaseModel):
    name: str
    people: int


class Streaming:
    """Replies with texts, or arguments of ``return_done``, a few letters at a time."""

    name = "streaming"

    def __init__(self, *texts: str, size: int = 3, tool: str = "") -> None:
        self._texts, self._size, self._tool = list(texts), size, tool

    async def reply(self, request: ModelRequest) -> Reply:
        raise AssertionError("it streams")

    async def stream(self, request: ModelRequest) -> AsyncIterator[StreamChunk | Reply]:
        text = self._texts.pop(0)
        for start in range(0, len(text), self._size):
            piece = text[start : start + self._size]
            yield ToolCallChunk(0, self._tool, piece) if self._tool else TextChunk(piece)
        calls = (ToolCall("1", self._tool, json.loads(text)),) if self._tool else ()
        reason = FinishReason.TOOL_CALLS if self._tool else FinishReason.STOP
        yield Reply(Message.assistant("" if self._tool else text, calls), reason, Usage())


def shown(agent: Agent[Any, Any]) -> tuple[list[Any], Any]:
    """What a consumer has been shown, and the answer."""

    async def main() -> tuple[list[Any], Any]:
        partial, found, run = PartialOutput(), list[Any](), agent.run("go")
        async for event in run:
            if (data := partial.add(event)) is not None:
                found.append(data)
        return found, (await run).output

    return asyncio.run(main())


@pytest.mark.parametrize(
    "text", ['{"name": "Paris", "people": 2113705}', '```json\n{"name": "Paris", "people": 2113705}\n```']
)
def test_an_answer_grows_until_it_is_whole(text: str) -> None:
    found, output = shown(Agent(Streaming(text), output_type=Town))
    assert output == Town(name="Paris", people=2113705)
    assert found[-1] == output.model_dump()
    names = [data.get("name", "") for data in found]
    assert names == sorted(names)
    assert "" in names
    assert any(0 < len(name) < len("Paris") for name in names)
    assert all(earlier != later for earlier, later in pairwise(found))


def test_an_answer_that_is_refused_does_not_show_in_the_next_one() -> None:
    first, second = '{"name": "Lyon", "people": "many"}', '{"name": "Paris", "people": 2}'
    found, _ = shown(Agent(Streaming(first, second), output_type=Town))
    last_of_first = max(i for i, data in enumerate(found) if data.get("name") == "Lyon")
    assert found[last_of_first] == {"name": "Lyon", "people": "many"}
    assert not any("many" in str(data) or data.get("name") == "Lyon" for data in found[last_of_first + 1 :])
    assert found[-1] == {"name": "Paris", "people": 2}


def test_an_answer_that_is_the_argument_of_return_done() -> None:
    text = '{"output": {"name": "Paris", "people": 2}}'
    found, output = shown(Agent(Streaming(text, tool="return_done"), preset="funnel", output_type=Town))
    assert (output, found[-1]) == (Town(name="Paris", people=2), {"name": "Paris", "people": 2})
    assert {"name": "Pa"} in found or {"name": "Par"} in found or {"name": "Pari"} in found


def test_an_answer_in_words_has_no_parts() -> None:
    assert shown(Agent(Streaming("Paris, I think, [or not]"))) == ([], "Paris, I think, [or not]")


def event(kind: type[Event], **fields: Any) -> Any:
    return kind(run_id="r", seq=1, time=0.0, **fields)


def test_another_model_begins_anew() -> None:
    partial = PartialOutput()
    assert partial.add(event(TextDelta, text='{"a": 1')) == {"a": 1}
    assert partial.add(event(ReplyRestarted, reason="busy")) is None
    assert partial.add(event(TextDelta, text='{"b": 2')) == {"b": 2}


def test_a_long_answer_is_not_read_anew_for_each_piece_and_still_shown_whole() -> None:
    whole = {"rows": [f"row {number}" for number in range(3_000)]}
    text, partial = json.dumps(whole), PartialOutput()
    with mock.patch.object(partial_output, "from_json", wraps=partial_output.from_json) as reads:
        for start in range(0, len(text), 4):
            partial.add(event(TextDelta, text=text[start : start + 4]))
        read = sum(len(each.args[0]) for each in reads.call_args_list)
        final = partial.add(event(ModelReplied, message=Message.assistant(text), usage=Usage()))
    assert final == whole
    assert read < 60 * len(text)  # pieces of 4 letters, each read anew, would be thousands of times as much
