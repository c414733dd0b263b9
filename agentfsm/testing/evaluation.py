"""Evaluation: how often a model does its tasks with an agent, where its runs went, and what they cost."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from pydantic import TypeAdapter, ValidationError

from agentfsm.agent import Agent
from agentfsm.errors import AgentfsmError, ConfigurationError
from agentfsm.loop.events import Handoff, PartialRunSummary, RunAborted, RunCancelled, RunCompleted, UserInputRequested
from agentfsm.loop.failures import Failure
from agentfsm.loop.messages import Message, Role, Usage
from agentfsm.machine.engine import Decision
from agentfsm.runtime.preparation import normalize_history
from agentfsm.runtime.result import RunResult

if TYPE_CHECKING:
    from agentfsm.loop.human_input import HumanInput

CaseEnding = Literal["completed", "handed_off", "partial", "cancelled", "aborted", "suspended"]
"""How a run ends; ``suspended`` if it waits for a person."""

_ENDINGS: Mapping[type, CaseEnding] = {
    RunCompleted: "completed",
    Handoff: "handed_off",
    PartialRunSummary: "partial",
    RunCancelled: "cancelled",
    RunAborted: "aborted",
    UserInputRequested: "suspended",
}

MAX_REPLIES = 20
"""How often a run that asks again and again is answered."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A task for an agent, and what a good run of it is. What is not given is not looked at.

    Attributes:
        name: Its name in reports.
        prompt: The user's message.
        ending: How a good run ends.
        tools: Tools that a good run calls, whatever their order and number.
        contains: Texts that the answer contains, in any case.
        check: Looks at the result of a run that is good so far: returns None or True if it is, else False or what is
            wrong with it; an ``AssertionError`` is wrong, too.
        message_history: Earlier messages of the conversation.
        replies: The person's reply to each kind of request (``approval``, ``question``, ``limit``, ``in_doubt``). A run
            that asks something else stays suspended.
    """

    name: str
    prompt: str
    ending: CaseEnding = "completed"
    tools: tuple[str, ...] = ()
    contains: tuple[str, ...] = ()
    check: Callable[[RunResult[Any]], bool | str | None] | None = None
    message_history: Sequence[Message] = ()
    replies: Mapping[str, HumanInput] = field(default_factory=dict[str, "HumanInput"])


@dataclass(frozen=True, kw_only=True)
class CaseAttempt:
    """One run of a case.

    Attributes:
        case: The name of the case.
        problem: What is wrong with the run; empty if it is good.
        ending: How the run ended; empty if an error kept it from running.
        failures: How often it met each kind of failure.
        rows: How often it took each row.
        usage: Tokens and USD.
        run_id: The run.
    """

    case: str
    problem: str
    ending: CaseEnding | Literal[""]
    failures: Counter[str]
    rows: Counter[str]
    usage: Usage
    run_id: str

    @property
    def passed(self) -> bool:
        """Whether the run is good."""
        return not self.problem


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """All attempts of an evaluation, in the order of the cases.

    Attributes:
        model: The name of the model.
        attempts: The runs.
    """

    model: str
    attempts: tuple[CaseAttempt, ...]

    @property
    def by_case(self) -> dict[str, list[CaseAttempt]]:
        """The runs of each case."""
        found: dict[str, list[CaseAttempt]] = {}
        for attempt in self.attempts:
            found.setdefault(attempt.case, []).append(attempt)
        return found

    @property
    def pass_rate(self) -> float:
        """The share of good runs, from 0 to 1."""
        return sum(attempt.passed for attempt in self.attempts) / len(self.attempts)

    @property
    def failures(self) -> Counter[str]:
        """How often the runs met each kind of failure."""
        return sum((attempt.failures for attempt in self.attempts), Counter[str]())

    @property
    def rows(self) -> Counter[str]:
        """How often the runs took each row."""
        return sum((attempt.rows for attempt in self.attempts), Counter[str]())

    @property
    def usage(self) -> Usage:
        """Tokens and USD of all runs."""
        return sum((attempt.usage for attempt in self.attempts), Usage())

    def to_dict(self) -> dict[str, Any]:
        """The evaluation as JSON data."""
        return {
            "model": self.model,
            "pass_rate": self.pass_rate,
            "cost_usd": self.usage.known_cost_usd,
            "unpriced_tokens": self.usage.unpriced_tokens,
            "tokens": self.usage.total_tokens,
            "failures": dict(self.failures.most_common()),
            "rows": dict(self.rows.most_common()),
            "attempts": [
                {
                    "case": attempt.case,
                    "passed": attempt.passed,
                    "problem": attempt.problem,
                    "ending": attempt.ending,
                    "failures": dict(attempt.failures),
                    "rows": dict(attempt.rows),
                    "cost_usd": attempt.usage.known_cost_usd,
                    "tokens": attempt.usage.total_tokens,
                    "run_id": attempt.run_id,
                }
                for attempt in self.attempts
            ],
        }


async def evaluate(
    agent: Agent[Any, Any],
    cases: Iterable[Case],
    *,
    repeat: int = 1,
    concurrency: int = 4,
    on_attempt: Callable[[CaseAttempt], None] | None = None,
) -> Evaluation:
    """Run each case some times, and judge the runs.

    Args:
        agent: The agent. Its tools really run.
        cases: The cases.
        repeat: How often each is run.
        concurrency: How many runs there are at a time.
        on_attempt: Called after each run, in the order in which they end.

    Raises:
        ConfigurationError: There is no case, two have one name, or a number is less than 1.
    """
    chosen = list(cases)
    names = Counter(case.name for case in chosen)
    if not chosen or min(repeat, concurrency) < 1:
        raise ConfigurationError("an evaluation needs a case, and repeat and concurrency of at least 1")
    if twice := [name for name, count in names.items() if count > 1]:
        raise ConfigurationError(f"two cases are called {twice[0]!r}: give each a name of its own")
    slots = asyncio.Semaphore(concurrency)

    async def attempt(case: Case) -> CaseAttempt:
        async with slots:
            done = await _attempt(agent, case)
        if on_attempt is not None:
            on_attempt(done)
        return done

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(attempt(case)) for case in chosen for _ in range(repeat)]
    return Evaluation(model=agent.model.name, attempts=tuple(task.result() for task in tasks))


async def _attempt(agent: Agent[Any, Any], case: Case) -> CaseAttempt:
    decisions: list[Decision] = []
    try:
        result = await agent.run(case.prompt, message_history=case.message_history)
        decisions += result.decisions
        for _ in range(MAX_REPLIES):
            waits = result.outcome
            if not isinstance(waits, UserInputRequested) or waits.kind not in case.replies:
                break
            result = await agent.resume(waits.suspension_record, case.replies[waits.kind])
            decisions += result.decisions
    except AgentfsmError as error:
        problem = f"{type(error).__name__}: {error}"
        return CaseAttempt(
            case=case.name, problem=problem, ending="", failures=Counter(), rows=Counter(), usage=Usage(), run_id=""
        )
    return CaseAttempt(
        case=case.name,
        problem=_problem(case, result),
        ending=_ENDINGS[type(result.outcome)],
        failures=Counter(str(d.guard_result.kind) for d in decisions if isinstance(d.guard_result, Failure)),
        rows=Counter(d.transition.id for d in decisions),
        usage=result.usage,
        run_id=result.run_id,
    )


def _problem(case: Case, result: RunResult[Any]) -> str:
    """What is wrong with a run, or an empty string."""
    ending = _ENDINGS[type(result.outcome)]
    if ending != case.ending:
        return f"{_shown(ending)}, not {_shown(case.ending)}: {_reason(result)}"
    own = result.messages[len(normalize_history(case.message_history)) :]
    called = {call.name for message in own for call in message.tool_calls}
    if missing := [name for name in case.tools if name not in called]:
        return f"{', '.join(missing)} was not called"
    answer = "" if result.output is None else str(result.output)
    if lacking := [text for text in case.contains if text.casefold() not in answer.casefold()]:
        return f"the answer does not contain {lacking[0]!r}"
    if case.check is None:
        return ""
    try:
        verdict = case.check(result)
    except AssertionError as error:
        return f"check: {error}" if str(error) else "the check failed"
    if isinstance(verdict, str):
        return verdict
    return "the check failed" if verdict is False else ""


def _shown(ending: str) -> str:
    return ending.replace("_", " ")


def _reason(result: RunResult[Any]) -> str:
    match result.outcome:
        case Handoff(rationale=text) | PartialRunSummary(missing=text) | UserInputRequested(question=text):
            return text
        case RunCancelled(reason=text) | RunAborted(reason=text):
            return text
        case _:
            return "it has an answer"


def case_of_run(
    name: str,
    messages: Sequence[Message],
    ending: CaseEnding,
    replies: Mapping[str, str] | None = None,
    *,
    given: int = 1,
) -> dict[str, Any]:
    """A run as a case in JSON: a later run is as good if it ends so and calls the same tools.

    Args:
        name: The name of the case.
        messages: The run's transcript.
        ending: How it ended.
        replies: What people answered to each kind of request, as ``agentfsm resume`` takes it.
        given: How many of the messages the run was started with: the conversation so far, and the prompt.

    Raises:
        ConfigurationError: It was prompted with images or files, which a case has no place for, or with nothing.
    """
    asked = next((at for at in reversed(range(given)) if messages[at].role is Role.USER), None)
    if asked is None or messages[asked].attachments:
        what = "no prompt" if asked is None else "a prompt with images or files"
        raise ConfigurationError(f"the run has {what}, and the prompt of a case is a text")
    called = dict.fromkeys(call.name for message in messages[asked:] for call in message.tool_calls)
    case = {"name": name, "prompt": messages[asked].content, "ending": ending, "tools": list(called)}
    if history := normalize_history(messages[:asked]):  # a later run has the instructions of its own agent
        case["message_history"] = _MESSAGES.dump_python(history, mode="json", exclude_defaults=True)
    return {**case, "replies": dict(replies)} if replies else case


_MESSAGES: TypeAdapter[list[Message]] = TypeAdapter(list[Message])

_FIELDS = {"name", "prompt", "ending", "tools", "contains", "message_history", "replies"}


def read_cases(path: Path, parse_reply: Callable[[str, str], HumanInput]) -> list[Case]:
    """The cases of a file of JSON lines, each an object with the fields of ``Case`` except ``check``.

    Args:
        path: The file.
        parse_reply: Makes a reply of the kind of a request and a text.

    Raises:
        ConfigurationError: The file cannot be read, or a line is not a case; the message names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error
    return [
        _parse_case(line, f"{path}, line {number}", parse_reply) for number, line in enumerate(lines, 1) if line.strip()
    ]


def _parse_case(line: str, where: str, parse_reply: Callable[[str, str], HumanInput]) -> Case:
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise ConfigurationError(f"{where} is not valid JSON: {error}") from None
    data = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    if not all(isinstance(data.get(name), str) for name in ("name", "prompt")):
        raise ConfigurationError(f"{where} is not a case: it needs a name and a prompt")
    if unknown := sorted(data.keys() - _FIELDS):
        raise ConfigurationError(
            f"{where} has an unknown field {unknown[0]!r}; a case has {', '.join(sorted(_FIELDS))}"
        )
    ending = data.get("ending", "completed")
    if ending not in _ENDINGS.values():
        raise ConfigurationError(f"{where}: the ending is one of {', '.join(_ENDINGS.values())}, not {ending!r}")
    for name in ("tools", "contains"):
        if not _are_texts(data.get(name, [])):
            raise ConfigurationError(f"{where}: {name} is a list of texts")
    replies = data.get("replies", {})
    if not isinstance(replies, dict) or not _are_texts(list(cast("dict[str, Any]", replies).values())):
        raise ConfigurationError(f"{where}: replies is an object of texts, such as {{'approval': 'allow'}}")
    try:
        history = _MESSAGES.validate_python(data.get("message_history", []))
    except ValidationError as error:
        raise ConfigurationError(f"{where}: message_history is not a list of messages: {error}") from None
    return Case(
        name=data["name"],
        prompt=data["prompt"],
        ending=ending,
        tools=tuple(data.get("tools", [])),
        contains=tuple(data.get("contains", [])),
        message_history=history,
        replies={kind: parse_reply(kind, text) for kind, text in cast("dict[str, str]", replies).items()},
    )


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in cast("list[object]", value))
