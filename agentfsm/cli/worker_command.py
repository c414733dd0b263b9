"""``agentfsm worker``: a process that starts submitted runs and continues those that were cut off or are due."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any

import click

from agentfsm.agent.agent import Agent
from agentfsm.cli.console import sanitize, single_line
from agentfsm.cli.local_store import (
    await_result,
    complete_run_id,
    open_existing_store,
    secrets_to_write,
    store_option,
)
from agentfsm.cli.options import collect_options, option
from agentfsm.cli.user_code import load_agent
from agentfsm.errors import ConfigurationError
from agentfsm.journal.store_url import StoreLocation, open_store
from agentfsm.workers import (
    SpendLimit,
    StartRate,
    Waker,
    Webhook,
    Worker,
    WorkerMetrics,
    WorkerSettings,
    find_waker,
    open_waker,
)
from agentfsm.workers.health import serve_health
from agentfsm.workers.worker import HAND_OVER_S

HANDED_OVER = 1
"""The exit code of a worker that left effects in the middle, for other workers to take their runs over."""

NOTIFY_SECRET = "AGENTFSM_NOTIFY_SECRET"  # noqa: S105  # the name of a variable
"""The environment variable with the secret that signs what is sent to a webhook."""


_POSITIVE = click.IntRange(min=1)


def _parse_limits(
    _context: click.Context, _parameter: click.Parameter, given: tuple[str, ...]
) -> tuple[SpendLimit, ...]:
    """The limits that ``TAG=USD`` means."""
    limits: list[SpendLimit] = []
    for each in given:
        tag, _, usd = each.rpartition("=")
        try:
            limits.append(SpendLimit(tag, float(usd)))
        except ValueError as error:  # ConfigurationError is one
            raise click.BadParameter(f"{each!r} is not of the form TAG=USD, as in tenant:acme=5") from error
    return tuple(limits)


def _parse_rate(_context: click.Context, _parameter: click.Parameter, given: str | None) -> StartRate | None:
    """The rate that ``RUNS/SECONDS`` means."""
    if given is None:
        return None
    runs, _, seconds = given.partition("/")
    try:
        return StartRate(int(runs), float(seconds))
    except ValueError as error:  # ConfigurationError is one
        raise click.BadParameter(f"{given!r} is not of the form RUNS/SECONDS, as in 100/60") from error


@dataclass(frozen=True, kw_only=True)
class _WorkerOptions:
    """The options of a worker that serves."""

    concurrency: int = option(
        "--concurrency",
        type=_POSITIVE,
        default=10,
        show_default=True,
        help="How many new runs of an agent, and how many that continue, are handled at a time.",
    )
    tenant_concurrency: int | None = option(
        "--tenant-concurrency",
        type=_POSITIVE,
        metavar="N",
        help="The same for runs with one tag tenant:NAME, in all workers together; default: no limit.",
    )
    grace: float = option(
        "--grace",
        type=click.FloatRange(min=0),
        default=30.0,
        show_default=True,
        metavar="SECONDS",
        help="How long calls that have begun may take after SIGTERM.",
    )
    max_attempts: int = option(
        "--max-attempts",
        type=_POSITIVE,
        default=5,
        show_default=True,
        help="How often a run is tried without progress before it is set aside.",
    )
    spend_limits: tuple[SpendLimit, ...] = option(
        "--spend-limit",
        multiple=True,
        metavar="TAG=USD",
        callback=_parse_limits,
        help="Start no run with TAG once runs with it have cost this much in 24 hours; repeatable. tenant:*=5 is a "
        "limit for each tenant.",
    )
    health_port: int | None = option(
        "--health-port",
        type=click.IntRange(0, 65535),
        metavar="PORT",
        help="Answer GET /health and GET /ready at this port.",
    )
    health_host: str = option(
        "--health-host",
        default="127.0.0.1",
        show_default=True,
        metavar="ADDRESS",
        help="The address of that port; 0.0.0.0 for probes from elsewhere.",
    )
    rate: StartRate | None = option(
        "--rate",
        metavar="RUNS/SECONDS",
        callback=_parse_rate,
        help="How many new runs of an agent are started within this time, by all workers together, such as 100/60.",
    )
    poll: float = option(
        "--poll",
        type=click.FloatRange(min=0, min_open=True),
        default=0.2,
        show_default=True,
        metavar="SECONDS",
        help="How often each queue is polled; busy workers share the polling. Idle workers cost less with a "
        "longer interval.",
    )
    notify_url: str | None = option(
        "--notify-url",
        metavar="URL",
        help=f"Send a notice of each request that waits for somebody to URL; {NOTIFY_SECRET} signs it.",
    )
    remind_after: float | None = option(
        "--remind-after",
        type=click.FloatRange(min=0, min_open=True),
        metavar="SECONDS",
        help="Remind people of a waiting request each time this long has passed, unless its Approval says otherwise.",
    )
    viewer_url: str = option(
        "--viewer-url", default="", metavar="URL", help="Where the viewer is, for a link in each notice."
    )

    def settings(self) -> WorkerSettings:
        """The settings of the worker."""
        secret = os.environ.get(NOTIFY_SECRET, "").encode() or None
        return WorkerSettings(
            grace_s=self.grace,
            max_attempts=self.max_attempts,
            spend_limits=self.spend_limits,
            notify=None if self.notify_url is None else Webhook(self.notify_url, secret=secret),
            remind_after_s=self.remind_after,
            viewer_url=self.viewer_url,
        )


_EXAMPLES = """\b
Examples:
  agentfsm worker shop:support --store postgresql://db/shop
  agentfsm worker shop:support billing=shop.money:agent --concurrency 50
  agentfsm worker --set-aside                   list the runs that are set aside
  agentfsm worker --put-back 3f9c0a1b2c3d4e5f   try one of them again
"""


@click.command(epilog=_EXAMPLES)
@click.argument("agents", nargs=-1, metavar="[[NAME=]MODULE:AGENT]...")
@collect_options(_WorkerOptions, "worker_opts")
@click.option("--set-aside", is_flag=True, help="List the runs that are set aside, and exit.")
@click.option(
    "--put-back",
    metavar="RUN",
    shell_complete=complete_run_id,
    help="Have a run that is set aside tried once more, and exit; the beginning of its id is enough.",
)
@store_option
def worker(
    agents: tuple[str, ...], worker_opts: _WorkerOptions, set_aside: bool, put_back: str | None, location: StoreLocation
) -> None:
    """Serve agents from a store: start what is submitted, and continue what was cut off.

    Any number of workers may serve one PostgreSQL store; a SQLite file has one. An agent is served under the name of
    its variable, or under NAME. A worker continues only runs whose graph it accepts and whose tools it has, so old
    and new versions can work side by side.

    After SIGTERM or Ctrl-C the worker starts nothing new, finishes the calls that have begun, and hands over the rest.
    After a second signal, or when the grace period is over, it stops at once, and other workers take over what is left.

    Exit codes: 0 all runs were handed over; 1 calls were cut off, or the server did not answer; 2 wrong usage.
    """
    if bool(agents) + set_aside + (put_back is not None) != 1:
        raise click.UsageError(
            "give agents to serve, as in agentfsm worker shop:support, or --set-aside, or --put-back"
        )
    if not agents:
        open_existing_store(location)  # says if there is none
        await_result(_list_set_aside(location) if put_back is None else _put_back(location, put_back))
        return
    served = load_agents(agents)
    handler = logging.StreamHandler()
    handler.setFormatter(_PrintableLog("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("dbos").setLevel(logging.CRITICAL)  # what matters is logged by the worker
    logging.getLogger("psycopg.pool").setLevel(logging.ERROR)  # so is that the server is away, and why: once
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs whole URLs, and that of a webhook may have a key
    await_result(_serve(served, location, worker_opts))


class _PrintableLog(logging.Formatter):
    """Formats records, with nothing in them that a terminal acts on."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # the name is that of the library
        return single_line(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return sanitize(super().formatException(ei))


def load_agents(names: tuple[str, ...]) -> dict[str, Agent[Any, Any]]:
    """The agents that a command line names.

    Args:
        names: Each is ``MODULE:AGENT``, with ``NAME=`` before it if it is served under another name.
    """
    found: dict[str, Agent[Any, Any]] = {}
    for each in names:
        given, equals, source = each.rpartition("=")
        name = given if equals else source.rpartition(":")[2].rpartition(".")[2]
        agent = load_agent(source)
        if name in found:
            raise ConfigurationError(f"two agents are named {name!r}: give one another name, as in NAME={source}")
        found[name] = agent
    return found


async def _serve(agents: Mapping[str, Agent[Any, Any]], location: StoreLocation, options: _WorkerOptions) -> None:
    async with open_store(location.url) as store:
        found = await secrets_to_write(store, location)
        waker = open_waker(
            location.url,
            concurrency=options.concurrency,
            tenant_concurrency=options.tenant_concurrency,
            rate=options.rate,
            poll_s=options.poll,
        )
        working = Worker(
            agents,
            store,
            waker,
            secret=found[0],
            old_secrets=tuple(found[1:]),
            settings=options.settings(),
            metrics=WorkerMetrics(),
        )
        async with contextlib.AsyncExitStack() as around:
            around.enter_context(_stop_on_signals(working, options.grace))
            if options.health_port is not None:
                host, wanted = options.health_host, options.health_port
                try:
                    port = await around.enter_async_context(serve_health(working, host, wanted))
                except OSError as error:
                    raise ConfigurationError(f"--health-port {wanted} of {host} cannot be used: {error}") from error
                logging.getLogger("agentfsm.workers").info("health at http://%s:%d/health", host, port)
            if not await working.run():
                sys.stderr.flush()
                os._exit(HANDED_OVER)  # what still runs must not write any more, and its threads cannot be ended
        await waker.aclose()


@contextlib.contextmanager
def _stop_on_signals(working: Worker, grace_s: float) -> Any:
    """Stop the worker at the first SIGTERM or SIGINT, and end the process at the second.

    It ends, too, if the worker is still there when it should have stopped: it starts, or closes its connections, on a
    server that does not answer.
    """
    loop, asked = asyncio.get_running_loop(), False

    def stop() -> None:
        nonlocal asked
        if asked:
            os._exit(HANDED_OVER)
        asked = True
        working.stop()
        loop.call_later(grace_s + 2 * HAND_OVER_S, os._exit, HANDED_OVER)

    for each in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(each, stop)
    try:
        yield
    finally:
        for each in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(each)


async def _list_set_aside(location: StoreLocation) -> None:
    async with _queues(location) as waker:
        for each in await waker.list_set_aside() if waker is not None else ():
            click.echo(f"{each.activation.run_id}  {single_line(each.reason)}")


async def _put_back(location: StoreLocation, run_id: str) -> None:
    async with _queues(location) as waker:
        aside = {each.activation.run_id for each in await waker.list_set_aside()} if waker is not None else set[str]()
        found = aside & {run_id} or {each for each in aside if each.startswith(run_id)}
        if len(found) > 1:
            raise click.UsageError(f"several runs that are set aside begin with {run_id!r}: {', '.join(sorted(found))}")
        if waker is None or not found or not await waker.put_back(found.pop()):
            raise click.UsageError(f"no run that is set aside begins with {run_id!r}; --set-aside lists them")


@contextlib.asynccontextmanager
async def _queues(location: StoreLocation) -> AsyncGenerator[Waker | None]:
    """The engine of a store, without making any queues; None beside a file that has none."""
    waker = await find_waker(location.url)
    try:
        yield waker
    finally:
        if waker is not None:
            await waker.aclose()
