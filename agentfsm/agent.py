"""``Agent``: a model, tools and limits put together on a graph. The one place where the parts meet."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pydantic
from pydantic import TypeAdapter

from agentfsm.core.envelope import instructions as envelope_instructions
from agentfsm.core.guardrails import AgentGuardrails
from agentfsm.core.messages import Message, Role, canonical_json
from agentfsm.core.model import Model
from agentfsm.core.policy import RecoveryPolicy
from agentfsm.core.presets import PRESETS, STANDARD, Preset
from agentfsm.core.state import RunState
from agentfsm.core.suspension import SuspensionRecord, check_reply, open_record
from agentfsm.errors import ConfigurationError, GraphError, RecordUsedError, RunError
from agentfsm.machine.engine import Machine
from agentfsm.machine.graph import Graph
from agentfsm.runtime.context import Effect, Parts
from agentfsm.runtime.control import control_tools
from agentfsm.runtime.driver import Errand
from agentfsm.runtime.effects import EFFECTS, custom_effect
from agentfsm.runtime.hooks import Hook, Observer
from agentfsm.runtime.host import Host
from agentfsm.runtime.memory import Memory
from agentfsm.runtime.replies import Answer, person_reply
from agentfsm.runtime.result import RunResult
from agentfsm.runtime.run import Run
from agentfsm.runtime.tools import registry

__all__ = ["Agent"]


class Agent:
    """An agent whose every move is a row of a checked table. Make it once, run it as often as you like.

    Args:
        model: A model, or the name of one (``"openai:gpt-5-mini"``, ``"ollama:llama3.2"``...).
        tools: Functions that the model may call, plain or made with ``@tool``.
        instructions: What the model is told first.
        guardrails: Limits; the preset's unless given.
        policy: What is done about failures; the preset's unless given.
        preset: A behaviour, by name or as a ``Preset``: ``standard``, ``funnel``, ``feedback``,
            ``breaker`` or ``strict``.
        graph: The table to run on; the preset's unless given.
        hooks: Hooks at the states' doors, and observers of events.
        memory: What the agent remembers between runs.
        output_type: The type of the answer (a pydantic model, say); text unless given.
        host: Clock, secret and seed, where the embedding program brings its own.

    Raises:
        ConfigurationError: Something does not fit together; each case has its own class.
        agentfsm.errors.ToolDefinitionError: A tool cannot be described to a model.
        agentfsm.errors.UnknownModelError: No provider knows the model's name.
        agentfsm.errors.MissingKeyError: The provider's key is missing.
        agentfsm.errors.GraphError: The graph cannot run an agent.
    """

    def __init__(
        self,
        model: str | Model,
        *,
        tools: Iterable[Callable[..., Any]] = (),
        instructions: str = "",
        guardrails: AgentGuardrails | None = None,
        policy: RecoveryPolicy | None = None,
        preset: str | Preset = STANDARD,
        graph: Graph | None = None,
        hooks: Sequence[Hook | Observer] = (),
        memory: Memory | None = None,
        output_type: Any = None,
        host: Host | None = None,
    ) -> None:
        chosen = _preset(preset)
        self.guardrails = guardrails or chosen.guardrails
        self.rules = chosen.rules
        self.graph = graph or chosen.graph
        own = registry(tools)
        control = dict(control_tools(output_type)) if self.rules.control_tools else {}
        if clash := own.keys() & control.keys():
            raise ConfigurationError(f"{', '.join(sorted(clash))}: the preset brings tools of that name itself")
        every = {**own, **control}
        specs = tuple(t.spec for t in every.values())
        output = None if output_type in (None, str) else _adapter(output_type)
        schema = None if output is None else output.json_schema()
        self.instructions = "\n\n".join(
            part
            for part in (
                instructions,
                envelope_instructions(specs) if self.rules.envelope else "",
                _form(schema) if schema is not None and not self.rules.control_tools else "",
            )
            if part
        )
        self._parts = Parts(
            machine=Machine(self.graph),
            model=_model(model),
            tools=every,
            specs=() if self.rules.envelope else specs,
            policy=policy or chosen.policy,
            host=host or Host(),
            effects=_effects(self.graph),
            ends=frozenset(s.name for s in self.graph.states if s.final or s.waits),
            hooks=_hooks(hooks, self.graph),
            observers=tuple(h for h in hooks if isinstance(h, Observer)),
            memory=memory,
            output=output,
            output_schema=None if self.rules.control_tools else schema,
        )

    @property
    def model(self) -> Model:
        """The model."""
        return self._parts.model

    def run(
        self,
        prompt: str,
        *,
        message_history: Sequence[Message] = (),
        session_id: str = "",
        run_id: str | None = None,
    ) -> Run:
        """A run on a prompt: await it for its result, or iterate it for its events.

        Args:
            prompt: The user's message.
            message_history: What was said before (``result.messages`` of an earlier run).
            session_id: The conversation, where you have one.
            run_id: The run's id; a random one unless given.
        """
        first = [Message.system(self.instructions)] if self.instructions else []
        earlier = [m for m in message_history if m.role is not Role.SYSTEM]
        state = RunState(
            run_id=run_id or secrets.token_hex(8),
            session_id=session_id,
            state=self.graph.initial,
            guardrails=self.guardrails,
            rules=self.rules,
            messages=[*first, *earlier, Message.user(prompt)],
        )
        return Run(self._parts, state, Errand(prompt))

    def run_sync(self, prompt: str, *, message_history: Sequence[Message] = (), session_id: str = "") -> RunResult:
        """Run to the end and give the result, where no event loop runs.

        Raises:
            RunError: An event loop runs in this thread; await ``agent.run`` there.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(_result(self.run(prompt, message_history=message_history, session_id=session_id)))
        raise RunError("run_sync cannot be used inside a running event loop: use 'await agent.run(...)' there")

    def resume(self, record: SuspensionRecord | str, reply: Answer) -> Run:
        """The run that a record holds, going on with a person's reply.

        Args:
            record: The record, or its JSON text.
            reply: A text; for an approval ``Allow()``, ``Deny(reason)`` or ``Edit(arguments)``; for a
                doubt ``ItRan(result)``, ``ItDidNotRun()`` or ``GiveUp()``.

        Raises:
            RecordError: The record or the reply is not good; each case has its own class, and the run
                stays suspended and untouched.
        """
        opened = _record(record)
        state = self._open(opened)
        answer = person_reply(reply)
        check_reply(opened.kind, answer)
        return Run(self._parts, state, Errand(record=opened, reply=answer))

    def dismiss(self, record: SuspensionRecord | str, reason: str = "dismissed") -> Run:
        """The run that a record holds, ended without a reply; an expired one ends as that.

        Raises:
            RecordError: The record is not good.
        """
        opened = _record(record)
        return Run(self._parts, self._open(opened, late=True), Errand(record=opened, dismiss=reason))

    def _open(self, record: SuspensionRecord, late: bool = False) -> RunState:
        host = self._parts.host
        state = open_record(record, graph=self.graph.fingerprint, secret=host.secret, now=host.clock.time(), late=late)
        if host.used.used(record.record_id):
            raise RecordUsedError(f"record {record.record_id!r} was resumed already; each is good for one reply")
        return state

    def __repr__(self) -> str:
        return f"Agent({self._parts.model.name!r}, tools={sorted(self._parts.tools)}, graph={self.graph.name!r})"


async def _result(run: Run) -> RunResult:
    return await run


def _record(record: SuspensionRecord | str) -> SuspensionRecord:
    return SuspensionRecord.from_json(record) if isinstance(record, str) else record


def _preset(preset: str | Preset) -> Preset:
    if isinstance(preset, Preset):
        return preset
    if preset not in PRESETS:
        raise ConfigurationError(f"there is no preset {preset!r}; there are: {', '.join(PRESETS)}")
    return PRESETS[preset]


def _model(model: str | Model) -> Model:
    if not isinstance(model, str):
        if not callable(getattr(model, "reply", None)):
            raise ConfigurationError(f"a model is a name or an object with reply(), not {type(model).__name__}")
        return model
    from agentfsm.models import resolve  # providers and httpx load when one is first used

    return resolve(model)


def _adapter(output_type: Any) -> TypeAdapter[Any]:
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(output_type)
        adapter.json_schema()
    except pydantic.errors.PydanticUserError as error:
        text = str(error).partition("\n")[0]
        raise ConfigurationError(f"output_type cannot be described as JSON: {text}") from error
    return adapter


def _form(schema: dict[str, Any]) -> str:
    return f"Give your final answer as JSON, and nothing else, that fits this JSON schema: {canonical_json(schema)}"


def _effects(graph: Graph) -> dict[str, Effect]:
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


def _hooks(hooks: Sequence[Hook | Observer], graph: Graph) -> dict[str, tuple[Hook, ...]]:
    by_state: dict[str, tuple[Hook, ...]] = {}
    for each in hooks:
        if isinstance(each, Observer):
            continue
        if not isinstance(each, Hook):  # pyright: ignore[reportUnnecessaryIsInstance]  # for untyped callers
            raise ConfigurationError(f"a hook is made with @hook(...) or @observer, not {type(each).__name__}")
        graph.spec(each.at)
        by_state[each.at] = (*by_state.get(each.at, ()), each)
    return by_state
