"""Examples that make each guard of the loop hold (or not hold), and the lookup of examples for your own guards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agentfsm.errors import ContextOverflowError, ProviderError, ToolError, TransientProviderError
from agentfsm.loop import detectors as d
from agentfsm.loop import guards
from agentfsm.loop.detectors import Example
from agentfsm.loop.failures import Action
from agentfsm.loop.guardrails import AgentGuardrails, Behavior
from agentfsm.loop.human_input import Allow, ItDidNotRun
from agentfsm.loop.messages import FinishReason, Message, Reply, ToolCall
from agentfsm.loop.outcomes import CHECK_BUDGETS, StateResult
from agentfsm.machine.declaration import EffectSpec
from agentfsm.machine.graph import Graph, Guard, Transition
from agentfsm.runtime.tools import Tool, tool
from agentfsm.testing.path_assumptions import loop_guard


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


DEFAULT_TOOLS: tuple[Tool, ...] = (fsm_act, fsm_steady, fsm_together, fsm_both, fsm_finish, fsm_finish_again)
"""The tools that are called where no example names one, each with other options."""


@dataclass(frozen=True, slots=True)
class GuardExamples:
    """Examples of a guard.

    Attributes:
        fires_on: The guard is true for each of these. Scenarios for paths use the first one.
        silent_on: The guard is false for each of these.
    """

    fires_on: tuple[Example, ...] = (Example(),)
    silent_on: tuple[Example, ...] = (Example(),)


class GuardExampleSet:
    """The examples of guards: those passed in, then those declared with ``detector``, then the built-in ones.

    Args:
        graph: The graph.
        guardrails: The limits of the runs.
        behavior: The behavior of the runs.
        own: Examples by guard, guard name or row id.
        output: An output that the agent accepts, for ``return_done``.
    """

    def __init__(
        self,
        graph: Graph,
        guardrails: AgentGuardrails,
        behavior: Behavior,
        own: Mapping[Any, GuardExamples | Example] | None = None,
        output: Any = 1,
    ) -> None:
        self._graph = graph
        self._own = {key: GuardExamples((e,)) if isinstance(e, Example) else e for key, e in (own or {}).items()}
        self._builtin = _loop_examples(guardrails, behavior, output)

    def for_transition(self, row: Transition) -> GuardExamples | None:
        """The examples of a row's guard; None if there are none."""
        own = self._passed_in(row)
        if own is not None:
            return own
        declared = getattr(row.guard, "fires_on", None)
        if declared is not None:
            return GuardExamples(tuple(declared), tuple(getattr(row.guard, "silent_on", ())))
        guard, spec = loop_guard(row), self._graph.specs.get(row.source)
        if row.guard is None:
            return NO_OUTCOME if spec is not None and spec.outcomes else GuardExamples()
        special = None if spec is None or callable(spec.effect) else self._builtin.get((guard, spec.effect))
        return special or self._builtin.get(guard)

    def _passed_in(self, row: Transition) -> GuardExamples | None:
        keys = (row.id, row.name, row.guard, loop_guard(row))
        return next((self._own[key] for key in keys if key is not None and key in self._own), None)

    def default_call(self) -> ToolCall | None:
        """The call that a reply makes by default: that of the examples passed in for ``tool_calls``, if any."""
        own = (self._passed_in(row) for row in self._graph if loop_guard(row) is guards.tool_calls)
        return next((each.fires_on[0].call for each in own if each is not None), None)


BY_APPROVAL_RULE = Example(needs_approval=True)
"""The built-in example of ``approval_required``: a hook asks; or an own tool's rule, where paths call own tools."""

HOLDS_BY_HISTORY = GuardExamples((Example(),), ())
"""For a guard that is true because of earlier transitions of its path, so that nothing need happen at its own."""


NO_OUTCOME = GuardExamples((Example(state_result=StateResult()),), ())
"""For the default row of a state that declares outcomes: its effect comes back with none of them."""


_ANY_ANSWER = {"approval": Allow(), "in_doubt": ItDidNotRun(), "question": "go on", "limit": "go on"}
"""An answer to whatever a run waits for, by the kind of the request."""


def _call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall("", name, arguments)


def _examples(*fires_on: Example, silent_on: tuple[Example, ...] = (Example(),)) -> GuardExamples:
    return GuardExamples(fires_on, silent_on)


_Key = Guard | tuple[Guard | None, EffectSpec | None] | None
"""A guard; or a guard in the states with an effect, or in those that wait, which have none."""


def _loop_examples(g: AgentGuardrails, behavior: Behavior, output: Any) -> dict[_Key, GuardExamples]:
    return {
        guards.cancelled: _examples(Example(cancel=True)),
        (guards.cancelled, None): HOLDS_BY_HISTORY,  # the waiting run is dismissed
        guards.aborted: _examples(Example(abort=True)),
        (guards.aborted, None): _examples(Example(abort=True, answer=_ANY_ANSWER)),
        d.runaway: HOLDS_BY_HISTORY,
        d.iteration_limit: HOLDS_BY_HISTORY,
        **_budget_examples(g),
        **_provider_examples(),
        **_reply_examples(g),
        **_dispatch_examples(),
        **_batch_examples(behavior, output),
        guards.ask_user: _examples(Example(action=Action.ask_user), silent_on=(Example(action=Action.handoff),)),
        guards.handoff: _examples(Example(action=Action.handoff), silent_on=(Example(action=Action.retry),)),
        guards.stop: _examples(Example(action=Action.stop), silent_on=(Example(action=Action.narrow_scope),)),
        guards.retry_tool: _examples(Example(action=Action.retry), silent_on=(Example(action=Action.narrow_scope),)),
        guards.expired: HOLDS_BY_HISTORY,
        guards.escalated: HOLDS_BY_HISTORY,
        guards.vote_recorded: _examples(Example(answer=Allow())),
        guards.approval_decided: _examples(Example(answer=Allow())),
        guards.doubt_settled: _examples(Example(answer=ItDidNotRun())),
        guards.replied: _examples(Example(answer="go on")),
    }


def _budget_examples(g: AgentGuardrails) -> dict[_Key, GuardExamples]:
    time_s, tokens, cost, stall = (
        g.max_execution_time_s or 0,
        g.max_tokens or 0,
        g.max_cost_usd or 0,
        g.stall_threshold_s,
    )
    granted = 1 + g.max_continues  # each reply to a limit grants its amount once more; the first example outlasts all
    return {
        d.time_limit: _examples(Example(duration_s=time_s), silent_on=(Example(duration_s=time_s * 0.99),)),
        d.token_limit: _examples(
            Example(tokens=tokens * granted), Example(tokens=tokens), silent_on=(Example(tokens=tokens - 1),)
        ),
        d.cost_limit: _examples(
            Example(cost_usd=cost * granted), Example(cost_usd=cost), silent_on=(Example(cost_usd=cost * 0.99),)
        ),
        (d.no_progress, CHECK_BUDGETS): _examples(Example(idle_s=stall + 1), silent_on=(Example(idle_s=stall - 1),)),
    }


def _provider_examples() -> dict[_Key, GuardExamples]:
    return {
        d.transient_provider: _examples(
            Example(reply=TransientProviderError("503, try again")),
            silent_on=(Example(), Example(reply=ProviderError("401, no such key"))),
        ),
        d.provider_error: _examples(
            Example(reply=ProviderError("401, no such key")),
            Example(reply=ZeroDivisionError("an exception that is not one of ours")),
            silent_on=(Example(), Example(reply=TransientProviderError("503, try again"))),
        ),
        d.context_overflow: _examples(
            Example(reply=ContextOverflowError("too many tokens")),
            silent_on=(Example(), Example(reply=ProviderError("401, no such key"))),
        ),
    }


def _reply_examples(g: AgentGuardrails) -> dict[_Key, GuardExamples]:
    truncated = Reply(Message.assistant("1"), FinishReason.LENGTH)
    refusal = Reply(Message.assistant("1"), FinishReason.REFUSAL)
    return {
        d.output_truncated: _examples(Example(reply=truncated), silent_on=(Example(), Example(reply=refusal))),
        d.output_refused: _examples(
            Example(reply=refusal),
            Example(reply=Reply(Message.assistant("1"), FinishReason.CONTENT_FILTER)),
            Example(reply=Reply(Message.assistant("1"), refusal="I would rather not")),
            silent_on=(Example(), Example(reply=truncated)),
        ),
        d.output_malformed: _examples(Example(reply="neither JSON nor a number"), silent_on=(Example(reply="1"),)),
        d.loop_detected: _examples(
            Example(call=_call("fsm_act", n=0), times=g.loop_hard_threshold),
            silent_on=(Example(call=_call("fsm_act", n=0), times=g.loop_hard_threshold - 1),),
        ),
        d.no_progress: _examples(Example(reply="  "), silent_on=(Example(call=_call("fsm_act", n=0)),)),
        guards.tool_calls: _examples(Example(call=_call("fsm_act", n=0)), silent_on=(Example(reply="1"),)),
    }


def _dispatch_examples() -> dict[_Key, GuardExamples]:
    return {
        guards.approval_required: _examples(BY_APPROVAL_RULE),
        guards.in_doubt: _examples(Example(crash=True)),
    }


def _batch_examples(behavior: Behavior, output: Any) -> dict[_Key, GuardExamples]:
    finish = _call("return_done", output=output) if behavior.control_tools else _call("fsm_finish", n=1)
    kinds: dict[Callable[..., Any], str] = {
        d.policy_violation: "policy_violation",
        d.ambiguous_input: "ambiguous_input",
        d.scope_too_large: "scope_too_large",
        d.capability_gap: "capability_gap",
        d.kernel_invalidated: "kernel_invalidated",
    }
    plain = RuntimeError("it broke")
    return {
        guards.declared_done: _examples(Example(call=finish)),
        guards.declared_unable: _examples(Example(call=_call("return_unable", rationale="it cannot be done"))),
        guards.question_asked: _examples(Example(call=_call("ask_user", question="Which one?"))),
        guards.calls_pending: HOLDS_BY_HISTORY,
        **{
            g: _examples(Example(result=ToolError(kind, kind=kind)), silent_on=(Example(), Example(result=plain)))
            for g, kind in kinds.items()
        },
        d.repeated_error: _examples(Example(result=plain, times=2), silent_on=(Example(), Example(result=plain))),
        d.unknown_tool: _examples(Example(call=_call("fsm_nowhere", n=0))),
        d.invalid_arguments: _examples(Example(call=_call("fsm_act", n="many"))),
        d.environment_error: _examples(
            Example(result=OSError("the disk is full")),
            Example(result=FileNotFoundError("no such file")),
            silent_on=(Example(), Example(result=plain)),
        ),
        d.tool_error: _examples(
            Example(result=plain),
            Example(result=TimeoutError("too slow")),
            Example(result=ToolError("it says so")),
            silent_on=(Example(), Example(result=OSError("the disk is full"))),
        ),
    }
