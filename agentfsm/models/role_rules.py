"""The order of roles that servers of chat completions demand, and how a transcript is made to keep it.

A transcript says what happened: a person's answer may follow a tool's result, a question an empty reply. OpenAI accepts
any such order. Mistral rejects a user message after a tool's result, Gemini a call after another reply, and the chat
templates of many models all roles that do not alternate, as they are rendered by llama.cpp, vLLM and others. Those of
Llama 3 also reject a reply with several calls.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

from agentfsm.loop.messages import Message
from agentfsm.models.wire_format import PerMessageEncoder
from agentfsm.models.wire_json import as_list, as_object, dumps


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleRules:
    """What a server accepts of the order of messages, and of the ids of calls.

    Attributes:
        alternate: Whether users and replies must take turns.
        one_call: Whether a reply may hold one call only, if they take turns. Each call of a reply with several is then
            a reply of its own, with its result after it.
        short_call_ids: Whether the ids of calls must be nine letters and digits.
    """

    alternate: bool = True
    one_call: bool = False
    short_call_ids: bool = False


ANY_ORDER = RoleRules(alternate=False)

HOSTED_ROLES = RoleRules()
"""What hosted providers accept."""

TEMPLATE_ROLES = RoleRules(one_call=True)
"""What the chat templates of all models accept; also used for servers that are not known."""

_BETWEEN = {"role": "assistant", "content": "OK."}
"""What stands between a tool's result and a user message, where the one may not follow the other."""

_UNSIGNED_FIELDS = {"id", "type", "function"}

_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


def short_call_id(call_id: str) -> str:
    """The id of a call in nine letters and digits, always the same for an id; Mistral's own ids are unchanged."""
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode(errors="surrogatepass")).hexdigest()[:9]


class AlternatingEncoder:
    """Encodes a transcript so that users and replies take turns.

    An empty reply is left out, messages of one role that follow each other become one, and a short reply stands between
    a tool's result and a user message. Only the last item can still change, by the message after it.

    Args:
        items: Encodes each message into items, and holds those that later messages complete.
        one_call: Whether each call of a reply becomes a reply of its own.
    """

    def __init__(self, items: PerMessageEncoder, *, one_call: bool = False) -> None:
        self._items = items
        self._one_call = one_call
        self._encoded: list[str] = []
        self._last: list[dict[str, Any]] = []

    def add(self, message: Message) -> None:
        """Encode a message that every later request repeats."""
        for item in self._items.next_items(message):
            self._append(self._last, item)
            self._encoded += [dumps(done) for done in self._last[:-1]]
            del self._last[:-1]

    def encoded_items(self, tail: Iterable[Message]) -> list[str]:
        """The JSON texts of all items; ``tail`` is encoded for this request only."""
        last = [dict(item) for item in self._last]
        for item in self._items.rest(tail):
            self._append(last, item)
        if len(self._encoded) > 1:
            self._encoded = [",".join(self._encoded)]
        return [*self._encoded, *map(dumps, last)]

    def encode_all(self, messages: Iterable[Message]) -> list[dict[str, Any]]:
        """The items of a whole transcript."""
        made: list[dict[str, Any]] = []
        for item in self._items.encode_all(messages):
            self._append(made, item)
        return made

    def _append(self, items: list[dict[str, Any]], item: dict[str, Any]) -> None:
        """Append an item, or merge it into the last one."""
        split = _split(items[-1], item["tool_call_id"]) if items and self._one_call and item["role"] == "tool" else None
        if split is None:
            _append(items, item)
        else:
            alone, others = split
            items[-1:] = [alone, item, others]


def _split(reply: dict[str, Any], call_id: str) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """A reply with one of its calls, and one with the others.

    None if it holds no others, or a signed one: a signature may cover the calls after it, too.
    """
    calls = [as_object(call) for call in as_list(reply.get("tool_calls"))]
    others = [call for call in calls if call.get("id") != call_id]
    if not others or len(others) == len(calls) or any(call.keys() - _UNSIGNED_FIELDS for call in calls):
        return None
    own = [call for call in calls if call.get("id") == call_id]
    return {**reply, "tool_calls": own}, {"role": "assistant", "content": None, "tool_calls": others}


def _append(items: list[dict[str, Any]], item: dict[str, Any]) -> None:
    """Append an item, or merge it into the last one."""
    role, before = item["role"], items[-1] if items else {"role": ""}
    if role == "assistant" and not item.get("content") and not item.get("tool_calls"):
        return
    if role == before["role"] == "user" or (role == before["role"] == "assistant" and not before.get("tool_calls")):
        items[-1] = before | item | {"content": _join(before.get("content"), item.get("content"))}
        return
    if role == "user" and before["role"] == "tool":
        items.append(dict(_BETWEEN))
    items.append(item)


def _join(before: object, after: object) -> object:
    """Two contents as one: a text, or a list of parts if there are images."""
    if not (before and after):
        return before or after
    if isinstance(before, str) and isinstance(after, str):
        return f"{before}\n\n{after}"
    return [*_parts(before), *_parts(after)]


def _parts(content: object) -> list[object]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else cast("list[object]", content)
