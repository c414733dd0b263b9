"""Conformance checks for stores: everything that a store must do, as functions that take any store.

::

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_my_store(check, tmp_path):
        asyncio.run(check(lambda: MyStore(tmp_path / "runs")))

A check takes a function that opens the store. Called again, after the first store was closed, the function opens the
same storage, as another process would. For a store without storage, it returns the same object each time.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from agentfsm.errors import AgentfsmError, RunExistsError, RunHeldError, StaleLease, UnknownRunError
from agentfsm.journal.hash_chain import GENESIS_HASH, record_hash
from agentfsm.journal.maintenance import Hold, Tombstone, seal_tombstone
from agentfsm.journal.records import SealedRecord
from agentfsm.journal.run_info import RunInfo, RunPage, RunQuery, WaitingFor
from agentfsm.journal.signals import SealedSignal
from agentfsm.journal.store import Head, SealedSnapshot, Store, seal_row
from agentfsm.loop.keys import Keyring

__all__ = ["CHECKS", "OpenStore", "StoreCheck", "sealed_records"]

OpenStore = Callable[[], Store]
StoreCheck = Callable[[OpenStore], Awaitable[None]]


def sealed_records(count: int, after: int = 0, head: str = GENESIS_HASH, hidden: str = "") -> list[SealedRecord]:
    """Sealed records without content except their sequence numbers.

    Args:
        count: The number of records.
        after: The sequence number of the record before the first one.
        head: The hash of that record.
        hidden: The hidden values of each record.
    """
    records: list[SealedRecord] = []
    for seq in range(after + 1, after + count + 1):
        body = f'{{"kind":"note","seq":{seq},"text":"ü \\u0000 \U0001f600"}}'
        head = record_hash(head, body)
        records.append(SealedRecord(seq, body, head, hidden))
    return records


async def _raises(expected: type[AgentfsmError], awaitable: Awaitable[object]) -> AgentfsmError:
    try:
        await awaitable
    except expected as error:
        return error
    raise AssertionError(f"{expected.__name__} was not raised")


def _require(condition: bool) -> None:
    """Like ``assert``, also under ``python -O``."""
    if not condition:
        raise AssertionError("the store does not conform")


async def _existing_head(store: Store, run_id: str) -> Head:
    head = await store.head(run_id)
    if head is None:
        raise AssertionError(f"the store has no run {run_id!r}")
    return head


async def returns_what_was_appended(make: OpenStore) -> None:
    """Records are returned in order and byte for byte, even after the store was reopened."""
    store = make()
    lease = await store.acquire("a", "me", new=True)
    records = sealed_records(3, hidden='[["00",{"x":"\\u0000ü"}],null]')
    await store.append(lease, records[:2], "running")
    await store.append(lease, records[2:], "finished")
    _require(await store.records("a") == records)
    _require(await store.records("a", after=2) == records[2:])
    await store.aclose()
    again = make()
    _require(await again.records("a") == records)
    head = await _existing_head(again, "a")
    _require((head.seq, head.hash, head.status, head.owner) == (3, records[-1].hash, "finished", None))
    await again.aclose()


async def isolates_runs(make: OpenStore) -> None:
    """Records of one run appear in no other; heads are listed in the order in which the runs were created."""
    store = make()
    leases = [await store.acquire(name, "me", new=True) for name in ("b", "a", "c")]
    await store.append(leases[0], sealed_records(1), "running")
    await store.append(leases[1], sealed_records(2), "suspended")
    await store.append(leases[2], sealed_records(3), "finished")
    expected = [("b", 1, "running"), ("a", 2, "suspended"), ("c", 3, "finished")]
    _require([(h.run_id, h.seq, h.status) for h in await store.heads()] == expected)
    _require([h.run_id for h in await store.heads("suspended")] == ["a"])
    _require([len(await store.records(name)) for name in "abc"] == [2, 1, 3])
    await store.aclose()


async def refuses_unknown_and_duplicate_runs(make: OpenStore) -> None:
    """An unknown run is an error, and so is a second run with the same id."""
    store = make()
    for unknown in ("a", "a\0", "\ud800"):
        _require(await store.head(unknown) is None)
    _require(await store.heads() == [])
    await _raises(UnknownRunError, store.acquire("a", "me"))
    lease = await store.acquire("a", "me", new=True)
    await _raises(RunExistsError, store.acquire("a", "me", new=True))
    await store.append(lease, sealed_records(1), "finished")
    await _raises(RunExistsError, store.acquire("a", "me", new=True))
    await _raises(UnknownRunError, store.records("b"))
    await store.aclose()


async def restarts_an_empty_run(make: OpenStore) -> None:
    """A run whose owner died before its first record can be created again."""
    store = make()
    lease = await store.acquire("a", "me", new=True)
    await _raises(RunExistsError, store.acquire("a", "you", new=True))
    del lease
    await store.aclose()
    again = make()
    new = await again.acquire("a", "you", new=True)
    await again.append(new, sealed_records(1), "finished")
    await _raises(RunExistsError, again.acquire("a", "me", new=True))
    await again.aclose()


async def leases_a_run_to_one_owner(make: OpenStore) -> None:
    """While one owner has the lease of a run, others are refused with an error that names the owner."""
    store = make()
    lease = await store.acquire("a", "the first", new=True)
    error = await _raises(StaleLease, store.acquire("a", "the second"))
    _require("the first" in str(error))
    head = await _existing_head(store, "a")
    _require(head.owner == "the first")
    await store.release(lease)
    again = await store.acquire("a", "the second")
    _require(again.epoch == lease.epoch + 1)
    await store.aclose()


async def fences_a_stale_lease(make: OpenStore) -> None:
    """An owner that lost its lease cannot write, and gets an error that names the new owner."""
    store = make()
    lease = await store.acquire("a", "the first", new=True)
    await store.append(lease, sealed_records(1), "running")
    stale = dataclasses.replace(lease)
    await store.release(lease)
    current = await store.acquire("a", "the second")
    next_record = sealed_records(1, 1, current.hash)
    for each in (stale, lease):
        error = await _raises(StaleLease, store.append(each, next_record, "running"))
        _require("the second" in str(error))
        await _raises(StaleLease, store.redact(each, 1, ""))
        await store.release(each)  # a stale lease: no effect
    head = await _existing_head(store, "a")
    _require((head.seq, head.owner) == (1, "the second"))
    await store.append(current, next_record, "running")
    await store.aclose()


async def accepts_only_the_next_record(make: OpenStore) -> None:
    """A record that does not follow the last one is refused, with its whole batch."""
    store = make()
    lease = await store.acquire("a", "me", new=True)
    records = sealed_records(3)
    await _raises(StaleLease, store.append(lease, records[1:], "running"))
    await store.append(lease, records[:2], "running")
    for others in (records[:1], records[:2], records[1:]):
        await _raises(StaleLease, store.append(lease, others, "running"))
    _require(await store.records("a") == records[:2])
    await store.aclose()


async def releases_the_lease_at_the_end(make: OpenStore) -> None:
    """The lease is released when a run is suspended or finished; it can no longer be used."""
    store = make()
    lease = await store.acquire("a", "me", new=True)
    records = sealed_records(2)
    await store.append(lease, records[:1], "suspended")
    await _raises(StaleLease, store.append(lease, records[1:], "running"))
    await _raises(StaleLease, store.redact(lease, 1, ""))
    again = await store.acquire("a", "you")
    await store.append(again, records[1:], "running")
    await store.aclose()


async def never_reopens_a_finished_run(make: OpenStore) -> None:
    """A finished run can be leased (to redact it), and remains finished."""
    store = make()
    lease = await store.acquire("a", "me", new=True)
    records = sealed_records(3)
    await store.append(lease, records[:1], "finished")
    again = await store.acquire("a", "me")
    head = await _existing_head(store, "a")
    _require(head.status == "finished")
    await _raises(StaleLease, store.append(again, records[1:], "running"))
    await store.append(again, records[1:], "finished")
    _require([h.status for h in await store.heads()] == ["finished"])
    await store.aclose()


async def frees_an_abandoned_lease(make: OpenStore) -> None:
    """A lease that was garbage-collected, or whose store was closed, blocks no other owner."""
    store = make()
    lease = await store.acquire("a", "me", new=True)
    await store.append(lease, sealed_records(1), "running")
    del lease
    lease = await store.acquire("a", "you")
    del lease
    await store.aclose()
    again = make()
    head = await _existing_head(again, "a")
    _require((head.owner, head.status) == (None, "running"))
    _require((await again.acquire("a", "a third owner")).epoch == 3)
    await again.aclose()


async def lists_runs_that_were_cut_off(make: OpenStore) -> None:
    """A run was cut off if it has begun, is running, and nobody owns it."""
    store = make()
    await store.release(await store.acquire("has not begun", "me", new=True))
    for status in ("suspended", "finished"):
        await store.append(await store.acquire(status, "me", new=True), sealed_records(1), status)
    leases = {name: await store.acquire(name, "me", new=True) for name in ("released", "owned", "released later")}
    for name in leases:
        await store.append(leases[name], sealed_records(1), "running")
    _require(await store.heads("cut off") == [])
    await store.release(leases["released later"])
    await store.release(leases["released"])
    _require([head.run_id for head in await store.heads("cut off")] == ["released", "released later"])
    _require(await store.heads("cut off") == [await store.head("released"), await store.head("released later")])
    leases.clear()
    await store.aclose()
    again = make()
    _require([head.run_id for head in await again.heads("cut off")] == ["released", "owned", "released later"])
    await again.aclose()


async def redacts_hidden_values(make: OpenStore) -> None:
    """The hidden values of a record can be redacted; body and hash do not change."""
    store = make()
    lease = await store.acquire("a", "me", new=True)
    records = sealed_records(2, hidden='[["00","secret"]]')
    await store.append(lease, records, "running")
    await store.redact(lease, 1, "[null]")
    _require(await store.records("a") == [records[0]._replace(hidden="[null]"), records[1]])
    await store.aclose()


async def keeps_one_snapshot_of_a_run(make: OpenStore) -> None:
    """A run has the last snapshot that was appended, until it is redacted or finished; a refused append leaves it."""
    store = make()
    first, second = SealedSnapshot('{"ü":"one 😀"}', "a" * 40), SealedSnapshot('{"ü":"two"}', "b" * 40)
    records = sealed_records(5, hidden='[["00","secret"]]')
    lease, other = await store.acquire("a", "me", new=True), await store.acquire("b", "me", new=True)
    _require(await store.snapshot("a") is None)
    _require(await store.snapshot("unknown") is None)
    await store.append(lease, records[:1], "running", None, first)
    await store.append(other, records[:1], "running", None, second)
    _require((await store.snapshot("a"), await store.snapshot("b")) == (first, second))
    await store.append(lease, records[1:2], "running")
    _require(await store.snapshot("a") == first)
    await _raises(StaleLease, store.append(lease, records[:1], "running", None, second))
    _require(await store.snapshot("a") == first)
    await store.append(lease, records[2:3], "suspended", None, second)
    await store.aclose()
    again = make()
    _require(await again.snapshot("a") == second)
    lease = await again.acquire("a", "me")
    await again.redact(lease, 1, "[null]")
    _require((await again.snapshot("a"), await again.snapshot("b")) == (None, second))
    await again.append(lease, records[3:4], "running", None, first)
    await again.append(lease, records[4:], "finished")
    _require(await again.snapshot("a") is None)
    _require(await again.maintenance.purge([await _tombstone(again, "a")]) == ["a"])
    await again.aclose()


async def reads_a_part_of_the_records(make: OpenStore) -> None:
    """At most so many records are read as are asked for, after any of them, however they were appended."""
    store, records = make(), sealed_records(7)
    lease = await store.acquire("a", "me", new=True)
    for start, stop in ((0, 1), (1, 4), (4, 7)):
        await store.append(lease, records[start:stop], "running")
    for after in range(8):
        _require(await store.records("a", after) == records[after:])
        for limit in (1, 2, 5, 9):
            _require(await store.records("a", after, limit) == records[after : after + limit])
    await store.aclose()


async def seals_what_it_keeps(make: OpenStore) -> None:
    """What is kept about a run is sealed under the keys with which it was acquired, whenever it changes."""
    store, keyring, rows = make(), Keyring(b"new", [b"old"]), list[str]()

    async def require_sealed(by: Keyring) -> None:
        head = await _existing_head(store, "a")
        _require(head.mac == seal_row(by, head.row))
        rows.append(head.row)

    lease = await store.acquire("a", "me", new=True, keyring=Keyring(b"old"))
    await require_sealed(Keyring(b"old"))
    await store.append(lease, sealed_records(1), "running")
    await require_sealed(Keyring(b"old"))
    await store.release(lease)
    await require_sealed(Keyring(b"old"))
    lease = await store.acquire("a", "me", keyring=keyring)
    await require_sealed(keyring)
    await store.append(lease, (), "running")
    await require_sealed(keyring)
    await store.append(lease, (), "suspended")
    await require_sealed(keyring)
    await store.acquire("a", "me")
    _require((await _existing_head(store, "a")).mac == "")
    _require(len(set(rows)) == len(rows) - 1)  # one append changed nothing
    await store.aclose()


async def preserves_append_order(make: OpenStore) -> None:
    """Appends are queued when they are called, even before they are awaited; concurrent runs do not interfere."""
    store = make()
    names = [f"run{n}" for n in range(20)]
    leases = [await store.acquire(name, "me", new=True) for name in names]
    records = sealed_records(10)
    appends = [store.append(lease, [record], "running") for record in records for lease in leases]
    await asyncio.gather(*appends)
    for name in names:
        _require(await store.records(name) == records)
    await store.aclose()


def _listed(number: int, **fields: Any) -> RunInfo:
    """What a run is listed by, with a start for each number."""
    return dataclasses.replace(RunInfo(f"run{number}", "running", started=100.0 + number, updated=200.0), **fields)


async def _create(store: Store, infos: Sequence[RunInfo]) -> None:
    for info in infos:
        lease = await store.acquire(info.run_id, "me", new=True)
        await store.append(lease, sealed_records(1), info.status, info)
        if info.status == "running":
            await store.release(lease)


async def _found(store: Store, **query: Any) -> list[str]:
    """The ids that a query finds on all its pages, which must be as many as are counted."""
    ids: list[str] = []
    after = ""
    while True:
        page = await store.find_runs(RunQuery(**query, after=after))
        ids += [info.run_id for info in page.runs]
        after = page.next
        if not after:
            break
    _require(await store.count_runs(RunQuery(**query)) == len(ids))
    return ids


async def keeps_apart_what_is_appended_at_once(make: OpenStore) -> None:
    """Of runs whose records are appended at once, each gets its own; an append that is refused changes nothing."""
    store = make()
    before, after = SealedSnapshot("{}", "a" * 40), SealedSnapshot('{"at":2}', "b" * 40)
    first, second = sealed_records(2)
    leases = [await store.acquire(f"run{number}", "me", new=True) for number in range(6)]
    for number, lease in enumerate(leases[:5]):
        await store.append(lease, [first], "running", _listed(number, prompt="before"), before)
    appended = await asyncio.gather(
        store.append(leases[0], [second], "running"),
        store.append(leases[1], [second], "running", _listed(1, prompt="after")),
        store.append(leases[2], [second], "running", None, after),
        store.append(leases[3], [second], "finished"),
        store.append(leases[4], [first], "finished", _listed(4, prompt="after"), after),
        store.append(leases[5], [first], "finished", _listed(5, prompt="after"), after),
        return_exceptions=True,
    )
    _require([type(each) for each in appended] == [type(None)] * 4 + [StaleLease, type(None)])
    _require([len(await store.records(lease.run_id)) for lease in leases] == [2, 2, 2, 2, 1, 1])
    _require([head.status for head in await store.heads()] == ["running"] * 3 + ["finished", "running", "finished"])
    _require([await store.snapshot(lease.run_id) for lease in leases] == [before, before, after, None, before, None])
    _require(await _found(store, text="after") == ["run5", "run1"])
    _require(await _found(store, text="before") == ["run4", "run3", "run2", "run0"])
    _require(await store.maintenance.reindex() == [])
    await store.aclose()


async def lists_a_run_as_it_was_described(make: OpenStore) -> None:
    """What a run is listed by is returned as it was written last, even after the store was reopened."""
    store = make()
    _require(await store.find_runs(RunQuery()) == RunPage())
    lease = await store.acquire("run0", "me", new=True)
    _require((await store.find_runs(RunQuery())).runs == (RunInfo("run0", "running", owner="me"),))
    first = _listed(
        0, prompt="What? ü \U0001f600", actor="ann", session_id="s", tags=("b", "a", "b"), model="m", tokens=3
    )
    first = dataclasses.replace(first, metadata={"order": "7", "ü \U0001f600": ""})
    records = sealed_records(3)
    await store.append(lease, records[:1], "running", first)
    _require((await store.find_runs(RunQuery())).runs == (dataclasses.replace(first, owner="me"),))
    await store.append(lease, records[1:2], "running")
    _require((await store.find_runs(RunQuery())).runs == (dataclasses.replace(first, owner="me"),))
    waiting = WaitingFor("approval", "pay", ("boss", "cfo"))
    last = dataclasses.replace(
        first, status="suspended", updated=300.5, cost_usd=0.25, tokens=70, waiting_for=waiting, expires=400.25
    )
    await store.append(lease, records[2:], "suspended", last)
    _require((await store.find_runs(RunQuery())).runs == (last,))
    await store.aclose()
    again = make()
    _require((await again.find_runs(RunQuery())).runs == (last,))
    lease = await again.acquire("run0", "you")
    left = {"order": "8"}
    await again.redact(lease, 1, "", _listed(0, prompt="[gone]", session_id="t", tags=("c",), metadata=left))
    _require(
        (await again.find_runs(RunQuery())).runs
        == (
            dataclasses.replace(
                last, owner="you", prompt="[gone]", actor="", session_id="t", tags=("c",), metadata=left
            ),
        )
    )
    _require(await _found(again, metadata={"order": 7}) == await _found(again, metadata={"ü \U0001f600": ""}) == [])
    _require(await _found(again, metadata={"order": 8}) == ["run0"])
    _require(await _found(again, tag="a") == [])
    _require(await _found(again, tag="c") == ["run0"])
    _require(await _found(again, any_tag=("a", "c")) == await _found(again, tag="c", any_tag=("c",)) == ["run0"])
    _require(await _found(again, any_tag=("a",)) == await _found(again, any_tag=()) == [])
    _require(await again.count_runs(RunQuery(any_tag=("c", "d"))) == 1)
    await again.aclose()


async def finds_runs_by_what_they_are_listed_by(make: OpenStore) -> None:
    """Each condition of a query selects the runs for which it holds, and all of them must hold."""
    store = make()
    waits = {"status": "suspended", "waiting_for": WaitingFor("approval", "pay", ("boss", "the_cfo"))}
    await _create(
        store,
        [
            _listed(
                0,
                actor="ann",
                tags=("x",),
                prompt="Pay 50% of_it",
                status="finished",
                ending="completed",
                metadata={"order": "7", "eu": "true"},
            ),
            _listed(
                1, session_id="s1", tags=("x", "y"), model="m1", prompt="pay All", metadata={"order": "7"}, **waits
            ),
            _listed(2, actor="ann", session_id="s1", model="m2", parent="run1", metadata={"order": "77", "eu": "7"}),
            _listed(3, actor="Ann", tags=("xy",), status="finished", ending="handed_off"),
        ],
    )
    queries: tuple[tuple[dict[str, Any], str], ...] = (
        ({}, "3210"),
        ({"status": "finished"}, "30"),
        ({"status": "running"}, "2"),
        ({"ending": "completed"}, "0"),
        ({"ending": ""}, "21"),
        ({"actor": "ann"}, "20"),
        ({"actor": ""}, "1"),
        ({"session_id": "s1"}, "21"),
        ({"tag": "x"}, "10"),
        ({"tag": "z"}, ""),
        ({"metadata": {"order": 7}}, "10"),
        ({"metadata": {"order": "7", "eu": True}}, "0"),
        ({"metadata": {"eu": True, "order": "7"}, "tag": "x"}, "0"),
        ({"metadata": {"order": 7}, "tag": "y"}, "1"),
        ({"metadata": {"order": 7}, "any_tag": ("y", "z"), "run_id": "run"}, "1"),
        ({"metadata": {"7": "order"}}, ""),
        ({"metadata": {"%": "7"}}, ""),
        ({"metadata": {}}, "3210"),
        ({"model": "m1"}, "1"),
        ({"parent": ""}, "310"),
        ({"parent": "run1"}, "2"),
        ({"since": 101.0}, "321"),
        ({"until": 101.0}, "0"),
        ({"since": 101.0, "until": 103.0}, "21"),
        ({"text": "PAY"}, "10"),
        ({"text": "50%"}, "0"),
        ({"text": "%"}, "0"),
        ({"text": "f_i"}, "0"),
        ({"text": "_"}, "0"),
        ({"waiting_role": "boss"}, "1"),
        ({"waiting_role": "the_cfo"}, "1"),
        ({"waiting_role": "the-cfo"}, ""),
        ({"waiting_role": "bos"}, ""),
        ({"run_id": "run"}, "3210"),
        ({"run_id": "run3"}, "3"),
        ({"run_id": "RUN3"}, ""),
        ({"run_id": "%"}, ""),
        ({"tag": "x", "session_id": "s1", "text": "all"}, "1"),
        ({"tag": "x", "actor": "nobody"}, ""),
    )
    for query, numbers in queries:
        for limit in (1, 2, 50):
            _require(await _found(store, **query, limit=limit) == [f"run{number}" for number in numbers])
    await store.aclose()


_PROMPTS = (
    "Pay 50% of_it", "pay ALL", "", "a", "aa", "aaa", "Zoë's \"naïve\" café", "ZOË", "契約を結ぶ", "ไทย ไทย",
    "\U0001f600\U0001f600", r"C:\temp\new", "one two three", "two three one", "x\ufffdy", "__%%", "İstanbul Ǆ \u017f",
)  # fmt: skip
_TEXTS = (
    "", "PAY", "pay a", "ZOË", "zoë", "İ", "i", "\u017f", "S", "ǆ", "two three", "three two", "aaaa", "'",
    "\\t", "_%", "%%",
)  # fmt: skip


async def finds_runs_by_every_part_of_their_prompt(make: OpenStore) -> None:
    """A text of any length and script finds the runs whose prompt contains it; ASCII letters may be of either case.

    That holds with other conditions, too, and after prompts were redacted, runs purged, and the store compacted.
    """
    store = make()
    runs = [_listed(n, prompt=each, status="finished", tags=("odd",) * (n % 2)) for n, each in enumerate(_PROMPTS)]
    await _create(store, runs)
    parts = {each[first : first + size] for each in _PROMPTS for first in range(len(each)) for size in (1, 2, 3, 6)}
    await _require_texts(store, runs, parts.union(_TEXTS))
    for number, prompt in ((0, ""), (6, "[gone] ZOË"), (8, "")):
        lease = await store.acquire(f"run{number}", "me")
        runs[number] = dataclasses.replace(runs[number], prompt=prompt)
        await store.redact(lease, 1, "", runs[number])
        await store.release(lease)
    purged = [f"run{number}" for number in (1, 15)]
    await store.maintenance.purge([await _tombstone(store, run_id) for run_id in purged])
    runs = [run for run in runs if run.run_id not in purged]
    await _require_texts(store, runs, parts.union(_TEXTS))
    await store.maintenance.compact()
    await _create(store, [_listed(20, prompt="Pay once more"), _listed(21, prompt="契約 again")])
    runs += [_listed(20, prompt="Pay once more"), _listed(21, prompt="契約 again")]
    await _require_texts(store, runs, parts.union(_TEXTS))
    _require(await store.maintenance.reindex() == [])
    await store.aclose()


async def _require_texts(store: Store, runs: Sequence[RunInfo], texts: Iterable[str]) -> None:
    for text in texts:
        having = [run for run in reversed(runs) if _small(text) in _small(run.prompt)]
        _require(await _found(store, text=text, limit=2) == [run.run_id for run in having])
        odd = [run.run_id for run in having if "odd" in run.tags]
        _require([run.run_id for run in (await store.find_runs(RunQuery(text=text, tag="odd"))).runs] == odd)


def _small(text: str) -> bytes:
    return text.encode().lower()  # of bytes, only ASCII letters have a case


async def keeps_pages_apart_while_runs_are_created(make: OpenStore) -> None:
    """A run that is created or changes between two pages of a query moves no other run from one to the other."""
    store = make()
    await _create(store, [_listed(number) for number in range(5)])
    page = await store.find_runs(RunQuery(limit=2))
    _require([info.run_id for info in page.runs] == ["run4", "run3"])
    await _create(store, [_listed(5)])
    lease = await store.acquire("run1", "me")
    await store.append(lease, (), "finished", _listed(1, status="finished", updated=900.0))
    page = await store.find_runs(RunQuery(limit=2, after=page.next))
    _require([info.run_id for info in page.runs] == ["run2", "run1"])
    page = await store.find_runs(RunQuery(limit=2, after=page.next))
    _require(([info.run_id for info in page.runs], page.next) == (["run0"], ""))
    await store.aclose()


def _signal(number: int, run_id: str = "a", body: str = "{}") -> SealedSignal:
    return SealedSignal(f"{number:032x}", run_id, body, f"{number:040x}")


async def keeps_signals_until_they_are_removed(make: OpenStore) -> None:
    """A signal is kept in the order in which it came, even after the store was reopened, until it is removed."""
    store = make()
    _require(await store.signals.pending() == [])
    for name in ("a", "b"):
        await store.acquire(name, "me", new=True)
    signals = [_signal(2, body='{"text":"ü \\u0000 😀"}'), _signal(1), _signal(3, "b")]
    for signal in signals:
        _require(await store.signals.send(signal))
    _require(await store.signals.send(signals[0]))  # once more, as after an answer that was lost
    _require(not await store.signals.send(signals[0]._replace(body="[]")))
    await _raises(UnknownRunError, store.signals.send(_signal(4, "c")))
    await store.aclose()
    again = make()
    _require(await again.signals.pending() == signals)
    _require(await again.signals.pending("a") == signals[:2])
    _require(await again.signals.pending("c") == [])
    await again.signals.remove(signals[0].id)
    await again.signals.remove(signals[0].id)  # nothing is left to do
    _require(await again.signals.pending() == signals[1:])
    _require(await again.signals.send(signals[0]))
    _require(await again.signals.pending() == [*signals[1:], signals[0]])
    await again.aclose()


async def tells_owners_and_listeners_of_signals(make: OpenStore) -> None:
    """Whoever holds a run is told that it has got a signal; whoever listens is told of those before and after."""
    store = make()
    lease = await store.acquire("a", "me", new=True)
    other = await store.acquire("b", "me", new=True)
    told: list[str] = []
    await store.signals.send(_signal(1))
    _require(lease.is_signalled and not other.is_signalled)
    other.on_signal = lambda: told.append("b")
    listener = store.signals.listen()
    _require(await anext(listener) == "a")
    waiting = asyncio.ensure_future(anext(listener))
    await store.signals.send(_signal(2, "b"))
    found = await waiting
    while found != "b":  # one that was announced before may be announced again
        found = await anext(listener)
    _require("b" in told)
    await listener.aclose()
    await store.aclose()


_KEYRING = Keyring(b"of the host")


async def _tombstone(store: Store, run_id: str) -> Tombstone:
    head = await _existing_head(store, run_id)
    number = json.loads(head.row)[0]
    return seal_tombstone(Tombstone(number, run_id, head.epoch, head.seq, head.hash, 1000, "ann", "too old"), _KEYRING)


async def purges_whole_runs(make: OpenStore) -> None:
    """A purged run is gone from every list, its tombstone stays, and neither its id nor its number is used again."""
    store = make()
    await _create(store, [_listed(n, status="finished", tags=("x",), prompt=f"p{n}") for n in range(3)])
    for number, run_id in ((1, "run0"), (2, "run1")):
        await store.signals.send(_signal(number, run_id))
    tombstones = [await _tombstone(store, "run0"), await _tombstone(store, "run2")]
    _require(sorted(await store.maintenance.purge(tombstones)) == ["run0", "run2"])
    _require([head.run_id for head in await store.heads()] == ["run1"])
    _require(await _found(store, tag="x") == ["run1"])
    _require(await store.signals.pending() == [_signal(2, "run1")])
    _require(await store.head("run2") is None)
    await _raises(UnknownRunError, store.records("run2"))
    await _raises(UnknownRunError, store.acquire("run2", "me"))
    await _raises(RunExistsError, store.acquire("run2", "me", new=True))
    _require(await store.maintenance.purge(tombstones) == [])
    _require(await store.maintenance.reindex() == [])
    await store.maintenance.compact()
    await store.aclose()
    again = make()
    _require(await again.maintenance.tombstones() == tombstones)
    _require([await again.maintenance.tombstones(run_id) for run_id in ("run2", "run1")] == [tombstones[1:], []])
    purged = [run_id for run_id in ("run0", "run1", "run2", "run3") if await again.maintenance.was_purged(run_id)]
    _require(purged == ["run0", "run2"])
    await _create(again, [_listed(3)])
    _require((await _tombstone(again, "run3")).number > tombstones[1].number)
    _require(await _found(again) == ["run3", "run1"])
    _require(await again.maintenance.schema_damage() == await again.maintenance.row_damage() == [])
    await again.aclose()


async def purges_only_what_ended_and_did_not_change(make: OpenStore) -> None:
    """A run that is running, waits, is owned, or is not as its tombstone says, is not purged; an empty one is."""
    store = make()
    await _create(store, [_listed(0), _listed(1, status="suspended"), _listed(2, status="finished")])
    for run_id in ("run0", "run1"):
        _require(await store.maintenance.purge([await _tombstone(store, run_id)]) == [])
    before = await _tombstone(store, "run2")
    lease = await store.acquire("run2", "me")
    _require(await store.maintenance.purge([before]) == [])
    _require(await store.maintenance.purge([await _tombstone(store, "run2")]) == [])
    await store.release(lease)
    _require(await store.maintenance.purge([before]) == [])
    for wrong in ({"hash": "0" * 64}, {"seq": 2}, {"number": 99}, {"run_id": "run1"}, {"epoch": 9}):
        changed = dataclasses.replace(await _tombstone(store, "run2"), **wrong)
        _require(await store.maintenance.purge([seal_tombstone(changed, _KEYRING)]) == [])
    empty = await store.acquire("empty", "me", new=True)
    _require(await store.maintenance.purge([await _tombstone(store, "empty")]) == [])
    await store.release(empty)
    _require(await store.maintenance.purge([await _tombstone(store, "empty")]) == ["empty"])
    _require(not await store.maintenance.was_purged("empty"))
    _require([each.seq for each in await store.maintenance.tombstones("empty")] == [0])
    await store.acquire("empty", "me", new=True)  # nothing of it was lost
    _require([head.run_id for head in await store.heads()] == ["run0", "run1", "run2", "empty"])
    await store.aclose()


async def keeps_what_is_held(make: OpenStore) -> None:
    """A held run is neither purged nor redacted, whoever owns it, until its hold ends."""
    store = make()
    await _create(store, [_listed(0, status="finished"), _listed(1)])
    owned = await store.acquire("run1", "me")
    _require(await store.maintenance.holds() == {})
    await _raises(UnknownRunError, store.maintenance.set_hold("run2", Hold()))
    first, last = Hold("case 7", "ann", 1000.5), Hold("case 8", "bob", 2000.25)
    for run_id, hold in (("run1", last), ("run0", first), ("run0", last)):
        await store.maintenance.set_hold(run_id, hold)
    _require(await store.maintenance.holds() == {"run0": last, "run1": last})
    _require(await store.maintenance.purge([await _tombstone(store, "run0")]) == [])
    error = await _raises(RunHeldError, store.redact(owned, 1, ""))
    _require("case 8" in str(error))
    await store.append(owned, sealed_records(1, 1, owned.hash), "running")
    ended = Hold("case 8", "eve", 3000.125, ended=True, mac="ab" * 20)
    await store.maintenance.set_hold("run1", ended)
    await store.redact(owned, 1, "")
    await store.aclose()
    again = make()
    _require(await again.maintenance.holds() == {"run0": last, "run1": ended})
    await again.maintenance.set_hold("run1", None)
    await again.maintenance.set_hold("run0", ended)
    _require(await again.maintenance.holds() == {"run0": ended})
    _require(await again.maintenance.purge([await _tombstone(again, "run0")]) == ["run0"])
    _require(await again.maintenance.holds() == {})
    await again.aclose()


CHECKS: tuple[StoreCheck, ...] = (
    returns_what_was_appended,
    isolates_runs,
    refuses_unknown_and_duplicate_runs,
    restarts_an_empty_run,
    leases_a_run_to_one_owner,
    fences_a_stale_lease,
    accepts_only_the_next_record,
    releases_the_lease_at_the_end,
    never_reopens_a_finished_run,
    frees_an_abandoned_lease,
    lists_runs_that_were_cut_off,
    redacts_hidden_values,
    keeps_one_snapshot_of_a_run,
    reads_a_part_of_the_records,
    seals_what_it_keeps,
    preserves_append_order,
    keeps_apart_what_is_appended_at_once,
    lists_a_run_as_it_was_described,
    finds_runs_by_what_they_are_listed_by,
    finds_runs_by_every_part_of_their_prompt,
    keeps_pages_apart_while_runs_are_created,
    keeps_signals_until_they_are_removed,
    tells_owners_and_listeners_of_signals,
    purges_whole_runs,
    purges_only_what_ended_and_did_not_change,
    keeps_what_is_held,
)
"""Every check."""
