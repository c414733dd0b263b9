"""Adding a failure kind takes one row in failures.py, a detector and a row of the table: done here in a scratch copy."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import agentfsm

PACKAGE = Path(agentfsm.__file__).parent

ADDITIONS = {
    "loop/failures.py": (
        "    @property\n    def spec(self)",
        '    quota_exhausted = _row(\n        "quota_exhausted", _G.tool, _A.ask_user, tool_may_report=True,\n'
        '        question="The quota is used up: {explanation}. Wait, or stop?",\n    )\n\n',
    ),
    "loop/detectors.py": (
        "def unknown_tool(run: RunState)",
        'def quota_exhausted(run: RunState) -> Failure | None:\n    """A tool reported that a quota is used up."""\n'
        "    return _batch_failure(run, FailureKind.quota_exhausted) if run.call_failures else None\n\n\n",
    ),
    "loop/table.py": (
        "        Row(POST_TOOL,     unknown_tool, ",
        "        Row(POST_TOOL,     quota_exhausted,    RECOVER),\n",
    ),
}
"""For each file, the text before which the addition goes, and the addition."""

PROGRAM = """
from agentfsm import Agent, FailureKind, ToolError, UserInputRequested, tool
from agentfsm.testing import ScriptedModel, call

@tool
def fetch() -> str:
    "Fetch a page."
    raise ToolError("100 of 100 requests", kind="quota_exhausted")

result = Agent(ScriptedModel([call("fetch")]), tools=[fetch]).run_sync("go")
assert isinstance(result.outcome, UserInputRequested), result.outcome
assert result.outcome.originating_failure_kind is FailureKind.quota_exhausted
assert "post_tool.quota_exhausted" in [d.transition.id for d in result.decisions]
print(result.outcome.question)
"""


def test_a_failure_kind_is_added_with_one_row_a_detector_and_a_row_of_the_table(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "agentfsm", ignore=shutil.ignore_patterns("__pycache__"))
    for name, (before, addition) in ADDITIONS.items():
        file = tmp_path / "agentfsm" / name
        text = file.read_text(encoding="utf-8")
        assert text.count(before) == 1, name
        file.write_text(text.replace(before, addition + before), encoding="utf-8")
    table = tmp_path / "agentfsm" / "loop" / "table.py"
    text = table.read_text(encoding="utf-8")
    table.write_text(
        text.replace("    provider_error,\n", "    provider_error,\n    quota_exhausted,\n", 1), encoding="utf-8"
    )
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "The quota is used up: fetch: 100 of 100 requests. Wait, or stop?\n"
