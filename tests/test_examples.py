"""Every file of ``examples/`` runs in an empty folder, in a process of its own, and prints what is expected."""

from __future__ import annotations

import ast
import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentfsm import LOOP, Example, RunState, State, StateSpec, Transition
from agentfsm.testing import GuardExamples, NoExampleError, WitnessDriver
from tests.helpers.fake_model_server import ModelOutput, fake_model_server, text_output, tool_call_output

EXAMPLES = Path(__file__).parents[1] / "examples"

ONE_TOOL_CALL = """\
pre_step.otherwise -> call_llm
call_llm.otherwise -> post_llm
post_llm.tool_calls -> dispatch_tool
dispatch_tool.otherwise -> post_tool
post_tool.otherwise -> pre_step
pre_step.otherwise -> call_llm
call_llm.otherwise -> post_llm
post_llm.otherwise -> terminal
"""

PRINTED = {
    "quickstart": "It is 42.\n" + ONE_TOOL_CALL,
    "typed_app": """\
The limit of this run: 50
May 'refund' run with these arguments? {'order_number': 'A-1', 'usd': 80}
You get 80 USD back. (A-1: 80.00 USD)
You will have it in three days. (A-1: 80.00 USD)
Refunds: [('A-1', 80.0)]
""",
    "own_detector": """\
The rows of post_llm: cancelled, aborted, output_truncated, output_refused, output_malformed, loop_detected, \
promises_a_refund, no_progress, tool_calls, otherwise
pre_step.otherwise -> call_llm
call_llm.otherwise -> post_llm
post_llm.promises_a_refund -> recover
recover.otherwise -> pre_step
pre_step.otherwise -> call_llm
call_llm.otherwise -> post_llm
post_llm.otherwise -> terminal
Instruction to the model: The last step failed (<error>only a human may promise a refund</error>). Pick the smallest \
next step that avoids this.
Answer: I have passed this on to a colleague.
""",
    "own_state": """\
pre_step.otherwise -> call_llm
call_llm.otherwise -> post_llm
post_llm.otherwise -> edit
edit.too_long -> pre_step
pre_step.otherwise -> call_llm
call_llm.otherwise -> post_llm
post_llm.otherwise -> edit
edit.otherwise -> terminal
Answer: Paris.
""",
    "structured_output": """\
Feedback to the model: Your last message could not be read: the answer does not have the required format (people: \
input should be a valid integer, unable to parse string as an integer). Send it again in the required form, as valid \
JSON and nothing else.
Town(name='Paris', people=2113705)
The guard that caught it: output_malformed
""",
    "subagent": """\
travel asks: May 'book' run with these arguments? {'flight': 'LH 802'}
You fly with LH 802.
Output tokens of both agents: 10
""",
}
"""Examples that need no server and no extra, with everything that they print."""

OTHERS = {"approval", "local_model"}
"""Examples with tests of their own below."""


def run(example: str, folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / f"{example}.py"), *words],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, **environment},
        timeout=60,
        check=False,
    )


def test_every_example_is_run_by_some_test() -> None:
    """Examples of one package may be run by the tests of that package, which then name them."""
    modules = "".join(path.read_text() for path in Path(__file__).parent.rglob("test_*.py") if path != Path(__file__))
    others = {path.stem for path in EXAMPLES.glob("*.py")} - PRINTED.keys() - OTHERS
    assert {name for name in others if f"{name}.py" not in modules} == set()


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda p: p.stem)
def test_every_example_has_a_docstring(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring


@pytest.mark.slow
@pytest.mark.parametrize("example", PRINTED)
def test_an_example_prints_what_is_expected(example: str, tmp_path: Path) -> None:
    done = run(example, tmp_path)
    assert (done.stdout, done.stderr, done.returncode) == (PRINTED[example], "", 0)


@pytest.mark.slow
def test_approval_resumes_in_another_process_once(tmp_path: Path) -> None:
    first = run("approval", tmp_path)
    assert first.stdout == (
        "May 'delete_account' run with these arguments? delete_account {'user': 'ann'}\n"
        "The run is suspended in waiting.json.\n"
    )
    assert run("approval", tmp_path, "allow").stdout == "Result: the account of ann was deleted\n"
    again = run("approval", tmp_path, "allow")
    assert again.returncode == 1
    assert "was already resumed" in again.stderr


@pytest.mark.slow
def test_approval_may_be_denied_and_needs_the_same_secret(tmp_path: Path) -> None:
    run("approval", tmp_path)
    wrong = run("approval", tmp_path, "allow", AGENTFSM_SECRET="another")
    assert wrong.returncode == 1
    assert "signed with another secret" in wrong.stderr
    assert run("approval", tmp_path, "deny").stdout == "Result: Denied by the user: she changed her mind\n"


def test_a_local_model_calls_the_tool_and_answers(tmp_path: Path) -> None:
    size = shutil.disk_usage(tmp_path).total // 10**9

    def answer(body: dict[str, Any]) -> ModelOutput:
        return text_output(f"The disk holds {json.loads(body['messages'][-1]['content'])['size']} GB.")

    with fake_model_server(tool_call_output(("disk_space", {"path": str(tmp_path)})), answer) as server:
        done = run("local_model", tmp_path, OLLAMA_HOST=server.host)
    call_line, result_line, answer_line = done.stdout.splitlines()
    assert call_line == f"calls disk_space({{'path': {str(tmp_path)!r}}})"
    assert result_line.startswith('  returned {"size":')
    assert answer_line == f"The disk holds {size} GB."
    assert (done.stderr, done.returncode) == ("", 0)


def test_a_local_model_that_refuses_is_handed_off(tmp_path: Path) -> None:
    with fake_model_server(400) as server:
        done = run("local_model", tmp_path, OLLAMA_HOST=server.host)
    assert done.returncode == 1
    assert done.stdout.startswith("handed off: ollama:llama3.2: ")


@pytest.mark.slow
def test_the_guard_of_an_own_state_agrees_with_its_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    graph = importlib.import_module("own_state").GRAPH
    assert WitnessDriver(graph).check_examples() > 50
    long = Example(state_result="too long")
    wrong = {"too_long": GuardExamples(fires_on=(long,), silent_on=(long,))}
    with pytest.raises(AssertionError, match=r"edit\.too_long fires on its silent example 1"):
        WitnessDriver(graph, examples=wrong).check_examples()


def test_a_guard_without_examples_is_named_with_what_to_declare() -> None:
    def bare(run: RunState) -> bool:
        return run.state_results["edit"] == "too long"

    graph = LOOP.with_state(
        StateSpec("edit", effect=lambda context: None),
        [Transition("edit", bare, State.PRE_STEP), Transition("edit", None, State.TERMINAL, ends="completed")],
        entered_by="post_llm.otherwise",
    )
    with pytest.raises(NoExampleError, match=r"edit\.bare has no example: declare @detector"):
        WitnessDriver(graph).check_examples()
