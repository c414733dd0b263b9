"""The client scenarios of the official conformance suite of MCP, with an agent as the client."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mcp", reason="the extra 'mcp' is not installed")

from tests.helpers.npm_servers import conformance_command

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")

QUICK = ("tools_call", "elicitation-sep1034-client-defaults", "auth/metadata-default")
OTHERS = (
    "initialize",
    "sse-retry",
    *(f"auth/metadata-var{n}" for n in (1, 2, 3)),
    "auth/basic-cimd",
    *(f"auth/scope-{each}" for each in ("from-www-authenticate", "from-scopes-supported")),
    *(f"auth/scope-{each}" for each in ("omitted-when-undefined", "step-up", "retry-limit")),
    *(f"auth/token-endpoint-auth-{each}" for each in ("basic", "post", "none")),
    "auth/pre-registration",
    "auth/2025-03-26-oauth-endpoint-fallback",
    "auth/resource-mismatch",
    *(f"auth/offline-access-{each}" for each in ("scope", "not-supported")),
    *(f"auth/client-credentials-{each}" for each in ("jwt", "basic")),
    "auth/cross-app-access-complete-flow",
)
FAILING = {"auth/2025-03-26-oauth-metadata-backcompat": "Authorization server metadata issuer mismatch"}
"""What does not pass, and why; the documentation says so, too."""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*conformance_command(), *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def scenario(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    client = f"{sys.executable} {ROOT / 'tests' / 'helpers' / 'mcp_conformance_client.py'}"
    return run("client", "--command", client, "--scenario", name, "--timeout", "120000", "--output-dir", str(folder))


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.soak) for name in OTHERS)])
def test_a_client_scenario_passes(name: str, tmp_path: Path) -> None:
    done = scenario(name, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "OVERALL: PASSED" in done.stdout + done.stderr


@pytest.mark.soak
@pytest.mark.parametrize(("name", "reason"), FAILING.items())
def test_a_scenario_that_does_not_pass_fails_for_the_documented_reason(name: str, reason: str, tmp_path: Path) -> None:
    done = scenario(name, tmp_path)
    assert done.returncode == 1
    assert reason in done.stdout + done.stderr
    assert name.removeprefix("auth/") in DOCS


def test_every_client_scenario_of_the_suite_is_tested_here() -> None:
    listed = re.findall(r"^  - (\S+)", run("list", "--client").stdout, re.MULTILINE)
    assert set(listed) == {*QUICK, *OTHERS, *FAILING}
