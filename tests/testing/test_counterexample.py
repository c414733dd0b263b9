"""Counterexamples replayed on the real loop: real where a run takes them, spurious where a guard decides otherwise."""

from __future__ import annotations

import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from agentfsm import LOOP, AgentGuardrails, Graph, RunState, Transition
from agentfsm.analysis import Verdict, analyse, must_pass
from agentfsm.errors import ConfigurationError
from agentfsm.loop.detectors import Example, detector
from agentfsm.loop.failures import Action
from agentfsm.machine.declaration import Counter
from agentfsm.testing.counterexample import counterexample_test, replay_counterexample

HASTY = """
from agentfsm import LOOP, Transition
from agentfsm.loop.detectors import Example, detector
from agentfsm.loop.failures import Action
from agentfsm.machine.declaration import Counter


@detector(fires_on=[Example(action=Action.retry)])
def try_again(run):
    return {condition}


HASTY = LOOP.with_counter(Counter("quick_retries", 2)).with_transition(
    Transition("recover", try_again, "call_llm", spends="quick_retries")
)
"""

RULE = must_pass("call_llm", through="pre_step")


def hasty(holds: bool) -> Graph:
    """A retry that goes past the budget check, if its guard ever holds."""

    @detector(fires_on=[Example(action=Action.retry)])
    def try_again(run: RunState) -> bool:
        return holds and run.action is Action.retry

    row = Transition("recover", try_again, "call_llm", spends="quick_retries")
    return LOOP.with_counter(Counter("quick_retries", 2)).with_transition(row)


def broken(graph: Graph) -> Verdict:
    (verdict,) = [
        v
        for v in analyse(graph, RULE, guardrails=AgentGuardrails(max_iterations=3, max_calls_per_reply=1)).verdicts
        if v.text == RULE.text
    ]
    assert verdict.holds is False
    return verdict


@pytest.mark.slow
def test_a_counterexample_that_a_run_takes_is_real() -> None:
    graph = hasty(holds=True)
    replay = replay_counterexample(graph, broken(graph).path)
    assert replay.real
    assert replay.taken == ("pre_step.otherwise", "call_llm.transient_provider", "recover.try_again")
    assert str(replay).startswith("real: a run took pre_step.otherwise, ")


@pytest.mark.slow
def test_a_counterexample_that_no_run_takes_is_spurious() -> None:
    """The model does not know that the guard never holds."""
    graph = hasty(holds=False)
    replay = replay_counterexample(graph, broken(graph).path)
    assert replay.real is False
    assert str(replay) == "spurious: move 3 should be recover.try_again, and the run took recover.otherwise"


def test_a_guard_without_an_example_cannot_be_replayed() -> None:
    def unknown(run: RunState) -> bool:
        return False

    graph = LOOP.with_transition(Transition("post_llm", unknown, "terminal", ends="partial"))
    replay = replay_counterexample(graph, ["pre_step.otherwise", "call_llm.otherwise", "post_llm.unknown"])
    assert replay.real is None
    assert "unknown" in replay.reason


PAYING = """
from agentfsm import LOOP, Agent, tool
from agentfsm.machine.declaration import Counter, Transition
from agentfsm.testing import ScriptedModel


@tool
def pay(amount: int) -> str:
    ''' Pay. '''
    return "paid"


def at_once(run):
    return {condition}


ROW = Transition("post_tool", at_once, "call_llm", spends="quick")
AGENT = Agent(ScriptedModel(), tools=[pay], graph=LOOP.with_counter(Counter("quick", 2)).with_transition(ROW))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("condition", "examples", "says"),
    [
        (
            'any(c.call.arguments.get("amount") == 1000 for c in run.batch)',
            "",
            "real: a run took * post_tool.at_once held with Example(call=*'amount': 1000*",
        ),
        (
            'any(c.call.arguments.get("amount") == 4711 for c in run.batch)',
            "",
            "*not replayed: no event that was tried made at_once hold *EXAMPLES = {'at_once': Example(...)}*",
        ),
        (
            'any(c.call.arguments.get("amount") == 4711 for c in run.batch)',
            '"at_once": Example(call=call("pay", amount=4711))',
            "real: a run took *",
        ),
        ("False", '"at_once": Example(call=call("pay", amount=1))', "*1 passed*"),
    ],
    ids=["found", "not found", "given", "spurious"],
)
def test_events_are_tried_for_a_guard_of_yours_that_has_no_example(
    condition: str, examples: str, says: str, tmp_path: Path
) -> None:
    (tmp_path / "my_agent.py").write_text(PAYING.replace("{condition}", condition))
    options = "--must-pass call_llm:pre_step --guardrails max_calls_per_reply=1 --counterexample test_written.py"
    check = [sys.executable, "-m", "agentfsm", "check", "my_agent.py:AGENT", *options.split()]
    assert subprocess.run(check, cwd=tmp_path, capture_output=True, text=True, check=False).returncode == 1
    written = tmp_path / "test_written.py"
    text = written.read_text()
    assert "GUARDRAILS = AgentGuardrails(max_calls_per_reply=1)" in text
    written.write_text(text.replace("EXAMPLES = {}", f"EXAMPLES = {{{examples}}}"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "test_written.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert any(fnmatch(line, says) for line in done.stdout.splitlines()), done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("condition", "code"), [("run.action is Action.retry", 1), ("False", 0)])
def test_the_written_file_fails_if_and_only_if_the_counterexample_is_real(
    condition: str, code: int, tmp_path: Path
) -> None:
    (tmp_path / "hasty.py").write_text(HASTY.replace("{condition}", condition))
    (tmp_path / "test_hasty.py").write_text(counterexample_test("hasty.py:HASTY", broken(hasty(holds=True))))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "test_hasty.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout
    assert ("real: a run took" in done.stdout) is bool(code)


def test_a_property_that_holds_has_no_counterexample_to_write() -> None:
    with pytest.raises(ConfigurationError, match="there is no counterexample to 'it holds'"):
        counterexample_test("agentfsm:LOOP", Verdict("it holds", True))
