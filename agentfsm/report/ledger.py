"""What a run's journal says, as data: its moves and their guards, human decisions, transcript, failures, costs.

The journal may be tampered with, redacted in part, or of a run that has not ended: a record that cannot be read is
named in ``problems``, and everything else is still there. Nothing is verified here; ``agentfsm.journal.verification``
does that.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

from agentfsm.journal.records import UNREADABLE, Record, Redacted, SealedRecord, read_record
from agentfsm.journal.rehydrate import RehydratedRun
from agentfsm.loop.quorum import APPROVING_REPLIES, Actor
from agentfsm.loop.reducer import GIVEN_UP_TEXT
from agentfsm.loop.stored_table import StoredTable, read_table

Data = dict[str, Any]

REDACTED_TEXT = "(redacted)"
"""What is shown in place of a redacted value."""

_ANSWERS = {"0": "no", "e": "raised"}


class TriedGuard(NamedTuple):
    """A guard that was evaluated, and its answer: ``no``, ``held``, or ``raised`` for one that raised an error."""

    name: str
    answer: str


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """One move of a run.

    Attributes:
        number: Its number among the moves of the run, from 1.
        seq: Its record's sequence number.
        time: When, in seconds since the epoch.
        source: The state that it left.
        target: The state that it led to.
        guard: The guard that held, or ``otherwise``.
        tried: Every guard that was evaluated, in order, with its answer; the last one held.
        outcome: The kind of outcome on which it was made, such as ``replied``.
        summary: What the outcome says: calls, results, an answer.
        failure: The kind and the explanation of the failure that was detected, or an empty string.
        action: What the recovery policy chose, with its back-off; an empty string elsewhere.
        budgets: What it spent or refilled: each counter with what is left of it, None for one without a limit.
        ends: How it ended the run; an empty string for a move that did not.
        seconds: How long the effect took, or None if the journal does not say.
        hash: The record's hash, 64 hex digits.
        redacted: Whether a value of its record was redacted.
    """

    number: int
    seq: int
    time: float
    source: str
    target: str
    guard: str
    tried: tuple[TriedGuard, ...]
    outcome: str
    summary: str
    failure: str
    action: str
    budgets: tuple[tuple[str, int | None], ...]
    ends: str
    seconds: float | None
    hash: str
    redacted: bool

    @property
    def transition(self) -> str:
        """The id of its transition."""
        return f"{self.source}.{self.guard}"

    @property
    def did_not_hold(self) -> tuple[str, ...]:
        """The guards that did not hold, in order."""
        return tuple(each.name for each in self.tried if each.answer == "no")


@dataclass(frozen=True, slots=True)
class HumanDecision:
    """What a person answered to a request of the run.

    Attributes:
        seq: The sequence number of the record with the answer.
        time: When, in seconds since the epoch.
        kind: What was requested: ``approval``, ``question``, ``limit`` or ``in_doubt``.
        question: The question.
        tool: The tool that it is about, or an empty string.
        arguments: The arguments of the tool call as they were requested, as JSON; empty without a tool.
        answer: ``allow``, ``deny``, ``edit``, ``text``, ``ran``, ``did_not_run`` or ``give_up``.
        text: The reason or the text of the answer; for ``edit``, the new arguments as JSON.
        by: Who answered, or an empty string if the journal does not say.
        verified: Whether the host vouched for who it is.
        rule: Who had to answer, and how many.
        requested_seq: The sequence number of the record with the request.
        requested_hash: The hash of that record, 64 hex digits.
        call_id: The id of the tool call.
        result: The result of the tool call afterwards; an empty string if it did not run, or after a vote that was not
            the last one.
        asked_in: The move that led to the request: its guard says why somebody was asked.
        decided_in: The move that was made on the answer.
        vote: Which of the approvals it was that the call needed, as in ``vote 1 of 2``; empty unless it needed several.
    """

    seq: int
    time: float
    kind: str
    question: str
    tool: str
    arguments: str
    answer: str
    text: str
    by: str
    verified: bool
    rule: str
    requested_seq: int
    requested_hash: str
    call_id: str = ""
    result: str = ""
    asked_in: LedgerRow | None = None
    decided_in: LedgerRow | None = None
    vote: str = ""

    @property
    def is_counted(self) -> bool:
        """Whether it was counted as one of several votes, and the run waited for more."""
        return self.decided_in is not None and self.decided_in.source == self.decided_in.target

    @property
    def came_to(self) -> str:
        """What came of it, in a few words; for a call that ran, its result."""
        outcome = self.result or ("has not run" if self.tool else "")
        return "; ".join(filter(None, (self.vote, "the run waited for more" if self.is_counted else outcome)))


@dataclass(frozen=True, slots=True)
class TranscriptEntry:
    """One message of a run, in the order of the journal.

    Attributes:
        seq: The sequence number of its record.
        role: ``user``, ``assistant``, ``tool``, ``system`` or ``person``.
        name: The model or the tool, or an empty string.
        text: The text.
        calls: The tool calls of a reply, each a name and its arguments as JSON.
        failed: Whether it is the result of a call that failed.
        images: The number of images and files that it has.
        run_id: The run of the sub-agent whose result it is, or an empty string.
    """

    seq: int
    role: str
    name: str
    text: str
    calls: tuple[tuple[str, str], ...] = ()
    failed: bool = False
    images: int = 0
    run_id: str = ""


class FailureEntry(NamedTuple):
    """A failure that the run met: where, of which kind, what it says, what was done about it, and where that led."""

    seq: int
    state: str
    kind: str
    explanation: str
    action: str


@dataclass(frozen=True, slots=True)
class CostLine:
    """What the calls of one model, or the sub-agents of one tool, used.

    Attributes:
        name: The model, or the tool.
        calls: The number of calls.
        input_tokens: Tokens sent.
        output_tokens: Tokens received.
        cost_usd: USD.
    """

    name: str
    calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float = 0.0

    def plus(self, usage: Mapping[str, Any]) -> CostLine:
        """The line with one more call."""
        return CostLine(
            self.name,
            self.calls + 1,
            self.input_tokens + int(usage.get("input_tokens", 0)),
            self.output_tokens + int(usage.get("output_tokens", 0)),
            self.cost_usd + float(usage.get("cost_usd", 0)),
        )


@dataclass(frozen=True, slots=True)
class RunLedger:
    """A run as its journal has it.

    Attributes:
        run_id: The run.
        records: Its records, decoded; without those that cannot be read.
        asked: What the user asked for.
        requester: Who asked, or an empty string.
        caller: The run that called it as a sub-agent, or an empty string.
        forked_from: The run that it was forked from and the record there, or an empty string.
        status: ``running``, ``suspended`` or ``finished``.
        state: The state that it is in.
        ending: How it ended (``completed``, ``partial``, ...), or an empty string.
        answer: The last answer of the model, or an empty string.
        waiting_for: The request that it waits for, or an empty string.
        started: When it started, in seconds since the epoch.
        ended: When its last record was written.
        table: The pinned table of its graph, with its name and fingerprint.
        moves: Its moves.
        decisions: What people answered.
        transcript: Its messages.
        failures: The failures it met.
        costs: What it cost, by model.
        redactions: What was deleted: the record, the field, and who requested it.
        problems: What could not be read, one line each.
        last_seq: The sequence number of its last record.
        last_hash: The hash of that record, 64 hex digits.
    """

    run_id: str
    records: tuple[Record, ...] = ()
    asked: str = ""
    requester: str = ""
    caller: str = ""
    forked_from: str = ""
    status: str = "running"
    state: str = ""
    ending: str = ""
    answer: str = ""
    waiting_for: str = ""
    started: float = 0.0
    ended: float = 0.0
    table: Mapping[str, Any] = field(default_factory=dict[str, Any])
    moves: tuple[LedgerRow, ...] = ()
    decisions: tuple[HumanDecision, ...] = ()
    transcript: tuple[TranscriptEntry, ...] = ()
    failures: tuple[FailureEntry, ...] = ()
    costs: tuple[CostLine, ...] = ()
    redactions: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    last_seq: int = 0
    last_hash: str = ""

    @property
    def cost(self) -> str:
        """What its model calls cost, in words; an empty string if there were none that say so."""
        usd = sum(line.cost_usd for line in self.costs)
        tokens = sum(line.input_tokens + line.output_tokens for line in self.costs)
        if usd:
            return f"{usd:.4f} USD, {tokens:,} tokens"
        return f"{tokens:,} tokens without a price" if tokens else ""


def read_ledger(run_id: str, sealed: Sequence[SealedRecord]) -> RunLedger:
    """What the journal of a run says.

    Args:
        run_id: The run.
        sealed: Its records, as the store keeps them.
    """
    reader = LedgerReader(run_id)
    for row in sealed:
        reader.add(row)
    return reader.ledger()


class LedgerReader:
    """Reads a journal record by record: what it says so far is there after each of them.

    Attributes:
        moves: Its moves so far.
        records: Its records so far, decoded; without those that cannot be read.
        rehydrated: The run itself after them; None once a record could not be applied, as a redacted one cannot.
    """

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.records: list[Record] = []
        self.problems: list[str] = []
        self.moves: list[LedgerRow] = []
        self.decisions: list[HumanDecision] = []
        self.transcript: list[TranscriptEntry] = []
        self.failures: list[FailureEntry] = []
        self.costs: dict[str, CostLine] = {}
        self.redactions: list[str] = []
        self.graph: Data = {}
        self.table: StoredTable | None = None
        self.rehydrated: RehydratedRun | None = RehydratedRun()
        self.counters: dict[str, int] = {}
        self.status, self.state, self.ending = "running", "", ""
        self.asked = self.requester = self.caller = self.forked_from = ""
        self.request: tuple[Data, Record] | None = None  # the last request for a person, and its record
        self.parked: LedgerRow | None = None  # the move that led to it; later votes are about the same
        self.model = ""  # of the last call
        self.results: dict[str, Data] = {}  # of calls since the last move, by effect id
        self.last_seq, self.last_hash = 0, ""

    def add(self, row: SealedRecord) -> None:
        """Read the next record; one that cannot be read is noted in ``problems``."""
        self.last_seq, self.last_hash = row.seq, row.hash
        try:
            record = read_record(row, self.run_id)
            self.records.append(record)
            self._rehydrate(row)
            self._read(record)
        except UNREADABLE:
            self.problems.append(f"record {row.seq} is not a valid record")

    def ledger(self) -> RunLedger:
        """Everything that was collected."""
        answers = [e.text for e in self.transcript if e.role == "assistant" and e.text and not e.calls]
        waiting = self.request[0] if self.status == "suspended" and self.request is not None else None
        about = "" if waiting is None else f" {text_of(waiting.get('tool', ''))} {json_of(waiting.get('arguments'))}"
        return RunLedger(
            run_id=self.run_id,
            records=tuple(self.records),
            asked=self.asked,
            requester=self.requester,
            caller=self.caller,
            forked_from=self.forked_from,
            status=self.status,
            state=self.state,
            ending=self.ending,
            answer=answers[-1] if answers else "",
            waiting_for="" if waiting is None else f"{text_of(waiting.get('question', ''))}{about}".strip(),
            started=self.records[0].time if self.records else 0.0,
            ended=self.records[-1].time if self.records else 0.0,
            table=self.graph,
            moves=tuple(self.moves),
            decisions=tuple(self.decisions),
            transcript=tuple(self.transcript),
            failures=tuple(self.failures),
            costs=tuple(self.costs.values()),
            redactions=tuple(self.redactions),
            problems=tuple(self.problems),
            last_seq=self.last_seq,
            last_hash=self.last_hash,
        )

    def _rehydrate(self, row: SealedRecord) -> None:
        """Fold in a record, for the counters; after one that cannot be, nothing is known of them."""
        try:
            if self.rehydrated is not None:
                self.rehydrated.add(row)
        except UNREADABLE:
            self.rehydrated = None

    def _read(self, record: Record) -> None:
        """Read one record."""
        data = record.data
        match record.kind:
            case "run.created" | "run.forked":
                self._begin(record)
            case "transition":
                self._move(record)
            case "effect.intent":
                if "." not in data["eid"]:
                    self.model = text_of(data["name"])
            case "effect.result":
                self._result(record)
            case "run.suspended":
                self.status, self.request = "suspended", (data["waiting"], record)
            case "run.resumed":
                self.status = "running"
            case "run.migrated":
                self._pin(data)
                self.state = text_of(data["to"])
            case "run.finished":
                self.status = "finished"
            case "redaction":
                by = f", requested by {text_of(data['by'])}" if data.get("by") else ""
                self.redactions.append(f"record {data['of']}, {text_of(data.get('field', ''))}{by}")
            case _:
                pass

    def _begin(self, record: Record) -> None:
        data = record.data
        self._pin(data)
        if "requester" in data:
            self.requester = _actor(data["requester"])[0]
        parent = data.get("parent", {})
        if "seq" in parent:
            self.forked_from = f"{text_of(parent.get('run', ''))} at record {parent['seq']}"
        elif "run" in parent:
            self.caller = text_of(parent["run"])
        hidden = data.get("state")
        state: Data = {} if isinstance(hidden, Redacted) else hidden or {}
        table = self.table
        self.state = text_of(state.get("state") or ("" if table is None else table.initial.name))
        self._budgets()
        messages: Any = data.get("messages", state.get("messages", ()))
        if isinstance(messages, Redacted) or isinstance(hidden, Redacted):
            self.asked = REDACTED_TEXT
            return
        for message in messages:
            self._message(record.seq, message)
        users = [e.text for e in self.transcript if e.role == "user"]
        self.asked = users[-1] if users else ""

    def _pin(self, data: Data) -> None:
        self.graph = data["graph"]
        self.table = read_table(self.graph)

    def _message(self, seq: int, message: Any, name: str = "") -> None:
        if isinstance(message, Redacted):
            self.transcript.append(TranscriptEntry(seq, "user", "", REDACTED_TEXT))
            return
        calls = tuple((text_of(c["name"]), json_of(c.get("arguments"))) for c in message.get("tool_calls", ()))
        self.transcript.append(
            TranscriptEntry(
                seq,
                text_of(message["role"]),
                name or text_of(message.get("name") or ""),
                text_of(message.get("content") or ""),
                calls,
                bool(message.get("is_error")),
                len(message.get("images", ())) + len(message.get("files", ())),
            )
        )

    def _result(self, record: Record) -> None:
        out = record.data["out"]
        self.results[record.data["eid"]] = out
        if "call_id" not in out:  # a model call of the effect of a user-defined state
            if "reply" in out:
                self._message(record.seq, out["reply"]["message"], self.model)
                self._charge(self.model, out["reply"].get("usage"))
            return
        entry = self._note_result(record.seq, out)
        if out.get("usage"):
            self._charge(entry.name, out["usage"])
        call_id = text_of(out["call_id"])
        for place, decision in enumerate(self.decisions):
            if decision.call_id == call_id and not decision.result and not decision.is_counted:
                self.decisions[place] = replace(decision, result=f"{out.get('status', 'done')}: {entry.text}")

    def _note_result(self, seq: int, out: Data) -> TranscriptEntry:
        """Add the result of a call to the transcript."""
        failed = out.get("status", "done") != "done"
        images = len(out.get("images", ()))
        name = text_of(out.get("name", ""))
        text, sub_run = text_of(out.get("content") or ""), text_of(out.get("run_id") or "")
        entry = TranscriptEntry(seq, "tool", name, text, (), failed, images, sub_run)
        self.transcript.append(entry)
        return entry

    def _charge(self, name: str, usage: Mapping[str, Any] | None) -> None:
        if usage:
            self.costs[name] = self.costs.get(name, CostLine(name)).plus(usage)

    def _move(self, record: Record) -> None:
        data, table = record.data, self.table
        if table is None:
            raise ValueError("it comes before the first record of a run")
        row = table.rows[data["transition"]]
        source = str(row.source)
        names = [r.name for r in table.rows.values() if r.source == source]
        before = zip(names, data["tried"][:-1], strict=False)  # the last answer is the row's, even if a guard raised
        tried = (*(TriedGuard(name, _ANSWERS[digit]) for name, digit in before), TriedGuard(row.name, "held"))
        ((kind, outcome),) = data["out"].items()
        failure = data.get("failure") or data.get("aborted")
        failure_text = "" if failure is None else f"{failure['kind']}: {text_of(failure.get('explanation', ''))}"
        action = _action(outcome) if kind == "recovered" else ""
        self.moves.append(
            LedgerRow(
                number=len(self.moves) + 1,
                seq=record.seq,
                time=record.time,
                source=source,
                target=str(row.target),
                guard=row.name,
                tried=tried,
                outcome=str(kind),
                summary=self._summary(kind, outcome),
                failure=failure_text,
                action=action,
                budgets=self._budgets(),
                ends=row.ends,
                seconds=data["us"][0] / 1e6 if "us" in data else None,
                hash=record.hash,
                redacted=record.redacted,
            )
        )
        self.state, self.ending, self.results = str(row.target), row.ends, {}
        if failure is not None:
            explanation = text_of(failure.get("explanation", ""))
            self.failures.append(FailureEntry(record.seq, source, str(failure["kind"]), explanation, ""))
        if action and self.failures:
            self.failures[-1] = self.failures[-1]._replace(action=f"{action}: to {row.target}")
        self._fold(kind, outcome, record)

    def _budgets(self) -> tuple[tuple[str, int | None], ...]:
        """The counters that have changed since the last move, with what is left of them."""
        if self.rehydrated is None:
            return ()
        run, before = self.rehydrated.run, self.counters
        self.counters = dict(run.counters)
        limits: dict[str, Any] = dict(self.graph.get("counters", ()))
        changed: list[tuple[str, int | None]] = []
        for name, spent in self.counters.items():
            if spent != before.get(name, 0):
                limit = limits.get(name)
                most = limit if isinstance(limit, int) else getattr(run.guardrails, str(limit), None)
                changed.append((name, None if most is None else max(0, most - spent)))
        return tuple(changed)

    def _fold(self, kind: str, outcome: Any, record: Record) -> None:
        """Add what the outcome of a move says to transcript, costs and decisions."""
        if kind == "replied":
            reply = outcome["reply"]
            self._message(record.seq, reply["message"], text_of(reply.get("model") or self.model))
            self._charge(text_of(reply.get("model") or self.model), reply.get("usage") or {"input_tokens": 0})
        elif kind == "ran":  # calls that did run have a record of their own
            for result in outcome.get("results", ()):
                if isinstance(result, dict):
                    self._note_result(record.seq, cast("Data", result))
        elif kind == "parked":
            self.parked = self.moves[-1]
        elif kind == "answered":
            self._answer(outcome["reply"], record)

    def _answer(self, reply: Data, record: Record) -> None:
        request, asked = self.request or ({}, record)
        text = json_of(reply["arguments"]) if "arguments" in reply else text_of(reply.get("text", ""))
        by, verified = _actor(reply["actor"]) if "actor" in reply else (text_of(reply.get("by", "")), False)
        tool = text_of(request.get("tool", ""))
        self.decisions.append(
            HumanDecision(
                record.seq,
                record.time,
                text_of(request.get("kind", "")),
                text_of(request.get("question", "")),
                tool,
                json_of(request.get("arguments")) if tool else "",
                str(reply["kind"]),
                text,
                by,
                verified,
                _rule(request.get("quorum")),
                asked.seq,
                asked.hash,
                text_of(request.get("call_id") or ""),
                asked_in=self.parked,
                decided_in=self.moves[-1],
                vote=_vote(request.get("quorum"), str(reply["kind"])),
            )
        )
        if reply.get("text"):
            self.transcript.append(TranscriptEntry(record.seq, "person", by, text))
        if request.get("kind") == "in_doubt" and reply["kind"] in ("ran", "give_up"):
            # the answer is the result, and no other record has it
            result = text if reply["kind"] == "ran" else GIVEN_UP_TEXT
            self.transcript.append(TranscriptEntry(record.seq, "tool", tool, result, failed=reply["kind"] != "ran"))

    def _summary(self, kind: str, outcome: Any) -> str:
        """What an outcome says, in a few words."""
        match kind:
            case "replied":
                message = outcome["reply"]["message"]
                calls = ", ".join(f"{text_of(c['name'])} {json_of(c.get('arguments'))}" for c in _calls(message))
                return "; ".join(each for each in (text_of(_content(message)), calls) if each)
            case "ran":
                return "; ".join(self._describe_result(each) for each in outcome.get("results", ()))
            case "parked":
                request = outcome["waiting"]
                tool = f": {text_of(request['tool'])} {json_of(request.get('arguments'))}" if "tool" in request else ""
                return f"{text_of(request['kind'])}{tool or ': ' + text_of(request.get('question', ''))}"
            case "answered":
                reply = outcome["reply"]
                return " ".join([str(reply["kind"]), *(text_of(reply[n]) for n in ("text",) if reply.get(n))])
            case "call_failed":
                return "the model call failed"
            case _:
                return ""

    def _describe_result(self, result: Any) -> str:
        out = self.results.get(result) if isinstance(result, str) else result
        if not isinstance(out, dict):
            return text_of(result)
        found = cast("Data", out)
        return f"{text_of(found.get('name', ''))} {found.get('status', 'done')}: {text_of(found.get('content') or '')}"


def _calls(message: Any) -> Iterator[Data]:
    return iter(() if isinstance(message, Redacted) else message.get("tool_calls", ()))


def _content(message: Any) -> Any:
    return message if isinstance(message, Redacted) else message.get("content") or ""


def _action(outcome: Data) -> str:
    backoff = f", after {outcome['backoff_s']:g} s" if outcome.get("backoff_s") else ""
    return f"{text_of(outcome.get('action', ''))}{backoff}"


def _actor(actor: Data) -> tuple[str, bool]:
    """Who somebody is, and whether the host vouched for it."""
    verified = bool(actor.get("verified"))
    roles = tuple(text_of(role) for role in actor.get("roles", ()))
    return str(Actor(text_of(actor["id"]), roles, verified=True)), verified


def _rule(quorum: Any) -> str:
    """The rule of a request about who may answer."""
    if not isinstance(quorum, dict):
        return ""
    rule: Data = cast("Data", quorum).get("rule", {})
    roles = f" by {' or '.join(text_of(role) for role in rule['roles'])}" if rule.get("roles") else ""
    other = ", not by the requester" if rule.get("not_requester") else ""
    return f"{rule.get('n', 1)} approval{'s' * (rule.get('n', 1) != 1)}{roles}{other}"


def _vote(quorum: Any, answer: str) -> str:
    """Which of the approvals that a call needs an answer is; empty for a denial, or if one is enough."""
    if not isinstance(quorum, dict) or answer not in APPROVING_REPLIES:
        return ""
    data = cast("Data", quorum)
    needed = data.get("rule", {}).get("n", 1)
    return f"vote {len(data.get('votes', ())) + 1} of {needed}" if needed > 1 else ""


def text_of(value: Any) -> str:
    """A value of a record as text; a redacted one says so."""
    if isinstance(value, Redacted):
        return REDACTED_TEXT
    return value if isinstance(value, str) else json_of(value)


def json_of(value: Any) -> str:
    """A value of a record as JSON; an empty string for none."""
    if isinstance(value, Redacted):
        return REDACTED_TEXT
    return "" if value is None else json.dumps(value, ensure_ascii=False, default=str)
