"""What a run is listed and searched by: a few columns next to its journal, and the questions that they answer.

They are written in the same transaction as the records that they follow from, and only when a run is created, when its
status changes, and at most once a second. They follow from the records alone (``rebuild_run_info``), they are not
sealed, and nothing is decided by them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from agentfsm.errors import ConfigurationError, JournalError
from agentfsm.journal.records import SealedRecord, is_kind, open_record
from agentfsm.loop.canonical_json import decode, storable_text
from agentfsm.loop.messages import NO_USAGE, Usage
from agentfsm.machine.declaration import ENDINGS

if TYPE_CHECKING:
    from agentfsm.loop.human_input import PendingRequest
    from agentfsm.loop.state import RunState

Status = Literal["running", "suspended", "finished"]

LISTED_CHARS = 200
"""How much of a text is listed."""

_PLACEHOLDER = re.compile(r"\[(?:secret|sealed) [0-9a-zA-Z_ -]+\]")


@dataclass(frozen=True, slots=True)
class WaitingFor:
    """What a suspended run waits for.

    Attributes:
        kind: ``question``, ``approval``, ``limit`` or ``in_doubt``.
        tool: The tool that it is about, or an empty string.
        roles: The roles of which whoever answers must have one; empty if there is no such rule.
    """

    kind: str
    tool: str = ""
    roles: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A run as it is listed. Times, tokens and cost may be a second older than its newest record.

    Attributes:
        run_id: The run.
        status: ``running``, ``suspended`` or ``finished``.
        owner: The owner of its lease, or None: a run that is ``running`` without one was interrupted.
        started: When its first record was written, in seconds since the epoch; None if it has none, or is not listed
            yet: an earlier release wrote it, and ``rebuild_run_info`` fills in what follows here.
        updated: When its newest record was written, in seconds since the epoch.
        ending: How it ended, as in ``completed`` or ``handed_off``; empty until then.
        prompt: The beginning of what was asked, on one line, without secrets; empty if it was redacted.
        actor: The id of whoever requested it, or an empty string.
        session_id: The conversation's id, or an empty string.
        tags: Its tags.
        model: The name of the first model that it called, or an empty string.
        cost_usd: What its model calls cost, in USD, and for a fork, those since it was made; None if none of them has a
            known price.
        tokens: The tokens of its model calls; None if they are not known yet.
        waiting_for: What it waits for, or None.
        expires: When that request expires, in seconds since the epoch; None if it does not.
        parent: For a sub-agent's run, the run that called it; else an empty string.
        metadata: The entries of its metadata that are texts, numbers, booleans or null, as texts: what is not a text as
            JSON has it. None if an earlier release listed the run, until ``agentfsm store rebuild`` fills it in.
    """

    run_id: str
    status: Status
    owner: str | None = None
    started: float | None = None
    updated: float | None = None
    ending: str = ""
    prompt: str = ""
    actor: str = ""
    session_id: str = ""
    tags: tuple[str, ...] = ()
    model: str = ""
    cost_usd: float | None = None
    tokens: int | None = None
    waiting_for: WaitingFor | None = None
    expires: float | None = None
    parent: str = ""
    metadata: Mapping[str, str] | None = field(default=None, hash=False)


LISTED_COLUMNS: tuple[str, ...] = (
    "status", "started", "updated", "ending", "prompt", "actor", "session", "tags", "model", "cost_usd", "tokens",
    "waiting_kind", "waiting_tool", "waiting_roles", "expires", "parent", "metadata",
)  # fmt: skip
"""The columns of a table of runs, with times in milliseconds."""


def to_columns(info: RunInfo) -> dict[str, Any]:
    """What a run is listed by, as the values of ``LISTED_COLUMNS``, in their order."""
    waiting = info.waiting_for or WaitingFor("")
    return {
        "status": info.status,
        "started": _milliseconds(info.started),
        "updated": _milliseconds(info.updated),
        "ending": info.ending,
        "prompt": info.prompt,
        "actor": info.actor,
        "session": info.session_id,
        "tags": list(info.tags),
        "model": info.model,
        "cost_usd": info.cost_usd,
        "tokens": info.tokens,
        "waiting_kind": waiting.kind,
        "waiting_tool": waiting.tool,
        "waiting_roles": list(waiting.roles),
        "expires": _milliseconds(info.expires),
        "parent": info.parent,
        "metadata": None if info.metadata is None else dict(info.metadata),
    }


def from_columns(run_id: str, owner: str | None, columns: Mapping[str, Any]) -> RunInfo:
    """The run that is listed by these columns."""
    kind, tool, roles = (columns[f"waiting_{name}"] for name in ("kind", "tool", "roles"))
    same = ("status", "ending", "prompt", "actor", "model", "cost_usd", "tokens", "parent", "metadata")
    return RunInfo(
        run_id,
        owner=owner,
        started=_seconds(columns["started"]),
        updated=_seconds(columns["updated"]),
        expires=_seconds(columns["expires"]),
        session_id=columns["session"],
        tags=tuple(columns["tags"]),
        waiting_for=WaitingFor(kind, tool, tuple(roles)) if kind else None,
        **{name: columns[name] for name in same},
    )


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1000)


def _seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def listed_text(text: str) -> str:
    """What a run is listed by of a text: its beginning, on one line, without secrets."""
    words = _PLACEHOLDER.sub("[secret]", text[: 20 * LISTED_CHARS]).split()
    return storable_text(" ".join(words)[:LISTED_CHARS])


def check_selects_one(name: str, text: str | None) -> None:
    """Check that what is listed of a text is not also what is listed of another one: runs will be deleted by it.

    Args:
        name: What the text is, for the error.
        text: The text, or None.

    Raises:
        ConfigurationError: It is too long.
    """
    if text is not None and len(text) > LISTED_CHARS:
        raise ConfigurationError(
            f"{name} is too long: runs are listed by {LISTED_CHARS} characters of it, which others may have, too"
        )


_FORMS: Mapping[str, Callable[[str], str]] = {
    "actor": listed_text,
    "session_id": listed_text,
    "tag": listed_text,
    "model": storable_text,
    "text": storable_text,
    "waiting_role": storable_text,
    "run_id": storable_text,
    "exact_id": storable_text,
    "parent": storable_text,
}
"""In which form runs are listed by each text of a query."""


@dataclass(frozen=True, kw_only=True)
class RunQuery:
    """Which runs to find; whatever is None is not asked for.

    Runs are listed by the first 200 characters of a text, on one line with single spaces, and found by an actor, a
    conversation, a tag or metadata in this form.

    Attributes:
        status: Those with this status.
        ending: Those that ended so; an empty string for those that have not ended.
        actor: Those that somebody with this id requested.
        session_id: Those of this conversation.
        tag: Those with this tag.
        any_tag: Those with one of these tags, too.
        metadata: Those with each of these entries in their metadata: ``{"order": 7}`` finds 7 and the text ``"7"``.
        model: Those that first called the model with this name.
        since: Those that started then or later, in seconds since the epoch.
        until: Those that started before then.
        text: Those whose listed prompt contains it; ASCII letters may be of either case.
        waiting_role: Those that wait for somebody with this role.
        run_id: Those whose id starts so.
        exact_id: The one with this id.
        parent: Those that this run called as sub-agents; an empty string for those that no run called.
        limit: How many runs a page has at most.
        after: The ``next`` of the page before; empty for the first page.

    Raises:
        ConfigurationError: There is no such status or ending, a time is not a number, what is searched for is not a
            text, the limit is less than 1, ``after`` is not the ``next`` of a page, or an entry of the metadata is a
            list or an object, which cannot be searched.
    """

    status: Status | None = None
    ending: str | None = None
    actor: str | None = None
    session_id: str | None = None
    tag: str | None = None
    any_tag: tuple[str, ...] | None = None
    metadata: Mapping[str, str | float | bool | None] | None = field(default=None, hash=False)
    model: str | None = None
    since: float | None = None
    until: float | None = None
    text: str | None = None
    waiting_role: str | None = None
    run_id: str | None = None
    exact_id: str | None = None
    parent: str | None = None
    limit: int = 50
    after: str = ""

    def __post_init__(self) -> None:
        for name, known in (("status", get_args(Status)), ("ending", ("", *ENDINGS))):
            if (value := getattr(self, name)) is not None and value not in known:
                raise ConfigurationError(f"{name}={value!r}: it is one of {', '.join(filter(None, known))}")
        for name in ("since", "until"):
            if not isinstance(value := getattr(self, name), (int, float, NoneType)):
                raise ConfigurationError(f"{name}={value!r}: it is in seconds since the epoch, as time.time() is")
        for name, as_listed in _FORMS.items():
            if not isinstance(value := getattr(self, name), (str, NoneType)):
                raise ConfigurationError(f"{name}={value!r}: it must be a string")
            if value is not None:
                object.__setattr__(self, name, as_listed(value) or value)  # by blanks no run is listed
        if self.any_tag is not None:
            object.__setattr__(self, "any_tag", tuple(map(listed_text, self.any_tag)))
        if self.limit < 1:
            raise ConfigurationError(f"limit={self.limit}: it must be 1 or more")
        if self.after and not (self.after.isascii() and self.after.isdigit() and len(self.after) < 19):
            raise ConfigurationError(f"after={self.after!r} is not the 'next' of a page")
        for name, value in (self.metadata or {}).items():
            if _entry_text(value) is None:
                raise ConfigurationError(f"metadata[{name!r}] is searched by a text or a number, not by {value!r}")

    @property
    def entries(self) -> Mapping[str, str]:
        """The entries of ``metadata`` as runs are listed by them."""
        return listed_metadata(self.metadata or {})

    def matches(self, info: RunInfo) -> bool:
        """Whether a run is one of them, whatever page it is on. A store with its own index need not use this."""
        waiting, started = info.waiting_for, info.started
        return (
            all(
                wanted is None or wanted == found
                for wanted, found in (
                    (self.status, info.status),
                    (self.ending, info.ending),
                    (self.actor, info.actor),
                    (self.session_id, info.session_id),
                    (self.model, info.model),
                    (self.parent, info.parent),
                    (self.exact_id, info.run_id),
                )
            )
            and (self.tag is None or self.tag in info.tags)
            and (self.any_tag is None or not set(self.any_tag).isdisjoint(info.tags))
            and self.entries.items() <= (info.metadata or {}).items()
            and (self.since is None or (started is not None and started >= self.since))
            and (self.until is None or (started is not None and started < self.until))
            and (self.text is None or fold_case(self.text) in fold_case(info.prompt))
            and (self.waiting_role is None or (waiting is not None and self.waiting_role in waiting.roles))
            and (self.run_id is None or info.run_id.startswith(self.run_id))
        )


_FOLDED = {upper: upper + 32 for upper in range(ord("A"), ord("Z") + 1)}


def fold_case(text: str) -> str:
    """A text in which each ASCII letter is lower case: two texts that a search takes for the same are the same."""
    return text.translate(_FOLDED)


@dataclass(frozen=True, slots=True)
class RunPage:
    """Some of the runs that a query finds, the newest first.

    Attributes:
        runs: The runs.
        next: For ``RunQuery.after``, to get the next page; empty if there is none.
    """

    runs: tuple[RunInfo, ...] = field(default=())
    next: str = ""


def first_info(run_id: str, first: SealedRecord) -> RunInfo:
    """What a run's first record says about it. A value that was redacted is empty.

    Raises:
        JournalError: The record cannot be read.
    """
    body = open_record(first)
    try:
        parent: Mapping[str, Any] = body.get("parent", {})
        tags: Sequence[Any] = body.get("tags") or ()
        return RunInfo(
            run_id,
            "running",
            started=body["ts"] / 1000,
            updated=body["ts"] / 1000,
            prompt=_text(_prompt_in(body)),
            actor=_text(body.get("requester", {}).get("id")),
            session_id=_text(body.get("session")),
            tags=tuple(map(_text, tags)) if isinstance(tags, list) else (),
            parent=str(parent["run"]) if "call" in parent else "",
            metadata=listed_metadata(body.get("metadata")),
        )
    except (LookupError, TypeError, AttributeError) as error:
        raise JournalError(f"the first record of run {run_id!r} cannot be read") from error


def _prompt_in(body: Mapping[str, Any]) -> Any:
    """The last message of the user in a first record, or an empty string."""
    try:
        messages = cast("list[dict[str, Any]]", body.get("messages") or body["state"]["messages"])
        return next((each["content"] for each in reversed(messages) if each["role"] == "user"), "")
    except (LookupError, TypeError):  # it asks nothing, or its state was redacted
        return ""


def _text(value: Any) -> str:
    """What is listed of a text; an empty string if it is not a text or was redacted."""
    return listed_text(value) if isinstance(value, str) else ""


def listed_metadata(metadata: object) -> dict[str, str]:
    """The entries of metadata by which a run is listed. Metadata that was redacted has none."""
    if not isinstance(metadata, Mapping):
        return {}
    texts = ((_text(name), _entry_text(value)) for name, value in cast("Mapping[str, Any]", metadata).items())
    return {name: text for name, text in texts if text is not None}


def _entry_text(value: object) -> str | None:
    """The value of an entry as it is listed; None for what is not listed: lists, objects, and what was redacted."""
    match value:
        case str():
            return _text(value)
        case float() if value.is_integer():
            return str(int(value))  # as JavaScript and PostgreSQL write it
        case None | bool() | int() | float():
            return json.dumps(value)
        case _:
            return None


def spent_before(first: SealedRecord) -> Usage:
    """What a run had used when it began: for one that was forked, what its origin had; else nothing.

    Its limits count that, too. A fork of an earlier release does not say it, so it counts as the fork's own.

    Raises:
        JournalError: The record cannot be read.
    """
    try:
        return Usage(**open_record(first).get("spent", {})) - NO_USAGE  # fails for what is not a number
    except TypeError as error:
        raise JournalError("what the run had used when it was forked cannot be read") from error


def info_of(
    base: RunInfo,
    before: Usage,
    run: RunState,
    status: Status,
    updated: float,
    expires: float | None = None,
) -> RunInfo:
    """A run as it is listed now.

    Args:
        base: What its first record says about it.
        before: What it had used when it began (``spent_before``).
        run: Its state.
        status: Its status.
        updated: When its newest record was written, in seconds since the epoch.
        expires: When the request that it waits for expires, in seconds since the epoch, or None.
    """
    waits = status == "suspended" and run.pending_request is not None
    usage = run.usage - before
    return replace(
        base,
        status=status,
        updated=int(updated * 1000) / 1000,  # as in the record
        ending=run.ended if status == "finished" else "",
        cost_usd=usage.known_cost_usd,
        tokens=usage.total_tokens,
        waiting_for=_waiting_for(run.pending_request) if waits else None,
        expires=expires if waits else None,
    )


def _waiting_for(request: PendingRequest | None) -> WaitingFor | None:
    if request is None:
        return None
    roles = () if request.quorum is None else request.quorum.roles
    return WaitingFor(request.kind, request.tool, tuple(map(storable_text, roles)))


def called_model(records: Sequence[SealedRecord]) -> str:
    """The name of the first model that the loop called, or an empty string."""
    for record in records:
        if is_kind(record, "effect.intent"):
            body = decode(record.body)
            if str(body.get("eid", "")).isdigit():  # that of a call of a tool has a point
                return storable_text(str(body.get("name", "")))
    return ""
