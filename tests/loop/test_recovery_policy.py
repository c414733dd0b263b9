"""The recovery policy: retry budgets, backoff, and what the guardrails limit."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import pytest

from agentfsm import Behavior, ConfigurationError, Host, MemoryStore, RunResult, UserInputRequested
from agentfsm.journal.rehydrate import rehydrate
from agentfsm.journal.replay import replay
from agentfsm.loop.failures import LIMIT_KINDS, Action, Failure, FailureKind
from agentfsm.loop.outcomes import RecoveryDecided
from agentfsm.loop.presets import PRESETS
from agentfsm.loop.recovery_policy import DefaultPolicy, PolicyError, Recovery, RecoveryPolicy, decide_recovery
from agentfsm.loop.state import CallState, RunState
from agentfsm.loop.state_json import dump_state
from agentfsm.testing import FakeClock, call
from tests.helpers.scenarios import (
    echo,
    explode,
    failed_result,
    make_call,
    make_failure,
    make_run,
    request_text,
    run_agent,
    run_async,
    scripted_agent,
    truncated_reply,
)

FINAL = '{"kind": "final", "content": "done"}'

K = FailureKind
BUDGETS = {
    "transient_provider": 3,
    "tool_error": 2,
    "unknown_tool": 2,
    "invalid_arguments": 2,
    "output_malformed": 2,
    "environment_error": 2,
    "output_truncated": 1,
}


@pytest.mark.parametrize("kind", FailureKind)
def test_the_retry_budgets_are_those_of_the_rules(kind):
    assert DefaultPolicy().retry_budget(kind) == BUDGETS.get(kind.value, 0)


@pytest.mark.parametrize("kind", [K(k) for k in BUDGETS])
def test_a_retry_with_its_budget_spent_becomes_a_handoff(kind):
    budget = BUDGETS[kind.value]
    seen = [
        DefaultPolicy().decide(make_failure(kind.value), make_run(failure_attempts={kind: before}))
        for before in range(budget + 2)
    ]
    assert seen == [Action.retry] * budget + [Action.handoff] * 2


@pytest.mark.parametrize("kind", [K.scope_too_large, K.no_progress, K.context_overflow, K.kernel_invalidated])
def test_a_second_narrowing_of_a_kind_becomes_a_handoff(kind):
    seen = [
        DefaultPolicy().decide(make_failure(kind.value), make_run(failure_attempts={kind: before}))
        for before in range(3)
    ]
    assert seen == [Action.narrow_scope, Action.handoff, Action.handoff]


def test_attempts_are_counted_per_kind_in_decisions():
    run = make_run(failure_attempts={K.unknown_tool: 9, K.no_progress: 9})
    assert DefaultPolicy().decide(make_failure("tool_error"), run) is Action.retry
    assert DefaultPolicy().decide(make_failure("scope_too_large"), run) is Action.narrow_scope


@pytest.mark.parametrize("action", [Action.ask_user, Action.handoff, Action.stop])
def test_any_other_suggestion_is_followed_however_often(action):
    run = make_run(failure_attempts={K.tool_error: 9})
    assert DefaultPolicy().decide(make_failure("tool_error", suggested_action=action), run) is action


def test_a_policy_may_have_its_own_budgets_and_actions():
    policy = DefaultPolicy(budgets={K.no_progress: 1}, actions={K.no_progress: Action.retry})
    run = make_run()
    assert policy.decide(make_failure("no_progress"), run) is Action.retry
    run.record_failure_attempt(K.no_progress)
    assert policy.decide(make_failure("no_progress"), run) is Action.handoff
    assert policy.decide(make_failure("tool_error"), run) is Action.handoff
    assert isinstance(policy, RecoveryPolicy)


@pytest.mark.parametrize(
    ("action", "decided"),
    [("retry", [Action.retry, Action.handoff]), ("narrow_scope", [Action.narrow_scope, Action.handoff])],
)
def test_budgets_hold_for_kinds_and_actions_that_are_given_as_strings(action, decided):
    policy = DefaultPolicy(budgets={"capability_gap": 1}, actions={"capability_gap": action})
    runs = [make_run(failure_attempts={K.capability_gap: before}) for before in range(2)]
    assert [policy.decide(make_failure("capability_gap"), run) for run in runs] == decided


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"budgets": {"tool_errors": 3}}, "'tool_errors' is not a valid FailureKind"),
        ({"budgets": {"tool_error": "3"}}, "'str' object cannot be interpreted as an integer"),
        ({"actions": {"tool_errors": "stop"}}, "'tool_errors' is not a valid FailureKind"),
        ({"actions": {"tool_error": "give_up"}}, "'give_up' is not a valid Action"),
    ],
)
def test_a_policy_for_what_does_not_exist_is_refused(wrong, named):
    with pytest.raises(ConfigurationError, match=named):
        DefaultPolicy(**wrong)


def test_a_policy_changes_nothing():
    run = make_run(failure=make_failure("tool_error"), failure_attempts={K.tool_error: 1})
    before = repr(run)
    decide_recovery(DefaultPolicy(), run)
    assert repr(run) == before


# -- backoff -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("attempt", "seconds"), [(1, 2), (2, 4), (3, 8), (4, 16), (5, 30), (6, 30), (10**6, 30)])
def test_the_back_off_doubles_up_to_half_a_minute(attempt, seconds):
    assert DefaultPolicy().backoff(K.transient_provider, attempt) == seconds


@pytest.mark.parametrize("kind", [k for k in FailureKind if k is not K.transient_provider])
def test_only_the_provider_is_given_time(kind):
    assert DefaultPolicy().backoff(kind, 3) == 0


def transient(before: int = 0, *, limits: dict[str, float] | None = None, **more: object) -> RunState:
    return make_run(
        "recover",
        failure=make_failure("transient_provider", **more),
        failure_attempts={K.transient_provider: before},
        limits=limits,
    )


@pytest.mark.parametrize(("before", "seconds"), [(0, 2), (1, 4), (2, 8)])
def test_the_first_retry_is_attempt_one(before, seconds):
    assert decide_recovery(DefaultPolicy(), transient(before)) == RecoveryDecided(Action.retry, backoff_s=seconds)


def test_a_handoff_waits_for_nothing():
    assert decide_recovery(DefaultPolicy(), transient(3)) == RecoveryDecided(Action.handoff)


@pytest.mark.parametrize(("asked", "seconds"), [(7.5, 7.5), (1, 2), (0, 2), (None, 2)])
def test_the_back_off_is_never_less_than_what_the_provider_asks_for(asked, seconds):
    assert decide_recovery(DefaultPolicy(), transient(metadata={"retry_after_s": asked})).backoff_s == seconds


@pytest.mark.parametrize("asked", ["soon", [5], {"s": 5}, "nan", -5, None, ""])
def test_a_retry_after_that_is_not_a_number_is_ignored(asked):
    assert decide_recovery(DefaultPolicy(), transient(metadata={"retry_after_s": asked})).backoff_s == 2


@pytest.mark.parametrize(("asked", "elapsed_s"), [(9000, 40), (60, 40), (0, 98.5)])
def test_a_wait_that_would_outlast_the_runs_time_is_not_begun(asked, elapsed_s):
    run = transient(metadata={"retry_after_s": asked}, limits={"max_execution_time_s": 100})
    run.elapsed_s = elapsed_s
    assert decide_recovery(DefaultPolicy(), run) == RecoveryDecided(Action.handoff)


@pytest.mark.parametrize(("asked", "elapsed_s"), [(59, 40), (0, 97)])
def test_a_wait_that_ends_within_the_runs_time_is_waited(asked, elapsed_s):
    run = transient(metadata={"retry_after_s": asked}, limits={"max_execution_time_s": 100})
    run.elapsed_s = elapsed_s
    assert decide_recovery(DefaultPolicy(), run) == RecoveryDecided(Action.retry, backoff_s=max(asked, 2))


def test_a_run_whose_time_is_up_waits_for_nothing_and_leaves_it_to_the_time_limit():
    run = transient(metadata={"retry_after_s": 9000}, limits={"max_execution_time_s": 100})
    run.elapsed_s = 100
    assert decide_recovery(DefaultPolicy(), run) == RecoveryDecided(Action.retry)


class _NeverAsked(DefaultPolicy):
    def decide(self, failure, state):
        raise AssertionError("a policy was asked about the run's own time limit")


@pytest.mark.parametrize("attempts", [0, 9])
def test_a_model_call_that_the_runs_time_cut_off_is_left_to_the_time_limit_and_not_to_the_policy(attempts):
    cut_off = make_failure("transient_provider", metadata={"time_up": True})
    run = make_run("recover", failure=cut_off, failure_attempts={K.transient_provider: attempts}, elapsed_s=300)
    assert decide_recovery(_NeverAsked(), run) == RecoveryDecided(Action.retry)


def test_where_there_is_no_time_limit_the_provider_is_waited_for():
    run = transient(metadata={"retry_after_s": 9000}, limits={"max_execution_time_s": None})
    assert decide_recovery(DefaultPolicy(), run).backoff_s == 9000


def test_jitter_lengthens_the_back_off_by_at_most_its_part_and_is_repeatable():
    policy = DefaultPolicy(jitter=0.5)
    waits = {decide_recovery(policy, transient(), seed).backoff_s for seed in range(20)}
    assert all(2 <= wait <= 3 for wait in waits)
    assert len(waits) > 10
    assert decide_recovery(policy, transient(), 7) == decide_recovery(policy, transient(), 7)


def test_jitter_differs_from_run_to_run_and_from_step_to_step():
    policy = DefaultPolicy(jitter=0.5)
    other = transient()
    other.run_id = "another"
    later = transient()
    later.counters["steps"] = 5
    assert len({decide_recovery(policy, r).backoff_s for r in (transient(), other, later)}) == 3


def test_jitter_never_undercuts_the_provider():
    assert decide_recovery(DefaultPolicy(jitter=0.5), transient(metadata={"retry_after_s": 20})).backoff_s == 20


class Own:
    """A policy of a user's."""

    def __init__(self, action: object = "retry", wait: float = 0.0) -> None:
        self.action, self.wait = action, wait
        self.asked: list[tuple[FailureKind, int]] = []

    def retry_budget(self, kind: FailureKind) -> int:
        return 1

    def backoff(self, kind: FailureKind, attempt: int) -> float:
        self.asked.append((kind, attempt))
        return self.wait

    def decide(self, failure: Failure, state: RunState) -> Action:
        return self.action  # type: ignore[return-value]


@pytest.mark.parametrize("wait", [math.nan, math.inf])
def test_a_back_off_that_is_no_number_is_an_error_of_the_policy(wait):
    with pytest.raises(PolicyError, match="policy Own raised ValueError: a backoff must be a finite number"):
        decide_recovery(Own(wait=wait), transient())


def test_a_custom_policy_decides_the_backoff():
    policy = Own(wait=1.5)
    run = make_run("recover", failure=make_failure("tool_error"), failure_attempts={K.tool_error: 4})
    assert decide_recovery(policy, run).backoff_s == 1.5
    assert policy.asked == [(K.tool_error, 5)]


@pytest.mark.parametrize("word", ["stop", Action.stop])
def test_a_custom_policy_may_return_its_action_as_a_string(word):
    assert decide_recovery(Own(word), transient()) == RecoveryDecided(Action.stop)


@pytest.mark.parametrize("word", ["shrug", None, 3])
def test_a_word_that_is_no_action_is_an_error_of_the_policy(word):
    with pytest.raises(PolicyError, match=r"policy Own raised ValueError: .*Action"):
        decide_recovery(Own(word), transient())


def test_a_policy_may_use_its_own_words():
    own = Own(Recovery(Action.ask_user, question="Which printer?"))
    assert decide_recovery(own, transient()) == RecoveryDecided(Action.ask_user, question="Which printer?")
    own = Own(Recovery("retry", instruction="Try the other one."), wait=1.5)
    assert decide_recovery(own, make_run("recover", failure=make_failure("tool_error"))) == RecoveryDecided(
        Action.retry, backoff_s=1.5, instruction="Try the other one."
    )


@pytest.mark.parametrize("words", [{"instruction": 7}, {"question": None}])
def test_words_of_a_policy_are_text(words):
    with pytest.raises(TypeError, match="must be a string"):
        Recovery(Action.retry, **words)


def test_recover_without_a_failure_continues():
    assert decide_recovery(Own("stop"), make_run("recover")) == RecoveryDecided(Action.retry)


# -- what the guardrails still say --------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(LIMIT_KINDS))
def test_a_person_may_extend_a_spent_budget_only_so_often(kind):
    seen = [
        decide_recovery(
            DefaultPolicy(),
            make_run(
                "recover", failure=make_failure(kind.value), counters={"continues": n}, limits={"max_continues": 2}
            ),
        )
        for n in range(4)
    ]
    assert [s.action for s in seen] == [Action.ask_user, Action.ask_user, Action.stop, Action.stop]


@pytest.mark.parametrize("action", [Action.handoff, Action.narrow_scope, Action.retry])
def test_max_continues_only_limits_ask_user(action):
    policy = DefaultPolicy(budgets={FailureKind.token_limit: 9}, actions={FailureKind.token_limit: action})
    run = make_run("recover", failure=make_failure("token_limit"), counters={"continues": 99})
    assert decide_recovery(policy, run).action is action


def test_max_continues_does_not_limit_other_questions():
    run = make_run("recover", failure=make_failure("ambiguous_input"), counters={"continues": 99})
    assert decide_recovery(DefaultPolicy(), run).action is Action.ask_user


# -- running a call again unchanged -------------------------------------------------------------------


def failed_batch(
    kind: str = "tool_error", *, retryable: bool = True, retries: int = 0, other: bool | None = None
) -> RunState:
    call = make_call()
    batch = [CallState(call, call.signature, failed_result(call, kind, retryable=retryable), retries=retries)]
    if other is not None:
        second = make_call("c2")
        batch.append(CallState(second, second.signature, failed_result(second, retryable=other)))
    return make_run("recover", failure=make_failure(kind), batch=batch)


@pytest.mark.parametrize(
    ("run", "again"),
    [
        (failed_batch(), True),
        (failed_batch("environment_error"), True),
        (failed_batch(other=True), True),
        (failed_batch(retryable=False), False),
        (failed_batch(other=False), False),
        (failed_batch(retries=1), False),
        (failed_batch("invalid_arguments"), False),
        (failed_batch("unknown_tool"), False),
        (make_run("recover", failure=make_failure("tool_error")), False),
    ],
)
def test_only_retryable_calls_are_run_again_and_only_so_often(run, again):
    assert decide_recovery(DefaultPolicy(), run).retry_calls is again


def test_calls_are_not_run_again_where_the_run_ends():
    run = failed_batch()
    run.failure_attempts[K.tool_error] = 2
    assert decide_recovery(DefaultPolicy(), run) == RecoveryDecided(Action.handoff)


# -- a policy's own words, on a run --------------------------------------------------------------------


class Helpful(DefaultPolicy):
    """Says in its own words what is to be done."""

    def decide(self, failure: Failure, state: RunState) -> Action | Recovery:
        if failure.kind is K.tool_error:
            return Recovery(Action.retry, instruction="Use the other printer.")
        if failure.kind is K.output_truncated:
            return Recovery(Action.ask_user, question="How long may it be?")
        return super().decide(failure, state)


def test_a_policys_words_reach_the_model_once_and_the_person_and_are_journaled():
    store = MemoryStore()
    host = Host(clock=FakeClock(), secret=b"secret", store=store)
    script = [call("explode"), call("echo", text="a"), truncated_reply(text="too lo"), "done"]
    agent, model = scripted_agent(*script, tools=[explode, echo], policy=Helpful(), host=host)
    waiting = run_async(lambda: run_agent(agent))
    assert ["Use the other printer." in request_text(r) for r in model.requests] == [False, True, False]
    assert isinstance(waiting.outcome, UserInputRequested)
    assert waiting.outcome.question == "How long may it be?"
    rows = asyncio.run(store.records(waiting.run_state.run_id))
    assert not [row for row in rows if "other printer" in row.body]  # a text of a user's, which can be redacted
    assert dump_state(rehydrate(rows).run) == dump_state(waiting.run_state)
    assert replay(rows, agent.graph).same
    assert replay(rows, agent.graph, policy=Helpful()).same

    async def answered() -> RunResult:
        return await agent.resume(waiting.run_state.run_id, "Short.")

    assert run_async(answered).output == "done"


OWN_WORDS = "Answer with one envelope, as in the manual."


class Worded(DefaultPolicy):
    """Retries with its own words."""

    def decide(self, failure: Failure, state: RunState) -> Action | Recovery:
        return Recovery(Action.retry, instruction=OWN_WORDS)


@pytest.mark.parametrize("feedback", ["once", "kept"])
def test_a_policys_words_take_the_place_of_the_loops_feedback(feedback: str):
    behavior = Behavior(envelope=True, feedback=feedback)  # type: ignore[arg-type]
    script = ["no envelope", '{"kind": "tool_call", "tool_name": "echo", "arguments": {"text": "a"}}', FINAL]
    agent, model = scripted_agent(
        *script, tools=[echo], preset=replace(PRESETS["standard"], behavior=behavior), policy=Worded()
    )
    assert run_async(lambda: run_agent(agent)).output == "done"
    told = [request_text(request) for request in model.requests]
    assert [OWN_WORDS in text for text in told] == [False, True, feedback == "kept"]
    assert not any("could not be read" in text for text in told)


def test_a_policys_words_take_the_place_of_the_loops_after_a_truncated_answer_too():
    agent, model = scripted_agent(truncated_reply(text="The answer is fo"), "rty-two.", policy=Worded())
    assert run_async(lambda: run_agent(agent)).output == "The answer is forty-two."
    assert model.requests[1].messages[-1].content.startswith(f"{OWN_WORDS}\n\n<context_addendum>")
