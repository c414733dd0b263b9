"""``Agent``: a model, tools and limits, put together on a graph.

Importing the class is cheap: the run loop (about 40 modules) loads when the first agent is created.
"""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

if TYPE_CHECKING:
    from pydantic import TypeAdapter

    from agentfsm.agent.run_options import RunOptions
    from agentfsm.agent.sessions import Session
    from agentfsm.journal.migration import Migration
    from agentfsm.loop.guardrails import AgentGuardrails, Behavior
    from agentfsm.loop.history import HistoryPolicy
    from agentfsm.loop.human_input import HumanInput
    from agentfsm.loop.messages import File, Image, Message
    from agentfsm.loop.model import Model
    from agentfsm.loop.presets import Preset
    from agentfsm.loop.recovery_policy import RecoveryPolicy
    from agentfsm.loop.suspension import SuspensionRecord
    from agentfsm.machine.graph import Graph
    from agentfsm.runtime.context import AgentConfig
    from agentfsm.runtime.hooks import Hook, Observer
    from agentfsm.runtime.host import Host, Memory
    from agentfsm.runtime.result import RunResult
    from agentfsm.runtime.run import Run
    from agentfsm.runtime.run_context import AgentDeps, Output, RunContext
    from agentfsm.runtime.tools import ApprovalRequirement, Tool
    from agentfsm.runtime.toolsets import AgentTools
else:  # without their defaults: ``typing_extensions`` takes four times as long to import as this module
    AgentDeps, Output = TypeVar("AgentDeps"), TypeVar("Output", covariant=True)

_NO_METADATA: Mapping[str, Any] = MappingProxyType({})


class Agent(Generic[AgentDeps, Output]):
    """An agent whose every state change is a row of a checked table. Create it once and run it as often as you like.

    ``Agent[Deps, Output]`` has two type parameters, which type checkers infer from ``deps_type`` and ``output_type``:
    the type of its runs' dependencies (by default none) and that of their answers (by default ``str``).

    Args:
        model: A model, or the name of one (``"openai:gpt-5-mini"``, ``"ollama:llama3.2"``...).
        tools: Functions that the model may call, plain or made with ``@tool``, and toolsets; or a function of the
            ``RunContext`` that returns a list of functions, plain or async, called when a run starts or continues.
        instructions: The system prompt; or a function, plain or async, that gets the ``RunContext`` and returns it,
            called once when a run starts.
        guardrails: Limits on time, tokens, cost and more; by default the preset's.
        policy: Decides how the run recovers from failures; by default the preset's.
        preset: A behavior, by name or as a ``Preset``: ``standard``, ``funnel``, ``feedback``,
            ``breaker`` or ``strict``.
        graph: The transition table to run on; by default the preset's.
        hooks: Hooks, which run before a state's effect, and observers, which receive every event.
        memory: Long-term memory, kept between runs.
        output_type: The type of the answer (structured output), such as a pydantic model; by default text. A union
            or another special form is given as a ``pydantic.TypeAdapter`` of it.
        deps_type: The type of its runs' dependencies: what tools and hooks get as ``context.deps``.
        deps_factory: Makes the dependencies of a run that is given none, from its ``RunContext``: of a new one, and of
            one that is resumed, in whatever process. Plain or async.
        output_validators: Functions of the ``RunContext`` and an answer, plain or async, called in order with each
            answer. They return it, changed or not (None for unchanged), or raise a ``ValueError`` with the reason for
            the model, which may then answer again, as often as after malformed output.
        host: Clock, secret, seed and store, when the embedding program provides its own.
        history: What is kept of a long history: ``KeepAll()`` (the default), ``KeepLast(...)`` or ``Summarize(...)``.
        migrations: Which stored runs of earlier graphs may continue under this one; see ``agentfsm.Migration``.

    Raises:
        ConfigurationError: The arguments are invalid or do not fit together; each case has its own class.
        agentfsm.errors.ToolDefinitionError: A tool cannot be described to a model.
        agentfsm.errors.UnknownModelError: No provider knows the model's name.
        agentfsm.errors.MissingKeyError: The provider's API key is missing.
        agentfsm.errors.GraphError: The graph cannot run an agent.
    """

    def __init__(
        self,
        model: str | Model,
        *,
        tools: AgentTools[AgentDeps] = (),
        instructions: str | Callable[[RunContext[AgentDeps]], str | Awaitable[str]] = "",
        guardrails: AgentGuardrails | None = None,
        policy: RecoveryPolicy | None = None,
        preset: str | Preset = "standard",
        graph: Graph | None = None,
        hooks: Iterable[Hook | Observer] = (),
        memory: Memory | None = None,
        output_type: type[Output] | TypeAdapter[Output] | None = None,
        deps_type: type[AgentDeps] | None = None,
        deps_factory: Callable[[RunContext], AgentDeps | Awaitable[AgentDeps]] | None = None,
        output_validators: Iterable[Callable[[RunContext[AgentDeps], Output], Output | Awaitable[Output | None] | None]]
        | None = None,
        host: Host | None = None,
        migrations: Iterable[Migration] = (),
        history: HistoryPolicy | None = None,
    ) -> None:
        from agentfsm.agent.agent_options import AgentOptions
        from agentfsm.agent.config import build_config  # loads the run loop

        self._config = build_config(
            model,
            AgentOptions(
                tools=tools,
                instructions=instructions,
                guardrails=guardrails,
                policy=policy,
                preset=preset,
                graph=graph,
                hooks=hooks,
                memory=memory,
                output_type=output_type,
                deps_type=deps_type,
                deps_factory=deps_factory,
                output_validators=() if output_validators is None else output_validators,
                host=host,
                migrations=migrations,
                history=history,
            ),
        )

    if not TYPE_CHECKING:

        def __class_getitem__(cls, parameters: Any) -> Any:
            """``Agent[Deps]`` is ``Agent[Deps, str]``, as type checkers understand it."""
            return super().__class_getitem__(parameters if isinstance(parameters, tuple) else (parameters, str))

    @property
    def model(self) -> Model:
        """The model."""
        return self._config.model

    @property
    def graph(self) -> Graph:
        """The transition table that its runs follow."""
        return self._config.machine.graph

    @property
    def guardrails(self) -> AgentGuardrails:
        """The limits of its runs."""
        return self._config.guardrails

    @property
    def behavior(self) -> Behavior:
        """The switches set by its preset."""
        return self._config.behavior

    @property
    def instructions(self) -> str:
        """The system prompt, including what the preset and the output type add to it.

        If the agent's instructions are a function, only what is added to what it returns.
        """
        return self._config.instructions

    @property
    def config(self) -> AgentConfig:
        """The validated configuration that its runs share."""
        return self._config

    def with_config(self, config: AgentConfig, guardrails: AgentGuardrails | None = None) -> Self:
        """A copy of this agent with another configuration, such as another host or a scripted model.

        Args:
            config: The configuration, usually ``dataclasses.replace(agent.config, ...)``.
            guardrails: Its limits; by default those of ``config``.
        """
        from agentfsm.agent.config import with_host

        agent = copy.copy(self)
        agent._config = with_host(config, config.host, guardrails)
        return agent

    def run(
        self,
        prompt: str | Sequence[str | Image | File],
        *,
        deps: AgentDeps | None = None,
        message_history: Sequence[Message] = (),
        session_id: str = "",
        run_id: str | None = None,
        actor: Any = None,
        tags: Iterable[str] = (),
        metadata: Mapping[str, Any] = _NO_METADATA,
        options: RunOptions | None = None,
    ) -> Run[AgentDeps, Output]:
        """Create a run for a prompt: await it for its result, or iterate it for its events.

        Args:
            prompt: The user's message: a text, or a list of texts, images and files.
            deps: Its dependencies, for tools, hooks and other functions of yours; the only argument that is not
                journaled.
            message_history: Earlier messages of the conversation (``result.messages`` of an earlier run).
            session_id: The conversation's id, if you have one.
            run_id: The run's id; by default a random one.
            actor: Who requests it: what ``Host(authenticate=...)`` takes, such as a token; without it an ``Actor`` or
                a name, which is recorded as claimed.
            tags: Short texts by which the run is found.
            metadata: A JSON object, for your own purposes.
            options: A model, settings or limits of its own, instead of the agent's.

        Raises:
            ConfigurationError: The model is unknown or has no key, or it does not take the settings.
            RunError: An argument is not what it must be, or the dependencies are missing; the error says which.
            agentfsm.errors.AuthenticationError: When it starts: the host refuses the actor.
        """
        from agentfsm.agent.run_options import run_details, with_options
        from agentfsm.runtime.run import start_run

        details = run_details(tags, metadata, options)
        return start_run(
            with_options(self._config, options),
            prompt,
            message_history=message_history,
            session_id=session_id,
            run_id=run_id,
            actor=actor,
            deps=deps,
            details=details,
        )

    def run_sync(
        self,
        prompt: str | Sequence[str | Image | File],
        *,
        deps: AgentDeps | None = None,
        message_history: Sequence[Message] = (),
        session_id: str = "",
        run_id: str | None = None,
        actor: Any = None,
        tags: Iterable[str] = (),
        metadata: Mapping[str, Any] = _NO_METADATA,
        options: RunOptions | None = None,
    ) -> RunResult[Output]:
        """Run to the end and return the result, from code that has no running event loop.

        The arguments are those of ``run``.

        Raises:
            RunError: An event loop is running in this thread, as in a notebook; await ``agent.run`` there.
        """
        from agentfsm.runtime.run import run_in_new_loop

        def create() -> Run[AgentDeps, Output]:
            return self.run(
                prompt,
                deps=deps,
                message_history=message_history,
                session_id=session_id,
                run_id=run_id,
                actor=actor,
                tags=tags,
                metadata=metadata,
                options=options,
            )

        return run_in_new_loop(create, "run_sync", "agent.run")

    def session(self, session_id: str, *, history: HistoryPolicy | None = None) -> Session[AgentDeps, Output]:
        """A conversation in the host's store: each of its runs continues where the last one ended, in any process.

        Args:
            session_id: Its id, a text of one line.
            history: What is kept of its history, instead of what the agent's policy says: less or more of it, with a
                policy of the same kind, ``KeepLast(...)``, or ``KeepAll()``.

        Raises:
            RunError: It is not such a text.
            ConfigurationError: The host has no store, or the agent's table has no place for that policy.
        """
        from agentfsm.agent.config import with_history_policy
        from agentfsm.agent.sessions import Session

        return Session(self._config if history is None else with_history_policy(self._config, history), session_id)

    def resume_sync(
        self,
        record: SuspensionRecord | str,
        reply: HumanInput | None = None,
        *,
        to: str | None = None,
        by: Any = None,
        deps: AgentDeps | None = None,
        model: Model | None = None,
    ) -> RunResult[Output]:
        """Resume a run to its end and return the result, from code that has no running event loop.

        The arguments and the other errors are those of ``resume``.

        Raises:
            RunError: An event loop is running in this thread, as in a notebook; await ``agent.resume`` there.
        """
        from agentfsm.runtime.run import run_in_new_loop

        return run_in_new_loop(
            lambda: self.resume(record, reply, to=to, by=by, deps=deps, model=model), "resume_sync", "agent.resume"
        )

    def resume(
        self,
        record: SuspensionRecord | str,
        reply: HumanInput | None = None,
        *,
        to: str | None = None,
        by: Any = None,
        deps: AgentDeps | None = None,
        model: Model | None = None,
    ) -> Run[AgentDeps, Output]:
        """Resume a suspended run with a human's reply, or an interrupted run without one.

        The run is read and checked when you await or iterate it, and the errors are raised there. ``Run.load`` reads
        and checks it without starting it.

        Args:
            record: The suspension record, or its JSON text; or, if the host has a store, the run's id.
            reply: A string; for a form also ``Fill(fields)``, ``Deny(reason)`` or ``GiveUp()``; for a limit also
                ``Extend(tokens=5000)``; for an approval ``Allow()``, ``Deny(reason)`` or ``Edit(arguments)``; for a
                call in doubt ``ItRan(result)``, ``ItDidNotRun()`` or ``GiveUp()``; None for an interrupted run.
            to: The request that the human was shown: ``UserInputRequested.digest`` of a stored run, or at least
                its first 12 digits. The reply is refused if the run now asks something else (another call,
                other arguments). None for whatever it asks now.
            by: Who replies: what ``Host(authenticate=...)`` takes, such as a token, and it must vouch for someone;
                without it an ``Actor`` or a name, which is recorded as claimed, not verified.
            deps: The run's dependencies: a run that was started with some cannot continue without, unless the agent has
                a ``deps_factory``.
            model: The run's model, if it was started with one of its own that was given as an object.

        Raises:
            agentfsm.errors.MissingDepsError: When it starts: the run was started with dependencies, and there are none
                now.
            agentfsm.errors.MissingModelError: When it starts: the run was started with a model of its own that cannot
                found again.
            agentfsm.errors.SuspensionFormatError: The text is not a suspension record.
            agentfsm.errors.HumanReplyError: ``to`` is not a digest.
            ConfigurationError: It is the id of a run, and the host has no store.
            SuspensionRecordError: When it starts: the record or the reply is invalid; each case has its own class, and
                the run stays suspended and unchanged.
            agentfsm.errors.JournalGraphError: When it starts: the stored run belongs to another graph, and no migration
                accepts it.
            agentfsm.errors.StoreError: When it starts: the run is not in the store, or the store cannot be read.
        """
        from agentfsm.agent.resume import ResumeRequest, resume_run

        return resume_run(self._config, record, ResumeRequest(reply, to, by, deps, model))

    def dismiss(
        self, record: SuspensionRecord | str, reason: str = "dismissed", *, by: Any = None
    ) -> Run[AgentDeps, Output]:
        """End a suspended run without a reply. A run whose record has expired ends as expired.

        As with ``resume``, the run is read and checked when you await it.

        Args:
            record: The suspension record, or its JSON text; or, if the host has a store, the run's id.
            reason: Why it is dismissed; becomes ``RunCancelled.reason``, with who dismissed it.
            by: Who dismisses it, as ``resume`` takes it. With ``Host(authenticate=...)`` the host must vouch for
                someone who may deny what the run waits for, unless that has expired.

        Raises:
            agentfsm.errors.SuspensionFormatError: The text is not a suspension record.
            ConfigurationError: It is the id of a run, and the host has no store.
            SuspensionRecordError: When it starts: the record is invalid, or the actor may not dismiss the run.
            agentfsm.errors.JournalGraphError: When it starts: the stored run belongs to another graph, and no migration
                accepts it.
            agentfsm.errors.StoreError: When it starts: the run is not in the store, or the store cannot be read.
        """
        from agentfsm.agent.resume import dismiss_run

        return dismiss_run(self._config, record, reason, by)

    def as_tool(
        self,
        name: str,
        description: str,
        *,
        timeout: float | None = None,
        requires_approval: ApprovalRequirement = False,
        parallel: bool = False,
    ) -> Tool:
        """This agent as a tool of another agent: each call is a separate run, on the host of the calling run.

        A sub-agent's run is limited to what is left of the calling run's budgets, and its usage is charged to the
        calling run. Cancelling the calling run cancels it. When it waits for a human, the calling run waits too and
        asks the same question. If the host has a store, an interrupted call is repeated and continues where the
        sub-agent's own journal ends.

        Args:
            name: The tool's name.
            description: What it does and when to call it, for the calling model.
            timeout: Seconds for one call, not counting the time spent waiting for a human; by default the
                calling run's ``tool_timeout_s``.
            requires_approval: Whether a human must approve a call: True, or a function of the arguments.
            parallel: Whether calls may run in parallel with other parallel calls. Sub-agents that start together
                share the remaining tokens and USD equally.

        Raises:
            ToolDefinitionError: The name is not valid for a tool, or the timeout is not greater than 0.
        """
        from dataclasses import replace

        from agentfsm.agent.subagent_tool import subagent_tool
        from agentfsm.errors import ToolDefinitionError

        if timeout is not None and not timeout > 0:
            raise ToolDefinitionError(f"tool {name!r}: timeout must be greater than 0 seconds, not {timeout}")
        return replace(
            subagent_tool(name, description, self._config),
            timeout=timeout,
            requires_approval=requires_approval,
            parallel=parallel,
        )

    async def unfinished_runs(self) -> list[Run[AgentDeps, Output]]:
        """The runs of the host's store that have something to do, loaded; await each one to continue.

        They are those that were interrupted, and those that were answered or cancelled from elsewhere (``Runs.answer``,
        ``Runs.cancel``): these are resumed with the answer. A run that cannot be resumed (another graph that no
        migration accepts, an unreadable journal, dependencies or a model that are missing) is skipped with a warning in
        the log. A sub-agent's run is not listed: the run that called it resumes it.

        Raises:
            ConfigurationError: The host has no store.
            agentfsm.errors.StoreError: The store cannot be read.
        """
        from agentfsm.agent.recover import unfinished_runs

        return await unfinished_runs(self._config)

    async def next_run(self, run_id: str) -> Run[AgentDeps, Output] | None:
        """A run of the host's store, loaded, if it has something to do that nobody does; None if it has not.

        ``store.signals.listen()`` says which runs to ask about::

            async for run_id in store.signals.listen():
                if run := await agent.next_run(run_id):
                    await run

        Args:
            run_id: The run. It may have been interrupted, or answered or cancelled from elsewhere.

        Raises:
            ConfigurationError: The host has no store.
            agentfsm.errors.StoreError: The store cannot be read.
        """
        from agentfsm.agent.recover import next_run

        return await next_run(self._config, run_id)

    def diagram(self, format: str = "svg") -> str:  # noqa: A002  # the conventional name for it
        """The agent's graph as a diagram, with its hooks at their states.

        Args:
            format: One of ``agentfsm.diagrams.FORMATS``; interchange formats show no hooks.

        Raises:
            ConfigurationError: There is no such format.
        """
        from agentfsm.diagrams import FORMATS, HooksOverlay, diagram  # not needed to run an agent
        from agentfsm.loop.outcomes import RUN_CALLS
        from agentfsm.machine.declaration import State

        hooks = self._config.hooks
        of_calls = {spec.name: State.DISPATCH_TOOL for spec in self.graph.states if spec.effect is RUN_CALLS}
        keys = {spec.name: of_calls.get(spec.name, spec.name) for spec in self.graph.states}
        names = {name: [h.name or "hook" for h in hooks[key]] for name, key in keys.items() if key in hooks}
        show_hooks = bool(names) and format in FORMATS and FORMATS[format].overlays
        return diagram(self.graph, format, overlay=HooksOverlay(names) if show_hooks else None)

    def __repr__(self) -> str:
        return f"Agent({self._config.model.name!r}, tools={sorted(self._config.tools)}, graph={self.graph.name!r})"
