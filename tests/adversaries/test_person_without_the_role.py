"""A person who may answer a request, but may not decide it, attacks the request.

Each attack is what such people send, in order: replies, each with whatever the host authenticates, to a run in a SQLite
file or to a signed record, in a new agent on a newly opened store each time. After each, the payment has not run, no
vote counts that its person may not give, and nobody counts twice.
"""

from __future__ import annotations

import asyncio
import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest

from agentfsm import (
    Actor,
    Agent,
    AgentfsmError,
    Allow,
    Approval,
    Deny,
    Edit,
    FileReplayGuard,
    GiveUp,
    Host,
    ItDidNotRun,
    ItRan,
    SqliteStore,
    UserInputRequested,
    tool,
)
from agentfsm.testing import FakeClock, ScriptedModel, call

RULE = Approval(
    n=2, roles=("manager",), not_requester=True, validity_s=1000, escalate_to=("director",), escalate_after_s=600
)
SECRET = b"of the host, 32 bytes at the least"
ROLES = {
    "ann": ("manager",),  # requests
    "bob": ("manager",),
    "cy": ("manager",),
    "dan": ("clerk",),
    "eve": ("director",),
    "nobody": (),
    "upper": ("Manager", "MANAGER"),
    "spaced": ("manager ", " manager", "manager\n"),
    "cyrillic": ("m\u0430nager",),
    "hidden": ("man\u200bager",),
    "pattern": ("*", "manager*", ".*", "man"),
    "joined": ("manager,director", "manager director"),
    "service": ("manager-service",),
}


def plain(name: str) -> str:
    """What a careless directory makes of a name before it looks it up."""
    folded = unicodedata.normalize("NFKC", name).casefold()
    return "".join(c for c in folded if unicodedata.category(c) not in ("Cf", "Cc", "Zs"))


def authenticate(token: Any) -> Actor | None:
    """The person whose password a token has. The directory takes any spelling of a name, and keeps it."""
    if not isinstance(token, str):
        return None
    name, _, password = token.rpartition(":")
    user = plain(name)
    return Actor(name, ROLES[user]) if user in ROLES and password == f"of {user}" else None


def token(name: str) -> str:
    return f"{name}:of {plain(name)}"


class Desk:
    """A run that waits for two managers other than Ann before it pays.

    Args:
        folder: For the file of the store, or of used records.
        stored: Whether the run is in a store; else it is a signed record.
    """

    def __init__(self, folder: Path, *, stored: bool = True) -> None:
        self.folder, self.stored = folder, stored
        self.paid: list[int] = []
        self.clock = FakeClock()
        self.asked: list[UserInputRequested] = []
        self.over = False

    def play(self, work: Callable[[Agent], Any], *script: Any) -> None:
        """Let one new agent do something, as a process of its own would; errors of ours are its refusal."""
        paid = self.paid

        @tool(requires_approval=RULE)
        def pay(amount: int) -> str:
            """Pay."""
            paid.append(amount)
            return "paid"

        async def main() -> Any:
            return await work(Agent(ScriptedModel(script or ["Done."]), tools=[pay], host=host))

        settings: dict[str, Any] = {"clock": self.clock, "secret": SECRET, "authenticate": authenticate}
        if self.stored:
            with SqliteStore(self.folder / "runs.db") as store:
                host = Host(store=store, **settings)
                result = asyncio.run(main())
        else:
            host = Host(replay_guard=FileReplayGuard(self.folder / "used"), **settings)
            result = asyncio.run(main())
        if isinstance(result.outcome, UserInputRequested):
            self.asked.append(result.outcome)
        else:
            self.over = True

    def ask(self, run_id: str = "r") -> UserInputRequested:
        self.play(lambda agent: agent.run("Pay.", run_id=run_id, actor=token("ann")), call("pay", amount=5))
        return self.asked[-1]

    def reply(self, reply: Any, by: Any, run: Any = None, **more: Any) -> bool:
        """Whether the reply was taken."""
        waiting = run or ("r" if self.stored else self.asked[-1].suspension_record.to_json())
        try:
            self.play(lambda agent: agent.resume(waiting, reply, by=by, **more))
        except AgentfsmError:
            return False
        return True

    @property
    def votes(self) -> list[str]:
        quorum = self.asked[-1].quorum
        return [] if quorum is None else [plain(vote.id) for vote in quorum.votes]


class Sent(NamedTuple):
    """One reply.

    Attributes:
        reply: What is replied.
        by: Who says so, as the host gets it.
        later_s: Seconds since the reply before.
    """

    reply: Any
    by: Any
    later_s: float = 0


def allow(*names: str) -> list[Sent]:
    return [Sent(Allow(), token(name)) for name in names]


REPLIES: dict[str, list[Sent]] = {
    # without a role
    "a clerk": allow("dan", "dan"),
    "a director before it is escalated": allow("eve", "bob"),
    "somebody without roles": allow("nobody", "bob"),
    "a role in another case": allow("upper", "bob"),
    "a role with white space": allow("spaced", "bob"),
    "a role with a look-alike letter": allow("cyrillic", "bob"),
    "a role with an invisible character": allow("hidden", "bob"),
    "a role that is a pattern": allow("pattern", "bob"),
    "roles as one text": allow("joined", "bob"),
    "a role that begins like the right one": allow("service", "bob"),
    "a clerk's edit": [Sent(Edit({"amount": 1}), token("dan"))],
    "a manager's edit": [Sent(Edit({"amount": 500}), token("bob")), *allow("cy")],
    "an edit that changes nothing": [Sent(Edit({"amount": 5}), token("bob")), *allow("cy")],
    # the requester
    "the requester": allow("ann", "bob"),
    "the requester in capitals": allow("ANN", "bob"),
    "the requester with a space before": allow(" ann", "bob"),
    "the requester with a space after": allow("ann ", "bob"),
    "the requester with a line break": allow("ann\n", "bob"),
    "the requester full-width": allow("\uff41\uff4e\uff4e", "bob"),
    "the requester with an invisible character": allow("a\u200bnn", "bob"),
    # the same person again
    "one manager twice": allow("bob", "bob"),
    "one manager in two cases": allow("bob", "Bob"),
    "one manager in capitals": allow("BOB", "bob"),
    "one manager with a space": allow("bob", "bob "),
    "one manager with a tab": allow("bob", "\tbob"),
    "one manager with a no-break space": allow("bob", "bob\u00a0"),
    "one manager full-width": allow("bob", "\uff42\uff4f\uff42"),
    "one manager with a zero-width joiner": allow("bob", "b\u200dob"),
    "one manager with a soft hyphen": allow("bob", "bo\u00adb"),
    "one manager under sixteen spellings": allow(*(" " * n + "bob" for n in range(16))),
    # who the host does not vouch for
    "nobody": [Sent(Allow(), None), *allow("bob")],
    "a name": [Sent(Allow(), "bob"), *allow("cy")],
    "an empty name": [Sent(Allow(), ""), *allow("bob")],
    "an actor": [Sent(Allow(), Actor("bob", ("manager",))), *allow("cy")],
    "an actor who says that he is verified": [Sent(Allow(), Actor("bob", ("manager",), verified=True)), *allow("cy")],
    "a wrong password": [Sent(Allow(), "bob:of cy"), *allow("cy")],
    "a token in a list": [Sent(Allow(), [token("bob")]), *allow("cy")],
    "a token as bytes": [Sent(Allow(), token("bob").encode()), *allow("cy")],
    "true": [Sent(Allow(), True), *allow("cy")],
    # other replies
    "the word yes": [Sent("yes", token("bob")), *allow("cy")],
    "the word Allow()": [Sent("Allow()", token("dan"))],
    "that it ran": [Sent(ItRan("paid"), token("dan")), Sent(ItRan("paid"), token("bob"))],
    "that it did not run": [Sent(ItDidNotRun(), token("dan")), Sent(ItDidNotRun(), token("bob"))],
    "that it is given up": [Sent(GiveUp(), token("dan")), Sent(GiveUp(), token("bob"))],
    "a clerk's denial": [Sent(Deny("no"), token("dan")), *allow("bob")],
    "nothing": [Sent(None, token("dan")), *allow("bob")],
    # time
    "the second vote after the request has expired": [*allow("bob"), Sent(Allow(), token("cy"), 1001)],
    "escalated too early": [Sent(None, token("dan"), 599), *allow("eve", "bob")],
    "a clerk after the escalation": [Sent(Allow(), token("dan"), 601), *allow("bob")],
    "the requester after the escalation": [Sent(Allow(), token("ann"), 601), *allow("eve")],
    "a director twice after the escalation": [Sent(Allow(), token("eve"), 601), *allow("Eve")],
    "the clock set back before the second vote": [*allow("bob"), Sent(Allow(), token("bob"), -900)],
}


@pytest.mark.parametrize("name", REPLIES)
@pytest.mark.parametrize("stored", [True, False], ids=["stored", "record"])
def test_no_attack_with_replies_succeeds(name: str, stored: bool, tmp_path: Path) -> None:
    desk = Desk(tmp_path, stored=stored)
    desk.ask()
    for sent in REPLIES[name]:
        desk.clock.jump(sent.later_s)
        desk.reply(sent.reply, sent.by)
    assert (desk.paid, desk.over) == ([], False)
    assert len(set(desk.votes)) == len(desk.votes) <= 1
    assert set(desk.votes) <= {"bob", "cy", "eve"}
    assert "eve" not in desk.votes or sum(sent.later_s for sent in REPLIES[name]) >= 600


def _use_the_first_record_again(desk: Desk) -> None:
    first = desk.asked[0].suspension_record.to_json()
    desk.reply(Allow(), token("bob"))
    for name in ("bob", "cy", "cy"):
        desk.reply(Allow(), token(name), run=first)


def _edited(change: Callable[[Any], None]) -> Callable[[Desk], None]:
    """Change every object of a record, and reply to it as the clerk and as a manager."""

    def walk(node: Any) -> None:
        if isinstance(node, list):
            for item in cast("list[Any]", node):
                walk(item)
        elif isinstance(node, dict):
            change(node)
            for item in cast("dict[str, Any]", node).values():
                walk(item)

    def attack(desk: Desk) -> None:
        record = json.loads(desk.asked[0].suspension_record.to_json())
        walk(record)
        assert record != json.loads(desk.asked[0].suspension_record.to_json())
        for name in ("dan", "ann", "bob"):
            desk.reply(Allow(), token(name), run=json.dumps(record))

    return attack


def _set(name: str, value: Any) -> Callable[[Desk], None]:
    def change(node: Any) -> None:
        if name in node:
            node[name] = value

    return _edited(change)


RECORDS: dict[str, Callable[[Desk], None]] = {
    "a record that was used": _use_the_first_record_again,
    "another number of approvals": _set("n", 1),
    "other roles": _set("roles", ["clerk"]),
    "no roles": _set("roles", []),
    "the requester may approve": _set("not_requester", False),
    "another requester": _set("requester", None),
    "votes added": _set("votes", [{"id": "cy", "roles": ["manager"], "kind": "person", "verified": True}]),
    "escalated": _set("escalated", True),
    "other arguments": _set("arguments", {"amount": 500}),
    "another time of expiry": _set("expires_at", 9e9),
    "no signature": _set("signature", ""),
    "another id": _set("record_id", "0" * 16),
}


@pytest.mark.parametrize("name", RECORDS)
def test_no_attack_with_a_record_succeeds(name: str, tmp_path: Path) -> None:
    desk = Desk(tmp_path, stored=False)
    desk.ask()
    RECORDS[name](desk)
    assert (desk.paid, desk.over) == ([], False)
    assert desk.votes in ([], ["bob"])


BOUND_TO: dict[str, Callable[[str, str], Any]] = {
    "nothing": lambda mine, other: "",
    "white space": lambda mine, other: " ",
    "zeros": lambda mine, other: "0" * 64,
    "false": lambda mine, other: False,
    "zero": lambda mine, other: 0,
    "a list": lambda mine, other: [],
    "a pattern": lambda mine, other: "*",
    "eleven digits": lambda mine, other: mine[:11],
    "the digest of another run": lambda mine, other: other,
    "half of each": lambda mine, other: mine[:12] + other[12:],
    "more than the digest": lambda mine, other: mine + "0",
    "the digest and white space": lambda mine, other: mine + " ",
}


@pytest.mark.parametrize("name", BOUND_TO)
def test_no_vote_counts_that_is_bound_to_something_else(name: str, tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    other, mine = desk.ask("other").digest, desk.ask("r").digest
    for voter in ("bob", "cy"):
        assert not desk.reply(Allow(), token(voter), to=BOUND_TO[name](str(mine), str(other)))
    assert (desk.paid, desk.votes) == ([], [])


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "record"])
@pytest.mark.parametrize("by", [None, "bob", "bob:of cy", token("dan"), token("nobody")])
def test_who_may_not_decide_a_request_cannot_dismiss_it(by: Any, stored: bool, tmp_path: Path) -> None:
    desk = Desk(tmp_path, stored=stored)
    desk.ask()
    waiting = "r" if stored else desk.asked[-1].suspension_record.to_json()
    with pytest.raises(AgentfsmError):
        desk.play(lambda agent: agent.dismiss(waiting, "no", by=by))
    desk.reply(Allow(), token("bob"))
    assert (desk.votes, desk.over) == (["bob"], False)
    desk.play(lambda agent: agent.dismiss(waiting if stored else desk.asked[-1].suspension_record, by=token("cy")))
    assert (desk.paid, desk.over) == ([], True)


def test_two_managers_other_than_the_requester_can_approve(tmp_path: Path) -> None:
    """Without this, a host that refuses everybody would stand every attack."""
    for stored in (True, False):
        desk = Desk(tmp_path, stored=stored)
        desk.ask()
        assert desk.reply(Allow(), token("bob"), to=desk.asked[-1].digest if stored else None)
        assert desk.reply(Allow(), token("Cy"))
        assert desk.paid == [5]


def test_the_attacks_are_counted(counted: Callable[[str], None]) -> None:
    count = 2 * len(REPLIES) + len(RECORDS) + len(BOUND_TO)
    assert len(REPLIES) >= 40
    counted(f"a person without the role: {count} attacks, 0 succeeded")
