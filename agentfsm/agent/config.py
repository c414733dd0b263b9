"""Validates the arguments of an ``Agent`` and builds the ``AgentConfig`` that its runs share."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import pydantic
from pydantic import TypeAdapter

from agentfsm.agent.agent_options import (
    AgentOptions,
    check_agent_graph,
    check_ending,
    check_migrations,
    check_permissions,
    check_rows_for_texts,
    check_validators,
    effects_by_state,
    has_methods,
    hooks_by_state,
    validate_type,
    validate_types,
)
from agentfsm.agent.pinned_approvals import pin_approvals
from agentfsm.errors import ConfigurationError
from agentfsm.loop.approval_rows import with_votes
from agentfsm.loop.canonical_json import canonical_json
from agentfsm.loop.guardrails import AgentGuardrails, Behavior
from agentfsm.loop.history import HistoryPolicy, KeepAll, Summarize, policy_to_json
from agentfsm.loop.model import Model, secrets_of
from agentfsm.loop.presets import PRESETS, Preset
from agentfsm.loop.prompts import tool_notes
from agentfsm.loop.reply_reader import envelope_instructions
from agentfsm.loop.reply_secrets import ReplySecrets
from agentfsm.loop.state import RunState, withhold_secrets_of
from agentfsm.loop.transition_table import BUILT_IN_GUARDS
from agentfsm.loop.withholding import Withholder, environment_secrets, marks_secrets
from agentfsm.machine.engine import Machine
from agentfsm.machine.graph import Graph
from agentfsm.runtime.compaction import with_compaction
from agentfsm.runtime.context import AgentConfig, Monitor
from agentfsm.runtime.hooks import Observer
from agentfsm.runtime.host import Host
from agentfsm.runtime.recorder import JournalSink, Recorder, ResumePoint
from agentfsm.runtime.tools import Tool, secret_arguments, tools_by_name, with_subagents
from agentfsm.runtime.toolsets import declared_tools, is_open, split_tools

if TYPE_CHECKING:
    from agentfsm.analysis import AgentTraits
    from agentfsm.analysis.run_monitor import ProofModel
    from agentfsm.journal.records import Record


def build_config(model: str | Model, options: AgentOptions) -> AgentConfig:
    """The validated configuration of an agent.

    Raises:
        ConfigurationError: The arguments are invalid or do not fit together.
        ToolDefinitionError: A tool cannot be described to a model.
        GraphError: The graph cannot run an agent.
    """
    validate_types(options)
    hooks, preset = tuple(options.hooks), _resolve_preset(options.preset)
    behavior, host = preset.behavior, options.host or Host()
    output_type = _plain_type(options.output_type)
    plain, toolsets = split_tools(options.tools)
    tools = _collect_tools([*plain, *declared_tools(toolsets)], behavior, output_type)
    own_graph, needs_votes = options.graph, any(t.may_need_votes for t in with_subagents(tools))
    model = resolve_model(model)
    counting = own_graph or (with_votes(preset.graph) if needs_votes else preset.graph)
    graph = check_agent_graph(_with_history(counting, options.history), tools)
    check_ending(behavior, tools)
    if own_graph is None:  # whoever gives another one has decided what its rows do with a text
        check_rows_for_texts(behavior, graph)
    earlier = {each.fingerprint for each in (preset.graph, counting)} - {graph.fingerprint}
    former = preset.former_graphs | earlier
    specs = tuple(t.spec for t in tools.values())
    adapter = None if output_type in (None, str) else _make_output_adapter(options.output_type)
    schema = None if adapter is None else adapter.json_schema()
    written = options.instructions if isinstance(options.instructions, str) else ""
    instructions = _system_prompt(written, behavior, tools, schema)
    validators = check_validators(options.output_validators)
    open_withholder = _withholder_factory(host, tools, model)
    config = AgentConfig(
        machine=Machine(graph, BUILT_IN_GUARDS),
        model=model,
        instructions=instructions,
        guardrails=options.guardrails or preset.guardrails,
        behavior=behavior,
        tools=tools,
        tool_specs=() if behavior.envelope else specs,
        policy=options.policy or preset.policy,
        host=host,
        effects=effects_by_state(graph),
        stop_states=frozenset(s.name for s in graph.states if s.final or s.waits),
        open_journal_sink=_journal_factory(host, open_withholder),
        read_journal=_read_journal,
        open_withholder=open_withholder,
        hooks=check_permissions(hooks_by_state(hooks, graph), tools),
        observers=tuple(h for h in hooks if isinstance(h, Observer)),
        memory=options.memory,
        output_adapter=adapter,
        output_schema=None if behavior.control_tools else schema,
        migrations=check_migrations(tuple(options.migrations), graph),
        former_graphs=frozenset() if own_graph is not None else former,
        deps_type=options.deps_type,
        deps_factory=options.deps_factory,
        output_validators=validators,
        reply_secrets=_reply_secrets(behavior, tools, schema),
        make_instructions=None if isinstance(options.instructions, str) else options.instructions,
        history=policy_to_json(options.history),
        own_instructions=written,
        toolsets=toolsets,
        with_tools=_with_tools if toolsets else None,
        pin_approvals=pin_approvals,
    )
    return replace(config, open_monitor=_monitor_factory(host, config))


def _with_tools(config: AgentConfig, chosen: Iterable[Tool]) -> AgentConfig:
    """The configuration of a run for which toolsets have chosen tools. What watches it counts with those of every run.

    Raises:
        ConfigurationError: The tools do not fit together, or the agent's graph or permission rules do not fit them.
    """
    declared = {each.name for each in declared_tools(config.toolsets)}
    tools = tools_by_name([*(each for name, each in config.tools.items() if name not in declared), *chosen])
    check_ending(config.behavior, tools)
    check_agent_graph(config.machine.graph, tools)
    open_withholder = _withholder_factory(config.host, tools, config.model)
    prompt = partial(_system_prompt, config.own_instructions, config.behavior)
    added = config.instructions.removeprefix(prompt(config.tools, config.output_schema))
    return replace(
        config,
        tools=tools,
        tool_specs=() if config.behavior.envelope else tuple(t.spec for t in tools.values()),
        instructions=prompt(tools, config.output_schema) + added,
        hooks=check_permissions(dict(config.hooks), tools),
        open_journal_sink=_journal_factory(config.host, open_withholder),
        open_withholder=open_withholder,
        reply_secrets=_reply_secrets(config.behavior, tools, config.output_schema),
        toolsets=(),
        with_tools=None,
    )


def _with_history(graph: Graph, policy: HistoryPolicy | None) -> Graph:
    """The graph, with the state that shortens a long history if the policy asks for it.

    Raises:
        ConfigurationError: The model that is to summarize is unknown or has no key.
        GraphError: The graph cannot have that state.
    """
    if policy is None or isinstance(policy, KeepAll):
        return graph
    model = policy.model if isinstance(policy, Summarize) else None
    return with_compaction(graph, policy, None if model is None else resolve_model(model))


def with_history_policy(config: AgentConfig, policy: HistoryPolicy) -> AgentConfig:
    """The same configuration with another history policy, on the same table.

    Raises:
        ConfigurationError: The table has no state that shortens a history, or not the one that this policy needs.
    """
    validate_type("history", policy)
    given, own = policy_to_json(policy), config.history
    if given and not own:
        raise ConfigurationError(
            f"{type(policy).__name__} needs the state that shortens a history, and the agent's table has none: give "
            "the agent a policy, too, as in Agent(history=KeepLast(turns=100))"
        )
    fixed = ("max_compactions", "model") if given.get("policy") == "summarize" else ("max_compactions",)
    if given.get("policy") == "summarize" != own.get("policy"):
        raise ConfigurationError("only an agent with Summarize(...) has the row for summaries that fail")
    for name in fixed if given else ():
        if given[name] != own[name]:
            raise ConfigurationError(
                f"{name} is part of the agent's table: {own[name]!r} there, and {given[name]!r} in the session's policy"
            )
    return replace(config, history=given)


def with_host(config: AgentConfig, host: Host, guardrails: AgentGuardrails | None = None) -> AgentConfig:
    """The same configuration on another host, journaling to that host's store."""
    open_withholder = _withholder_factory(host, config.tools, config.model)
    return replace(
        config,
        host=host,
        guardrails=guardrails or config.guardrails,
        open_journal_sink=_journal_factory(host, open_withholder),
        open_withholder=open_withholder,
        open_monitor=_monitor_factory(host, config),
    )


def proof_traits(config: AgentConfig) -> AgentTraits:
    """What proofs may assume about an agent with this configuration."""
    from agentfsm.analysis import AgentTraits  # only proofs and monitored runs need it

    tools = config.tools.values()
    unknown = any(map(is_open, config.toolsets))  # a toolset may return a tool of any kind but a control tool
    return AgentTraits(
        config.behavior,
        config.output_adapter is not None or bool(config.output_validators),
        sub_agents=unknown or any(t.delegate is not None or t.asks for t in tools),
        secrets=unknown or bool(secret_arguments(tools)),
        fallbacks=not _makes_one_call(config.model),
        parallel=unknown or any(t.parallel for t in tools),
        asks=any(t.control == "ask" for t in tools),
        gives_up=any(t.control == "unable" for t in tools),
        certain=True,
    )


def _makes_one_call(model: Model) -> bool:
    """Whether a model is known to make one call for each reply: it is neither a wrapper nor the user's own."""
    module = type(model).__module__
    return module.startswith("agentfsm.") and module != "agentfsm.models.model_wrappers"


def _monitor_factory(host: Host, config: AgentConfig) -> Callable[[RunState], Monitor] | None:
    """Makes the monitor of each run; None if the host monitors none."""
    if host.monitor == "off":
        return None

    @cache
    def model() -> ProofModel:
        from agentfsm.analysis.run_monitor import ProofModel  # only monitored runs need the model checker

        return ProofModel(config.machine.graph, proof_traits(config))

    def open_monitor(run: RunState) -> Monitor:
        return model().monitor(run)

    return open_monitor


def _journal_factory(
    host: Host, open_withholder: Callable[[], Withholder]
) -> Callable[[RunState, ResumePoint | None], Awaitable[JournalSink]] | None:
    """Opens a run's journal in the host's store; None if the host has no store."""
    store = host.store
    if store is None:
        return None

    def open_sink(run: RunState, resume_point: ResumePoint | None) -> Awaitable[JournalSink]:
        from agentfsm.journal.journal_writer import open_journal  # only runs with a store write a journal

        withholder = open_withholder()
        withhold_secrets_of(run, withholder)
        for secret in () if resume_point is None else resume_point.secrets:
            withholder.add(secret)
        return open_journal(store, run, resume_point, host.keyring, withholder)

    return open_sink


def _withholder_factory(host: Host, tools: Mapping[str, Tool], model: Model) -> Callable[[], Withholder]:
    """Makes what withholds the secrets of one run."""
    paths = secret_arguments(with_subagents(tools))
    of_servers = tuple({id(each.known_secrets): each.known_secrets for each in with_subagents(tools)}.values())

    last: list[tuple[list[str], Withholder]] = []  # of the last run: usually the same, and slow to make

    def make() -> Withholder:
        given = (secret.get_secret_value() for secret in (*host.secrets, *secrets_of(model), *chain(*of_servers)))
        known = [*environment_secrets(os.environ), *given]
        if not last or last[0][0] != known:
            last[:] = [(known, Withholder(host.keyring.current, known, paths))]
        return last[0][1].copy()

    return make


def _reply_secrets(
    behavior: Behavior, tools: Mapping[str, Tool], schema: Mapping[str, Any] | None
) -> ReplySecrets | None:
    """Finds what is secret in the text of replies; None if nothing in it can be."""
    answers = schema is not None and not behavior.control_tools and marks_secrets(schema)
    found = ReplySecrets(schema if answers else None, secret_arguments(tools.values()), behavior.envelope)
    return found if found.schema is not None or found.paths else None


def _read_journal(config: AgentConfig, recorder: Recorder, run: RunState) -> list[Record]:
    """What a run's recorder has of its journal."""
    from agentfsm.journal.journal_writer import read_journal  # most runs never read it

    withholder = config.open_withholder()
    withhold_secrets_of(run, withholder)
    return read_journal(recorder, run.run_id, withholder)


def _resolve_preset(preset: str | Preset) -> Preset:
    if isinstance(preset, Preset):
        return preset
    if preset not in PRESETS:
        raise ConfigurationError(f"there is no preset {preset!r}; the presets are: {', '.join(PRESETS)}")
    return PRESETS[preset]


def resolve_model(model: str | Model) -> Model:
    """The model for a name; a model is returned unchanged.

    Raises:
        ConfigurationError: It is neither, no provider knows the name, or the provider's key is missing.
    """
    if not isinstance(model, str):
        if not (has_methods(model, "reply") and isinstance(getattr(model, "name", None), str)):
            raise ConfigurationError(
                f"a model must be a name, or an object with reply() and a name, not {type(model).__name__}"
            )
        return model
    from agentfsm.models import resolve  # providers and httpx load only for a model given by name

    return resolve(model)


def _plain_type(output_type: Any) -> Any:
    """An agent's output type, taken out of its ``TypeAdapter`` if it was given in one."""
    if not isinstance(output_type, TypeAdapter):
        return output_type
    return getattr(cast("Any", output_type), "_type")  # noqa: B009  # no public attribute has it


def _make_output_adapter(output_type: Any) -> TypeAdapter[Any]:
    """Validates a structured answer."""
    try:
        given: Any = output_type
        adapter: TypeAdapter[Any] = given if isinstance(output_type, TypeAdapter) else TypeAdapter(given)
        adapter.json_schema()
    except pydantic.errors.PydanticUserError as error:
        text = str(error).partition("\n")[0]
        raise ConfigurationError(f"output_type cannot be described as JSON: {text}") from error
    return adapter


def _collect_tools(tools: Iterable[Callable[..., Any]], behavior: Behavior, output_type: Any) -> dict[str, Tool]:
    """The agent's own tools and the control tools of its preset, by name.

    Raises:
        ConfigurationError: One of the agent's tools has the name of a control tool.
        ToolDefinitionError: Two of the agent's tools have the same name, or one cannot be described to a model.
    """
    own = tools_by_name(tools)
    given = {name for name, each in own.items() if each.control is not None}
    if not given and not behavior.control_tools:
        return own
    from agentfsm.runtime.control_tools import control_tools  # making their schemas takes milliseconds

    control = control_tools(output_type)
    if behavior.control_tools and (clash := (own.keys() & control.keys()) - given):
        raise ConfigurationError(f"{', '.join(sorted(clash))}: the preset already has tools with these names")
    chosen = control if behavior.control_tools else {name: control[name] for name in control if name in given}
    return {**{name: each for name, each in own.items() if name not in given}, **chosen}


def _system_prompt(
    instructions: str, behavior: Behavior, tools: Mapping[str, Tool], output_schema: Mapping[str, Any] | None
) -> str:
    """The agent's instructions, followed by notes about its tools and the required reply format."""
    by_note: dict[str, list[str]] = {}
    for tool in tools.values():
        if tool.notes:
            by_note.setdefault(tool.notes, []).append(tool.name)
    notes = (tool_notes(names, text) for text, names in by_note.items())
    specs, text_is_answer = (t.spec for t in tools.values()), behavior.text_is_answer
    envelope = envelope_instructions(specs, text_is_answer=text_is_answer) if behavior.envelope else ""
    form = "" if output_schema is None or behavior.control_tools else _output_instructions(output_schema)
    return "\n\n".join(part for part in (instructions, *notes, envelope, form) if part)


def _output_instructions(schema: Mapping[str, Any]) -> str:
    return f"Give your final answer as JSON, and nothing else, that fits this JSON schema: {canonical_json(schema)}"
