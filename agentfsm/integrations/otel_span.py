"""The small things that every span needs: to end, to fail, to hold what is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentfsm.core.messages import Usage

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span

__all__ = ["Opened", "end", "fail", "known", "usage"]


@dataclass(frozen=True, slots=True)
class Opened:
    """A span that has not ended.

    Attributes:
        span: The span.
        before: The context that was current before it.
    """

    span: Span
    before: Context


def end(opened: Opened, error_type: str | None) -> None:
    """End a span, and make current what was so before it.

    ``detach`` would need the very context in which the span was made current, and a call that is cut off may end
    in another one; to attach what was there before is right in both.
    """
    from opentelemetry import context

    if error_type is not None:
        fail(opened.span, error_type)
    opened.span.end()
    context.attach(opened.before)


def fail(span: Span, error_type: str) -> None:
    """Mark a span as failed; what exactly went wrong may hold anything, and is left out."""
    from opentelemetry.trace import StatusCode

    span.set_attribute("error.type", error_type)
    span.set_status(StatusCode.ERROR, error_type)


def usage(used: Usage) -> dict[str, Any]:
    """What was used up, as attributes."""
    return {
        "gen_ai.usage.input_tokens": used.input_tokens,
        "gen_ai.usage.output_tokens": used.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": used.cached_tokens or None,
        "gen_ai.usage.cache_creation.input_tokens": used.written_tokens or None,
        "gen_ai.usage.reasoning.output_tokens": used.reasoning_tokens or None,
    }


def known(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes without those that have no value."""
    return {name: value for name, value in attributes.items() if value is not None}
