"""The examples that need other packages: they run if those are installed, and print the expected output."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

PRINTED = {
    "mcp_server.py": """\
The server's tools: time_convert_time, time_get_current_time
In Tokyo it is 21:00 then.
""",
    "otel.py": """\
It is a flute.
invoke_agent clerk
  chat large
  execute_tool ask_lexicographer
    invoke_agent lexicographer (6 tokens out)
      chat small
      execute_tool look_up
      chat small (6 tokens out)
  chat large
agentfsm.transition pre_step.otherwise
agentfsm.transition call_llm.otherwise
agentfsm.transition post_llm.tool_calls
""",
}
NEEDS = {"mcp_server.py": ("mcp", "mcp_server_time"), "otel.py": ("opentelemetry.sdk",)}


@pytest.mark.slow
@pytest.mark.parametrize("example", PRINTED)
def test_an_example_prints_what_it_should(example: str, tmp_path: Path) -> None:
    for module in NEEDS[example]:
        try:
            found = find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            pytest.skip(f"{module} is not installed")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / example)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == (PRINTED[example], "", 0)
