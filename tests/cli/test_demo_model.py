"""The demo's rule-based model decides from the results in the request."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from agentfsm import Agent, Allow, Deny, Edit, FailureKind, Handoff, RunCompleted, UserInputRequested
from agentfsm.cli.demo_command import MISTAKES, TASK, DemoModel, demo_tools
from agentfsm.errors import TransientProviderError
from agentfsm.loop.messages import Message, Role
from agentfsm.loop.model import ModelRequest
from agentfsm.runtime.host import Host
from agentfsm.runtime.result import RunResult
from agentfsm.testing import FakeClock


def seen_through(
    folder: Path, out: Path, limit: str = "5", leave: Any = None, mistakes: tuple[str, ...] = ()
) -> tuple[RunResult, list[str], list[str]]:
    """A complete run of the model: its result, its states, and the failures it recovered from."""
    agent = Agent(
        DemoModel(mistakes=mistakes), tools=demo_tools(folder, out), preset="funnel", host=Host(clock=FakeClock())
    )
    result = agent.run_sync(TASK)
    guards = [d.guard for d in result.decisions]
    kinds = [d.guard_result.kind.value for d in result.decisions if d.target == "recover"]
    while isinstance(result.outcome, UserInputRequested):
        asked = result.outcome
        reply = (leave or Allow()) if asked.kind == "approval" else limit

        async def go_on(record: Any = asked.suspension_record, reply: Any = reply) -> RunResult:
            return await agent.resume(record, reply)

        result = asyncio.run(go_on())
        guards += [d.guard for d in result.decisions]
        kinds += [d.guard_result.kind.value for d in result.decisions if d.target == "recover"]
    return result, guards, kinds


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "short.py").write_text("import sub.long\n")
    (source / "sub" / "long.py").write_text('"""The long one."""\n' + "x = 1\n" * 9)
    (source / "use.py").write_text("from sub.long import x\n")
    return source


def test_the_answer_depends_on_the_files(folder: Path, tmp_path: Path) -> None:
    result, _, _ = seen_through(folder, tmp_path / "out")
    assert isinstance(result.outcome, RunCompleted)
    assert result.output.startswith(
        "1 of 3 modules have more than 5 lines; the longest is sub/long.py with 10.\nThe report: wrote "
    )
    report = (tmp_path / "out" / "report.md").read_text()
    assert "| sub/long.py | 10 | The long one. |" in report
    assert "Other files that import the longest by its name: 1." in report


def test_other_files_give_another_answer(folder: Path, tmp_path: Path) -> None:
    (folder / "huge.py").write_text("# Huge.\n" * 40)
    result, _, _ = seen_through(folder, tmp_path / "out")
    assert result.output.startswith("2 of 4 modules have more than 5 lines; the longest is huge.py with 40.")
    assert "| huge.py | 40 | Huge. |" in (tmp_path / "out" / "report.md").read_text()


def test_another_limit_gives_another_answer(folder: Path, tmp_path: Path) -> None:
    result, _, _ = seen_through(folder, tmp_path / "out", limit="10 lines, please")
    assert result.output.startswith("None of 3 modules has more than 10 lines.")


def test_the_report_shows_the_longest_of_many(folder: Path, tmp_path: Path) -> None:
    for name in "abcdefg":
        (folder / f"{name}.py").write_text("x = 1\n" * 20)
    result, _, _ = seen_through(folder, tmp_path / "out")
    assert result.output.startswith("8 of 10 modules")
    assert "3 more are not shown." in (tmp_path / "out" / "report.md").read_text()


def test_a_folder_without_modules_is_handed_off(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    result, guards, _ = seen_through(tmp_path / "empty", tmp_path / "out")
    assert isinstance(result.outcome, Handoff)
    assert result.outcome.blockers == ("no file here fits **/*.py",)
    assert "declared_unable" in guards
    assert not (tmp_path / "out").exists()


def test_a_denied_report_is_not_written_and_the_answer_says_why(folder: Path, tmp_path: Path) -> None:
    result, _, _ = seen_through(folder, tmp_path / "out", leave=Deny("no paper"))
    assert result.ok
    assert result.output.endswith("There is no report: Denied by the user: no paper")
    assert not (tmp_path / "out").exists()


def test_an_edited_report_is_written_as_edited(folder: Path, tmp_path: Path) -> None:
    result, _, _ = seen_through(folder, tmp_path / "out", leave=Edit({"name": "mine.md", "text": "mine"}))
    assert (tmp_path / "out" / "mine.md").read_text() == "mine"
    assert result.output.endswith(f"wrote 1 lines to {tmp_path / 'out' / 'mine.md'}.")


def test_an_answer_without_a_number_is_asked_for_again(folder: Path, tmp_path: Path) -> None:
    result, guards, _ = seen_through(folder, tmp_path / "out", limit="not too long")
    assert guards.count("question_asked") == 2
    assert "more than 300 lines" in result.output


def test_the_loop_recovers_from_every_mistake(folder: Path, tmp_path: Path) -> None:
    clean, _, none = seen_through(folder, tmp_path / "clean")
    result, _, kinds = seen_through(folder, tmp_path / "out", mistakes=MISTAKES)
    assert none == []
    assert kinds == [
        FailureKind.transient_provider,
        FailureKind.unknown_tool,
        FailureKind.invalid_arguments,
        FailureKind.no_progress,
        FailureKind.environment_error,
    ]
    assert result.output.replace("out", "clean") == clean.output


def test_the_model_reads_the_tool_name_from_the_error() -> None:
    """With another error message it calls another tool: its replies are not canned."""
    model = DemoModel(mistakes=("unknown tool",))

    async def talk() -> str:
        wrong = (await model.reply(ModelRequest([Message.user(TASK)]))).message
        result = Message(Role.TOOL, "Call one of: listing.", tool_call_id=wrong.tool_calls[0].id, is_error=True)
        second = await model.reply(ModelRequest([Message.user(TASK), wrong, result]))
        return second.message.tool_calls[0].name

    assert asyncio.run(talk()) == "listing"


def test_the_busy_provider_sends_retry_after() -> None:
    with pytest.raises(TransientProviderError) as caught:
        asyncio.run(DemoModel(mistakes=("busy",)).reply(ModelRequest([Message.user(TASK)])))
    assert (caught.value.status, caught.value.retry_after_s) == (429, 2.0)


def test_results_are_read_as_json(folder: Path, tmp_path: Path) -> None:
    result, _, _ = seen_through(folder, tmp_path / "out")
    listed = next(m for m in result.messages if m.name == "list_files")
    assert json.loads(listed.content) == ["short.py", "sub/long.py", "use.py"]
