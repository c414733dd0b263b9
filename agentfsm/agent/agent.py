"""``Agent``: a model, tools and limits put together on a graph."""

from __future__ import annotations

import asyncio
import copy
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from agentfsm.agent.assembly import (
    chosen_model,
    chosen_preset,
    each_of_its_kind,
    effects_of,
    every_tool,
    fitting,
    hooks_by_state,
    keep_in_store,
    output_adapter,
    said_before,
    told_first,
)
from agentfsm.agent.going_on import Reply, dismissed, resumed
from agentfsm.agent.left_behind import left_behind
from agentfsm.agent.lending import lender_of
from agentfsm.core.guardrails import AgentGuardrails
from agentfsm.core.messages import Message
from agentfsm.core.model import Model
from agentfsm.core.policy import RecoveryPolicy
from agentfsm.core.presets import STANDARD, Preset
from agentfsm.core.state import RunState
from agentfsm.core.suspension import SuspensionRecord
from agentfsm.errors import RunError, ToolDefinitionError
from agentfsm.machine.engine import Machine
from agentfsm.machine.graph import Graph
from agentfsm.runtime.context import Parts
from agentfsm.runtime.errand import Errand
from agentfsm.runtime.hooks import Hook, Observer
from agentfsm.runtime.host import Host
from agentfsm.runtime.memory import Memory
from agentfsm.runtime.replies import Answer
from agentfsm.runtime.result import RunResult
from agentfsm.runtime.run import Run
from agentfsm.runtime.subagent import subagent_tool
from agentfsm.runtime.tools import Approval, Tool

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
        each_of_its_kind(
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
        hooks, chosen = tuple(hooks), chosen_preset(preset)
        self.guardrails = guardrails or chosen.guardrails
        self.rules = chosen.rules
        self.graph = graph or chosen.graph
        every = every_tool(tools, self.rules, output_type)
        specs = tuple(t.spec for t in every.values())
        output = None if output_type in (None, str) else output_adapter(output_type)
        schema = None if output is None else output.json_schema()
        self.instructions = told_first(instructions, self.rules, specs, schema)
        lent = host or Host()
        asked = chosen_model(model)
        self._parts = Parts(
            machine=Machine(self.graph),
            model=asked,
            tools=every,
            specs=() if self.rules.envelope else specs,
            policy=policy or chosen.policy,
            host=lent,
            effects=effects_of(self.graph),
            ends=frozenset(s.name for s in self.graph.states if s.final or s.waits),
            keep=keep_in_store(lent, every, asked),
            hooks=hooks_by_state(hooks, self.graph),
            observers=tuple(h for h in hooks if isinstance(h, Observer)),
            memory=memory,
            output=output,
            output_schema=None if self.rules.control_tools else schema,
            migrations=fitting(tuple(migrations), self.graph),
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
        """An agent like this one, made of other parts: on another host, say, or with a script in the model's seat.

        Args:
            parts: Its parts; ``dataclasses.replace(agent.parts, ...)``.
            guardrails: Its limits, where they are other ones.
        """
        agent = copy.copy(self)
        agent._parts = replace(parts, keep=keep_in_store(parts.host, parts.tools, parts.model))
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
            rules=self.rules,
            messages=[*first, *said_before(message_history), Message.user(prompt)],
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

    def resume(self, record: SuspensionRecord | str, reply: Answer | None = None, *, to: str = "", by: str = "") -> Run:
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
            RecordError: The record or the reply is not good; each case has its own class, and the run
                stays suspended and untouched.
            agentfsm.errors.JournalGraphError: The stored run is of another graph, and no migration lets it in.
            agentfsm.errors.StoreError: The store does not have it, or cannot be read.
        """
        return resumed(self._parts, record, Reply(reply, to, by))

    def dismiss(self, record: SuspensionRecord | str, reason: str = "dismissed") -> Run:
        """The run that a record holds, ended without a reply; an expired one ends as that.

        Raises:
            RecordError: The record is not good.
        """
        return dismissed(self._parts, record, reason)

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
            parallel: Whether calls may run together with others that may. Sub-agents that begin together then share
                equally what is left of tokens and USD.

        Raises:
            ToolDefinitionError: The name is none for a tool, or the timeout is not more than 0.
        """
        if timeout is not None and not timeout > 0:
            raise ToolDefinitionError(f"tool {name!r}: timeout must be more than 0 seconds, not {timeout}")
        return replace(
            subagent_tool(name, description, lender_of(self)),
            timeout=timeout,
            requires_approval=requires_approval,
            parallel=parallel,
        )

    def recover(self) -> list[Run]:
        """The runs of the host's store that were cut off, each to be awaited; it then goes on from its last record.

        A run of another graph that no migration lets in, or whose journal cannot be gone on with, is left as it
        is, with a warning in the log; a sub-agent's is left to the run for which it works.

        Raises:
            ConfigurationError: The host has no store.
        """
        return left_behind(self._parts)

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
