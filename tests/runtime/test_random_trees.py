"""Random trees of agents: what their runs say, spend and ask is what the rules say, wherever they were cut off."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections import Counter as Tally
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from agentfsm import (
    Actor,
    Allow,
    Graph,
    Host,
    JournalError,
    MemoryStore,
    RunCancelled,
    RunQuery,
    RunResult,
    SuspensionExpiredError,
    Usage,
    UserInputRequested,
    open_store,
)
from agentfsm.agent.subagent import Subagent
from agentfsm.errors import AgentfsmError, RunError
from agentfsm.journal import send_signal
from agentfsm.journal.adoption import adopt
from agentfsm.journal.maintenance import Hold
from agentfsm.journal.purge import end_hold, hold_run, purge_runs
from agentfsm.journal.records import export_lines
from agentfsm.journal.rehydrate import rehydrate
from agentfsm.journal.replay import replay
from agentfsm.journal.verification import GOOD, OPEN, verify, verify_export
from agentfsm.loop.human_input import HumanInput
from agentfsm.loop.keys import Keyring
from agentfsm.loop.state_json import dump_state
from agentfsm.loop.withholding import SecretOpener
from agentfsm.report.ledger import read_ledger
from agentfsm.testing.invariants import one_result_per_call
from tests.helpers.postgres import empty_database
from tests.helpers.random_states import APPROVALS
from tests.helpers.random_trees import (
    CHANGES,
    COST_USD,
    KEYRING,
    LIMITS,
    MOST_TOKENS,
    NEW_SECRET,
    REQUESTER,
    Change,
    DismissedError,
    DrawnTree,
    Step,
    TreeWorld,
    draw_change,
    draw_tree,
    pin_for,
    told,
)
from tests.helpers.stepped_clock import SkippingLoop
from tests.helpers.taped_store import Commit, TapedStore, restore

ROOT, GRACE_S = "r", 3.0
ONCE = ("send", "pay", "wire")
"""Tools that are not idempotent: each call of them runs once, whatever dies."""


class Counts(Tally[str]):
    def __str__(self) -> str:
        return "random trees: " + ", ".join(f"{number:,} {what}" for what, number in sorted(self.items()))


async def follow(drawn: DrawnTree, store: Any, counts: Counts, result: RunResult | None = None) -> RunResult:
    """Begin a run, or go on with one, and do about it what people do, until it ends."""
    agent, world = drawn.agent(store), drawn.world
    head = await store.head(drawn.run_id)
    if head is None or not head.seq:
        result = await agent.run("go", run_id=drawn.run_id, actor=REQUESTER)
    for number in range(1_000):
        if result is not None and not isinstance(result.outcome, UserInputRequested):
            return result
        past = rehydrate(await store.records(drawn.run_id))
        request = past.run.pending_request
        if past.suspension is None or request is None:
            result = await agent.resume(drawn.run_id)
            continue
        counts["waits"] += 1
        counts[f"waits at depth {len(request.asker.split('/')) if request.asker else 0}"] += 1
        await assert_child_cannot_be_answered(drawn, store)
        await assert_charged(drawn, store)
        step = world.next_step(request, number)
        if step.decides(request):
            step = await race(step, past.suspension["expires"] / 1000, drawn, store, counts)
        result = await take(step, drawn, store) or result
    raise AssertionError(f"{drawn.run_id} waits for ever")


async def race(step: Step, expires_at: float, drawn: DrawnTree, store: Any, counts: Counts) -> Step:
    """Have an answer come at the last moment, or be acted on after it, or come too late, or as the run is dismissed."""
    clock, dice = drawn.world.clock, drawn.world.dice("races", len(drawn.world.asked), step.by)
    if step.reply is None:
        before, late = await all_records(store), clock.time() > expires_at
        sends = [drawn.agent(store).resume(drawn.run_id, Allow(), by=step.by).load] * late + [
            partial(drawn.runs(store).answer, drawn.run_id, Allow(), by=step.by)
        ]
        with mock.patch.object(send_signal, "time", clock):
            for send in sends:
                with pytest.raises(SuspensionExpiredError) if late else nullcontext():
                    await send()
        assert await all_records(store) == before
        counts["answers that came too late" if late else "answers that came as the run was dismissed"] += len(sends)
    elif dice.random() < 0.2 and clock.time() < expires_at:
        clock.advance(expires_at - clock.time())
        step = step._replace(acted_on_late=dice.random() < 0.5)
        counts["answers that came in time, and were acted on late" if step.acted_on_late else "answers at the end"] += 1
    return step


async def take(step: Step, drawn: DrawnTree, store: Any) -> RunResult | None:
    agent, world = drawn.agent(store), drawn.world
    if step.waits:
        return await agent.resume(drawn.run_id) if step.escalates else None
    if step.reply is None:
        result = await agent.dismiss(drawn.run_id)
        assert await agent.next_run(drawn.run_id) is None  # what was sent to it is removed
        assert await store.signals.pending() == []
        return result
    sends = world.dice("sends", len(world.asked), step.by).random() < 0.3
    if step.refused is not None:
        before = await all_records(store)
        with pytest.raises(step.refused) as error:
            await answer(step.reply, step.by, drawn, store, sends=sends)
        assert error.type is step.refused
        assert await all_records(store) == before
        return None
    late_s = 1.0 if step.acted_on_late else 0.0
    result = await answer(step.reply, step.by, drawn, store, sends=sends or step.acted_on_late, acted_on_after_s=late_s)
    assert await store.signals.pending() == []
    return result


async def answer(
    reply: HumanInput, by: Actor, drawn: DrawnTree, store: Any, *, sends: bool, acted_on_after_s: float = 0.0
) -> RunResult:
    """Answer what the run asks, perhaps from a process that has no agent."""
    agent = drawn.agent(store)
    if not sends:
        return await agent.resume(drawn.run_id, reply, by=by)
    with mock.patch.object(send_signal, "time", drawn.world.clock):
        await drawn.runs(store).answer(drawn.run_id, reply, by=by)
    drawn.world.clock.advance(acted_on_after_s)
    run = await agent.next_run(drawn.run_id)
    assert run is not None, f"nobody acts on {reply}"
    return await run


async def all_records(store: Any) -> list[Any]:
    return [await store.records(head.run_id) for head in await store.heads()]


async def assert_child_cannot_be_answered(drawn: DrawnTree, store: Any) -> None:
    waiting = [head.run_id for head in await store.heads("suspended") if head.run_id.startswith(f"{drawn.run_id}-")]
    if waiting:
        with pytest.raises(AgentfsmError):
            await drawn.agent(store).resume(waiting[0], "yes").load()
        with pytest.raises(RunError):
            await drawn.runs(store).approve(waiting[0], by="somebody")


async def assert_good(
    drawn: DrawnTree, store: Any, result: RunResult, counts: Counts, begun_by: DrawnTree | None = None
) -> None:
    """Each run has ended, verifies, is replayed on its graph, and can be read, exported and shown."""
    keyring = Host(**drawn.secrets).keyring
    signed = [text for name, text in drawn.world.ran if name == "sign"]
    graphs = {**graphs_of(begun_by or drawn, store), **graphs_of(drawn, store)}
    for head in await store.heads():
        if not is_of(drawn.run_id, head.run_id):
            continue
        records = await store.records(head.run_id)
        report = verify(head.run_id, records, head, keyring=keyring)
        assert report.code == GOOD, (head.run_id, report)
        assert verify_export("".join(export_lines(records)), None, keyring).code == GOOD
        counts["records"] += len(records)
        assert not any(pin_for(text) in each.body + each.hidden for each in records for text in signed)
        past = rehydrate(records, SecretOpener(keyring))
        graph = graphs[past.graph["fingerprint"]]
        replayed = replay(records, graph)
        assert replayed.same, (head.run_id, replayed.divergences)
        assert head.run_id != drawn.run_id or dump_state(past.run) == dump_state(result.run_state)
        one_result_per_call(past.run)
        assert past.run.state_results.keys() <= {spec.name for spec in graph.states}
        ledger = read_ledger(head.run_id, records)
        assert not ledger.problems, ledger.problems
        await drawn.runs(store).get(head.run_id)
        counts[f"runs {head.status}" if head.run_id == drawn.run_id else f"runs below {head.status}"] += 1


def is_of(root: str, run_id: str) -> bool:
    """Whether a run is another one, or below it."""
    return run_id == root or run_id.startswith(f"{root}-")


def graphs_of(drawn: DrawnTree, store: Any) -> dict[str, Graph]:
    """The graphs of the agents of a tree, by fingerprint."""
    configs = [drawn.agent(store).config]
    for config in configs:
        delegates = (tool.delegate for tool in config.tools.values())
        configs += [each.config for each in delegates if isinstance(each, Subagent)]
    return {config.machine.graph.fingerprint: config.machine.graph for config in configs}


def assert_ran_as_approved(world: TreeWorld) -> None:
    for (name, text), times in world.ran.items():
        if name in APPROVALS:
            voters = world.approvals.get((name, text), [])
            assert len(voters) >= APPROVALS[name], f"{name!r} ran with {text!r}: {voters}"
            assert (name, text) not in world.denied
        assert times == 1 or name not in ONCE, f"{name!r} ran {times} times with {text!r}"


async def assert_charged(drawn: DrawnTree, store: Any) -> None:
    """Each run is charged for its own replies and for those of the runs below it, once; of those that go on, later."""
    if drawn.run_id != ROOT:  # a fork has the usage of its origin, too
        return
    own: dict[str, Usage] = {}
    runs = {head.run_id: rehydrate(await store.records(head.run_id)).run for head in await store.heads() if head.seq}
    for run_id, run in runs.items():
        task = next(each.content for each in run.messages if each.role == "user")
        turns = sum(each.role == "assistant" for each in run.messages)
        own[run_id] = sum((drawn.world.usage(task, turn) for turn in range(turns)), Usage())
    for run_id, run in runs.items():
        below = [other for other in runs if other == run_id or other.startswith(f"{run_id}-")]
        used = sum((own[other] for other in below), Usage())
        assert run.usage.total_tokens <= used.total_tokens, run_id
        assert run.usage == used or not run.ended, run_id


def assert_within_limits(drawn: DrawnTree, result: RunResult, counts: Counts) -> None:
    """All runs together stay within the limits of the first, but that each may exceed its share by one reply."""
    run, limits = result.run_state, drawn.limits
    granted, replies = 1 + run.continues, 3 ** len(list(drawn.root))
    counts["within limits"] += 1
    counts["of which a limit was extended"] += run.continues > 0
    assert limits.max_iterations is not None
    assert run.continues <= limits.max_continues
    assert run.model_calls <= limits.max_iterations * granted
    if limits.max_execution_time_s is not None:
        assert run.elapsed_s <= limits.max_execution_time_s + GRACE_S
    if limits.max_tokens is not None:
        assert result.usage.total_tokens < limits.max_tokens * granted + MOST_TOKENS * replies
    if limits.max_cost_usd is not None:
        assert result.usage.cost_usd < limits.max_cost_usd * granted + COST_USD * replies


def assert_as_told(drawn: DrawnTree, result: RunResult, counts: Counts) -> None:
    if drawn.limits is not LIMITS:
        assert_within_limits(drawn, result, counts)
        return
    try:
        expected = told(drawn.world, drawn.root, "go")
    except DismissedError:
        counts["dismissed"] += 1
        assert type(result.outcome).__name__ == "RunCancelled"
        return
    counts[f"ended as {expected.end}"] += 1
    messages = [(str(m.role.value), m.content) for m in result.messages]
    assert [
        (role, said if text.startswith(said) else text)
        for (role, text), (_, said) in zip(messages, expected.messages, strict=True)
    ] == expected.messages
    counts["calls that timed out"] += sum(isinstance(said, tuple) for _, said in expected.messages)
    assert type(result.outcome).__name__ == expected.end
    assert result.usage == expected.usage, (result.usage, expected.usage)


async def explore(seed: int, worlds: int, cuts: int, counts: Counts) -> None:
    for number in range(worlds):
        world = TreeWorld(1000 * seed + number, hangs=True)
        drawn = draw_tree(seed, world)
        store = TapedStore(world)
        result = await follow(drawn, store, counts)
        counts["runs"] += 1
        counts.update({f"votes refused with {name}": number for name, number in world.refusals.items()})
        assert_as_told(drawn, result, counts)
        assert_ran_as_approved(world)
        await assert_good(drawn, store, result, counts)
        await assert_charged(drawn, store)
        counts["models and tools that hung"] += world.hung
        if drawn.limits.max_execution_time_s is None:  # else a model that hung is asked again
            assert len(world.asked) == len(set(world.asked))
        if type(result.outcome).__name__ != "RunCancelled":
            assert result.run_state.model_calls == len(world.asked)
        dice = random.Random(world.seed)
        for _ in range(cuts):
            await go_on_after_a_crash(drawn, store.tape, dice, counts)
            await go_on_with_another_version(drawn, store.tape, dice, counts)
            await go_on_with_a_fork(drawn, store.tape, dice, counts)
            await go_on_without_the_secret(drawn, store.tape, dice, counts)
            await end_after_an_erasure(drawn, store.tape, dice, counts)
        await assert_kept_and_purged(drawn, store, dice)


async def assert_kept_and_purged(drawn: DrawnTree, store: Any, dice: random.Random) -> None:
    """A hold on one run keeps all, redaction leaves no trace elsewhere, and a run is purged with all that it called."""
    held, text = dice.choice([head.run_id for head in await store.heads()]), "go/0.0"
    before = await store.records(held)
    await hold_run(store, held, Hold("case 1"), KEYRING)
    kept = await purge_runs(store, [ROOT], KEYRING)
    assert (kept.purged, [each.run_id for each in kept.kept]) == ((), [ROOT])
    await drawn.runs(store).redact_text(text)
    for head in await store.heads():
        records = await store.records(head.run_id)
        assert verify(head.run_id, records, head, keyring=KEYRING).code == GOOD, head.run_id
        assert not read_ledger(head.run_id, records).problems
        if head.run_id == held:
            assert records == before
        else:
            assert text not in "".join(each.body + each.hidden for each in records), head.run_id
    await end_hold(store, held, KEYRING)
    await purge_runs(store, [ROOT], KEYRING)
    assert await store.heads() == []


async def has_expired(drawn: DrawnTree, store: Any) -> bool:
    """Whether the run waits and its time is up: an answer that was sent in time is not in the tape."""
    head = await store.head(ROOT)
    past = rehydrate(await store.records(ROOT)) if head is not None and head.seq else None
    suspension = None if past is None else past.suspension
    return suspension is not None and suspension["expires"] / 1000 < drawn.world.clock.time()


async def go_on_after_a_crash(drawn: DrawnTree, tape: Any, dice: random.Random, counts: Counts) -> None:
    at = dice.randrange(1, len(tape))
    world = tape[at - dice.choice((0, 1))].world  # before or after what was done until the next commit
    again = draw_tree(drawn.seed, copy.deepcopy(world))
    rest = TapedStore(again.world)
    await restore(tape[:at], rest, KEYRING)
    if await has_expired(again, rest):
        return
    counts["cut off"] += 1
    result = await follow(again, rest, counts)
    assert_as_told(again, result, counts)
    assert_ran_as_approved(again.world)
    await assert_good(again, rest, result, counts)
    await assert_charged(again, rest)


async def go_on_with_another_version(drawn: DrawnTree, tape: Any, dice: random.Random, counts: Counts) -> None:
    """Go on with another version of the program, which takes up the run or changes nothing, and then to the end."""
    at = dice.randrange(1, len(tape) + 1)
    before = draw_tree(drawn.seed, copy.deepcopy(tape[at - 1].world))
    store = TapedStore(before.world)
    await restore(tape[:at], store, KEYRING)
    past = rehydrate(await store.records(ROOT)) if await store.head(ROOT) is not None else None
    if past is None or past.finished or await has_expired(before, store):
        return
    request = past.run.pending_request if past.suspension is not None else None
    after = before.changed(draw_change(dice, before.root, request))
    kind, errors, records = after.change.kind, CHANGES[after.change.kind], await all_records(store)
    step = None if request is None else before.world.next_step(request, 0)
    if step is not None and (step.waits or step.refused):
        return
    refuses = after.may_refuse(request, None if step is None else step.reply)
    if refuses is None and kind in ("another graph, not admitted", "another tool"):
        return  # it may go on, and be refused later
    result, error = await one_step(after, store, step, errors)
    counts[f"{'refused with' if error else 'gone on with'} {kind}"] += 1
    assert refuses is None or refuses == (error is not None), (after.change, error)
    if refuses:
        assert await all_records(store) == records, after.change
    went_on = before if error or kind == "other limits" else after
    result = await follow(went_on, store, counts, result)
    assert_as_told(went_on, result, counts)
    assert_ran_as_approved(went_on.world)
    await assert_good(went_on, store, result, counts, begun_by=before)


async def go_on_with_a_fork(drawn: DrawnTree, tape: Any, dice: random.Random, counts: Counts) -> None:
    """A fork says what its origin said, asks again, does its own calls, and leaves its origin as it is."""
    at = dice.randrange(1, len(tape) + 1)
    fork = replace(drawn, world=copy.deepcopy(tape[at - 1].world)).forked("f")
    store = TapedStore(fork.world)
    await restore(tape[:at], store, KEYRING)
    head = await store.head(ROOT)
    if head is None:
        return
    before, seq = await all_records(store), dice.randrange(1, head.seq + 1)
    past = rehydrate((await store.records(ROOT))[:seq])
    try:
        with mock.patch("agentfsm.journal.fork.time", fork.world.clock):
            await fork.runs(store).fork(ROOT, seq, "f")
    except JournalError as error:
        why = "had ended" if past.run.ended else "of a sub-agent was waiting"
        refusal = str(error)
    else:
        why = refusal = ""
    assert why in refusal, refusal
    if why:
        assert past.run.ended or drawn.root.below
        assert await all_records(store) == before
        counts[f"forks refused, because a run {why}"] += 1
        return
    counts["forked"] += 1
    begun = len(store.tape)
    result = await follow(fork, store, counts)
    assert_as_told(fork, result, counts)
    await end_a_fork_without_its_state(fork, store.tape[: dice.randrange(begun, len(store.tape) + 1)], counts)
    assert_ran_as_approved(fork.world)
    await assert_good(fork, store, result, counts)
    assert [await store.records(head.run_id) for head in await store.heads() if is_of(ROOT, head.run_id)] == before


async def end_a_fork_without_its_state(fork: DrawnTree, tape: Any, counts: Counts) -> None:
    """What a fork began with is deleted, once it has moved on or not: it can still be dismissed."""
    again = replace(fork, world=copy.deepcopy(tape[-1].world), _agents={})
    store = MemoryStore()
    await restore(tape, store, KEYRING)
    assert await again.runs(store).redact(fork.run_id, "1")
    head = await store.head(fork.run_id)
    if head.status == "finished":
        return
    counts["forks dismissed after an erasure"] += 1
    assert isinstance((await again.agent(store).dismiss(fork.run_id)).outcome, RunCancelled)
    for each in await store.heads():
        if is_of(fork.run_id, each.run_id):
            assert (each.status, each.owner) == ("finished", None), each
            records = await store.records(each.run_id)
            assert verify(each.run_id, records, each, keyring=KEYRING).code == GOOD, each.run_id
            info = (await again.runs(store).get(each.run_id)).info
            assert min(info.tokens, info.cost_usd) >= 0, info
    assert (await purge_runs(store, [fork.run_id], KEYRING)).kept == ()


async def go_on_without_the_secret(drawn: DrawnTree, tape: Any, dice: random.Random, counts: Counts) -> None:
    """Somebody adopts all runs under a new secret; what was approved and has not run is asked again."""
    at = dice.randrange(1, len(tape) + 1)
    before = draw_tree(drawn.seed, copy.deepcopy(tape[at - 1].world))
    store = TapedStore(before.world)
    await restore(tape[:at], store, KEYRING)
    if await store.head(ROOT) is None or rehydrate(await store.records(ROOT)).finished:
        return
    if await has_expired(before, store):
        return
    after, keyring = before.changed(Change("a lost secret", before.root.name)), Keyring(NEW_SECRET)
    for head in await store.heads():
        records = await store.records(head.run_id)
        run = rehydrate(records).run
        voted = run.pending_request is not None and run.pending_request.quorum is not None
        given = any(each.answer is not None for each in run.batch) or (voted and run.pending_request.quorum.votes)
        if given and head.status != "finished":
            with pytest.raises(JournalError, match="cannot be asked again"):
                await adopt(store, head.run_id, keyring)
            assert await store.records(head.run_id) == records
            counts["runs not adopted, because an answer had been given"] += 1
            return
        assert await adopt(store, head.run_id, keyring, by="somebody")
    world = after.world
    world.approvals = {call: voters for call, voters in world.approvals.items() if world.ran[call]}
    counts["adopted"] += 1
    result = await follow(after, store, counts)
    assert_as_told(after, result, counts)
    assert_ran_as_approved(world)
    await assert_good(after, store, result, counts, begun_by=before)


async def end_after_an_erasure(drawn: DrawnTree, tape: Any, dice: random.Random, counts: Counts) -> None:
    """A text is deleted while the runs go on: they can still be dismissed, and nothing of them is left in the end."""
    at = dice.randrange(1, len(tape) + 1)
    again = draw_tree(drawn.seed, copy.deepcopy(tape[at - 1].world))
    store, text = TapedStore(again.world), dice.choice(("go/0.0", "go/0.1", "go/1"))
    await restore(tape[:at], store, KEYRING)
    head = await store.head(ROOT)
    if head is None:
        return
    is_redacted = ROOT in {each.run_id for each in (await again.runs(store).redact_text(text)).deleted}
    for each in await store.heads():
        records = await store.records(each.run_id)
        assert verify(each.run_id, records, each, keyring=KEYRING).code in (GOOD, OPEN), each.run_id
        assert text not in "".join(record.body + record.hidden for record in records)
    if head.status != "finished":
        if is_redacted:
            with pytest.raises(JournalError, match="redacted"):
                await again.agent(store).resume(ROOT, *([Allow()] if head.status == "suspended" else [])).load()
        assert isinstance((await again.agent(store).dismiss(ROOT)).outcome, RunCancelled)
        counts["dismissed after an erasure" if is_redacted else "dismissed with nothing to erase"] += 1
    for each in await store.heads():
        assert (each.status, each.owner) == ("finished", None), each
        assert verify(each.run_id, await store.records(each.run_id), each, keyring=KEYRING).code == GOOD, each.run_id
        await again.runs(store).get(each.run_id)
    assert (await purge_runs(store, [ROOT], KEYRING)).kept == ()
    assert await store.heads() == []


async def one_step(
    drawn: DrawnTree, store: Any, step: Step | None, errors: tuple[type[Exception], ...]
) -> tuple[RunResult | None, Exception | None]:
    """What a run comes to, or why it is refused."""
    agent = drawn.agent(store)
    try:
        if step is None:
            return await agent.resume(ROOT), None
        if step.reply is None:
            return await agent.dismiss(ROOT), None
        return await agent.resume(ROOT, step.reply, by=step.by), None
    except errors as error:
        return None, error


def explored(seeds: range, worlds: int, cuts: int) -> Counts:
    counts = Counts()
    for seed in seeds:
        with asyncio.Runner(loop_factory=SkippingLoop) as runner:
            runner.run(explore(seed, worlds, cuts, counts))
    return counts


async def seen_in(store: Any, tape: Sequence[Commit], drawn: DrawnTree) -> dict[str, Any]:
    """What a store shows of runs that were cut off and gone on with: all but hashes, ids of records and owners."""
    await restore(tape, store, KEYRING)
    result = await follow(drawn, store, Counts())
    assert_as_told(drawn, result, Counts())
    runs: dict[str, Any] = {}
    for info in (await store.find_runs(RunQuery(limit=500))).runs:
        records = [json.loads(each.body) for each in await store.records(info.run_id)]
        assert (await drawn.runs(store).verify(info.run_id)).code == GOOD
        moves = [(each["kind"], each.get("transition"), each.get("tried"), each["ts"]) for each in records]
        runs[info.run_id] = replace(info, owner=None), moves
    return runs


@pytest.mark.slow
def test_a_file_and_a_server_show_the_same_runs_as_memory(
    tmp_path: Path, database: str, counted: Callable[[str], None]
) -> None:
    async def compare(seed: int) -> int:
        drawn = draw_tree(seed, TreeWorld(seed))
        before = TapedStore(drawn.world)
        await follow(drawn, before, Counts())
        at = random.Random(seed).randrange(1, len(before.tape))
        here = [copy.deepcopy(before.tape[at - 1].world) for _ in range(3)]
        seen = [await seen_in(MemoryStore(), before.tape[:at], draw_tree(seed, here[0]))]
        async with open_store(f"sqlite:///{tmp_path}/{seed}.db") as file:
            seen.append(await seen_in(file, before.tape[:at], draw_tree(seed, here[1])))
        empty_database(database)
        async with open_store(database) as server:
            seen.append(await seen_in(server, before.tape[:at], draw_tree(seed, here[2])))
        assert seen[0] == seen[1]
        assert seen[0] == seen[2]
        return len(seen[0])

    counted(f"{sum(asyncio.run(compare(seed)) for seed in range(300, 303))} runs in each of three stores")


def test_a_few_random_trees(counted: Callable[[str], None]) -> None:
    counts = explored(range(4, 6), worlds=1, cuts=1)
    counted(str(counts))
    assert counts["models and tools that hung"] > 0


@pytest.mark.slow
def test_a_sample_of_random_trees(counted: Callable[[str], None]) -> None:
    counted(str(explored(range(100, 103), worlds=1, cuts=2)))


@pytest.mark.soak
@pytest.mark.timeout(3_600)
def test_150_random_trees_cut_off_and_gone_on_with_by_another_version(counted: Callable[[str], None]) -> None:
    counts = explored(range(1_000, 1_150), worlds=1, cuts=5)
    counted(str(counts))
    assert counts["calls that timed out"] > 0
    for kind, errors in CHANGES.items():
        assert counts[f"{'refused' if errors else 'gone on'} with {kind}"] > 0, kind
