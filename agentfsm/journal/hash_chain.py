"""The hash chain of a journal: checks that the records of a run are whole, in order and unchanged."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentfsm.journal.records import GENESIS_HASH, SealedRecord
from agentfsm.journal.store import Head

__all__ = ["HashChainVerifier", "InvalidRecordError"]

Data = dict[str, Any]

_COMMITMENT = re.compile(r'\{"#":\[(\d+),"([0-9a-f]{64})"\]\}')
_SALTED = re.compile(r'\["((?:[0-9a-f]{2})*)",')
_value_at = json.JSONDecoder().raw_decode


class InvalidRecordError(Exception):
    """A record is not what it should be.

    Args:
        reason: What is wrong with it.
        seq: Its number, where it is another record than the one that was looked at last.
    """

    def __init__(self, reason: str, seq: int | None = None) -> None:
        super().__init__(reason)
        self.seq = seq


class HashChainVerifier:
    """The records of one run, as far as they were looked at.

    Attributes:
        hash: The last record's, in hex.
    """

    def __init__(self) -> None:
        self.hash = GENESIS_HASH
        self._missing: dict[tuple[int, int], None] = {}  # hidden values that are gone
        self._redacted: set[tuple[int, int]] = set()

    def verify_record(self, record: SealedRecord, seq: int) -> Data:
        """The record of a row, as it was hashed.

        Raises:
            BadError: It is not the one that was written there.
        """
        if record.seq != seq:
            raise InvalidRecordError(
                f"it has number {record.seq} where {seq} was to come: a record is missing, or out of order"
            )
        own = hashlib.sha256(b"\0" + bytes.fromhex(self.hash) + record.body.encode()).hexdigest()
        if own != record.hash:
            raise InvalidRecordError("its hash does not fit: it was changed, or what stands before it was")
        self.hash = own
        body: Data = json.loads(record.body)
        if body["seq"] != seq:
            raise InvalidRecordError(f"it says that it is number {body['seq']}")
        self._verify_hidden(record, seq)
        return body

    def _verify_hidden(self, record: SealedRecord, seq: int) -> None:
        refs = _COMMITMENT.findall(record.body)
        if not refs:
            if record.hidden:
                raise InvalidRecordError("values stand beside it that it does not know")
            return
        if not record.hidden:
            raise InvalidRecordError("what it keeps hidden is gone, and nothing says that it was redacted")
        kept = _parse_hidden(record.hidden)
        if len(kept) != len(refs):
            raise InvalidRecordError(f"it keeps {len(refs)} values hidden, and {len(kept)} stand beside it")
        for place, promised in refs:
            found = kept[int(place)]
            if found is None:
                self._missing[seq, int(place)] = None
                continue
            salt, text = found
            if hashlib.sha256(salt + text.encode()).hexdigest() != promised:
                raise InvalidRecordError(f"its hidden value {place} is not the one that was put aside")

    def note_redaction(self, body: Data) -> None:
        """A record says that values of another one are gone."""
        self._redacted.update((body["of"], place) for place in body["places"])

    def finish(self, head: Head | None, checkpoint_hashes: Mapping[int, str], records: Sequence[SealedRecord]) -> None:
        """Look at the whole, once every record was looked at.

        Args:
            head: What the store notes of the last record, where there is a store.
            checkpoint_hashes: Hashes of records by number, from checkpoints.
            records: All rows.

        Raises:
            BadError: Records were cut off, added or written anew, or values are gone that nobody redacted.
        """
        for seq, expected in checkpoint_hashes.items():
            if seq > len(records):
                raise InvalidRecordError(
                    f"a checkpoint knows {seq} records, and {len(records)} are there: the end was cut off"
                )
            if records[seq - 1].hash != expected:
                raise InvalidRecordError(f"a checkpoint knows another record {seq}: the journal was written anew", seq)
        if head is not None and (head.seq, head.hash) != (len(records), self.hash):
            raise InvalidRecordError(
                f"the store notes {head.seq} records with another end: records were cut off or added"
            )
        for seq, place in self._missing:
            if (seq, place) not in self._redacted:
                raise InvalidRecordError(f"hidden value {place} is gone, and nothing says that it was redacted", seq)

    def unfinished_redactions(self) -> list[tuple[int, int]]:
        """Record and place of each value that is to be redacted, and is still there."""
        return sorted(self._redacted - self._missing.keys())


def _parse_hidden(text: str) -> list[tuple[bytes, str] | None]:
    """The salts and the texts that stand beside a record, the texts exactly as they were hashed."""
    found: list[tuple[bytes, str] | None] = []
    entries: list[str] = []
    place = 1
    while text[place : place + 1] not in ("]", ""):
        place += text[place] == ","
        begin = place
        if text.startswith("null", place):
            found.append(None)
            place += 4
        else:
            salted = _SALTED.match(text, place)
            if salted is None:
                raise InvalidRecordError("what stands beside it cannot be read")
            try:
                _, end = _value_at(text, salted.end())
            except ValueError:
                raise InvalidRecordError("what stands beside it cannot be read") from None
            found.append((bytes.fromhex(salted.group(1)), text[salted.end() : end]))
            place = end + 1
        entries.append(text[begin:place])
    if text != f"[{','.join(entries)}]" or not all(each.endswith(("]", "null")) for each in entries):
        raise InvalidRecordError("more stands beside it than the values that it knows")
    return found
