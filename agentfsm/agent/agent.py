"""``Agent``: a model, tools and limits put together on a graph."""

from __future__ import annotations

import asyncio
import copy
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from agentfsm.agent.config import (
    check_migrations,
    collect_tools,
    effects_by_state,
    hooks_by_state,
    journal_factory,
    make_output_adapter,
    normalize_history,
    resolve_model,
    resolve_preset,
    system_prompt,
    validate_types,
)
from agentfsm.agent.resume import ResumeRequest, dismiss_run, resume_run, unfinished_runs
from agentfsm.agent.subagent import subagent_factory, subagent_tool
from agentfsm.errors import RunError, ToolDefinitionError
from agentfsm.loop.guardrails import AgentGuardrails
from agentfsm.loop.messages import Message
from agentfsm.loop.model import Model
from agentfsm.loop.policy import RecoveryPolicy
from agentfsm.loop.presets import STANDARD, Preset
from agentfsm.loop.state import RunState
from agentfsm.loop.suspension import SuspensionRecord
from agentfsm.machine.engine import Machine
from agentfsm.machine.graph import Graph
from agentfsm.runtime.approval import HumanInput
from agentfsm.runtime.context import AgentConfig
from agentfsm.runtime.driver import RunRequest
from agentfsm.runtime.hooks import Hook, Observer
from agentfsm.runtime.host import Host, Memory
from agentfsm.runtime.result import RunResult
from agentfsm.runtime.run import Run
from agentfsm.runtime.tools import ApprovalRequirement, Tool

if TYPE_CHECKING:
    from agentfsm.journal.migration import Migration

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
        migrations: Which stored runs of earlier graphs may go on under this one; see ``agentfsm.Migration``.

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
        hooks: Iterable[Hook | Observer] = (),
        memory: Memory | None = None,
        output_type: Any = None,
        host: Host | None = None,
        migrations: Iterable[Migration] = (),
    ) -> None:
        validate_types(
            {
                "tools": tools,
                "instructions": instructions,
                "guardrails": guardrails,
                "policy": policy,
                "graph": graph,
                "hooks": hooks,
                "memory": memory,
                "host": host,
                "migrations": migrations,
            }
        )
        hooks, chosen = tuple(hooks), resolve_preset(preset)
        self.guardrails = guardrails or chosen.guardrails
        self.behavior = chosen.behavior
        self.graph = graph or chosen.graph
        every = collect_tools(tools, self.behavior, output_type)
        specs = tuple(t.spec for t in every.values())
        output = None if output_type in (None, str) else make_output_adapter(output_type)
        schema = None if output is None else output.json_schema()
        self.instructions = system_prompt(instructions, self.behavior, specs, schema)
        lent = host or Host()
        asked = resolve_model(model)
        self._config = AgentConfig(
            machine=Machine(self.graph),
            model=asked,
            tools=every,
            tool_specs=() if self.behavior.envelope else specs,
            policy=policy or chosen.policy,
            host=lent,
            effects=effects_by_state(self.graph),
            stop_states=frozenset(s.name for s in self.graph.states if s.final or s.waits),
            open_journal_sink=journal_factory(lent, every, asked),
            hooks=hooks_by_state(hooks, self.graph),
            observers=tuple(h for h in hooks if isinstance(h, Observer)),
            memory=memory,
            output_adapter=output,
            output_schema=None if self.behavior.control_tools else schema,
            migrations=check_migrations(tuple(migrations), self.graph),
        )

    @property
    def model(self) -> Model:
        """The model."""
        return self._config.model

    @property
    def config(self) -> AgentConfig:
        """What it is made of, put together."""
        return self._config

    def with_config(self, config: AgentConfig, guardrails: AgentGuardrails | None = None) -> Agent:
        """An agent like this one, made of other parts: on another host, say, or with a script in the model's seat.

        Args:
            config: Its parts; ``dataclasses.replace(agent.parts, ...)``.
            guardrails: Its limits, where they are other ones.
        """
        agent = copy.copy(self)
        agent._config = replace(config, open_journal_sink=journal_factory(config.host, config.tools, config.model))
        agent.graph, agent.guardrails = config.machine.graph, guardrails or self.guardrails
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
            RunError: The prompt is no text, or the history holds what is no message.
        """
        if not isinstance(prompt, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # for untyped callers
            raise RunError(f"a prompt is a text, not {type(prompt).__name__}")
        first = [Message.system(self.instructions)] if self.instructions else []
        state = RunState(
            run_id=run_id or secrets.token_hex(8),
            session_id=session_id,
            state=self.graph.initial,
            guardrails=self.guardrails,
            behavior=self.behavior,
            messages=[*first, *normalize_history(message_history), Message.user(prompt)],
        )
        return Run(self._config, state, RunRequest(prompt))

    def run_sync(self, prompt: str, *, message_history: Sequence[Message] = (), session_id: str = "") -> RunResult:
        """Run to the end and give the result, where no event loop runs.

        Raises:
            RunError: An event loop runs in this thread; await ``agent.run`` there.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(_await_result(self.run(prompt, message_history=message_history, session_id=session_id)))
        raise RunError("run_sync cannot be used inside a running event loop: use 'await agent.run(...)' there")

    def resume(
        self, record: SuspensionRecord | str, reply: HumanInput | None = None, *, to: str = "", by: str = ""
    ) -> Run:
        """A suspended run, going on with a person's reply; or one that was cut off, going on.

        Args:
            record: The record, or its JSON text; or, where the host has a store, the run's id.
            reply: A text; for an approval ``Allow()``, ``Deny(reason)`` or ``Edit(arguments)``; for a doubt
                ``ItRan(result)``, ``ItDidNotRun()`` or ``GiveUp()``; None for a run that was cut off.
            to: What the person was shown, as ``UserInputRequested.digest`` of a stored run, or at least its
                first 12 digits: the reply is refused where the run asks something else by now (another call,
                other arguments).
            by: Who replied, for the journal.

        Raises:
            SuspensionRecordError: The record or the reply is not good; each case has its own class, and the run
                stays suspended and untouched.
            agentfsm.errors.JournalGraphError: The stored run is of another graph, and no migration lets it in.
            agentfsm.errors.StoreError: The store does not have it, or cannot be read.
        """
        return resume_run(self._config, record, ResumeRequest(reply, to, by))

    def dismiss(self, record: SuspensionRecord | str, reason: str = "dismissed") -> Run:
        """The run that a record holds, ended without a reply; an expired one ends as that.

        Raises:
            SuspensionRecordError: The record is not good.
        """
        return dismiss_run(self._config, record, reason)

    def as_tool(
        self,
        name: str,
        description: str,
        *,
        timeout: float | None = None,
        requires_approval: ApprovalRequirement = False,
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
            parallel: Whether calls may run together with others that may. Sub-agents that begin together then share
                equally what is left of tokens and USD.

        Raises:
            ToolDefinitionError: The name is none for a tool, or the timeout is not more than 0.
        """
        if timeout is not None and not timeout > 0:
            raise ToolDefinitionError(f"tool {name!r}: timeout must be more than 0 seconds, not {timeout}")
        return replace(
            subagent_tool(name, description, subagent_factory(self)),
            timeout=timeout,
            requires_approval=requires_approval,
            parallel=parallel,
        )

    def unfinished_runs(self) -> list[Run]:
        """The runs of the host's store that were cut off, each to be awaited; it then goes on from its last record.

        A run of another graph that no migration lets in, or whose journal cannot be gone on with, is left as it
        is, with a warning in the log; a sub-agent's is left to the run for which it works.

        Raises:
            ConfigurationError: The host has no store.
        """
        return unfinished_runs(self._config)

    def diagram(self, format: str = "svg") -> str:  # noqa: A002  # the word that everybody expects
        """The agent's graph as a picture, with its hooks at the doors of their states.

        Args:
            format: One of ``agentfsm.diagrams.FORMATS``; those for other machines show no hooks.

        Raises:
            ConfigurationError: There is no such form.
        """
        from agentfsm.diagrams import FORMATS, HooksOverlay, diagram  # a reader of graphs, loaded when one is drawn

        doors = {state: [h.name or "hook" for h in hooks] for state, hooks in self._config.hooks.items()}
        shown = bool(doors) and format in FORMATS and FORMATS[format].overlays
        return diagram(self.graph, format, overlay=HooksOverlay(doors) if shown else None)

    def __repr__(self) -> str:
        return f"Agent({self._config.model.name!r}, tools={sorted(self._config.tools)}, graph={self.graph.name!r})"


async def _await_result(run: Run) -> RunResult:
    return await run
