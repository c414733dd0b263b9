"""The pieces of a streamed reply: the program gets them as they are, others without the secrets in them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence

import pytest
from pydantic import BaseModel, SecretStr

from agentfsm import (
    Agent,
    Event,
    Host,
    Message,
    ModelRequest,
    ReasoningDelta,
    Reply,
    TextDelta,
    ToolCallDelta,
    observer,
)
from agentfsm.loop.model import KeepAlive, ReasoningChunk, StreamChunk, StreamRestart, TextChunk, ToolCallChunk

SECRET = "tr0ub4dor&3-of-the-host"


class Streaming:
    """A model that streams given chunks."""

    name = "streaming"

    def __init__(self, chunks: Sequence[StreamChunk], answer: str = "Done.") -> None:
        self.chunks = chunks
        self.answer = Reply(Message.assistant(answer))

    async def reply(self, request: ModelRequest) -> Reply:
        return self.answer

    async def stream(self, request: ModelRequest) -> AsyncIterator[StreamChunk | Reply]:
        for chunk in self.chunks:
            yield chunk
        yield self.answer


async def events_of(model: Streaming, output_type: type[BaseModel] | None = None) -> list[Event]:
    agent = Agent(model, host=Host(secrets=[SecretStr(SECRET)]), output_type=output_type)
    return [event async for event in agent.run("Go.")]


def pieces(chunks: Sequence[StreamChunk], kind: type[Event] = TextDelta) -> list[Event]:
    return [event for event in asyncio.run(events_of(Streaming(chunks))) if isinstance(event, kind)]


def test_a_secret_over_several_pieces_is_withheld_and_the_program_has_it() -> None:
    events = pieces([TextChunk(text) for text in ("It is tr0ub4", "dor&3-of", "-the-host", ", I think")])
    assert [event.text for event in events if isinstance(event, TextDelta)] == [
        "It is tr0ub4",
        "dor&3-of",
        "-the-host",
        ", I think",
    ]
    assert [event.to_dict()["text"] for event in events] == ["It is [withheld]", "", "", ", I think"]
    assert "tr0ub4" not in repr(events)
    assert "-the-host" not in repr(events)


def test_reasoning_and_arguments_are_looked_at_in_the_same_way() -> None:
    halves = SECRET[:9], SECRET[9:]
    reasoning = pieces([ReasoningChunk(half) for half in halves], ReasoningDelta)
    assert [event.to_dict()["text"] for event in reasoning] == ["[withheld]", ""]
    calls = [
        ToolCallChunk(index, "say", half) for half in (f'{{"text": "{halves[0]}', f'{halves[1]}"}}') for index in (0, 1)
    ]
    shown = [event.to_dict() for event in pieces(calls, ToolCallDelta)]
    assert [(each["index"], each["arguments"]) for each in shown] == [
        (0, '{"text": "[withheld]'),
        (1, '{"text": "[withheld]'),
        (0, '"}'),
        (1, '"}'),
    ]


def test_what_comes_while_a_piece_waits_comes_after_it() -> None:
    chunks = [TextChunk("It is tr0ub4"), KeepAlive(), ReasoningChunk("Hm."), TextChunk("dor no")]
    events = pieces(chunks, Event)
    deltas = [event.to_dict()["text"] for event in events if isinstance(event, TextDelta | ReasoningDelta)]
    assert deltas == ["It is tr0ub4", "Hm.", "dor no"]
    assert [event.seq for event in events] == list(range(1, len(events) + 1))


def test_a_piece_that_waits_is_sent_before_a_reply_restarts_and_at_its_end() -> None:
    events = pieces([TextChunk("It is tr0ub4"), StreamRestart("again"), TextChunk("It is tr0ub4")], Event)
    kinds = [type(event).__name__ for event in events]
    assert kinds.index("ReplyRestarted") == kinds.index("TextDelta") + 1
    assert [e.to_dict()["text"] for e in events if isinstance(e, TextDelta)] == ["It is tr0ub4", "It is tr0ub4"]


def test_an_observer_has_each_other_piece_at_once() -> None:
    seen: list[str] = []

    @observer
    def see(event: Event) -> None:
        if isinstance(event, TextDelta):
            seen.append(event.text)

    class Asking(Streaming):
        async def stream(self, request: ModelRequest) -> AsyncIterator[StreamChunk | Reply]:
            for number, chunk in enumerate(self.chunks):
                assert len(seen) == number
                yield chunk
            yield self.answer

    model = Asking([TextChunk("The "), TextChunk("door"), TextChunk(" is tr")])
    Agent(model, host=Host(secrets=[SecretStr(SECRET)]), hooks=[see]).run_sync("Go.")
    assert seen == ["The ", "door", " is tr"]


class Login(BaseModel):
    user: str
    token: SecretStr


@pytest.mark.parametrize("streams", [True, False])
def test_the_text_of_an_answer_with_secrets_is_shown_when_it_is_complete(streams: bool) -> None:
    answer = '{"user": "ann", "token": "9941-7700-zz"}'
    chunks = [TextChunk(answer[:20]), TextChunk(answer[20:])] if streams else []
    events = asyncio.run(events_of(Streaming(chunks, answer), Login))
    shown = json.dumps([event.to_dict() for event in events])
    assert "9941" not in shown
    assert '"content": "{\\"user\\": \\"ann\\", \\"token\\": \\"[withheld]\\"}"' in shown
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == answer
