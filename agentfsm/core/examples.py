"""Examples of a guard: what happens outside where it holds, and where it does not. ``detector`` declares them.

A detector stays the plain function that it is. Its examples are data beside it, which
``agentfsm.testing`` plays to the real loop: each for itself, and put together along a path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from agentfsm.core.failures import Action
from agentfsm.core.messages import ToolCall

__all__ = ["FINE", "Example", "detector"]

FINE = "fine"
"""What a tool returns where an example does not say."""

F = TypeVar("F", bound=Callable[..., object])


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One thing that happens outside. Give what matters; the rest is as uneventful as it can be.

    Attributes:
        reply: What the model says in the reply before: a text, a ``Reply``, or an exception to raise.
        call: A call that this reply makes.
        times: How often it makes that call, all of them to run together.
        result: What the tool of that call returns; an exception is raised.
        took_s: Seconds that the state's own work takes.
        silent_s: Seconds in which nothing happens, just before it.
        tokens: Tokens that the last reply before it used up.
        cost_usd: USD that the last reply before it cost.
        action: What the policy decides.
        answer: What a person answers: a text, ``Allow()``, ``ItRan()``...
        asks: Whether a hook asks for approval of the call.
        cut: Whether the power fails as the call begins, and the run is taken up from its store.
        cancel: Whether somebody cancels the run.
        abort: Whether a hook aborts the run.
        notes: What the effect of a state of your own returns.
    """

    reply: Any = None
    call: ToolCall | None = None
    times: int = 1
    result: Any = FINE
    took_s: float = 0.0
    silent_s: float = 0.0
    tokens: int = 0
    cost_usd: float = 0.0
    action: Action | None = None
    answer: Any = None
    asks: bool = False
    cut: bool = False
    cancel: bool = False
    abort: bool = False
    notes: Any = None


def detector(*, fires_on: Iterable[Example], silent_on: Iterable[Example] = ()) -> Callable[[F], F]:
    """Say of a guard where it holds and where it does not; the function itself stays as it is.

    ::

        @detector(
            fires_on=[Example(call=call("pay", amount=501))],
            silent_on=[Example(call=call("pay", amount=500)), Example(reply="It is paid.")],
        )
        def too_much(run):
            if all(c.call.arguments.get("amount", 0) <= 500 for c in run.batch):
                return None
            return Failure(kind=FailureKind.policy_violation, explanation="too much")

    Args:
        fires_on: Examples with which it holds; the first is what paths are put together from.
        silent_on: Examples with which it does not.
    """

    def declare(function: F) -> F:
        function.fires_on = tuple(fires_on)  # type: ignore[attr-defined]  # pyright: ignore[reportFunctionMemberAccess]
        function.silent_on = tuple(silent_on)  # type: ignore[attr-defined]  # pyright: ignore[reportFunctionMemberAccess]
        return function

    return declare
