"""``ToolContext``: what a tool learns about its call and its run, and how it reports progress or asks a person."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from agentfsm.errors import ToolError
from agentfsm.runtime.run_context import Deps, RunContext


@dataclass(frozen=True, slots=True)
class ToolContext(RunContext[Deps]):
    """Information about a tool call and its run; a tool that declares it as its first parameter receives it.

    It has the attributes of ``RunContext``, too.

    Attributes:
        call_id: The call's id in the transcript.
        idempotency_key: The same for every attempt at this call, and different for every other call.
        attempt: Which attempt this is, from 1.
        channel: What ``progress`` and ``ask`` use; None in a context that was not made by a run.
    """

    call_id: str
    idempotency_key: str
    attempt: int
    channel: ToolChannel | None = field(default=None, kw_only=True, repr=False, compare=False)

    def progress(self, message: str, fraction: float | None = None) -> None:
        """Say how far the tool is: whoever follows the run gets a ``ToolProgress`` event.

        It costs nearly nothing if nobody follows the run, and may be called as often as you like, from any thread: at
        most ten events a second are sent, the last one always. It is not journaled.

        Args:
            message: What the tool does now.
            fraction: How much of its work is done, from 0 to 1; None if that is not known.

        Raises:
            ValueError: The fraction is not between 0 and 1.
        """
        if self.channel is not None:
            self.channel.progress(message, fraction)

    async def ask(self, question: str, *, context: str = "", choices: Iterable[str] = ()) -> str:
        """Ask a person, and continue with the answer; for tools that are made with ``@tool(asks=True)``.

        The tool is left here and the run suspended. Once it is resumed with an answer, in whatever process, the tool
        is called again from its start, and gets the answers so far from ``ask``. So what it does before its last
        question is done several times: ask before you act, or make it idempotent. It has to ask the same questions in
        the same order.

        Args:
            question: The question.
            context: Background for it.
            choices: Answers to choose from, if there are only a few. A person may answer something else.

        Raises:
            ToolError: The tool does not declare that it asks, the question is blank, or it asks another question than
                the one that was answered.
        """
        if self.channel is None:
            raise ToolError("only a tool that a run has called can ask a person")
        return self.channel.ask(question, context, tuple(choices))


class ToolChannel(Protocol):
    """What a running tool tells its run."""

    def progress(self, message: str, fraction: float | None) -> None:
        """Say how far the tool is.

        Args:
            message: What it does.
            fraction: How much of it is done, from 0 to 1, or None.
        """
        ...

    def ask(self, question: str, context: str, choices: tuple[str, ...]) -> str:
        """A person's answer.

        Args:
            question: The question.
            context: Background for it.
            choices: Answers to choose from, or empty.
        """
        ...
