"""What stands in a journal in place of a secret, and how to know it when it comes back."""

from __future__ import annotations

import re

__all__ = ["is_withheld", "stand_in"]

_FORM = re.compile(r"\[secret [0-9a-f]{32}\]")


def stand_in(digest: str) -> str:
    """What stands in place of a secret whose salted hash (hex) is this."""
    return f"[secret {digest[:32]}]"


def is_withheld(value: object) -> bool:
    """Whether a value stands in place of a secret that was not kept."""
    return isinstance(value, str) and _FORM.fullmatch(value) is not None
