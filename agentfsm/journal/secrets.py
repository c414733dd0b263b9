"""What must never be written into a journal, and the salted commitment that is written in its place."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from agentfsm.core.withheld import stand_in
from agentfsm.journal.canonical import decode, encode

__all__ = ["Secrets", "keys_in_environment"]

_NAME = re.compile(r"(?:KEY|TOKEN|SECRET|PASSWORD|CREDENTIALS)\Z")

SHORTEST = 8
"""Characters that a value must have to be looked for in texts: shorter ones stand there by chance."""


def keys_in_environment() -> list[str]:
    """The values of environment variables whose names say that they are keys, tokens or passwords."""
    named = [os.environ.get(name, "") for name in os.environ if _NAME.search(name.upper())]
    return [value for value in named if len(value) >= SHORTEST]


class Secrets:
    """The secrets of one run.

    Args:
        values: Values to be replaced wherever they occur.
        arguments: Names of secret arguments by tool.

    Attributes:
        salt: The run's salt; whoever has it and a secret can check that the secret was there.
    """

    def __init__(self, values: Iterable[str] = (), arguments: Mapping[str, frozenset[str]] | None = None) -> None:
        self.salt = os.urandom(16).hex()
        self._arguments = arguments or {}
        self._known: dict[str, str] = {}
        for value in values:
            self._learn(value)

    def commitment(self, value: Any) -> str:
        """What stands in place of a secret."""
        text = value if isinstance(value, str) else encode(value)
        digest = hashlib.sha256(f"{self.salt}{text}".encode("utf-8", "surrogatepass")).hexdigest()
        return stand_in(digest)

    def _learn(self, value: Any) -> None:
        if isinstance(value, str) and len(value) >= SHORTEST:
            self._known[encode(value)[1:-1]] = self.commitment(value)

    def scrub(self, text: str) -> str:
        """A JSON text with every known secret replaced."""
        for secret, instead in self._known.items():
            if secret in text:
                text = encode(decode(text.replace(secret, instead)))
        return text

    def arguments(self, tool: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """A call's arguments with the secret ones replaced; from now on they are replaced in texts too."""
        secret = self._arguments.get(tool)
        if not secret:
            return dict(given)
        for name in secret & given.keys():
            self._learn(given[name])
        return {name: self.commitment(value) if name in secret else value for name, value in given.items()}
