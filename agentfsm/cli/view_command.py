"""``agentfsm view``: the viewer of a store, served to this machine."""

from __future__ import annotations

import asyncio
import socket
import webbrowser
from typing import TYPE_CHECKING

import click

from agentfsm.cli.local_store import await_result, open_existing_store, store_option, store_secrets
from agentfsm.errors import MissingExtraError
from agentfsm.journal.store_url import StoreLocation

if TYPE_CHECKING:
    from uvicorn import Server

    from agentfsm.viewer.viewer_context import ViewerContext

__all__ = ["view"]

LOOPBACK = "127.0.0.1"

STOP_S = 1
"""How long a request has to end when the viewer stops."""

_EXAMPLES = """\b
Examples:
  agentfsm view                                    the runs of your store
  agentfsm view --store runs.db --open
  agentfsm view --store postgresql://localhost/agents --port 9000
"""


@click.command(epilog=_EXAMPLES)
@store_option
@click.option("--port", default=8642, show_default=True, help="The port; 0 for one that is free.")
@click.option("--open", "open_browser", is_flag=True, help="Open it in your browser.")
def view(location: StoreLocation, port: int, open_browser: bool) -> None:
    """Show the runs of a store in a browser, live: the table with each run's path, and every move with its reasons.

    It reads the store, also while other processes write it, and serves this machine only. Nobody can change anything.
    Stop it with Ctrl-C.
    """
    try:
        import uvicorn

        import agentfsm.viewer
    except ModuleNotFoundError as error:
        raise MissingExtraError("agentfsm view", "view") from error

    store, known = open_existing_store(location), store_secrets(location)
    app = agentfsm.viewer.app(store, secret=known[0] if known else None, old_secrets=known[1:])
    with _listen(port) as listening:
        address = f"http://{LOOPBACK}:{listening.getsockname()[1]}/"
        click.echo(f"the runs are at {address} (Ctrl-C stops it)", err=True)
        if open_browser:
            webbrowser.open(address)
        config = uvicorn.Config(
            app, log_level="warning", lifespan="off", server_header=False, ws="none", timeout_graceful_shutdown=STOP_S
        )
        server = uvicorn.Server(config)
        await_result(_serve(server, listening, app.state.viewer))


def _listen(port: int) -> socket.socket:
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((LOOPBACK, port))
    except OSError as error:
        listening.close()
        raise click.UsageError(f"port {port} cannot be used ({error.strerror}); give another with --port") from error
    return listening


async def _serve(server: Server, listening: socket.socket, context: ViewerContext) -> None:
    """Serve until a signal; the connections of pages that follow something are then told to end."""
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    while not (server.should_exit or serving.done()):  # noqa: ASYNC110  # nobody is told when it stops
        await asyncio.sleep(STOP_S / 10)
    context.stopping.set()
    await serving
