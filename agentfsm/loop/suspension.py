"""Suspension records: a suspended run, signed, so that another process can resume it days later.

The signature is HMAC-SHA256 over the canonical JSON of every other field, keyed with the host's secret, which is never
part of the record. Reading a record changes nothing, so a refused record stays valid.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentfsm.errors import (
    BlankHumanReplyError,
    HumanReplyError,
    SuspensionExpiredError,
    SuspensionFormatError,
    SuspensionGraphError,
    SuspensionTamperedError,
)
from agentfsm.loop.canonical_json import canonical_json
from agentfsm.loop.failures import FailureKind
from agentfsm.loop.state import HumanReply, RunState, dump_state, load_state

__all__ = ["RECORD_VERSION", "SuspensionRecord", "check_human_reply", "open_record", "sign_record"]

RECORD_VERSION = 1
"""The version of the record's form; another one is refused with both named."""


class SuspensionRecord(BaseModel):
    """A suspended run, signed as a whole and good for one reply.

    Attributes:
        version: The version of this form.
        record_id: A random id; a record is used up by its first resumption.
        run_id: The run.
        kind: What it waits for: ``question``, ``approval``, ``limit`` or ``in_doubt``.
        question: What the person is asked.
        context: More about it.
        choices: Answers to choose from, or empty.
        tool: For an approval or a doubt, the tool.
        arguments: For an approval or a doubt, the arguments of the call.
        originating_failure_kind: The kind of failure that led here, or None.
        created_at: When it was written, in seconds since the epoch.
        expires_at: Until when it is good, in seconds since the epoch.
        graph: Fingerprint of the graph that the run runs on.
        state: Everything that the run knows.
        signature: HMAC-SHA256 (hex) of all of the above.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int
    record_id: str
    run_id: str
    kind: str
    question: str = Field(repr=False)  # what was said is in no representation
    context: str = Field(repr=False)
    choices: tuple[str, ...] = Field(repr=False)
    tool: str
    arguments: dict[str, Any] = Field(repr=False)
    originating_failure_kind: FailureKind | None
    created_at: float
    expires_at: float
    graph: str
    state: dict[str, Any] = Field(repr=False)
    signature: str = Field(repr=False)

    def to_json(self) -> str:
        """The record as JSON text."""
        return canonical_json(self.model_dump(mode="json"))

    @classmethod
    def from_json(cls, text: str | bytes) -> SuspensionRecord:
        """The record of a JSON text. Its signature is checked when the run is resumed.

        Raises:
            SuspensionFormatError: The text is no suspension record.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            where, what = _first_problem(error)
            raise SuspensionFormatError(f"this is no suspension record: {where}: {what}") from None


def _signature(fields: dict[str, Any], secret: bytes) -> str:
    signed = canonical_json({k: v for k, v in fields.items() if k != "signature"})
    return hmac.new(secret, signed.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()


def sign_record(run: RunState, *, graph: str, secret: bytes, record_id: str, created_at: float) -> SuspensionRecord:
    """The signed record of a suspended run.

    Args:
        run: The run; ``run.waiting`` says what it waits for.
        graph: Fingerprint of its graph.
        secret: The embedding program's secret.
        record_id: A fresh random id.
        created_at: Seconds since the epoch.
    """
    waiting = run.pending_request
    if waiting is None:
        raise ValueError(f"run {run.run_id!r} waits for nothing")
    state = dump_state(run)
    said = state["waiting"]  # as JSON has it
    record = SuspensionRecord(
        version=RECORD_VERSION,
        record_id=record_id,
        run_id=state["run_id"],
        kind=waiting.kind,
        question=said["question"],
        context=said["context"],
        choices=tuple(said["choices"]),
        tool=said["tool"],
        arguments=said["arguments"],
        originating_failure_kind=waiting.failure_kind,
        created_at=created_at,
        expires_at=created_at + run.guardrails.validity_s,
        graph=graph,
        state=state,
        signature="",
    )
    return record.model_copy(update={"signature": _signature(record.model_dump(mode="json"), secret)})


def open_record(
    record: SuspensionRecord, *, graph: str, secret: bytes, now: float, allow_expired: bool = False
) -> RunState:
    """The run that a record holds, once the record has proved good.

    Args:
        record: The record.
        graph: Fingerprint of the graph of the agent that resumes.
        secret: The embedding program's secret.
        now: Seconds since the epoch.
        allow_expired: Whether an expired record is taken all the same (to end its run).

    Raises:
        SuspensionFormatError: The record is of another version, or its state is of another release.
        SuspensionTamperedError: A field was changed, or the secret is another one.
        SuspensionGraphError: The agent's graph is another one.
        SuspensionExpiredError: Its time is over.
    """
    if record.version != RECORD_VERSION:
        raise SuspensionFormatError(
            f"the record is of version {record.version}; this release reads version {RECORD_VERSION}"
        )
    if not hmac.compare_digest(_signature(record.model_dump(mode="json"), secret), record.signature):
        raise SuspensionTamperedError(
            "the record's signature does not match: it was changed, or it was signed with another secret "
            "(give both processes the same Host(secret=...))"
        )
    if record.graph != graph:
        raise SuspensionGraphError(
            f"the record belongs to graph {record.graph[:12]}, the agent runs graph {graph[:12]}: resume it with "
            "an agent that has the graph under which it was suspended"
        )
    if now > record.expires_at and not allow_expired:
        raise SuspensionExpiredError(
            f"the record expired {now - record.expires_at:.0f} s ago; end the run with agent.dismiss(record)"
        )
    try:
        return load_state(record.state)
    except ValidationError as error:  # signed with our secret, so by another release
        where, what = _first_problem(error)
        raise SuspensionFormatError(f"the record's state is none that this release reads: {where}: {what}") from None


def _first_problem(error: ValidationError) -> tuple[str, str]:
    """Where the first thing is that is wrong, and what."""
    first = error.errors(include_url=False, include_input=False)[0]
    return ".".join(str(part) for part in first["loc"]) or "the text", first["msg"]


_ACCEPTED_REPLIES = {
    "question": ("text",),
    "limit": ("text",),
    "approval": ("allow", "deny", "edit"),
    "in_doubt": ("ran", "did_not_run", "give_up"),
}

_REPLY_HINTS = {
    "question": "reply with a text",
    "limit": "reply with a text that says how to go on",
    "approval": "reply with Allow(), Deny(reason) or Edit(arguments)",
    "in_doubt": "reply with ItRan(result), ItDidNotRun() or GiveUp()",
}


def check_human_reply(kind: str, reply: HumanReply) -> None:
    """Make sure that a reply fits what a run waits for.

    Raises:
        BlankHumanReplyError: The reply is empty.
        HumanReplyError: It is of another kind than what the run waits for.
    """
    if reply.kind == "text" and not reply.text.strip():
        raise BlankHumanReplyError("the reply is empty; the run stays suspended until somebody answers")
    if reply.kind not in _ACCEPTED_REPLIES[kind]:
        raise HumanReplyError(f"this run waits for an answer of kind {kind!r}: {_REPLY_HINTS[kind]}")
