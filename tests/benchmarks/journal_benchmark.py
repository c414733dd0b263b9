"""The cost of the journal: ``python -m tests.benchmarks.journal_benchmark`` prints ratios, more stable than times.

The baseline of a stored run is a loop written by hand that makes the same calls, checks the arguments and keeps
time limits too, appends the same text to SQLite and commits as often, at the same ``synchronous`` level.
Figures of one machine are compared with each other only, interleaved: stored steps by the median of ``ROUNDS`` rounds,
all else by the best of several.

Where a run waits for the disk (FULL), the clock on the wall counts; where it does not (NORMAL, and all reading),
the processor's time does, which other work on the machine blurs less. The text of a step is what the loop by hand
keeps of it: a message with the call, and one with the result. The slower a disk is, the less everything else counts,
and the more there is for runs to share. So what waits for the disk is measured on this one, whatever it is, and again
with ``DISK_S`` added to every commit, which is what a disk without a battery takes. The loop by hand commits in the
event loop's thread, where everybody waits for the disk; another one commits in a thread, as ours does.
"""

from __future__ import annotations

import _sqlite3
import asyncio
import ctypes
import json
import operator
import os
import re
import shutil
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

from agentfsm import (
    Agent,
    AgentGuardrails,
    Allow,
    Host,
    KeepLast,
    Message,
    ModelRequest,
    Reply,
    SqliteStore,
    ToolCall,
    tool,
)
from agentfsm.journal.commit_encoding import decode_rows, encode_commit
from agentfsm.journal.hash_chain import GENESIS_HASH, MacVerifier, RecordSealer
from agentfsm.journal.records import SealedRecord
from agentfsm.journal.rehydrate import rehydrate
from agentfsm.journal.store import head_row, seal_row
from agentfsm.journal.verification import verify
from agentfsm.loop.keys import Keyring
from agentfsm.loop.messages import FinishReason
from agentfsm.runtime.run import hand_over
from tests.helpers.journal_rows import commits

SIZE = 1000
"""The size of each call's argument and of each result, in characters."""

SHORT, LONG = 135, 2500
"""Other sizes of arguments and results."""

DISK_S = 0.002
"""The duration of a commit on a simulated slow disk, in seconds."""

ROUNDS = 15
"""How many times a stored run and one by hand take turns."""

RECORDS_AN_APPEND = 4
"""A step of the benchmark has eight records and two appends."""

LIMITS = AgentGuardrails(
    max_iterations=10**6, max_execution_time_s=None, max_steps=10**7, max_tokens=10**12, loop_hard_threshold=20
)


class TalkingModel:
    """A model that calls a tool a number of times, each time with a different long text; runs may share it."""

    name = "talker"

    def __init__(self, steps: int, chars: int = SIZE) -> None:
        self.steps = steps
        self.chars = chars

    async def reply(self, request: ModelRequest) -> Reply:
        return self.answer(request.messages[-1].content)

    def answer(self, last: str) -> Reply:
        made = int(last.partition(" ")[0]) + 1 if last[0].isdigit() else 1  # a result begins with its number
        return scripted_reply(made, self.chars) if made <= self.steps else Reply(Message.assistant("done"))


def scripted_reply(n: int, chars: int = SIZE) -> Reply:
    text = f"{n} " + "x" * chars
    return Reply(Message.assistant("", (ToolCall(f"c{n}", "echo", {"text": text}),)), FinishReason.TOOL_CALLS)


@tool
async def echo(text: str) -> str:
    """Repeat the text."""
    return text


def agent(store: SqliteStore | None, steps: int, chars: int = SIZE) -> Agent:
    return Agent(TalkingModel(steps, chars), tools=[echo], guardrails=LIMITS, host=Host(store=store))


async def run_stored(
    store: SqliteStore | None,
    steps: int,
    run_id: str = "r",
    clock: Callable[[], float] = time.perf_counter,
    chars: int = SIZE,
) -> float:
    one = agent(store, steps, chars)
    begun = clock()
    await one.run("go", run_id=run_id)
    return clock() - begun


def reply_by_hand(reply: Reply) -> dict[str, Any]:
    calls = [{"id": c.id, "name": c.name, "arguments": c.arguments} for c in reply.message.tool_calls]
    return {"role": "assistant", "content": reply.message.content, "tool_calls": calls}


def result_by_hand(call: ToolCall, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call.id, "content": content}


async def run_by_hand(
    db: sqlite3.Connection, steps: int, clock: Callable[[], float] = time.perf_counter, *, in_thread: bool = False
) -> float:
    """A hand-written loop with the same calls, the same text and the same number of commits."""
    model, messages, pending = (
        TalkingModel(steps),
        [{"role": "user", "content": "go"}],
        [{"role": "user", "content": "go"}],
    )
    begun = clock()

    def write() -> None:
        db.execute("BEGIN")
        db.executemany("INSERT INTO log (text) VALUES (?)", [(json.dumps(m),) for m in pending])
        db.execute("COMMIT")
        pending.clear()

    async def commit() -> None:
        if in_thread:
            await asyncio.to_thread(write)
        else:
            write()

    while True:
        await commit()
        async with asyncio.timeout(60):
            reply = await model.reply(ModelRequest((Message.user(str(messages[-1]["content"])),)))
        calls = reply.message.tool_calls
        entry = reply_by_hand(reply)
        messages.append(entry)
        pending.append(entry)
        if not calls:
            break
        for c in calls:
            await commit()
            arguments = echo.arguments(c.arguments)
            async with asyncio.timeout(600):
                result = result_by_hand(c, await echo.function(**arguments))
            messages.append(result)
            pending.append(result)
    await commit()
    return clock() - begun


def plain_db(path: Path, level: str) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute(f"PRAGMA synchronous = {level}")
    db.execute("CREATE TABLE log (id INTEGER PRIMARY KEY, text TEXT)")
    return db


def compare_stored_with_by_hand(
    folder: Path, level: Any, steps: int = 200, rounds: int = ROUNDS, *, in_thread: bool = False
) -> float:
    """The time of a stored run relative to the hand-written loop, in files that have been in use for a while."""
    name = f"{level}{time.monotonic_ns()}"
    store, db = SqliteStore(folder / f"{name}.db", synchronous=level), plain_db(folder / f"{name}.plain", level)
    clock = time.perf_counter if level == "full" else time.process_time
    asyncio.run(run_stored(store, 2, "warm"))
    asyncio.run(run_by_hand(db, 2))
    mine, theirs = list[float](), list[float]()
    for n in range(rounds):
        mine.append(asyncio.run(run_stored(store, steps, f"run{n}", clock)))
        theirs.append(asyncio.run(run_by_hand(db, steps, clock, in_thread=in_thread)))
    store.close()
    db.close()
    ours, by_hand = median(mine), median(theirs)
    print(f"    ours {ours / steps * 1e6:.0f} us a step, by hand {by_hand / steps * 1e6:.0f}", file=sys.stderr)
    return ours / by_hand


def bytes_a_step(folder: Path, first: int, last: int, chars: int = SIZE) -> tuple[float, float]:
    """The file size per step in bytes, and relative to the JSON of a step's arguments and the text of its result."""
    sizes: dict[int, int] = {}
    for steps in (first, last):
        path = folder / f"size{steps}-{chars}.db"
        store = SqliteStore(path, synchronous="normal")
        asyncio.run(run_stored(store, steps, chars=chars))
        store.close()
        db = sqlite3.connect(path)
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        db.close()
        sizes[steps] = path.stat().st_size
    a_step = (sizes[last] - sizes[first]) / (last - first)
    (call,) = scripted_reply(last, chars).message.tool_calls
    return a_step, a_step / (len(json.dumps(call.arguments)) + len(str(call.arguments["text"])))


def group_commit(folder: Path, runs: int, steps: int) -> float:
    """The durable records per second of many concurrent runs, relative to one run."""
    store = SqliteStore(folder / f"group{time.monotonic_ns()}.db")
    one_agent = agent(store, steps)

    async def many(count: int, name: str) -> float:
        begun = time.perf_counter()
        await asyncio.gather(*(one_agent.run("go", run_id=f"{name}{n}") for n in range(count)))
        took = time.perf_counter() - begun
        heads = [await store.head(f"{name}{n}") for n in range(count)]
        return sum(head.seq for head in heads if head is not None) / took

    asyncio.run(many(1, "warm"))
    one = max(asyncio.run(many(1, f"one{n}")) for n in range(3))
    all_at_once = max(asyncio.run(many(runs, f"many{n}-")) for n in range(3))
    store.close()
    print(f"    {one:.0f} and {all_at_once:.0f} records a second", file=sys.stderr)
    return all_at_once / one


@contextmanager
def slow_disk() -> Generator[None]:
    """Every commit sleeps for ``DISK_S`` instead of waiting for the disk: in C, without the GIL."""
    connect, lib = sqlite3.connect, ctypes.CDLL(_sqlite3.__file__)
    sleep = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p)

    def slow(*args: Any, **settings: Any) -> sqlite3.Connection:
        db: sqlite3.Connection = connect(*args, **settings)
        handle = ctypes.c_void_p.from_address(id(db) + object.__basicsize__)  # what a connection holds first
        lib.sqlite3_commit_hook(handle, sleep, ctypes.c_void_p(int(DISK_S * 1e6)))
        return db

    with mock.patch.object(sqlite3, "connect", slow):
        yield


def flush_s(folder: Path) -> float:
    """The time this disk takes to make 4 KB durable, in seconds."""
    took: list[float] = []
    with (folder / "flush").open("wb", buffering=0) as file:
        for _ in range(50):
            file.write(bytes(4096))
            begun = time.perf_counter()
            os.fdatasync(file.fileno())
            took.append(time.perf_counter() - begun)
    return median(took)


def best(work: Callable[[], Any], rounds: int = 5) -> tuple[Any, float]:
    """The result of some work, and its least CPU time in seconds."""
    took, came = list[float](), None
    for _ in range(rounds):
        begun = time.process_time()
        came = work()
        took.append(time.process_time() - begun)
    return came, min(took)


WAITING = 20
"""Runs that wait for an approval."""


def mac_costs(folder: Path) -> tuple[float, float, float]:
    """The time of MACs, in us: to write a record's, a row's at each append, and to check a record's."""
    store = SqliteStore(folder / "macs.db", synchronous="normal")
    asyncio.run(run_stored(store, 250, "macs"))
    records, head, keyring = (
        asyncio.run(store.records("macs")),
        asyncio.run(store.head("macs")),
        Keyring(b"of the benchmark"),
    )
    store.close()
    assert head is not None
    sealed = resealed(records, RecordSealer(keyring.current))
    count = len(records)
    written = best(lambda: resealed(records, RecordSealer(keyring.current)), 15)[1]
    hashed = best(lambda: resealed(records, RecordSealer(None)), 15)[1]
    _, rows = best(
        lambda: [
            seal_row(keyring, head_row(1, "macs", 1, "me", record.seq, record.hash, "running")) for record in records
        ],
        15,
    )
    checked = best(lambda: check_macs(sealed, MacVerifier(keyring)), 15)[1]
    return (written - hashed) / count * 1e6, rows / count * 1e6, checked / count * 1e6


def bytes_an_approval(folder: Path) -> float:
    """The bytes that a file grows by for each character more in an argument that waits for approval."""
    sizes: dict[int, int] = {}
    for chars in (1000, 9000):
        store = SqliteStore(folder / f"waiting{chars}.db", synchronous="normal")
        waits = tool(requires_approval=True)(echo.function)
        one = Agent(TalkingModel(1, chars), tools=[waits], guardrails=LIMITS, host=Host(store=store))

        async def ask(one: Agent = one) -> None:
            for n in range(WAITING):
                await one.run("go", run_id=f"w{n}")

        asyncio.run(ask())
        store.close()
        sizes[chars] = (folder / f"waiting{chars}.db").stat().st_size
    return (sizes[9000] - sizes[1000]) / WAITING / 8000


def encoding_costs(folder: Path) -> tuple[float, float]:
    """The time to encode and to decode the records of a commit, in us."""
    store = SqliteStore(folder / "encoded.db", synchronous="normal")
    asyncio.run(run_stored(store, 250, "encoded", chars=SHORT))
    records = asyncio.run(store.records("encoded"))
    store.close()
    made = list(commits(records))
    rows, encoded = best(lambda: [row for commit in made for row in encode_commit(commit)], 15)
    _, decoded = best(lambda: decode_rows(rows, GENESIS_HASH), 15)
    return encoded / len(made) * 1e6, decoded / len(made) * 1e6


def resealed(records: Sequence[SealedRecord], sealer: RecordSealer) -> list[SealedRecord]:
    made, last = list[SealedRecord](), GENESIS_HASH
    for record in records:
        made.append(sealer.seal(record.seq, record.body, last, record.hidden))
        last = made[-1].hash
    return made


def check_macs(records: Sequence[SealedRecord], verifier: MacVerifier) -> None:
    for record in records:
        verifier.verify_record(record, "transition")


class Resumed(TalkingModel):
    """A model of a run that is left after some steps, and that notes when the run has gone on to its next move."""

    def __init__(self, steps: int, waits: bool) -> None:
        super().__init__(steps, LEFT_CHARS)
        self.waits = waits
        self.moved_at = 0.0
        self.left = False

    def answer(self, last: str) -> Reply:
        if self.left:
            self.move()
            return Reply(Message.assistant("done"))
        reply = super().answer(last)
        if reply.message.tool_calls or not self.waits:
            return reply
        return Reply(Message.assistant("", (ToolCall("p", "pay", {"amount": 1}),)), FinishReason.TOOL_CALLS)

    def move(self) -> None:
        self.moved_at = self.moved_at or time.perf_counter()


LEFT_CHARS = 100
"""The size of the texts of a run that is left and resumed: what counts is how many there are."""


def next_move_s(folder: Path, steps: int, *, waits: bool, rounds: int = ROUNDS) -> float:
    """Seconds from resuming a run of so many steps to its next move, in the middle.

    It has left its older messages out. One that waits runs the tool that is approved; one that was cut off calls its
    model.
    """
    left = folder / f"left-{steps}-{waits}.db"

    async def resume(path: Path, *, begin: bool) -> float:
        model = Resumed(steps, waits)

        @tool(requires_approval=True)
        def pay(amount: int) -> str:
            """Pay."""
            model.move()
            return "paid"

        async with SqliteStore(path, synchronous="normal") as store:
            host, policy = (
                Host(store=store, secret=b"of the benchmark"),
                KeepLast(turns=1, replies=5, max_compactions=10**6),
            )
            one = Agent(model, tools=[echo, pay], history=policy, guardrails=LIMITS, host=host)
            if begin:
                run = one.run("go", run_id="r")
                while not run.finished and run.run_state.turns < steps:
                    await run.step()
                await (run if waits else hand_over(run))
                return 0.0
            await store.head("r")  # the file is open
            model.left, begun = True, time.perf_counter()
            await one.resume("r", Allow() if waits else None)
            return model.moved_at - begun

    asyncio.run(resume(left, begin=True))
    times: list[float] = []
    for n in range(rounds):
        copied = shutil.copy(left, folder / f"resumed-{n}.db")
        times.append(asyncio.run(resume(Path(copied), begin=False)))
        Path(copied).unlink()
    return median(times)


_BOUND = re.compile(r"(<|<=|>=) ([\d.]+)")
_HOLDS: dict[str, Callable[[float, float], bool]] = {"<": operator.lt, "<=": operator.le, ">=": operator.ge}


def verdict(value: float, wanted: str) -> str:
    """Whether a figure meets its bound, in a word; empty if it has none."""
    bound = _BOUND.fullmatch(wanted)
    return "" if bound is None else "met" if _HOLDS[bound[1]](value, float(bound[2])) else "MISSED"


def main() -> int:
    """Measure everything once and print it as a table; returns the exit code, 1 if a bound was missed."""
    missed = False

    def tell(what: str, value: float, wanted: str) -> None:
        nonlocal missed
        met = verdict(value, wanted)
        missed = missed or met == "MISSED"
        print(f"{what:<66} {value:>10.2f}   {wanted:<8}{met}".rstrip(), flush=True)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        measure(folder, tell)
    return int(missed)


def measure(folder: Path, report: Callable[[str, float, str], None]) -> None:
    record, row, check = mac_costs(folder)
    report("the MAC of a record, us", record, "<= 2")
    report("the MAC of a run's row, us for each append", row, "-")
    report(
        f"MACs a record: written, checked, and a row's for {RECORDS_AN_APPEND} records, us",
        record + check + row / RECORDS_AN_APPEND,
        "<= 5",
    )
    early, _ = bytes_a_step(folder, 10, 50)
    late, part = bytes_a_step(folder, 500, 1000)
    report("bytes a step, steps 500 to 1000 against 10 to 50", late / early, "1.0")
    report("bytes a step against its text", part, "<= 2.5")
    for chars in (SHORT, LONG):
        a_step, part = bytes_a_step(folder, 100, 500, chars)
        report(f"the same for {2 * chars} characters of text ({a_step:.0f} bytes)", part, "<= 2.5")
    report("bytes that a character of a waiting argument takes", bytes_an_approval(folder), "<= 1.1")
    encoded, decoded = encoding_costs(folder)
    report("encoding the records of a commit, us", encoded, "<= 15")
    report("decoding them, us", decoded, "-")
    flush = f"{flush_s(folder) * 1000:.1f} ms"
    slow = f"a disk of {DISK_S * 1000:.0f} ms more"
    report("a stored run against one by hand, NORMAL", compare_stored_with_by_hand(folder, "normal"), "<= 3.5")
    report(f"a stored run against one by hand, FULL ({flush})", compare_stored_with_by_hand(folder, "full"), "<= 1.5")
    in_thread = compare_stored_with_by_hand(folder, "full", in_thread=True)
    report(f"the same, by hand in a thread ({flush})", in_thread, "<= 1.3")
    with slow_disk():
        report(f"the same, {slow}", compare_stored_with_by_hand(folder, "full", rounds=2), "<= 1.5")
    store = SqliteStore(folder / "long.db", synchronous="normal")
    asyncio.run(run_stored(store, 10, "warm"))
    cpu = time.process_time
    short = min(asyncio.run(run_stored(store, 10, f"short{n}", cpu)) for n in range(40)) / 10
    long = min(asyncio.run(run_stored(store, 1000, f"long{n}", cpu)) for n in range(5)) / 1000
    report("time a step in a run of 1000 against one of 10, stored", long / short, "<= 1.2")
    report(f"128 runs at once against one, durable records a second ({flush})", group_commit(folder, 128, 10), ">= 20")
    with slow_disk():
        report(f"the same, {slow}", group_commit(folder, 128, 10), ">= 20")
    asyncio.run(run_stored(store, 1250, "big"))
    rows, read = best(lambda: asyncio.run(store.records("big")))
    head = asyncio.run(store.head("big"))
    _, checked = best(lambda: verify("big", rows, head))
    _, restored = best(lambda: rehydrate(rows))
    store.close()
    for what, waits in (("that waits for an approval", True), ("that was cut off", False)):
        short, long = (next_move_s(folder, steps, waits=waits) for steps in (100, 10_000))
        report(f"resuming a run {what}, to its next move, ms", long * 1000, "-")
        report("the same after 10,000 steps against 100", long / short, "<= 1.5")
    report("verify, thousands of records a second", len(rows) / checked / 1000, ">= 50")
    report(
        "loading 10,000 records (read, verify, fold), seconds",
        (read + checked + restored) / len(rows) * 10_000,
        "< 0.3",
    )


if __name__ == "__main__":
    sys.exit(main())
