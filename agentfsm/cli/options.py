"""The command-line options that several commands share, and the agent and host built from them."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click
from pydantic import SecretStr

from agentfsm.cli.console import parse_json_object
from agentfsm.cli.local_store import (
    STORE_HELP,
    await_result,
    default_store,
    open_store_for_writing,
    parse_store,
    secrets_to_write,
    store_secrets,
)
from agentfsm.cli.user_code import load_graph, load_tools
from agentfsm.errors import ConfigurationError, StoreError, StoreFormatError
from agentfsm.journal.store_url import StoreLocation
from agentfsm.loop.guardrails import AgentGuardrails
from agentfsm.loop.keys import SECRET_VARIABLE
from agentfsm.loop.presets import PRESETS
from agentfsm.loop.withholding import is_secret_name
from agentfsm.models.settings import EFFORTS

if TYPE_CHECKING:
    from agentfsm.agent import Agent
    from agentfsm.loop.model import Model
    from agentfsm.runtime.host import Host

CommandFunction = Callable[..., Any]

USED_RECORDS_VARIABLE = "AGENTFSM_USED_RECORDS"


_DECLARE = "declare"
"""Where the metadata of a field have what declares its option, given the name of the field."""


def _declared(declare: Callable[[str], Callable[[CommandFunction], CommandFunction]]) -> Any:
    return field(metadata={_DECLARE: declare})


def option(*names: str, **settings: Any) -> Any:
    """A field of a dataclass whose value an option gives; the arguments are those of ``click.option``."""
    return _declared(partial(click.option, *names, **settings))


def argument(**settings: Any) -> Any:
    """A field whose value an argument of the command gives; the arguments are those of ``click.argument``."""
    return _declared(partial(click.argument, **settings))


def shared(decorator: Callable[[CommandFunction], CommandFunction]) -> Any:
    """A field whose value an option gives that commands also take by itself; it must have the name of the field."""
    return _declared(lambda name: decorator)


def collect_options(kind: type[Any], parameter: str) -> Callable[[CommandFunction], CommandFunction]:
    """Add options to a command, which gets their values as one object.

    Args:
        kind: The dataclass of the object. Its fields declare the options, in the order in which ``--help`` lists them.
        parameter: The command's parameter that gets the object.
    """

    def decorate(command: CommandFunction) -> CommandFunction:
        @wraps(command)
        def gather(*args: Any, **values: Any) -> Any:
            values[parameter] = kind(**{each.name: values.pop(each.name) for each in fields(kind)})
            return command(*args, **values)

        decorated: CommandFunction = gather
        for each in reversed(fields(kind)):
            decorated = each.metadata[_DECLARE](each.name)(decorated)
        return decorated

    return decorate


TIME = click.DateTime(["%Y-%m-%d", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M:%S%z"])


def to_timestamp(at: datetime | None) -> float | None:
    """A time of the command line in seconds since the epoch; it is in UTC unless it says otherwise."""
    return None if at is None else (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def _parse_limits(ctx: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> dict[str, Any]:
    limits: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if name.strip().isidentifier() and equals:
            limits[name.strip()] = None if value.strip() in ("none", "None", "null") else value.strip()
            continue
        try:
            limits.update(parse_json_object(text))
        except ValueError:
            raise click.BadParameter(
                f"{text!r} is neither NAME=VALUE, as in max_iterations=8, nor a JSON object, as in "
                "'{\"max_iterations\": 8}'"
            ) from None
    return limits


guardrails_option = click.option(
    "-g",
    "--guardrails",
    "limits",
    metavar="NAME=VALUE",
    multiple=True,
    callback=_parse_limits,
    help="Change a limit: max_iterations=5, or '{\"max_iterations\": 5}'; repeatable.",
)
"""Adds ``--guardrails`` to a command, which gets the changed limits by name as ``limits``."""


@dataclass(frozen=True, kw_only=True)
class AgentCliOptions:
    """The options that define the agent; ``agent_options`` declares them."""

    model: str = option(
        "-m",
        "--model",
        required=True,
        envvar="AGENTFSM_MODEL",
        show_envvar=True,
        metavar="NAME",
        help="The model: openai:gpt-5-mini, anthropic:claude-sonnet-4-6, ollama:llama3.2 ...",
    )
    base_url: str | None = option("--base-url", metavar="URL", help="An address to use instead of the provider's.")
    api_key_env: str | None = option(
        "--api-key-env", metavar="VAR", help="The variable that holds the API key for --base-url."
    )
    api_key_command: str | None = option(
        "--api-key-command",
        metavar="COMMAND",
        help="A command that prints the API key, and is run again when the key is rejected.",
    )
    header: tuple[str, ...] = option(
        "--header", multiple=True, metavar="'NAME: VALUE'", help="A header of every call; repeatable."
    )
    query: tuple[str, ...] = option(
        "--query", multiple=True, metavar="NAME=VALUE", help="A parameter of every URL; repeatable."
    )
    ca_bundle: Path | None = option(
        "--ca-bundle",
        type=click.Path(exists=True, path_type=Path),
        metavar="PATH",
        help="The certificates of the authorities to trust, in PEM format.",
    )
    proxy: str | None = option(
        "--proxy", metavar="URL", help="A proxy for every call; default: HTTPS_PROXY and the like."
    )
    timeout: float | None = option("--timeout", type=float, metavar="SECONDS", help="Maximum time of one reply.")
    temperature: float | None = option("--temperature", type=float, metavar="NUMBER", help="Randomness of the replies.")
    max_tokens: int | None = option(
        "--max-tokens", type=click.IntRange(min=1), metavar="N", help="Maximum length of one reply, in tokens."
    )
    effort: str | None = option("--effort", type=click.Choice(EFFORTS), help="How much a reasoning model may think.")
    no_stream: bool = option("--no-stream", is_flag=True, help="Ask for each reply whole, instead of streamed.")
    tools: tuple[str, ...] = option(
        "-t", "--tools", multiple=True, type=click.Path(dir_okay=False), help="A Python file with tools; repeatable."
    )
    instructions: str = option("--instructions", default="", metavar="TEXT", help="The system prompt.")
    preset: str = option(
        "--preset",
        type=click.Choice(list(PRESETS)),
        default="standard",
        show_default=True,
        help="The behavior of the loop.",
    )
    graph: str | None = option("--graph", metavar="MODULE:GRAPH", help="Your own graph, instead of the preset's.")
    max_iterations: int | None = option(
        "--max-iterations", type=click.IntRange(min=1), metavar="N", help="Maximum model calls."
    )
    max_time: float | None = option("--max-time", type=float, metavar="SECONDS", help="Maximum active time.")
    store: StoreLocation | None = option(
        "--store", type=parse_store, metavar="STORE", envvar="AGENTFSM_STORE", show_envvar=True, help=STORE_HELP
    )
    no_store: bool = option("--no-store", is_flag=True, help="Do not store the run.")

    def build_agent(self, *, require_store: bool = False) -> Agent:
        """The agent.

        Args:
            require_store: Fail if the store cannot be used, because the run to resume is in it.
        """
        from agentfsm.agent import Agent  # only here: agentfsm diagram uses this module without an agent

        preset = PRESETS[self.preset]
        limits = {
            "max_iterations": self.max_iterations,
            "max_execution_time_s": self.max_time,
            "llm_timeout_s": self.timeout,
        }
        overrides = {name: value for name, value in limits.items() if value is not None}
        return Agent(
            self._resolve_model(),
            tools=[each for path in self.tools for each in load_tools(path)],
            instructions=self.instructions,
            preset=preset,
            graph=load_graph(self.graph) if self.graph else None,
            guardrails=AgentGuardrails.model_validate({**preset.guardrails.model_dump(), **overrides}),
            host=_build_host(self.store, persist=not self.no_store, required=require_store),
        )

    def _resolve_model(self) -> Model:
        from agentfsm.models import HttpOptions, ModelSettings, Unstreamed, resolve

        settings = ModelSettings(
            temperature=self.temperature, max_tokens=self.max_tokens, reasoning_effort=cast("Any", self.effort)
        )
        http = HttpOptions(
            headers=dict(map(_parse_header, self.header)),
            query=dict(map(_parse_query, self.query)),
            verify=self.ca_bundle,
            proxy=None if self.proxy is None else SecretStr(self.proxy),
        )
        if self.api_key_command is not None and self.api_key_env is not None:
            raise ConfigurationError("--api-key-env and --api-key-command both say where the key is: give one of them")
        key = _api_key(self.api_key_env) if self.api_key_command is None else _key_command(self.api_key_command)
        model = resolve(self.model, base_url=self.base_url, api_key=key, settings=settings, http=http)
        return Unstreamed(model) if self.no_stream else model

    def to_args(self) -> list[str]:
        """The options as command-line arguments, for a command that continues with the same agent.

        What is or may be secret is left out: the values of headers, those of parameters that are named like keys, the
        proxy, and the user and password of the store's URL.
        """
        args: list[str] = []
        for each in fields(self):
            value: object = getattr(self, each.name)
            if value in (None, "", "standard", False):
                continue
            if value is True:
                args.append(f"--{each.name.replace('_', '-')}")
                continue
            shown = value
            if each.name == "header":
                shown = [f"{text.partition(':')[0]}: ..." for text in self.header]
            elif each.name == "query":
                named = [(text.partition("=")[0], text) for text in self.query]
                shown = [f"{name}=..." if is_secret_name(name) else text for name, text in named]
            elif each.name == "proxy":
                shown = "..."
            elif isinstance(value, StoreLocation):
                shown = value.name
            for one in cast("Sequence[str]", shown) if isinstance(shown, (tuple, list)) else (shown,):
                args += [f"--{each.name.replace('_', '-')}", str(one)]
        return args


def _parse_query(text: str) -> tuple[str, str | SecretStr]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigurationError(f"--query {text!r}: write NAME=VALUE, as in api-version=2024-10-21")
    return name, SecretStr(value) if is_secret_name(name) else value


def _key_command(command: str) -> Callable[[], str]:
    """A function that runs a command and returns what it prints."""

    def run() -> str:
        return subprocess.run(shlex.split(command), check=True, stdout=subprocess.PIPE, text=True, timeout=60).stdout  # noqa: S603  # the user's own command

    return run


def _parse_header(text: str) -> tuple[str, SecretStr]:
    name, colon, value = text.partition(":")
    if not colon or not value.strip():
        raise ConfigurationError(f"--header {name!r}: write 'NAME: VALUE', as in 'anthropic-beta: some-feature'")
    return name.strip(), SecretStr(value.strip())


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigurationError(f"the variable {variable}, which should hold the key, is not set")
    return key


def signing_secret() -> bytes | None:
    """The key that signs suspension records, from ``AGENTFSM_SECRET``; None if that is not set."""
    return os.environ.get(SECRET_VARIABLE, "").strip().encode() or None


def require_secret(feature: str) -> None:
    """Check that ``AGENTFSM_SECRET`` is set."""
    if signing_secret() is None:
        raise ConfigurationError(
            f"{feature} needs the variable {SECRET_VARIABLE}: a long random text that signs suspension records; use "
            "the same one for run and resume"
        )


def _build_host(location: StoreLocation | None, *, persist: bool, required: bool) -> Host:
    """The host of a run at the command line.

    If the default store cannot be written, the run goes without one, with a warning: one file has one writer,
    so a second command at the same time is normal, and the data folder may be read-only.

    Args:
        location: The store given by the user, or None for the default one.
        persist: Whether to store the run at all.
        required: Whether the store is required, because the run to resume is in it.
    """
    from agentfsm.runtime.host import FileReplayGuard, Host

    store, at = None, location or default_store()
    if persist:
        try:
            store = open_store_for_writing(at)
        except StoreFormatError:
            raise
        except (StoreError, OSError) as error:
            if required or location is not None:
                raise
            click.echo(f"agentfsm: this run is not stored: {error}", err=True)
    if store is None:
        found = list[bytes]()
    else:
        found = store_secrets(at) if required else await_result(secrets_to_write(store, at))
    secret = signing_secret()
    if secret is None:
        return Host(store=store, secret=found[0]) if found else Host(store=store)
    state_folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    used = os.environ.get(USED_RECORDS_VARIABLE) or state_folder / "agentfsm" / "used"
    return Host(store=store, secret=secret, old_secrets=found[1:], replay_guard=FileReplayGuard(used))


agent_options = collect_options(AgentCliOptions, "agent_opts")


_PATH = click.Path(dir_okay=False, writable=True)


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """The options that select how a run is reported; ``report_options`` declares them."""

    record: str | None = option(
        "--record", type=_PATH, help=f"Save a suspension record there if the run suspends; {SECRET_VARIABLE} signs it."
    )
    diagram: str | None = option(
        "--diagram", type=_PATH, help="Draw the run's path there: .svg, .png, .dot, .mmd or .md."
    )
    as_json: bool = option("--json", is_flag=True, help="Print the outcome and every transition as JSON.")
    quiet: bool = option("-q", "--quiet", is_flag=True, help="Print only the answer.")


report_options = collect_options(ReportOptions, "report_opts")
