"""The store file that the commands use: its default path, ``--store``, opening it, and completion of run ids."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from agentfsm.errors import AgentfsmError
from agentfsm.journal.sqlite import SqliteStore

__all__ = ["complete_run_id", "default_store_path", "open_existing_store", "open_store_for_writing", "store_option"]


def default_store_path() -> Path:
    """``agentfsm.db`` in the user's data folder, unless ``AGENTFSM_STORE`` names another file."""
    if override := os.environ.get("AGENTFSM_STORE"):
        return Path(override)
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Application Support"
    else:
        base = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return base / "agentfsm" / "agentfsm.db"


def store_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--store PATH``, which the command gets as ``path``."""
    return click.option(
        "--store",
        "path",
        metavar="PATH",
        type=click.Path(dir_okay=False, path_type=Path),
        envvar="AGENTFSM_STORE",
        show_envvar=True,
        help="The store file; default: agentfsm.db in your data folder.",
    )(command)


def open_existing_store(path: Path | None) -> SqliteStore:
    """The store at a path, or the default one; it is closed when the command ends.

    Raises:
        click.UsageError: There is no such file.
        agentfsm.errors.StoreError: The file cannot be opened as a store.
    """
    file = path or default_store_path()
    if not file.exists():
        raise click.UsageError(f"there is no store at {file}")
    return _close_with_command(SqliteStore(file))


def open_store_for_writing(path: Path) -> SqliteStore:
    """The store at a path, created if it is missing and claimed by this process; it is closed when the command ends.

    A new folder is readable by its owner only, because a store holds conversations.

    Raises:
        agentfsm.errors.StoreError: The file cannot be opened as a store, or another process writes to it.
        OSError: Its folder cannot be created.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    store = _close_with_command(SqliteStore(path))
    store.claim()  # fail before the first model call
    return store


def _close_with_command(store: SqliteStore) -> SqliteStore:
    click.get_current_context().call_on_close(store.close)  # also when the command fails
    return store


def complete_run_id(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The runs of the store whose ids start with what was typed, with their status."""
    file: Path = ctx.params.get("path") or ctx.params.get("store") or default_store_path()
    try:
        with contextlib.closing(SqliteStore(file)) as store:
            heads = store.heads()
    except (AgentfsmError, OSError):  # completion has no place for an error; the command itself will report it
        return []
    return [CompletionItem(head.run_id, help=head.status) for head in heads if head.run_id.startswith(incomplete)]
