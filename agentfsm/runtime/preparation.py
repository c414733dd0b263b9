"""What a run needs before its first record: its dependencies, and tools and instructions that depend on its context.

All of them are made before the run takes its lease and writes anything, so a function that raises changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from inspect import isawaitable
from typing import Any

from agentfsm.errors import ConfigurationError, MissingDepsError, RunError, ToolsetError
from agentfsm.loop.failures import describe_exception
from agentfsm.loop.messages import Message
from agentfsm.loop.read_only import code_name
from agentfsm.runtime.approval import hook_limit_s
from agentfsm.runtime.context import Context
from agentfsm.runtime.run_context import check_deps, run_context
from agentfsm.runtime.timeout import reraise_cancellation
from agentfsm.runtime.toolsets import choose_tools

__all__ = ["add_instructions", "add_tools", "make_deps"]


async def make_deps(context: Context, *, dismissed: bool) -> None:
    """Give a run its dependencies: those that it was given, or what the agent's ``deps_factory`` makes.

    Args:
        context: The run.
        dismissed: Whether the run is only ended: then it goes on without what cannot be made.

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
        dismissed: Whether the run is only ended: then it goes on with the tools that are known without its toolsets.

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

    Args:
        context: The run.

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
    """What a function of the user's returns for the run, within the time limit of hooks.

    Raises:
        RunError: It raised, or took too long.
    """
    try:
        value = function(run_context(context.run, context.deps))
        return await context.timeout.run(value, hook_limit_s(context)) if isawaitable(value) else value
    except (Exception, asyncio.CancelledError) as error:
        reraise_cancellation(error)
        text = f"{role} {code_name(function)} raised {describe_exception(error)}"
        raise RunError(f"{text}; run {context.run.run_id!r} was not changed") from error
