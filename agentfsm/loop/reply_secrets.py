"""Finds what is secret in the text of a reply: in a structured answer, and in a call that a model writes as text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from pydantic_core import from_json

from agentfsm.loop.reply_reader import parse_json
from agentfsm.loop.withholding import SecretPaths, marked_values, secret_values

_MAX_STARTS = 64  # places in a text at which JSON is looked for
_NAMES = ("tool_name", "name", "tool", "function")
_ARGUMENTS = ("arguments", "parameters", "args", "input")


@dataclass(frozen=True, slots=True)
class ReplySecrets:
    """What may be secret in the text of a reply.

    Attributes:
        schema: The JSON schema of a structured answer that marks secrets in it (``SecretStr``), or None.
        paths: The secret arguments of tools.
        envelope: Whether calls and answers come in JSON envelopes.
    """

    schema: Mapping[str, Any] | None
    paths: SecretPaths
    envelope: bool = False

    @property
    def in_answers(self) -> bool:
        """Whether every reply may have secrets, and not only one in which a model writes a call by mistake."""
        return self.schema is not None or (self.envelope and bool(self.paths))

    def find(self, text: str, before: str = "") -> tuple[Any, ...]:
        """The secrets in a reply, whether or not it is valid, and of one that was cut off what there is."""
        try:
            found = dict.fromkeys(self._found(text))
            if before:
                begun = [each for each in self._found(before) if isinstance(each, str) and each]
                for whole in self._found(before + text):
                    found[whole] = None
                    rests = (whole[len(each) :] for each in begun if isinstance(whole, str) and whole.startswith(each))
                    found |= dict.fromkeys(filter(None, rests))
        except RecursionError:  # no answer or call is nested that deeply
            return ()
        return tuple(value for value in found if isinstance(value, str | int | float))

    def _found(self, text: str, depth: int = 0) -> Iterator[Any]:
        for value in _values(text):
            yield from self._in_calls(value)
            if self.schema is not None:
                yield from marked_values(value, self.schema)
                content = cast("Mapping[str, Any]", value).get("content") if isinstance(value, Mapping) else None
                if self.envelope and isinstance(content, str) and not depth:
                    yield from self._found(content, depth + 1)

    def _in_calls(self, value: Any) -> Iterator[Any]:
        if isinstance(value, list):
            for item in cast("Sequence[Any]", value):
                yield from self._in_calls(item)
        elif isinstance(value, Mapping) and self.paths:
            fields = cast("Mapping[str, Any]", value)
            for name in (fields.get(key) for key in _NAMES):
                for arguments in (_as_object(fields.get(key)) for key in _ARGUMENTS):
                    if isinstance(name, str) and name in self.paths and arguments:
                        yield from secret_values(arguments, *self.paths[name])
            for item in fields.values():
                yield from self._in_calls(item)


def _as_object(value: Any) -> Mapping[str, Any] | None:
    if isinstance(value, str):  # as in some wires' calls
        value = next(_values(value), None)
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else None


def _values(text: str) -> Iterator[Any]:
    """The JSON values in a text: the text itself, or else what is in it, the last one perhaps cut off."""
    if "{" not in text and "[" not in text:
        return
    try:
        yield parse_json(text)
        return
    except ValueError:
        pass
    decoder, place = json.JSONDecoder(), 0
    for _ in range(_MAX_STARTS):
        starts = [at for at in (text.find("{", place), text.find("[", place)) if at >= 0]
        if not starts:
            return
        place = min(starts)
        try:
            value, place = decoder.raw_decode(text, place)
        except ValueError:
            place += 1
            try:
                value = from_json(text[place - 1 :], allow_partial="trailing-strings")
            except ValueError:
                continue
            yield value
            return
        yield value
