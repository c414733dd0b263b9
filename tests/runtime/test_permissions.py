"""The permission policy: the first match wins, rules see what the tool will get, three denials end the run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, model_serializer

from agentfsm import (
    Agent,
    AgentGuardrails,
    Allow,
    ArgumentMatcher,
    ConfigurationError,
    Deny,
    DenyCall,
    Edit,
    FailureKind,
    Handoff,
    HookContext,
    Host,
    HumanReplyError,
    MemoryStore,
    Message,
    Reply,
    RunResult,
    State,
    UserInputRequested,
    allow,
    ask,
    deny,
    hook,
    permissions,
    tool,
)
from agentfsm.models.wire_format import parse_tool_calls
from agentfsm.runtime.permissions import PermissionPolicy, PermissionRule
from agentfsm.testing import ScriptedModel, call

done: list[Any] = []


@pytest.fixture(autouse=True)
def _nothing_done() -> None:
    done.clear()


def shell(command: str) -> str:
    """Run a command."""
    done.append(command)
    return "ran"


def transfer(amount: int, to: str = "cash desk") -> str:
    """Transfer money."""
    done.append((amount, to))
    return "sent"


@tool
def save(path: Path, lines: list[str]) -> str:
    """Save a file."""
    done.append(path)
    return "saved"


def run(script: list[Any], *rules: Any, otherwise: Any = "ask", **more: Any) -> RunResult:
    agent = Agent(
        ScriptedModel(script), tools=[shell, transfer, save], hooks=[permissions(*rules, otherwise=otherwise)], **more
    )
    return agent.run_sync("go")


def answers(result: RunResult) -> list[str]:
    return [m.content for m in result.messages if m.role == "tool"]


# -- the three verdicts ---------------------------------------------------------------------------------


def test_an_allowed_call_runs() -> None:
    assert run([call("shell", command="ls"), "ok"], allow("shell")).output == "ok"
    assert done == ["ls"]


def test_a_denied_call_is_answered_with_the_reason_and_never_runs() -> None:
    result = run([call("shell", command="ls"), "ok"], deny("shell", reason="no shell here"))
    assert result.output == "ok"
    assert done == []
    assert answers(result) == ["Denied: no shell here"]


def test_a_call_with_an_ask_rule_waits_for_a_human_and_then_runs() -> None:
    agent = Agent(
        ScriptedModel([call("transfer", amount=100), "ok"]),
        tools=[transfer],
        hooks=[permissions(ask("transfer", reason="So much?"))],
    )
    first = agent.run_sync("go")
    assert isinstance(first.outcome, UserInputRequested)
    assert (first.outcome.kind, first.outcome.question, first.outcome.tool) == ("approval", "So much?", "transfer")
    assert done == []

    async def allowed() -> RunResult:
        assert isinstance(first.outcome, UserInputRequested)
        return await agent.resume(first.outcome.suspension_record, Allow())

    assert asyncio.run(allowed()).output == "ok"
    assert done == [(100, "cash desk")]


def test_a_call_that_no_rule_matches_needs_approval_unless_otherwise_is_set() -> None:
    assert isinstance(run([call("shell", command="ls")]).outcome, UserInputRequested)
    assert run([call("shell", command="ls"), "ok"], otherwise="allow").output == "ok"
    assert answers(run([call("shell", command="ls"), "ok"], otherwise="deny"))[0].startswith("Denied: ")


def test_an_edit_that_a_rule_denies_is_refused_and_the_run_waits_on() -> None:
    agent = Agent(
        ScriptedModel([call("shell", command="ls"), "ok"]),
        tools=[shell],
        hooks=[permissions(deny("shell", where={"command": "rm*"}), ask("shell"))],
    )
    first = agent.run_sync("go")

    async def edited() -> RunResult:
        assert isinstance(first.outcome, UserInputRequested)
        record = first.outcome.suspension_record
        with pytest.raises(HumanReplyError, match="denied, and the run still waits"):
            await agent.resume(record, Edit({"command": "rm -rf /"})).load()
        assert done == []
        return await agent.resume(record, Edit({"command": "ls -l"}))

    assert asyncio.run(edited()).ok
    assert done == ["ls -l"]


# -- three in a row -------------------------------------------------------------------------------------


def test_the_third_denial_in_a_row_is_a_policy_violation() -> None:
    result = run([call("shell", command=str(i)) for i in range(5)], deny("shell"))
    assert isinstance(result.outcome, Handoff)
    assert result.outcome.failure is not None
    assert result.outcome.failure.kind is FailureKind.policy_violation
    assert result.run_state.model_calls == 3
    assert result.decisions[-2].transition.id == "post_tool.policy_violation"


def test_a_call_that_runs_between_denials_starts_the_count_anew() -> None:
    script = [call("shell", command="a"), call("shell", command="b"), call("transfer", amount=1)]
    result = run([*script, *script, "ok"], deny("shell"), allow("*"))
    assert result.output == "ok"


def test_a_humans_denial_counts_with_the_policys() -> None:
    agent = Agent(
        ScriptedModel([call("shell", command="a"), call("shell", command="b"), call("transfer", amount=1)]),
        tools=[shell, transfer],
        hooks=[permissions(deny("shell"), ask("transfer"))],
    )
    first = agent.run_sync("go")

    async def denied() -> RunResult:
        assert isinstance(first.outcome, UserInputRequested)
        return await agent.resume(first.outcome.suspension_record, Deny("no"))

    result = asyncio.run(denied())
    assert isinstance(result.outcome, Handoff)
    assert result.outcome.failure is not None
    assert result.outcome.failure.kind is FailureKind.policy_violation


def test_how_many_denials_are_too_many_is_a_guardrail() -> None:
    result = run([call("shell", command="a")], deny("shell"), guardrails=AgentGuardrails(max_denials=1))
    assert isinstance(result.outcome, Handoff)


# -- what rules see -------------------------------------------------------------------------------------


def test_rules_see_arguments_as_the_tool_will_get_them() -> None:
    """A number given as text and a default that is left out must not slip through."""
    rules = [
        deny("transfer", where={"amount": ArgumentMatcher(at_least=100)}),
        deny("transfer", where={"to": "cash*"}),
        allow("*"),
    ]
    result = run([call("transfer", amount="150", to="me"), call("transfer", amount=1), "ok"], *rules)
    assert result.output == "ok"
    assert done == []


def test_values_that_are_no_json_are_seen_as_text() -> None:
    script = [call("save", path="/etc/passwd", lines=[]), "ok"]
    run(script, deny("save", where={"path": "/etc/*"}), otherwise="allow")
    assert done == []


def test_items_of_a_list_are_matched_with_every_and_any() -> None:
    rules = [
        deny("save", where={"lines": ArgumentMatcher(any="b*")}, reason="no b"),
        allow("save", where={"lines": ArgumentMatcher(every="a*")}),
    ]
    script = [call("save", path="x", lines=["a", "b"]), call("save", path="y", lines=["a"]), "ok"]
    assert run(script, *rules).output == "ok"
    assert done == [Path("y")]
    assert isinstance(run([call("save", path="z", lines=[])], *rules).outcome, UserInputRequested)


def test_a_rule_that_cannot_be_evaluated_denies_and_asks_but_never_allows() -> None:
    """The argument may be a list or a text, and the rules are about text."""
    for rule, status in ((allow, "ask"), (deny, "deny"), (ask, "ask")):
        policy = PermissionPolicy((rule("run", where={"command": "ls*"}),), "ask" if rule is allow else "allow")
        assert policy.decide("run", {"command": ["ls"]}).action == status


def test_a_pattern_of_tools_passes_over_those_without_the_argument() -> None:
    rules = [deny("*", where={"command": "rm*"}), deny("*", where={"path": "/etc/*"})]
    script = [call("transfer", amount=1), call("shell", command="rm x"), call("save", path="/etc/x", lines=[]), "ok"]
    assert run(script, *rules, otherwise="allow").output == "ok"
    assert done == [(1, "cash desk")]


def test_an_argument_that_a_remote_tool_may_get_but_did_not_cannot_be_evaluated() -> None:
    declared = {"type": "object", "properties": {"force": {"type": "boolean"}}}
    rule = deny("delete", where={"force": True})
    assert rule.applies("delete", {}, declared)
    assert not rule.applies("delete", {}, {"type": "object", "properties": {"name": {"type": "string"}}})
    assert rule.applies("delete", {}, {"type": "object"})


def test_a_name_with_dots_is_given_in_a_tuple_or_in_quotes() -> None:
    by_tuple, by_text = deny("t", where={("a.b", "c"): 1}), deny("t", where={'"a.b".c': 1})
    assert by_tuple == by_text
    assert by_tuple.applies("t", {"a.b": {"c": 1}})
    assert not by_tuple.applies("t", {"a.b": {"c": 2}})


def test_control_tools_need_no_approval() -> None:
    agent = Agent(
        ScriptedModel([call("return_done", output="ok")]), preset="funnel", hooks=[permissions(otherwise="deny")]
    )
    assert agent.run_sync("go").output == "ok"


# -- rules as data --------------------------------------------------------------------------------------


def test_rules_may_come_from_a_file() -> None:
    data = [
        {"action": "deny", "tool": "shell", "where": {"command": {"regex": "rm .*"}}, "reason": "no"},
        {"action": "allow", "tool": "*"},
    ]
    result = run([call("shell", command="rm x"), call("shell", command="ls"), "ok"], *data)
    assert done == ["ls"]
    assert answers(result)[0] == "Denied: no"


@pytest.mark.parametrize(
    ("rule", "part"),
    [
        ({"action": "permit", "tool": "x"}, "action"),
        ({"tool": "x"}, "action"),
        ({"action": "deny", "tool": "x", "whre": {}}, "whre"),
        ({"action": "deny", "tool": "x", "where": {"a": {"regex": "("}}}, "where.a.regex"),
        ({"action": "deny", "tool": "x", "where": {"a": {}}}, "where.a"),
        ({"action": "deny", "tool": "x", "where": {"a": {"golb": "x"}}}, "golb"),
    ],
)
def test_a_rule_that_cannot_be_read_is_refused_and_named(rule: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"rule 2: .*{part}"):
        permissions(allow("y"), rule)


def test_otherwise_is_one_of_three() -> None:
    with pytest.raises(ConfigurationError, match="otherwise"):
        permissions(otherwise="maybe")  # type: ignore[arg-type]


class Broken(BaseModel):
    @model_serializer
    def text(self) -> str:
        raise RuntimeError("no text")


def test_arguments_that_cannot_be_read_are_a_denied_call() -> None:
    @tool
    def take(thing: Broken) -> str:
        """Take a thing."""
        done.append(thing)
        return "taken"

    for policy in (permissions(otherwise="allow"), permissions(allow("*"))):
        script = [call("take", thing={}), "ok"]
        result = Agent(ScriptedModel(script), tools=[take], hooks=[policy]).run_sync("go")
        assert result.output == "ok"
        assert answers(result)[0].startswith("Denied: the arguments of 'take' cannot be checked")
        assert done == []


# -- hostile arguments ------------------------------------------------------------------------------------


@tool
def take(thing: Any) -> str:
    """Take a thing."""
    done.append(thing)
    return "taken"


POLICIES = {
    "no rules": [],
    "rules": [permissions(allow("take", where={"thing": ArgumentMatcher(present=True)}))],
    "approval": [permissions(ask("*"))],
}


def nested_json(depth: int) -> str:
    """Arguments that are nested this deep, the object of arguments included."""
    return '{"thing":' + "[" * (depth - 1) + "1" + "]" * (depth - 1) + "}"


@pytest.mark.slow
@pytest.mark.parametrize("store", [None, MemoryStore])
@pytest.mark.parametrize("hooks", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("way", ["model", "wire", "envelope"])
@pytest.mark.parametrize("depth", [101, 240, 500, 1000, 100_000])
def test_a_call_whose_arguments_are_nested_too_deeply_does_not_run_and_the_run_goes_on(
    depth: int, way: str, hooks: Any, store: Any
) -> None:
    preset, script = "standard", ["ok"]
    if way == "envelope":
        envelope = '{"kind": "tool_call", "tool_name": "take", "arguments": ' + nested_json(depth) + "}"
        preset, script = "feedback", [envelope, '{"kind": "final", "content": "ok"}']
    elif way == "wire":
        calls = parse_tool_calls([("c1", "take", nested_json(depth))])
        script.insert(0, Reply(Message.assistant("", calls)))  # type: ignore[arg-type]
    else:
        thing: Any = 1
        for _ in range(depth - 1):
            thing = [thing]
        script.insert(0, call("take", thing=thing))  # type: ignore[arg-type]
    host = Host(store=store() if store else None)
    result = Agent(ScriptedModel(script), tools=[take], hooks=hooks, preset=preset, host=host).run_sync("go")
    assert result.output == "ok"
    assert done == []


@pytest.mark.parametrize("hooks", POLICIES.values(), ids=POLICIES)
def test_a_call_whose_arguments_are_nested_a_hundred_deep_runs(hooks: Any) -> None:
    calls = parse_tool_calls([("c1", "take", nested_json(100))])
    agent = Agent(ScriptedModel([Reply(Message.assistant("", calls)), "ok"]), tools=[take], hooks=hooks)

    async def answered() -> RunResult:
        first = await agent.run("go")
        if not isinstance(first.outcome, UserInputRequested):
            return first
        return await agent.resume(first.outcome.suspension_record.to_json(), Allow())

    assert asyncio.run(answered()).output == "ok"
    assert len(done) == 1


@pytest.mark.parametrize("depth", [101, 500, 1000, 100_000])
def test_an_edit_that_is_nested_too_deeply_is_refused_and_the_run_still_waits(depth: int) -> None:
    agent = Agent(ScriptedModel([call("take", thing=1), "ok"]), tools=[take], hooks=POLICIES["approval"])
    thing: Any = 1
    for _ in range(depth - 1):
        thing = [thing]

    async def edited() -> RunResult:
        first = await agent.run("go")
        assert isinstance(first.outcome, UserInputRequested)
        with pytest.raises(HumanReplyError):
            await agent.resume(first.outcome.suspension_record, Edit({"thing": thing}))
        return await agent.resume(first.outcome.suspension_record, Allow())

    assert asyncio.run(edited()).output == "ok"
    assert done == [1]


@pytest.mark.parametrize(
    "text",
    [
        '{"thing": 1' + "0" * 5000 + "}",
        '{"thing": NaN}',
        '{"thing": 1e999}',
        '{"thing": -Infinity}',
    ],
    ids=["5001 digits", "NaN", "1e999", "infinity"],
)
def test_numbers_that_are_no_json_are_a_failed_call(text: str) -> None:
    calls = parse_tool_calls([("c1", "take", text)])
    agent = Agent(ScriptedModel([Reply(Message.assistant("", calls)), "ok"]), tools=[take], hooks=POLICIES["rules"])
    assert agent.run_sync("go").output == "ok"
    assert done == []


@pytest.mark.parametrize(
    ("text", "denied"),
    [
        ('{"thing": "ls", "thing": "rm x"}', True),  # the last one is what the tool gets
        ('{"thing": "rm x", "thing": "ls"}', False),
        ('{"thing": "\\ud800rm x"}', False),
        ('{"thing": "rm \\ud800"}', True),
        ('{"thing": "rm ' + "x" * 1_000_000 + '"}', True),
        ('{"thing": {"' + "x" * 1_000_000 + '": "rm x"}}', True),  # no text: it cannot be evaluated
        ('{"thing": 1' + "0" * 4000 + "}", True),
    ],
    ids=[
        "last key wins",
        "first key loses",
        "lone surrogate",
        "surrogate at the end",
        "long",
        "long key",
        "many digits",
    ],
)
def test_rules_decide_about_unusual_arguments_as_the_tool_gets_them(text: str, denied: bool) -> None:
    calls = parse_tool_calls([("c1", "take", text)])
    policy = permissions(deny("take", where={"thing": "rm *"}), otherwise="allow")
    agent = Agent(ScriptedModel([Reply(Message.assistant("", calls)), "ok"]), tools=[take], hooks=[policy])
    assert agent.run_sync("go").output == "ok"
    assert (done == []) is denied


# -- rules that can never apply ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        (deny("shell", where={"comand": "rm*"}), r"rule 2 \(deny shell where comand like \"rm\*\"\).*no 'comand'"),
        (deny("save", where={"lines": "b*"}), "'lines' is of type array, and glob= matches text.*every= or any="),
        (ask("transfer", where={"amount": "1*"}), "'amount' is of type integer"),
        (allow("s*", where={"lines": "b*"}), "tool 'save'"),
        (deny("*", where={"nothing": 1}), "no 'nothing'"),
    ],
)
def test_a_rule_that_can_never_apply_to_a_tool_is_refused_with_the_agent(rule: Any, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        run(["ok"], allow("nobody"), rule)


def test_a_rule_of_a_tool_that_the_agent_does_not_have_is_accepted() -> None:
    assert run(["ok"], deny("other_tool", where={"x": 1})).output == "ok"


def test_the_rules_of_a_calling_agent_are_checked_against_the_tools_of_its_sub_agents() -> None:
    inner = Agent(ScriptedModel(["ok"]), tools=[save])
    middle = Agent(ScriptedModel(["ok"]), tools=[inner.as_tool("inner", "Helps.")])
    with pytest.raises(ConfigurationError, match="tool 'save'"):
        Agent(
            ScriptedModel(["ok"]),
            tools=[middle.as_tool("middle", "Helps.")],
            hooks=[permissions(deny("save", where={"lines": "b*"}))],
        )


def test_rules_print_as_a_table() -> None:
    policy = permissions(
        allow("read_*"),
        deny("shell", where={"command": "*rm *"}, reason="nothing is\ndeleted here"),
        ask("transfer", where={"amount": ArgumentMatcher(at_least=100), ("a.b", "c"): ArgumentMatcher(any="x")}),
        otherwise="deny",
    )
    assert (
        str(policy)
        == """\
   action  tool      when                                         reason
1  allow   read_*    always
2  deny    shell     command like "*rm *"                         nothing is deleted here
3  ask     transfer  amount >= 100 and "a.b".c any item like "x"
   deny    *         otherwise"""
    )


# -- first match wins, on random policies -----------------------------------------------------------------


names = st.sampled_from(["a", "ab", "b"])
rules = st.builds(
    PermissionRule,
    action=st.sampled_from(["allow", "deny", "ask"]),
    tool=st.sampled_from(["a", "a*", "*", "b"]),
    where=st.sampled_from([{}, {"x": 1}, {"x": ArgumentMatcher(at_least=2)}]),
)


@given(st.lists(rules, max_size=6), st.sampled_from(["allow", "deny", "ask"]), names, st.integers(0, 3))
def test_the_first_rule_that_matches_decides(policy: list[PermissionRule], otherwise: Any, name: str, x: int) -> None:
    def fits(rule: PermissionRule) -> bool:  # by hand: what the words mean
        tools = {"a": {"a"}, "a*": {"a", "ab"}, "*": {"a", "ab", "b"}, "b": {"b"}}
        if name not in tools[rule.tool]:
            return False
        condition = rule.where.get("x")
        return condition is None or (x >= 2 if condition.at_least else x == 1)

    expected = next((r.action for r in policy if fits(r)), otherwise)
    assert PermissionPolicy(tuple(policy), otherwise).decide(name, {"x": x}).action == expected


# -- the verdict itself -----------------------------------------------------------------------------------


def test_any_hook_may_deny_a_call() -> None:
    @hook(at=State.DISPATCH_TOOL)
    def never(seen: HookContext) -> DenyCall:
        assert seen.tool is not None
        assert seen.tool.name == "transfer"
        assert seen.arguments == {"amount": 1, "to": "cash desk"}
        return DenyCall("not now")

    agent = Agent(ScriptedModel([call("transfer", amount="1"), "ok"]), tools=[transfer], hooks=[never])
    result = agent.run_sync("go")
    assert answers(result) == ["Denied: not now"]
    assert done == []


def test_one_hook_that_denies_outweighs_another_that_asks() -> None:
    agent = Agent(
        ScriptedModel([call("transfer", amount=1), "ok"]),
        tools=[transfer],
        hooks=[permissions(ask("*")), permissions(deny("*"))],
    )
    assert agent.run_sync("go").output == "ok"
    assert done == []
