"""``agentfsm submit``: have a worker run an agent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import click

from agentfsm.cli.console import parse_json_object
from agentfsm.cli.local_store import await_result, chosen_tenant, secrets_to_write, store_option, tenant_option
from agentfsm.cli.options import collect_options, option
from agentfsm.journal.store_url import StoreLocation, open_store
from agentfsm.runs import Runs
from agentfsm.workers import open_waker


def _json_object(_context: click.Context, _parameter: click.Parameter, value: str | None) -> Mapping[str, Any]:
    try:
        return {} if value is None else parse_json_object(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@dataclass(frozen=True, kw_only=True)
class _RunOptions:
    """The options that say what is submitted, and when it is started."""

    session: str = option("--session", default="", metavar="ID", help="The conversation's id.")
    actor: str | None = option("--actor", metavar="NAME", help="Who requests it; recorded as claimed, not verified.")
    tags: tuple[str, ...] = option(
        "--tag",
        multiple=True,
        metavar="TAG",
        help="A tag; repeatable. tenant:NAME says whose run it is, for limits by tenant.",
    )
    metadata: Mapping[str, Any] = option(
        "--metadata", metavar="JSON", callback=_json_object, help="A JSON object, for the agent's own purposes."
    )
    key: str | None = option("--key", metavar="KEY", help="Submitting again with the same KEY returns the same run.")
    priority: int = option(
        "--priority",
        type=click.IntRange(-1000, 1000),
        default=0,
        show_default=True,
        help="Lower numbers are started first.",
    )
    delay: float = option(
        "--delay", type=click.FloatRange(min=0), default=0.0, metavar="SECONDS", help="Wait before it is started."
    )


_EXAMPLES = """\b
Examples:
  agentfsm submit support "Ship order 7." --store postgresql://db/shop --key order-7
  agentfsm submit support "Write the report." --tag tenant:acme --priority 10 --delay 3600
"""


@click.command(epilog=_EXAMPLES)
@click.argument("agent")
@click.argument("prompt")
@collect_options(_RunOptions, "run_opts")
@store_option
@tenant_option
def submit(agent: str, prompt: str, run_opts: _RunOptions, location: StoreLocation) -> None:
    """Submit a run of AGENT with PROMPT, and print its id.

    AGENT is the name under which workers serve it (agentfsm worker). The request is stored when this returns, and
    encrypted until a worker starts it; agentfsm runs lists the run.
    """
    tenant = chosen_tenant()

    async def submit_run() -> str:
        async with open_store(location.url) as store:
            found = await secrets_to_write(store, location)
            waker = open_waker(location.url)
            runs = Runs(store, secret=found[0], old_secrets=found[1:], waker=waker, tenant=tenant)
            try:
                return await runs.submit(
                    agent,
                    prompt,
                    session_id=run_opts.session,
                    actor=run_opts.actor,
                    tags=run_opts.tags,
                    metadata=run_opts.metadata,
                    idempotency_key=run_opts.key,
                    priority=run_opts.priority,
                    delay_s=run_opts.delay,
                )
            finally:
                await waker.aclose()

    click.echo(await_result(submit_run()))
