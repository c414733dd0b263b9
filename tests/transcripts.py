"""Whether a transcript may go over the OpenAI and the Anthropic wire: an oracle written from the wires' own rules.

It knows nothing of the loop. The rules, each of which a server answers with status 400:

* both: every tool call of an assistant's message is answered exactly once, by tool messages that stand right behind
  it, in front of anything else; a tool message with an id stands nowhere else, and answers a call of that message;
* both: no call and no answer has an empty id;
* Anthropic: no two calls of a conversation have the same id;
* Anthropic: the first turn is the user's; a request's last one is not the assistant's (that would be a prefill).

A tool message without an id is, by the contract of ``Message``, sent as a user's message, and counts as one here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from agentfsm.core.messages import Message, Role
from agentfsm.core.model import ModelRequest

__all__ = ["check_requests", "check_transcript", "problems"]


def check_transcript(messages: Sequence[Message], *, request: bool = True) -> None:
    """Assert that both wires take a transcript.

    Args:
        messages: The messages.
        request: Whether they are a request, which may not end with the assistant; False for the
            transcript of a run that is over.
    """
    found = problems(messages, request=request)
    assert not found, "\n".join([*found, "", *map(_line, range(len(messages)), messages)])


def check_requests(requests: Iterable[ModelRequest]) -> None:
    """Assert that both wires take every one of some recorded requests."""
    for request in requests:
        check_transcript(request.messages)


def problems(messages: Sequence[Message], *, request: bool = True) -> list[str]:
    """What the wires would refuse, each with the place of the message."""
    found: list[str] = []
    seen: set[str] = set()
    due: list[str] = []
    for place, message in enumerate(messages):
        if message.role is Role.TOOL and message.tool_call_id is not None:
            if not message.tool_call_id:
                found.append(f"{place}: the answer has an empty id")
            elif message.tool_call_id in due:
                due.remove(message.tool_call_id)
            else:
                found.append(f"{place}: {message.tool_call_id!r} answers no call of the message in front, or once more")
            continue
        if due:
            found.append(f"{place}: stands in front of the answers to {due}")
            due = []
        if message.role is not Role.ASSISTANT:
            if message.tool_calls:
                found.append(f"{place}: only an assistant calls tools")
            continue
        for call in message.tool_calls:
            if not call.id:
                found.append(f"{place}: a call of {call.name!r} has an empty id")
            if call.id in seen:
                found.append(f"{place}: the id {call.id!r} was used before")
            seen.add(call.id)
            due.append(call.id)
    if due:
        found.append(f"end: nothing answers {due}")
    turns = [m for m in messages if m.role is not Role.SYSTEM]
    if not turns:
        found.append("there is no turn but the system's")
    elif turns[0].role is not Role.USER:
        found.append(f"the first turn is the {turns[0].role.value}'s")
    if request and turns and turns[-1].role is Role.ASSISTANT:
        found.append("the request ends with the assistant")
    return found


def _line(place: int, message: Message) -> str:
    calls = "".join(f" {c.id}={c.name}" for c in message.tool_calls)
    answers = "" if message.tool_call_id is None else f" -> {message.tool_call_id}"
    return f"{place:3} {message.role.value}{answers}:{calls} {message.content[:60]!r}"
