"""Recorded runs: what each simulated run asked, did and ended with, in a committed file that later runs must equal.

With ``pytest --fsm-record`` the fixture ``fsm_record`` writes the file; without it, the fixture compares.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import unified_diff
from pathlib import Path as FilePath
from typing import Any, cast

from agentfsm.errors import ConfigurationError
from agentfsm.journal.records import read_records
from agentfsm.loop.events import Ending
from agentfsm.loop.failures import Failure
from agentfsm.loop.messages import Message
from agentfsm.loop.model import ModelRequest
from agentfsm.loop.state import RunState
from agentfsm.machine.engine import Decision
from agentfsm.runtime.result import RunResult
from agentfsm.testing.path_runner import PathRun
from agentfsm.testing.simulation import SIMULATION_RUN_ID, SimulationResult

ENVELOPE_FIELDS = ("run_id", "seq", "time", "suspension_record", "digest", "secrets")
"""What an outcome has besides what happened; the digest depends on the record's random id."""

UNRECORDED_FIELDS = ("kind", "id", "seq", "ts")
"""What a record of the journal has besides: its random id, and what stands in its line or follows from others."""

MOVE_FIELDS = ("epoch", "out", "to", "transition", "tried")
"""What the record of a move has besides: what the lines of moves, requests, tools and the transcript say."""


def run_lines(result: SimulationResult | RunResult[Any]) -> list[str]:
    """What a run did, as lines: its moves, the requests to the model, tools, endings, counters, time, and journal.

    A request is given by the messages that the one before did not have. Of a run that was not simulated, there are its
    moves, ending, transcript, counters and usage.
    """
    if isinstance(result, RunResult):
        return [*(_move_line(decision) for decision in result.decisions), *_result_lines([result])]
    return [
        *(_move_line(decision) for decision in result.decisions),
        *_request_lines(result.requests),
        *(
            f"tool: {each.tool} {_json(dict(each.arguments))}{' approved' if each.approved else ''}"
            for each in result.started_tools
        ),
        *_result_lines(result.run_results),
        f"seconds: {result.clock.time() - type(result.clock)().time():g}, of which slept: {sum(result.clock.slept):g}",
        *_journal_lines(result),
    ]


def _journal_lines(result: SimulationResult) -> Iterator[str]:
    """What the journal keeps besides what differs each time, and what other lines say of the moves."""
    records, _ = result.read_journal()
    for record in read_records(records, SIMULATION_RUN_ID)[1:]:  # the first says what agent it is
        known = (*UNRECORDED_FIELDS, *MOVE_FIELDS) if record.kind == "transition" else UNRECORDED_FIELDS
        if kept := {name: _without_digests(value) for name, value in record.data.items() if name not in known}:
            yield f"journal: {record.seq} {record.kind} {_json(kept)}"


def _without_digests(value: Any) -> Any:
    if isinstance(value, Mapping):
        fields = cast("Mapping[str, Any]", value)
        return {name: _without_digests(each) for name, each in fields.items() if name not in ("hash", "tool_digest")}
    return value


def _result_lines(results: Sequence[RunResult[Any]]) -> list[str]:
    final = results[-1:]
    return [
        *(
            line
            for each in results
            for line in (f"outcome: {_outcome_text(each.outcome)}", _counted_line(each.run_state))
        ),
        *(f"transcript: {_message_text(message)}" for each in final for message in each.messages),
        *(
            f"counter: {name} {value}"
            for each in final
            for name, value in sorted(each.run_state.counters.items())
            if value
        ),
        *(f"usage: {each.usage}" for each in final),
    ]


def _counted_line(run: RunState) -> str:
    """What decides how a run continues, and is not a counter of its table."""
    attempts = {kind.value: number for kind, number in run.failure_attempts.items()}
    error = (*run.error_key, run.error_streak) if run.error_key is not None else None
    return f"counted: {_json({'attempts': attempts, 'denials': run.denials, 'error': error})}"


def _move_line(decision: Decision) -> str:
    found = decision.guard_result
    raised = [name for name, answer in decision.tried if answer is None]
    why = f": {found.kind}: {found.explanation} {_json(found.metadata)}" if isinstance(found, Failure) else ""
    return f"move: {decision.transition}{why}" + (f" (raised: {', '.join(raised)})" if raised else "")


def _request_lines(requests: Sequence[ModelRequest]) -> Iterator[str]:
    before: list[str] = []
    for number, request in enumerate(requests, 1):
        messages = [_message_text(each) for each in request.messages]
        same = next((i for i, (a, b) in enumerate(zip(before, messages, strict=False)) if a != b), None)
        kept = min(len(before), len(messages)) if same is None else same
        tools = ", ".join(tool.name for tool in request.tools)
        yield f"request {number}: {kept} messages as before; tools: {tools}; at most {request.max_output_tokens} tokens"
        yield from (f"request {number}: {text}" for text in messages[kept:])
        before = messages


def _message_text(message: Message) -> str:
    calls = [f"{each.name} {_json(dict(each.arguments))}" for each in message.tool_calls]
    about = "".join((f" {message.name}" if message.name else "", " error" if message.is_error else ""))
    return f"{message.role}{about}: {' + '.join([_json(message.content), *calls])}"


def _outcome_text(outcome: Ending) -> str:
    names = [each.name for each in fields(outcome) if each.name not in ENVELOPE_FIELDS]
    return f"{type(outcome).__name__} {_json({name: getattr(outcome, name) for name in names})}"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)


@dataclass
class RecordedRuns:
    """What a file of recorded runs holds.

    Attributes:
        runs: By the name of a test, the lines of each of its runs, in order.
    """

    runs: dict[str, list[list[str]]] = field(default_factory=dict[str, list[list[str]]])

    @classmethod
    def read(cls, file: FilePath) -> RecordedRuns:
        """What a file holds; nothing if there is no file.

        Raises:
            ConfigurationError: The file does not hold recorded runs.
        """
        if not file.exists():
            return cls()
        try:
            data: dict[str, list[list[str]]] = json.loads(file.read_text(encoding="utf-8"))
            return cls({name: [[str(line) for line in run] for run in runs] for name, runs in data.items()})
        except (AttributeError, TypeError, ValueError) as error:
            raise ConfigurationError(f"{file} does not hold recorded runs: {error!r}") from error

    def write(self, file: FilePath) -> None:
        """Write the file: one line of a run to a line, the tests in alphabetical order."""
        file.write_text(json.dumps(self.runs, indent=0, sort_keys=True) + "\n", encoding="ascii")


class RunRecorder:
    """The runs of one test, to write or to compare."""

    def __init__(self, name: str, recorded: RecordedRuns, advice: str, *, record: bool) -> None:
        self._name, self._recorded, self._advice, self._record = name, recorded, advice, record
        self._expected = [] if record else recorded.runs.get(name, [])
        self._runs: list[list[str]] = []
        self._failed = False

    def __call__(self, run: PathRun | SimulationResult | RunResult[Any]) -> None:
        """Record a run, or compare it with the one recorded.

        Raises:
            AssertionError: The run differs from the recorded one, or none is recorded.
        """
        lines = run_lines(run.simulation_result if isinstance(run, PathRun) else run)
        self._runs.append(lines)
        if self._record:
            self._recorded.runs[self._name] = self._runs
            return
        number = len(self._runs)
        if number > len(self._expected):
            self._failed = True
            raise AssertionError(f"run {number} of {self._name} is not recorded; {self._advice}")
        if lines != (expected := self._expected[number - 1]):
            self._failed = True
            shown = "\n".join(unified_diff(expected, lines, "recorded", "now", n=1, lineterm=""))
            raise AssertionError(f"run {number} of {self._name} differs:\n{shown}\nIf this is right, {self._advice}")

    def finish(self) -> None:
        """Assert that every recorded run was compared, unless one of them differed.

        Raises:
            AssertionError: The test made fewer runs than are recorded.
        """
        if not self._failed and len(self._runs) < len(self._expected):
            made, recorded = len(self._runs), len(self._expected)
            raise AssertionError(f"{self._name} made {made} runs, and {recorded} are recorded; {self._advice}")
