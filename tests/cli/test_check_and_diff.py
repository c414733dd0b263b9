"""``agentfsm check`` and ``agentfsm diff``: output, diagrams and exit codes."""

from __future__ import annotations

import asyncio
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from agentfsm import LOOP, Agent, Host, SqliteStore
from agentfsm.testing import ScriptedModel
from tests.cli.conftest import Cli

MINE = """
from dataclasses import replace
from agentfsm.analysis import Assumptions, GuardAssumption
from agentfsm.loop.transition_table import LOOP
from agentfsm.loop.detectors import Example, detector, policy_violation
from agentfsm.loop.failures import Action
from agentfsm.machine.declaration import Counter, StateSpec
from agentfsm.machine.graph import Graph, Transition


def needs_approval(run):
    return False


ASKS = LOOP.with_transition(Transition("post_llm", needs_approval, "suspended"), before="tool_calls")
HURRIED = LOOP.with_transition(Transition("post_llm", needs_approval, "suspended"))


@detector(fires_on=[Example(action=Action.retry)])
def try_again(run):
    return run.action is Action.retry


DODGES = LOOP.with_counter(Counter("quick_retries", 2)).with_transition(
    Transition("recover", try_again, "call_llm", spends="quick_retries")
)
NEVER = Assumptions(guards=(GuardAssumption("try_again", may="never", why="we never try again"),))
NO_AGENT = Graph(
    (StateSpec("start"), StateSpec("end", final=True)), (Transition("start", None, "end", ends="completed"),)
)
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(MINE)
    return "mine.py"


@pytest.mark.slow
def test_every_property_of_the_default_loop_holds(cli: Cli) -> None:
    result = cli("check")
    assert result.exit_code == 0
    assert "holds   every run ends, or waits for a person" in result.stdout
    assert "at most 14,551 moves" in result.stdout
    assert "BROKEN" not in result.stdout


@pytest.mark.slow
def test_a_violated_property_comes_with_a_counterexample_and_a_diagram(cli: Cli, mine: str, tmp_path: Path) -> None:
    result = cli("check", f"{mine}:DODGES", "--must-pass", "call_llm:pre_step", "--output", "broken.svg")
    assert result.exit_code == 1
    assert "by: pre_step.otherwise, call_llm.transient_provider, recover.try_again" in result.stdout
    assert ET.fromstring((tmp_path / "broken.svg").read_text()).tag.endswith("svg")
    assert "broken.svg" in result.stderr


def test_limits_and_behavior_come_from_the_named_object_and_from_options(cli: Cli) -> None:
    small = ("--guardrails", "max_iterations=2", "-g", "max_steps=2", "-g", "max_tool_retries=0")
    data = json.loads(cli("check", "--json", *small, "-g", "max_calls_per_reply=3").stdout)
    assert data["ok"] is True
    assert (data["bounds"]["model_calls"], data["bounds"]["tool_calls"]) == (2, 6)
    feedback = json.loads(cli("check", "--preset", "feedback", "--json").stdout)
    assert feedback["bounds"]["model_calls"] == 5
    assert {d["row"] for d in feedback["dead"]} >= {"post_tool.question_asked"}


AGENT = """
from agentfsm import Agent, allow, ask, deny, permissions
from agentfsm.testing import ScriptedModel


def read(path: str) -> str:
    'Read a file.'
    return ""


def pay(amount: int) -> str:
    'Pay.'
    return ""


HELPER = Agent(ScriptedModel([]), tools=[pay])
AGENT = Agent(
    ScriptedModel([]),
    tools=[read, HELPER.as_tool("helper", "Helps.")],
    hooks=[permissions(deny("read", where={"path": "/etc/*"}), allow("read"), allow("helper"))],
)
"""


@pytest.mark.slow
def test_which_calls_of_an_agent_can_run_without_a_person_is_listed(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "desk.py").write_text(AGENT)
    result = cli("check", "desk.py:AGENT")
    assert result.exit_code == 0
    table = (
        "tool        without a person  decided by\n"
        'read        sometimes         deny if path like "/etc/*", else allow\n'
        "helper      always            allow\n"
        "helper/pay  never             ask\n"
    )
    assert result.stdout.endswith("\n\n" + table)
    calls = json.loads(cli("check", "desk.py:AGENT", "--json").stdout)["unattended_calls"]
    assert calls[2] == {"tool": "helper/pay", "unattended": "never", "decided_by": ["ask"]}
    assert "unattended_calls" not in json.loads(cli("check", "--json").stdout)


VOTING = """
from agentfsm import LOOP, Agent, AgentGuardrails, Approval, Transition, tool, with_votes
from agentfsm.testing import ScriptedModel


@tool(requires_approval=Approval(n=2))
def pay(amount: int) -> str:
    'Pay.'
    return ""


def hurry(run) -> bool:
    return False


FEW = AgentGuardrails(max_iterations=2, max_calls_per_reply=2)
HASTY = with_votes(LOOP).with_transition(Transition("suspended", hurry, "dispatch_tool"))
AGENT = Agent(ScriptedModel([]), tools=[pay], guardrails=FEW)
HURRIED = Agent(ScriptedModel([]), tools=[pay], guardrails=FEW, graph=HASTY)
PARENT = Agent(ScriptedModel([]), tools=[AGENT.as_tool("helper", "Helps.")])
"""


def test_an_agent_whose_own_row_leads_past_its_votes_is_refused_by_name(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "votes.py").write_text(
        VOTING.replace('hurry, "dispatch_tool")', 'hurry, "dispatch_tool"), before="escalated"')
    )
    refused = cli("check", "votes.py:HURRIED")
    assert refused.exit_code == 2
    assert "suspended.hurry: it may lead to 'dispatch_tool' before the approval of a call of 'pay'" in refused.stderr


@pytest.mark.slow
def test_a_loosened_rule_or_a_removed_approval_differs_from_what_was_reviewed(cli: Cli, tmp_path: Path) -> None:
    desk, reviewed = tmp_path / "desk.py", tmp_path / "bounds.json"
    few = ("-g", "max_iterations=2", "-g", "max_calls_per_reply=2")
    desk.write_text(AGENT)
    assert cli("check", "desk.py:AGENT", *few, "--reviewed", "bounds.json", "--update").exit_code == 0
    assert cli("check", "desk.py:AGENT", *few, "--reviewed", "bounds.json").exit_code == 0
    (tmp_path / "loose.py").write_text(AGENT.replace('deny("read", where={"path": "/etc/*"}), ', ""))
    loose = cli("check", "loose.py:AGENT", *few, "--reviewed", "bounds.json")
    assert loose.exit_code == 1
    assert '-   "unattended": "sometimes",' in loose.stdout
    assert '+   "unattended": "always",' in loose.stdout
    old = json.loads(reviewed.read_text())
    del old["unattended_calls"]
    reviewed.write_text(json.dumps(old, indent=1) + "\n")  # as written before such files listed the calls
    unlisted = cli("check", "loose.py:AGENT", *few, "--reviewed", "bounds.json")
    assert unlisted.exit_code == 0
    assert "bounds.json does not say which calls run without a person: add them with --update" in unlisted.stderr


@pytest.mark.slow
def test_how_far_an_analysis_got_until_a_limit_is_no_change_of_what_was_reviewed(cli: Cli, mine: str) -> None:
    """It depends on the machine."""
    options = ("--must-pass", "dispatch_tool:call_llm", "--reviewed", "bounds.json")
    for most, more, code in ((60, ("--update",), 4), (70, (), 4), (600_000, (), 1)):
        found = cli("check", f"{mine}:ASKS", "--max-configurations", str(most), *options, *more)
        assert found.exit_code == code, found.output
        assert (f"explored {most} configurations" in found.stdout) is (code == 4)


def test_where_a_limit_leaves_something_open_the_option_that_allows_more_is_named(cli: Cli) -> None:
    few = ("-g", "max_iterations=2", "-g", "max_calls_per_reply=2", "--must-pass", "call_llm:pre_step")
    for option, low, shown, high in (
        ("--max-configurations", "60", "open (explored 60 configurations until max_configurations was reached)", "240"),
        ("--max-seconds", "1e-9", "configurations until max_seconds was reached)", "4e-09"),
    ):
        opened = cli("check", *few, option, low)
        assert opened.exit_code == 4
        assert shown in opened.stdout
        assert opened.stderr == f"agentfsm: to decide what is open, allow more: {option} {high}\n"
    decided = cli("check", *few, "--max-configurations", "100000", "--max-seconds", "600")
    assert (decided.exit_code, decided.stderr) == (0, "")


@pytest.mark.parametrize("option", ["--max-seconds", "--max-configurations"])
def test_a_limit_of_the_analysis_is_positive(cli: Cli, option: str) -> None:
    refused = cli("check", option, "0")
    assert refused.exit_code == 2
    assert option in refused.stderr


def test_a_removed_approval_is_reported_by_the_reviewed_file(cli: Cli, tmp_path: Path) -> None:
    few = ("-g", "max_iterations=2", "-g", "max_calls_per_reply=2")
    (tmp_path / "careful.py").write_text(VOTING)
    assert cli("check", "careful.py:PARENT", *few, "--reviewed", "bounds.json", "--update").exit_code == 0
    assert cli("check", "careful.py:PARENT", *few, "--reviewed", "bounds.json").exit_code == 0
    (tmp_path / "careless.py").write_text(VOTING.replace("@tool(requires_approval=Approval(n=2))", "@tool"))
    careless = cli("check", "careless.py:PARENT", *few, "--reviewed", "bounds.json")
    assert careless.exit_code == 1
    assert '   "tool": "helper/pay",' in careless.stdout
    assert '-   "unattended": "never",' in careless.stdout
    assert '+   "unattended": "always",' in careless.stdout
    assert '-    "requires_approval"' in careless.stdout
    assert "differs from what was reviewed" in careless.stderr


def test_that_a_tool_waits_for_several_approvals_is_checked_for_an_agent(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "votes.py").write_text(VOTING)
    held = cli("check", "votes.py:AGENT", "--needs-approvals", "pay=2")
    assert held.exit_code == 0
    assert "holds   no effect of pay before 2 approvals\n" in held.stdout
    assert "pay: each call" not in held.stdout
    broken = cli("check", "votes.py:HURRIED", "--needs-approvals", "pay=2")
    assert broken.exit_code == 1
    assert "BROKEN  no effect of pay before 2 approvals" in broken.stdout
    assert "dispatch_tool.approval_required, suspended.hurry" in broken.stdout
    for agent, wanted, problem in (
        ("AGENT", "pay=3", "2 approval(s) are enough for a call of 'pay'"),
        ("AGENT", "buy=2", "the agent has no tool 'buy'"),
        ("PARENT", "pay=2", "the sub-agent of 'helper' has a tool 'pay': check that agent itself"),
        ("AGENT", "pay", "give a tool and a number, as in pay=2"),
    ):
        refused = cli("check", f"votes.py:{agent}", "--needs-approvals", wanted)
        assert refused.exit_code == 2
        assert problem in refused.stderr


def test_what_you_know_of_your_own_guards_is_read_from_an_attribute(cli: Cli, mine: str) -> None:
    few = ("-g", "max_iterations=2", "-g", "max_calls_per_reply=2")
    result = cli("check", f"{mine}:DODGES", "--must-pass", "call_llm:pre_step", "--assumptions", f"{mine}:NEVER", *few)
    assert result.exit_code == 0
    assert "holds   call_llm only after pre_step\n          if try_again: we never try again" in result.stdout
    wrong = cli("check", f"{mine}:DODGES", "--assumptions", f"{mine}:DODGES")
    assert wrong.exit_code == 2
    assert "is a Graph, not agentfsm.analysis.Assumptions" in wrong.stderr


def test_a_graph_that_an_agent_refuses_is_refused(cli: Cli, mine: str) -> None:
    result = cli("check", f"{mine}:NO_AGENT")
    assert result.exit_code == 2
    assert "the state has no effect" in result.stderr


@pytest.mark.slow
def test_the_first_counterexample_is_written_as_a_test(cli: Cli, mine: str, tmp_path: Path) -> None:
    words = ("--must-pass", "call_llm:pre_step", "--counterexample", "test_it.py")
    result = cli("check", f"{mine}:DODGES", *words)
    assert "test_it.py" in result.stderr
    assert "SOURCE = 'mine.py:DODGES'" in (tmp_path / "test_it.py").read_text()
    nothing = cli("check", "--counterexample", "other.py")
    assert "there is no counterexample to write" in nothing.stderr
    assert not (tmp_path / "other.py").exists()


@pytest.mark.slow
def test_the_model_is_written_for_spin(cli: Cli, tmp_path: Path) -> None:
    cli("check", "-g", "max_iterations=2", "--promela", "loop.pml")
    text = (tmp_path / "loop.pml").read_text()
    assert "short c_iterations = 0;" in text
    assert "c_iterations >= 2" in text


def test_the_properties_that_are_asked_for_are_written_for_spin(cli: Cli, tmp_path: Path) -> None:
    cli("check", "--needs-approvals", "pay=1", "--never-after", "call_llm:runaway", "--promela", "loop.pml")
    text = (tmp_path / "loop.pml").read_text()
    assert "ltl property_1 { [](p_1 != 2) } /* never call_llm after runaway */" in text
    assert "ltl property_2 { [](p_2 != 2) } /* no effect of pay before 1 approval */" in text


def test_declared_properties_can_hold(cli: Cli) -> None:
    result = cli("check", "--never-after", "dispatch_tool:output_truncated:pre_step", "--output", "nothing.svg")
    assert result.exit_code == 0
    assert "holds   never dispatch_tool after output_truncated until pre_step" in result.stdout
    assert "no counterexample to draw" in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--guardrails", "max_iterations"), "NAME=VALUE"),
        (("--guardrails", "max_iterations=0"), "max_iterations"),
        (("--guardrails", "max_wishes=3"), "max_wishes"),
        (("--must-pass", "call_llm"), "two or three names"),
        (("--must-pass", "call_llm:nowhere"), "'nowhere' is not a state, guard or row"),
        (("nowhere:GRAPH",), "no module 'nowhere'"),
        (("a:B", "--preset", "strict"), "not both"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(cli: Cli, words: tuple[str, ...], message: str) -> None:
    result = cli("check", *words)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_diff_reports_rows_and_decisions(cli: Cli, mine: str, tmp_path: Path) -> None:
    result = cli("diff", f"{mine}:ASKS", f"{mine}:HURRIED", "--output", "difference.svg")
    assert result.exit_code == 1
    assert "~ post_llm.tool_calls is evaluated at place 8, was at 9" in result.stdout
    changed = "post_llm, where needs_approval and tool_calls hold: was needs_approval -> suspended, is tool_calls ->"
    assert changed in result.stdout
    assert (tmp_path / "difference.svg").read_text().startswith("<svg")
    same = cli("diff", f"{mine}:ASKS", f"{mine}:ASKS")
    assert (same.exit_code, same.stdout) == (0, "the two tables are the same\n")


def test_diff_reads_graphs_from_files_presets_and_runs(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "reviewed.json").write_text(json.dumps(LOOP.table))
    assert cli("diff", "reviewed.json", "standard").exit_code == 0
    assert cli("diff", "standard", "strict").exit_code == 1
    store = SqliteStore(tmp_path / "runs.db")

    async def keep() -> None:
        await Agent(ScriptedModel(["hello"]), host=Host(store=store)).run("hi", run_id="one")

    asyncio.run(keep())
    store.close()
    result = cli("diff", "one", "strict", "--store", "runs.db", "--json")
    assert result.exit_code == 1
    assert "post_tool.tool_error -> recover" in json.loads(result.stdout)["removed"]
    unknown = cli("diff", "two", "strict", "--store", "runs.db")
    assert unknown.exit_code == 2
    assert "there is no run 'two'" in unknown.stderr
    (tmp_path / "empty.json").write_text("{}")
    assert cli("diff", "empty.json", "strict").exit_code == 2
    (tmp_path / "broken.json").write_text("{")
    assert cli("diff", "broken.json", "strict").exit_code == 2


def test_an_unknown_graph_name_lists_what_it_could_be(cli: Cli, mine: str) -> None:
    file = cli("diff", mine, f"{mine}:ASKS")
    assert file.exit_code == 2
    assert "'mine.py' is not of the form MODULE:GRAPH" in file.stderr
    word = cli("diff", "standart", "strict", "--store", "nowhere.db")
    assert word.exit_code == 2
    assert "'standart' is not a graph (MODULE:GRAPH), a JSON file, a preset or a run of the store" in word.stderr


def test_a_diff_for_a_pull_request_is_markdown_with_a_picture(cli: Cli) -> None:
    found = cli("diff", "standard", "strict", "--markdown")
    assert found.exit_code == 1
    assert found.stdout.startswith("### Difference of strict: the behavior changes")
    assert "```mermaid" in found.stdout
    assert len(found.stdout) <= 60_000
    assert cli("diff", "standard", "strict", "--markdown", "--json").exit_code == 2


def test_exact_fails_on_row_differences_alone(cli: Cli, tmp_path: Path) -> None:
    """Swapping two error rows leads to the same state by another row, so the decision differs and is reported."""
    (tmp_path / "two.py").write_text(
        "from dataclasses import replace\n"
        "from agentfsm.loop.transition_table import LOOP\n"
        "SAME = replace(LOOP, transitions=tuple(sorted(LOOP, key=lambda t: t.source)))\n"
    )
    assert cli("diff", "two.py:LOOP", "two.py:SAME", "--exact").exit_code == 0


def test_check_and_diff_have_help(cli: Cli) -> None:
    for command in ("check", "diff"):
        text = cli(command, "--help").stdout
        assert "Examples:" in text
        assert "Exit codes:" in text
        assert command in cli("--help").stdout


def test_the_properties_in_the_examples_of_check_can_be_checked(cli: Cli) -> None:
    examples = cli("check", "--help").stdout.partition("Examples:\n")[2]
    properties = re.findall(r"(--must-pass|--never-after) (\S+)", examples)
    assert len(properties) >= 3
    for option, value in properties:
        assert cli("check", option, value).exit_code in (0, 1)


EDITED = MINE.replace("return False", "return bool(run.batch)")


def test_update_keeps_a_reviewed_table_with_which_later_code_is_compared(cli: Cli, mine: str, tmp_path: Path) -> None:
    assert cli("diff", "reviewed.json", f"{mine}:ASKS", "--update").exit_code == 0
    same = cli("diff", "reviewed.json", f"{mine}:ASKS")
    assert (same.exit_code, same.stdout) == (0, "the two tables are the same\n")
    (tmp_path / "edited.py").write_text(EDITED)
    changed = cli("diff", "reviewed.json", "edited.py:ASKS")
    assert changed.exit_code == 1
    assert "~ post_llm.needs_approval: changed code of its guard" in changed.stdout
    updated = cli("diff", "reviewed.json", "edited.py:ASKS", "--update")
    assert updated.exit_code == 0
    assert "changed code of its guard" in updated.stdout
    assert cli("diff", "reviewed.json", "edited.py:ASKS").exit_code == 0


def test_a_reviewed_table_has_a_line_for_each_row_so_that_its_own_change_can_be_reviewed(
    cli: Cli, mine: str, tmp_path: Path
) -> None:
    cli("diff", "reviewed.json", f"{mine}:ASKS", "--update")
    lines = (tmp_path / "reviewed.json").read_text().splitlines()
    assert sum(line.startswith('  ["post_llm", "needs_approval", "suspended"') for line in lines) == 1


def test_update_writes_json_files_only(cli: Cli, mine: str) -> None:
    result = cli("diff", "strict", f"{mine}:ASKS", "--update")
    assert result.exit_code == 2
    assert "--update writes a JSON file, and 'strict' is not one" in result.stderr


def test_a_table_without_code_says_that_the_code_was_not_compared(cli: Cli, mine: str, tmp_path: Path) -> None:
    (tmp_path / "reviewed.json").write_text(json.dumps(LOOP.table))
    result = cli("diff", "reviewed.json", "standard")
    assert result.exit_code == 0
    assert "not compared: the code of" in result.stdout


@pytest.mark.slow
def test_reviewed_bounds_are_compared_with_a_file_and_the_change_is_shown(cli: Cli, mine: str, tmp_path: Path) -> None:
    reviewed = ("check", f"{mine}:ASKS", "--reviewed", "reviewed/bounds.json", "-g", "max_calls_per_reply=2")
    missing = cli(*reviewed, "-g", "max_iterations=2")
    assert missing.exit_code == 1
    assert (
        "reviewed/bounds.json is missing: review the change, and run the command again with --update" in missing.stderr
    )
    assert cli(*reviewed, "-g", "max_iterations=2", "--update").exit_code == 0
    assert json.loads((tmp_path / "reviewed/bounds.json").read_text())["bounds"]["model_calls"] == 2
    assert cli(*reviewed, "-g", "max_iterations=2").exit_code == 0
    changed = cli(*reviewed, "-g", "max_iterations=3")
    assert changed.exit_code == 1
    assert '-  "model_calls": 2,' in changed.stdout
    assert '+  "model_calls": 3,' in changed.stdout
    assert "differs from what was reviewed" in changed.stderr
    dodged = ("check", f"{mine}:DODGES", "--must-pass", "call_llm:pre_step")
    broken = cli(*dodged, "--reviewed", "reviewed/bounds.json", "--update")
    assert broken.exit_code == 1


def test_update_without_a_reviewed_file_is_wrong_usage(cli: Cli) -> None:
    result = cli("check", "--update")
    assert result.exit_code == 2
    assert "name it with --reviewed" in result.stderr


TOOLSETS = """
from agentfsm import Agent, FilteredToolset, tool
from agentfsm.testing import ScriptedModel


@tool(requires_approval=True)
def pay(usd: int) -> str:
    \"\"\"Pay.\"\"\"
    return "paid"


class Plugins:
    def get_tools(self, context):
        raise RuntimeError("check starts no run")


AGENT = Agent(ScriptedModel([]), tools=[FilteredToolset([pay], lambda context, tool: False), Plugins()])
"""


@pytest.mark.slow
def test_check_lists_the_tools_that_a_filter_declares_and_says_what_it_cannot_know_of_other_toolsets(
    cli: Cli, tmp_path: Path
) -> None:
    (tmp_path / "toolsets.py").write_text(TOOLSETS)
    table = cli("check", "toolsets.py:AGENT").stdout
    assert re.search(r"pay +never +requires_approval", table)
    assert re.search(r"Plugins +unknown +a toolset: only a run knows its tools", table)
    assert "needs_approvals" not in cli("check", "toolsets.py:AGENT", "--needs-approvals", "pay=1").stderr
    unknown = cli("check", "toolsets.py:AGENT", "--needs-approvals", "deploy=1")
    assert unknown.exit_code == 2
    assert "what its toolsets return is not known before a run starts" in unknown.stderr
