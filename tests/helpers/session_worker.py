"""Runs a session in a process of its own: ``session_worker STORE say TEXT`` or ``session_worker STORE hang``."""

from __future__ import annotations

import json
import os
import signal
import sys

from agentfsm import Agent, Host, SqliteStore, tool
from agentfsm.testing import ScriptedModel, call

SECRET = b"the secret of these tests, long enough"


@tool
def vanish() -> str:
    """End the process as a power cut would."""
    os.kill(os.getpid(), signal.SIGKILL)
    return "never"


def main() -> None:
    """Say something in the session, or die in the middle of a run."""
    path, what, *text = sys.argv[1:]
    script = ["Hello Ann."] if what == "say" else [call("vanish")]
    agent = Agent(ScriptedModel(script), tools=[vanish], host=Host(store=SqliteStore(path), secret=SECRET))
    result = agent.session("ann").run_sync(*text or ["Vanish."])
    print(json.dumps({"output": result.output}))


if __name__ == "__main__":
    main()
