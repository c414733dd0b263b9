"""``agentfsm link``: a link that lets one person see and answer one run, once."""

from __future__ import annotations

import click

from agentfsm.cli.local_store import (
    await_result,
    complete_run_id,
    open_existing_store,
    require_keyring,
    store_option,
    store_secrets,
    tenant_option,
)
from agentfsm.cli.view_command import DEFAULT_PORT, LOOPBACK
from agentfsm.journal.store_url import StoreLocation
from agentfsm.loop.quorum import Actor
from agentfsm.runs import Runs

__all__ = ["link"]

HOUR_S = 3600

_EXAMPLES = """\b
Examples:
  agentfsm link 3f9c0a1b2c3d4e5f --as ann
  agentfsm link 3f9c0a1b2c3d4e5f --as bob --hours 2 --url https://agents.example.org/
"""


@click.command(epilog=_EXAMPLES)
@click.argument("run_id", metavar="RUN", shell_complete=complete_run_id)
@click.option("--as", "name", metavar="NAME", required=True, help="Who gets the link; the answers are theirs.")
@click.option("--role", "roles", multiple=True, metavar="ROLE", help="A role of that person; repeatable.")
@click.option("--url", default=f"http://{LOOPBACK}:{DEFAULT_PORT}/", show_default=True, help="Where the viewer is.")
@click.option("--hours", default=24.0, show_default=True, help="How long it can be opened.")
@store_option
@tenant_option
def link(run_id: str, name: str, roles: tuple[str, ...], url: str, hours: float, location: StoreLocation) -> None:
    """Print a link with which NAME may see and answer RUN in the viewer, for a mail or a message.

    It works once, in the browser that opens it first, and shows no other run. Send it to nobody else: the answers are
    recorded as NAME's, verified. The viewer at --url must have the secret of the store.
    """
    from agentfsm.viewer import one_time_link

    store = open_existing_store(location)
    require_keyring(location)
    found = await_result(Runs(store).find_id(run_id))
    secret = store_secrets(location)[0]
    click.echo(one_time_link(url, found, Actor(name, roles), secret=secret, validity_s=hours * HOUR_S))
