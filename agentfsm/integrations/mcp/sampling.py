"""Sampling: what an MCP server asks a model during a call of one of its tools.

Each request is answered by a run of the agent in ``MCPSettings.sampling``: within what is left of the calling run's
budgets, charged to it, and in the journal as a run of its own. Its id depends on the call and on what is asked, so that
a call that is repeated after a crash continues where that run is, and pays for no reply twice.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Collection
from typing import Any, Protocol, cast, runtime_checkable

from agentfsm.errors import ToolError
from agentfsm.loop.canonical_json import canonical_json
from agentfsm.loop.messages import Image, Message, Role, Usage
from agentfsm.loop.state import CallState
from agentfsm.runtime.delegation import (
    CallingRun,
    Sample,
    SampledReply,
    Sampler,
    SampleRequest,
    run_id_for_request,
)
from agentfsm.runtime.tools import Tool


@runtime_checkable
class SamplingAgent(Protocol):
    """An ``Agent``, as the settings take it."""

    def as_tool(self, name: str, description: str) -> Tool:
        """The agent as a tool."""
        ...


def sampler_of(agent: SamplingAgent) -> Sampler:
    """What answers requests with an agent.

    Raises:
        ValueError: It has tools.
    """
    delegate: Any = agent.as_tool("sampling", "Answers the requests of a server.").delegate
    if delegate.tools:
        names = ", ".join(sorted(delegate.tools))
        raise ValueError(f"the agent has tools ({names}), and whoever runs the server could have them called")
    return cast("Sampler", delegate)


def read_request(params: Any) -> SampleRequest:
    """A request in the words of this library.

    Raises:
        ToolError: It is not a request that can be answered here.
    """
    if params.tools:
        raise ToolError("sampling with tools is not supported")
    messages = tuple(_read_message(each) for each in params.messages)
    if not messages or messages[-1].role is not Role.USER or not messages[-1].content:
        raise ToolError("the last message must be a text of the user")
    if params.max_tokens < 1:
        raise ToolError("max_tokens must be at least 1")
    wishes = {"temperature": params.temperature, "stop": params.stop_sequences}
    return SampleRequest(
        messages=messages,
        instructions=params.system_prompt or "",
        settings={name: value for name, value in wishes.items() if value is not None},
        max_tokens=params.max_tokens,
    )


def _read_message(message: Any) -> Message:
    texts: list[str] = []
    images: list[Image] = []
    for part in message.content_as_list:
        match part.type:
            case "text":
                texts.append(part.text)
            case "image" if message.role == "user":
                try:
                    images.append(Image(part.mime_type, part.data))
                except ValueError as error:
                    raise ToolError(f"an image cannot be read: {error}") from None
            case kind:
                raise ToolError(f"sampling with content of type {kind!r} is not supported")
    text = "\n\n".join(texts)
    return Message.user(text, images) if message.role == "user" else Message.assistant(text)


class Samples:
    """Answers what the server asks a model during one call. It belongs to the call, and ends with it."""

    def __init__(
        self, sampler: Sampler, caller: CallingRun, call_state: CallState, charged: Collection[str] = ()
    ) -> None:
        self._sampler, self._caller, self._call_state = sampler, caller, call_state
        self._before = tuple(charged)
        self._begun = caller.host.clock.monotonic()
        self._made: list[Sample] = []
        self._tasks: set[asyncio.Task[SampledReply]] = set()
        self._turn = asyncio.Lock()

    @property
    def charged(self) -> list[str]:
        """The ids of the runs for which the calling run is charged by now."""
        return [*self._before, *(each.run_id for each in self._new)]

    @property
    def usage(self) -> Usage:
        """What these requests have used."""
        return sum((each.usage for each in self._new), Usage())

    @property
    def model_calls(self) -> int:
        """How many model calls were made for them."""
        return sum(each.model_calls for each in self._new)

    @property
    def _new(self) -> list[Sample]:
        return [each for each in self._made if each.run_id not in self._before]

    async def answer(self, params: Any, asked: Counter[str]) -> Any:
        """The answer to one request, as the SDK's ``CreateMessageResult``.

        Args:
            params: The SDK's ``CreateMessageRequestParams``.
            asked: How many times each request was made during the call.

        Raises:
            ToolError: There is none.
        """
        from mcp import types

        request = read_request(params)
        task = asyncio.create_task(self._answer(request, self._run_id(params, asked)), name="agentfsm-mcp-sampling")
        self._tasks.add(task)
        try:
            reply = await task
        finally:
            self._tasks.discard(task)
        return types.CreateMessageResult(
            role="assistant",
            content=types.TextContent(text=reply.text),
            model=reply.model,
            stop_reason="maxTokens" if reply.truncated else "endTurn",
        )

    async def end(self) -> None:
        """Cancel the requests that are still being answered, and wait until they have ended."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _run_id(self, params: Any, asked: Counter[str]) -> str:
        content = canonical_json(params.model_dump(mode="json", exclude_none=True, exclude={"meta", "metadata"}))
        digest = hashlib.sha256(content.encode()).hexdigest()[:12]
        asked[digest] += 1
        return run_id_for_request(self._caller.run, self._call_state, f"{digest}.{asked[digest]}")

    async def _answer(self, request: SampleRequest, run_id: str) -> SampledReply:
        async with self._turn:  # one after the other, so that each knows what is left
            elapsed_s = self._caller.host.clock.monotonic() - self._begun
            usage, model_calls = self.usage, self.model_calls
            sample = self._sampler.sample(self._caller, self._call_state.call.id, run_id, request)
            self._made.append(sample)
            return await sample.reply(usage, model_calls, elapsed_s)
