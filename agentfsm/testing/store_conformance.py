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
from agentfsm.journal.records import START, Row, seal
from agentfsm.journal.store import Head, Store

__all__ = ["CHECKS", "Check", "Open", "rows"]

Open = Callable[[], Store]
Check = Callable[[Open], Awaitable[None]]


def rows(count: int, after: int = 0, head: str = START, hidden: str = "") -> list[Row]:
    """Sealed rows with nothing in them but their numbers.

    Args:
        count: How many.
        after: The number of the row behind which they come.
        head: That row's hash.
        hidden: What stands hidden beside each.
    """
    made: list[Row] = []
    for seq in range(after + 1, after + count + 1):
        body = f'{{"kind":"note","seq":{seq},"text":"ü \\u0000 \U0001f600"}}'
        head = seal(head, body)
        made.append(Row(seq, body, head, hidden))
    return made


async def _raises(expected: type[AgentfsmError], awaitable: Awaitable[object]) -> AgentfsmError:
    try:
        await awaitable
    except expected as error:
        return error
    raise AssertionError(f"{expected.__name__} was not raised")


def _need(condition: bool) -> None:
    """As ``assert``, and also where Python runs without those.

    Raises:
        AssertionError: The store does not do what it must; the traceback names the line.
    """
    if not condition:
        raise AssertionError("the store does not do what it must")


def _known(store: Store, run_id: str) -> Head:
    head = store.head(run_id)
    if head is None:
        raise AssertionError(f"the store does not know {run_id!r}")
    return head


async def it_gives_back_what_was_appended(make: Open) -> None:
    """Rows come back in order and to the byte, also from a store that was opened anew."""
    store = make()
    lease = await store.take("a", "me", new=True)
    some = rows(3, hidden='[["00",{"x":"\\u0000ü"}],null]')
    await store.append(lease, some[:2], "running")
    await store.append(lease, some[2:], "finished")
    _need(store.rows("a") == some)
    _need(store.rows("a", after=2) == some[2:])
    store.close()
    again = make()
    _need(again.rows("a") == some)
    head = _known(again, "a")
    _need((head.seq, head.hash, head.status, head.owner) == (3, some[-1].hash, "finished", None))
    again.close()


async def it_keeps_runs_apart(make: Open) -> None:
    """What one run appends stands in no other; heads come in the order in which runs began."""
    store = make()
    leases = [await store.take(name, "me", new=True) for name in ("b", "a", "c")]
    await store.append(leases[0], rows(1), "running")
    await store.append(leases[1], rows(2), "suspended")
    await store.append(leases[2], rows(3), "finished")
    stand = [("b", 1, "running"), ("a", 2, "suspended"), ("c", 3, "finished")]
    _need([(h.run_id, h.seq, h.status) for h in store.heads()] == stand)
    _need([h.run_id for h in store.heads("suspended")] == ["a"])
    _need([len(store.rows(name)) for name in "abc"] == [2, 1, 3])
    store.close()


async def it_knows_what_it_does_not_have(make: Open) -> None:
    """Unknown runs are errors, and a run is new only once."""
    store = make()
    _need(store.head("a") is None)
    _need(store.heads() == [])
    await _raises(UnknownRunError, store.take("a", "me"))
    lease = await store.take("a", "me", new=True)
    await _raises(RunExistsError, store.take("a", "me", new=True))
    await store.append(lease, rows(1), "finished")
    await _raises(RunExistsError, store.take("a", "me", new=True))
    try:
        store.rows("b")
    except UnknownRunError:
        pass
    else:
        raise AssertionError("rows of an unknown run")
    store.close()


async def it_begins_a_run_anew_that_came_to_nothing(make: Open) -> None:
    """A run whose holder was gone before the first row can begin again."""
    store = make()
    lease = await store.take("a", "me", new=True)
    await _raises(RunExistsError, store.take("a", "you", new=True))
    del lease
    store.close()
    again = make()
    new = await again.take("a", "you", new=True)
    await again.append(new, rows(1), "finished")
    await _raises(RunExistsError, again.take("a", "me", new=True))
    again.close()


async def it_gives_a_run_to_one_holder(make: Open) -> None:
    """While somebody holds a run, everybody else is refused with the holder's name."""
    store = make()
    lease = await store.take("a", "the first", new=True)
    error = await _raises(StaleLease, store.take("a", "the second"))
    _need("the first" in str(error))
    head = _known(store, "a")
    _need(head.owner == "the first")
    await store.release(lease)
    again = await store.take("a", "the second")
    _need(again.epoch == lease.epoch + 1)
    store.close()


async def it_fences_a_former_holder(make: Open) -> None:
    """Whoever lost a run writes nothing to it, and is told who has it."""
    store = make()
    lease = await store.take("a", "the first", new=True)
    await store.append(lease, rows(1), "running")
    former = dataclasses.replace(lease)
    await store.release(lease)
    now = await store.take("a", "the second")
    late = rows(1, 1, now.hash)
    error = await _raises(StaleLease, store.append(former, late, "running"))
    _need("the second" in str(error))
    await _raises(StaleLease, store.redact(former, 1, ""))
    await store.release(former)  # not its own any more: changes nothing
    head = _known(store, "a")
    _need((head.seq, head.owner) == (1, "the second"))
    await store.append(now, late, "running")
    store.close()


async def it_takes_only_the_next_row(make: Open) -> None:
    """A row that does not stand behind the last one is refused, and nothing of its batch is there."""
    store = make()
    lease = await store.take("a", "me", new=True)
    some = rows(3)
    await _raises(StaleLease, store.append(lease, some[1:], "running"))
    await store.append(lease, some[:2], "running")
    await _raises(StaleLease, store.append(lease, some[:1], "running"))
    await _raises(StaleLease, store.append(lease, some[1:], "running"))
    _need(store.rows("a") == some[:2])
    store.close()


async def it_gives_a_lease_back_at_the_end(make: Open) -> None:
    """With a suspension or the end the run is free, and the old lease is no good any more."""
    store = make()
    lease = await store.take("a", "me", new=True)
    some = rows(2)
    await store.append(lease, some[:1], "suspended")
    await _raises(StaleLease, store.append(lease, some[1:], "running"))
    again = await store.take("a", "you")
    await store.append(again, some[1:], "running")
    store.close()


async def it_never_reopens_a_finished_run(make: Open) -> None:
    """A finished run can be taken (to redact it), and stays finished."""
    store = make()
    lease = await store.take("a", "me", new=True)
    some = rows(3)
    await store.append(lease, some[:1], "finished")
    again = await store.take("a", "me")
    head = _known(store, "a")
    _need(head.status == "finished")
    await _raises(StaleLease, store.append(again, some[1:], "running"))
    await store.append(again, some[1:], "finished")
    _need([h.status for h in store.heads()] == ["finished"])
    store.close()


async def it_forgets_a_holder_that_is_gone(make: Open) -> None:
    """A lease that nobody has any more, or whose process has let go of the store, holds up nobody."""
    store = make()
    lease = await store.take("a", "me", new=True)
    await store.append(lease, rows(1), "running")
    del lease
    lease = await store.take("a", "you")
    del lease
    store.close()
    again = make()
    head = _known(again, "a")
    _need((head.owner, head.status) == (None, "running"))
    _need((await again.take("a", "somebody else")).epoch == 3)
    again.close()


async def it_redacts_what_is_hidden(make: Open) -> None:
    """What stands hidden beside a record can go; body and hash stay."""
    store = make()
    lease = await store.take("a", "me", new=True)
    some = rows(2, hidden='[["00","secret"]]')
    await store.append(lease, some, "running")
    await store.redact(lease, 1, "[null]")
    _need(store.rows("a") == [some[0]._replace(hidden="[null]"), some[1]])
    store.close()


async def it_keeps_the_order_of_what_was_queued(make: Open) -> None:
    """Appends are queued when they are called, also where nobody awaits them yet; many runs at once do not mix."""
    store = make()
    names = [f"run{n}" for n in range(20)]
    leases = [await store.take(name, "me", new=True) for name in names]
    some = rows(10)
    waiting = [store.append(lease, [row], "running") for row in some for lease in leases]
    await asyncio.gather(*waiting)
    _need(all(store.rows(name) == some for name in names))
    store.close()


CHECKS: tuple[Check, ...] = (
    it_gives_back_what_was_appended,
    it_keeps_runs_apart,
    it_knows_what_it_does_not_have,
    it_begins_a_run_anew_that_came_to_nothing,
    it_gives_a_run_to_one_holder,
    it_fences_a_former_holder,
    it_takes_only_the_next_row,
    it_gives_a_lease_back_at_the_end,
    it_never_reopens_a_finished_run,
    it_forgets_a_holder_that_is_gone,
    it_redacts_what_is_hidden,
    it_keeps_the_order_of_what_was_queued,
)
"""Every check."""
