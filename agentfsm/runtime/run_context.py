"""What the functions of an agent are given: ``RunContext`` about their run, and ``ToolContext`` about a tool's call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, cast, get_origin

from typing_extensions import TypeVar

from agentfsm.errors import RunError, ToolError
from agentfsm.loop.quorum import Actor
from agentfsm.loop.read_only import FrozenDict
from agentfsm.loop.state import RunState, RunView

AgentDeps = TypeVar("AgentDeps", default=None)
"""The type of an agent's dependencies."""

Deps = TypeVar("Deps", default=None, covariant=True)
"""The type of the dependencies that a context has."""

Output = TypeVar("Output", default=str, covariant=True)
"""The type of an agent's answer."""


@dataclass(frozen=True, slots=True)
class RunContext(Generic[Deps]):
    """What a run was given when it was started. All of it but ``deps`` is in the run's journal.

    Attributes:
        run_id: The run's id.
        session_id: The conversation's id, or an empty string.
        actor: Who requested the run, or None.
        tags: Its tags.
        metadata: Its metadata: a JSON object that cannot be changed.
        deps: Its dependencies: what ``run(deps=...)`` was given, or what the agent's ``deps_factory`` made.
    """

    run_id: str
    session_id: str
    actor: Actor | None = field(default=None, kw_only=True)
    tags: tuple[str, ...] = field(default=(), kw_only=True, repr=False)
    metadata: Mapping[str, Any] = field(default_factory=FrozenDict, kw_only=True, repr=False)
    deps: Deps = field(default=cast("Any", None), kw_only=True, repr=False)


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
    """What a running tool tells its run; arguments as those of ``ToolContext``."""

    def progress(self, message: str, fraction: float | None) -> None:
        """Say how far the tool is."""
        ...

    def ask(self, question: str, context: str, choices: tuple[str, ...]) -> str:
        """A person's answer."""
        ...


class AboutRun:
    """The attributes of ``RunContext``, for a context that has the whole run."""

    __slots__ = ()
    run: RunView

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self.run.run_id

    @property
    def session_id(self) -> str:
        """The conversation's id, or an empty string."""
        return self.run.session_id

    @property
    def actor(self) -> Actor | None:
        """Who requested the run, or None."""
        return self.run.requester

    @property
    def tags(self) -> tuple[str, ...]:
        """The run's tags."""
        return self.run.tags

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The run's metadata: a JSON object that cannot be changed."""
        return self.run.metadata


def run_context(run: RunState, deps: Any) -> RunContext[Any]:
    """The context of a run."""
    return RunContext(run.run_id, run.session_id, actor=run.requester, tags=run.tags, metadata=run.metadata, deps=deps)


def check_deps(deps_type: object, deps: object, remedy: str) -> None:
    """Check that dependencies have the type that an agent declares, as far as that can be checked.

    Raises:
        RunError: They are missing, or have another type.
    """
    if deps_type is None:
        return
    plain: Any = get_origin(deps_type) or deps_type
    name = getattr(plain, "__name__", str(plain))
    try:
        fits = isinstance(deps, plain)
    except TypeError:  # a protocol or a TypedDict: nothing but a type checker can check it
        fits = deps is not None
    if not fits and deps is None:
        raise RunError(f"the agent's dependencies are a {name} (deps_type), and the run has none: {remedy}")
    if not fits:
        raise RunError(f"the agent's dependencies must be a {name} (deps_type), not {type(deps).__name__}")
