"""``AgentOptions``: the arguments of an ``Agent`` as they were given, and the types that they must have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentfsm.errors import ConfigurationError
from agentfsm.loop.guardrails import AgentGuardrails
from agentfsm.loop.history import HistoryPolicy, KeepAll, KeepLast, Summarize
from agentfsm.loop.presets import Preset
from agentfsm.loop.recovery_policy import RecoveryPolicy
from agentfsm.machine.graph import Graph
from agentfsm.runtime.hooks import Hook, Observer
from agentfsm.runtime.host import Host, Memory
from agentfsm.runtime.toolsets import Toolset, takes_run_context

if TYPE_CHECKING:
    from agentfsm.journal.migration import Migration

__all__ = ["AgentOptions", "has_methods", "validate_type", "validate_types"]


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """The keyword arguments of ``Agent``, as given; see there."""

    tools: Any
    instructions: str | Callable[[Any], Any]
    guardrails: AgentGuardrails | None
    policy: RecoveryPolicy | None
    preset: str | Preset
    graph: Graph | None
    hooks: Iterable[Hook | Observer]
    memory: Memory | None
    output_type: Any
    deps_type: Any
    deps_factory: Callable[[Any], Any] | None
    output_validators: Iterable[Callable[[Any, Any], Any]]
    host: Host | None
    migrations: Iterable[Migration]
    history: HistoryPolicy | None = None


_EXPECTED_TYPES: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "tools": (
        "a list of functions, as in tools=[look]",
        lambda v: not isinstance(v, (str, bytes)) and (isinstance(v, (Iterable, Toolset)) or takes_run_context(v)),
    ),
    "instructions": ("a string, or a function of the run's context", lambda v: isinstance(v, str) or callable(v)),
    "deps_factory": ("a function of the run's context", lambda v: v is None or callable(v)),
    "guardrails": ("an AgentGuardrails", lambda v: v is None or isinstance(v, AgentGuardrails)),
    "policy": ("an object with decide() and backoff()", lambda v: v is None or has_methods(v, "decide", "backoff")),
    "graph": ("a Graph", lambda v: v is None or isinstance(v, Graph)),
    "migrations": ("a list of migrations, as in migrations=[Migration(old)]", lambda v: isinstance(v, Iterable)),
    "output_validators": ("a list of functions", lambda v: isinstance(v, Iterable) and not isinstance(v, str)),
    "hooks": ("a list of hooks and observers", lambda v: isinstance(v, Iterable)),
    "memory": ("an object with recall() and remember()", lambda v: v is None or has_methods(v, "recall", "remember")),
    "host": ("a Host", lambda v: v is None or isinstance(v, Host)),
    "history": (
        "KeepAll(), KeepLast(...) or Summarize(...)",
        lambda v: v is None or isinstance(v, (KeepAll, KeepLast, Summarize)),
    ),
}
"""For each argument: its expected type, as text and as a predicate."""


def has_methods(value: object, *methods: str) -> bool:
    """Whether an object has these methods."""
    return all(callable(getattr(value, method, None)) for method in methods)


def validate_types(options: AgentOptions) -> None:
    """Check the types of the arguments now: a wrong one would fail late, in the middle of a run.

    Args:
        options: The arguments.

    Raises:
        ConfigurationError: An argument has the wrong type; the message says what it must be.
    """
    for name in _EXPECTED_TYPES:
        validate_type(name, getattr(options, name))


def validate_type(name: str, value: object) -> None:
    """Check the type of one argument of an agent.

    Args:
        name: The argument.
        value: What it was given.

    Raises:
        ConfigurationError: It has the wrong type; the message says what it must be.
    """
    expected, fits = _EXPECTED_TYPES[name]
    if isinstance(value, type):
        raise ConfigurationError(f"{name} must be an object, not the class {value.__name__}")
    if not fits(value):
        raise ConfigurationError(f"{name} must be {expected}, not {type(value).__name__}")
