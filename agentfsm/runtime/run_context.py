"""``RunContext``: what a run was given when it was started, for the functions of an agent that depend on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, cast, get_origin

from typing_extensions import TypeVar

from agentfsm.errors import RunError
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

    Args:
        deps_type: The agent's ``deps_type``; None for none.
        deps: The dependencies, or None.
        remedy: What to do if there are none.

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
