"""Guards are called exclusive only where their source says so, and then no run lets both hold."""

from __future__ import annotations

from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import pytest

from agentfsm.analysis.exclusive_guards import are_disjoint, required_values
from agentfsm.loop import detectors, failures, guards
from agentfsm.loop.failures import Action
from agentfsm.loop.transition_table import LOOP

WANTED = ("stop", "handoff")


def is_low(run: Any) -> bool:
    """Compared with a text."""
    return run.level == "low"


def is_high(run: Any) -> bool:
    return run.level == "high"


def is_either(run: Any) -> bool:
    return run.level in ("low", "high")


def is_low_or_red(run: Any) -> bool:
    return run.level == "low" or run.color == "red"


def is_low_and_red(run: Any) -> bool:
    return bool(run.level == "low" and run.color == "red")


def not_low(run: Any) -> bool:
    return run.level != "low"


def leaves_early(run: Any) -> object:
    level = run.level
    if level is None or level != "high":
        return None
    return run.color


def set_twice(run: Any) -> bool:
    level = run.level
    level = level or "low"
    return level == "low"


def from_a_loop(run: Any) -> bool:
    for level in (run.level, "high"):
        if level == "high":
            return True
    return run.level == "low"


def other_branch(run: Any) -> bool:
    if run.color == "red":
        return run.level == "low"
    return run.level == "high"


def level_is(level: str) -> Any:
    def guard(run: Any) -> bool:
        return _has_level(run, level)

    return guard


def _has_level(run: Any, wanted: str) -> bool:
    return run.level == wanted if run.color else False


def stops(run: Any) -> bool:
    return run.action is failures.Action.stop


def wanted(run: Any) -> bool:
    return run.action in WANTED


def are_exclusive(first: object, second: object) -> bool:
    """Whether two guards can never hold for the same run, as far as their source says."""
    return are_disjoint(required_values(first), required_values(second))


GUARDS = {
    f.__name__: f
    for f in (is_low, is_high, is_either, is_low_or_red, is_low_and_red, not_low, leaves_early, set_twice, from_a_loop,
              other_branch, stops, wanted)
} | {"level_is_low": level_is("low"), "level_is_high": level_is("high")}  # fmt: skip

EXCLUSIVE = {
    ("is_low", "is_high"),
    ("is_low", "leaves_early"),
    ("is_low", "level_is_high"),
    ("is_high", "is_low_and_red"),
    ("is_high", "level_is_low"),
    ("is_low_and_red", "leaves_early"),
    ("is_low_and_red", "level_is_high"),
    ("leaves_early", "level_is_low"),
    ("level_is_low", "level_is_high"),
}


def test_the_pairs_that_exclude_each_other_are_found_and_no_others() -> None:
    found = {(a, b) for a, b in combinations(GUARDS, 2) if are_exclusive(GUARDS[a], GUARDS[b])}
    assert found == EXCLUSIVE


def test_no_run_lets_two_exclusive_guards_hold() -> None:
    """Every combination of values that the guards compare with, and others."""
    levels, colors = ("low", "high", "", None, "middle"), ("red", "blue", "", None)
    for level, color, action in product(levels, colors, (Action.stop, Action.handoff, None)):
        run = SimpleNamespace(level=level, color=color, action=action)
        for a, b in EXCLUSIVE:
            assert not (GUARDS[a](run) and GUARDS[b](run)), (a, b, run)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (guards.ask_user, guards.stop, True),
        (guards.ask_user, guards.retry_tool, False),
        (guards.declared_done, guards.declared_unable, True),
        (guards.declared_done, guards.question_asked, True),
        (guards.approval_required, guards.in_doubt, True),
        (guards.doubt_settled, guards.replied, True),
        (guards.approval_decided, guards.replied, False),  # they are, but not by values that are compared
        (detectors.transient_provider, detectors.provider_error, True),
        (detectors.unknown_tool, detectors.tool_error, False),  # a batch may have both
        (detectors.output_truncated, detectors.output_refused, False),  # a truncated reply may hold a refusal
    ],
)
def test_guards_of_the_loop(one: Any, other: Any, expected: bool) -> None:
    assert are_exclusive(one, other) is expected
    assert are_exclusive(other, one) is expected


def test_what_cannot_be_read_excludes_nothing() -> None:
    space: dict[str, Any] = {}
    exec("def a(run): return run.x == 1", space)
    assert required_values(space["a"]) == {}
    assert required_values(print) == {}
    assert not are_exclusive(space["a"], is_low)


def test_no_guard_of_the_loop_excludes_itself() -> None:
    for row in LOOP:
        assert not are_exclusive(row.guard, row.guard)
