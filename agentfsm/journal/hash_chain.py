"""The hash chain of a journal: where hashes are computed, and the check that no record was changed, moved or removed.

A record's MAC says that someone with the host's secret wrote the record, and vouches for all records before
it, too, whose hashes are part of its hash. So the last record of each commit has one, and the records before it in the
same commit say that the next one vouches for them. It is the first half of ``HMAC-SHA256(key, hash)``, after the
key id of the secret.

A record's hash is ``SHA-256(0x00 || previous hash || body)``; for the first record, the previous hash is 32 zero
bytes. A hidden value is committed to by ``SHA-256(salt || JSON text)``.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agentfsm.journal.records import VOUCHED_BY_NEXT, SealedRecord, is_kind
from agentfsm.journal.store import Head, Lease
from agentfsm.loop.canonical_json import encode
from agentfsm.loop.keys import KeyPurpose, Keyring, SecretKeys

Data = dict[str, Any]

GENESIS_HASH = "0" * 64
"""The previous hash of a run's first record."""

_COMMITMENT = re.compile(r'\{"#":\[(\d+),"([0-9a-f]{64})"\]\}')
_SALTED = re.compile(r'\["((?:[0-9a-f]{2})*)",')
_value_at = json.JSONDecoder().raw_decode


def record_hash(previous: str, body: str) -> str:
    """The hash of a record, 64 hex digits.

    Args:
        previous: The hash of the record before it; ``GENESIS_HASH`` for the first.
        body: The record's canonical JSON.
    """
    return _digest(bytes.fromhex(previous), body).hex()


def _digest(previous: bytes, body: str) -> bytes:
    return hashlib.sha256(b"\0" + previous + body.encode()).digest()


def commitment(salt: bytes, text: str) -> str:
    """The digest that a body holds in place of a hidden value, 64 hex digits."""
    return hashlib.sha256(salt + text.encode()).hexdigest()


class RecordSealer:
    """Seals records with their hashes and MACs."""

    __slots__ = ("_keys",)

    def __init__(self, keys: SecretKeys | None) -> None:
        self._keys = keys

    def seal(self, seq: int, body: str, previous: str, hidden: str = "") -> SealedRecord:
        """The sealed record of a commit that has no other."""
        return self.seal_commit(seq, [(body, hidden)], previous)[0]

    def seal_next(self, lease: Lease, now_ms: int, records: Iterable[tuple[Data, str]]) -> list[SealedRecord]:
        """The sealed records that come next in a run which somebody acquired to write just these.

        Args:
            lease: The lease of the run.
            now_ms: The time, in milliseconds since the epoch.
            records: Kind and fields, and the hidden values, of each.
        """
        first = lease.seq + 1
        texts = [
            (encode({**fields, "seq": seq, "epoch": lease.epoch, "ts": now_ms}), hidden)
            for seq, (fields, hidden) in enumerate(records, first)
        ]
        return self.seal_commit(first, texts, lease.hash)

    def seal_commit(self, first: int, bodies: Iterable[tuple[str, str]], previous: str) -> list[SealedRecord]:
        """The sealed records of one commit; the last one vouches for all of them.

        Args:
            first: The sequence number of the first one.
            bodies: The canonical JSON and the hidden values of each.
            previous: The hash of the record before them; ``GENESIS_HASH`` for the first.
        """
        keys, digest = self._keys, bytes.fromhex(previous)
        vouched = "" if keys is None else VOUCHED_BY_NEXT
        records: list[SealedRecord] = []
        for seq, (body, hidden) in enumerate(bodies, first):
            digest = _digest(digest, body)
            records.append(SealedRecord(seq, body, digest.hex(), hidden, vouched))
        if keys is not None and records:
            last = records[-1]
            mac = keys.seal(KeyPurpose.record, digest)
            records[-1] = SealedRecord(last.seq, last.body, last.hash, last.hidden, mac)
        return records


class InvalidRecordError(Exception):
    """A record was tampered with, or describes something that is not allowed."""

    def __init__(self, reason: str, seq: int | None = None) -> None:
        super().__init__(reason)
        self.seq = seq


class HashChainVerifier:
    """Verifies the hashes and commitments of one run, record by record.

    Attributes:
        hash: The hash of the last verified record, 64 hex digits.
    """

    def __init__(self, after: str = GENESIS_HASH) -> None:
        self.hash = after
        self._missing: dict[tuple[int, int], None] = {}  # hidden values that are gone: record and place
        self._redacted: set[tuple[int, int]] = set()

    def verify_record(self, record: SealedRecord, seq: int) -> Data:
        """The decoded body of the next record, with its commitments.

        Raises:
            InvalidRecordError: It is not the record that was written there.
        """
        if record.seq != seq:
            raise InvalidRecordError(f"it has number {record.seq}, expected {seq}: a record is missing or out of order")
        expected = record_hash(self.hash, record.body)
        if expected != record.hash:
            raise InvalidRecordError("its hash does not match: it was changed, or a record before it was")
        self.hash = expected
        body: Data = json.loads(record.body)
        if body["seq"] != seq:
            raise InvalidRecordError(f"its body has number {body['seq']}")
        self._verify_hidden(record, seq)
        return body

    def _verify_hidden(self, record: SealedRecord, seq: int) -> None:
        commitments = _COMMITMENT.findall(record.body)
        if not commitments:
            if record.hidden:
                raise InvalidRecordError("hidden values are stored beside it, and it has no commitments")
            return
        if not record.hidden:
            raise InvalidRecordError("its hidden values are gone, and no record says that they were redacted")
        entries = parse_hidden(record.hidden)
        if len(entries) != len(commitments):
            raise InvalidRecordError(
                f"it has {len(commitments)} commitments, and {len(entries)} hidden values are stored beside it"
            )
        for place, digest in commitments:
            entry = entries[int(place)]
            if entry is None:
                self._missing[seq, int(place)] = None
                continue
            if commitment(*entry) != digest:
                raise InvalidRecordError(f"its hidden value {place} does not match its commitment")

    def note_redaction(self, body: Data) -> None:
        """Take note of a ``redaction`` record, which says that values of another record are gone."""
        self._redacted.update((body["of"], place) for place in body["places"])

    def finish(self, head: Head | None, checkpoint_hashes: Mapping[int, str], records: Sequence[SealedRecord]) -> None:
        """Check the end of the journal, once every record is verified.

        Raises:
            InvalidRecordError: Records were truncated, added or rewritten, or a hidden value is missing and was
                not redacted.
        """
        for seq, expected in checkpoint_hashes.items():
            if seq > len(records):
                raise InvalidRecordError(
                    f"a checkpoint has {seq} records, and only {len(records)} are there: the end was truncated"
                )
            if records[seq - 1].hash != expected:
                raise InvalidRecordError(f"a checkpoint has another record {seq}: the journal was rewritten", seq)
        if head is not None and (head.seq, head.hash) != (len(records), self.hash):
            raise InvalidRecordError(
                f"the store's head is record {head.seq} with another hash: records were truncated or added"
            )
        for seq, place in self._missing:
            if (seq, place) not in self._redacted:
                raise InvalidRecordError(f"hidden value {place} is gone, and no record says that it was redacted", seq)

    def unfinished_redactions(self) -> list[tuple[int, int]]:
        """Record and place of each value that a record says was redacted, and that is still there."""
        return sorted(self._redacted - self._missing.keys())


class MacVerifier:
    """Verifies the MACs of one run, record by record.

    Args:
        keyring: The keys of the host; without them, only where there are MACs is verified, not what they are.
    """

    def __init__(self, keyring: Keyring | None) -> None:
        self._keyring = keyring
        self._last: str | None = None  # that of the last record
        self._without = False  # whether a record that was not adopted has none
        self._unknown_key_id = ""  # of a record that was not adopted

    def verify_record(self, record: SealedRecord, kind: str) -> None:
        """Verify the MAC of the next record.

        Raises:
            InvalidRecordError: Somebody without the secret wrote it.
        """
        before, self._last = self._last, record.mac
        if not record.mac:
            if before:
                raise InvalidRecordError("it has no MAC, and the record before it has: it was added without the secret")
            self._without = True
            return
        if kind == "run.adopted":
            self._without, self._unknown_key_id = False, ""
        elif self._without:
            raise InvalidRecordError("it has a MAC, and a record before it has none: that one was added or changed")
        if self._keyring is None or record.mac == VOUCHED_BY_NEXT:
            return
        valid = self._keyring.check_seal(KeyPurpose.record, bytes.fromhex(record.hash), record.mac)
        if valid is None:
            self._unknown_key_id = self._unknown_key_id or self._keyring.foreign_key_id(record.mac)
        elif not valid:
            raise InvalidRecordError("its MAC does not match: it was written or changed without the secret")

    def verify_head(self, head: Head | None) -> None:
        """Verify the MAC of what the store keeps about the run, once all records are verified.

        Raises:
            InvalidRecordError: Somebody without the secret wrote it, or the last records.
        """
        if self._last == VOUCHED_BY_NEXT:
            raise InvalidRecordError("the record after it, whose MAC vouches for it, is missing")
        if head is None or self._keyring is None or self._without:
            return
        if not head.mac:
            if self._last:
                raise InvalidRecordError("the store's row of the run has no MAC: it was written without the secret")
            self._without = True  # it has no records
            return
        valid = self._keyring.check_seal(KeyPurpose.run, head.row.encode(), head.mac)
        if valid is None:
            self._unknown_key_id = self._unknown_key_id or self._keyring.foreign_key_id(head.mac)
        elif not valid:
            raise InvalidRecordError("the MAC of the store's row of the run does not match: the row was changed")

    def doubt(self) -> str:
        """Why it is not known who wrote the records, once all are verified; an empty string if it is known."""
        if self._without:
            return "its records have no MACs, so anyone with the file may have written them"
        if self._unknown_key_id:
            return f"its records were sealed under another secret, with key id {self._unknown_key_id}"
        return ""


def foreign_key_id(records: Iterable[SealedRecord], keyring: Keyring) -> str:
    """The key id of a secret that sealed some records and that the host does not have; empty if there is none.

    What was sealed before a run was adopted does not count.
    """
    found = ""
    for record in records:
        if is_kind(record, "run.adopted"):
            found = ""
        if record.mac != VOUCHED_BY_NEXT:
            found = found or keyring.foreign_key_id(record.mac)
    return found


def parse_hidden(text: str) -> list[tuple[bytes, str] | None]:
    """The salt and the JSON text of each hidden value, the text exactly as it was hashed; None for a redacted one.

    Raises:
        InvalidRecordError: They are not written as this package writes them.
    """
    values: list[tuple[bytes, str] | None] = []
    entries: list[str] = []
    place = 1
    while text[place : place + 1] not in ("]", ""):
        place += text[place] == ","
        begin = place
        if text.startswith("null", place):
            values.append(None)
            place += 4
        else:
            salted = _SALTED.match(text, place)
            if salted is None:
                raise InvalidRecordError("its hidden values cannot be read")
            try:
                _, end = _value_at(text, salted.end())
            except ValueError:
                raise InvalidRecordError("its hidden values cannot be read") from None
            values.append((bytes.fromhex(salted.group(1)), text[salted.end() : end]))
            place = end + 1
        entries.append(text[begin:place])
    if text != f"[{','.join(entries)}]" or not all(each.endswith(("]", "null")) for each in entries):
        raise InvalidRecordError("its hidden values are not a JSON array as it was written")
    return values
