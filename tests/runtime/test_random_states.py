"""Random own states, whose effects wait for people between outcomes, guards of the user's and counters.

Every row that a run takes out of such a state is the one that the rules name, no call runs without the approvals that
it needs, and a run that is cut off, forked or replayed comes to the same end.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter as Tally
from collections.abc import Callable
from itertools import groupby

import pytest

from agentfsm import GraphError, MemoryStore
from agentfsm.journal.fork import fork
from agentfsm.journal.rehydrate import rehydrate
from agentfsm.journal.replay import replay
from agentfsm.journal.store import Status
from agentfsm.journal.verification import GOOD, OPEN, verify
from agentfsm.loop.keys import Keyring
from agentfsm.testing import FakeClock
from agentfsm.testing.invariants import check_stored_run
from tests.analysis.test_random_graphs import analyse_agent, check_run, random_properties
from tests.helpers.journal_scenarios import with_own_macs
from tests.helpers.random_agents import Stretch
from tests.helpers.random_states import (
    APPROVALS,
    SECRET,
    DrawnStates,
    Followed,
    Rules,
    StateWorld,
    draw_states,
    follow,
)

KEYRING = Keyring(SECRET)


class Counts(Tally[str]):
    """What a number of seeds came to."""

    def __str__(self) -> str:
        return "random own states: " + ", ".join(f"{number:,} {what}" for what, number in sorted(self.items()))


def assert_takes_the_rows_of_the_rules(drawn: DrawnStates, run: Followed, counts: Counts) -> None:
    """Compare each move out of an own state, or out of the wait for its call, with the row that the rules name."""
    attempts, rules, tool = iter(drawn.world.attempts), Rules(drawn), ""
    answers = ["", *drawn.world.answers]
    for result, answer in zip(run.results, answers, strict=True):
        for row in (decision.transition for decision in result.decisions):
            expected = row
            if row.source in drawn.own:
                attempt = next(attempts)
                came_back_before = row.source in rules.results
                expected, tool = rules.row_after(attempt), attempt.tool
                if attempt.asked and not attempt.raised:
                    counts["calls that waited in an own state"] += 1
                    counts["of which a row led past the wait"] += row.name != "approval_required"
                    counts["of which one visit had come back before"] += came_back_before
                    assert row.ends != "completed" or row.id in drawn.asks
            elif row.source.startswith("asks_"):
                assert row is result.decisions[0].transition
                expected = rules.row_after_answer(row.source, answer, tool)
                counts["answers about such calls"] += 1
                counts["of which a guard of the user's made nothing"] += row.id in drawn.asks
            assert row == expected, f"{row} was taken, not {expected}, with {rules} in {drawn.world}"
            rules.take(row)
    assert next(attempts, None) is None


def assert_runs_only_what_was_approved(world: StateWorld) -> None:
    for (name, text), times in world.ran.items():
        if name in APPROVALS:
            voters = world.approvals.get((name, text), [])
            assert len(voters) >= APPROVALS[name] * times, f"{name!r} ran {times} times with {text!r}: {voters}"


async def assert_kept_to_its_records(drawn: DrawnStates, store: MemoryStore, run_id: str, ended: bool) -> None:
    records = await store.records(run_id)
    report = verify(run_id, records, await store.head(run_id), keyring=KEYRING)
    assert report.code == (GOOD if ended else OPEN), report.reason
    agent = drawn.agent(store)
    check = check_stored_run(records, agent)
    assert check.inside, check.reason
    replayed = replay(records, drawn.graph)
    assert replayed.same, replayed.divergences


async def cut_off_after(store: MemoryStore, count: int) -> MemoryStore:
    """A store that has the first records of the run alone, as after a crash."""
    records, rest = with_own_macs((await store.records("r"))[:count], KEYRING), MemoryStore()
    status: Status = "suspended" if json.loads(records[-1].body)["kind"] == "run.suspended" else "running"
    epochs = groupby(records, lambda record: json.loads(record.body)["epoch"])
    for number, (_, made) in enumerate(epochs):
        lease = await rest.acquire("r", "a process that died", new=number == 0, keyring=KEYRING)
        await rest.append(lease, list(made), status)
        await rest.release(lease)
    return rest


async def explore(seed: int, worlds: int, counts: Counts) -> None:
    try:
        drawn = draw_states(seed, StateWorld(seed))
        agent = drawn.agent(MemoryStore())
    except GraphError:
        counts["graphs refused"] += 1
        return
    counts["graphs accepted"] += 1
    properties = random_properties(drawn.graph, seed)
    analysis = analyse_agent(agent, properties)
    for number in range(worlds):
        here = draw_states(seed, StateWorld(1000 * seed + number))
        store = MemoryStore()
        run = await follow(here, store, "r")
        counts["runs"] += 1
        counts[f"runs that ended as {run.end[0]}"] += 1
        counts["moves"] += len(run.rows)
        assert_takes_the_rows_of_the_rules(here, run, counts)
        assert_runs_only_what_was_approved(here.world)
        await assert_kept_to_its_records(here, store, "r", run.ended)
        check_run(analysis, properties, [Stretch([d.transition for d in each.decisions]) for each in run.results])
        if run.ended:
            await go_on_elsewhere(here, store, run, counts)


def waits_count(drawn: DrawnStates, run: Followed) -> bool:
    """Whether a wait that the uninterrupted run did not have may have brought the run to another end."""
    left = [row for row in run.rows if row.source in drawn.own]
    waits = [row for row, attempt in zip(left, drawn.world.attempts, strict=True) if attempt.asked]
    elsewhere = [row for row in run.rows if row.source.startswith("asks_") and row.id in drawn.asks]
    led_past = [row for row in waits if row.name not in ("approval_required", "in_doubt", "aborted")]
    return bool(elsewhere or led_past or (drawn.spends and waits))


async def go_on_elsewhere(drawn: DrawnStates, store: MemoryStore, run: Followed, counts: Counts) -> None:
    """Cut the run off after a record, and fork it after one: it comes to the same end."""
    records = await store.records("r")
    dice = random.Random(len(records))
    decided = [seq for seq in range(1, len(records)) if '"out":{"answered"' in records[seq - 1].body]
    for kind in ("cut off", "forked"):
        at = dice.choice((dice.randrange(1, len(records)), *decided))
        if rehydrate(records[:at]).run.ended:
            continue
        then = FakeClock(json.loads(records[at - 1].body)["ts"] / 1000)
        again = draw_states(drawn.seed, StateWorld(drawn.world.seed, then))
        if kind == "cut off":
            again.world.approvals = {about: [*voters] for about, voters in drawn.world.approvals.items()}
            rest, run_id = await cut_off_after(store, at), "r"
        else:
            rest, run_id = store, "f"
            await fork(store, "r", at, run_id, KEYRING, now=then.time())
        gone_on = await follow(again, rest, run_id)
        counts[f"runs {kind}"] += 1
        assert_runs_only_what_was_approved(again.world)
        await assert_kept_to_its_records(again, rest, run_id, gone_on.ended)
        if not waits_count(again, gone_on):
            assert gone_on.end == run.end, f"{kind} after record {at}"
            counts["of which the ends were compared"] += 1


@pytest.mark.slow
def test_a_sample_of_random_own_states(counted: Callable[[str], None]) -> None:
    counted(str(explored(range(25), worlds=1)))


@pytest.mark.soak
@pytest.mark.timeout(3_600)
def test_400_random_graphs_with_own_states_in_5_worlds_each(counted: Callable[[str], None]) -> None:
    counted(str(explored(range(1_000, 1_400), worlds=5)))


def explored(seeds: range, worlds: int) -> Counts:
    counts = Counts()
    for seed in seeds:
        asyncio.run(explore(seed, worlds, counts))
    assert counts["graphs accepted"] > 0.6 * len(seeds)
    assert counts["calls that waited in an own state"] > counts["runs"] / 2
    for what in (
        "of which a row led past the wait",
        "of which one visit had come back before",
        "of which a guard of the user's made nothing",
    ):
        assert counts[what] > len(seeds) / 10, what
    assert counts["of which the ends were compared"] > counts["runs"]
    return counts
