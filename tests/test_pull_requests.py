"""The recipe for pull requests: its hooks and its workflow, run in a scratch repository as a user would run them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from tests.test_docs import DOCS, blocks

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "examples" / "pull_requests"
HOOKS: dict[str, Any] = yaml.safe_load((RECIPE / "pre-commit-config.yaml").read_text(encoding="utf-8"))
WORKFLOW: dict[Any, Any] = yaml.safe_load((RECIPE / "agent-review.yml").read_text(encoding="utf-8"))
APP = next(b.text for page in DOCS if page.stem == "pull-requests" for b in blocks(page) if b.name == "app.py")

Run = Callable[[str], subprocess.CompletedProcess[str]]


def shell_in(folder: Path) -> Run:
    """Runs shell commands in the repository of a folder, with ``agentfsm`` on the path."""
    environment = {
        **os.environ,
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(folder),
        "PRE_COMMIT_HOME": str(folder / "cache"),
        "GITHUB_BASE_REF": "main",
        "GITHUB_STEP_SUMMARY": str(folder / "summary.md"),
        "RUNNER_TEMP": str(folder),
        **{f"GIT_{who}_{what}": "a@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
    }

    def shell(command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", command],
            cwd=folder / "repository",
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return shell


@pytest.fixture(scope="module")
def reviewed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a scratch repository in which everything was reviewed and committed."""
    for program in ("git", "bash"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    folder = tmp_path_factory.mktemp("reviewed")
    repository = folder / "repository"
    for each in (folder / "bin", repository):
        each.mkdir()
    (folder / "bin" / "agentfsm").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m agentfsm "$@"\n')
    (folder / "bin" / "agentfsm").chmod(0o755)
    (repository / "app.py").write_text(APP, encoding="utf-8")
    (repository / ".gitignore").write_text("__pycache__/\n")
    shutil.copy(RECIPE / "pre-commit-config.yaml", repository / ".pre-commit-config.yaml")
    shell = shell_in(folder)
    assert shell("git init --quiet --initial-branch=main").returncode == 0
    review(shell)
    assert shell("git update-ref refs/remotes/origin/main HEAD").returncode == 0
    return folder


@pytest.fixture
def run(reviewed: Path, tmp_path: Path) -> Run:
    """Runs shell commands in a copy of that repository."""
    shutil.copytree(reviewed, tmp_path, dirs_exist_ok=True)
    return shell_in(tmp_path)


def review(run: Run) -> None:
    """Update the reviewed files by the commands of the page, and commit everything."""
    (page,) = [page for page in DOCS if page.stem == "pull-requests"]
    first = next(block for block in blocks(page) if block.language == "console")
    for line in first.text.splitlines():
        if line.startswith("$ "):
            assert run(line.removeprefix("$ ")).returncode == 0, line
    assert run("git add --all && git commit --quiet --no-verify --message reviewed").returncode == 0


def edit(run: Run, *changes: tuple[str, str]) -> None:
    """Change the app, and commit nothing."""
    text = APP
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (Path(run("pwd").stdout.strip()) / "app.py").write_text(text, encoding="utf-8")


def hooks(run: Run) -> tuple[int, str]:
    """The exit code and the output of ``pre-commit run``, as before a commit."""
    done = run(f'git add --all && "{sys.executable}" -m pre_commit run')
    return done.returncode, done.stdout + done.stderr


def steps(run: Run) -> dict[str, subprocess.CompletedProcess[str]]:
    """Each command of the workflow, except for the installation."""
    named = [step for step in cast("list[dict[str, str]]", WORKFLOW["jobs"]["review"]["steps"]) if "run" in step]
    return {step["name"]: run(step["run"]) for step in named if step["name"] != "Install"}


def failed(run: Run) -> set[str]:
    return {name for name, done in steps(run).items() if done.returncode}


PICTURE, BEHAVIOR = "The picture is the reviewed one", "The agent decides as reviewed"
BOUNDS, PATHS = "The proofs and bounds are the reviewed ones", "The reviewed paths are still those of the agent"

CHANGES = {
    "the detector is asked too late": (
        ', before="tool_calls")',
        ")",
        {PICTURE, BEHAVIOR, PATHS},
        "was too_much -> recover, is tool_calls -> dispatch_tool",
    ),
    "the code of the guard": (
        "LIMIT = 500",
        "LIMIT = 5000",
        {BEHAVIOR},
        "~ post_llm.too_much: changed code of its guard",
    ),
    "the approval rule of a tool": (
        '@tool(requires_approval=lambda arguments: arguments["amount"] > 100)',
        "@tool",
        {BOUNDS, PATHS},
        "pay",
    ),
    "a limit of the agent": (
        "AGENT = Agent(ScriptedModel(),",
        "from agentfsm import AgentGuardrails\n"
        "AGENT = Agent(ScriptedModel(), guardrails=AgentGuardrails(max_iterations=7),",
        {BOUNDS},
        '+  "model_calls": 7,',
    ),
}


TOGETHER = ("the detector is asked too late", "a limit of the agent")
"""Changes that break every check between them."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [TOGETHER, *(pytest.param((each,), marks=pytest.mark.soak) for each in CHANGES)], ids=" and ".join
)
def test_an_unreviewed_change_is_refused_and_shown(names: tuple[str, ...], run: Run) -> None:
    made = [CHANGES[name] for name in names]
    edit(run, *((old, new) for old, new, _, _ in made))
    code, output = hooks(run)
    assert code == 1
    assert all(shown in output for *_, shown in made)
    assert "review the change, and run the command again with" in output
    done = steps(run)
    assert {name for name, each in done.items() if each.returncode} == {
        check for *_, broken, _ in made for check in broken
    }
    assert all(any(shown in each.stdout for each in done.values()) for *_, shown in made)


@pytest.mark.slow
def test_a_reviewed_change_passes_and_the_summary_of_its_pull_request_shows_it(run: Run, tmp_path: Path) -> None:
    edit(run, (', before="tool_calls")', ")"))
    review(run)
    assert hooks(run)[0] == 0
    assert failed(run) == set()
    summary = (tmp_path / "summary.md").read_text()
    assert "was too_much -> recover, is tool_calls -> dispatch_tool" in summary
    assert '-  ["post_llm", "too_much"' in summary
    assert (tmp_path / "difference.svg").read_text().startswith("<svg")


@pytest.mark.slow
def test_the_first_pull_request_has_nothing_to_compare_with(run: Run, tmp_path: Path) -> None:
    run("git checkout --quiet --orphan before && git rm --quiet -r --cached reviewed diagrams")
    run("git commit --quiet --no-verify --message before && git update-ref refs/remotes/origin/main HEAD")
    run("git add --all && git commit --quiet --no-verify --message reviewed")
    assert failed(run) == set()
    assert "no graph was reviewed before" in (tmp_path / "summary.md").read_text()


def test_the_hooks_and_the_workflow_run_the_commands_of_the_page() -> None:
    page = next(page for page in DOCS if page.stem == "pull-requests").read_text(encoding="utf-8")
    commands = [hook["entry"] for hook in HOOKS["repos"][0]["hooks"]]
    assert all(command in page for command in commands)
    ran = [step["run"] for step in WORKFLOW["jobs"]["review"]["steps"] if "run" in step]
    assert ran[-len(commands) :] == commands
    triggers = WORKFLOW.get("on", WORKFLOW.get(True))  # YAML 1.1 reads the key "on" as true
    assert triggers == "pull_request"
