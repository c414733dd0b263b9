"""Snapshots: what a run knew after one of its records, so that loading it need not begin with the first.

The journal alone says what happened; a snapshot only saves time, and may be deleted at any moment. It is sealed under a
key of its own, and names the run and the hash of its record: one that was edited, or that belongs to another run or
another history, is not used. It has the newest messages, and those that the next request needs; the others stay in the
journal until they are needed. Secrets in it are withheld as they are in records.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentfsm.errors import JournalError, MissingExtraError
from agentfsm.journal.hash_chain import HashChainVerifier, InvalidRecordError
from agentfsm.journal.records import SealedRecord, installed_release, is_kind, open_record, was_redacted
from agentfsm.journal.rehydrate import RehydratedRun, rehydrate
from agentfsm.journal.store import SealedSnapshot
from agentfsm.loop.canonical_json import canonical_json
from agentfsm.loop.history import CHARS_PER_TOKEN, estimate_tokens
from agentfsm.loop.keys import KeyPurpose, Keyring, SecretKeys
from agentfsm.loop.messages import UNREAD, Message, Role
from agentfsm.loop.state import RunState
from agentfsm.loop.state_json import KEPT_FIELDS, TEXT_FIELDS, dump_state, exact_state_json, load_state
from agentfsm.loop.withholding import SecretOpener, Withholder
from agentfsm.runtime.recorder import JournalEntry, ResumePoint

Data = dict[str, Any]

FORMAT = 3
"""The version of what a snapshot contains. One of another version is not used, nor one of another release, which may
make something else of the same records."""

EVERY_RECORDS = 512
"""A run gets a snapshot once so many records were written since its last one: loading it then folds hardly more."""

WAITING_RECORDS = 32
"""A run that begins to wait gets one after so many records: it may wait for long, and is loaded to be answered."""

KEPT_MESSAGES = 4
"""How many of the newest messages a snapshot has at least; the reducer looks at the last one only."""

MAX_MESSAGES = 400
"""A run whose next request needs more messages than that gets no snapshot: it would be as long as its journal."""

MAX_CHARS = 1_000_000
"""A run whose next request has about so many characters, or more, gets no snapshot: making one would take too long."""

MAX_CALLS = 100
"""A run whose last reply has more tool calls than that gets no snapshot: each would hold all of them."""

MAX_SECRETS = 200
"""A run that has withheld more values than that gets no snapshot."""


# -- writing ------------------------------------------------------------------------------------------------


class SnapshotMaker:
    """Makes the snapshots of one run, when they are due.

    A run gets one only where nothing is in progress: before a model call, after a transition, or when it begins to
    wait, without a call of which it is not known whether it ran.
    """

    def __init__(
        self, run: RunState, keys: SecretKeys, withholder: Withholder, resume_point: ResumePoint | None = None
    ) -> None:
        self._run, self._keys, self._withholder = run, keys, withholder
        self._secrets: Sequence[Any] = ()  # that its earlier records withhold
        self._visited: set[str] = set()
        self._attempts: dict[str, int] = {}
        self._asked: list[tuple[int, str]] = []
        self._first = ""
        self._seq = 0  # of the last snapshot
        self._may_make = run.parent is None
        self._system: list[int] = []  # the indexes of system messages among those that were looked at
        self._looked_at = 0
        if resume_point is not None:
            self._continue_from(resume_point)

    def _continue_from(self, resume_point: ResumePoint) -> None:
        self._secrets, self._visited = resume_point.secrets, set(resume_point.visited)
        self._attempts = dict(resume_point.attempts)
        base = resume_point.base
        if base is None or not base.may_have_snapshots:
            self._may_make = False
            return
        self._first, self._asked, self._seq = base.first.hash, list(base.asked), base.unread

    def after(
        self, entries: Sequence[JournalEntry], records: Sequence[SealedRecord], model: str
    ) -> SealedSnapshot | None:
        """The snapshot of the run after some entries that are written together; None if none is due."""
        if not self._may_make:
            return None
        for entry in entries:
            kind = entry[0]
            if kind == "transition":
                row = entry[6].transition
                self._visited.add(row.source)
                if self._asked and row.target != row.source:
                    self._asked.clear()
            elif kind == "effect.intent":
                self._attempts[entry[2]] = entry[4]
            elif kind != "effect.result":
                self._note(entry, records)
        last = records[-1]
        due_after = WAITING_RECORDS if entries[-1][0] == "run.suspended" else EVERY_RECORDS
        if last.seq - self._seq < due_after or not self._is_quiet(entries[-1]):
            return None
        content = self._content(entries[-1], last, model)
        self._seq = last.seq  # even if there is none, so that nobody tries again with each commit
        return (
            None if content is None else SealedSnapshot(content, self._keys.seal(KeyPurpose.snapshot, content.encode()))
        )

    def _note(self, entry: JournalEntry, records: Sequence[SealedRecord]) -> None:
        """Take note of an entry about the whole run: the first of a commit creates it, the last suspends it."""
        kind = entry[0]
        if kind == "run.suspended":
            self._asked.append((records[-1].seq, records[-1].hash))
        elif kind == "run.created":
            self._first = records[0].hash

    def _is_quiet(self, last: JournalEntry) -> bool:
        run, kind = self._run, last[0]
        if kind == "effect.intent":
            if not str(last[2]).isdecimal():  # a call of a tool is in progress; a model call may be made again
                return False
        elif kind != "run.suspended" and (kind != "transition" or run.pending_request is not None):
            return False
        if run.state_calls or len(run.batch) > MAX_CALLS:
            return False
        return not any(call.started and call.result is None for call in run.batch)

    def _content(self, last: JournalEntry, record: SealedRecord, model: str) -> str | None:
        run, withholder = self._run, self._withholder
        if run.details.history and run.compaction is None:  # its next request, and what is left out of it, need all
            return None
        places = self._kept_places()
        kept = [run.messages[place] for place in places]
        if len(kept) > MAX_MESSAGES or any(message is UNREAD for message in kept) or _count_chars(kept) > MAX_CHARS:
            return None
        shown = copy.copy(run)
        shown.set_messages(kept)
        for secret in self._secrets:
            withholder.placeholder_for(secret)
        self._secrets = ()
        try:
            text = exact_state_json(shown)
        except ValueError:  # JSON cannot say all of it
            return None
        if withholder.knows_tools or run.withheld or withholder.may_occur(text):
            text = canonical_json(withholder.clean_fields(json.loads(text), TEXT_FIELDS, KEPT_FIELDS))
        withheld = withholder.placeholders
        if len(withheld) > MAX_SECRETS or any(not each.startswith("[sealed ") for each in withheld):
            return None  # without the package that encrypts, values are lost, and what was made of them is not
        turn = f"{run.turns}."
        self._attempts = {
            eid: count
            for eid, count in self._attempts.items()
            if eid.startswith(turn) or eid == str(run.turns + 1)  # the others are over
        }
        suspension = last[2] if last[0] == "run.suspended" else None
        about = canonical_json(
            {
                "form": FORMAT,
                "release": installed_release(),
                "run": run.run_id,
                "first": self._first,
                "seq": record.seq,
                "hash": record.hash,
                "epoch": json.loads(record.body)["epoch"],
                "ts": int(last[1] * 1000),
                "count": len(run.messages),
                "places": places,
                "visited": sorted(map(str, self._visited)),
                "attempts": self._attempts,
                "asked": self._asked,
                "suspension": suspension and {"id": suspension["id"], "expires": suspension["expires"]},
                "secrets": list(withheld),
                "model": model,
            }
        )
        return f'{about[:-1]},"state":{text}}}'

    def _kept_places(self) -> list[int]:
        """The indexes of the messages that a snapshot has: the newest ones, and what is left of a compacted history."""
        messages, compaction = self._run.messages, self._run.compaction
        start = max(0, len(messages) - KEPT_MESSAGES)
        if compaction is None:
            return list(range(start, len(messages)))
        for place in range(self._looked_at, compaction.start):
            if messages[place] is not UNREAD and messages[place].role is Role.SYSTEM:
                self._system.append(place)
        self._looked_at = max(self._looked_at, compaction.start)
        start = min(start, compaction.start)
        older = {place for place in (*self._system, *compaction.kept) if place < start}
        return [*sorted(older), *range(start, len(messages))]


def _count_chars(messages: Sequence[Message]) -> int:
    """About how long some messages are, with their images and files."""
    attached = sum(len(each.data) for message in messages for each in message.attachments)
    return estimate_tokens(messages) * CHARS_PER_TOKEN + attached


# -- reading ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot that a host with the secret wrote."""

    data: Mapping[str, Any]

    @property
    def seq(self) -> int:
        """The sequence number of its record."""
        return int(self.data["seq"])

    def restore(self, first: SealedRecord, opener: SecretOpener) -> RehydratedRun:
        """The run as it was after its record.

        Raises:
            JournalError: The first record is another one, or was redacted; or the snapshot cannot be read.
            MissingExtraError: The package that opens secrets is not installed.
        """
        data = self.data
        try:
            HashChainVerifier().verify_record(first, 1)
            if first.hash != data["first"] or was_redacted(first):
                raise JournalError("the snapshot does not fit the first record")
            for placeholder in data["secrets"]:
                opener.open(placeholder)
            run = load_state(opener.open_fields(data["state"], TEXT_FIELDS, KEPT_FIELDS))
            run.set_messages(*_in_places(run.messages, data["places"], data["count"]))
            return RehydratedRun.restored(
                opener,
                open_record(first, opener),
                run,
                seq=data["seq"],
                digest=data["hash"],
                epoch=data["epoch"],
                known=data,
            )
        except (InvalidRecordError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise JournalError(f"the snapshot cannot be read: {error}") from error


def _in_places(kept: Sequence[Message], places: Sequence[int], count: int) -> tuple[list[Message], int]:
    """A transcript of some length with the messages that are known, and how many, from the first, may be missing."""
    messages: list[Message] = [UNREAD] * count
    for place, message in zip(places, kept, strict=True):
        messages[place] = message
    unread = count
    while unread and messages[unread - 1] is not UNREAD:
        unread -= 1
    return messages, unread


def _content_bytes(sealed: SealedSnapshot) -> bytes:
    """What the seal of a snapshot is of; no two contents have the same."""
    return sealed.content.encode("utf-8", "surrogatepass")


def open_snapshot(sealed: SealedSnapshot, run_id: str, keyring: Keyring) -> Snapshot | None:
    """A snapshot of a run, if a host with one of the secrets and this release wrote it for that run; else None."""
    if not keyring.check_seal(KeyPurpose.snapshot, _content_bytes(sealed), sealed.mac):
        return None
    data: Data = json.loads(sealed.content)
    about = tuple(data.get(name) for name in ("form", "release", "run"))
    return Snapshot(data) if about == (FORMAT, installed_release(), run_id) else None


# -- verifying ----------------------------------------------------------------------------------------------


def snapshot_damage(sealed: SealedSnapshot, run_id: str, records: Sequence[SealedRecord], keyring: Keyring) -> str:
    """What is wrong with a run's snapshot, or an empty string; one that nobody would use is not wrong."""
    is_ours = keyring.check_seal(KeyPurpose.snapshot, _content_bytes(sealed), sealed.mac)
    if is_ours is None and any(is_kind(record, "run.adopted") for record in records):
        return ""  # it was made under the secret of before
    if not is_ours:
        return "its snapshot was changed without the secret; the run does not use it"
    if json.loads(sealed.content).get("run") != run_id:
        return "its snapshot is another run's; the run does not use it"
    snapshot = open_snapshot(sealed, run_id, keyring)
    if snapshot is None:  # of another release
        return ""
    if not 0 < snapshot.seq <= len(records) or records[snapshot.seq - 1].hash != snapshot.data["hash"]:
        return "its snapshot is that of other records; the run does not use it"
    if any(map(was_redacted, records[: snapshot.seq])):
        return "its snapshot is from before a redaction; the run does not use it"
    try:
        return _difference(snapshot, records, SecretOpener(keyring))
    except (JournalError, MissingExtraError):  # nobody can use it, or nobody here
        return ""


def _difference(snapshot: Snapshot, records: Sequence[SealedRecord], opener: SecretOpener) -> str:
    told = snapshot.restore(records[0], opener)
    folded = rehydrate(records[: snapshot.seq], opener)
    known = [place for place, message in enumerate(told.run.messages) if message is not UNREAD]
    if len(told.run.messages) != len(folded.run.messages):
        return "its snapshot has another number of messages than its records"
    for each in (told.run, folded.run):
        each.set_messages([each.messages[place] for place in known])
    attempts = {eid: folded.attempts.get(eid) for eid in told.attempts}
    same = (
        dump_state(told.run) == dump_state(folded.run)
        and told.attempts == attempts
        and (told.visited, told.asked, told.epoch) == (folded.visited, folded.asked, folded.epoch)
        and told.request_ref == folded.request_ref
    )
    return "" if same else "its snapshot differs from its records"
