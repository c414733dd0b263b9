"""``agentfsm report``: one file about runs of a store, which says "tampered" wherever ``agentfsm verify`` does."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from pydantic import SecretStr

from agentfsm import Agent, Host, SqliteStore, tool
from agentfsm.cli.app import app
from agentfsm.journal.verification import TAMPERED, UNVERIFIABLE
from agentfsm.report.page import BROWSERS
from agentfsm.testing import FakeClock, ScriptedModel, call
from tests.helpers.journal_scenarios import finished_run, waiting_run
from tests.journal.test_insider_edits import EDITS, SECRET, Insider, make_runs

# How the runs of the scenarios are dated.
DAY, NEXT_DAY = "1970-01-12", "1970-01-13"


def command(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], env={"AGENTFSM_SECRET": SECRET.decode()})


def verdict(page: Path) -> str:
    """What a report says first."""
    found = re.search(r'<h1>.*?</h1>\s*<p><strong class="verdict \w+">([^<]*)</strong>', page.read_text("utf-8"))
    assert found is not None
    return found[1]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reported") / "runs.db"
    with SqliteStore(path) as opened:
        finished_run(opened, "whole", secret=SECRET)
        waiting_run(opened, "waits")
    return path


def test_a_report_of_a_run_is_one_file(store: Path, tmp_path: Path) -> None:
    result = command("report", "whole", "--store", store, "--output", tmp_path / "new" / "report.html")
    if os.name == "posix":  # it has the content of the run
        assert (tmp_path / "new" / "report.html").stat().st_mode & 0o777 == 0o600
        assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr.strip() == str(tmp_path / "new" / "report.html")
    page = (tmp_path / "new" / "report.html").read_text("utf-8")
    assert verdict(tmp_path / "new" / "report.html") == "intact"
    assert "Do it all." in page
    assert "runs.db" in page
    assert "without a checkpoint" in page
    assert command("report", "whole", "--store", store).stdout.startswith("<!DOCTYPE html>")


def test_a_report_of_all_runs_has_each_of_them(store: Path, tmp_path: Path) -> None:
    file = tmp_path / "all.html"
    assert command("report", "--all", "--store", store, "-o", file).exit_code == 0
    assert verdict(file) == "intact, not finished"
    assert re.findall(r'<article data-run id="(\w+)"><h2>Run <span class="said">(\w+)<', file.read_text("utf-8")) == [
        ("r1", "whole"),
        ("r2", "waits"),
    ]


def test_the_runs_of_sub_agents_follow_the_run_that_called_them(tmp_path: Path) -> None:
    file = tmp_path / "runs.db"
    with SqliteStore(file) as opened:
        host = Host(store=opened, secret=SECRET, clock=FakeClock())
        inner = Agent(ScriptedModel(["the innermost"]), host=host)
        outer = Agent(
            ScriptedModel([call("inner", task="go deeper"), "the middle"]),
            tools=[inner.as_tool("inner", "Inner.")],
            host=host,
        )
        agent = Agent(
            ScriptedModel([call("outer", task="go deep"), "done"]), tools=[outer.as_tool("outer", "Outer.")], host=host
        )
        agent.run_sync("Go.", run_id="whole")
    assert command("report", "whole", "--store", file, "--output", tmp_path / "report.html").exit_code == 0
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "<h1>Report on run whole</h1>" in page
    heads = re.findall(r'<article data-run id="(r\d)"><h2>Run <span class="said">([^<]*)', page)
    assert [name for name, _ in heads] == ["r1", "r2", "r3"]
    assert [run_id.count(".") for _, run_id in heads] == [0, 1, 2]
    nested = re.findall(r"<h3>Sub-agents</h3><ul><li><a href=\"#(r\d)\">[^<]*</a>: <span[^>]*>([^<]*)", page)
    assert nested == [("r2", "go deep"), ("r3", "go deeper")]
    # the run asked for the outer agent, and got its answer
    assert re.search(r"Request 2, record \d+: 3 messages, the first 1 as in the request before", page)


def test_decisions_about_a_tool_in_a_period(store: Path, tmp_path: Path) -> None:
    file = tmp_path / "october.html"
    for words, decisions in (
        (("--tool", "pay"), 1),
        (("--tool", "pay", "--since", DAY, "--until", NEXT_DAY), 1),
        (("--since", DAY), 1),
        (("--tool", "look"), 0),
        (("--tool", "pay", "--since", NEXT_DAY), 0),
        (("--tool", "pay", "--until", DAY), 0),
        (("--tool", "pay", "--since", f"{DAY}T13:46:42", "--until", f"{DAY}T13:46:43"), 1),
    ):
        assert command("report", *words, "--store", store, "-o", file).exit_code == 0
        assert f"<p>{decisions} decision{'s' * (decisions != 1)} in" in file.read_text("utf-8"), words


def test_a_report_for_a_pull_request_is_markdown(store: Path) -> None:
    result = command("report", "whole", "--markdown", "--store", store)
    assert result.exit_code == 0
    assert result.stdout.startswith("### Run `whole`: `completed`")


@pytest.mark.slow
def test_a_report_can_be_a_pdf(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if any(map(shutil.which, BROWSERS)):
        assert command("report", "whole", "--pdf", "--store", store, "-o", tmp_path / "report.pdf").exit_code == 0
        assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF-")
    monkeypatch.setenv("PATH", str(tmp_path))
    missing = command("report", "whole", "--pdf", "--store", store, "-o", tmp_path / "none.pdf")
    assert missing.exit_code == 2
    assert "a PDF needs Chromium" in missing.stderr
    assert not (tmp_path / "none.pdf").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "name RUNs, or give --all"),
        (("whole", "--all"), "name RUNs, or give --all"),
        (("whole", "--tool", "pay"), "name RUNs, or give --all"),
        (("whole", "--markdown", "--pdf"), "--markdown or --pdf, not both"),
        (("--tool", "pay", "--markdown"), "--markdown is for runs"),
        (("whole", "--checkpoint", "note"), "does not exist"),
        (("--tool", "pay", "--since", "October"), "'October' does not match"),
        (("nobody",), "nobody"),
    ],
)
def test_wrong_usage_is_explained_and_writes_nothing(
    store: Path, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    result = command("report", *words, "--store", store, "-o", tmp_path / "report.html")
    assert result.exit_code != 0
    assert said in result.stderr
    assert not list(tmp_path.iterdir())


# -- a store that somebody has changed ------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    make_runs(folder / "runs.db", folder / "before.db", SECRET)
    return folder


def check_edit(number: int, made: Path, tmp_path: Path) -> None:
    """A report says of a store after an edit what ``agentfsm verify`` says."""
    folder = Path(shutil.copytree(made, tmp_path / str(number)))
    insider = Insider(folder)
    EDITS[number][2](insider)
    insider.db.close()
    code = command("verify", "--store", folder / "runs.db").exit_code
    file = folder / "report.html"
    result = command("report", "--all", "--store", folder / "runs.db", "-o", file)
    if code == TAMPERED:
        assert (result.exit_code, verdict(file)) == (TAMPERED, "tampered"), EDITS[number][0]
    elif code == UNVERIFIABLE:  # a file that is no store any more has no report
        assert result.exit_code != 0, EDITS[number][0]
        assert not file.exists() or verdict(file) == "cannot be verified", EDITS[number][0]
    else:
        assert (result.exit_code, verdict(file)) == (0, "intact, not finished"), EDITS[number][0]
    shutil.rmtree(folder)


@pytest.mark.parametrize("number", [*range(0, len(EDITS), 13), 57])
def test_a_report_says_tampered_where_verify_does(number: int, made: Path, tmp_path: Path) -> None:
    check_edit(number, made, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("number", range(len(EDITS)))
def test_a_report_says_tampered_after_each_edit_that_verify_finds(number: int, made: Path, tmp_path: Path) -> None:
    check_edit(number, made, tmp_path)


@pytest.mark.slow
def test_with_a_checkpoint_a_report_finds_what_only_a_checkpoint_can(made: Path, tmp_path: Path) -> None:
    key = ed25519.Ed25519PrivateKey.generate()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    edits = [edit for _, needs, edit in EDITS if needs == "checkpoint"]
    assert len(edits) == 6
    for number, edit in enumerate([lambda _: None, *edits]):
        folder = Path(shutil.copytree(made, tmp_path / str(number)))
        (folder / "key.pem").write_bytes(private)
        (folder / "public.pem").write_bytes(public)
        signed = command("checkpoint", "--key", folder / "key.pem", "--store", folder / "runs.db")
        (folder / "note").write_text(signed.stdout, "utf-8")
        insider = Insider(folder)
        edit(insider)
        insider.db.close()
        file = folder / "report.html"
        words = ("--checkpoint", folder / "note", "--key", folder / "public.pem", "--store", folder / "runs.db")
        command("report", "--all", *words, "-o", file)
        assert verdict(file) == ("tampered" if number else "intact, not finished")
        assert "the checkpoint of " in file.read_text("utf-8")


# -- what is not in it, and what older releases wrote ------------------------------------------------------


def test_a_report_has_no_secret_that_the_store_withholds(tmp_path: Path) -> None:
    @tool
    def unlock(code: SecretStr, door: str) -> str:
        """Unlock a door."""
        return f"{door} opens to {code.get_secret_value()}"

    secret = "open-sesame-0123456789"
    with SqliteStore(tmp_path / "runs.db") as opened:
        agent = Agent(
            ScriptedModel([call("unlock", code=secret, door="front"), "It is open."]),
            tools=[unlock],
            host=Host(clock=FakeClock(), store=opened, secret=SECRET),
        )
        assert agent.run_sync("Open the front door.", run_id="door").ok
    for words in ((), ("--markdown",)):
        shown = command("report", "door", *words, "--store", tmp_path / "runs.db").stdout
        assert "front" in shown
        assert secret not in shown


def test_runs_of_an_earlier_release_are_reported(tmp_path: Path) -> None:
    old = Path(__file__).parents[1] / "data" / "v0.1.0" / "runs.db"
    file = tmp_path / "old.html"
    shutil.copy(old, tmp_path / "runs.db")
    command("report", "--all", "--store", tmp_path / "runs.db", "-o", file)
    page = file.read_text("utf-8")
    assert "is not a valid record" not in page
    assert "cannot be drawn" not in page
    assert page.count("<article") == page.count('<figure class="wide">') > 3
