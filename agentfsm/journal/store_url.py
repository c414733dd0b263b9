"""``open_store``: the store that a URL names, and ``locate_store``: where that is, without opening it."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from pydantic import SecretStr

from agentfsm.errors import ConfigurationError
from agentfsm.journal.store import Store

_FORMS = "sqlite:///runs.db (relative), sqlite:////var/lib/runs.db (absolute), postgresql://HOST/DATABASE, memory:"
_LEVELS = ("full", "normal")
_POSTGRES = ("postgresql", "postgres")
_SCHEMES = ("sqlite", "memory", *_POSTGRES)
_POSTGRES_OPTIONS = ("liveness", "lease_s", "wait_s", "listen_url")
_SCHEME = re.compile(r"([a-z][a-z0-9]+):|([a-z][a-z0-9+.-]+)://", re.IGNORECASE)
"""A single letter is the drive of a path on Windows."""
_LIBPQ = re.compile(r"(^|\s)(host|hostaddr|dbname|user|password|service)\s*=")


@dataclass(frozen=True, slots=True)
class StoreLocation:
    """Where a store is.

    Attributes:
        url: What ``open_store`` opens; it may have a password.
        name: What it is called in messages and in the names of files: without user and password.
        file: The file of a SQLite store; None for a store on a server.
    """

    url: str | Path = field(repr=False)
    name: str
    file: Path | None = None

    @property
    def slug(self) -> str:
        """A name for files that belong to a store on a server: the same for each user, and for no other database."""
        readable = re.sub(r"[^A-Za-z0-9.]+", "-", self.name).strip("-")[:60]
        return f"{readable}-{hashlib.sha256(self.name.encode()).hexdigest()[:8]}"


def open_store(url: str | Path) -> Store:
    """The store that a URL names. Close it with ``await store.aclose()``, or use it in an ``async with`` block.

    ::

        store = open_store("sqlite:///runs.db")  # relative to the current folder
        store = open_store("sqlite:////var/lib/runs.db?synchronous=normal")
        store = open_store("postgresql://ann:password@db.example.org/shop?liveness=lease")
        store = open_store("memory:")

    Args:
        url: The URL, or the path of a SQLite file. ``synchronous`` is as for ``SqliteStore``; ``liveness``,
            ``lease_s``, ``wait_s`` and ``listen_url`` are as for ``PostgresStore``, besides the parameters of libpq.

    Raises:
        ConfigurationError: It is not the URL of a store that this release has.
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
        case scheme if scheme in _POSTGRES:
            return _postgres_store(parts)
        case _:
            from agentfsm.journal.sqlite import SqliteStore

            path, level = _sqlite_file(parts, str(url))
            return SqliteStore(path, synchronous="normal" if level == "normal" else "full")


def locate_store(url: str | Path) -> StoreLocation:
    """Where the store is that a URL names, without opening it.

    Args:
        url: The URL, or the path of a SQLite file.

    Raises:
        ConfigurationError: It is not the URL of a store that this release has, or that of a store in memory, which has
            no location.
    """
    parts = _split(url)
    if parts.scheme in _POSTGRES:
        return StoreLocation(url, _server_name(parts))
    if parts.scheme == "memory":
        raise ConfigurationError(
            "a store in memory is that of one process: name a file, sqlite:///FILE or postgresql://HOST/DATABASE"
        )
    file = _sqlite_file(parts, str(url))[0]
    return StoreLocation(url, str(file), file)


def store_url(store: Store) -> str | Path | None:
    """What ``open_store`` opens a store from: the path of its file or its URL, which may have a password.

    None if other processes cannot reach it, or if it is not one of ours.
    """
    url = getattr(store, "url", None)
    return url.get_secret_value() if isinstance(url, SecretStr) else getattr(store, "path", None)


def _server_name(parts: SplitResult) -> str:
    """Host, port and database of a PostgreSQL URL, each as libpq takes it: from the URL or from its parameters."""
    query = dict(_parameters(parts))
    host = query.get("host") or unquote(parts.netloc.rpartition("@")[2]) or "localhost"
    port = f":{query['port']}" if "port" in query else ""
    database = query.get("dbname") or unquote(parts.path.removeprefix("/")) or query.get("user") or parts.username
    return f"postgresql://{host}{port}/{database or ''}"


def _split(url: str | Path) -> SplitResult:
    """The parts of a URL; a plain path has no scheme."""
    text = str(url)
    before, slashes, _ = text.partition("//")
    if slashes and before in _SCHEMES:
        raise ConfigurationError(
            f"the URL of the store lacks a colon after {before}; for a file, write ./{before}//..."
        )
    found = _SCHEME.match(text) if isinstance(url, str) else None
    if found is None:
        if isinstance(url, str) and _LIBPQ.search(text):  # its text may have the password
            raise ConfigurationError(
                "parameters in the form of libpq are not a URL: write postgresql://user:password@host/database; for a "
                "file, write ./ before its name"
            )
        return SplitResult("", "", text, "", "")
    scheme = (found[1] or found[2]).lower()
    if scheme not in _SCHEMES:
        raise ConfigurationError(f"there is no store for {scheme}: URLs; there are: {_FORMS}, or the path of a file")
    if scheme in _POSTGRES and not text[len(scheme) :].startswith("://"):
        raise ConfigurationError("the URL of a PostgreSQL database is like postgresql://user:password@host/database")
    try:
        parts = urlsplit(text)
    except ValueError:  # its text may have the password
        raise ConfigurationError(
            "the URL of the store cannot be read: in a password, write %5B and %5D for square brackets"
        ) from None
    if scheme in _POSTGRES and (parts.netloc.count("@") > 1 or "@" in parts.path):  # what follows it is not a host
        raise ConfigurationError(
            "the URL of the store cannot be read: in a user, a password or a database, write %40 for @ and %2F for /"
        )
    return parts


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

    ours = {name: value for name, value in _parameters(parts) if name in _POSTGRES_OPTIONS}
    try:
        seconds: dict[Any, float] = {name: float(ours[name]) for name in ("lease_s", "wait_s") if name in ours}
    except ValueError:
        raise ConfigurationError("lease_s and wait_s are seconds, as in ?lease_s=15&wait_s=60") from None
    liveness: Any = ours.get("liveness", "session")  # PostgresStore checks it
    listen_url = ours.get("listen_url", "")
    return PostgresStore(_without_our_options(parts), liveness=liveness, listen_url=listen_url, **seconds)


def server_database(url: str | Path) -> str:
    """The URL of the database of a PostgreSQL store, as libpq takes it: without our own options.

    Raises:
        ConfigurationError: It is not the URL of a store that this release has.
    """
    return _without_our_options(_split(url))


def is_pooled(url: str | Path) -> bool:
    """Whether a pooler in transaction mode is before the server of a PostgreSQL store.

    Raises:
        ConfigurationError: It is not the URL of a store that this release has.
    """
    parts = _split(url)
    return parts.scheme in _POSTGRES and ("liveness", "lease") in _parameters(parts)


def _parameters(parts: SplitResult) -> list[tuple[str, str]]:
    """The parameters of a PostgreSQL URL, decoded as libpq decodes them: a plus sign is one."""
    pairs = (each.partition("=") for each in parts.query.split("&"))
    return [(unquote(name), unquote(value)) for name, _, value in pairs]


def _without_our_options(parts: SplitResult) -> str:
    """The URL without our own options, else to the letter: ``geturl`` drops the slashes before an empty host."""
    kept = [each for each in parts.query.split("&") if each.partition("=")[0] not in _POSTGRES_OPTIONS]
    query = f"?{'&'.join(kept)}" if any(kept) else ""
    return f"{parts.scheme}://{parts.netloc}{parts.path}{query}{'#' if parts.fragment else ''}{parts.fragment}"
