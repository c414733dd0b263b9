"""Signed checkpoints of a store: how far its log of runs' heads had come, as a signed note that is kept elsewhere.

A hash chain proves that nothing inside it was changed. It cannot prove that its end was not truncated, or that the
whole journal was not rewritten; a checkpoint can. The *log* has a line (``seq hash "run id"``) for the head of each run
that had changed when a checkpoint was made, one (``hold milliseconds hash "run id"``) for each hold that had, and is
only ever appended to. A checkpoint signs its length and its root
hash in the formats of transparency logs (RFC 6962, C2SP ``tlog-checkpoint`` and ``signed-note``): origin, number of
entries, root, the date (``date 2026-11-23T08:30:00Z``), a blank line, and an Ed25519 signature. So it has the same size
for any number of runs, and whoever kept an earlier one can check that a later one extends it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from agentfsm.errors import JournalError, MissingExtraError, StoreError
from agentfsm.journal.maintenance import Damage, SignedHold, find_changed_holds
from agentfsm.journal.purge import verify_tombstone
from agentfsm.journal.signals import find_foreign_signals
from agentfsm.journal.store import Head, Store
from agentfsm.journal.verification import GOOD, TAMPERED, CheckpointHashes, VerificationReport, with_doubt
from agentfsm.loop.keys import Keyring

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

_ENTRY = re.compile(r'(hold )?(\d+) ([0-9a-f]{64}) (".*")')
_HOLD = "hold "
_DATE = "date %Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose signature is valid.

    Attributes:
        size: The number of entries that the log had.
        root: The root hash of their Merkle tree.
        date: When it was written, in UTC.
    """

    size: int
    root: bytes
    date: datetime


@dataclass(frozen=True, slots=True)
class SignedHeads:
    """What a checkpoint signed, as the log of its store says.

    Attributes:
        date: When it was written, in UTC.
        hashes: For each run, hashes of some of its records by their sequence numbers.
        holds: What it signed of the holds, by run.
    """

    date: datetime
    hashes: Mapping[str, Mapping[int, str]]
    holds: Mapping[str, SignedHold] = field(default_factory=dict[str, SignedHold])


class CheckpointLog:
    """The heads of runs, in the order in which checkpoints found them changed.

    Args:
        text: The log; a last line that was not written to its end is left out.

    Attributes:
        text: Its complete lines.

    Raises:
        JournalError: A line is not an entry.
    """

    def __init__(self, text: str = "") -> None:
        self.text = text[: text.rfind("\n") + 1]
        self._entries = self.text.split("\n")[:-1]
        self._parsed = [_read_entry(entry) for entry in self._entries]

    def __len__(self) -> int:
        """The number of entries."""
        return len(self._entries)

    def extended(self, heads: Iterable[Head], holds: Mapping[str, SignedHold] | None = None) -> CheckpointLog:
        """The log with an entry more for each head of a run, and each hold, that is not the last one that it has."""
        last = {(run_id, kind): (number, digest) for run_id, kind, number, digest in self._parsed}
        now = {(head.run_id, ""): (head.seq, head.hash) for head in heads}
        now |= {(run_id, _HOLD): hold for run_id, hold in (holds or {}).items()}
        changed = ((which, entry) for which, entry in now.items() if last.get(which) != entry)
        lines = (f"{kind}{number} {digest} {json.dumps(run_id)}\n" for (run_id, kind), (number, digest) in changed)
        return CheckpointLog(self.text + "".join(lines))

    def root(self, size: int) -> bytes:
        """The root hash of the first entries."""
        return root_hash(leaf_hash(entry.encode()) for entry in self._entries[:size])

    def begins_with(self, checkpoint: Checkpoint) -> bool:
        """Whether its first entries are those that were signed."""
        return checkpoint.size <= len(self) and self.root(checkpoint.size) == checkpoint.root

    def hashes(self, size: int) -> dict[str, Mapping[int, str]]:
        """Hashes of records by sequence number, for each run of the first entries."""
        found: dict[str, dict[int, str]] = {}
        for run_id, kind, seq, digest in self._parsed[:size]:
            if not kind:
                found.setdefault(run_id, {})[seq] = digest
        return dict(found)

    def holds(self, size: int) -> dict[str, SignedHold]:
        """The last hold of each run that has one among the first entries."""
        return {run_id: (at, digest) for run_id, kind, at, digest in self._parsed[:size] if kind}

    def proof(self, size: int) -> str:
        """What shows that the log extends its first entries, as C2SP ``tlog-witness`` has it: ``old SIZE``, and hashes.

        With a blank line and the new checkpoint after it, it is the request that a witness gets.
        """
        hashes = extension_proof([leaf_hash(entry.encode()) for entry in self._entries], size)
        return "".join(f"{line}\n" for line in (f"old {size}", *(_base64(each) for each in hashes)))


def write_checkpoint(log: CheckpointLog, key: bytes, date: datetime, name: str = "agentfsm") -> str:
    """A signed checkpoint of a log. It says nothing about the records of its runs: verify those first.

    Args:
        log: The log.
        key: An Ed25519 private key as PEM (``openssl genpkey -algorithm ed25519``).
        date: The date of the checkpoint, with its time zone; it is written to the second, in UTC.
        name: The name of the log and of the key; without spaces and plus signs.

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
    size = len(log)
    lines = (name, str(size), _base64(log.root(size)), date.astimezone(UTC).strftime(_DATE))
    text = "".join(f"{line}\n" for line in lines)
    signature = _key_id(name, signer.public_key()) + signer.sign(text.encode())
    return f"{text}\n\u2014 {name} {_base64(signature)}\n"


def read_checkpoint(text: str, key: bytes) -> Checkpoint:
    """The checkpoint in a signed note.

    Args:
        text: The signed note.
        key: The Ed25519 key as PEM: the public one (``openssl pkey -in key.pem -pubout``), or the private one.

    Raises:
        JournalError: The text is not a checkpoint, its signature is not valid, or the key is not an Ed25519 key.
        MissingExtraError: The package for signatures is not installed.
    """
    public = _load_public_key(key)
    body, blank, signatures = text.rpartition("\n\n")
    lines = body.split("\n")
    if not blank or len(lines) != 4:
        raise JournalError("the text is not a checkpoint")
    name, size, root, date = lines
    if not any(_is_valid_signature(line, name, f"{body}\n", public) for line in signatures.splitlines()):
        raise JournalError("the checkpoint has no valid signature of this key")
    try:
        return Checkpoint(
            int(size), base64.b64decode(root, validate=True), datetime.strptime(date, _DATE).replace(tzinfo=UTC)
        )
    except ValueError:
        raise JournalError("the checkpoint's size, root hash or date cannot be read") from None


def _read_entry(line: str) -> tuple[str, str, int, str]:
    """Run, kind, number and hash in a line of a log."""
    match = _ENTRY.fullmatch(line)
    try:
        if match is not None:
            return str(json.loads(match[4])), match[1] or "", int(match[2]), match[3]
    except ValueError:
        pass
    raise JournalError(f"{line[:200]!r} is not a line of a checkpoint log")


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _is_valid_signature(line: str, name: str, signed: str, public: Ed25519PublicKey) -> bool:
    from cryptography.exceptions import InvalidSignature

    dash, _, rest = line.partition(" ")
    signer, _, encoded = rest.partition(" ")
    try:
        signature = base64.b64decode(encoded, validate=True)
    except ValueError:
        return False
    if _base64(signature) != encoded:  # its unused bits were changed
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
    if b"PRIVATE KEY" in key:
        return _load_private_key(key).public_key()
    try:
        loaded = load_pem_public_key(key)
    except (ValueError, TypeError) as error:
        raise JournalError("the key is not a public key in PEM format") from error
    if not isinstance(loaded, Ed25519PublicKey):
        raise JournalError("the key is not an Ed25519 key")
    return loaded


# -- the Merkle tree of a transparency log (RFC 6962) ----------------------------------------------------


def leaf_hash(entry: bytes) -> bytes:
    """The hash of an entry."""
    return hashlib.sha256(b"\0" + entry).digest()


def _node_hash(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\1" + left + right).digest()


def root_hash(leaves: Iterable[bytes]) -> bytes:
    """The root of a tree, in one pass and with memory for its height only."""
    peaks: list[bytes] = []  # the roots of its complete subtrees, the largest first
    for number, leaf in enumerate(leaves, 1):
        node, size = leaf, number
        while not size & 1:  # this leaf completes a subtree
            node, size = _node_hash(peaks.pop(), node), size >> 1
        peaks.append(node)
    root = peaks.pop() if peaks else hashlib.sha256().digest()
    while peaks:
        root = _node_hash(peaks.pop(), root)
    return root


def extension_proof(leaves: Sequence[bytes], size: int) -> list[bytes]:
    """The hashes with which somebody who has only two roots can check that one tree extends the other.

    Args:
        leaves: The hashes of the longer log's entries.
        size: The number of entries of the shorter one.
    """
    if not 0 < size < len(leaves):
        return []
    proof: list[bytes] = []
    begin, end, whole = 0, len(leaves), True  # the subtree in which the shorter log ends; whole: it begins the tree
    while begin + size < end:
        middle = 1 << (end - begin - 1).bit_length() - 1
        if size <= middle:
            proof.append(root_hash(leaves[begin + middle : end]))
            end = begin + middle
        else:
            proof.append(root_hash(leaves[begin : begin + middle]))
            begin, size, whole = begin + middle, size - middle, False
    if not whole:
        proof.append(root_hash(leaves[begin:end]))
    return proof[::-1]


# -- what a checkpoint says of a store -------------------------------------------------------------------


async def verify_store(
    store: Store,
    keyring: Keyring | None = None,
    signed: SignedHeads | None = None,
    run_ids: Collection[str] = (),
) -> list[VerificationReport]:
    """What is wrong with a store itself, which the journal of none of its runs shows.

    That is its tables; rows of no run; runs that a checkpoint signed and that are gone; and tombstones of purged runs,
    holds and waiting answers that were not written with the secret.

    Args:
        store: The store.
        keyring: The keys of its host, or None.
        signed: What a checkpoint signed, or None if there is none.
        run_ids: The runs that are asked about, besides the tables; empty for everything.

    Returns:
        A report on each problem, by its run or by ``(schema)``; empty if there is none.

    Raises:
        agentfsm.errors.StoreError: The store cannot be read.
    """
    tables = await store.maintenance.schema_damage()
    try:
        rows = await _verify_rows(store, keyring, signed, run_ids)
    except StoreError:
        if not tables:
            raise
        rows = []  # they cannot be read for that reason
    return [*map(_report, tables), *rows]


async def _verify_rows(
    store: Store, keyring: Keyring | None, signed: SignedHeads | None, run_ids: Collection[str]
) -> list[VerificationReport]:
    """What is wrong with rows that are not records of the runs that are there."""
    hashes: CheckpointHashes = {} if signed is None else signed.hashes
    holds: Mapping[str, SignedHold] = {} if signed is None else signed.holds
    purged = {each.run_id: each for each in await store.maintenance.tombstones() if each.seq}
    found = [with_doubt(verify_tombstone(each, keyring, hashes.get(run_id))) for run_id, each in purged.items()]
    stored = set[str]() if signed is None else {head.run_id for head in await store.heads()}
    reason = "the checkpoint has it, and the store does not"
    gone = [run_id for run_id in hashes if run_id not in purged and run_id not in stored]
    found += [VerificationReport(run_id, TAMPERED, 0, None, reason) for run_id in gone]
    kept = {run_id: hold for run_id, hold in holds.items() if run_id in stored}
    damage = find_changed_holds(await store.maintenance.holds(), keyring, kept)
    if not run_ids:
        damage += await store.maintenance.row_damage()
        damage += [] if keyring is None else await find_foreign_signals(store.signals, keyring)
    found += map(_report, damage)
    return [each for each in found if each.code != GOOD and (not run_ids or each.run_id in run_ids)]


def _report(damage: Damage) -> VerificationReport:
    return VerificationReport(damage.where, TAMPERED, damage.records, damage.seq, damage.reason)
