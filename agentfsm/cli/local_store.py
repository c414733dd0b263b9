"""The store that the commands read and write: its default path, ``--store``, and the host that ``run`` and ``resume`` use."""

from __future__ import annotations

import os
from pathlib import Path

import click

from agentfsm.cli.runs_command import default_store_path
from agentfsm.errors import StoreError, StoreFormatError
from agentfsm.journal.sqlite.sqlite_store import SqliteStore
from agentfsm.runtime.host import FileReplayGuard, Host

__all__ = ["SECRET_VARIABLE", "build_host", "signing_secret"]

SECRET_VARIABLE = "AGENTFSM_SECRET"  # noqa: S105  # the variable's name, not what it holds


def signing_secret() -> bytes | None:
    """What signs suspension records, or None where the environment names nothing."""
    return os.environ.get(SECRET_VARIABLE, "").strip().encode() or None


def build_host(path: Path | None, *, persist: bool, required: bool = False) -> Host:
    """The host of a run at the command line.

    Where nobody named a store, one that cannot be written is done without, with a warning: two commands at a time
    are nothing unusual, and one file has one writer; a data folder may be there to read only.

    Args:
        path: The store that was named, or None for the default one.
        persist: Whether to keep the run at all.
        required: Whether it cannot do without the store, because the run is in it.

    Raises:
        agentfsm.errors.StoreFormatError: The file is none of ours.
        agentfsm.errors.StoreError: The store that was named, or that must be used, cannot be.
        OSError: Its folder cannot be made.
    """
    store = None
    if persist:
        try:
            store = _open_for_writing(path or default_store_path())
        except StoreFormatError:
            raise
        except (StoreError, OSError) as error:
            if required or path is not None:
                raise
            click.echo(f"agentfsm: this run is kept nowhere: {error}", err=True)
    signer = signing_secret()
    if signer is None:
        return Host(store=store)
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return Host(store=store, secret=signer, replay_guard=FileReplayGuard(state / "agentfsm" / "used"))


def _open_for_writing(path: Path) -> SqliteStore:
    """The store at a path, in a folder that is its owner's alone, since it holds conversations."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    store = SqliteStore(path)
    click.get_current_context().call_on_close(store.close)  # however the command ends
    store.claim()  # before anything is asked of a model
    return store
