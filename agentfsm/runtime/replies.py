"""What a person may reply to a suspended run: a text, or one of six small values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentfsm.core.messages import canonical_json
from agentfsm.core.state import PersonReply
from agentfsm.errors import ReplyError

__all__ = ["Allow", "Answer", "Deny", "Edit", "GiveUp", "ItDidNotRun", "ItRan", "person_reply"]


@dataclass(frozen=True, slots=True)
class Allow:
    """Approval: let the call run as it stands."""


@dataclass(frozen=True, slots=True)
class Deny:
    """Approval: do not run the call; the model is told why."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Edit:
    """Approval: run the call with other arguments; the model is told that they were changed."""

    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class ItRan:
    """Doubt: the call did run, and this was its result."""

    result: str = "done"


@dataclass(frozen=True, slots=True)
class ItDidNotRun:
    """Doubt: the call did not run; run it now."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Doubt: nobody can tell; go on without the call."""


Answer = str | Allow | Deny | Edit | ItRan | ItDidNotRun | GiveUp


def person_reply(answer: Answer) -> PersonReply:
    """A person's answer as the loop keeps it.

    Raises:
        ReplyError: The answer is none that a run can take.
    """
    match answer:
        case str():
            return PersonReply("text", answer)
        case Allow():
            return PersonReply("allow")
        case Deny(str(reason)):
            return PersonReply("deny", reason)
        case Edit(arguments):
            return PersonReply("edit", arguments=_json_object(arguments))
        case ItRan(str(result)):
            return PersonReply("ran", result)
        case ItDidNotRun():
            return PersonReply("did_not_run")
        case GiveUp():
            return PersonReply("give_up")
        case _:
            raise ReplyError(
                f"a reply is a text, Allow(), Deny(), Edit(), ItRan(), ItDidNotRun() or GiveUp(), not {answer!r}"
            )


def _json_object(arguments: Mapping[str, Any]) -> dict[str, Any]:
    try:
        copy: dict[str, Any] = json.loads(canonical_json(dict(arguments)))
    except (TypeError, ValueError) as error:
        raise ReplyError(f"the arguments of Edit() are no JSON object: {error}") from None
    return copy
