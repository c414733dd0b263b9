"""Verifies a stored or exported journal: hash chain, legal history, store head and checkpoint.

What is checked:

1. Sequence numbers increase by one, and every hash matches its record and the previous hash.
2. Hidden values match their commitments; a missing value was redacted, and a record says so.
3. The run did only what its pinned graph allows (``history_verifier``).
4. Where records have MACs, all later ones have them, and with the host's secret each of them is verified, and the MAC
   of what the store keeps about the run.
5. The store's head of the run (last record, status, epoch) agrees, and so does a checkpoint, if given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from agentfsm.errors import JournalError, StoreError, UnknownRunError
from agentfsm.journal.hash_chain import HashChainVerifier, InvalidRecordError, MacVerifier
from agentfsm.journal.history_verifier import HistoryVerifier, KnownHistory, UnsupportedFormatError
from agentfsm.journal.records import SealedRecord, is_kind, read_line
from agentfsm.journal.store import Head, Store, consistent_read, off_loop
from agentfsm.loop.keys import SECRET_VARIABLE, Keyring

GOOD, TAMPERED, UNVERIFIABLE, OPEN = 0, 1, 3, 4
"""Exit codes of ``agentfsm verify``; 2 is wrong usage."""


@dataclass(frozen=True)
class VerificationReport:
    """The result of verifying one run's journal.

    Attributes:
        run_id: The run.
        code: ``GOOD``, ``TAMPERED``, ``UNVERIFIABLE`` (it cannot be read or has another format) or ``OPEN`` (good,
            but the run has not finished).
        records: Number of records in the journal.
        seq: The first invalid record, or None.
        reason: What is wrong with it, or an empty string.
        open: What is unfinished, one line each.
        doubt: Why it is not known who wrote the journal, although the secret is given; empty if it is known.
        claimed: The ids of actors who voted, and for whom no host vouched.
    """

    run_id: str
    code: int
    records: int
    seq: int | None = None
    reason: str = ""
    open: tuple[str, ...] = ()
    doubt: str = ""
    claimed: tuple[str, ...] = ()


def verify(
    run_id: str,
    records: Sequence[SealedRecord],
    head: Head | None = None,
    checkpoint_hashes: Mapping[int, str] | None = None,
    keyring: Keyring | None = None,
) -> VerificationReport:
    """Verify a run's journal.

    Args:
        run_id: The run.
        records: Its records, from the first.
        head: The run's head in its store, if there is a store.
        checkpoint_hashes: Hashes of records by sequence number, from checkpoints with a valid signature.
        keyring: The keys of the host that wrote it; without them, nothing shows who did.
    """
    chain, macs, history = HashChainVerifier(), MacVerifier(keyring), HistoryVerifier(run_id)
    seq = 0
    try:
        for seq, record in enumerate(records, 1):
            body = chain.verify_record(record, seq)
            macs.verify_record(record, body["kind"])
            history.verify_record(body, record.hash)
            if body["kind"] == "redaction":
                chain.note_redaction(body)
        seq = len(records)
        chain.finish(head, checkpoint_hashes or {}, records)
        history.finish(head)
        macs.verify_head(head)
    except InvalidRecordError as error:
        return VerificationReport(run_id, TAMPERED, len(records), error.seq or seq or None, str(error))
    except UnsupportedFormatError as error:
        return VerificationReport(run_id, UNVERIFIABLE, len(records), seq, str(error))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        reason = f"it cannot be read: {type(error).__name__}: {error}"
        return VerificationReport(run_id, TAMPERED, len(records), seq, reason)
    redactions = chain.unfinished_redactions()
    unfinished = (
        *history.open_items(),
        *(f"hidden value {place} of record {of} is still there after its redaction" for of, place in redactions),
    )
    doubt = "" if keyring is None else macs.doubt()
    code, claimed = OPEN if unfinished else GOOD, tuple(history.claimed)
    return VerificationReport(run_id, code, len(records), open=unfinished, doubt=doubt, claimed=claimed)


_KINDS_THAT_LOOK_BACK = frozenset({"run.migrated", "run.adopted", "redaction", "checkpoint"})
"""Kinds of records that are verified against earlier ones, of whatever kind."""


def verify_after(
    known: KnownHistory, last: tuple[int, str], records: Sequence[SealedRecord], head: Head, keyring: Keyring
) -> bool:
    """Whether the records of a run after one of which all is known are good, and a host with a secret wrote them."""
    seq, digest = last
    chain, macs, history = HashChainVerifier(digest), MacVerifier(keyring), HistoryVerifier.resumed(known)
    try:
        for number, record in enumerate(records, seq + 1):
            body = chain.verify_record(record, number)
            if body["kind"] in _KINDS_THAT_LOOK_BACK:
                return False
            macs.verify_record(record, body["kind"])
            history.verify_record(body, record.hash)
        history.finish(head)
        macs.verify_head(head)
    except (InvalidRecordError, UnsupportedFormatError, ValueError, LookupError, TypeError, AttributeError):
        return False
    return not macs.doubt() and (head.seq, head.hash) == (seq + len(records), chain.hash)


def with_doubt(report: VerificationReport) -> VerificationReport:
    """The report; a run of which it is not known who wrote it cannot be verified."""
    if report.doubt and report.code in (GOOD, OPEN):
        return replace(report, code=UNVERIFIABLE, reason=report.doubt)
    return report


_KEY_TELLS = (
    "who wrote the records, the answers and the redactions in them, holds, what waits to be acted on, and each run's "
    "epoch and owner"
)
_CHECKPOINT_TELLS = "whether records or runs were cut off, and whether the file was put back to an older state"


def unchecked_lines(has_secret: bool, signed: datetime | None) -> list[str]:
    """What cannot be checked with what was given."""
    unchecked: list[str] = []
    if not has_secret:
        unchecked.append(f"without the secret ({SECRET_VARIABLE}, or the key file of the store): {_KEY_TELLS}")
    if signed is None:
        unchecked.append(f"without a checkpoint: {_CHECKPOINT_TELLS}")
    else:
        unchecked.append(f"since the checkpoint, which is of {signed:%Y-%m-%d %H:%M:%S} UTC: {_CHECKPOINT_TELLS}")
    return unchecked


def require_authentic(report: VerificationReport, action: str) -> None:
    """Check that a run's journal is good, and that a host with one of the secrets wrote it.

    Raises:
        JournalError: It is not.
    """
    if report.code in (TAMPERED, UNVERIFIABLE):
        raise JournalError(f"run {report.run_id!r} cannot be {action}: record {report.seq}: {report.reason}")
    if report.doubt:
        raise JournalError(
            f"run {report.run_id!r} cannot be {action}: {report.doubt}; give the host the secret of the process that "
            "wrote it, Host(secret=...) or AGENTFSM_SECRET, or, if you trust the file as it is, take the run over with "
            f"agentfsm adopt {report.run_id}"
        )


async def require_verified(
    run_id: str, records: Sequence[SealedRecord], head: Head | None, keyring: Keyring, action: str
) -> None:
    """``require_authentic`` for records that were read from a store, with the head that was read with them."""
    require_authentic(await off_loop(lambda rows: verify(run_id, rows, head, keyring=keyring), records), action)


CheckpointHashes = Mapping[str, Mapping[int, str]]
"""Hashes of records by sequence number, for each run in a checkpoint; 0 is a run without records."""


async def verify_stored_run(
    store: Store, run_id: str, checkpoint: CheckpointHashes | None = None, keyring: Keyring | None = None
) -> VerificationReport:
    """Verify one run of a store, including the record that it was forked from.

    With keys and a checkpoint, records that none of the keys authenticates must be in the checkpoint: whatever came
    after it and was not sealed under a secret of the host was forged.

    Args:
        store: The store.
        run_id: The run.
        checkpoint: The runs of a checkpoint, or None if there is none.
        keyring: The keys of the host that wrote it, or None.

    Raises:
        UnknownRunError: Neither the store nor the checkpoint has the run.
    """
    return (await read_and_verify(store, run_id, checkpoint, keyring))[0]


async def read_and_verify(
    store: Store, run_id: str, checkpoint: CheckpointHashes | None = None, keyring: Keyring | None = None
) -> tuple[VerificationReport, list[SealedRecord], Head | None]:
    """``verify_stored_run`` with the records and the head that were verified, so that nobody reads them again."""
    try:
        records, head = await consistent_read(store, run_id)
    except UnknownRunError:
        if checkpoint and run_id in checkpoint:
            reason = "the checkpoint has it, and the store does not"
            return VerificationReport(run_id, TAMPERED, 0, None, reason), [], None
        raise
    except StoreError as error:
        return await _report_unreadable(store, run_id, str(error)), [], None
    return await _verify_read(store, run_id, records, head, checkpoint, keyring), records, head


async def _verify_read(
    store: Store,
    run_id: str,
    records: Sequence[SealedRecord],
    head: Head | None,
    checkpoint: CheckpointHashes | None,
    keyring: Keyring | None,
) -> VerificationReport:
    hashes = _checkpoint_hashes(checkpoint, run_id)
    report = await off_loop(lambda rows: verify(run_id, rows, head, hashes, keyring), records)
    if checkpoint is not None and report.doubt and report.code in (GOOD, OPEN):
        signed = max(checkpoint.get(run_id, (0,)))
        if signed < len(records):
            reason = f"it was written after the checkpoint, and {report.doubt}"
            return VerificationReport(run_id, TAMPERED, len(records), signed + 1, reason)
    if report.code == TAMPERED or not records or not is_kind(records[0], "run.forked"):
        return report
    reason = await _check_fork_parent(store, records[0])
    return VerificationReport(run_id, TAMPERED, len(records), 1, reason) if reason else report


async def _check_fork_parent(store: Store, first_record: SealedRecord) -> str:
    """What is wrong with the record that a run was forked from, or an empty string."""
    try:
        parent = json.loads(first_record.body)["parent"]
        run_id, seq, parent_hash = str(parent["run"]), int(parent["seq"]), parent["hash"]
        records = await store.records(run_id, seq - 1)
    except StoreError:  # the parent is in another store, or cannot be read: its own verification reports that
        return ""
    except (LookupError, TypeError, ValueError):
        return "the source of the fork is not recorded"
    if records and records[0].hash == parent_hash:
        return ""
    return f"it was forked from record {seq} of run {run_id}, and that record has another hash"


async def _report_unreadable(store: Store, run_id: str, reason: str) -> VerificationReport:
    """The report on a run with records that cannot be read; it names the last one of them."""
    try:
        head = await store.head(run_id)
        high = 0 if head is None else head.seq
        await store.records(run_id, high)
    except StoreError as error:
        return VerificationReport(run_id, UNVERIFIABLE, 0, None, str(error))
    low, records = 0, high
    while low < high:
        middle = (low + high) // 2
        try:
            await store.records(run_id, middle)
        except StoreError:
            low = middle + 1
        else:
            high = middle
    if not low:
        return VerificationReport(run_id, UNVERIFIABLE, records, None, reason)  # it became readable in the meantime
    return VerificationReport(run_id, TAMPERED, records, low, f"it cannot be read: {reason}")


def verify_export(text: str, checkpoint: CheckpointHashes | None, keyring: Keyring | None = None) -> VerificationReport:
    """Verify an exported journal.

    Args:
        text: The text of the export.
        checkpoint: The runs of a checkpoint, or None if there is none.
        keyring: The keys of the host that wrote it, or None.

    Raises:
        JournalError: The text is not an exported journal.
    """
    lines = text.rstrip("\n").split("\n")
    records: list[SealedRecord] = [read_line(1, lines[0])]
    try:
        run_id = str(json.loads(records[0].body)["run"])
    except (LookupError, ValueError, TypeError):
        raise JournalError("line 1 does not name the run") from None
    for number, line in enumerate(lines[1:], 2):
        try:
            records.append(read_line(number, line))
        except JournalError as error:
            report = verify(run_id, records)
            if report.code == TAMPERED:
                return report
            return VerificationReport(run_id, TAMPERED, len(lines), number, str(error))
    report = verify(run_id, records, None, _checkpoint_hashes(checkpoint, run_id), keyring)
    if checkpoint is not None and run_id not in checkpoint and report.code != TAMPERED:
        return VerificationReport(run_id, UNVERIFIABLE, len(records), None, "the checkpoint does not have this run")
    return report


def _checkpoint_hashes(checkpoint: CheckpointHashes | None, run_id: str) -> dict[int, str]:
    return {seq: digest for seq, digest in (checkpoint or {}).get(run_id, {}).items() if seq}
