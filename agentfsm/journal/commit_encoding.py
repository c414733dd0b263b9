"""The records of one commit as one row of a store, and back.

A row has only what cannot be computed: of the hashes the last, of the MACs the last, and no commitment to a value that
is there. What remains of the bodies is compressed with a dictionary of shapes. Hidden values stand uncompressed in a
column of their own, where they can be deleted, and a value that a commit has several times, such as an argument that
waits for approval, is there once.

Records that were not made by this package, or by a release before rows had several records, are stored one by one as
they are: a body that is text is that of a single record.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from itertools import islice
from typing import Any, NamedTuple

from agentfsm.errors import StoreError
from agentfsm.journal.hash_chain import GENESIS_HASH, InvalidRecordError, parse_hidden, record_hash
from agentfsm.journal.records import VOUCHED_BY_NEXT, SealedRecord


class JournalRow(NamedTuple):
    """A row of the journal, of one run.

    Attributes:
        seq: The sequence number of its last record.
        body: The records: bytes; or text, the body of a single record.
        hash: The hash of its last record, in hex.
        hidden: The hidden values: bytes; or text, those of a single record; None if there are none.
        mac: The MAC of its last record, in hex; None if it has none; empty if the MAC of the next record vouches for
            it.
    """

    seq: int
    body: bytes | str
    hash: str
    hidden: bytes | str | None = None
    mac: str | None = None


MAX_BODY_BYTES = 1 << 24
"""The bodies of more bytes than that are stored one by one; so many are read from a row, whatever it contains."""

_FORMAT = b"\1"
"""What a row of several records begins with: the number of the dictionary."""

_WINDOW_BITS = -12  # without a header and a checksum; a small window costs less to prepare
_SEQ, _DIGEST = "\1", "\2"  # in place of what is computed; no JSON has such characters
_CONTROL = bytes(range(32))
_COMMITMENT = re.compile(r'(\{"#":\[(\d+)),"([0-9a-f]{64})"\]\}')
_MARK = re.compile(r'(\{"#":\[(\d+))\x02')
_SALT_BYTES, _DIGEST_BYTES = 16, 32
_REDACTED, _REPEATED, _LENGTHS = 0, 1, 2  # what a hidden value begins with: lengths begin at 2

_RARE = [
    '{"attempt":2,"eid":"1","epoch":1,"kind":"effect.intent","name":"a","policy":"once","request":{"messages":{"#":[0\2}',
    '{"epoch":1,"failure":{"blockers":{"#":[2\2,"explanation":{"#":[3\2,"kind":"provider_error","metadata":{}},'
    '"kind":"transition","out":{"call_failed":{"failure":{"blockers":{"#":[0\2,"explanation":{"#":[1\2,"kind":'
    '"transient_provider","metadata":{"#":[2\2}}},\1,"to":"recover","transition":"call_llm.transient_provider",',
    '"out":{"read":{"malformed":{"#":[0\2}},\1,"to":"recover","transition":"post_llm.output_malformed","tried":"001",',
    '"out":{"recovered":{"action":"retry","backoff_s":{"$float":"2.0"},"retry_calls":true}},\1,"to":"dispatch_tool",'
    '"transition":"recover.retry_tool","tried":"000001","ts":17,"us":[2000000,0]}',
    '"action":"handoff"}},\1,"to":"terminal","transition":"recover.stop",',
    '"ending":"Handoff","ending":"PartialRunSummary",',
    '"out":{"judged":{}},\1,"to":"terminal","transition":"post_tool.declared_done","tried":"001","ts":17',
    '"error_class":"ValueError","failure":{"explanation":{"#":[1\2,"kind":"tool_error","retryable":true,"status":"failed"',
    '{"epoch":1,"failure":{"explanation":{"#":[0\2,"kind":"environment_error","metadata":{"#":[1\2},"kind":"transition",'
    '"out":{"judged":{}},\1,"to":"recover","transition":"post_tool.environment_error","tried":"000000000000001","ts":17',
    '{"epoch":1,"kind":"transition","out":{"recovered":{"action":"retry"}},\1,"to":"pre_step",'
    '"transition":"recover.otherwise","tried":"0000001","ts":17',
    '{"epoch":2,"from":"interrupted","from":"approval","kind":"run.resumed",\1,"to":{"hash":"","seq":',
    '{"epoch":2,"kind":"transition","out":{"answered":{"reply":{"arguments":{"#":[0\2,"by":{"#":[0\2,"kind":"allow","text"'
    ':{"#":[0\2}}},\1,"to":"dispatch_tool","transition":"suspended.approval_decided","tried":"0001","ts":17',
    '{"epoch":1,"kind":"transition","out":{"parked":{"waiting":{"arguments":{"#":[0\2,"call_id":"call_1","kind":'
    '"approval","question":{"#":[1\2,"tool":"a","tool_digest":""}}},\1,"to":"suspended",'
    '"transition":"dispatch_tool.approval_required","tried":"001","ts":17',
    '{"epoch":1,"events":1,"expires":null,"id":"","kind":"run.suspended",\1,"ts":17,"waiting":{"arguments":{"#":[0\2,',
    '{"epoch":1,"kind":"transition","out":{"judged":{}},\1,"to":"dispatch_tool","transition":"post_tool.calls_pending",'
    '"tried":"0000001","ts":17',
    '{"epoch":1,"kind":"transition","out":{"read":{"answer":{"is":"text"}}},\1,"to":"terminal",'
    '"transition":"post_llm.otherwise","tried":"000000001","ts":17',
    '{"ending":"RunCompleted","epoch":1,"kind":"run.finished",\1,"ts":17',
]

_STEP = [
    '"message":{"content":{"#":[0\2,"role":"assistant","tool_calls":[{"arguments":{"#":[1\2,"id":"call_1","name":"a"}]},'
    '"usage":{"cached_tokens":1,"input_tokens":1000,"output_tokens":100}}}},\1,',
    '{"epoch":1,"kind":"transition","out":{"replied":{"reply":{"finish_reason":"tool_calls","message":{"role":"assistant",'
    '"tool_calls":[{"arguments":{"#":[0\2,"id":"call_1","name":"a"}]}}}},\1,"to":"post_llm",'
    '"transition":"call_llm.otherwise","tried":"000001","ts":17,"us":[1000,10]}',
    '{"epoch":1,"kind":"transition","out":{"read":{"calls":"reply"}},\1,"to":"dispatch_tool",'
    '"transition":"post_llm.tool_calls","tried":"00000001","ts":17}',
    '{"eid":"1.0","epoch":1,"kind":"effect.intent","name":"a","policy":"once",\1,"ts":17}',
    '{"eid":"1.0","epoch":1,"kind":"effect.result","out":{"call_id":"call_1","content":{"#":[0\2,"name":"a"},\1,"ts":17}',
    '{"epoch":1,"kind":"transition","out":{"ran":{"results":["1.0"]}},\1,"to":"post_tool",'
    '"transition":"dispatch_tool.otherwise","tried":"00001","ts":17,"us":[100,10]}',
    '{"epoch":1,"kind":"transition","out":{"judged":{}},\1,"to":"pre_step","transition":"post_tool.otherwise",'
    '"tried":"00000000000000001","ts":17}',
    '{"epoch":1,"kind":"transition","out":{"checked":{}},\1,"to":"call_llm","transition":"pre_step.otherwise",'
    '"tried":"000000001","ts":17,"us":[0,10]}',
    '{"eid":"1","epoch":1,"kind":"effect.intent","name":"a","policy":"again",\1,"ts":17}',
]

DICTIONARY = "\n".join([*_RARE, *_STEP]).encode()
"""Dictionary 1: shapes of records, with made-up values. What is most frequent comes last, where it takes fewer bits.

It is never made from users' records: what is deleted from a store would live on in it. Rows name the dictionary with
which they were written, so a dictionary that was released never changes; a better one gets the next number."""

_COMPRESSOR = zlib.compressobj(3, zlib.DEFLATED, _WINDOW_BITS, 5, zdict=DICTIONARY)
"""Copied for each commit, which takes less time than reading the dictionary again. A higher level would make a commit
of 70 bytes 5 bytes shorter, and take a quarter more time."""
_DECOMPRESSOR = zlib.decompressobj(_WINDOW_BITS, zdict=DICTIONARY)


class _Value(NamedTuple):
    """A hidden value: its salt and its JSON text; for a redacted one, no salt, and the digest that its body has."""

    salt: bytes
    data: bytes

    def digest(self) -> str:
        """The digest of the commitment to it, 64 hex digits."""
        return sha256(self.salt + self.data).hexdigest() if self.salt else self.data.hex()

    def text(self) -> str:
        """The value as ``SealedRecord.hidden`` has it."""
        return f'["{self.salt.hex()}",{self.data.decode()}]' if self.salt else "null"


class _NotPackableError(Exception):
    """The records would not be read as they are written."""


# -- writing ------------------------------------------------------------------------------------------------


def encode_commit(records: Sequence[SealedRecord]) -> list[JournalRow]:
    """The rows for the records of one commit: one, if they are as this package writes them."""
    try:
        return [_pack(records)] if records else []
    except (_NotPackableError, InvalidRecordError, ValueError):
        return [_plain(record) for record in records]


def _plain(record: SealedRecord) -> JournalRow:
    mac = "" if record.mac == VOUCHED_BY_NEXT else record.mac or None
    return JournalRow(record.seq, record.body, record.hash, record.hidden or None, mac)


def _pack(records: Sequence[SealedRecord]) -> JournalRow:
    last = records[-1]
    vouched = VOUCHED_BY_NEXT if last.mac else ""
    bodies: list[str] = []
    values: list[_Value] = []
    for expected, record in enumerate(records, last.seq - len(records) + 1):
        seq, body, _, hidden, mac = record
        if hidden or '{"#":[' in body:
            body = _pack_values(body, hidden, values)
        packed = body.replace(f'"seq":{seq}', _SEQ, 1)
        if seq != expected or (mac != vouched and record is not last) or packed == body:
            raise _NotPackableError
        bodies.append(packed)
    data = "\n".join(bodies).encode()
    marks = 2 * len(bodies) - 1 + len(values)
    if len(data) > MAX_BODY_BYTES or len(data.translate(None, _CONTROL)) != len(data) - marks:
        raise _NotPackableError
    compressor = _COMPRESSOR.copy()
    compressed = _FORMAT + compressor.compress(data) + compressor.flush()
    sealed = "" if last.mac == VOUCHED_BY_NEXT else last.mac or None
    return JournalRow(last.seq, compressed, last.hash, _join_values(values) if values else None, sealed)


def _pack_values(body: str, hidden: str, values: list[_Value]) -> str:
    """A body without the digests of its hidden values, which are added to others of its commit."""
    if hidden[35:37] == '",' and body.count('{"#":[') == 1:  # a single value: it need not be parsed
        value = _Value(bytes.fromhex(hidden[3:35]), hidden[37:-2].encode())
        packed = body.replace(f'{{"#":[0,"{value.digest()}"]}}', f'{{"#":[0{_DIGEST}', 1)
        if packed == body or not (hidden.startswith(f'[["{value.salt.hex()}"') and hidden.endswith("]]")):
            raise _NotPackableError
        values.append(value)
        return packed
    pairs = parse_hidden(hidden) if hidden else []
    digests = {int(place): digest for _, place, digest in _COMMITMENT.findall(body)}
    added = [_committed(pair, digests.get(place, "")) for place, pair in enumerate(pairs)]
    packed, count = _COMMITMENT.subn(rf"\1{_DIGEST}", body)
    if count != len(added) or _hidden_text(added) != hidden:
        raise _NotPackableError
    values += added
    return packed


def _committed(pair: tuple[bytes, str] | None, digest: str) -> _Value:
    """A hidden value of a record whose body commits to it by a digest."""
    value = _Value(b"", bytes.fromhex(digest)) if pair is None else _Value(pair[0], pair[1].encode())
    if value.digest() != digest or (pair is not None and len(value.salt) != _SALT_BYTES):
        raise _NotPackableError
    return value


def _hidden_text(values: Sequence[_Value]) -> str:
    return f"[{','.join([value.text() for value in values])}]" if values else ""


def _join_values(values: Iterable[_Value]) -> bytes:
    """Hidden values as a column has them."""
    parts: list[bytes] = []
    places: dict[bytes, int] = {}
    for place, (salt, data) in enumerate(values):
        first = places.setdefault(data, place) if salt else place
        if not salt:
            parts += (_number(_REDACTED), data)
        elif first != place:
            parts += (_number(_REPEATED), _number(first), salt)
        else:
            parts += (_number(len(data) + _LENGTHS), salt, data)
    return b"".join(parts)


def _number(value: int) -> bytes:
    """A number in groups of seven bits, the lowest first; the highest bit of a byte says that more follow."""
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    made.append(value)
    return bytes(made)


# -- reading ------------------------------------------------------------------------------------------------


def decode_rows(rows: Iterable[JournalRow], previous: str, after: int = 0) -> list[SealedRecord]:
    """The records in consecutive rows of a run.

    A row that cannot be read gives one record, without a body, which no verification passes.

    Args:
        rows: The rows.
        previous: The hash of the record before the first one in them.
        after: The sequence number after which records are wanted.
    """
    records: list[SealedRecord] = []
    next_seq: int | None = None
    for row in rows:
        try:
            found = _unpack(row, previous) if isinstance(row.body, bytes) else [_single(row, _as_text(row.body))]
        except (ValueError, LookupError, TypeError, zlib.error):
            found = [_single(row._replace(seq=next_seq or min(row.seq, after + 1), hidden=None), "")]
        records += found
        previous, next_seq = row.hash, found[-1].seq + 1
    return records if not records or records[0].seq > after else [each for each in records if each.seq > after]


def run_id_in(rows: Iterable[JournalRow]) -> str:
    """The id of a run, by the first of its records in some rows; empty if it cannot be read there."""
    try:
        return str(json.loads(decode_rows(rows, GENESIS_HASH)[0].body)["run"])
    except (ValueError, LookupError, TypeError):
        return ""


def _single(row: JournalRow, body: str) -> SealedRecord:
    return SealedRecord(row.seq, body, row.hash, _as_text(row.hidden), _mac_text(row))


def _mac_text(row: JournalRow) -> str:
    return "" if row.mac is None else row.mac or VOUCHED_BY_NEXT


def _as_text(value: Any) -> str:
    """What a column has that should have text: a flipped bit on a disk may change the type of a value."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return "" if value is None else str(value)


def _unpack(row: JournalRow, previous: str) -> list[SealedRecord]:
    bodies = _read_bodies(row.body)
    values = _split_values(row.hidden)
    mac = _mac_text(row)
    records: list[SealedRecord] = []
    for seq, packed in enumerate(bodies, row.seq - len(bodies) + 1):
        body, hidden = packed, ""
        if count := packed.count(_DIGEST):
            own = list(islice(values, count))
            digests = [value.digest() for value in own]
            body = _MARK.sub(lambda mark, of=digests: f'{mark[1]},"{of[int(mark[2])]}"]}}', packed)  # type: ignore[misc]
            hidden = _hidden_text(own)
        body = body.replace(_SEQ, f'"seq":{seq}', 1)
        if seq == row.seq:
            records.append(SealedRecord(seq, body, row.hash, hidden, mac))
        else:
            previous = record_hash(previous, body)
            records.append(SealedRecord(seq, body, previous, hidden, VOUCHED_BY_NEXT if mac else ""))
    if next(values, None) is not None:
        raise ValueError("there are more hidden values than commitments")
    return records


def _read_bodies(packed: Any) -> list[str]:
    if not packed.startswith(_FORMAT):
        raise ValueError("the dictionary is unknown")
    decompressor = _DECOMPRESSOR.copy()
    data = decompressor.decompress(packed[len(_FORMAT) :], MAX_BODY_BYTES)
    if not decompressor.eof or decompressor.unused_data:
        raise ValueError("the records are cut off, or something follows them")
    return data.decode().split("\n")


def _split_values(column: Any) -> Iterator[_Value]:
    """The hidden values in a column."""
    data: bytes = column or b""
    texts: list[bytes] = []
    at = 0
    while at < len(data):
        kind, at = _read_number(data, at)
        if kind == _REDACTED:
            value, at = _Value(b"", data[at : at + _DIGEST_BYTES]), at + _DIGEST_BYTES
        elif kind == _REPEATED:
            place, at = _read_number(data, at)
            value, at = _Value(data[at : at + _SALT_BYTES], texts[place]), at + _SALT_BYTES
        else:
            salt, at = data[at : at + _SALT_BYTES], at + _SALT_BYTES
            value, at = _Value(salt, data[at : at + kind - _LENGTHS]), at + kind - _LENGTHS
        if at > len(data):
            raise ValueError("the hidden values are cut off")
        texts.append(value.data)
        yield value


def _read_number(data: bytes, at: int) -> tuple[int, int]:
    """The number at a place, and the place after it."""
    value = shift = 0
    while True:
        byte = data[at]
        value, shift, at = value | (byte & 0x7F) << shift, shift + 7, at + 1
        if byte <= 0x7F:
            return value, at


# -- redaction ----------------------------------------------------------------------------------------------


def replace_hidden(row: JournalRow, seq: int, hidden: str) -> bytes | str | None:
    """The hidden values of a row, with those of one record replaced. Nothing else of the row changes.

    Args:
        row: The row that has the record.
        seq: The record.
        hidden: The hidden values that remain, as ``SealedRecord.hidden``.

    Raises:
        StoreError: They are not what the record commits to, or the row cannot be read.
    """
    if not isinstance(row.body, bytes):
        return hidden
    values: list[_Value] = []
    try:
        for record in _unpack(row, row.hash):  # hashes are not looked at
            _pack_values(record.body, hidden if record.seq == seq else record.hidden, values)
    except (_NotPackableError, InvalidRecordError, ValueError, LookupError, zlib.error):
        raise StoreError(
            f"record {seq} cannot be redacted: the store's row cannot be read, or has other values"
        ) from None
    return _join_values(values) or None
