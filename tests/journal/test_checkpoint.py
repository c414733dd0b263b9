"""A signed checkpoint detects what a store alone cannot: truncated, rewritten and deleted journals."""

import base64
import hashlib
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519, x25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from agentfsm.errors import JournalError
from agentfsm.journal.checkpoint import CheckpointLog, read_checkpoint, write_checkpoint
from agentfsm.journal.store import Head
from tests.helpers.witness import is_extension

DATE = datetime(2026, 11, 23, 8, 30, tzinfo=UTC)
HEADS = [Head("b", 1, None, 7, "ab" * 32, "finished"), Head('a "run"\n', 1, None, 0, "0" * 64, "running")]
LOG = CheckpointLog().extended(HEADS)


def pair(kind=ed25519.Ed25519PrivateKey):
    key = kind.generate()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return private, key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def test_a_checkpoint_signs_a_log_with_the_head_of_each_run():
    private, public = pair()
    note = read_checkpoint(write_checkpoint(LOG, private, DATE), public)
    assert (note.size, note.date) == (2, DATE)
    assert LOG.begins_with(note)
    assert LOG.hashes(2) == {"b": {7: "ab" * 32}, 'a "run"\n': {0: "0" * 64}}
    assert LOG.hashes(1) == {"b": {7: "ab" * 32}}


def test_a_log_grows_by_the_runs_that_changed_and_a_checkpoint_not_at_all():
    private, public = pair()
    more = [replace(HEADS[0], seq=8, hash="cd" * 32), HEADS[1], replace(HEADS[0], run_id="c")]
    longer = LOG.extended(more)
    assert longer.text == f'{LOG.text}8 {"cd" * 32} "b"\n7 {"ab" * 32} "c"\n'
    assert longer.extended(more).text == longer.text
    assert longer.hashes(4)["b"] == {7: "ab" * 32, 8: "cd" * 32}
    texts = [write_checkpoint(log, private, DATE) for log in (LOG, longer)]
    assert len({len(text) for text in texts}) == 1
    old, new = (read_checkpoint(text, public) for text in texts)
    assert (old.size, new.size) == (2, 4)
    assert longer.begins_with(old)
    assert longer.begins_with(new)
    assert is_extension(new, old, longer.proof(2))
    assert not LOG.begins_with(new)


def test_a_witness_finds_a_log_that_was_rewritten():
    private, public = pair()
    old, other = LOG, CheckpointLog().extended([HEADS[1], HEADS[0], replace(HEADS[0], run_id="c")])
    signed, new = (read_checkpoint(write_checkpoint(log, private, DATE), public) for log in (old, other))
    assert not other.begins_with(signed)
    for proof in (other.proof(2), "", "old 2\n", "old 3\n", "old 2\n\u00e4\n", f"{other.proof(2)}AAAA\n"):
        assert not is_extension(new, signed, proof)


def test_a_line_that_was_not_written_to_its_end_is_left_out_and_any_other_text_refused():
    assert CheckpointLog(f'{LOG.text}8 {"cd" * 32} "b"').text == LOG.text
    for line in ("", "x", f"7 {'ab' * 32} b", f'7 {"ab" * 32} "b', f'7 {"AB" * 32} "b"', f'7 {"ab" * 32} "\\"'):
        with pytest.raises(JournalError, match="not a line of a checkpoint log"):
            CheckpointLog(f"{LOG.text}{line}\n")


def test_a_checkpoint_is_a_signed_note_of_a_transparency_log():
    key = ed25519.Ed25519PrivateKey.generate()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    text, _, signature = write_checkpoint(LOG, private, DATE, "example.com").rpartition("\n\n")
    origin, size, root, date = text.split("\n")
    assert (origin, size, date) == ("example.com", "2", "date 2026-11-23T08:30:00Z")
    left, right = (hashlib.sha256(b"\0" + line.encode()).digest() for line in LOG.text.splitlines())
    assert base64.b64decode(root) == hashlib.sha256(b"\1" + left + right).digest()
    dash, name, encoded = signature.strip().split(" ")
    assert (dash, name) == ("\u2014", "example.com")
    raw = base64.b64decode(encoded)
    public = key.public_key()
    assert raw[:4] == hashlib.sha256(b"example.com\n\x01" + public.public_bytes_raw()).digest()[:4]
    public.verify(raw[4:], (text + "\n").encode())


def test_every_change_of_a_checkpoint_is_found():
    private, public = pair()
    note = write_checkpoint(LOG, private, DATE)
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
        read_checkpoint(write_checkpoint(LOG, private, DATE), pair()[1])


def test_an_invalid_key_or_name_is_refused():
    private, public = pair()
    with pytest.raises(JournalError, match="private key"):
        write_checkpoint(LOG, b"x", DATE)
    with pytest.raises(JournalError, match="private key"):
        write_checkpoint(LOG, public, DATE)
    with pytest.raises(JournalError, match="public key"):
        read_checkpoint("x", b"x")
    assert read_checkpoint(write_checkpoint(LOG, private, DATE), private).size == 2
    with pytest.raises(JournalError, match="Ed25519"):
        write_checkpoint(LOG, pair(x25519.X25519PrivateKey)[0], DATE)
    with pytest.raises(JournalError, match="not a valid checkpoint name"):
        write_checkpoint(LOG, private, DATE, "two words")
