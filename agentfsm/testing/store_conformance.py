"""What every store must do, as checks that any store can be put through.

::

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_my_store(check, tmp_path):
        asyncio.run(check(lambda: MyStore(tmp_path / "runs")))

A check gets a function that opens the store: called again, it opens the same storage anew, as another process
would, after the store before was closed. A store that keeps nothing gives the same object each time.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable

from agentfsm.errors import AgentfsmError, RunExistsError, StaleLease, UnknownRunError
from agentfsm.journal.hash_chain import GENESIS_HASH, record_hash
from agentfsm.journal.records import SealedRecord
from agentfsm.journal.store import Head, Store

__all__ = ["CHECKS", "OpenStore", "StoreCheck", "sealed_records"]

OpenStore = Callable[[], Store]
StoreCheck = Callable[[OpenStore], Awaitable[None]]


def sealed_records(count: int, after: int = 0, head: str = GENESIS_HASH, hidden: str = "") -> list[SealedRecord]:
    """Sealed rows with nothing in them but their numbers.

    Args:
        count: How many.
        after: The number of the row behind which they come.
        head: That row's hash.
        hidden: What stands hidden beside each.
    """
    made: list[SealedRecord] = []
    for seq in range(after + 1, after + count + 1):
        body = f'{{"kind":"note","seq":{seq},"text":"ü \\u0000 \U0001f600"}}'
        head = record_hash(head, body)
        made.append(SealedRecord(seq, body, head, hidden))
    return made


async def _raises(expected: type[AgentfsmError], awaitable: Awaitable[object]) -> AgentfsmError:
    try:
        await awaitable
    except expected as error:
        return error
    raise AssertionError(f"{expected.__name__} was not raised")


def _require(condition: bool) -> None:
    """As ``assert``, and also where Python runs without those.

    Raises:
        AssertionError: The store does not do what it must; the traceback names the line.
    """
    if not condition:
        raise AssertionError("the store does not do what it must")


def _existing_head(store: Store, run_id: str) -> Head:
    head = store.head(run_id)
    if head is None:
        raise AssertionError(f"the store does not know {run_id!r}")
    return head


async def returns_what_was_appended(make: OpenStore) -> None:
    """Rows come back in order and to the byte, also from a store that was opened anew."""
    store = make()
    lease = await store.acquire("a", "me", new=True)
    some = sealed_records(3, hidden='[["00",{"x":"\\u0000ü"}],null]')
    await store.append(lease, some[:2], "running")
    await store.append(lease, some[2:], "finished")
    _require(store.records("a") == some)
    _require(store.records("a", after=2) == some[2:])
    store.close()
    again = make()
    _require(again.records("a") == some)
    head = _existing_head(again, "a")
    _require((head.seq, head.hash, head.status, head.owner) == (3, some[-1].hash, "finished", None))
    again.close()


async def isolates_runs(make: OpenStore) -> None:
    """What one run appends stands in no other; heads come in the order in which runs began."""
    store = make()
    leases = [await store.acquire(name, "me", new=True) for name in ("b", "a", "c")]
    await store.append(leases[0], sealed_records(1), "running")
    await store.append(leases[1], sealed_records(2), "suspended")
    await store.append(leases[2], sealed_records(3), "finished")
    stand = [("b", 1, "running"), ("a", 2, "suspended"), ("c", 3, "finished")]
    _require([(h.run_id, h.seq, h.status) for h in store.heads()] == stand)
    _require([h.run_id for h in store.heads("suspended")] == ["a"])
    _require([len(store.records(name)) for name in "abc"] == [2, 1, 3])
    store.close()


async def refuses_unknown_and_duplicate_runs(make: OpenStore) -> None:
    """Unknown runs are errors, and a run is new only once."""
    store = make()
    _require(store.head("a") is None)
    _require(store.heads() == [])
    await _raises(UnknownRunError, store.acquire("a", "me"))
    lease = await store.acquire("a", "me", new=True)
    await _raises(RunExistsError, store.acquire("a", "me", new=True))
    await store.append(lease, sealed_records(1), "finished")
    await _raises(RunExistsError, store.acquire("a", "me", new=True))
    try:
        store.records("b")
    except UnknownRunError:
        pass
    else:
        raise AssertionError("rows of an unknown run")
    store.close()


async def restarts_an_empty_run(make: OpenStore) -> None:
    """A run whose holder was gone before the first row can begin again."""
    store = make()
    lease = await store.acquire("a", "me", new=True)
    await _raises(RunExistsError, store.acquire("a", "you", new=True))
    del lease
    store.close()
    again = make()
    new = await again.acquire("a", "you", new=True)
    await again.append(new, sealed_records(1), "finished")
    await _raises(RunExistsError, again.acquire("a", "me", new=True))
    again.close()


async def leases_a_run_to_one_owner(make: OpenStore) -> None:
    """While somebody holds a run, everybody else is refused with the holder's name."""
    store = make()
    lease = await store.acquire("a", "the first", new=True)
    error = await _raises(StaleLease, store.acquire("a", "the second"))
    _require("the first" in str(error))
    head = _existing_head(store, "a")
    _require(head.owner == "the first")
    await store.release(lease)
    again = await store.acquire("a", "the second")
    _require(again.epoch == lease.epoch + 1)
    store.close()


async def fences_a_stale_lease(make: OpenStore) -> None:
    """Whoever lost a run writes nothing to it, and is told who has it."""
    store = make()
    lease = await store.acquire("a", "the first", new=True)
    await store.append(lease, sealed_records(1), "running")
    former = dataclasses.replace(lease)
    await store.release(lease)
    now = await store.acquire("a", "the second")
    late = sealed_records(1, 1, now.hash)
    error = await _raises(StaleLease, store.append(former, late, "running"))
    _require("the second" in str(error))
    await _raises(StaleLease, store.redact(former, 1, ""))
    await store.release(former)  # not its own any more: changes nothing
    head = _existing_head(store, "a")
    _require((head.seq, head.owner) == (1, "the second"))
    await store.append(now, late, "running")
    store.close()


async def accepts_only_the_next_record(make: OpenStore) -> None:
    """A row that does not stand behind the last one is refused, and nothing of its batch is there."""
    store = make()
    lease = await store.acquire("a", "me", new=True)
    some = sealed_records(3)
    await _raises(StaleLease, store.append(lease, some[1:], "running"))
    await store.append(lease, some[:2], "running")
    await _raises(StaleLease, store.append(lease, some[:1], "running"))
    await _raises(StaleLease, store.append(lease, some[1:], "running"))
    _require(store.records("a") == some[:2])
    store.close()


async def releases_the_lease_at_the_end(make: OpenStore) -> None:
    """With a suspension or the end the run is free, and the old lease is no good any more."""
    store = make()
    lease = await store.acquire("a", "me", new=True)
    some = sealed_records(2)
    await store.append(lease, some[:1], "suspended")
    await _raises(StaleLease, store.append(lease, some[1:], "running"))
    again = await store.acquire("a", "you")
    await store.append(again, some[1:], "running")
    store.close()


async def never_reopens_a_finished_run(make: OpenStore) -> None:
    """A finished run can be taken (to redact it), and stays finished."""
    store = make()
    lease = await store.acquire("a", "me", new=True)
    some = sealed_records(3)
    await store.append(lease, some[:1], "finished")
    again = await store.acquire("a", "me")
    head = _existing_head(store, "a")
    _require(head.status == "finished")
    await _raises(StaleLease, store.append(again, some[1:], "running"))
    await store.append(again, some[1:], "finished")
    _require([h.status for h in store.heads()] == ["finished"])
    store.close()


async def frees_an_abandoned_lease(make: OpenStore) -> None:
    """A lease that nobody has any more, or whose process has let go of the store, holds up nobody."""
    store = make()
    lease = await store.acquire("a", "me", new=True)
    await store.append(lease, sealed_records(1), "running")
    del lease
    lease = await store.acquire("a", "you")
    del lease
    store.close()
    again = make()
    head = _existing_head(again, "a")
    _require((head.owner, head.status) == (None, "running"))
    _require((await again.acquire("a", "somebody else")).epoch == 3)
    again.close()


async def redacts_hidden_values(make: OpenStore) -> None:
    """What stands hidden beside a record can go; body and hash stay."""
    store = make()
    lease = await store.acquire("a", "me", new=True)
    some = sealed_records(2, hidden='[["00","secret"]]')
    await store.append(lease, some, "running")
    await store.redact(lease, 1, "[null]")
    _require(store.records("a") == [some[0]._replace(hidden="[null]"), some[1]])
    store.close()


async def preserves_append_order(make: OpenStore) -> None:
    """Appends are queued when they are called, also where nobody awaits them yet; many runs at once do not mix."""
    store = make()
    names = [f"run{n}" for n in range(20)]
    leases = [await store.acquire(name, "me", new=True) for name in names]
    some = sealed_records(10)
    waiting = [store.append(lease, [row], "running") for row in some for lease in leases]
    await asyncio.gather(*waiting)
    _require(all(store.records(name) == some for name in names))
    store.close()


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
    redacts_hidden_values,
    preserves_append_order,
)
"""Every check."""
