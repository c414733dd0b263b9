"""What a run begins with: its prompt, history and ids, and the dependencies, tools and instructions made for it.

All of this is checked and made before the run takes its lease and writes anything, so an error changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from inspect import isawaitable
from typing import Any

from agentfsm.errors import ConfigurationError, MissingDepsError, RunError, ToolsetError
from agentfsm.loop.canonical_json import is_storable
from agentfsm.loop.failures import describe_exception
from agentfsm.loop.messages import File, Image, Message, Role, with_missing_results
from agentfsm.loop.prompts import prompt_message, without_memory
from agentfsm.loop.read_only import code_name
from agentfsm.loop.state import RunDetails, RunState
from agentfsm.runtime.approval import hook_limit_s
from agentfsm.runtime.context import AgentConfig, Context
from agentfsm.runtime.event_filter import WITHHELD
from agentfsm.runtime.run_context import check_deps, run_context
from agentfsm.runtime.timeout import reraise_cancellation
from agentfsm.runtime.toolsets import choose_tools

Prompt = str | Sequence[str | Image | File]
"""A user's message: a text, or texts, images and files."""


def check_prompt(prompt: Prompt) -> Message:
    """The user message of a prompt.

    Raises:
        RunError: It is something else, it has no parts, or its images and files are too large.
    """
    if not isinstance(prompt, (str, list, tuple)):
        raise RunError(
            f"a prompt must be a string, or a list of strings, Images and Files, not {type(prompt).__name__}"
        )
    try:
        return prompt_message(prompt)
    except ValueError as error:
        raise RunError(str(error)) from None


def check_ids(run_id: object, session_id: object) -> None:
    """Check the ids that a run is given.

    Raises:
        RunError: One of them is not a string, or the run's id cannot be told from a suspension record, or be stored.
    """
    if not isinstance(session_id, str):
        raise RunError(f"session_id must be a string, not {type(session_id).__name__}")
    if run_id is None:
        return
    if not isinstance(run_id, str):
        raise RunError(f"run_id must be a string, or None for a random one, not {type(run_id).__name__}")
    if run_id.lstrip().startswith("{"):
        raise RunError(f"run_id {run_id!r} begins like a suspension record: begin it with a letter or a digit")
    if not is_storable(run_id):
        raise RunError(f"run_id {run_id!r} has NUL or half of a surrogate pair in it, which not every store can keep")


def normalize_history(history: Iterable[Message]) -> list[Message]:
    """An earlier transcript without its system prompt and recalled memory, with a result for each call.

    Raises:
        RunError: It contains something that is not a message.
    """
    messages = list(history)
    for each in messages:
        if not isinstance(each, Message):  # pyright: ignore[reportUnnecessaryIsInstance]  # for untyped callers
            raise RunError(
                "message_history must be a list of Message, as result.messages is (or Message.user('...')), "
                f"and contains {type(each).__name__}"
            )
    return with_missing_results(without_memory(m) for m in messages if m.role is not Role.SYSTEM)


def new_run(
    config: AgentConfig, messages: Iterable[Message], session_id: str, run_id: str, details: RunDetails
) -> RunState:
    """The state of a new run, in the graph's initial state."""
    made_later = config.make_instructions is not None or config.toolsets
    system = [Message.system(config.instructions)] if config.instructions and not made_later else []
    approvals = config.pin_approvals(config)
    return RunState(
        run_id=run_id,
        session_id=session_id,
        state=config.machine.graph.initial,
        guardrails=config.guardrails,
        behavior=config.behavior,
        messages=[*system, *messages],
        details=details
        if details.history == config.history and details.approvals == approvals
        else replace(details, history=config.history, approvals=approvals),
    )


async def make_deps(context: Context, *, dismissed: bool) -> None:
    """Give a run its dependencies: those that it was given, or what the agent's ``deps_factory`` makes.

    Args:
        context: The run.
        dismissed: Whether the run is only ended: then it continues without what cannot be made.

    Raises:
        MissingDepsError: The run was started with dependencies, and there are none now.
        RunError: The factory failed, or what it made has another type than the agent declares.
    """
    config, run = context.config, context.run
    if context.deps is None and config.deps_factory is not None:
        try:
            deps = await _call(context, "deps_factory", config.deps_factory)
            if deps is None:
                raise RunError(f"deps_factory {code_name(config.deps_factory)} returned None")
            check_deps(config.deps_type, deps, "deps_factory returned None")
            context.deps = deps
        except RunError as error:
            if not dismissed:
                raise
            context.warn("the run is dismissed without its dependencies", f"{error}")
    if run.details.has_deps and context.deps is None and not dismissed:
        raise MissingDepsError(f"run {run.run_id!r} was started with dependencies, and has none now")
    if context.deps is not None and not run.details.has_deps:
        run.details = replace(run.details, has_deps=True)


async def add_tools(context: Context, *, dismissed: bool = False) -> None:
    """Give a run the tools that its agent's toolsets choose for it.

    Args:
        context: The run.
        dismissed: Whether the run is only ended: then it continues with the tools that are known without its toolsets.

    Raises:
        ToolsetError: A toolset failed, or the run cannot have what it returned.
    """
    config = context.config
    if config.with_tools is None:
        return
    try:
        chosen = [
            tool
            for each in config.toolsets
            for tool in choose_tools(each, await _call(context, "toolset", each.get_tools))
        ]
        context.use_config(config.with_tools(config, chosen))
    except (RunError, ConfigurationError) as error:
        if not dismissed:
            raise ToolsetError(f"run {context.run.run_id!r} cannot have its tools: {error}") from error
        context.warn("the run is dismissed without the tools of its toolsets", f"{error}")


async def add_instructions(context: Context) -> None:
    """Put the system prompt at the beginning of a new run's transcript, with what a function of the agent returns.

    Raises:
        RunError: The function failed, or returned something other than a text.
    """
    config, run = context.config, context.run
    function, text = config.make_instructions, ""
    if function is not None:
        text = await _call(context, "instructions", function)
        if not isinstance(text, str):
            raise RunError(f"instructions {code_name(function)} must return a string, not {type(text).__name__}")
    whole = "\n\n".join(part for part in (text, config.instructions) if part)
    if whole:
        run.messages = [Message.system(whole), *run.messages]


async def _call(context: Context, role: str, function: Callable[[Any], Any]) -> Any:
    """What a user function returns for the run, within the time limit of hooks."""
    try:
        value = function(run_context(context.run, context.deps))
        return await context.timeout.run(value, hook_limit_s(context)) if isawaitable(value) else value
    except (Exception, asyncio.CancelledError) as error:
        reraise_cancellation(error)
        known = context.config.open_withholder().with_mask(WITHHELD)  # whoever runs it logs this, or keeps it
        text = known.clean_text(f"{role} {code_name(function)} raised {describe_exception(error)}")
        raise RunError(f"{text}; run {context.run.run_id!r} was not changed") from error
