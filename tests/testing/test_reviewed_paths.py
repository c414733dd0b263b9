"""Reviewed paths: what a file of them holds, and how it shows that a table or an approval rule has changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any

import pytest

from agentfsm import LOOP, Agent, Approval, ConfigurationError, Graph, tool
from agentfsm.loop.approval_rows import with_votes
from agentfsm.testing import Path, ReviewedPaths, ScriptedModel, paths
from agentfsm.testing.reviewed_paths import BrokenPath

REVIEWED = ReviewedPaths.generate(LOOP)
Rule = bool | Approval | Callable[[Mapping[str, Any]], bool | Approval]


def paying(rule: Rule, graph: Graph = LOOP) -> Agent:
    @tool(requires_approval=rule)
    def pay(amount: int, to: str) -> str:
        """Pay somebody."""
        return "paid"

    return Agent(ScriptedModel(), tools=[pay], graph=graph)


def large(arguments: Mapping[str, Any]) -> bool:
    return arguments["amount"] > 100


def test_the_file_holds_what_was_generated_one_path_a_line(tmp_path: FilePath) -> None:
    text = REVIEWED.to_json()
    file = tmp_path / "paths.json"
    file.write_text(text)
    assert ReviewedPaths.read(file) == REVIEWED
    assert len(text.splitlines()) == len(LOOP.transitions) + len(paths(LOOP)) + 9
    assert '  "post_tool.otherwise -> pre_step",' in text
    first = " > ".join((*paths(LOOP)[0].ids, "terminal"))
    assert f'  "{first}",' in text.splitlines()


@pytest.mark.slow
def test_nothing_differs_from_the_graph_that_was_reviewed() -> None:
    assert REVIEWED.differences(LOOP) == []
    found = REVIEWED.resolve(LOOP, "paths.json")
    assert [each.rows for each in found if isinstance(each, Path)] == [each.rows for each in paths(LOOP)]


@pytest.mark.slow
def test_a_deleted_row_breaks_its_paths() -> None:
    graph = LOOP.without("post_llm.loop_detected")
    changes = REVIEWED.differences(graph)
    assert changes[0] == "the row post_llm.loop_detected -> recover is gone"
    broken = [each for each in REVIEWED.resolve(graph, "paths.json") if isinstance(each, BrokenPath)]
    through = [each for each in REVIEWED.paths if "post_llm.loop_detected" in each]
    assert len(broken) == len(through) + 1
    assert "the graph has no row post_llm.loop_detected" in broken[0].problem
    assert broken[-1].id == "paths.json"
    assert "agentfsm paths ... --output paths.json" in broken[-1].problem


def test_a_retargeted_row_breaks_its_paths() -> None:
    table = tuple(replace(t, target="pre_step") if t.id == "recover.ask_user" else t for t in LOOP)
    graph = replace(LOOP, transitions=table)
    changes = REVIEWED.differences(graph)
    assert changes[0] == "the row recover.ask_user -> suspended is now recover.ask_user -> pre_step"
    assert any("recover.ask_user now leads to pre_step, not to suspended" in each for each in changes)


def swapped(first: str, second: str) -> Graph:
    one, other = LOOP.transition(first), LOOP.transition(second)
    return replace(LOOP, transitions=tuple({one: other, other: one}.get(t, t) for t in LOOP))


@pytest.mark.slow
def test_swapped_rows_are_a_difference_though_every_path_can_still_happen() -> None:
    graph = swapped("post_tool.unknown_tool", "post_tool.invalid_arguments")
    change = "post_tool.invalid_arguments is now evaluated before post_tool.unknown_tool"
    assert REVIEWED.differences(graph) == [change]
    (broken,) = [each for each in REVIEWED.resolve(graph, "paths.json") if isinstance(each, BrokenPath)]
    assert change in broken.problem


def seldom(run: Any) -> bool:
    return False


def test_a_new_row_is_a_difference_and_what_no_reviewed_path_covers_is_listed() -> None:
    graph = LOOP.with_detector("post_llm", seldom)
    changes = REVIEWED.differences(graph)
    assert "the row post_llm.seldom -> recover is new" in changes
    assert "no reviewed path covers call_llm.otherwise > post_llm.seldom" in changes


@pytest.mark.slow
def test_updated_paths_keep_those_that_can_still_happen() -> None:
    graph = LOOP.with_detector("post_llm", seldom)
    updated = ReviewedPaths.generate(graph, "pairs", REVIEWED)
    assert updated.differences(graph) == []
    assert updated.paths[: len(REVIEWED.paths)] == REVIEWED.paths
    assert all("post_llm.seldom" in each for each in updated.paths[len(REVIEWED.paths) :])
    back = ReviewedPaths.generate(LOOP, "pairs", updated)
    assert back.paths == REVIEWED.paths


@pytest.mark.slow
@pytest.mark.parametrize("cover", ["transitions", "triples", "prime"])
def test_every_criterion_can_be_reviewed(cover: str) -> None:
    reviewed = ReviewedPaths.generate(LOOP, cover)
    assert reviewed.differences(LOOP) == []
    assert reviewed.differences(LOOP.without("post_llm.loop_detected"))


def test_calls_on_both_sides_of_an_approval_rule_are_kept() -> None:
    reviewed = ReviewedPaths.generate(paying(large), "transitions")
    assert [(dict(case.arguments), case.required) for case in reviewed.approvals] == [
        ({"amount": 100, "to": "a"}, False),
        ({"amount": 101, "to": "a"}, True),
    ]
    assert reviewed.differences(paying(large)) == []


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (False, "pay(amount=101, to='a') needs no approval any more"),
        (lambda a: a["amount"] > 101, "pay(amount=101, to='a') needs no approval any more"),
        (lambda a: a["amount"] >= 100, "pay(amount=100, to='a') needs approval now"),
        (lambda a: a["limit"] > 1, "pay(amount=100, to='a'): these arguments are not valid any more, or the approval"),
    ],
)
def test_a_changed_approval_rule_is_a_difference(rule: Rule, expected: str) -> None:
    changes = ReviewedPaths.generate(paying(large), "transitions").differences(paying(rule))
    assert any(each.startswith(expected) for each in changes), changes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (Approval(n=3, roles=("boss",)), None),
        (True, "needs Approval() now, and needed Approval(n=3, roles=['boss'])"),
        (Approval(n=2, roles=("boss",)), "needs Approval(n=2, roles=['boss']) now, and needed Approval(n=3"),
        (Approval(n=3), "needs Approval(n=3) now, and needed Approval(n=3, roles=['boss'])"),
        (Approval(n=3, roles=("boss",), not_requester=True), "needs Approval(n=3, roles=['boss'], not_requester=True)"),
    ],
)
def test_how_many_must_approve_and_who_is_kept_in_the_file(now: Rule, expected: str | None, tmp_path: FilePath) -> None:
    graph = with_votes(LOOP)
    file = tmp_path / "paths.json"
    file.write_text(ReviewedPaths.generate(paying(Approval(n=3, roles=("boss",)), graph), "transitions").to_json())
    changes = ReviewedPaths.read(file).differences(paying(now, graph))
    assert [expected in each for each in changes] == [True] if expected else changes == []


def test_a_tool_that_is_gone_and_a_rule_that_is_new_are_differences() -> None:
    with_pay, without = paying(large), Agent(ScriptedModel())
    reviewed = ReviewedPaths.generate(with_pay, "transitions")
    assert "pay(amount=100, to='a'): the agent has no tool 'pay' any more" in reviewed.differences(without)
    reviewed = ReviewedPaths.generate(without, "transitions")
    assert reviewed.differences(with_pay) == ["the approval rule of 'pay' is not in the file"]


def test_rules_that_compare_texts_or_lists_are_tried_on_both_sides() -> None:
    def elsewhere(arguments: Mapping[str, Any]) -> bool:
        return arguments["to"] in ("eve", "mallory") or arguments["amount"] == 7

    found = ReviewedPaths.generate(paying(elsewhere), "transitions").approvals
    assert {(case.arguments["to"], case.arguments["amount"]) for case in found if case.required} >= {
        ("eve", 1),
        ("a", 7),
    }
    always = ReviewedPaths.generate(paying(True), "transitions").approvals
    assert [case.required for case in always] == [True]


def test_a_file_that_is_missing_or_holds_something_else_is_refused(tmp_path: FilePath) -> None:
    with pytest.raises(ConfigurationError, match=r"there is no file .*agentfsm paths MODULE:NAME --output paths.json"):
        ReviewedPaths.read(tmp_path / "paths.json")
    good = json.loads(REVIEWED.to_json())
    for bad in ("[", "[]", "{}", json.dumps({**good, "cover": "all"}), json.dumps({**good, "approvals": [1]})):
        (tmp_path / "bad.json").write_text(bad)
        with pytest.raises(ConfigurationError, match="does not hold reviewed paths"):
            ReviewedPaths.read(tmp_path / "bad.json")


def test_a_path_that_does_not_end_is_a_difference() -> None:
    cut = replace(REVIEWED, paths=(*REVIEWED.paths, ("pre_step.otherwise", "call_llm")))
    assert [each for each in cut.differences(LOOP) if "it does not lead to an end" in each]
