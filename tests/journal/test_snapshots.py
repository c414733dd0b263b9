"""Snapshots: when a run gets one, what it holds, and that loading from it gives the run that its journal gives."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentfsm import (
    Agent,
    Allow,
    Counter,
    Deny,
    Host,
    Image,
    ItDidNotRun,
    JournalError,
    JournalGraphError,
    KeepLast,
    MemoryStore,
    Migration,
    RunCompleted,
    Runs,
    SqliteStore,
    StateContext,
    Summarize,
    UserInputRequested,
    hook,
    tool,
)
from agentfsm.agent.resume import load_run
from agentfsm.journal import snapshot as snapshots
from agentfsm.journal.adoption import adopt
from agentfsm.journal.listing import verify_listed_run
from agentfsm.journal.load import load_stored_run
from agentfsm.journal.records import SealedRecord
from agentfsm.journal.redact import redact_text
from agentfsm.journal.run_info import RunQuery
from agentfsm.journal.snapshot import snapshot_damage
from agentfsm.journal.store import SHORT_JOURNAL_CHARS
from agentfsm.journal.verification import OPEN
from agentfsm.loop import withholding
from agentfsm.loop.keys import Keyring
from agentfsm.loop.messages import UNREAD
from agentfsm.loop.state_json import dump_state
from agentfsm.testing import FakeClock, RecordingModel, ScriptedModel, call
from tests.helpers.snapshot_runs import (
    CANARY,
    KEYS,
    LIMITS,
    MANAGERS,
    NEWEST,
    PAID,
    SECRET,
    Recording,
    agent_on,
    comparable,
    config_of,
    interrupted,
    is_loaded_from_snapshot,
    long_script,
    look,
    pay,
    rows_of,
    suspended_in,
    wire,
)
from tests.runtime.test_state_context import waiting


def random_script(draw: random.Random) -> list[Any]:
    """Calls one by one and several at once, some of which people have to approve."""
    numbers = itertools.count()
    kinds = ("look", "look", "look", "pay", "wire")
    script: list[Any] = []
    for _ in range(draw.randrange(6, 10)):
        batch = [draw.choice(kinds) for _ in range(draw.choice((1, 1, 1, 2, 3)))]
        script.append(
            [
                call("look", at=f"place {next(numbers)}") if kind == "look" else call(kind, amount=next(numbers))
                for kind in batch
            ]
        )
    return [each if len(each) > 1 else each[0] for each in script] + ["Done."]


async def go_on(store: Any, script: Sequence[Any], draw: random.Random, history: Any) -> Any:
    """The result of a run that is answered until it ends, by new agents, as in other processes."""
    while True:
        loaded = await load_run(config_of(agent_on(store, (), history=history)), "r")
        agent = agent_on(store, script[loaded.run.turns :], history=history)
        request = loaded.run.pending_request
        if loaded.suspension_id is None or request is None:
            result = await agent.resume("r")
        elif request.kind == "in_doubt":
            result = await agent.resume("r", ItDidNotRun(), by=MANAGERS[0])
        else:
            voted = request.quorum is not None and len(request.quorum.votes) > 0
            result = await agent.resume("r", draw.choice((Allow(), Allow(), Deny("no"))), by=MANAGERS[voted])
        if not isinstance(result.outcome, UserInputRequested):
            return result


@pytest.mark.parametrize("history", [None, NEWEST], ids=["all", "newest"])
@pytest.mark.parametrize(
    ("seed", "every"),
    [
        (0, 30),
        pytest.param(0, 4, marks=pytest.mark.slow),
        *(pytest.param(seed, 1, marks=pytest.mark.soak) for seed in range(5)),
    ],
)
@pytest.mark.usefixtures("snapshots_often")
def test_a_run_that_was_killed_goes_on_from_its_snapshot_as_from_its_journal(
    seed: int, every: int, history: Any
) -> None:
    async def scene() -> None:
        draw = random.Random(seed)
        script, store = random_script(draw), Recording()
        await agent_on(store, script, history=history).run("Go.", run_id="r")
        if (head := await store.head("r")) is not None and head.status == "suspended":
            await go_on(store, script, random.Random(seed), history)
        used = 0
        for appends in range(every, len(store.log), every):
            fast = await store.after_a_kill(appends, with_snapshots=True)
            slow = await store.after_a_kill(appends, with_snapshots=False)
            config = config_of(agent_on(fast, (), history=history))
            lazy, whole = await load_run(config, "r", lazily=True), await load_run(config, "r")
            used += lazy.resume_point.base is not None and bool(lazy.resume_point.base.unread)
            assert comparable(lazy) == comparable(whole)
            known = zip(lazy.run.messages, whole.run.messages, strict=True)
            assert all(one is UNREAD or one == other for one, other in known)
            results = [await go_on(each, script, random.Random(appends), history) for each in (fast, slow)]
            one, other = (dump_state(result.run_state) for result in results)
            assert one == other
            told = [[[r.kind, *map(r.data.get, ("transition", "attempt"))] for r in each.journal] for each in results]
            assert told[0] == told[1]
            assert results[0].messages == results[1].messages
        assert used > len(store.log) // every // 8

    asyncio.run(scene())


async def prefixes_with_snapshots(store: Recording, run_id: str) -> list[str]:
    """What is wrong with each snapshot that a run got, as against its records up to then."""
    records, wrong = list[SealedRecord](), list[str]()
    for of, added, _, _, snapshot in store.log:
        if of == run_id:
            records += added
            if snapshot is not None:
                wrong.append(snapshot_damage(snapshot, run_id, records, KEYS))
    return wrong


@pytest.mark.parametrize(
    "options",
    [
        {"history": None},
        {"history": Summarize(above_tokens=1, turns=1, replies=1, max_compactions=1_000)},
        {"hooks": [hook(at="pre_step")(lambda context: None)]},
    ],
    ids=["whole history", "summaries", "hook"],
)
@pytest.mark.usefixtures("snapshots_often")
def test_each_snapshot_says_what_the_records_before_it_say(options: dict[str, Any]) -> None:
    store = Recording()

    async def scene() -> None:
        if isinstance(options.get("history"), Summarize):
            options["history"] = replace(options["history"], model=ScriptedModel(["A summary."] * 20))
        await agent_on(store, long_script(12), **options).run("Go.", run_id="r")
        wrong = await prefixes_with_snapshots(store, "r")
        assert len(wrong) >= 6
        assert set(wrong) == {""}

    asyncio.run(scene())


@pytest.mark.parametrize("history", [None, NEWEST], ids=["all", "newest"])
@pytest.mark.usefixtures("snapshots_often")
def test_each_snapshot_of_a_run_that_goes_on_from_snapshots_says_what_the_records_say(history: Any) -> None:
    async def scene() -> None:
        store = Recording()
        script: list[Any] = [*long_script(6)[:-1], *(call("wire", amount=n) for n in range(2)), "Done."]
        await agent_on(store, script, history=history).run("Go.", run_id="r")
        assert await is_loaded_from_snapshot(agent_on(store, (), history=history))
        assert isinstance((await go_on(store, script, random.Random(0), history)).outcome, RunCompleted)
        wrong = await prefixes_with_snapshots(store, "r")
        assert len(wrong) > 8
        assert set(wrong) == {""}

    asyncio.run(scene())


def test_a_run_that_goes_on_gets_a_snapshot_no_sooner_than_one_that_never_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(snapshots, "EVERY_RECORDS", 40)
    monkeypatch.setattr(snapshots, "WAITING_RECORDS", 40)

    async def scene() -> None:
        store = Recording()
        await interrupted(store, 12)
        await agent_on(store, long_script(12)).resume("r", Allow())
        made = [json.loads(snapshot.content)["seq"] for *_, snapshot in store.log if snapshot is not None]
        assert len(made) > 4
        assert min(after - before for before, after in itertools.pairwise(made)) >= 40

    asyncio.run(scene())


@pytest.mark.usefixtures("snapshots_often")
def test_a_run_with_sub_agents_has_snapshots_and_they_have_none() -> None:
    async def scene() -> None:
        store = Recording()
        helper = Agent(ScriptedModel(["Found."] * 9), host=Host(store=store, secret=SECRET))
        script = [*(call("helper", task=f"task {n}") for n in range(9)), "Done."]
        result = await agent_on(store, script, tools=[helper.as_tool("helper", "Help.")]).run("Go.", run_id="r")
        assert isinstance(result.outcome, RunCompleted)
        wrong = await prefixes_with_snapshots(store, "r")
        assert len(wrong) >= 5
        assert set(wrong) == {""}
        assert {of for of, *_, snapshot in store.log if snapshot is not None} == {"r"}
        assert len({of for of, *_ in store.log}) == 10

    asyncio.run(scene())


# -- what it costs ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_records_that_are_read_until_the_next_move_do_not_grow_with_the_run() -> None:
    async def records_until_the_tool_runs(steps: int) -> tuple[int, int]:
        store = Recording()
        await interrupted(store, steps)
        before, at_move = store.read, list[int]()
        PAID[:] = [lambda: at_move.append(store.read - before)]
        result = await agent_on(store, ["Done."]).resume("r", Allow())
        PAID.clear()
        assert result.output == "Done."
        assert len(result.messages) == 2 * steps + 4
        assert [record.seq for record in result.journal] == list(range(1, len(result.journal) + 1))
        return at_move[0], len(result.journal)

    short, long = (asyncio.run(records_until_the_tool_runs(steps)) for steps in (100, 300))
    assert max(short[0], long[0]) <= 1 + snapshots.WAITING_RECORDS  # the first record, and those after the snapshot
    assert long[1] > 2_000


@pytest.mark.slow
def test_a_snapshot_does_not_grow_with_the_run_and_a_short_run_has_none() -> None:
    async def size(steps: int) -> int:
        store = MemoryStore()
        await interrupted(store, steps)
        found = await store.snapshot("r")
        return 0 if found is None else len(found.content)

    sizes = [asyncio.run(size(steps)) for steps in (2, 100, 300)]
    assert sizes[0] == 0
    assert sizes[1] > 0
    assert sizes[2] < sizes[1] * 1.2


@pytest.mark.usefixtures("snapshots_often")
def test_a_long_snapshot_is_read_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = list[int]()
    restore = snapshots.Snapshot.restore

    def noted(*arguments: Any) -> Any:
        threads.append(threading.get_ident())
        return restore(*arguments)

    monkeypatch.setattr(snapshots.Snapshot, "restore", noted)

    async def scene() -> None:
        for run_id, letters in (("short", 10), ("long", SHORT_JOURNAL_CHARS)):
            store = MemoryStore()
            script = [call("look", at="x" * letters), call("pay", amount=1)]
            await agent_on(store, script, history=None).run("Go.", run_id=run_id)
            await load_run(config_of(agent_on(store, (), history=None)), run_id, lazily=True)
        short, long = threads
        assert short == threading.get_ident() != long

    asyncio.run(scene())


@pytest.mark.parametrize("prompt", ["text", "image"])
@pytest.mark.usefixtures("snapshots_often")
def test_a_run_whose_next_request_is_very_long_has_no_snapshot(prompt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "MAX_CHARS", 20_000)

    async def has_snapshot(letters: int) -> bool:
        store = MemoryStore()
        long = "x" * letters if prompt == "text" else [Image("image/png", "AAAA" * (letters // 4))]
        await agent_on(store, [call("pay", amount=1)], history=None).run(long, run_id="r")
        return await store.snapshot("r") is not None

    assert [asyncio.run(has_snapshot(letters)) for letters in (15_000, 21_000)] == [True, False]


@pytest.mark.usefixtures("snapshots_often")
def test_a_finished_run_has_no_snapshot() -> None:
    async def scene() -> None:
        store = Recording()
        await agent_on(store, long_script(5)).run("Go.", run_id="r")
        assert any(snapshot for *_, snapshot in store.log)
        assert await store.snapshot("r") is None

    asyncio.run(scene())


@pytest.mark.parametrize(("replies", "expected"), [(1, True), (20, False)])
@pytest.mark.usefixtures("snapshots_often")
def test_a_run_with_a_history_policy_has_no_snapshot_before_that_leaves_anything_out(
    replies: int, expected: bool
) -> None:
    async def scene() -> None:
        store = Recording()
        await interrupted(store, 12, history=KeepLast(turns=1, replies=replies, max_compactions=10_000))
        assert any(snapshot for *_, snapshot in store.log) == expected

    asyncio.run(scene())


@pytest.mark.usefixtures("snapshots_often")
def test_a_request_expires_for_a_run_that_is_loaded_from_its_snapshot_when_it_does_without_one() -> None:
    async def scene() -> None:
        store = MemoryStore()
        limits = LIMITS.model_copy(update={"validity_s": 60.0})
        await interrupted(store, 12, guardrails=limits)
        config = config_of(agent_on(store, (), guardrails=limits))
        lazy, whole = await load_run(config, "r", lazily=True), await load_run(config, "r")
        assert lazy.run.unread
        assert lazy.resume_point.expires_at == whole.resume_point.expires_at == FakeClock().time() + 60.0

    asyncio.run(scene())


@pytest.mark.usefixtures("snapshots_often")
def test_a_run_that_goes_on_from_a_snapshot_with_another_model_is_listed_with_its_first_one() -> None:
    class Other(ScriptedModel):
        name = "another"

    async def scene() -> None:
        store, listed = MemoryStore(), list[str]()
        await interrupted(store, 12)
        PAID[:] = [lambda: listed.append(store._runs["r"].current_info().model)]  # pyright: ignore[reportPrivateUsage]
        await agent_on(store, (), model=Other(["Done."])).resume("r", Allow())
        PAID.clear()
        (ended,) = (await store.find_runs(RunQuery())).runs
        assert [*listed, ended.model] == [ScriptedModel([]).name] * 2

    asyncio.run(scene())


@pytest.mark.usefixtures("snapshots_often")
def test_a_run_gets_no_snapshot_while_it_is_not_known_whether_a_call_ran() -> None:
    async def scene() -> None:
        whole = Recording()
        await interrupted(whole, 12, history=None)
        store = await whole.after_a_kill(4, with_snapshots=False)
        result = await agent_on(store, (), history=None).resume("r")
        assert isinstance(result.outcome, UserInputRequested)
        assert result.outcome.kind == "in_doubt"
        assert await store.snapshot("r") is None

    asyncio.run(scene())


@tool(requires_approval=True)
def send(text: str) -> str:
    """Send, which cannot be taken back."""
    return f"sent {text}"


@pytest.mark.parametrize("kind", ["approval", "in_doubt"])
@pytest.mark.usefixtures("snapshots_often")
def test_a_run_that_waits_in_the_midst_of_the_calls_of_a_user_defined_state_gets_no_snapshot(kind: str) -> None:
    seen: list[str] = []

    @tool
    def glance(at: str) -> str:
        """Look, and be counted."""
        seen.append(at)
        return f"seen {at}"

    async def review(context: StateContext) -> str:
        await context.call_tool("glance", {"at": "home"})
        return (await context.call_tool("send", {"text": "hello"})).content

    async def scene() -> None:
        options: dict[str, Any] = {"tools": [look, glance, send], "graph": waiting(review), "history": None}
        whole = Recording()
        result = await agent_on(whole, long_script(6), **options).run("Go.", run_id="r")
        store: MemoryStore = whole
        if kind == "in_doubt":
            await agent_on(whole, (), **options).resume("r", Allow())
            sends = [json.loads(added[-1].body).get("name") == "send" for _, added, *_ in whole.log]
            store = await whole.after_a_kill(1 + sends.index(True), with_snapshots=True)
            result = await agent_on(store, (), **options).resume("r")
        assert isinstance(result.outcome, UserInputRequested)
        assert result.outcome.kind == kind
        snapshot = await store.snapshot("r")
        assert snapshot is not None
        assert json.loads(snapshot.content)["state"]["state"] == "call_llm"  # from before the calls
        result = await agent_on(store, (), **options).resume("r", Allow() if kind == "approval" else ItDidNotRun())
        assert result.run_state.state_results["review"] == "sent hello"
        assert seen == ["home"]

    asyncio.run(scene())


@pytest.mark.usefixtures("snapshots_often")
def test_a_run_that_was_migrated_has_no_snapshot_and_gets_none() -> None:
    async def scene() -> None:
        store = Recording()
        await interrupted(store, 12, history=None)
        log, graph = len(store.log), config_of(agent_on(store, (), history=None)).machine.graph
        longer = graph.with_counter(Counter("rounds", 3))
        changed = {"graph": longer, "migrations": [Migration(graph)], "history": None}
        for n in range(2):  # by the process that migrates it, and by another one
            script = [call("look", at=f"room {n}"), call("pay", amount=2 + n)]
            assert isinstance(
                (await agent_on(store, script, **changed).resume("r", Allow())).outcome, UserInputRequested
            )
            assert not any(snapshot for *_, snapshot in store.log[log:])
            assert not await is_loaded_from_snapshot(agent_on(store, (), **changed))
            assert (await verify_listed_run(store, "r", keyring=KEYS)).code == OPEN

    asyncio.run(scene())


# -- who may see what ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("snapshots_often")
def test_a_model_gets_the_instructions_of_a_run_that_is_loaded_from_its_snapshot() -> None:
    async def scene() -> None:
        store = MemoryStore()
        await interrupted(store, 12, instructions="Be brief.")
        model = RecordingModel(ScriptedModel(["Done."]))
        agent = agent_on(store, (), model=model, instructions="Be brief.")
        assert await is_loaded_from_snapshot(agent)
        await agent.resume("r", Allow())
        assert [m.content for m in model.requests[0].messages if m.role == "system"] == ["Be brief."]

    asyncio.run(scene())


@pytest.mark.usefixtures("snapshots_often")
def test_functions_of_the_users_see_the_whole_transcript_of_a_resumed_run() -> None:
    seen = list[int]()

    @hook(at="call_llm")
    def watch(context: Any) -> None:
        seen.append(len([message.content for message in context.run.messages]))

    async def scene(**options: Any) -> None:
        seen.clear()
        store = MemoryStore()
        await interrupted(store, 12, **options)
        seen.clear()
        result = await agent_on(store, ["Done."], **options).resume("r", Allow())
        assert result.output == "Done."
        assert seen
        assert min(seen) > 12

    asyncio.run(scene(hooks=[watch]))


@pytest.mark.usefixtures("snapshots_often")
def test_a_run_that_is_handed_out_has_its_whole_transcript() -> None:
    async def scene() -> None:
        store = MemoryStore()
        await interrupted(store, 12)
        await Runs(store, secret=SECRET).answer("r", Allow())
        agent = agent_on(store, ["Done."])
        for run in (await agent.next_run("r"), *await agent.unfinished_runs()):
            assert run is not None
            assert [message.content for message in run.run_state.messages][:1] == ["Go."]

    asyncio.run(scene())


@pytest.mark.usefixtures("snapshots_often")
def test_who_iterates_a_run_that_goes_on_sees_its_whole_transcript_and_journal_at_each_event() -> None:
    async def scene() -> None:
        store = MemoryStore()
        await interrupted(store, 12)
        head = await store.head("r")
        assert head is not None
        run = agent_on(store, [call("look", at="home"), "Done."]).resume("r", Allow())
        seen = [(next(m.content for m in run.run_state.messages), len(run.journal)) async for _ in run]
        assert len(seen) > 15
        assert {first for first, _ in seen} == {"Go."}
        assert min(records for _, records in seen) >= head.seq

    asyncio.run(scene())


@pytest.mark.usefixtures("snapshots_often")
def test_a_run_that_waits_within_a_reply_of_many_calls_has_no_snapshot_that_holds_all_of_them() -> None:
    async def has_snapshot(calls: int) -> bool:
        store = MemoryStore()
        batch = [call("pay", amount=n) for n in range(calls)]
        result = await agent_on(store, [batch], history=None).run("Go.", run_id="r")
        assert isinstance(result.outcome, UserInputRequested)
        found = await store.snapshot("r")
        return found is not None and "pay" in json.dumps(json.loads(found.content)["state"]["batch"])

    assert [asyncio.run(has_snapshot(snapshots.MAX_CALLS + more)) for more in (0, 1)] == [True, False]


@pytest.mark.usefixtures("snapshots_often")
def test_a_model_that_is_sent_the_whole_history_gets_all_of_it_after_a_resume() -> None:
    async def scene() -> None:
        store = MemoryStore()
        await interrupted(store, 12, history=None)
        model = RecordingModel(ScriptedModel(["Done."]))
        await agent_on(store, (), model=model, history=None).resume("r", Allow())
        sent = [message.content for message in model.requests[0].messages]
        assert [text for text in sent if text.startswith("seen")] == [f"seen place {n}" for n in range(12)]

    asyncio.run(scene())


@pytest.mark.usefixtures("snapshots_often")
def test_ids_of_calls_stay_unique_in_the_whole_transcript() -> None:
    async def ids(*, with_snapshots: bool) -> list[str]:
        store = Recording()
        await interrupted(store, 12)
        rest = await store.after_a_kill(len(store.log), with_snapshots=with_snapshots)
        model = ScriptedModel([call("look", at="home"), "Done."])
        result = await agent_on(rest, (), model=model).resume("r", Allow())
        return [each.id for message in result.messages for each in message.tool_calls]

    found = asyncio.run(ids(with_snapshots=True))
    assert len(set(found)) == len(found) == 14
    assert found == asyncio.run(ids(with_snapshots=False))


@pytest.mark.usefixtures("snapshots_often")
def test_secrets_of_old_messages_are_withheld_after_a_resume_and_in_the_snapshot(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    secret = "s3cr3t-0f-the-0ld-env1ronment"
    path = tmp_path / "runs.db"

    @tool
    def tell(at: str) -> str:
        """Tell."""
        return f"the key is {secret}"

    async def scene() -> None:
        tools = [look, pay, tell]
        monkeypatch.setenv("OLD_API_KEY", secret)
        async with SqliteStore(path) as store:
            script = [call("tell", at="first"), *long_script(12)[:-1], call("pay", amount=1)]
            await agent_on(store, script, tools=tools).run("Go.", run_id="r")
            monkeypatch.delenv("OLD_API_KEY")
            found = await store.snapshot("r")
            assert found is not None
            assert secret not in found.content
        async with SqliteStore(path) as store:
            result = await agent_on(store, [call("tell", at="now"), "Done."], tools=tools).resume("r", Allow())
            assert result.output == "Done."
            assert sum(secret in message.content for message in result.messages) == 2

    asyncio.run(scene())
    for file in tmp_path.iterdir():
        assert secret.encode() not in file.read_bytes()


@tool
def reveal(name: str) -> str:
    """Reveal a variable."""
    return f"the key is {REVEALED[name]}"


@tool(requires_approval=True)
def ask_to_reveal(name: str) -> str:
    """Reveal a variable once somebody allows it."""
    return f"the key is {REVEALED[name]}"


REVEALED = {"ONE_API_KEY": "s3cr3t-0ne-0f-the-env1ronment", "OTHER_API_KEY": "an0ther-s3cr3t-0f-the-env1ronment"}


@pytest.mark.usefixtures("snapshots_often")
def test_a_secret_is_still_withheld_after_snapshots_of_a_run_that_was_loaded_from_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name, path = "ONE_API_KEY", tmp_path / "runs.db"
    tools = [look, pay, reveal, ask_to_reveal]

    async def scene() -> None:
        monkeypatch.setenv(name, REVEALED[name])
        async with SqliteStore(path) as store:
            script = [call("reveal", name=name), *long_script(12)[:-1], call("pay", amount=1)]
            await agent_on(store, script, tools=tools).run("Go.", run_id="r")
        monkeypatch.delenv(name)
        for script in ([call("ask_to_reveal", name=name)], ["Done."]):
            async with SqliteStore(path) as store:
                assert await is_loaded_from_snapshot(agent_on(store, (), tools=tools))
                result = await agent_on(store, script, tools=tools).resume("r", Allow())
        assert sum(REVEALED[name] in message.content for message in result.messages) == 2

    asyncio.run(scene())
    for file in tmp_path.iterdir():
        assert REVEALED[name].encode() not in file.read_bytes()


@pytest.mark.parametrize(("most", "can_encrypt", "expected"), [(2, True, True), (1, True, False), (2, False, False)])
@pytest.mark.usefixtures("snapshots_often")
def test_a_run_has_no_snapshot_once_it_has_withheld_very_many_values_or_one_that_cannot_be_opened_again(
    most: int, can_encrypt: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "MAX_SECRETS", most)
    if not can_encrypt:
        monkeypatch.setattr(withholding, "_cipher_class", lambda: None)
    for name, value in REVEALED.items():
        monkeypatch.setenv(name, value)

    async def scene() -> None:
        store = Recording()
        reveals = [call("reveal", name=name) for name in REVEALED]
        await agent_on(store, [*reveals, call("pay", amount=1)], tools=[pay, reveal], history=None).run(
            "Go.", run_id="r"
        )
        made = store.log[-1][4]
        assert (made is not None) == expected
        assert made is None or not any(value in made.content for value in REVEALED.values())

    asyncio.run(scene())


# -- what becomes of it ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("snapshots_often")
def test_a_run_whose_secret_was_replaced_goes_on_from_its_snapshot() -> None:
    async def scene() -> None:
        store = MemoryStore()
        await interrupted(store, 12)
        host = Host(store=store, secret=b"the secret that came after it", old_secrets=(SECRET,), clock=FakeClock())
        model = ScriptedModel([call("pay", amount=2)])
        agent = Agent(model, tools=[look, pay, wire], history=NEWEST, host=host, guardrails=LIMITS)

        assert await is_loaded_from_snapshot(agent)  # it was sealed under the former secret
        await agent.resume("r", Allow())
        assert await is_loaded_from_snapshot(agent)
        assert (await verify_listed_run(store, "r", keyring=host.keyring)).code == OPEN

    asyncio.run(scene())


@pytest.mark.usefixtures("snapshots_often")
def test_a_redacted_value_is_in_no_byte_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"

    async def scene() -> None:
        await suspended_in(path, steps=8, prompt=f"I am {CANARY}.")
        assert CANARY.encode() in path.read_bytes()
        async with SqliteStore(path) as store:
            found = await store.snapshot("r")
            assert found is not None
            assert CANARY in found.content
            done = await redact_text(store, CANARY, KEYS)
            assert done.deleted
            assert await store.snapshot("r") is None
            assert all(CANARY.encode() not in file.read_bytes() for file in tmp_path.iterdir())
            assert CANARY.encode() not in path.read_bytes()

    asyncio.run(scene())


@pytest.mark.usefixtures("snapshots_often")
def test_a_purged_run_leaves_no_snapshot(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"

    async def scene() -> None:
        await suspended_in(path)
        async with SqliteStore(path) as store:
            runs = Runs(store, secret=SECRET)
            await agent_on(store, ()).dismiss("r", "not needed")
            assert await store.snapshot("r") is None
            await runs.purge("r")
        assert rows_of(path, "SELECT count(*) FROM snapshot") == [(0,)]

    asyncio.run(scene())


@pytest.mark.usefixtures("snapshots_often")
def test_a_run_under_another_secret_or_graph_is_loaded_from_its_journal(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    others = Keyring(b"another secret, and long enough")

    async def scene() -> None:
        await suspended_in(path)
        async with SqliteStore(path) as store:
            config = config_of(agent_on(store, ()))
            graph = config.machine.graph
            longer = graph.with_counter(Counter("rounds", 3))
            with pytest.raises(JournalGraphError):
                await load_stored_run(store, "r", longer, KEYS, lazily=True)
            with pytest.raises(JournalError, match="sealed under another secret"):
                await load_stored_run(store, "r", graph, others, lazily=True)
            assert await adopt(store, "r", others)
            loaded = await load_stored_run(store, "r", graph, others, lazily=True)
            assert loaded.resume_point.base is not None
            assert not loaded.resume_point.base.unread
            assert (await verify_listed_run(store, "r", keyring=others)).code == OPEN
            migrated = await load_stored_run(store, "r", longer, others, [Migration(graph)], lazily=True)
            assert migrated.resume_point.migration_details
            assert migrated.resume_point.base is not None
            assert not migrated.resume_point.base.may_have_snapshots

    asyncio.run(scene())
