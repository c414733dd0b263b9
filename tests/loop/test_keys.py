"""Keys: derived as RFC 5869 says, one for each purpose, found by a public id among current and old secrets."""

from __future__ import annotations

import hashlib
import hmac
import itertools
import random

import pytest
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from agentfsm.loop.keys import KeyPurpose, Keyring, Mac, SecretKeys

SECRET = b"the same secret in every process"


def hkdf(secret: bytes, info: str) -> bytes:
    return HKDF(SHA256(), length=32, salt=b"agentfsm", info=info.encode()).derive(secret)


@pytest.mark.parametrize("secret", [b"s", SECRET, bytes(range(256)) * 3])
def test_keys_are_derived_by_hkdf(secret):
    keys = SecretKeys(secret)
    assert keys.key_id == hkdf(secret, "key id")[:4].hex()
    assert {purpose: keys.key(purpose) for purpose in KeyPurpose} == {p: hkdf(secret, p.value) for p in KeyPurpose}


def test_the_derivations_never_change():
    """What was signed with an earlier release must still be valid."""
    keys = SecretKeys(SECRET)
    assert keys.key_id == "1e2e06cd"
    known = {
        KeyPurpose.suspension: "ac880ca3",
        KeyPurpose.record: "dd9d1561",
        KeyPurpose.run: "45187222",
        KeyPurpose.snapshot: "22b3f4a4",
        KeyPurpose.sealing: "6dca9438",
        KeyPurpose.withholding: "295ec1d6",
        KeyPurpose.tombstone: "8f77c232",
        KeyPurpose.signal: "09154a41",
        KeyPurpose.viewer: "c260b0fb",
        KeyPurpose.hold: "8a8f5b25",
    }
    assert {purpose: keys.key(purpose)[:4].hex() for purpose in KeyPurpose} == known


def test_every_purpose_and_every_secret_has_its_own_key():
    secrets = [SECRET, SECRET + b"\0", b"", b"another"]
    keys = [SecretKeys(secret).key(purpose) for secret in secrets for purpose in KeyPurpose]
    assert all(one != other for one, other in itertools.combinations(keys, 2))


def test_a_mac_is_hmac_sha256():
    random.seed(7)
    for length in (0, 1, 31, 32, 63, 64):
        key = random.randbytes(length)
        mac = Mac(key)
        for message in (b"", b"x", random.randbytes(32), random.randbytes(1000)):
            assert mac.digest(message) == hmac.new(key, message, hashlib.sha256).digest()


def test_a_seal_is_the_key_id_and_half_a_mac_under_the_key_of_its_purpose():
    ring, old = Keyring(b"new", [SECRET]), SecretKeys(SECRET)
    seal = old.seal(KeyPurpose.record, b"x")
    assert seal == old.key_id + hmac.digest(hkdf(SECRET, "journal record"), b"x", "sha256")[:16].hex()
    assert ring.check_seal(KeyPurpose.record, b"x", seal) is True
    assert ring.check_seal(KeyPurpose.run, b"x", seal) is False
    assert ring.check_seal(KeyPurpose.record, b"y", seal) is False
    assert ring.check_seal(KeyPurpose.record, b"x", seal[:-1]) is False
    assert ring.check_seal(KeyPurpose.record, b"x", SecretKeys(b"unknown").seal(KeyPurpose.record, b"x")) is None


def test_a_keyring_finds_current_and_old_secrets_by_their_ids():
    ring = Keyring(b"new", [b"old", b"older"])
    assert ring.key_ids == tuple(SecretKeys(secret).key_id for secret in (b"new", b"old", b"older"))
    assert ring.find(ring.current.key_id) is ring.current
    for secret in (b"new", b"old", b"older"):
        found = ring.find(SecretKeys(secret).key_id)
        assert found is not None
        assert found.key(KeyPurpose.suspension) == SecretKeys(secret).key(KeyPurpose.suspension)
    assert ring.find(SecretKeys(b"unknown").key_id) is None


def test_a_secret_that_is_both_current_and_old_is_the_current_one():
    ring = Keyring(b"new", [b"old", b"new"])
    assert len(ring.key_ids) == 2
    assert ring.find(ring.current.key_id) is ring.current


def test_no_key_is_shown():
    ring = Keyring(b"hush hush", [b"be quiet"])
    ring.current.key(KeyPurpose.sealing)
    assert repr(ring) == f"Keyring({', '.join(ring.key_ids)})"
    assert repr(ring.current) == f"SecretKeys({ring.current.key_id})"
