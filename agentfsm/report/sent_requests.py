"""The requests of a run to its model, as they were sent: of each the messages that the one before did not have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

from agentfsm.errors import AgentfsmError
from agentfsm.journal.records import SealedRecord, is_kind, open_record
from agentfsm.journal.rehydrate import RehydratedRun
from agentfsm.loop.messages import Message
from agentfsm.loop.prompts import render_messages

__all__ = ["SentRequest", "sent_requests"]

_UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, AgentfsmError)


class SentRequest(NamedTuple):
    """What a model was sent in one call.

    Attributes:
        seq: The sequence number of the record of the call.
        same: How many messages it begins with that the request before had, too.
        added: The messages after those.
    """

    seq: int
    same: int
    added: tuple[Message, ...]


def sent_requests(sealed: Sequence[SealedRecord]) -> Iterator[SentRequest]:
    """The requests of a run, in order; they end at a record that cannot be read, or of which a value was redacted.

    The calls that the effect of a user-defined state makes are not among them.

    Args:
        sealed: Its records, as the store keeps them.
    """
    run, before = RehydratedRun(), tuple[Message, ...]()
    for row in sealed:
        try:
            run.add(row)
            if not is_kind(row, "effect.intent") or "." in str(open_record(row)["eid"]):
                continue
            messages = tuple(render_messages(run.run))
        except _UNREADABLE:
            return
        pairs = zip(before, messages, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1] or pair[0] == pair[1], pairs))
        yield SentRequest(row.seq, same, messages[same:])
        before = messages
