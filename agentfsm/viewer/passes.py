"""Passes: links that work once, for people who get an e-mail, and the sessions that they open.

Both say who somebody is, for which run of which viewer, and until when, under a MAC with the host's secret. A link has
its pass behind the ``#`` of its address, which browsers neither send nor log; the page takes it out of the address at
once.
"""

from __future__ import annotations

import base64
import hmac
import json
import secrets
import time
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import unquote

from agentfsm.errors import ConfigurationError
from agentfsm.loop.keys import KeyPurpose, Keyring
from agentfsm.loop.quorum import Actor

PassKind = Literal["link", "session"]

MAX_LENGTH = 4_000


@dataclass(frozen=True, slots=True)
class Pass:
    """Who somebody is, and what for.

    Attributes:
        actor: Who it is.
        run_id: The only run that it is for; an empty string for all runs.
        expires: Until when it is valid, in seconds since the epoch.
        id: Names it, so that a link works once.
        viewer: The viewer that it is for, as ``viewer_at`` spells it: another one with the same secret has other runs,
            or has not noted that the link was used.
    """

    actor: Actor
    run_id: str
    expires: float
    id: str
    viewer: str


def viewer_at(address: str) -> str:
    """The name, port and path of a viewer in one spelling, from its address, with or without a scheme."""
    name, _, path = address.removeprefix("https://").removeprefix("http://").partition("/")
    name = name.rpartition("@")[2].lower().removesuffix(":443").removesuffix(":80")
    return f"{name}/{unquote(path).strip('/')}"


def seal_pass(kind: PassKind, granted: Pass, keyring: Keyring) -> str:
    """A pass as text, under the current secret."""
    actor = granted.actor
    body = [
        kind, actor.id, list(actor.roles), actor.kind, actor.verified,
        granted.run_id, granted.expires, granted.id, granted.viewer,
    ]  # fmt: skip
    text = base64.urlsafe_b64encode(json.dumps(body).encode()).decode().rstrip("=")
    return f"{text}.{keyring.current.seal(KeyPurpose.viewer, _sealed_bytes(text))}"


def _sealed_bytes(text: str) -> bytes:
    """What the seal of a pass is of; nothing else that is sealed for the viewer begins so."""
    return f"pass {text}".encode()


def open_pass(kind: PassKind, text: str, keyring: Keyring, now: float, address: str) -> Pass | None:
    """What a text says if it is a pass for this viewer under a secret of the host, and has not expired; else None."""
    body, _, seal = text.partition(".")
    if (
        len(text) > MAX_LENGTH
        or not text.isascii()
        or not keyring.check_seal(KeyPurpose.viewer, _sealed_bytes(body), seal)
    ):
        return None
    found: Any = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    if len(found) != _FIELDS:  # of an earlier release
        return None
    sealed_kind, name, roles, actor_kind, verified, run_id, expires, pass_id, viewer = found
    if not hmac.compare_digest(str(sealed_kind), kind) or now > expires or viewer != viewer_at(address):
        return None
    return Pass(Actor(name, tuple(roles), actor_kind, verified), run_id, expires, pass_id, viewer)


_FIELDS = 9


def one_time_link(
    url: str, run_id: str, actor: Actor, *, secret: bytes, validity_s: float = 24 * 3600, now: float | None = None
) -> str:
    """A link with which somebody may see and answer one run, once opened in one browser, for a mail or a message.

    The answers are recorded as the actor's, verified: whoever has the link is the actor, so send it to nobody else.

    Args:
        url: The address of the viewer, such as ``https://agents.example.org/agents/``; the link works there only.
        run_id: The run.
        actor: Who gets it.
        secret: The secret of the host, which the viewer has, too.
        validity_s: Seconds for which it can be opened.
        now: Seconds since the epoch; by default the system's time.

    Raises:
        ConfigurationError: The address is not that of a web page, the run has no id, or the time is not positive.
    """
    if not url.startswith(("https://", "http://")) or "#" in url or "?" in url:
        raise ConfigurationError(f"the address of a viewer must look like https://agents.example.org/, not {url!r}")
    if not run_id:
        raise ConfigurationError("a link is for one run: give its id")
    if not 0 < validity_s < float("inf"):
        raise ConfigurationError(f"validity_s must be greater than 0 seconds, not {validity_s!r}")
    vouched = Actor(actor.id, actor.roles, actor.kind, verified=True)
    expires = (time.time() if now is None else now) + validity_s
    granted = Pass(vouched, run_id, expires, secrets.token_hex(16), viewer_at(url))
    return f"{url.rstrip('/')}/link#{seal_pass('link', granted, Keyring(secret))}"
