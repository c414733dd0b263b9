"""Everything about each move of a run: prompt as sent, reply, calls, lessons, budgets, and the records themselves."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from agentfsm.journal.records import Record, Redacted, SealedRecord, is_kind
from agentfsm.loop.failures import Failure
from agentfsm.loop.guardrails import AgentGuardrails
from agentfsm.loop.messages import Message
from agentfsm.loop.prompts import render_messages
from agentfsm.loop.state import RunState
from agentfsm.report.ledger import LedgerReader, LedgerRow
from agentfsm.viewer.viewer_page import shown

Data = dict[str, Any]

SHOWN_MESSAGES = 8
"""How many of the last messages of a prompt are in the details of a step; there is a page for all of them."""


class SentPrompt(NamedTuple):
    """What a model was sent.

    Attributes:
        seq: The sequence number of the record of the call.
        messages: The messages; the reader of a run keeps no copies of a conversation.
        before: How many messages the prompt before had.
    """

    seq: int
    messages: Sequence[Message]
    before: int


class Remaining(NamedTuple):
    """What was left after a move.

    Attributes:
        counters: What was spent of each counter of the graph.
        model_calls: The model calls made.
        seconds: The active time.
        tokens: The tokens used.
        cost_usd: USD spent.
        limits: The limits.
        lessons: What later requests mention.
    """

    counters: Mapping[str, int]
    model_calls: int
    seconds: float
    tokens: int
    cost_usd: float
    limits: AgentGuardrails
    lessons: tuple[Failure, ...]


class StepReader:
    """Reads a journal record by record, and keeps what is shown of each move."""

    def __init__(self, run_id: str) -> None:
        self.ledger = LedgerReader(run_id)
        self.read_count = 0
        self._prompts: list[SentPrompt] = []
        self._left: list[Remaining | None] = []

    def add(self, rows: Sequence[SealedRecord]) -> None:
        """Read the next records."""
        ledger = self.ledger
        for row in rows:
            ledger.add(row)
            self.read_count += 1
            run = None if ledger.rehydrated is None else ledger.rehydrated.run
            if run is not None and is_kind(row, "effect.intent"):
                self._note_prompt(row, run)
            while len(self._left) < len(ledger.moves):
                self._left.append(None if run is None else _remaining(run))

    def _note_prompt(self, row: SealedRecord, run: RunState) -> None:
        if "." in str(json.loads(row.body)["eid"]):  # a call of a tool, or of the effect of a user-defined state
            return
        before = len(self._prompts[-1].messages) if self._prompts else 0
        self._prompts.append(SentPrompt(row.seq, render_messages(run), before))

    def prompt(self, number: int) -> SentPrompt | None:
        """The prompt of a move, counted from 1; None if it called no model, or the journal was redacted."""
        first, last = self._range(number)
        return next((each for each in self._prompts if first <= each.seq <= last), None)

    def _range(self, number: int) -> tuple[int, int]:
        """The records of a move: those after the move before, up to its own; the last move has those after it."""
        moves = self.ledger.moves
        first = moves[number - 2].seq + 1 if number > 1 else 1
        return first, moves[number - 1].seq if number < len(moves) else self.ledger.last_seq

    def step(self, number: int) -> Data:
        """What is shown of a move, counted from 1."""
        first, last = self._range(number)
        records = self._records(first, last)
        left, prompt = self._left[number - 1], self.prompt(number)
        return {
            "move": move_json(self.ledger.moves[number - 1]),
            "first": first,
            "last": last,
            "prompt": None if prompt is None else prompt_json(prompt, max(0, len(prompt.messages) - SHOWN_MESSAGES)),
            "calls": _calls(records),
            **_outcome(records),
            "lessons": [] if left is None else [_failure_json(each) for each in left.lessons],
            "budgets": None if left is None else self._budgets(left),
            "records": [_record_json(record) for record in records],
        }

    def _records(self, first: int, last: int) -> Sequence[Record]:
        records = self.ledger.records
        start = bisect_right(records, first - 1, key=lambda record: record.seq)
        return records[start : bisect_right(records, last, key=lambda record: record.seq)]

    def _budgets(self, left: Remaining) -> list[Data]:
        """Each budget with what is used of it, and the limit, None for one without."""
        limits = left.limits
        declared: dict[str, Any] = dict(self.ledger.graph.get("counters", ()))
        rows: list[tuple[str, float, Any]] = [
            (name, spent, limit if isinstance(limit := declared.get(name), int) else getattr(limits, str(limit), None))
            for name, spent in left.counters.items()
        ]
        rows += [
            ("model calls", left.model_calls, limits.max_iterations),
            ("active seconds", round(left.seconds, 3), limits.max_execution_time_s),
            ("tokens", left.tokens, limits.max_tokens),
            ("USD", round(left.cost_usd, 6), limits.max_cost_usd),
        ]
        return [{"name": shown(name), "used": used, "limit": limit} for name, used, limit in rows]


def _remaining(run: RunState) -> Remaining:
    return Remaining(
        dict(run.counters),
        run.iterations,
        run.elapsed_s,
        run.usage.total_tokens,
        run.usage.cost_usd,
        run.guardrails,
        tuple(run.lessons_learned),
    )


def move_json(row: LedgerRow) -> Data:
    """A move as a row of the ledger shows it."""
    return {
        "number": row.number,
        "seq": row.seq,
        "time": row.time,
        "source": shown(row.source),
        "guard": shown(row.guard),
        "target": shown(row.target),
        "tried": [[shown(each.name), each.answer] for each in row.tried],
        "outcome": shown(row.outcome),
        "summary": shown(row.summary[:MAX_SUMMARY]),
        "failure": shown(row.failure[:MAX_SUMMARY]),
        "action": shown(row.action),
        "left": [[shown(name), left] for name, left in row.budgets],
        "ends": row.ends,
        "seconds": row.seconds,
        "hash": row.hash,
        "redacted": row.redacted,
    }


MAX_SUMMARY = 400
"""Characters of an outcome in a row; the details have all of it."""


def plain(value: Any) -> Any:
    """A value of a record as JSON, in which what was redacted is ``{"redacted": true}`` and texts are made visible."""
    match value:
        case Redacted():
            return {"redacted": True}
        case Mapping():
            return {shown(str(name)): plain(item) for name, item in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        case list() | tuple():
            return [plain(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
        case str():
            return shown(value)
        case int() | float() | None:
            return value
        case _:
            return shown(str(value))


def _record_json(record: Record) -> Data:
    """A record; of the graph that it may pin only the name and the fingerprint."""
    data = dict(record.data)
    if graph := _as_data(data.get("graph")):
        data["graph"] = {name: graph[name] for name in ("name", "fingerprint") if name in graph}
    return {
        "seq": record.seq,
        "kind": shown(record.kind),
        "time": record.time,
        "epoch": record.epoch,
        "hash": record.hash,
        "redacted": record.redacted,
        "data": plain(data),
    }


def prompt_json(prompt: SentPrompt, start: int = 0, stop: int | None = None) -> Data:
    """Some of the messages of a prompt."""
    messages = prompt.messages[start:stop]
    return {
        "seq": prompt.seq,
        "total": len(prompt.messages),
        "before": prompt.before,
        "start": start,
        "messages": [_message_json(each) for each in messages],
    }


def _message_json(message: Message) -> Data:
    return {
        "role": message.role.value,
        "name": shown(message.name or ""),
        "content": shown(message.content),
        "calls": [{"name": shown(call.name), "arguments": plain(call.arguments)} for call in message.tool_calls],
        "images": len(message.images),
        "failed": message.is_error,
    }


def _calls(records: Sequence[Record]) -> list[Data]:
    """The calls of tools among some records, with their results."""
    found: dict[str, Data] = {}
    for record in records:
        if record.kind == "effect.intent" and "." in str(record.data.get("eid", "")):
            data = record.data
            found[data["eid"]] = {
                "seq": record.seq,
                "name": plain(data.get("name")),
                "attempt": data.get("attempt", 1),
                "status": "no result",
                "arguments": plain(data.get("request", {}).get("arguments")),
            }
        elif record.kind == "effect.result":
            out = _as_data(record.data.get("out"))
            if "call_id" not in out:
                continue
            call = found.setdefault(record.data["eid"], {"seq": record.seq, "attempt": 1, "arguments": None})
            call |= {
                "name": plain(out.get("name")),
                "status": out.get("status", "done"),
                "result": plain(out.get("content") or ""),
                "error": plain(out.get("failure")),
                "run_id": plain(out.get("run_id") or ""),
                "images": len(out.get("images", ())),
                "usage": plain(out.get("usage")),
            }
    return list(found.values())


def _outcome(records: Sequence[Record]) -> Data:
    """What the transition among some records says: a reply, a person's answer, a recovery, a request, a failure."""
    nothing: Data = {}
    data = next((record.data for record in records if record.kind == "transition"), nothing)
    out = _as_data(data.get("out"))
    if len(out) != 1:
        return {}
    ((kind, value),) = out.items()
    found: Data = {"failure": plain(data.get("failure") or data.get("aborted"))}
    match kind:
        case "replied":
            reply = value["reply"]
            message = reply["message"]
            found["reply"] = {
                "model": plain(reply.get("model") or ""),
                "finish": plain(reply.get("finish_reason") or ""),
                "usage": plain(reply.get("usage")),
                "message": {"redacted": True} if isinstance(message, Redacted) else _reply_json(message),
            }
        case "answered":
            found["answer"] = plain(value["reply"])
        case "parked":
            found["request"] = plain(value["waiting"])
        case "recovered":
            found["recovery"] = plain(value)
        case _:
            pass
    return found


def _as_data(value: Any) -> Data:
    """A JSON object; an empty one for anything else."""
    return cast("Data", value) if isinstance(value, dict) else {}


def _reply_json(message: Data) -> Data:
    return {
        "role": plain(message.get("role")),
        "name": "",
        "content": plain(message.get("content") or ""),
        "calls": [
            {"name": plain(call.get("name")), "arguments": plain(call.get("arguments"))}
            for call in message.get("tool_calls", ())
        ],
        "images": 0,
        "failed": False,
    }


def _failure_json(failure: Failure) -> Data:
    return {"kind": failure.kind.value, "explanation": shown(failure.explanation)}
