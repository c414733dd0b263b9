"""Suspension records: a suspended run, signed, so that another process can resume it days later.

The signature is HMAC-SHA256 over the canonical JSON of every other field, under a key that is derived from the host's
secret and that the record names by its key id. Reading a record changes nothing, so a refused record stays valid.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from agentfsm.errors import (
    BlankHumanReplyError,
    HumanReplyError,
    StaleHumanReplyError,
    SuspensionExpiredError,
    SuspensionFormatError,
    SuspensionGraphError,
    SuspensionTamperedError,
)
from agentfsm.loop.canonical_json import canonical_json
from agentfsm.loop.failures import FailureKind
from agentfsm.loop.human_input import HumanReply, ReachedLimit
from agentfsm.loop.keys import KeyPurpose, Keyring
from agentfsm.loop.quorum import Quorum
from agentfsm.loop.read_only import freeze
from agentfsm.loop.state import RunState, withhold_secrets_of
from agentfsm.loop.state_json import KEPT_FIELDS, TEXT_FIELDS, dump_state, load_state
from agentfsm.loop.withholding import SecretOpener, Withholder

RECORD_VERSION = 2
"""The version of the record format. Version 1, of version 0.1.0, is read, too; the error about another names all."""

DEFAULT_VALIDITY_S = 24 * 60 * 60
"""Seconds for which a record may be resumed if the guardrails do not say (``validity_s``)."""

IN_STORE = "store"
"""The ``registry`` of a record whose run is in a store, which knows what became of it."""


class SuspensionRecord(BaseModel):
    """A suspended run, signed as a whole and valid for one reply.

    Attributes:
        version: The version of the record format.
        record_id: A random id; resuming a record uses it up.
        run_id: The run.
        kind: What it waits for: ``question``, ``form``, ``approval``, ``limit`` or ``in_doubt``.
        question: The question for the person.
        context: Background for the question.
        choices: Answers to choose from, or empty.
        tool: For an approval or a call in doubt, the tool.
        arguments: For an approval or a call in doubt, the arguments of the call.
        originating_failure_kind: The kind of failure that led to the suspension, or None.
        created_at: When it was written, in seconds since the epoch.
        expires_at: When it expires, in seconds since the epoch; None if it does not, as that of a stored run.
        graph: Fingerprint of the run's graph.
        state: The state of the run, as ``dump_state`` writes it.
        key_id: Which secret signed it, 8 hex digits (``Keyring``); empty in version 1, which was signed with the secret
            itself.
        registry: What knows whether the record was used: the scope of a ``ReplayGuard``, or ``store`` for a run that is
            in a store; empty for a sub-agent's run, which only its caller resumes, and in version 1.
        signature: HMAC-SHA256 (hex) of all of the above.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int
    record_id: str
    run_id: str
    kind: str
    question: str = Field(repr=False)  # no conversation text in logs
    context: str = Field(repr=False)
    choices: tuple[str, ...] = Field(repr=False)
    tool: str
    arguments: dict[str, Any] = Field(repr=False)
    originating_failure_kind: FailureKind | None
    created_at: float
    expires_at: float | None
    graph: str
    state: dict[str, Any] = Field(repr=False)
    key_id: str = ""
    registry: str = ""
    signature: str = Field(repr=False)

    @property
    def limit(self) -> ReachedLimit | None:
        """For a limit, how much of it is used up, and what a reply grants by default; else None."""
        return TypeAdapter(ReachedLimit | None).validate_python(self._request.get("limit"))

    @property
    def quorum(self) -> Quorum | None:
        """For an approval with a rule about who may answer, the rule and the votes so far; else None."""
        return TypeAdapter(Quorum | None).validate_python(self._request.get("quorum"))

    @property
    def form(self) -> Mapping[str, Any]:
        """For a form, the JSON schema of the object to fill in; else empty."""
        return self._request.get("form") or {}

    @property
    def _request(self) -> Mapping[str, Any]:
        """What the run asks, as JSON data; empty if the record was changed so that it has none."""
        request = self.state.get("waiting")
        return cast("Mapping[str, Any]", request) if isinstance(request, Mapping) else {}

    @field_validator("arguments", "state")
    @classmethod
    def _freeze(cls, value: dict[str, Any]) -> dict[str, Any]:
        return cast("dict[str, Any]", freeze(value))

    def to_json(self) -> str:
        """The record as JSON text."""
        return canonical_json(_written_fields(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> SuspensionRecord:
        """Parse a record. Its signature is checked when the run is resumed.

        Raises:
            SuspensionFormatError: The text is not a suspension record.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            where, what = _first_problem(error)
            raise SuspensionFormatError(f"this is not a suspension record: {where}: {what}") from None


def _written_fields(record: SuspensionRecord) -> dict[str, Any]:
    """The fields that whoever made the record wrote, as JSON data: an earlier release did not write all."""
    return record.model_dump(mode="json", exclude_unset=True)


def _signature(record: SuspensionRecord, key: bytes) -> str:
    signed = canonical_json({k: v for k, v in _written_fields(record).items() if k != "signature"})
    return hmac.new(key, signed.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()


def sign_record(
    run: RunState,
    *,
    graph: str,
    keyring: Keyring,
    record_id: str,
    created_at: float,
    registry: str = "",
    withholder: Withholder | None = None,
) -> SuspensionRecord:
    """The signed record of a suspended run.

    Args:
        run: The run; ``run.pending_request`` is what it waits for.
        graph: Fingerprint of its graph.
        keyring: The host's keys; the current one signs.
        record_id: A fresh random id.
        created_at: Seconds since the epoch.
        registry: What knows whether the record was used; see ``SuspensionRecord``.
        withholder: Replaces the secrets of the run.

    Raises:
        ValueError: The run waits for nothing.
    """
    request = run.pending_request
    if request is None:
        raise ValueError(f"run {run.run_id!r} waits for nothing")
    state = dump_state(run)
    if withholder is not None:
        withhold_secrets_of(run, withholder)
        state = withholder.clean_fields(state, TEXT_FIELDS, KEPT_FIELDS)
    request_json, quorum = state["waiting"], request.quorum
    asked_at = created_at
    validity_s = run.guardrails.validity_s or (None if registry == IN_STORE else DEFAULT_VALIDITY_S)
    if quorum is not None:  # votes and escalation extend no deadline
        asked_at, validity_s = quorum.asked_at, quorum.rule.validity_s or validity_s
    record = SuspensionRecord(
        version=RECORD_VERSION,
        record_id=record_id,
        run_id=state["run_id"],
        kind=request.kind,
        question=request_json["question"],
        context=request_json["context"],
        choices=tuple(request_json["choices"]),
        tool=request_json["tool"],
        arguments=request_json["arguments"],
        originating_failure_kind=request.failure_kind,
        created_at=created_at,
        expires_at=None if validity_s is None else asked_at + validity_s,
        graph=graph,
        state=state,
        key_id=keyring.current.key_id,
        registry=registry,
        signature="",
    )
    key = keyring.current.key(KeyPurpose.suspension)
    return record.model_copy(update={"signature": _signature(record, key)})


def open_record(
    record: SuspensionRecord,
    *,
    graph: str,
    keyring: Keyring,
    now: float,
    secrets: Sequence[bytes] = (),
    allow_expired: bool = False,
) -> RunState:
    """The run in a record, after checking the record.

    Args:
        record: The record.
        graph: Fingerprint of the graph of the agent that resumes.
        keyring: The host's keys.
        now: Seconds since the epoch.
        secrets: The host's secrets, which signed records of version 1 themselves.
        allow_expired: Whether to accept an expired record (to end its run).

    Raises:
        SuspensionFormatError: The record has another version, or its state was written by another release.
        SuspensionTamperedError: A field was changed, or the host does not have the secret that signed it.
        SuspensionGraphError: The record was written under another graph.
        SuspensionExpiredError: The record has expired.
    """
    if record.version not in range(1, RECORD_VERSION + 1):
        raise SuspensionFormatError(
            f"the record has version {record.version}; this release reads versions 1 to {RECORD_VERSION}"
        )
    keys = _possible_keys(record, keyring, secrets)
    if not any(hmac.compare_digest(_signature(record, key), record.signature) for key in keys):
        raise SuspensionTamperedError(
            "the record's signature does not match: it was changed, or it was signed with another secret "
            "(give both processes the same Host(secret=...))"
        )
    if record.graph != graph:
        raise SuspensionGraphError(
            f"the record belongs to graph {record.graph[:12]}, the agent runs graph {graph[:12]}: resume it with "
            "an agent that has the graph under which it was suspended"
        )
    if record.expires_at is not None and now > record.expires_at and not allow_expired:
        raise SuspensionExpiredError(
            f"the record expired {now - record.expires_at:.0f} s ago; end the run with agent.dismiss(record)"
        )
    try:
        return load_state(SecretOpener(keyring).open_fields(record.state, TEXT_FIELDS, KEPT_FIELDS))
    except ValidationError as error:  # the signature matches, so another release wrote it
        where, what = _first_problem(error)
        raise SuspensionFormatError(f"this release cannot read the record's state: {where}: {what}") from None


def _possible_keys(record: SuspensionRecord, keyring: Keyring, secrets: Sequence[bytes]) -> Sequence[bytes]:
    """The keys with which a record may have been signed."""
    if record.version == 1:
        return secrets
    keys = keyring.find(record.key_id)
    if keys is None:
        raise SuspensionTamperedError(
            f"the record was signed with another secret: it names the key {record.key_id!r}, and this host has "
            f"{', '.join(keyring.key_ids)}. Give both processes the same Host(secret=...), or the secret that "
            "signed it in Host(old_secrets=[...])"
        )
    return (keys.key(KeyPurpose.suspension),)


def _first_problem(error: ValidationError) -> tuple[str, str]:
    """The location and the text of the first validation error."""
    first = error.errors(include_url=False, include_input=False)[0]
    return ".".join(str(part) for part in first["loc"]) or "the text", first["msg"]


MIN_DIGEST_DIGITS = 12
"""How many hex digits of a record's hash are enough to identify it."""


def check_digest(to: str, run_id: str, request_ref: tuple[int, str], request: str) -> None:
    """Check that a reply is to the request that a stored run waits with now.

    Args:
        to: The digest of the request that the person was shown, or the beginning of it.
        run_id: The run.
        request_ref: Sequence number and hash of the record with the request.
        request: The request, for the error.

    Raises:
        StaleHumanReplyError: It is to another request, or its digest is too short to tell.
    """
    (seq, digest), too_short = request_ref, len(to) < MIN_DIGEST_DIGITS
    if digest.startswith(to) and not too_short:
        return
    hint = f" (give at least its first {MIN_DIGEST_DIGITS} digits)" if too_short else ""
    raise StaleHumanReplyError(
        f"the reply is to record {to[:MIN_DIGEST_DIGITS]!r}{hint}, but run {run_id!r} now waits for a reply to record "
        f"{seq} ({digest[:MIN_DIGEST_DIGITS]}): {request}"
    )


_ACCEPTED_REPLIES = {
    "question": ("text",),
    "form": ("text", "fill", "deny", "give_up"),
    "limit": ("text", "extend"),
    "approval": ("allow", "deny", "edit"),
    "in_doubt": ("ran", "did_not_run", "give_up"),
}

_REPLY_HINTS = {
    "question": "reply with a string",
    "form": "reply with Fill(fields), with Deny(reason) to decline, or with GiveUp() to cancel",
    "limit": "reply with a string that says how to continue, or with Extend(...)",
    "approval": "reply with Allow(), Deny(reason) or Edit(arguments)",
    "in_doubt": "reply with ItRan(result), ItDidNotRun() or GiveUp()",
}


def check_human_reply(kind: str, reply: HumanReply) -> None:
    """Check that a reply fits what a run waits for.

    Raises:
        BlankHumanReplyError: The reply is empty.
        HumanReplyError: It is not a reply to what the run waits for.
    """
    if reply.kind == "text" and not reply.text.strip():
        raise BlankHumanReplyError("the reply is empty; the run stays suspended until it gets an answer")
    if reply.kind not in _ACCEPTED_REPLIES[kind]:
        raise HumanReplyError(f"this run waits for an answer of kind {kind!r}: {_REPLY_HINTS[kind]}")
