"""``Agent``: a model, tools and limits put together on a graph. The one place where the parts meet."""

from __future__ import annotations

import asyncio
import copy
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pydantic
from pydantic import TypeAdapter

from agentfsm.core.envelope import instructions as envelope_instructions
from agentfsm.core.guardrails import AgentGuardrails
from agentfsm.core.messages import Message, Role, answered, canonical_json
from agentfsm.core.model import Model
from agentfsm.core.policy import RecoveryPolicy
from agentfsm.core.presets import PRESETS, STANDARD, Preset
from agentfsm.core.state import Held, PersonReply, RunState
from agentfsm.core.suspension import SuspensionRecord, check_reply, open_record
from agentfsm.errors import (
    ConfigurationError,
    GraphError,
    JournalGraphError,
    RecordExpiredError,
    RecordUsedError,
    ReplyError,
    RunError,
    ToolDefinitionError,
)
from agentfsm.machine.engine import Machine
from agentfsm.machine.graph import Graph
from agentfsm.runtime.context import Effect, Parts
from agentfsm.runtime.control import control_tools
from agentfsm.runtime.effects import EFFECTS, custom_effect
from agentfsm.runtime.errand import Errand
from agentfsm.runtime.hooks import Hook, Observer
from agentfsm.runtime.host import Host
from agentfsm.runtime.logs import log
from agentfsm.runtime.memory import Memory
from agentfsm.runtime.recorder import Keeper, TakenUp
from agentfsm.runtime.replies import Answer, person_reply
from agentfsm.runtime.result import RunResult
from agentfsm.runtime.run import Run
from agentfsm.runtime.subagent import Lender, subagent_tool
from agentfsm.runtime.tools import Approval, Tool, registry

if TYPE_CHECKING:
    from agentfsm.journal.resume import Resumable
    from agentfsm.journal.store import Store

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
        host: Clock, secret, seed and store, where the embedding program brings its own.

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
        lent = host or Host()
        self._parts = Parts(
            machine=Machine(self.graph),
            model=_model(model),
            tools=every,
            specs=() if self.rules.envelope else specs,
            policy=policy or chosen.policy,
            host=lent,
            effects=_effects(self.graph),
            ends=frozenset(s.name for s in self.graph.states if s.final or s.waits),
            keep=_keep(lent, every),
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

    @property
    def parts(self) -> Parts:
        """What it is made of, put together."""
        return self._parts

    def made_of(self, parts: Parts, guardrails: AgentGuardrails | None = None) -> Agent:
        """An agent like this one, made of other parts: for tests, which lend it a clock, a store and scripts.

        Args:
            parts: Its parts; ``dataclasses.replace(agent.parts, ...)``.
            guardrails: Its limits, where they are other ones.
        """
        agent = copy.copy(self)
        agent._parts = replace(parts, keep=_keep(parts.host, parts.tools))
        agent.graph, agent.guardrails = parts.machine.graph, guardrails or self.guardrails
        return agent

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

        Raises:
            RunError: The prompt is no text.
        """
        if not isinstance(prompt, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # for untyped callers
            raise RunError(f"a prompt is a text, not {type(prompt).__name__}")
        first = [Message.system(self.instructions)] if self.instructions else []
        earlier = answered(m for m in message_history if m.role is not Role.SYSTEM)
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

    def resume(self, record: SuspensionRecord | str, reply: Answer | None = None) -> Run:
        """A suspended run, going on with a person's reply; or one that was cut off, going on.

        Args:
            record: The record, or its JSON text; or, where the host has a store, the run's id.
            reply: A text; for an approval ``Allow()``, ``Deny(reason)`` or ``Edit(arguments)``; for a doubt
                ``ItRan(result)``, ``ItDidNotRun()`` or ``GiveUp()``; None for a run that was cut off.

        Raises:
            RecordError: The record or the reply is not good; each case has its own class, and the run
                stays suspended and untouched.
        """
        if _is_id(record):
            return self._from_store(str(record), reply)
        opened = _record(record)
        state = self._open(opened)
        answer = person_reply("" if reply is None else reply)
        check_reply(opened.kind, answer)
        return self._on_record(opened, state, Errand(record=opened, reply=answer))

    def dismiss(self, record: SuspensionRecord | str, reason: str = "dismissed") -> Run:
        """The run that a record holds, ended without a reply; an expired one ends as that.

        Raises:
            RecordError: The record is not good.
        """
        if _is_id(record):
            found = self._taken_up(str(record))
            return Run(self._parts, found.run, Errand(dismiss=reason, taken_up=found.taken_up))
        opened = _record(record)
        state = self._open(opened, late=True)
        return self._on_record(opened, state, Errand(record=opened, dismiss=reason))

    def as_tool(
        self,
        name: str,
        description: str,
        *,
        timeout: float | None = None,
        requires_approval: Approval = False,
        parallel: bool = False,
    ) -> Tool:
        """This agent as a tool of another: each call is a run of its own, on the host of the run that calls.

        It stays within what is left of the limits of that run, which is charged for it; is cancelled with it;
        and where it waits for a person, that run waits too and asks the same. Where the host has a store, a call
        that was cut off is made again, and goes on where the sub-agent's own journal ends.

        Args:
            name: The tool's name.
            description: What it does and when to call it, for the model that calls.
            timeout: Seconds for one call, waiting for people not counted; the calling run's
                ``tool_timeout_s`` unless given.
            requires_approval: True, or a function of the arguments: whether a person must allow a call.
            parallel: Whether calls may run together with others that may. Each then has all that is left.

        Raises:
            ToolDefinitionError: The name is none for a tool, or the timeout is not more than 0.
        """
        if timeout is not None and not timeout > 0:
            raise ToolDefinitionError(f"tool {name!r}: timeout must be more than 0 seconds, not {timeout}")
        secret = {t.name: t.secret for t in self._parts.tools.values() if t.secret}
        lender = Lender(self._begin_for, self._go_on_for, self._stored_for, self.guardrails, secret)
        return replace(
            subagent_tool(name, description, lender),
            timeout=timeout,
            requires_approval=requires_approval,
            parallel=parallel,
        )

    def _on(self, host: Host) -> Agent:
        """This agent on another host."""
        agent = copy.copy(self)
        agent._parts = replace(self._parts, host=host, keep=_keep(host, self._parts.tools))
        return agent

    def _begin_for(
        self, host: Host, limits: AgentGuardrails, task: str, run_id: str, session_id: str, parent: tuple[str, str]
    ) -> Run:
        run = self._on(host).run(task, session_id=session_id, run_id=run_id)
        run.state.guardrails, run.state.parent = limits, parent
        return run

    def _go_on_for(self, host: Host, held: Held, answer: PersonReply) -> Run:
        agent, opened = self._on(host), _record(held.record)
        state = agent._open(opened, late=True)  # how long an answer is good is for the run above to say
        return Run(agent._parts, state, Errand(record=opened, reply=answer))

    def _stored_for(
        self, host: Host, run_id: str, suspension: str, answer: PersonReply | None
    ) -> Run | RunState | None:
        head = None if host.store is None else host.store.head(run_id)
        if host.store is None or head is None or not head.seq:
            return None
        if head.status == "finished":
            from agentfsm.journal.restore import restore

            return restore(host.store.rows(run_id)).run
        agent = self._on(host)
        found = agent._taken_up(run_id)
        given = answer if found.suspended is not None and found.suspended == suspension else None
        return Run(agent._parts, found.run, Errand(reply=given, taken_up=found.taken_up))

    def recover(self) -> list[Run]:
        """The runs of the host's store that were cut off, each to be awaited; it then goes on from its last record.

        A run of another graph is left as it is, with a warning in the log; a sub-agent's is left to the run
        for which it works.

        Raises:
            ConfigurationError: The host has no store.
        """
        found: list[Run] = []
        for head in self._store().heads("running"):
            if head.owner is None and head.seq:
                try:
                    run = self._from_store(head.run_id, None)
                    if run.state.parent is None:
                        found.append(run)
                except JournalGraphError as error:
                    log.warning("%s", error)
        return found

    def _store(self) -> Store:
        store = self._parts.host.store
        if store is None:
            raise ConfigurationError("the agent's host has no store: Host(store=SqliteStore('runs.db'))")
        return store

    def _taken_up(self, run_id: str) -> Resumable:
        from agentfsm.journal.resume import take_up  # the journal loads when a run comes from a store

        return take_up(self._store(), run_id, self.graph)

    def _from_store(self, run_id: str, reply: Answer | None) -> Run:
        found = self._taken_up(run_id)
        expires = found.taken_up.expires_at
        if found.suspended is None:
            if reply is not None:
                raise ReplyError(f"run {run_id!r} was cut off and waits for nobody: resume it without a reply")
            first = found.run.steps == 1
            prompt = found.run.messages[-1].content if first and found.run.messages else ""
            return Run(self._parts, found.run, Errand(prompt, taken_up=found.taken_up))
        if expires is not None and self._parts.host.clock.time() > expires:
            raise RecordExpiredError(f"nobody answered in time; end the run with agent.dismiss({run_id!r})")
        answer = person_reply("" if reply is None else reply)
        check_reply(found.taken_up.kind, answer)
        return Run(self._parts, found.run, Errand(reply=answer, taken_up=found.taken_up))

    def _on_record(self, record: SuspensionRecord, state: RunState, errand: Errand) -> Run:
        """A run that a record holds; where the host's store has it too, the store is where it goes on."""
        store = self._parts.host.store
        if store is None or store.head(record.run_id) is None:
            return Run(self._parts, state, errand)
        found = self._taken_up(record.run_id)
        if found.suspended != record.record_id:
            raise RecordUsedError(f"run {record.run_id!r} has gone on since record {record.record_id!r} was written")
        return Run(self._parts, found.run, replace(errand, taken_up=found.taken_up))

    def _open(self, record: SuspensionRecord, late: bool = False) -> RunState:
        host = self._parts.host
        state = open_record(record, graph=self.graph.fingerprint, secret=host.secret, now=host.clock.time(), late=late)
        if host.used.used(record.record_id):
            raise RecordUsedError(f"record {record.record_id!r} was resumed already; each is good for one reply")
        return state

    def diagram(self, format: str = "svg") -> str:  # noqa: A002  # the word that everybody expects
        """The agent's graph as a picture, with its hooks at the doors of their states.

        Args:
            format: One of ``agentfsm.diagrams.FORMATS``; those for other machines show no hooks.

        Raises:
            ConfigurationError: There is no such form.
        """
        from agentfsm.diagrams import FORMATS, Doors, diagram  # a reader of graphs, loaded when one is drawn

        doors = {state: [h.name or "hook" for h in hooks] for state, hooks in self._parts.hooks.items()}
        shown = bool(doors) and format in FORMATS and FORMATS[format].overlays
        return diagram(self.graph, format, overlay=Doors(doors) if shown else None)

    def __repr__(self) -> str:
        return f"Agent({self._parts.model.name!r}, tools={sorted(self._parts.tools)}, graph={self.graph.name!r})"


async def _result(run: Run) -> RunResult:
    return await run


def _is_id(record: SuspensionRecord | str) -> bool:
    return isinstance(record, str) and not record.lstrip().startswith("{")


def _keep(host: Host, tools: Mapping[str, Tool]) -> Callable[[str, TakenUp | None], Awaitable[Keeper]] | None:
    store = host.store
    if store is None:
        return None
    secret = {t.name: t.secret for t in tools.values() if t.secret}

    def keep(run_id: str, taken_up: TakenUp | None) -> Awaitable[Keeper]:
        from agentfsm.journal.keeper import open_keeper

        return open_keeper(store, run_id, taken_up, secret)

    return keep


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
