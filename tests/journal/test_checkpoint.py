"""A signed checkpoint detects what a store alone cannot: truncated, rewritten and deleted journals."""

import base64
import hashlib
from datetime import UTC, datetime

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519, x25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from agentfsm.errors import JournalError
from agentfsm.journal.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from agentfsm.journal.store import Head

DATE = datetime(2026, 11, 23, 8, 30, tzinfo=UTC)
HEADS = [Head("b", 1, None, 7, "ab" * 32, "finished"), Head('a "run"\n', 1, None, 0, "0" * 64, "running")]


def pair(kind=ed25519.Ed25519PrivateKey):
    key = kind.generate()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return private, key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def test_a_checkpoint_has_the_head_of_each_run():
    private, public = pair()
    note = write_checkpoint(HEADS, private, DATE)
    assert read_checkpoint(note, public) == Checkpoint({"b": (7, "ab" * 32), 'a "run"\n': (0, "0" * 64)}, DATE)


def test_a_checkpoint_is_a_signed_note_of_a_transparency_log():
    key = ed25519.Ed25519PrivateKey.generate()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    text, _, signature = write_checkpoint(HEADS, private, DATE, "example.com").rpartition("\n\n")
    origin, size, root, *lines = text.split("\n")
    assert (origin, size, lines[0]) == ("example.com/runs", "2", "date 2026-11-23T08:30:00Z")
    assert base64.b64decode(root) == hashlib.sha256("".join(f"{x}\n" for x in lines).encode()).digest()
    dash, name, encoded = signature.strip().split(" ")
    assert (dash, name) == ("\u2014", "example.com")
    raw = base64.b64decode(encoded)
    public = key.public_key()
    assert raw[:4] == hashlib.sha256(b"example.com\n\x01" + public.public_bytes_raw()).digest()[:4]
    public.verify(raw[4:], (text + "\n").encode())


def test_every_change_of_a_checkpoint_is_found():
    private, public = pair()
    note = write_checkpoint(HEADS, private, DATE)
    for at in range(len(note) - 1):
        changed = note[:at] + chr(ord(note[at]) ^ 1) + note[at + 1 :]
        with pytest.raises(JournalError):
            read_checkpoint(changed, public)
    for text in ("", "x", note.rpartition("\n\n")[0], note * 2):
        with pytest.raises(JournalError):
            read_checkpoint(text, public)


def test_another_key_is_refused():
    private, _ = pair()
    with pytest.raises(JournalError, match="no valid signature of this key"):
        read_checkpoint(write_checkpoint(HEADS, private, DATE), pair()[1])


def test_an_invalid_key_or_name_is_refused():
    private, public = pair()
    with pytest.raises(JournalError, match="private key"):
        write_checkpoint(HEADS, b"x", DATE)
    with pytest.raises(JournalError, match="private key"):
        write_checkpoint(HEADS, public, DATE)
    with pytest.raises(JournalError, match="public key"):
        read_checkpoint("x", private)
    with pytest.raises(JournalError, match="Ed25519"):
        write_checkpoint(HEADS, pair(x25519.X25519PrivateKey)[0], DATE)
    with pytest.raises(JournalError, match="not a valid checkpoint name"):
        write_checkpoint(HEADS, private, DATE, "two words")


def test_a_checkpoint_from_before_dates_is_read():
    key = ed25519.Ed25519PrivateKey.generate()
    run = f'7 {"ab" * 32} "b"\n'
    text = f"old/runs\n1\n{base64.b64encode(hashlib.sha256(run.encode()).digest()).decode()}\n{run}"
    public = key.public_key()
    key_id = hashlib.sha256(b"old\n\x01" + public.public_bytes_raw()).digest()[:4]
    signature = base64.b64encode(key_id + key.sign(text.encode())).decode()
    pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    assert read_checkpoint(f"{text}\n\u2014 old {signature}\n", pem) == Checkpoint({"b": (7, "ab" * 32)}, None)
