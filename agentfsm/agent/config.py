"""The arguments of an ``Agent``, validated and turned into its configuration."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pydantic
from pydantic import TypeAdapter

from agentfsm.errors import ConfigurationError, GraphError, RunError
from agentfsm.loop.canonical_json import canonical_json
from agentfsm.loop.envelope import envelope_instructions as envelope_instructions
from agentfsm.loop.guardrails import AgentGuardrails, Behavior
from agentfsm.loop.messages import Message, Role, with_missing_results
from agentfsm.loop.model import Model, ToolSpec, secrets_of
from agentfsm.loop.presets import PRESETS, Preset
from agentfsm.machine.graph import Graph
from agentfsm.runtime.context import Effect
from agentfsm.runtime.effects import EFFECTS, custom_effect
from agentfsm.runtime.hooks import Hook, Observer
from agentfsm.runtime.host import Host
from agentfsm.runtime.recorder import JournalSink, ResumePoint
from agentfsm.runtime.tools import Tool, control_tools, tools_by_name

if TYPE_CHECKING:
    from agentfsm.journal.migration import Migration

__all__ = [
    "check_migrations",
    "collect_tools",
    "effects_by_state",
    "hooks_by_state",
    "journal_factory",
    "make_output_adapter",
    "normalize_history",
    "resolve_model",
    "resolve_preset",
    "system_prompt",
    "validate_types",
]


def journal_factory(
    host: Host, tools: Mapping[str, Tool], model: Model
) -> Callable[[str, ResumePoint | None], Awaitable[JournalSink]] | None:
    """What hands a run's entries to the host's store, or None where it has none."""
    store = host.store
    if store is None:
        return None
    secret = {t.name: t.secret for t in tools.values() if t.secret}
    known = secrets_of(model)

    def open_sink(run_id: str, resume_point: ResumePoint | None) -> Awaitable[JournalSink]:
        from agentfsm.journal.journal_writer import open_journal

        return open_journal(store, run_id, resume_point, secret, known)

    return open_sink


_EXPECTED_TYPES: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "tools": (
        "a list of functions, as in tools=[look]",
        lambda v: isinstance(v, Iterable) and not isinstance(v, (str, bytes)),
    ),
    "instructions": ("a text", lambda v: isinstance(v, str)),
    "guardrails": ("an AgentGuardrails", lambda v: v is None or isinstance(v, AgentGuardrails)),
    "policy": ("an object with decide() and backoff()", lambda v: v is None or _has_methods(v, "decide", "backoff")),
    "graph": ("a Graph", lambda v: v is None or isinstance(v, Graph)),
    "migrations": ("a list of migrations, as in migrations=[Migration(old)]", lambda v: isinstance(v, Iterable)),
    "hooks": ("a list of hooks and observers", lambda v: isinstance(v, Iterable)),
    "memory": ("an object with recall() and remember()", lambda v: v is None or _has_methods(v, "recall", "remember")),
    "host": ("a Host", lambda v: v is None or isinstance(v, Host)),
}
"""What each part of an agent must be, and what tells that it is."""


def _has_methods(value: object, *methods: str) -> bool:
    return all(callable(getattr(value, method, None)) for method in methods)


def validate_types(arguments: Mapping[str, object]) -> None:
    """Make sure that an agent's parts are what they must be: what is not would fail late, in the middle of a run.

    Raises:
        ConfigurationError: One is of another kind; the message names it, and what it must be.
    """
    for name, value in arguments.items():
        wanted, fits = _EXPECTED_TYPES[name]
        if isinstance(value, type):
            raise ConfigurationError(f"{name} must be an object, not the class {value.__name__}")
        if not fits(value):
            raise ConfigurationError(f"{name} must be {wanted}, not {type(value).__name__}")


def resolve_preset(preset: str | Preset) -> Preset:
    """The preset of a name.

    Raises:
        ConfigurationError: There is none of that name.
    """
    if isinstance(preset, Preset):
        return preset
    if preset not in PRESETS:
        raise ConfigurationError(f"there is no preset {preset!r}; there are: {', '.join(PRESETS)}")
    return PRESETS[preset]


def resolve_model(model: str | Model) -> Model:
    """The model of a name.

    Raises:
        ConfigurationError: It is no model, or no provider knows its name.
    """
    if not isinstance(model, str):
        if not (_has_methods(model, "reply") and isinstance(getattr(model, "name", None), str)):
            raise ConfigurationError(
                f"a model is a name or an object with reply() and a name, not {type(model).__name__}"
            )
        return model
    from agentfsm.models import resolve  # providers and httpx load when one is first used

    return resolve(model)


def make_output_adapter(output_type: Any) -> TypeAdapter[Any]:
    """What checks a structured answer.

    Raises:
        ConfigurationError: The type cannot be described as JSON.
    """
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(output_type)
        adapter.json_schema()
    except pydantic.errors.PydanticUserError as error:
        text = str(error).partition("\n")[0]
        raise ConfigurationError(f"output_type cannot be described as JSON: {text}") from error
    return adapter


def collect_tools(tools: Iterable[Callable[..., Any]], behavior: Behavior, output_type: Any) -> dict[str, Tool]:
    """An agent's tools by name: its own, and those that its rules bring.

    Raises:
        ConfigurationError: One of each has the same name.
        ToolDefinitionError: Two of its own have, or one cannot be described to a model.
    """
    own = tools_by_name(tools)
    control: Mapping[str, Tool] = control_tools(output_type) if behavior.control_tools else {}
    if clash := own.keys() & control.keys():
        raise ConfigurationError(f"{', '.join(sorted(clash))}: the preset brings tools of that name itself")
    return {**own, **control}


def system_prompt(
    instructions: str, behavior: Behavior, specs: Iterable[ToolSpec], output_schema: dict[str, Any] | None
) -> str:
    """What the model is told first: an agent's own instructions, and the form that its words must have.

    Args:
        instructions: The agent's own.
        behavior: Its choices.
        specs: Its tools.
        output_schema: JSON schema of its answer, or None for text.
    """
    envelope = envelope_instructions(specs) if behavior.envelope else ""
    form = "" if output_schema is None or behavior.control_tools else _output_instructions(output_schema)
    return "\n\n".join(part for part in (instructions, envelope, form) if part)


def normalize_history(history: Iterable[Message]) -> list[Message]:
    """What was said before a run: an earlier transcript without its instructions, each call of it with a result.

    Raises:
        RunError: Something in it is no message.
    """
    said = list(history)
    for each in said:
        if not isinstance(each, Message):  # pyright: ignore[reportUnnecessaryIsInstance]  # for untyped callers
            raise RunError(
                "message_history is a list of Message, as result.messages is (or Message.user('...')), "
                f"and holds {type(each).__name__}"
            )
    return with_missing_results(m for m in said if m.role is not Role.SYSTEM)


def _output_instructions(schema: dict[str, Any]) -> str:
    return f"Give your final answer as JSON, and nothing else, that fits this JSON schema: {canonical_json(schema)}"


def effects_by_state(graph: Graph) -> dict[str, Effect]:
    """The effect of every state of the graph; it must be one that can be cancelled and aborted."""
    effects: dict[str, Effect] = {}
    for spec in graph.states:
        if spec.final or spec.waits:
            continue
        if spec.effect is not None:
            effects[spec.name] = custom_effect(spec.effect)
        elif spec.name in EFFECTS:
            effects[spec.name] = EFFECTS[spec.name]
        else:
            raise GraphError("the state has no effect", spec.name, "declare it with StateSpec(..., effect=function)")
        targets = {t.name: t.target for t in graph.rows(spec.name)}
        for stop in ("cancelled", "aborted"):
            if stop not in targets or not graph.spec(targets[stop]).final:
                raise GraphError(
                    f"an agent's state needs a row {stop!r} that leads to the end",
                    spec.name,
                    "add it, in front",
                )
    return effects


def check_migrations(migrations: Sequence[Migration], graph: Graph) -> tuple[Migration, ...]:
    """Migrations, once it is sure that what they name is there.

    Raises:
        ConfigurationError: Something among them is no migration.
        GraphError: A state or a transition that one of them names is not.
    """
    if not all(_has_methods(each, "matches", "check") for each in migrations):
        raise ConfigurationError("migrations must be a list of migrations, as in migrations=[Migration(old)]")
    for each in migrations:
        each.check(graph)
    return tuple(migrations)


def hooks_by_state(hooks: Sequence[Hook | Observer], graph: Graph) -> dict[str, tuple[Hook, ...]]:
    """The hooks at each state's door, in order.

    Raises:
        ConfigurationError: Something among them is no hook.
        GraphError: A hook stands at a state that the graph does not have.
    """
    by_state: dict[str, tuple[Hook, ...]] = {}
    for each in hooks:
        if isinstance(each, Observer):
            continue
        if not isinstance(each, Hook):  # pyright: ignore[reportUnnecessaryIsInstance]  # for untyped callers
            raise ConfigurationError(f"a hook is made with @hook(...) or @observer, not {type(each).__name__}")
        graph.spec(each.at)
        by_state[each.at] = (*by_state.get(each.at, ()), each)
    return by_state
