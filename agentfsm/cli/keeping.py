"""Where ``run`` and ``resume`` keep runs: the store that is named, or the one in the user's data folder."""

from __future__ import annotations

import os
from pathlib import Path

import click

from agentfsm.cli.runs import default_store
from agentfsm.errors import StoreError, StoreFormatError
from agentfsm.journal.sqlite import SqliteStore
from agentfsm.runtime.host import Host, UsedInFolder

__all__ = ["SECRET", "host_for", "secret"]

SECRET = "AGENTFSM_SECRET"  # noqa: S105  # the variable's name, not what it holds


def secret() -> bytes | None:
    """What signs suspension records, or None where the environment names nothing."""
    return os.environ.get(SECRET, "").strip().encode() or None


def host_for(path: Path | None, *, keep: bool, must: bool = False) -> Host:
    """The host of a run at the command line.

    Where nobody named a store, one that cannot be written is done without, with a warning: two commands at a time
    are nothing unusual, and one file has one writer; a data folder may be there to read only.

    Args:
        path: The store that was named, or None for the default one.
        keep: Whether to keep the run at all.
        must: Whether it cannot do without the store, because the run is in it.

    Raises:
        agentfsm.errors.StoreFormatError: The file is none of ours.
        agentfsm.errors.StoreError: The store that was named, or that must be used, cannot be.
        OSError: Its folder cannot be made.
    """
    store = None
    if keep:
        try:
            store = _open(path or default_store())
        except StoreFormatError:
            raise
        except (StoreError, OSError) as error:
            if must or path is not None:
                raise
            click.echo(f"agentfsm: this run is kept nowhere: {error}", err=True)
    signer = secret()
    if signer is None:
        return Host(store=store)
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return Host(store=store, secret=signer, used=UsedInFolder(state / "agentfsm" / "used"))


def _open(path: Path) -> SqliteStore:
    """The store at a path, in a folder that is its owner's alone, since it holds conversations."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    store = SqliteStore(path)
    click.get_current_context().call_on_close(store.close)  # however the command ends
    store.claim()  # before anything is asked of a model
    return store
