"""Signed checkpoints: the last record of each run in a store, as a signed note that is kept elsewhere.

A hash chain proves that nothing inside it was changed. It cannot prove that its end was not truncated, or that the
whole journal was not rewritten; a checkpoint can. It is a signed note in the format of transparency logs (C2SP
``tlog-checkpoint`` and ``signed-note``): origin, number of runs, root hash, the date (``date 2026-11-23T08:30:00Z``), a
line for each run (``seq hash "run id"``), a blank line, and an Ed25519 signature. The root hash covers the date too.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from agentfsm.errors import JournalError, MissingExtraError
from agentfsm.journal.store import Head

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

__all__ = ["Checkpoint", "read_checkpoint", "write_checkpoint"]

_LINE = re.compile(r'(\d+) ([0-9a-f]{64}) (".*")')
_DATE = "date %Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose signature is valid.

    Attributes:
        heads: Sequence number and hash of the last record of each run, by run id.
        date: When it was written, in UTC; None if a release that noted no date wrote it.
    """

    heads: dict[str, tuple[int, str]]
    date: datetime | None


def write_checkpoint(heads: Iterable[Head], key: bytes, date: datetime, name: str = "agentfsm") -> str:
    """A signed checkpoint of some runs. It says nothing about their records: verify those first.

    Args:
        heads: The heads of the runs.
        key: An Ed25519 private key as PEM (``openssl genpkey -algorithm ed25519``).
        date: The date of the checkpoint, with its time zone; it is written to the second, in UTC.
        name: The name of the store and of the key; without spaces and plus signs.

    Returns:
        The text of the signed note.

    Raises:
        JournalError: The key is not an Ed25519 private key, or the name is empty or has a space or a plus sign.
        MissingExtraError: The package for signatures is not installed.
    """
    if not name or re.search(r"[\s+]", name):
        raise JournalError(
            f"{name!r} is not a valid checkpoint name: it must not be empty or contain a space or a plus sign"
        )
    signer = _load_private_key(key)
    runs = sorted(f"{h.seq} {h.hash} {json.dumps(h.run_id)}" for h in heads)
    lines = [date.astimezone(UTC).strftime(_DATE), *runs]
    root = base64.b64encode(_root_hash(lines)).decode()
    text = "".join(f"{line}\n" for line in (f"{name}/runs", str(len(runs)), root, *lines))
    signature = _key_id(name, signer.public_key()) + signer.sign(text.encode())
    return f"{text}\n\u2014 {name} {base64.b64encode(signature).decode()}\n"


def read_checkpoint(text: str, key: bytes) -> Checkpoint:
    """The checkpoint in a signed note.

    Args:
        text: The signed note.
        key: The Ed25519 public key as PEM (``openssl pkey -in key.pem -pubout``).

    Raises:
        JournalError: The text is not a checkpoint, its signature is not valid, or the key is not an Ed25519 public key.
        MissingExtraError: The package for signatures is not installed.
    """
    public = _load_public_key(key)
    body, blank, signatures = text.rpartition("\n\n")
    signed = body + "\n"
    lines = body.split("\n")
    if not blank or len(lines) < 3 or not lines[1].isdigit():
        raise JournalError("the text is not a checkpoint")
    name = lines[0].removesuffix("/runs")
    for signature in signatures.splitlines():
        if _is_valid_signature(signature, name, signed, public):
            break
    else:
        raise JournalError("the checkpoint has no valid signature of this key")
    dated = len(lines) > 3 and lines[3].startswith("date ")
    runs = lines[4:] if dated else lines[3:]
    if len(runs) != int(lines[1]) or base64.b64encode(_root_hash(lines[3:])).decode() != lines[2]:
        raise JournalError("the checkpoint's lines do not match its root hash")
    heads: dict[str, tuple[int, str]] = {}
    for line in runs:
        match = _LINE.fullmatch(line)
        if match is None:
            raise JournalError(f"{line!r} is not a line of a checkpoint")
        heads[json.loads(match[3])] = (int(match[1]), match[2])
    return Checkpoint(heads, _read_date(lines[3]) if dated else None)


def _read_date(line: str) -> datetime:
    try:
        return datetime.strptime(line, _DATE).replace(tzinfo=UTC)
    except ValueError:
        raise JournalError(f"{line!r} is not the date of a checkpoint") from None


def _root_hash(lines: Iterable[str]) -> bytes:
    return hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).digest()


def _is_valid_signature(line: str, name: str, signed: str, public: Ed25519PublicKey) -> bool:
    from cryptography.exceptions import InvalidSignature

    dash, _, rest = line.partition(" ")
    signer, _, encoded = rest.partition(" ")
    try:
        signature = base64.b64decode(encoded, validate=True)
    except ValueError:
        return False
    if base64.b64encode(signature).decode() != encoded:  # its unused bits were changed
        return False
    if dash != "\u2014" or signer != name or signature[:4] != _key_id(name, public):
        return False
    try:
        public.verify(signature[4:], signed.encode())
    except InvalidSignature:
        return False
    return True


def _key_id(name: str, public: Ed25519PublicKey) -> bytes:
    return hashlib.sha256(name.encode() + b"\n\x01" + public.public_bytes_raw()).digest()[:4]


def _load_private_key(key: bytes) -> Ed25519PrivateKey:
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    except ImportError as error:
        raise MissingExtraError("a signed checkpoint", "signing") from error
    try:
        loaded = load_pem_private_key(key, password=None)
    except (ValueError, TypeError) as error:
        raise JournalError("the key is not a private key in PEM format") from error
    if not isinstance(loaded, Ed25519PrivateKey):
        raise JournalError("the key is not an Ed25519 key")
    return loaded


def _load_public_key(key: bytes) -> Ed25519PublicKey:
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key
    except ImportError as error:
        raise MissingExtraError("a signed checkpoint", "signing") from error
    try:
        loaded = load_pem_public_key(key)
    except (ValueError, TypeError) as error:
        raise JournalError("the key is not a public key in PEM format") from error
    if not isinstance(loaded, Ed25519PublicKey):
        raise JournalError("the key is not an Ed25519 key")
    return loaded
