"""The keys that are derived from a host's secrets, one for each purpose, and how the right one is found again.

A key is ``HKDF-SHA256(secret, salt="agentfsm", info=purpose)`` (RFC 5869), 32 bytes. The *key id* of a secret is
derived in the same way, so it tells which secret was used and nothing about it. Whatever is signed, authenticated or
sealed carries the key id, which is how secrets are replaced: everything new is written under the new one, and the old
ones still check what was written before.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from enum import StrEnum

SECRET_VARIABLE = "AGENTFSM_SECRET"  # noqa: S105  # the variable's name, not its value
"""The environment variable that holds the secret of hosts that are given none."""
OLD_SECRETS_VARIABLE = "AGENTFSM_OLD_SECRETS"
"""The environment variable that holds the secrets of before, with which such hosts read what was written earlier."""

_SALT = b"agentfsm"
_KEY_ID_BYTES = 4
_KEY_ID_DIGITS = 2 * _KEY_ID_BYTES
_BLOCK_BYTES = 64  # of SHA-256
_INNER_PAD, _OUTER_PAD = (bytes(byte ^ pad for byte in range(256)) for pad in (0x36, 0x5C))  # of HMAC, RFC 2104
_MAC_BYTES = 16


class KeyPurpose(StrEnum):
    """What a derived key is for; the value is the ``info`` of its derivation, and never changes."""

    suspension = "suspension record"
    """Signs suspension records."""
    record = "journal record"
    """Authenticates the records of a journal."""
    run = "run in a store"
    """Authenticates what a store keeps about a run besides its records."""
    snapshot = "snapshot of a run"
    """Authenticates what a run knew after one of its records, as a store keeps it."""
    tombstone = "purged run"
    """Authenticates what remains of a run that was purged."""
    hold = "hold of a run"
    """Authenticates that a run was put on hold, or that its hold was ended."""
    sealing = "sealed value"
    """Encrypts values that must not be readable in a journal."""
    withholding = "withheld value"
    """Tells withheld values apart that are not kept, not even encrypted."""
    signal = "signal to a run"
    """Authenticates answers and cancellations that wait in a store."""
    viewer = "viewer"
    """Authenticates the links, sessions and tokens of the viewer."""


class Mac:
    """HMAC-SHA256 under one key, whose two pads are hashed in advance."""

    __slots__ = ("_inner", "_outer")

    def __init__(self, key: bytes) -> None:
        block = key.ljust(_BLOCK_BYTES, b"\0")
        self._inner = hashlib.sha256(block.translate(_INNER_PAD))
        self._outer = hashlib.sha256(block.translate(_OUTER_PAD))

    def digest(self, message: bytes) -> bytes:
        """The MAC of a message, 32 bytes."""
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(message)
        outer.update(inner.digest())
        return outer.digest()


class SecretKeys:
    """The keys that are derived from one secret.

    Args:
        secret: The secret; at least 32 random bytes, or whoever knows a MAC can guess it.

    Attributes:
        key_id: Which secret it is, 8 hex digits; not secret.
    """

    __slots__ = ("_extracted", "_keys", "_macs", "key_id")

    def __init__(self, secret: bytes) -> None:
        self._extracted = hmac.digest(_SALT, secret, "sha256")
        self._keys: dict[KeyPurpose, bytes] = {}
        self._macs: dict[KeyPurpose, Mac] = {}
        self.key_id = self._expand("key id")[:_KEY_ID_BYTES].hex()

    def __repr__(self) -> str:
        return f"SecretKeys({self.key_id})"

    def key(self, purpose: KeyPurpose) -> bytes:
        """The key for a purpose, 32 bytes."""
        if purpose not in self._keys:
            self._keys[purpose] = self._expand(purpose.value)
        return self._keys[purpose]

    def seal(self, purpose: KeyPurpose, message: bytes) -> str:
        """What shows that somebody with the secret wrote a message: the key id, and the first half of its MAC.

        Returns:
            40 hex digits.
        """
        mac = self._macs.get(purpose)
        if mac is None:
            mac = self._macs[purpose] = Mac(self.key(purpose))
        return self.key_id + mac.digest(message)[:_MAC_BYTES].hex()

    def _expand(self, info: str) -> bytes:
        return hmac.digest(self._extracted, info.encode() + b"\1", "sha256")  # one block of HKDF-Expand


class Keyring:
    """The keys of a host: those of its secret, and those of secrets that it used before.

    Args:
        secret: The secret under which everything is written.
        old_secrets: Earlier ones, under which things were written that are still to be read.

    Attributes:
        current: The keys of the secret.
    """

    __slots__ = ("_by_id", "current")

    def __init__(self, secret: bytes, old_secrets: Sequence[bytes] = ()) -> None:
        self.current = SecretKeys(secret)
        self._by_id = {self.current.key_id: self.current}
        for old in map(SecretKeys, old_secrets):
            self._by_id.setdefault(old.key_id, old)

    def __repr__(self) -> str:
        return f"Keyring({', '.join(self.key_ids)})"

    @property
    def key_ids(self) -> tuple[str, ...]:
        """The key ids of all secrets, the current one first."""
        return tuple(self._by_id)

    def find(self, key_id: str) -> SecretKeys | None:
        """The keys of the secret with a key id, or None if the host does not have it."""
        return self._by_id.get(key_id)

    def check_seal(self, purpose: KeyPurpose, message: bytes, seal: str) -> bool | None:
        """Whether a seal belongs to a message; None if it names a secret that the host does not have.

        Args:
            purpose: What the message is.
            message: The message.
            seal: Its seal; see ``SecretKeys.seal``.
        """
        keys = self._by_id.get(seal[:_KEY_ID_DIGITS])
        return None if keys is None else hmac.compare_digest(keys.seal(purpose, message), seal)

    def foreign_key_id(self, seal: str) -> str:
        """The key id of the secret under which something was sealed if the host does not have it, else an empty text.

        Args:
            seal: The seal; see ``SecretKeys.seal``. What is not sealed has an empty one.
        """
        key_id = seal[:_KEY_ID_DIGITS]
        return "" if key_id in self._by_id else key_id
