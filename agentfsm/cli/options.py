"""The command-line options that ``run`` and ``resume`` share, and the agent built from them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Any

import click

from agentfsm.agent import Agent
from agentfsm.cli.local_store import SECRET_VARIABLE, build_host
from agentfsm.cli.user_code import load_graph, load_tools
from agentfsm.errors import ConfigurationError
from agentfsm.loop.guardrails import AgentGuardrails
from agentfsm.loop.presets import PRESETS
from agentfsm.models import resolve

__all__ = ["AgentOptions", "ReportOptions", "agent_options", "report_options"]

CommandFunction = Callable[..., Any]


def _collect_options(
    kind: type[Any], parameter: str, options: list[Callable[[CommandFunction], CommandFunction]]
) -> Callable[[CommandFunction], CommandFunction]:
    """Declare options on a command, which then gets all of them as one argument."""

    def decorate(command: CommandFunction) -> CommandFunction:
        @wraps(command)
        def gather(*args: Any, **given: Any) -> Any:
            given[parameter] = kind(**{each.name: given.pop(each.name) for each in fields(kind)})
            return command(*args, **given)

        marked: CommandFunction = gather
        for option in reversed(options):
            marked = option(marked)
        return marked

    return decorate


@dataclass(frozen=True, kw_only=True)
class AgentOptions:
    """The options that say what the agent is; ``agent_options`` declares them."""

    model: str
    base_url: str | None
    api_key_env: str | None
    tools: tuple[str, ...]
    instructions: str
    preset: str
    graph: str | None
    max_iterations: int | None
    max_time: float | None
    store: Path | None
    no_store: bool

    def build_agent(self, *, require_store: bool = False) -> Agent:
        """The agent.

        Args:
            require_store: Whether it takes up a run of its store, and so cannot do without.

        Raises:
            ConfigurationError: Something does not fit together.
            agentfsm.errors.StoreError: The store cannot be used.
        """
        preset = PRESETS[self.preset]
        limits = {"max_iterations": self.max_iterations, "max_execution_time_s": self.max_time}
        given = {name: value for name, value in limits.items() if value is not None}
        return Agent(
            resolve(self.model, base_url=self.base_url, api_key=_api_key(self.api_key_env)),
            tools=[each for path in self.tools for each in load_tools(path)],
            instructions=self.instructions,
            preset=preset,
            graph=load_graph(self.graph) if self.graph else None,
            guardrails=AgentGuardrails.model_validate({**preset.guardrails.model_dump(), **given}),
            host=build_host(self.store, persist=not self.no_store, required=require_store),
        )

    def to_args(self) -> list[str]:
        """The options as they are typed, for a command that goes on with the same agent."""
        words: list[str] = []
        for each in fields(self):
            value: object = getattr(self, each.name)
            if value in (None, "", "standard", False):
                continue
            if value is True:
                words.append(f"--{each.name.replace('_', '-')}")
                continue
            for one in self.tools if each.name == "tools" else (value,):
                words += [f"--{each.name.replace('_', '-')}", str(one)]
        return words


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigurationError(f"the variable {variable}, which should hold the key, is not set")
    return key


def agent_options(command: CommandFunction) -> CommandFunction:
    """Declare the options of ``AgentOptions`` on a command, which gets them as ``agent_is``."""
    path = click.Path(dir_okay=False)
    return _collect_options(
        AgentOptions,
        "agent_opts",
        [
            click.option(
                "-m",
                "--model",
                required=True,
                envvar="AGENTFSM_MODEL",
                show_envvar=True,
                metavar="NAME",
                help="The model: openai:gpt-5-mini, anthropic:claude-sonnet-4-6, ollama:llama3.2 ...",
            ),
            click.option("--base-url", metavar="URL", help="Another address than the provider's own."),
            click.option("--api-key-env", metavar="VAR", help="The variable that holds the key for --base-url."),
            click.option("-t", "--tools", multiple=True, type=path, help="A Python file with tools; may be repeated."),
            click.option("--instructions", default="", metavar="TEXT", help="What the model is told first."),
            click.option(
                "--preset",
                type=click.Choice(list(PRESETS)),
                default="standard",
                show_default=True,
                help="How the loop behaves.",
            ),
            click.option("--graph", metavar="MODULE:GRAPH", help="A table of your own in place of the preset's."),
            click.option(
                "--max-iterations", type=click.IntRange(min=1), metavar="N", help="At most so many model calls."
            ),
            click.option("--max-time", type=float, metavar="SECONDS", help="At most so much active time."),
            click.option(
                "--store",
                type=click.Path(dir_okay=False, path_type=Path),
                metavar="PATH",
                envvar="AGENTFSM_STORE",
                show_envvar=True,
                help="The file that keeps the run; agentfsm.db in your data folder unless given.",
            ),
            click.option("--no-store", is_flag=True, help="Keep nothing of the run."),
        ],
    )(command)


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """The options that say how a run is told; ``report_options`` declares them."""

    record: str | None
    diagram: str | None
    as_json: bool
    quiet: bool


def report_options(command: CommandFunction) -> CommandFunction:
    """Declare the options of ``ReportOptions`` on a command, which gets them as ``how``."""
    path = click.Path(dir_okay=False, writable=True)
    return _collect_options(
        ReportOptions,
        "report_opts",
        [
            click.option(
                "--record",
                type=path,
                help=f"Save a record there, should the run wait for somebody; {SECRET_VARIABLE} signs it.",
            ),
            click.option("--diagram", type=path, help="Draw the run's path there: .svg, .png, .dot, .mmd or .md."),
            click.option("--json", "as_json", is_flag=True, help="Print the outcome and every transition as JSON."),
            click.option("-q", "--quiet", is_flag=True, help="Print the answer and nothing else."),
        ],
    )(command)
