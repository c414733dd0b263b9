"""A text is found wherever it stands in a store, and deleted for good; what remains is reported."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from click.testing import CliRunner, Result
from pydantic import SecretStr

from agentfsm import (
    Actor,
    Agent,
    Allow,
    Approval,
    Deny,
    Host,
    JournalError,
    MemoryStore,
    RunCancelled,
    Runs,
    SqliteStore,
    ToolContext,
    tool,
)
from agentfsm.cli.app import app
from agentfsm.journal.maintenance import Hold
from agentfsm.journal.purge import hold_run, purge_runs
from agentfsm.journal.redact import TextRedaction, redact_text
from agentfsm.journal.run_info import RunInfo
from agentfsm.journal.text_search import RunFilter, files_with_text, find_text
from agentfsm.journal.verification import GOOD, OPEN, verify_stored_run
from agentfsm.loop.keys import Keyring
from agentfsm.testing import FakeClock, ScriptedModel, call
from tests.helpers.journal_rows import unpack_rows
from tests.helpers.taped_store import TapedStore, restore

ANN = "ann+x@example.org"
SECRET = b"of the tests, 32 bytes at the least"
KEYRING = Keyring(SECRET)

FORMS = {
    "plain": f"mail to {ANN} today",
    "in capitals": f"mail to {ANN.upper()}",
    "in JSON in JSON": json.dumps(json.dumps({"to": f'"{ANN}"'})),
    "in a URL": f"https://x.example/?to={quote(ANN, safe='')}&y=1",
    "as a key": json.dumps({ANN: 1}),
    "in base64": base64.b64encode(f"user:{ANN}:x".encode()).decode(),
    "in base64 for URLs": base64.urlsafe_b64encode(f"a{ANN}".encode()).decode(),
    "in base16": ANN.encode().hex(),
}

PLACES = {"prompt": f"who is {ANN}?", "result": "plain", "arguments": ANN}
"""What a prompt, a query and an address are, where the text stands in the prompt, in a result and in arguments."""


@tool
def lookup(query: str, options: dict[str, Any] | None = None) -> str:
    """Look up."""
    if query == "fail":
        raise ValueError(f"no entry for {ANN}")
    return FORMS.get(query, f"found {query}")


@tool(requires_approval=True)
def send(context: ToolContext, to: list[str], note: str = "") -> str:
    """Send."""
    return "sent"


def host(store: Any, **more: Any) -> Host:
    return Host(clock=FakeClock(), secret=SECRET, store=store, **more)


def agent(store: Any, script: list[Any], **more: Any) -> Agent:
    return Agent(ScriptedModel(script), tools=[lookup, send], host=host(store, **more))


async def make_runs(store: Any) -> None:
    """Runs in which the text stands in many places, and one in which it does not."""
    script: list[Any] = [
        [call("lookup", query=name) for name in FORMS],
        call("lookup", query="fail"),
        call("lookup", query="x", options={"cc": [{ANN: None}]}),
        f"the address is {ANN}",
    ]
    await agent(store, script).run(f"who is {ANN}?", run_id="talk", session_id="one")
    await agent(store, [call("send", to=[ANN])]).run("go", run_id="waits", session_id="two")
    await agent(store, [call("send", to=["x"]), "not sent"]).run("go", run_id="denied", session_id="two")
    await agent(store, ["not sent"]).resume("denied", Deny(f"{ANN} does not want it"))
    await agent(store, [call("send", to=["x"], note=ANN)], secrets=[SecretStr(ANN)]).run("go", run_id="sealed")
    helper = agent(store, [f"asked {ANN}"]).as_tool("helper", "Helps.")
    parent = Agent(ScriptedModel([call("helper", task="ask"), "done"]), tools=[helper], host=host(store))
    await parent.run("go", run_id="parent")
    run = agent(store, ["never"]).run("go", run_id="cancelled")
    run.cancel(f"{ANN} called")
    await run
    await agent(store, ["hello"]).run("nothing here", run_id="other", session_id="two")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "runs.db"
    with SqliteStore(made) as store:
        asyncio.run(make_runs(store))
    return made


HAVING = {"talk", "waits", "denied", "sealed", "parent", "parent-1.0", "cancelled"}


def raw_hits(folder: Path) -> list[str]:
    return [file.name for file in files_with_text((f for f in folder.rglob("*") if f.is_file()), ANN)]


def run_command(path: Path, *words: str, answer: str = "") -> Result:
    environment = {"AGENTFSM_SECRET": SECRET.decode()}
    return CliRunner().invoke(app, ["redact", *words, "--store", str(path)], input=answer, env=environment)


def test_a_text_is_found_in_every_form_and_run(path: Path) -> None:
    with SqliteStore(path) as store:
        found = asyncio.run(find_text(store, ANN, KEYRING))
    assert {each.run_id for each in found} == HAVING
    assert all(each.place is not None and each.excerpt for each in found)
    fields = {f"{each.run_id} {each.field}" for each in found}
    for expected in (
        "talk messages.0.content",  # the prompt
        "talk out.content",  # results
        "talk out.failure.explanation",
        "talk out.replied.reply.message.tool_calls.0.arguments",
        "talk out.replied.reply.message.content",
        "waits waiting.arguments",
        "denied out.answered.reply.text",
        "sealed waiting.arguments",
        "cancelled out.cancelled.reason",
    ):
        assert expected in fields, sorted(fields)
    contents = [each for each in found if each.run_id == "talk" and each.field == "out.content"]
    assert len(contents) >= len(FORMS)


def test_without_the_key_what_is_encrypted_is_not_found(path: Path) -> None:
    with SqliteStore(path) as store:
        assert "sealed" not in {each.run_id for each in asyncio.run(find_text(store, ANN))}


def test_a_deleted_text_is_in_no_byte_of_the_files_and_every_run_verifies(
    path: Path, counted: Callable[[str], None]
) -> None:
    assert raw_hits(path.parent) == ["runs.db"]
    with SqliteStore(path) as store:
        result = asyncio.run(redact_text(store, ANN, KEYRING, by="Bea"))
        assert result.remaining == ()
        assert {each.run_id for each in result.deleted} == HAVING
        assert raw_hits(path.parent) == []  # while it is open, too
        for run_id in (*HAVING, "other"):
            report = asyncio.run(verify_stored_run(store, run_id, keyring=KEYRING))
            assert report.code in (GOOD, OPEN), report
        records = asyncio.run(store.records("talk"))
        assert sum('"kind":"redaction"' in record.body and '"by":"Bea"' in record.body for record in records) > 5
        with pytest.raises(JournalError, match="redacted"):
            asyncio.run(_result_of(agent(store, ["x"]).resume("waits", Allow())))
        assert asyncio.run(redact_text(store, ANN, KEYRING)).deleted == ()
    assert raw_hits(path.parent) == []
    counted(f"redaction of a text: {len(result.deleted)} values of {len(HAVING)} runs, in 0 bytes afterwards")


async def _result_of(run: Any) -> Any:
    return await run


def test_a_value_that_is_missing_and_was_not_redacted_is_told_from_a_redacted_one(path: Path) -> None:
    with SqliteStore(path) as store:
        asyncio.run(redact_text(store, ANN, KEYRING, runs=RunFilter("talk")))
    unpack_rows(path)
    with contextlib.closing(sqlite3.connect(path)) as db:
        key, hidden = db.execute("SELECT key, hidden FROM journal WHERE hidden LIKE '%nothing here%'").fetchone()
        values = [None if "nothing here" in json.dumps(each) else each for each in json.loads(hidden)]
        text = json.dumps(values, separators=(",", ":"), ensure_ascii=False)
        db.execute("UPDATE journal SET hidden = ? WHERE key = ?", (text, key))
        db.commit()
    with SqliteStore(path) as store:
        assert asyncio.run(verify_stored_run(store, "talk", keyring=KEYRING)).code == GOOD
        missing = asyncio.run(verify_stored_run(store, "other", keyring=KEYRING))
    assert "no record says that it was redacted" in missing.reason


@pytest.mark.parametrize(
    ("runs", "having"),
    [
        (RunFilter("talk"), {"talk"}),
        (RunFilter(session_id="two"), {"waits", "denied"}),
        (RunFilter(session_id="one"), {"talk"}),
        (RunFilter("talk", "two"), set()),
        (RunFilter(tag="none"), set()),
    ],
)
def test_only_selected_runs_are_searched(path: Path, runs: RunFilter, having: set[str]) -> None:
    with SqliteStore(path) as store:
        assert {each.run_id for each in asyncio.run(find_text(store, ANN, KEYRING, runs))} == having


def test_what_cannot_be_deleted_is_reported_with_the_reason(tmp_path: Path) -> None:
    store = MemoryStore()

    async def live() -> Any:
        await agent(store, ["done"]).run(f"hello {ANN}", run_id=f"of {ANN}")
        await agent(store, ["done"]).run(f"hello {ANN}", run_id="tampered")
        rows = store._runs["tampered"].records
        rows[1] = rows[1]._replace(body=rows[1].body.replace("pre_step", "post_llm"))
        await agent(store, [call("send", to=[ANN])]).run("go", run_id="held")
        lease = await store.acquire("held", "somebody", keyring=KEYRING)
        result = await redact_text(store, ANN, KEYRING)
        await store.release(lease)
        return result

    result = asyncio.run(live())
    assert {each.run_id for each in result.deleted} == {f"of {ANN}"}
    reasons = {each.run_id: each.reason for each in result.remaining}
    assert "part of the record itself" in reasons[f"of {ANN}"]
    assert "cannot be redacted: record 2" in reasons["tampered"]
    assert "somebody" in reasons["held"]


def test_the_id_of_an_actor_is_found_wherever_it_stands_with_what_to_do_about_it() -> None:
    store = MemoryStore()

    async def live() -> list[Any]:
        @tool(requires_approval=Approval(2))
        def pay() -> str:
            """Pay."""
            return "paid"

        def payer(*script: Any) -> Agent:
            return Agent(ScriptedModel(list(script)), tools=[pay], host=host(store))

        await payer(call("pay")).run("go", run_id="r", actor=Actor(ANN))
        await payer().resume("r", Allow(), by=Actor(ANN))
        await payer("done").resume("r", Allow(), by=Actor("bob"))
        return list((await redact_text(store, ANN, KEYRING)).remaining)

    remaining = asyncio.run(live())
    fields = {each.field.rpartition("waiting.")[2] for each in remaining}
    assert fields == {"requester.id", "quorum.requester.id", "out.answered.reply.actor.id", "quorum.votes.0.id"}
    assert {each.reason for each in remaining} == {
        "votes are checked by the ids of actors, so it is hashed: only purging the whole run deletes it"
    }


def test_what_a_store_has_of_a_person_beside_the_records_of_runs_is_reported(tmp_path: Path) -> None:
    """Where a text stands after a redaction is asked of the whole file, column by column."""
    path = tmp_path / "runs.db"

    async def live() -> TextRedaction:
        async with SqliteStore(path) as store:
            for run_id in ("held", "purged", "voted"):
                await agent(store, ["done"]).run("hello", run_id=run_id, actor=ANN if run_id == "voted" else None)
            await hold_run(store, "held", Hold("as asked", by=ANN), KEYRING)
            await purge_runs(store, ["purged"], KEYRING, by="the officer", reason=f"for {ANN}")
            lease = await store.acquire("queued", "me", new=True, keyring=KEYRING)
            await store.append(
                lease, (), "suspended", RunInfo("queued", "suspended", metadata={"for": ANN})
            )  # as if submitted
            return await redact_text(store, ANN, KEYRING)

    remaining = {(each.run_id, each.field): each.reason for each in asyncio.run(live()).remaining}
    assert remaining.keys() == {
        ("voted", "requester.id"),
        ("held", "hold"),
        ("purged", "tombstone"),
        ("queued", "listing"),
    }
    assert remaining["held", "hold"] == "it stands in the hold of the run: hold the run again without it"
    assert remaining["purged", "tombstone"].endswith("shows that the run was purged, which is sealed")
    assert remaining["queued", "listing"] == "the run has not begun: only cancelling and purging it deletes it"
    with contextlib.closing(sqlite3.connect(path)) as db:
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
        having = {name for name in tables for row in db.execute(f"SELECT * FROM {name}") if ANN in str(row)}
    assert having - {"journal"} == {"run_info", "run_metadata", "hold", "tombstone"}  # of the runs that are reported


@pytest.mark.parametrize(
    "odd", ["\\u0061" + ANN[1:], ANN.replace("@", "&#64;"), ANN.replace("a", "%61").replace("@", "%40")]
)
def test_a_text_with_more_escapes_than_it_needs_is_found(odd: str) -> None:
    store = MemoryStore()

    async def live() -> Any:
        await agent(store, [f"it is {odd}"]).run("hello", run_id="r")
        return await redact_text(store, ANN, KEYRING)

    result = asyncio.run(live())
    assert [each.run_id for each in result.deleted] == ["r"]
    assert result.remaining == ()


@pytest.mark.parametrize(
    "odd",
    [
        "Jose\u0301 Mu\u0308ller",
        "JOSE\u0301 MU\u0308LLER",
        "Jos\u00e9\u00a0M\u00fcller",
        "Jos\u00e9\n  M\u00fcller",
        "Jos\u00e9 M\u00fc\u00adl\u200bler",
        "Jos\\u00e9 \\n Mu\\u0308ller",
        "".join(chr(ord(c) + 0xFEE0) if c == "M" else c for c in "Jos\u00e9 M\u00fcller"),
    ],
)
def test_a_text_that_looks_the_same_is_found(odd: str) -> None:
    store = MemoryStore()

    async def live() -> Any:
        await agent(store, [f"it is {odd}, they say"]).run("Jose Muller", run_id="r")
        return await redact_text(store, "Jos\u00e9 M\u00fcller", KEYRING)

    result = asyncio.run(live())
    assert [each.field.rpartition(".")[2] for each in result.deleted] == ["content"]
    assert result.remaining == ()


def test_a_session_id_is_deleted_like_any_text() -> None:
    store = MemoryStore()

    async def live() -> Any:
        await agent(store, ["done"]).run("hello", run_id="r", session_id=ANN)
        return await redact_text(store, ANN, KEYRING, runs=RunFilter(session_id=ANN))

    result = asyncio.run(live())
    assert [each.field for each in result.deleted] == ["session"]
    assert result.remaining == ()


@pytest.mark.parametrize("text", ["", "a", " x "])
def test_a_text_that_is_too_short_is_refused(text: str) -> None:
    with pytest.raises(JournalError, match="too short"):
        asyncio.run(find_text(MemoryStore(), text))


def test_the_command_shows_asks_deletes_and_says_what_remains(path: Path) -> None:
    (path.parent / "runs.db.bak").write_bytes(path.read_bytes())
    shown = run_command(path, "--text", ANN, "--dry-run")
    assert shown.exit_code == 0, shown.output
    assert re.search(r"^denied +\d+\.out\.answered\.reply\.text +.*does not want it", shown.output, re.MULTILINE)
    refused = run_command(path, "--text", ANN, answer="n\n")
    assert refused.exit_code == 1
    assert "0 values deleted" in refused.output
    assert "runs.db" in raw_hits(path.parent)
    done = run_command(path, "--text", ANN, "--by", "Bea", answer="y\n")
    assert done.exit_code == 1  # a copy remains
    assert "in 7 runs for good?" in done.output
    assert f"remains: in the file {path.parent / 'runs.db.bak'}" in done.output
    assert raw_hits(path.parent) == ["runs.db.bak"]
    (path.parent / "runs.db.bak").unlink()
    again = run_command(path, "--text", ANN, "--yes")
    assert (again.exit_code, again.output) == (0, "not found in any run\n0 values deleted\n")


def test_the_command_prints_json(path: Path) -> None:
    told = json.loads(run_command(path, "--text", ANN, "--session", "one", "--yes", "--json").stdout)
    assert {each["run_id"] for each in told["deleted"]} == {"talk"}
    assert told["remaining"] == []
    assert told["files"] == [str(path)]  # other runs have it, too


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((), "give RUN and FIELD, or --text"),
        (("talk",), "give RUN and FIELD, or --text"),
        (("talk", "1", "--text", ANN), "--run selects a run to search"),
    ],
)
def test_wrong_usage_of_the_command(path: Path, words: tuple[str, ...], problem: str) -> None:
    result = run_command(path, *words)
    assert result.exit_code == 2
    assert problem in result.output


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("lost", [0, 1, 2], ids="{} commits lost".format)
@pytest.mark.parametrize("where", ["prompt", "result", "arguments"])
def test_a_run_that_was_redacted_before_it_ended_cannot_go_on_but_can_be_dismissed_and_purged(
    where: str, lost: int, depth: int
) -> None:
    """Otherwise the rest of it, such as who requested it, would stay for ever."""
    prompt, query, to = (text if where == place else "x" for place, text in PLACES.items())

    def make(store: Any) -> Agent:
        made = agent(store, [call("lookup", query=query), call("send", to=[to])])
        for _ in range(depth):
            tools = [made.as_tool("helper", "Helps.")]
            made = Agent(ScriptedModel([call("helper", task=prompt)]), tools=tools, host=host(store))
        return made

    async def live() -> None:
        before, store = TapedStore(), MemoryStore()
        await make(before).run(prompt, run_id="r")
        await restore(before.tape[: len(before.tape) - lost], store, KEYRING)
        runs = Runs(store, secret=SECRET)
        await runs.fork("r", 3, "f")
        assert (await runs.redact_text(ANN)).deleted or lost  # then it may not be there yet
        if where == "prompt":
            with pytest.raises(JournalError, match="redacted, and the run cannot continue without it: it can be dism"):
                await make(store).resume("r").load()
        for run_id in ("r", "f"):
            assert isinstance((await make(store).dismiss(run_id, "erased")).outcome, RunCancelled)
        for head in await store.heads():
            assert (head.status, head.owner) == ("finished", None)
            assert (await runs.verify(head.run_id)).code == GOOD
            await runs.get(head.run_id)
        assert (await purge_runs(store, ["r", "f"], KEYRING)).kept == ()
        assert await store.heads() == []

    asyncio.run(live())
