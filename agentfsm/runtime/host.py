"""What the embedding program provides: clock, signing secret, seed, store, replay guard, and long-term memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from inspect import isawaitable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import SecretStr

from agentfsm.errors import AgentfsmError, AuthenticationError, ConfigurationError
from agentfsm.loop.keys import SECRET_VARIABLE, Keyring
from agentfsm.loop.messages import Message
from agentfsm.loop.quorum import Actor

if TYPE_CHECKING:
    from agentfsm.journal.store import Store


class Clock(Protocol):
    """Where a run reads the time and sleeps; tests inject their own."""

    def monotonic(self) -> float:
        """Seconds that never go back, for durations."""
        ...

    def time(self) -> float:
        """Seconds since the epoch, for timestamps."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait for a number of seconds."""
        ...


class SystemClock:
    """The system clock."""

    monotonic = staticmethod(time.monotonic)
    time = staticmethod(time.time)

    async def sleep(self, seconds: float) -> None:
        """Wait for a number of seconds."""
        await asyncio.sleep(seconds)


class ReplayGuard(Protocol):
    """Remembers which suspension records were used, so that each can be resumed only once.

    A record names the guard of the host that made it, and another guard is not asked about it.
    """

    @property
    def scope(self) -> str:
        """A name that exactly those guards have that remember the same records, in whatever process."""
        ...

    def is_used(self, record_id: str) -> bool:
        """Whether a record was already claimed."""
        ...

    def claim(self, record_id: str) -> bool:
        """Claim a record; False if it was already claimed. Must be atomic."""
        ...


class InMemoryReplayGuard:
    """Keeps used records in memory: for records that the same process suspends and resumes, and for no others."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._claims: dict[str, object] = {}
        self._process, self._scope = os.getpid(), f"memory:{secrets.token_hex(16)}"

    @property
    def scope(self) -> str:
        """A random name; a forked process, which does not see what its parent does, has another."""
        if self._process != os.getpid():
            self._forget()
        return self._scope

    def is_used(self, record_id: str) -> bool:
        """Whether a record was already claimed."""
        return record_id in self._claims

    def claim(self, record_id: str) -> bool:
        """Claim a record; False if it was already claimed."""
        mine = object()
        return self._claims.setdefault(record_id, mine) is mine  # atomic across threads too


class FileReplayGuard:
    """Keeps used records as empty files in a folder that any number of processes may share.

    Do not delete files from the folder: its records could be used again. Without the whole folder they can no longer be
    resumed.

    Args:
        folder: The folder, which is created; a local one, or a network folder that all machines share.

    Raises:
        OSError: The folder cannot be created or written to.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._scope = f"folder:{_folder_id(self._folder)}"

    @property
    def scope(self) -> str:
        """The random name that the folder was given when it was first used."""
        return self._scope

    def is_used(self, record_id: str) -> bool:
        """Whether a record was already claimed."""
        return (self._folder / record_id).exists()

    def claim(self, record_id: str) -> bool:
        """Claim a record; False if it was already claimed.

        Raises:
            OSError: The folder cannot be written to; the record is not claimed.
        """
        try:
            _create(self._folder / record_id, b"")
        except FileExistsError:
            return False
        return True


_ID_FILE = "folder-id"


def _folder_id(folder: Path) -> str:
    """The id of a folder of used records, made by whoever comes first."""
    file = folder / _ID_FILE
    if not file.exists():
        draft = folder / f".{secrets.token_hex(8)}"
        _create(draft, secrets.token_hex(16).encode())
        with contextlib.suppress(FileExistsError):  # another process was faster
            file.hardlink_to(draft)
        draft.unlink()
    return file.read_text(encoding="ascii")


def _create(file: Path, content: bytes) -> None:
    """Create a file that its owner may read, durably.

    Raises:
        FileExistsError: It exists.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with open(file, "xb", opener=lambda path, _: os.open(path, flags, 0o600)) as created:  # Path.open has no opener
        created.write(content)
        created.flush()
        os.fsync(created.fileno())
    if os.name == "posix":  # elsewhere a folder cannot be opened
        descriptor = os.open(file.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


_THIS_PROCESS = InMemoryReplayGuard()
"""What hosts without a guard of their own share, so that two hosts of a process cannot use one record twice."""


_process_secret = secrets.token_bytes(32)


def _default_secret() -> bytes:
    """What the environment variable says, else a random secret, the same for all hosts of this process."""
    return os.environ.get(SECRET_VARIABLE, "").strip().encode() or _process_secret


MONITORS = ("off", "warn", "raise")
"""What is done about a run that leaves the model of its proofs."""


@dataclass(frozen=True)
class Host:
    """What the embedding program provides to runs.

    Attributes:
        clock: The clock.
        secret: At least 32 random bytes, from which the keys are derived that sign suspension records and
            authenticate journals. By default what the environment variable ``AGENTFSM_SECRET`` says, else a random one
            that is valid only in this process: give the same secret to every process that suspends or resumes.
        old_secrets: Secrets that were used before: what they signed is still accepted, and nothing new is signed
            with them.
        secrets: Values that must not be readable in what is written of runs, wherever they occur, in addition to those
            that the program's models, tools and environment name.
        seed: Seed of a run's random draws (backoff jitter); None derives them from the run's id alone.
        replay_guard: Remembers which suspension records were used. By default this process does, and a record of
            another process is refused: give all of them the same ``FileReplayGuard``, or the same store.
        store: Where journals are stored. Without one they stay in memory, and another process cannot
            resume the runs.
        watchdog_s: Seconds for which code of yours may block the event loop of a run before a warning names it; None
            for no watchdog.
        monitor: Whether each move of a run is checked against the model that proofs about its graph are based on:
            ``off``, ``warn`` (a log line and a ``RunWarning``) or ``raise`` (a ``ModelMismatchError``, for tests). By
            default what the environment variable ``AGENTFSM_MONITOR`` says, else ``off``, which costs nothing.
        authenticate: Turns what the program has of whoever requests or answers a run (a token, a web request) into an
            ``Actor``, or refuses it: it returns None or raises. It may be async. With it, every reply needs an
            authenticated actor. Without it, whoever ``by`` names is recorded as claimed, not verified.

    Raises:
        ConfigurationError: A secret is empty, or is given where a list of them belongs; the store is not a store;
            ``watchdog_s`` is not greater than 0; or there is no such monitor.
    """

    clock: Clock = field(default_factory=SystemClock)
    secret: bytes = field(default_factory=_default_secret, repr=False)
    old_secrets: Sequence[bytes] = field(default=(), repr=False)
    secrets: Sequence[SecretStr] = field(default=(), repr=False)
    seed: int | None = None
    replay_guard: ReplayGuard = field(default_factory=lambda: _THIS_PROCESS)
    store: Store | None = None
    watchdog_s: float | None = 1.0
    monitor: str = field(default_factory=lambda: os.environ.get("AGENTFSM_MONITOR", "off"))
    authenticate: Callable[[Any], Actor | Awaitable[Actor | None] | None] | None = None

    async def identify(self, given: Any) -> Actor | None:
        """Who requests or answers a run; None if nobody says and the host does not ask.

        Args:
            given: What the caller gave: whatever ``authenticate`` takes, or without it an ``Actor`` or a name.

        Raises:
            AuthenticationError: The host refuses it, or it is neither an actor nor a name.
        """
        if self.authenticate is not None:
            return replace(await self._authenticated(self.authenticate, given), verified=True)
        if isinstance(given, Actor):
            return replace(given, verified=False)
        if given is None or given == "":
            return None
        if not isinstance(given, str):
            raise AuthenticationError(
                f"an actor must be an Actor or a name, not {type(given).__name__}: only Host(authenticate=...) can "
                "tell whose token that is"
            )
        return Actor(given)

    async def _authenticated(self, authenticate: Callable[[Any], Any], given: Any) -> Actor:
        try:
            answer = authenticate(given)
            actor: object = await answer if isawaitable(answer) else answer
        except AgentfsmError:
            raise
        except Exception as error:  # its text may have the token
            raise AuthenticationError(f"authenticate refused it: it raised {type(error).__name__}") from error
        if not isinstance(actor, Actor):
            raise AuthenticationError(
                "authenticate refused it"
                if actor is None
                else f"authenticate must return an Actor or None, not {type(actor).__name__}"
            )
        return actor

    keyring: Keyring = field(init=False, repr=False, compare=False)
    """The keys that are derived from the secrets."""

    def new_id(self) -> str:
        """A fresh random id, 16 hex digits."""
        return secrets.token_hex(8)

    def __post_init__(self) -> None:
        for name in ("old_secrets", "secrets"):
            if isinstance(getattr(self, name), (str, bytes, SecretStr)):
                raise ConfigurationError(f"{name} must be a list, as in {name}=[...], not a single secret")
        object.__setattr__(self, "secret", _as_bytes(self.secret))
        object.__setattr__(self, "old_secrets", tuple(map(_as_bytes, self.old_secrets)))
        object.__setattr__(self, "secrets", tuple(map(_as_secret, self.secrets)))
        object.__setattr__(self, "keyring", Keyring(self.secret, self.old_secrets))
        if self.store is not None and not hasattr(self.store, "find_runs"):
            raise ConfigurationError(
                f"store must be a store, as in store=open_store('runs.db'), not {type(self.store).__name__}"
            )
        if self.watchdog_s is not None and not self.watchdog_s > 0:
            raise ConfigurationError(f"watchdog_s must be greater than 0 seconds, or None, not {self.watchdog_s}")
        if self.monitor not in MONITORS:
            raise ConfigurationError(f"monitor is {self.monitor!r}; it must be one of {', '.join(MONITORS)}")


def _as_bytes(secret: object) -> bytes:
    secret = secret.encode() if isinstance(secret, str) else secret
    if not isinstance(secret, bytes):
        raise ConfigurationError(f"a secret must be bytes, not {type(secret).__name__}")
    if not secret:
        raise ConfigurationError("a secret is empty: anyone could sign a suspension record with it")
    return secret


def _as_secret(value: object) -> SecretStr:
    if isinstance(value, str):
        return SecretStr(value)
    if not isinstance(value, SecretStr):
        raise ConfigurationError(f"secrets must be strings, not {type(value).__name__}")
    return value


class Memory(Protocol):
    """Long-term memory: recalls before the first model call, and remembers when the run has ended.

    An exception, or taking longer than the guardrails' ``tool_timeout_s``, is a warning; the run continues
    without the memory.
    """

    async def recall(self, prompt: str) -> str:
        """Text to add to the prompt's context; empty for none."""
        ...

    async def remember(self, messages: Sequence[Message]) -> None:
        """Store what is worth remembering of a run's transcript."""
        ...
