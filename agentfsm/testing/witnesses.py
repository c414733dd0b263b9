"""Examples of every guard of the loop, and where the examples of your own guards come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agentfsm.core import detectors as d
from agentfsm.core import guards
from agentfsm.core.examples import Example
from agentfsm.core.failures import Action
from agentfsm.core.guardrails import AgentGuardrails
from agentfsm.core.messages import FinishReason, Message, Reply, ToolCall
from agentfsm.core.rules import Rules
from agentfsm.errors import ContextOverflowError, ProviderError, ToolError, TransientProviderError
from agentfsm.machine.graph import Guard, State, Transition
from agentfsm.runtime.replies import Allow, ItDidNotRun
from agentfsm.runtime.tools import Tool, tool

__all__ = ["BENCH", "Examples", "Witnesses"]


@tool
def fsm_act(n: int) -> str:
    """Do something that cannot be repeated."""
    return str(n)


@tool(idempotent=True, retryable=True)
def fsm_steady(n: int) -> str:
    """Do something that can be run again as it stands."""
    return str(n)


@tool(parallel=True)
def fsm_together(n: int) -> str:
    """Do something that may run together with others."""
    return str(n)


@tool(parallel=True, idempotent=True, retryable=True)
def fsm_both(n: int) -> str:
    """Do something that may run together with others, and again."""
    return str(n)


@tool(ends_run=True, parallel=True)
def fsm_finish(n: int) -> int:
    """Finish."""
    return n


@tool(ends_run=True, parallel=True, idempotent=True, retryable=True)
def fsm_finish_again(n: int) -> int:
    """Finish, at the second try if need be."""
    return n


BENCH: tuple[Tool, ...] = (fsm_act, fsm_steady, fsm_together, fsm_both, fsm_finish, fsm_finish_again)
"""The tools that a witness calls where no example names one: each with other traits."""


@dataclass(frozen=True, slots=True)
class Examples:
    """Where a guard holds, and where it does not.

    Attributes:
        fires_on: With each of these it holds; paths are put together from the first.
        silent_on: With each of these it does not.
    """

    fires_on: tuple[Example, ...] = (Example(),)
    silent_on: tuple[Example, ...] = (Example(),)


class Witnesses:
    """The examples of guards: given ones first, then those declared with ``detector``, then the loop's own.

    Args:
        guardrails: The limits of the runs that are put together.
        rules: Their rules.
        own: Examples by guard, by guard's name or by a row's id.
        output: An output that the agent takes, for ``return_done``.
    """

    def __init__(
        self,
        guardrails: AgentGuardrails,
        rules: Rules,
        own: Mapping[Guard | str, Examples | Example] | None = None,
        output: Any = 1,
    ) -> None:
        self._own = {key: Examples((e,)) if isinstance(e, Example) else e for key, e in (own or {}).items()}
        self._known = _loop(guardrails, rules, output)

    def of(self, row: Transition) -> Examples | None:
        """The examples of a row's guard; None where nobody gave any."""
        for key in (row.id, row.name, row.guard):
            if key is not None and key in self._own:
                return self._own[key]
        declared = getattr(row.guard, "fires_on", None)
        if declared is not None:
            return Examples(tuple(declared), tuple(getattr(row.guard, "silent_on", ())))
        return self._known.get(row.id) or (self._known.get(row.guard) if row.guard is not None else Examples())

    def call(self) -> ToolCall | None:
        """The call that a reply makes where nothing else is said, if somebody said so for ``tool_calls``."""
        given = self._own.get(guards.tool_calls) or self._own.get("tool_calls")
        return given.fires_on[0].call if given is not None else None


COUNTED = Examples((Example(),), ())
"""Of a guard that holds by what came before on its path, with nothing to be said at the moment itself."""


def _call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall("", name, arguments)


def _only(*fires_on: Example, silent_on: tuple[Example, ...] = (Example(),)) -> Examples:
    return Examples(fires_on, silent_on)


def _loop(g: AgentGuardrails, rules: Rules, output: Any) -> dict[Guard | str, Examples]:
    return {
        guards.cancelled: _only(Example(cancel=True)),
        f"{State.SUSPENDED}.cancelled": COUNTED,  # it is dismissed
        guards.aborted: _only(Example(abort=True)),
        d.runaway: COUNTED,
        d.iteration_limit: COUNTED,
        **_budgets(g),
        **_provider(),
        **_reply(g),
        **_dispatch(),
        **_batch(rules, output),
        guards.ask_user: _only(Example(action=Action.ask_user), silent_on=(Example(action=Action.handoff),)),
        guards.handoff: _only(Example(action=Action.handoff), silent_on=(Example(action=Action.retry),)),
        guards.stop: _only(Example(action=Action.stop), silent_on=(Example(action=Action.narrow_scope),)),
        guards.retry_tool: _only(Example(action=Action.retry), silent_on=(Example(action=Action.narrow_scope),)),
        guards.expired: COUNTED,
        guards.approval_decided: _only(Example(answer=Allow())),
        guards.doubt_settled: _only(Example(answer=ItDidNotRun())),
        guards.replied: _only(Example(answer="go on")),
    }


def _budgets(g: AgentGuardrails) -> dict[Guard | str, Examples]:
    time_s, tokens, cost, stall = (
        g.max_execution_time_s or 0,
        g.max_tokens or 0,
        g.max_cost_usd or 0,
        g.stall_threshold_s,
    )
    return {
        d.time_limit: _only(Example(took_s=time_s), silent_on=(Example(took_s=time_s * 0.99),)),
        d.token_limit: _only(Example(tokens=tokens), silent_on=(Example(tokens=tokens - 1),)),
        d.cost_limit: _only(Example(cost_usd=cost), silent_on=(Example(cost_usd=cost * 0.99),)),
        f"{State.PRE_STEP}.no_progress": _only(Example(silent_s=stall + 1), silent_on=(Example(silent_s=stall - 1),)),
    }


def _provider() -> dict[Guard | str, Examples]:
    return {
        d.transient_provider: _only(
            Example(reply=TransientProviderError("503, try again")),
            silent_on=(Example(), Example(reply=ProviderError("401, no such key"))),
        ),
        d.provider_error: _only(
            Example(reply=ProviderError("401, no such key")),
            Example(reply=ZeroDivisionError("an exception that is none of ours")),
            silent_on=(Example(), Example(reply=TransientProviderError("503, try again"))),
        ),
        d.context_overflow: _only(
            Example(reply=ContextOverflowError("too many tokens")),
            silent_on=(Example(), Example(reply=ProviderError("401, no such key"))),
        ),
    }


def _reply(g: AgentGuardrails) -> dict[Guard | str, Examples]:
    cut_off = Reply(Message.assistant("1"), FinishReason.LENGTH)
    refusal = Reply(Message.assistant("1"), FinishReason.REFUSAL)
    return {
        d.output_truncated: _only(Example(reply=cut_off), silent_on=(Example(), Example(reply=refusal))),
        d.output_refused: _only(
            Example(reply=refusal),
            Example(reply=Reply(Message.assistant("1"), FinishReason.CONTENT_FILTER)),
            Example(reply=Reply(Message.assistant("1"), refusal="I would rather not")),
            silent_on=(Example(), Example(reply=cut_off)),
        ),
        d.output_malformed: _only(Example(reply="neither JSON nor a number"), silent_on=(Example(reply="1"),)),
        d.loop_detected: _only(
            Example(call=_call("fsm_act", n=0), times=g.loop_hard_threshold),
            silent_on=(Example(call=_call("fsm_act", n=0), times=g.loop_hard_threshold - 1),),
        ),
        f"{State.POST_LLM}.no_progress": _only(Example(reply="  "), silent_on=(Example(call=_call("fsm_act", n=0)),)),
        guards.tool_calls: _only(Example(call=_call("fsm_act", n=0)), silent_on=(Example(reply="1"),)),
        f"{State.POST_LLM}.otherwise": _only(Example()),
    }


def _dispatch() -> dict[Guard | str, Examples]:
    return {
        guards.approval_required: _only(Example(asks=True)),
        guards.in_doubt: _only(Example(cut=True)),
    }


def _batch(rules: Rules, output: Any) -> dict[Guard | str, Examples]:
    finish = _call("return_done", output=output) if rules.control_tools else _call("fsm_finish", n=1)
    kinds: dict[Callable[..., Any], str] = {
        d.policy_violation: "policy_violation",
        d.ambiguous_input: "ambiguous_input",
        d.scope_too_large: "scope_too_large",
        d.capability_gap: "capability_gap",
        d.kernel_invalidated: "kernel_invalidated",
    }
    plain = RuntimeError("it broke")
    return {
        guards.declared_done: _only(Example(call=finish)),
        guards.declared_unable: _only(Example(call=_call("return_unable", rationale="it cannot be done"))),
        guards.question_asked: _only(Example(call=_call("ask_user", question="Which one?"))),
        guards.calls_pending: COUNTED,
        **{
            g: _only(Example(result=ToolError(kind, kind=kind)), silent_on=(Example(), Example(result=plain)))
            for g, kind in kinds.items()
        },
        d.repeated_error: _only(Example(result=plain, times=2), silent_on=(Example(), Example(result=plain))),
        d.unknown_tool: _only(Example(call=_call("fsm_nowhere", n=0))),
        d.invalid_arguments: _only(Example(call=_call("fsm_act", n="many"))),
        d.environment_error: _only(
            Example(result=OSError("the disk is full")),
            Example(result=FileNotFoundError("no such file")),
            silent_on=(Example(), Example(result=plain)),
        ),
        d.tool_error: _only(
            Example(result=plain),
            Example(result=TimeoutError("too slow")),
            Example(result=ToolError("it says so")),
            silent_on=(Example(), Example(result=OSError("the disk is full"))),
        ),
    }
