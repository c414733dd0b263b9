"""``open_store``: the store that a URL names."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

from agentfsm.errors import ConfigurationError
from agentfsm.journal.store import Store

__all__ = ["open_store", "sqlite_path"]

_FORMS = "sqlite:///runs.db (relative), sqlite:////var/lib/runs.db (absolute), postgresql://HOST/DATABASE, memory:"
_LEVELS = ("full", "normal")
_POSTGRES_OPTIONS = ("liveness", "lease_s", "wait_s")


def open_store(url: str | Path) -> Store:
    """The store that a URL names. Close it with ``await store.aclose()``, or use it in an ``async with`` block.

    ::

        store = open_store("sqlite:///runs.db")  # relative to the current folder
        store = open_store("sqlite:////var/lib/runs.db?synchronous=normal")
        store = open_store("postgresql://ann:password@db.example.org/shop?liveness=lease")
        store = open_store("memory:")

    Args:
        url: The URL, or the path of a SQLite file. ``synchronous`` is as for ``SqliteStore``; ``liveness``, ``lease_s``
            and ``wait_s`` are as for ``PostgresStore``, beside the parameters of libpq.

    Raises:
        ConfigurationError: It is no URL of a store that this release has.
        agentfsm.errors.MissingExtraError: The package for PostgreSQL is not installed.
        agentfsm.errors.StoreFormatError: The file is not an agentfsm store, or a newer release wrote it.
        agentfsm.errors.StoreError: The file cannot be read.
    """
    parts = _split(url)
    match parts.scheme:
        case "memory":
            from agentfsm.journal.memory_store import MemoryStore  # only the store that is used is loaded

            if parts.netloc or parts.path or parts.query or parts.fragment:
                raise ConfigurationError(f"{url!r} is not the URL of a store in memory, which is 'memory:'")
            return MemoryStore()
        case "postgresql" | "postgres":
            return _postgres_store(parts)
        case _:
            from agentfsm.journal.sqlite import SqliteStore

            path, level = _sqlite_file(parts, str(url))
            return SqliteStore(path, synchronous="normal" if level == "normal" else "full")


def sqlite_path(url: str | Path) -> Path:
    """The file of a SQLite store, for what is kept beside it: its secret, and the log of its checkpoints.

    Args:
        url: The URL, or the path.

    Raises:
        ConfigurationError: It is the URL of another store, or of none.
    """
    parts = _split(url)
    if parts.scheme in ("postgresql", "postgres"):
        raise ConfigurationError(
            "the command line works on SQLite files; a store on PostgreSQL is opened in Python, with open_store(url)"
        )
    if parts.scheme == "memory":
        raise ConfigurationError(
            "a store in memory is that of one process, and no file: name a file, or sqlite:///FILE"
        )
    return _sqlite_file(parts, str(url))[0]


def _split(url: str | Path) -> SplitResult:
    """The parts of a URL; a plain path has no scheme."""
    text = str(url)
    scheme = text.partition(":")[0].lower() if isinstance(url, str) and ":" in text else ""
    if len(scheme) < 2 or not scheme.isalnum() or scheme[0].isdigit():  # a path, also one of Windows with its drive
        return SplitResult("", "", text, "", "")
    if scheme not in ("sqlite", "memory", "postgresql", "postgres"):
        raise ConfigurationError(f"there is no store for {scheme}: URLs; there are: {_FORMS}, or the path of a file")
    return urlsplit(text)


def _sqlite_file(parts: SplitResult, url: str) -> tuple[Path, str]:
    """The file that a SQLite URL or a path names, and what its commits wait for."""
    if not parts.scheme:
        if not parts.path:
            raise ConfigurationError("the store has no name: give a path or a URL")
        return Path(parts.path), "full"
    if parts.netloc or not parts.path.startswith("/") or len(parts.path) < 2 or parts.fragment:
        raise ConfigurationError(f"{url!r} names no file; a relative path has three slashes, an absolute one four")
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    level = given.pop("synchronous", "full")
    if given or level not in _LEVELS:
        raise ConfigurationError(f"{url!r}: the only option is synchronous, which is {' or '.join(_LEVELS)}")
    return Path(unquote(parts.path[1:])), level


def _postgres_store(parts: SplitResult) -> Store:
    """The store that a PostgreSQL URL names; our options are taken out of its query."""
    from agentfsm.journal.postgres import PostgresStore

    query = parse_qsl(parts.query, keep_blank_values=True)
    ours = {name: value for name, value in query if name in _POSTGRES_OPTIONS}
    rest = urlencode([pair for pair in query if pair[0] not in _POSTGRES_OPTIONS])
    try:
        seconds = {name: float(ours[name]) for name in ("lease_s", "wait_s") if name in ours}
    except ValueError:
        raise ConfigurationError("lease_s and wait_s are seconds, as in ?lease_s=15&wait_s=60") from None
    liveness: Any = ours.get("liveness", "session")  # PostgresStore checks it
    return PostgresStore(parts._replace(query=rest).geturl(), liveness=liveness, **seconds)
