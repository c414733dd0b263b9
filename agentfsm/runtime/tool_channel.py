"""What a running tool tells its run: how far it is, and what it must ask a person."""

from __future__ import annotations

import asyncio

from agentfsm.errors import ToolError
from agentfsm.loop.events import ToolProgress
from agentfsm.loop.human_input import AnsweredQuestion, PendingRequest, SuspendedSubRun
from agentfsm.loop.state import CallState
from agentfsm.runtime.context import Context
from agentfsm.runtime.tools import Tool

PROGRESS_INTERVAL_S = 0.1
"""Seconds between two events about the progress of one call; of what is said in between, the last is sent."""


class ToolWaits(BaseException):  # not an error: it leaves a tool that must wait, past its ``except``
    """Leaves a tool that has asked a person, past its ``except Exception``; it is called again with the answer."""


class CallChannel:
    """What one attempt at a tool call tells its run.

    Attributes:
        request: What the tool has asked and nobody has answered yet, or None.
    """

    # Of most channels nothing is used, so nothing is set up when one is made.
    request: PendingRequest | None = None
    _pending: tuple[str, float | None] | None = None
    _scheduled = False
    _sent_at = float("-inf")
    _closed = False
    _asked = 0

    def __init__(self, context: Context, call_state: CallState, tool: Tool) -> None:
        self._context, self._call_state, self._tool = context, call_state, tool

    # -- progress -------------------------------------------------------------------------------------

    def progress(self, message: str, fraction: float | None) -> None:
        """Send an event soon, with what was said last; may be called in any thread."""
        if fraction is not None and not 0 <= fraction <= 1:
            raise ValueError(f"fraction must be from 0 to 1 (how much is done), not {fraction!r}")
        task = self._context.timeout.owner
        if self._closed or not self._context.builds_events or task is None:
            return
        self._pending = str(message), fraction
        if not self._scheduled:
            self._scheduled = True
            task.get_loop().call_soon_threadsafe(self._send_when_due)

    def _send_when_due(self) -> None:
        loop = asyncio.get_running_loop()
        wait_s = self._sent_at + PROGRESS_INTERVAL_S - loop.time()
        if wait_s > 0:
            loop.call_later(wait_s, self._send)
        else:
            self._send()

    def _send(self) -> None:
        self._scheduled = False
        pending, self._pending = self._pending, None
        if pending is None or self._closed:
            return
        self._sent_at = asyncio.get_running_loop().time()
        call, (message, fraction) = self._call_state.call, pending
        self._context.emit(ToolProgress, call_id=call.id, name=call.name, message=message, fraction=fraction)

    def close(self) -> None:
        """Send what was said last. What an abandoned tool says from here on is not heard."""
        if self._pending is not None:
            self._send()
        self._closed = True

    # -- questions ------------------------------------------------------------------------------------

    @property
    def _answers(self) -> tuple[AnsweredQuestion, ...]:
        held, answer = self._call_state.held, self._call_state.answer
        if held is None or answer is None:
            return ()
        return (*held.answers, AnsweredQuestion(held.waiting.question, answer.text))

    def ask(self, question: str, context: str, choices: tuple[str, ...]) -> str:
        """A person's answer to the next question of the tool, if there is one already.

        Raises:
            ToolError: The tool does not declare that it asks, the question is blank, or the tool now asks something
                else than before.
            ToolWaits: Nobody has answered yet.
        """
        call = self._call_state.call
        if not self._tool.asks:
            raise ToolError(f"{call.name!r} asks a person, and does not say so: make it with @tool(asks=True)")
        if not question.strip():
            raise ToolError(f"{call.name!r} asks a question that is blank")
        if self.request is not None:
            raise ToolWaits
        number, self._asked = self._asked, self._asked + 1
        answers = self._answers
        if number < len(answers):
            earlier = answers[number]
            if question != earlier.question:
                raise ToolError(
                    f"{call.name!r} was called again with a person's answer to {earlier.question!r}, and asked "
                    f"{question!r} instead: until its last question, a tool must do the same each time"
                )
            return earlier.answer
        self.request = PendingRequest(
            "question",
            question,
            context,
            choices,
            call.id,
            call.name,
            asker=call.name,
            tool_digest=self._tool.digest,
        )
        raise ToolWaits

    def suspended(self, request: PendingRequest) -> SuspendedSubRun:
        """The call, as it waits for the answer to a request of its tool."""
        return SuspendedSubRun("", request, "", answers=self._answers)
