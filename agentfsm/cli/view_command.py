"""``agentfsm view`` and ``link``: the viewer of a store, served to this machine, and a link into it for one person."""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
import webbrowser
from typing import TYPE_CHECKING

import click

from agentfsm.cli.local_store import (
    await_result,
    checkpoint_log,
    complete_run_id,
    open_existing_store,
    open_runs,
    require_keyring,
    store_option,
    store_secrets,
    tenant_option,
    used_links_folder,
)
from agentfsm.cli.user_code import load_graph
from agentfsm.cli.verify_command import CheckpointOptions, checkpoint_options, signed_heads
from agentfsm.errors import JournalError, MissingExtraError
from agentfsm.journal.checkpoint import SignedHeads
from agentfsm.journal.listing import find_run_id
from agentfsm.journal.store_url import StoreLocation
from agentfsm.loop.keys import Keyring
from agentfsm.loop.quorum import Actor
from agentfsm.runtime.host import FileReplayGuard

if TYPE_CHECKING:
    from uvicorn import Server

    from agentfsm.viewer.viewer_context import ViewerContext

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 8642

SIGN_IN_S = 15 * 60
"""How long the link can be opened that --as prints."""

STOP_S = 3
"""How long a request has to end when the viewer stops."""

HOUR_S = 3600

_VIEW_EXAMPLES = """\b
Examples:
  agentfsm view                                    the runs of your store
  agentfsm view --store runs.db --open
  agentfsm view --as ann --role manager            answer what waits for you
  agentfsm view --store postgresql://localhost/agents --port 9000
  agentfsm view --checkpoint note --key public.pem --graph my_graphs.py:MINE
"""


@click.command(epilog=_VIEW_EXAMPLES)
@store_option
@tenant_option
@click.option("--as", "name", default="", metavar="NAME", help="Who you are; with it, you can answer as well.")
@click.option("--role", "roles", multiple=True, metavar="ROLE", help="A role of yours; repeatable.")
@click.option("--port", default=DEFAULT_PORT, show_default=True, help="The port; 0 for one that is free.")
@click.option("--open", "open_browser", is_flag=True, help="Open it in your browser.")
@click.option(
    "--graph",
    "graphs",
    multiple=True,
    metavar="MODULE:GRAPH",
    help="Your own graph, under which runs can be replayed; repeatable.",
)
@checkpoint_options
def view(
    location: StoreLocation,
    name: str,
    roles: tuple[str, ...],
    port: int,
    open_browser: bool,
    graphs: tuple[str, ...],
    witness: CheckpointOptions,
) -> None:
    """Show the runs of a store in a browser, live: the table with each run's path, and every move with its reasons.

    It reads the store, even while other processes write to it, and serves only this machine. Nobody can change anything
    unless --as says who you are: then it prints a link that works once, and what you answer is recorded as claimed, not
    verified. Stop it with Ctrl-C.
    """
    try:
        import uvicorn

        import agentfsm.viewer
    except ModuleNotFoundError as error:
        raise MissingExtraError("agentfsm view", "view") from error

    if roles and not name:
        raise click.UsageError("--role is the role of the person that --as names: give both")
    store, known = open_existing_store(location), store_secrets(location)
    if name:
        require_keyring(location)
    used = FileReplayGuard(used_links_folder(location)) if known else None
    secret = known[0] if known else None
    app = agentfsm.viewer.app(
        store,
        secret=secret,
        old_secrets=known[1:],
        replay_guard=used,
        checkpoint=_signed_heads(witness, location),
        graphs=[load_graph(each) for each in graphs],
    )
    with _listen(port) as listening:
        address = f"http://{LOOPBACK}:{listening.getsockname()[1]}/"
        if name:
            address = _sign_in_link(address, Actor(name, roles), Keyring(known[0]))
        click.echo(f"the runs are at {address} (Ctrl-C stops it)", err=True)
        if open_browser:
            webbrowser.open(address)
        config = uvicorn.Config(
            app, log_level="warning", lifespan="off", server_header=False, ws="none", timeout_graceful_shutdown=STOP_S
        )
        server = uvicorn.Server(config)
        await_result(_serve(server, listening, app.state.viewer))


def _signed_heads(witness: CheckpointOptions, location: StoreLocation) -> SignedHeads | None:
    """What a checkpoint signed, if one is given."""
    signed, changed = signed_heads(witness.read(), witness.log_file or checkpoint_log(location))
    if changed:
        raise JournalError(changed)
    return signed


def _sign_in_link(address: str, actor: Actor, keyring: Keyring) -> str:
    """A link that signs somebody in, whom nobody but themselves vouches for, once."""
    from agentfsm.viewer.passes import Pass, seal_pass, viewer_at

    granted = Pass(actor, "", time.time() + SIGN_IN_S, secrets.token_hex(16), viewer_at(address))
    return f"{address}link#{seal_pass('link', granted, keyring)}"


def _listen(port: int) -> socket.socket:
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((LOOPBACK, port))
        listening.listen()  # before the address is printed: a request that comes before the server is ready waits
    except OSError as error:
        listening.close()
        raise click.UsageError(f"port {port} cannot be used ({error.strerror}); give another with --port") from error
    return listening


async def _serve(server: Server, listening: socket.socket, context: ViewerContext) -> None:
    """Serve until a signal; the connections of pages that follow something are then told to end."""
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    while not (server.should_exit or serving.done()):  # noqa: ASYNC110  # nobody is told when it stops
        await asyncio.sleep(0.1)
    context.stopping.set()
    await serving


_LINK_EXAMPLES = """\b
Examples:
  agentfsm link 3f9c0a1b2c3d4e5f --as ann
  agentfsm link 3f9c0a1b2c3d4e5f --as bob --hours 2 --url https://agents.example.org/
"""


@click.command(epilog=_LINK_EXAMPLES)
@click.argument("run_id", metavar="RUN", shell_complete=complete_run_id)
@click.option("--as", "name", metavar="NAME", required=True, help="Who gets the link; the answers are theirs.")
@click.option("--role", "roles", multiple=True, metavar="ROLE", help="A role of that person; repeatable.")
@click.option("--url", default=f"http://{LOOPBACK}:{DEFAULT_PORT}/", show_default=True, help="Where the viewer is.")
@click.option("--hours", default=24.0, show_default=True, help="How long it can be opened.")
@store_option
@tenant_option
def link(run_id: str, name: str, roles: tuple[str, ...], url: str, hours: float, location: StoreLocation) -> None:
    """Print a link with which NAME may see and answer RUN in the viewer, to send in an email or a message.

    It works once, in the browser that opens it first, and shows no other run. Send it to nobody else: the answers are
    recorded as NAME's, verified. The viewer at --url must have the secret of the store.
    """
    from agentfsm.viewer import one_time_link

    store, _ = open_runs(location)
    found = await_result(find_run_id(store, run_id))
    secret = store_secrets(location)[0]
    click.echo(one_time_link(url, found, Actor(name, roles), secret=secret, validity_s=hours * HOUR_S))
