"""Which calls can run without a person: what rules, approvals and hooks say of each tool, at every depth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentfsm import Agent, HookContext, UserInputRequested, allow, ask, deny, hook, permissions, tool
from agentfsm.runtime.hooks import Hook
from agentfsm.runtime.permissions import UnattendedCalls, unattended_calls
from agentfsm.testing import ScriptedModel, call

ran: list[str] = []


@tool
def read(path: str) -> str:
    """Read a file."""
    ran.append(path)
    return "text"


@tool(requires_approval=True)
def pay(amount: int) -> str:
    """Pay."""
    return "paid"


@tool(requires_approval=lambda arguments: arguments["amount"] > 5)
def refund(amount: int) -> str:
    """Refund."""
    return "refunded"


@hook("dispatch_tool")
def watch(_: HookContext) -> None:
    return None


def of(tools: Sequence[Any], *hooks: Hook) -> dict[str, tuple[str, tuple[str, ...]]]:
    config = Agent(ScriptedModel(["ok"]), tools=tools, hooks=hooks).config
    return {each.tool: (each.unattended, each.decided_by) for each in unattended_calls(config.tools, config.hooks)}


def test_without_rules_all_calls_run() -> None:
    assert of([read]) == {"read": ("always", ())}


def test_approvals_and_hooks_are_named() -> None:
    assert of([read, pay, refund], watch) == {
        "read": ("sometimes", ("hook watch may deny or ask",)),
        "pay": ("never", ("requires_approval", "hook watch may deny or ask")),
        "refund": ("sometimes", ("requires_approval decides", "hook watch may deny or ask")),
    }


@pytest.mark.parametrize(
    ("rules", "otherwise", "expected"),
    [
        ([], "allow", ("always", "allow")),
        ([], "ask", ("never", "ask")),
        ([], "deny", ("never", "deny")),
        ([allow("read")], "deny", ("always", "allow")),
        ([allow("r*"), deny("read")], "ask", ("always", "allow")),
        ([allow("other")], "ask", ("never", "ask")),
        ([deny("*", where={"amount": 1})], "allow", ("always", "allow")),
        ([deny("read", where={"path": "x"}), allow("*")], "ask", ("sometimes", 'deny if path like "x", else allow')),
        ([deny("read", where={"path": "/etc/*"})], "ask", ("never", 'deny if path like "/etc/*", else ask')),
        ([allow("read", where={"path": "/data/*"})], "ask", ("sometimes", 'allow if path like "/data/*", else ask')),
        ([ask("read"), allow("read")], "allow", ("never", "ask")),
    ],
)  # fmt: skip
def test_the_rules_up_to_the_first_for_all_calls_decide(rules: Any, otherwise: Any, expected: tuple[str, str]) -> None:
    verdict, by = of([read, pay], permissions(*rules, otherwise=otherwise))["read"]
    assert (verdict, by) == (expected[0], (expected[1],))


def test_the_rules_of_calling_agents_bind_sub_agents_and_come_first() -> None:
    inner = Agent(ScriptedModel(["ok"]), tools=[read, pay], hooks=[permissions(allow("*"))])
    middle = Agent(ScriptedModel(["ok"]), tools=[inner.as_tool("inner", "Helps.")])
    found = of([middle.as_tool("middle", "Helps.")], permissions(ask("pay"), deny("read"), otherwise="allow"), watch)
    assert found == {
        "middle": ("sometimes", ("allow", "hook watch may deny or ask")),
        "middle/inner": ("always", ("allow",)),
        "middle/inner/read": ("never", ("deny", "allow")),
        "middle/inner/pay": ("never", ("ask", "allow", "requires_approval")),
    }


def test_tools_print_as_a_table() -> None:
    calls = (UnattendedCalls("read", "always", ()), UnattendedCalls("pay", "never", ("ask", "requires_approval")))
    assert UnattendedCalls.table(calls) == (
        "tool  without a person  decided by\nread  always\npay   never             ask; requires_approval"
    )
    assert calls[1].to_dict() == {"tool": "pay", "unattended": "never", "decided_by": ["ask", "requires_approval"]}


actions = st.sampled_from(["allow", "deny", "ask"])
rules = st.fixed_dictionaries(
    {
        "action": actions,
        "tool": st.sampled_from(["read", "*", "pay"]),
        "where": st.sampled_from([{}, {"path": "a*"}, {"path": "b*"}]),
    }
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.lists(rules, max_size=3), actions, st.lists(rules, max_size=2), actions, st.sampled_from(["a", "b", "c"]))
def test_what_never_runs_does_not_run_and_what_always_runs_does(
    above: Any, otherwise_above: Any, own: Any, otherwise: Any, path: str
) -> None:
    helper = Agent(
        ScriptedModel([call("read", path=path), "ok"]), tools=[read], hooks=[permissions(*own, otherwise=otherwise)]
    )
    first = [allow("helper")]  # so that it gets to the sub-agent
    agent = Agent(
        ScriptedModel([call("helper", task="x"), "ok"]),
        tools=[helper.as_tool("helper", "Helps.")],
        hooks=[permissions(*first, *above, otherwise=otherwise_above)],
    )
    verdicts = {each.tool: each.unattended for each in unattended_calls(agent.config.tools, agent.config.hooks)}
    ran.clear()
    result = agent.run_sync("go")
    assert verdicts["helper"] == "always"
    if verdicts["helper/read"] == "never":
        assert ran == []
    if verdicts["helper/read"] == "always":
        assert ran == [path]
        assert not isinstance(result.outcome, UserInputRequested)
