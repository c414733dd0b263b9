"""The store that the commands use: ``--store``, its default, opening it, its secret, and completion of run ids.

Beside a SQLite file lie its secret and the log of its checkpoints. A store on a server has these two in the user's data
folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import stat
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from agentfsm.errors import AgentfsmError, ConfigurationError
from agentfsm.journal.run_info import RunQuery
from agentfsm.journal.store import Store
from agentfsm.journal.store_url import StoreLocation, locate_store, open_store
from agentfsm.journal.tenant_store import TenantStore, tenant_tag
from agentfsm.loop.keys import OLD_SECRETS_VARIABLE, SECRET_VARIABLE, Keyring

if TYPE_CHECKING:
    from agentfsm.runs import Runs

STORE_HELP = (
    "The store: a file, or a URL such as sqlite:///runs.db or postgresql://HOST/DATABASE; default: agentfsm.db in your "
    "data folder."
)
COMPLETED_RUNS = 200
"""How many runs completion offers at most, the newest."""

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


def data_folder() -> Path:
    """The folder of agentfsm in the user's data folder."""
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Application Support"
    else:
        base = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return base / "agentfsm"


_TENANT = f"{__name__}.tenant"
"""Where the context of a command has the tenant that the command line names."""


def default_store() -> StoreLocation:
    """``agentfsm.db`` in the user's data folder, unless ``AGENTFSM_STORE`` names another store."""
    return locate_store(os.environ.get("AGENTFSM_STORE") or data_folder() / "agentfsm.db")


def parse_store(value: str | StoreLocation) -> StoreLocation:
    """The store that the command line names by its path or URL."""
    if isinstance(value, StoreLocation):
        return value
    try:
        location = locate_store(value)
    except ConfigurationError as error:
        raise click.BadParameter(str(error)) from error
    if location.file is not None and location.file.is_dir():
        raise click.BadParameter(f"{str(location.file)!r} is a folder")
    return location


store_option = click.option(
    "--store",
    "location",
    metavar="STORE",
    type=parse_store,
    default=default_store,
    envvar="AGENTFSM_STORE",
    show_envvar=True,
    help=STORE_HELP,
)
"""Adds ``--store STORE`` to a command, which gets it as ``location``."""


def tenant_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--tenant NAME``: the command then opens a store in which only that tenant's runs exist."""

    def note(ctx: click.Context, _: click.Parameter, name: str | None) -> None:
        if name is not None:
            tenant_tag(name)  # refuses what is not a name
            ctx.meta[_TENANT] = name

    return click.option(
        "--tenant",
        metavar="NAME",
        expose_value=False,
        callback=note,
        help="The tenant: only its runs, which have the tag tenant:NAME, exist for the command. What is submitted gets "
        "the tag.",
    )(command)


def chosen_tenant() -> str | None:
    """The tenant that the command line names, if it does."""
    name: str | None = click.get_current_context().meta.get(_TENANT)
    return name


def open_existing_store(location: StoreLocation) -> Store:
    """The store at a location, with the runs of the tenant that the command line names, if it does.

    It is closed when the command ends. A server is connected to by its first use.
    """
    if location.file is not None and not location.file.exists():
        raise click.UsageError(f"there is no store at {location.name}")
    return _close_with_command(_of_tenant(open_store(location.url), chosen_tenant()))


def _of_tenant(store: Store, tenant: str | None) -> Store:
    return store if tenant is None else TenantStore(store, [tenant])


def open_runs(location: StoreLocation, *, sealed: bool = True) -> tuple[Store, Runs]:
    """The store at a location, as ``open_existing_store`` opens it, and its runs."""
    from agentfsm.runs import Runs  # loads pictures and reports: not for what only prints its help

    store = open_existing_store(location)
    if sealed:
        require_keyring(location)
    found = store_secrets(location)
    return store, Runs(store, secret=found[0] if found else None, old_secrets=found[1:])


def full_run_ids(store: Store, run_ids: Sequence[str]) -> list[str]:
    """The ids of the runs that have these ids, or whose ids begin with them; those of purged runs as they are."""
    from agentfsm.journal.listing import find_run_id  # with what verifies runs: not for what only prints its help

    async def find() -> list[str]:
        purged = store.maintenance.tombstones
        return [each if await purged(each) else await find_run_id(store, each) for each in run_ids]

    return await_result(find())


def write_for_a_moment(store: Store, work: Callable[[Store], Coroutine[Any, Any, T]]) -> T:
    """What an operation on a store returns, even while another process writes the store."""

    async def operate() -> T:
        async with store.maintenance.writable(store) as writable:
            return await work(writable)

    return await_result(operate())


def open_store_for_writing(location: StoreLocation, *, migrate: bool = False) -> Store:
    """The store at a location, created if it is missing and ready to be written; it is closed when the command ends.

    A new folder is readable by its owner only, because a store holds conversations.

    Args:
        location: The location.
        migrate: Whether the tables of a server are brought up to date.

    Raises:
        ConfigurationError: The URL cannot be read.
        agentfsm.errors.MissingExtraError: The package for the server is not installed.
        agentfsm.errors.StoreError: It cannot be opened as a store or reached, or another process writes to the file.
        OSError: The folder of its file cannot be created.
    """
    if location.file is not None:
        location.file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    store = _close_with_command(_of_tenant(open_store(location.url), chosen_tenant()))
    await_result(store.maintenance.prepare(migrate=migrate))  # fail before the first model call
    return store


def key_file(location: StoreLocation) -> Path:
    """The file with the secret of a store: ``agentfsm.db.key`` beside ``agentfsm.db``."""
    return _own_file(location, ".key")


def checkpoint_log(location: StoreLocation) -> Path:
    """The file with the log of a store's checkpoints: ``agentfsm.db.log`` beside ``agentfsm.db``."""
    return _own_file(location, ".log")


def used_links_folder(location: StoreLocation) -> Path:
    """The folder that remembers which one-time links were opened: ``agentfsm.db.links`` beside ``agentfsm.db``."""
    return _own_file(location, ".links")


def _own_file(location: StoreLocation, suffix: str) -> Path:
    if location.file is None:
        return data_folder() / f"{location.slug}{suffix}"
    return location.file.with_name(f"{location.file.name}{suffix}")


def store_secrets(location: StoreLocation, *, create: bool = False) -> list[bytes]:
    """The secrets under which a store's journals are sealed, the current one first; empty if there is none.

    They are ``AGENTFSM_SECRET`` and those in ``AGENTFSM_OLD_SECRETS``, with spaces between them; else the one in the
    store's key file. Beside a secret of its own, the file would let whoever can write to its folder add another one.
    For a store on a server, processes on other machines do not have that file: set the variable there.

    Args:
        location: The store.
        create: Whether to create the key file if there is no secret yet. Only its owner can read it.
    """
    given = os.environ.get(SECRET_VARIABLE, "").strip().encode()
    if given:
        return [given, *os.environ.get(OLD_SECRETS_VARIABLE, "").encode().split()]
    file = key_file(location)
    try:
        if create and not file.exists():
            with contextlib.suppress(FileExistsError):  # another process was faster
                _create_key_file(file)
        if not file.exists():
            return []
        _check_key_file(file)
        secret = file.read_bytes().strip()
    except OSError as error:
        raise ConfigurationError(f"{file}, the key file of the store, cannot be used: {error.strerror}") from error
    if not secret:
        raise ConfigurationError(f"{file}, the key file of the store, is empty: restore it, or delete it for a new one")
    return [secret]


async def secrets_to_write(store: Store, location: StoreLocation) -> list[bytes]:
    """The secrets for new runs in a store, as ``store_secrets`` finds them; a new one if there is none yet.

    Raises:
        ConfigurationError: There is none for a store on a server that has runs, whose secret is elsewhere: a new one
            would not fit. Or the key file cannot be used.
        agentfsm.errors.StoreError: The store cannot be read.
    """
    if location.file is None and not store_secrets(location) and await store.count_runs(RunQuery()):
        raise ConfigurationError(
            f"{location.name} has runs, and there is no secret here: set {SECRET_VARIABLE} to that of the processes "
            f"that write it, or copy their key file to {key_file(location)}"
        )
    return store_secrets(location, create=True)


def _check_key_file(file: Path) -> None:
    """Refuse a key file that somebody else may have written or read, or that is a link to such a file."""
    if os.name != "posix":
        return
    status = file.stat()
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigurationError(
            f"{file}, the key file of the store, is not yours alone to read and write: whoever knows what is in it can "
            f"forge runs. If it is the right one, and nobody else has read it, chmod 600 {file}"
        )


def open_private(path: str, flags: int) -> int:
    """The ``opener`` of a file that, if it is new, its owner alone can read."""
    return os.open(path, flags, 0o600)


def write_private(file: Path, content: bytes) -> None:
    """Write a file with content of runs; a new one can be read by its owner only, and so can a new folder."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(file, "wb", opener=open_private) as opened:  # Path.open has no opener
        opened.write(content)


def _create_key_file(file: Path) -> None:
    """Create a key file with a random secret, complete from the moment at which it has its name."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    try:
        with open(draft, "xb", opener=open_private) as created:
            created.write(f"{secrets.token_hex(32)}\n".encode())
            created.flush()
            os.fsync(created.fileno())
        os.link(draft, file)
    finally:
        draft.unlink(missing_ok=True)


def store_keyring(location: StoreLocation, *, create: bool = False) -> Keyring | None:
    """The keys of a store's secrets, or None if it has none; for the arguments and errors see ``store_secrets``."""
    found = store_secrets(location, create=create)
    return Keyring(found[0], found[1:]) if found else None


def require_keyring(location: StoreLocation, *, create: bool = False) -> Keyring:
    """The keys under which a command writes to a store."""
    keyring = store_keyring(location, create=create)
    if keyring is None:
        raise ConfigurationError(
            f"there is no secret for {location.name}: set {SECRET_VARIABLE} to that of the process that wrote it, or "
            "take its runs over with agentfsm adopt"
        )
    return keyring


def _close_with_command(store: Store) -> Store:
    runner = command_runner()
    click.get_current_context().call_on_close(lambda: runner.run(store.aclose()))  # even when the command fails
    return store


def complete_run_id(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The newest runs of the store whose ids start with what was typed, with their status, the oldest first."""
    given: StoreLocation | None = ctx.params.get("location") or ctx.params.get("store")
    try:
        found = asyncio.run(_runs_with(given or default_store(), incomplete, ctx.meta.get(_TENANT)))
    except (AgentfsmError, OSError):  # completion has no place for an error; the command itself will report it
        return []
    return [CompletionItem(run_id, help=status) for run_id, status in found]


async def _runs_with(location: StoreLocation, prefix: str, tenant: str | None) -> list[tuple[str, str]]:
    if location.file is not None and not location.file.exists():
        return []
    async with _of_tenant(open_store(location.url), tenant) as store:
        page = await store.find_runs(RunQuery(run_id=prefix, limit=COMPLETED_RUNS))
    return [(info.run_id, info.status) for info in reversed(page.runs)]
