"""Who may answer: ``Actor``, the rule of an ``Approval``, and the ``Quorum`` that counts the votes on one call."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Field

from agentfsm.errors import (
    ActorIsRequesterError,
    ActorRoleError,
    AuthenticationError,
    ConfigurationError,
    HumanReplyError,
    RepeatedVoteError,
)

APPROVING_REPLIES = frozenset({"allow", "edit"})
"""The kinds of replies that are an approval."""

MAX_APPROVALS = 16
"""How many approvals a call may need."""


@dataclass(frozen=True, slots=True)
class Actor:
    """Who requests a run or answers it. Journals keep its id readable: use one that may be kept.

    Attributes:
        id: Identifies the actor; two votes with one id are one vote, and so are those with ids that differ only in
            case, white space, invisible characters or width, as a directory may accept one person under each of them.
        roles: The actor's roles.
        kind: What the actor is: ``person``, or another word such as ``service``.
        verified: Whether the host vouches for it (``Host(authenticate=...)``); only the host sets it, and what a
            caller says is not believed.

    Raises:
        ConfigurationError: The id is blank, or the roles are not a list of names.
    """

    id: str
    roles: tuple[str, ...] = ()
    kind: str = "person"
    verified: bool = False

    def __post_init__(self) -> None:
        given: Any = self.id
        if not (isinstance(given, str) and _folded(given)):
            raise ConfigurationError(f"an actor's id must be a string that is not blank, not {given!r}")
        object.__setattr__(self, "roles", _role_names(self.roles, f"the roles of actor {given!r}"))

    def is_same_as(self, other: Actor) -> bool:
        """Whether two ids are one person's, however they are spelt."""
        return is_same_id(self.id, other.id)

    def __str__(self) -> str:
        roles = f" ({', '.join(self.roles)})" if self.roles else ""
        return f"{self.id}{roles}{'' if self.verified else ', claimed, not verified'}"


def is_same_id(one: str, other: str) -> bool:
    """Whether two ids are one person's, however they are spelt."""
    return one == other or _folded(one) == _folded(other)


def _folded(name: str) -> str:
    """A name without what spellings of it differ in; empty if it shows nothing."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
    shown = "".join(char for char in folded if char.isspace() or unicodedata.category(char) not in ("Cf", "Cc"))
    return " ".join(shown.split())


def _role_names(roles: Any, what: str) -> tuple[str, ...]:
    names: tuple[Any, ...] = () if isinstance(roles, (str, bytes)) else tuple(roles)
    if isinstance(roles, (str, bytes)) or not all(isinstance(name, str) and name.strip() for name in names):
        raise ConfigurationError(f"{what} must be a tuple of names, such as ('manager',), not {roles!r}")
    return tuple(dict.fromkeys(names))


@dataclass(frozen=True, slots=True)
class Approval:
    """How many people must approve a call before it runs, and who they may be. One denial denies the call.

    Attributes:
        n: How many approvals it needs, each by another actor; at most ``MAX_APPROVALS``.
        roles: Roles of which an actor must have one to approve or deny; empty for anyone.
        not_requester: Whether the actor who requested the run may not approve.
        validity_s: Seconds after which the request expires, votes or not; None for the guardrails' ``validity_s``.
        escalate_to: Roles that may answer, too, once ``escalate_after_s`` seconds have passed.
        escalate_after_s: After how many seconds without a decision the request is escalated.
        remind_after_s: After how many seconds without a decision people are reminded, again and again, by a worker that
            sends notices; None for that worker's own setting.

    Raises:
        ConfigurationError: A value is out of range, or the two about escalation are not given together.
    """

    n: int = 1
    roles: tuple[str, ...] = ()
    not_requester: bool = False
    validity_s: float | None = None
    escalate_to: tuple[str, ...] = ()
    escalate_after_s: float | None = None
    remind_after_s: Annotated[float | None, Field(exclude_if=lambda seconds: seconds is None)] = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "roles", _role_names(self.roles, "the roles of an approval"))
        object.__setattr__(self, "escalate_to", _role_names(self.escalate_to, "the roles of an escalation"))
        if isinstance(self.n, bool) or not isinstance(self.n, int) or not 1 <= self.n <= MAX_APPROVALS:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(
                f"n, the number of approvals that a call needs, must be from 1 to {MAX_APPROVALS}, not {self.n!r}"
            )
        for name in ("validity_s", "escalate_after_s", "remind_after_s"):
            seconds = getattr(self, name)
            if seconds is not None and not 0 < seconds < float("inf"):
                raise ConfigurationError(f"{name} must be a finite number of seconds greater than 0, not {seconds!r}")
        if bool(self.escalate_to) != (self.escalate_after_s is not None):
            raise ConfigurationError("give both escalate_to and escalate_after_s, or neither")
        if self.escalate_to and not self.roles:
            raise ConfigurationError("escalate_to names more roles that may answer, and without roles anyone may")
        if (self.escalate_after_s or 0) >= (self.validity_s or float("inf")):
            raise ConfigurationError("escalate_after_s must be less than validity_s, or the request expires first")

    @property
    def asks_who(self) -> bool:
        """Whether it matters who answers."""
        return self.n > 1 or bool(self.roles) or self.not_requester

    @property
    def needs_rows(self) -> bool:
        """Whether a graph needs the rows of ``with_votes`` for it."""
        return self.n > 1 or bool(self.escalate_to)


_UNKNOWN = Actor("unknown")
"""Who has approved where it does not matter who."""


@dataclass(frozen=True, slots=True)
class Quorum:
    """The rule for one call and the votes on it so far, as the request in the journal has them.

    Attributes:
        rule: The rule, evaluated for this call.
        requester: Who requested the run, or None.
        asked_at: When the request was made, in seconds since the epoch; votes and escalation do not extend it.
        votes: The actors who have approved, in order.
        escalated: Whether the roles of ``rule.escalate_to`` may answer, too.
    """

    rule: Approval
    requester: Actor | None = None
    asked_at: float = 0.0
    votes: tuple[Actor, ...] = ()
    escalated: bool = False

    def __str__(self) -> str:
        """The votes so far, who may answer, and later."""
        voters = f": {'; '.join(map(str, self.votes))}" if self.votes else ""
        who = f", by one of ({', '.join(self.roles)})" if self.roles else ""
        if self.rule.not_requester:
            who += f", not by {'its requester' if self.requester is None else self.requester.id}"
        later = "" if self.escalates_at is None else f", later also by ({', '.join(self.rule.escalate_to)})"
        return f"{self.rule.n - self.missing} of {self.rule.n} approvals{voters}{who}{later}"

    @property
    def missing(self) -> int:
        """How many approvals are missing."""
        return max(0, self.rule.n - len({actor.id for actor in self.votes}))

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of which an actor must have one; empty for anyone."""
        return (*self.rule.roles, *self.rule.escalate_to) if self.escalated else self.rule.roles

    @property
    def escalates_at(self) -> float | None:
        """When to escalate the request, in seconds since the epoch; None if it is not, or was already."""
        after = self.rule.escalate_after_s
        return None if after is None or self.escalated else self.asked_at + after

    def is_due(self, now: float) -> bool:
        """Whether to escalate the request now."""
        return self.escalates_at is not None and now >= self.escalates_at

    def is_met(self, rule: Approval) -> bool:
        """Whether the votes are enough for a rule, which may have become stricter than the one they were given for."""
        strict = replace(self, rule=rule, votes=())
        allowed = [actor for actor in self.votes if strict.roles_allow(actor) and not strict.bars_requester(actor)]
        return not replace(strict, votes=tuple(allowed)).missing

    def roles_allow(self, actor: Actor) -> bool:
        """Whether an actor has one of the roles that may answer."""
        return not self.roles or not set(actor.roles).isdisjoint(self.roles)

    def bars_requester(self, actor: Actor) -> bool:
        """Whether an actor may not approve, as the one who requested the run, or because nobody knows who did."""
        return self.rule.not_requester and (self.requester is None or actor.is_same_as(self.requester))

    def as_vouched_for(self) -> Quorum:
        """What a host that authenticates believes of it: a voter or a requester who is only claimed is nobody."""
        votes = tuple(actor for actor in self.votes if actor.verified)
        return replace(self, votes=votes, requester=None if self._claims_requester else self.requester)

    def lacks_requester(self, *, authenticated: bool) -> bool:
        """Whether nobody may approve, because it is not known who requested the run."""
        requester = (self.as_vouched_for() if authenticated else self).requester
        return self.rule.not_requester and requester is None

    @property
    def _claims_requester(self) -> bool:
        return self.requester is not None and not self.requester.verified

    def with_vote(self, actor: Actor | None) -> Quorum:
        """The votes with one more, even of somebody unknown; a second one of the same actor changes nothing."""
        actor = actor or _UNKNOWN
        counted = any(each.is_same_as(actor) for each in self.votes)
        return self if counted else replace(self, votes=(*self.votes, actor))

    def check_reply(self, kind: str, actor: Actor | None, *, authenticated: bool = False) -> None:
        """Check that an actor may give a reply.

        Args:
            kind: ``allow``, ``deny`` or ``edit``.
            actor: Who gives it, or None if nobody said.
            authenticated: Whether the host authenticates people: a requester who is only claimed may then be anyone.

        Raises:
            AuthenticationError: The rule needs to know who answers, and nobody said.
            ActorRoleError: The actor has none of the roles that may answer.
            ActorIsRequesterError: The actor requested the run, or it is not known who did, and may not approve.
            RepeatedVoteError: The actor has approved already.
            HumanReplyError: It is an edit, and several people must approve the same arguments.
        """
        rule = self.rule
        if kind == "edit" and rule.n > 1:
            raise HumanReplyError(
                f"{rule.n} people approve this call, and an edit would be approved by one: deny it, with a reason"
            )
        if actor is None:
            if not rule.asks_who:
                return
            raise AuthenticationError("the approval has a rule about who may answer: say who you are with by=")
        if not self.roles_allow(actor):
            raise ActorRoleError(
                f"{actor.id!r} has the roles ({', '.join(actor.roles)}), and one of ({', '.join(self.roles)}) may "
                "answer; the run still waits"
            )
        if kind == "deny":
            return
        if self.bars_requester(actor):
            who = "nobody is recorded as its requester (agent.run(..., actor=...), or --actor)"
            if self.requester is not None:
                who = f"{actor.id!r} requested it"
            raise ActorIsRequesterError(f"whoever requests the run may not approve, and {who}; the run still waits")
        if authenticated and rule.not_requester and self._claims_requester:
            raise ActorIsRequesterError(
                f"whoever requests the run may not approve, and nobody vouched for its requester ({self.requester}): "
                "deny the call, and request it again from a host with authenticate=...; the run still waits"
            )
        if any(each.is_same_as(actor) for each in self.votes):
            raise RepeatedVoteError(
                f"{actor.id!r} has approved this call already; {self.missing} more approval(s) by others are needed"
            )
