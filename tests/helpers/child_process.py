"""Runs a helper module in a process of its own and returns the JSON that it prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def child_environment() -> dict[str, str]:
    """The environment for a child: without coverage, which doubles its time, or pytest, and with TMPDIR in memory."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("COVERAGE_", "PYTEST_"))}
    return env | ({"TMPDIR": "/dev/shm"} if Path("/dev/shm").is_dir() else {})


def run_helper(module: str, *arguments: str) -> dict[str, Any]:
    """The JSON that ``python -m tests.helpers.MODULE ARGUMENTS...`` prints."""
    command = [sys.executable, "-m", f"tests.helpers.{module}", *arguments]
    child = subprocess.run(command, capture_output=True, text=True, env=child_environment(), check=False)
    assert child.returncode == 0, child.stderr
    printed: dict[str, Any] = json.loads(child.stdout)
    return printed
