"""The store file that the commands use: its default path, ``--store``, opening it, and completion of run ids."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from agentfsm.errors import AgentfsmError, ConfigurationError
from agentfsm.journal.sqlite import SqliteStore
from agentfsm.journal.store import Head
from agentfsm.journal.store_url import sqlite_path
from agentfsm.loop.keys import SECRET_VARIABLE, Keyring

__all__ = [
    "await_result",
    "checkpoint_log",
    "command_runner",
    "complete_run_id",
    "default_store_path",
    "key_file",
    "open_existing_store",
    "open_store_for_writing",
    "require_keyring",
    "store_file",
    "store_keyring",
    "store_option",
    "store_secrets",
    "write_private",
]


T = TypeVar("T")


def command_runner() -> asyncio.Runner:
    """The event loop of the command: whatever it does to a store happens in this one. It is closed with the command."""
    command = click.get_current_context().find_root()
    runner: asyncio.Runner | None = command.meta.get(__name__)
    if runner is None:
        runner = command.meta[__name__] = command.with_resource(asyncio.Runner())
    return runner


def await_result(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine, from the command's event loop."""
    return command_runner().run(work)


def default_store_path() -> Path:
    """``agentfsm.db`` in the user's data folder, unless ``AGENTFSM_STORE`` names another file.

    Raises:
        ConfigurationError: ``AGENTFSM_STORE`` is the URL of a store that is no file.
    """
    if override := os.environ.get("AGENTFSM_STORE"):
        return sqlite_path(override)
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Application Support"
    else:
        base = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return base / "agentfsm" / "agentfsm.db"


def store_file(value: str | Path) -> Path:
    """The file of a store that the command line names by its path or URL.

    Raises:
        click.BadParameter: It is the URL of a store that is no file, or a folder.
    """
    try:
        path = sqlite_path(value)
    except ConfigurationError as error:
        raise click.BadParameter(str(error)) from error
    if path.is_dir():
        raise click.BadParameter(f"{str(path)!r} is a folder")
    return path


def store_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--store STORE``, which the command gets as ``path``."""
    return click.option(
        "--store",
        "path",
        metavar="STORE",
        type=store_file,
        envvar="AGENTFSM_STORE",
        show_envvar=True,
        help="The store: a file, or a URL such as sqlite:///runs.db; default: agentfsm.db in your data folder.",
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


def key_file(path: Path) -> Path:
    """The file with the secret of a store, beside it: ``agentfsm.db.key`` for ``agentfsm.db``."""
    return path.with_name(f"{path.name}.key")


def checkpoint_log(path: Path) -> Path:
    """The file with the log of a store's checkpoints, beside it: ``agentfsm.db.log`` for ``agentfsm.db``."""
    return path.with_name(f"{path.name}.log")


def store_secrets(path: Path, *, create: bool = False) -> list[bytes]:
    """The secrets under which a store's journals are sealed, the current one first; empty if there is none.

    They are ``AGENTFSM_SECRET``, if it is set, and the one in the store's key file.

    Args:
        path: The store.
        create: Whether to create the key file if there is no secret yet. Only its owner can read it.

    Raises:
        ConfigurationError: The key file cannot be read or created, or is empty.
    """
    file = key_file(path)
    given = os.environ.get(SECRET_VARIABLE, "").strip().encode()
    found = [given] if given else []
    try:
        if create and not found and not file.exists():
            with contextlib.suppress(FileExistsError):  # another process was faster
                _create_key_file(file)
        if file.exists():
            found.append(file.read_bytes().strip())
    except OSError as error:
        raise ConfigurationError(f"{file}, the key file of the store, cannot be used: {error.strerror}") from error
    if not all(found):
        raise ConfigurationError(f"{file}, the key file of the store, is empty: restore it, or delete it for a new one")
    return found


def write_private(file: Path, content: bytes) -> None:
    """Write a file with content of runs; a new one can be read by its owner only, and so can a new folder."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(file, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as opened:  # Path.open has no opener
        opened.write(content)


def _create_key_file(file: Path) -> None:
    """Create a key file with a random secret, complete from the moment at which it has its name."""
    draft = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as created:
            created.write(f"{secrets.token_hex(32)}\n".encode())
            created.flush()
            os.fsync(created.fileno())
        os.link(draft, file)
    finally:
        draft.unlink()


def store_keyring(path: Path, *, create: bool = False) -> Keyring | None:
    """The keys of a store's secrets, or None if it has none; for the arguments and errors see ``store_secrets``."""
    found = store_secrets(path, create=create)
    return Keyring(found[0], found[1:]) if found else None


def require_keyring(path: Path, *, create: bool = False) -> Keyring:
    """The keys under which a command writes to a store.

    Args:
        path: The store.
        create: Whether to create the key file if there is no secret yet.

    Raises:
        ConfigurationError: The store has no secret, or its key file cannot be read or created, or is empty.
    """
    keyring = store_keyring(path, create=create)
    if keyring is None:
        raise ConfigurationError(
            f"there is no secret for {path}: set {SECRET_VARIABLE} to that of the process that wrote it, or take its "
            "runs over with agentfsm adopt"
        )
    return keyring


def _close_with_command(store: SqliteStore) -> SqliteStore:
    runner = command_runner()
    click.get_current_context().call_on_close(lambda: runner.run(store.aclose()))  # also when the command fails
    return store


def complete_run_id(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The runs of the store whose ids start with what was typed, with their status."""
    file: Path = ctx.params.get("path") or ctx.params.get("store") or default_store_path()
    try:
        heads = asyncio.run(_all_heads(file))
    except (AgentfsmError, OSError):  # completion has no place for an error; the command itself will report it
        return []
    return [CompletionItem(head.run_id, help=head.status) for head in heads if head.run_id.startswith(incomplete)]


async def _all_heads(path: Path) -> list[Head]:
    with SqliteStore(path) as store:
        return await store.heads()
