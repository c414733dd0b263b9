"""One call of a tool whose server may ask a person or a model during the call.

How a server asks depends on the protocol. Since 2026-07-28 the call comes back with its questions and a state of the
server's, and is made again with the answers: it can wait for days, in any process. Before, the server sends a request
of its own while the call runs. Then the call continues in this process until the person has answered. In another one it
is gone, and nobody knows what it has done: an idempotent tool is called again and gets the answers so far, and about
any other the person is asked.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import BaseModel, Field

from agentfsm.errors import HumanReplyError, ToolError
from agentfsm.integrations.mcp.forms import Answer, Form, read_reply
from agentfsm.integrations.mcp.sampling import Samples
from agentfsm.integrations.mcp.session import RefusedError
from agentfsm.loop.human_input import HumanReply, PendingRequest, SuspendedSubRun
from agentfsm.loop.messages import ToolCall, ToolResult, Usage
from agentfsm.loop.reducer import GIVEN_UP_TEXT
from agentfsm.loop.state import CallState
from agentfsm.runtime.delegation import CallingRun, Sampler
from agentfsm.runtime.tools import Tool

if TYPE_CHECKING:
    from mcp import Client, types
    from mcp.shared.dispatcher import ProgressFnT

_INVALID_PARAMS = -32602
"""The code of an error for a state that the server does not know, ``mcp.types.INVALID_PARAMS``."""

MAX_ROUNDS = 20
"""The maximum number of times that a call may come back with questions."""

STATE_ONLY_WAIT_S = 0.25
"""Seconds before a call that came back without questions is made again."""


Progress = Callable[[str, float | None], None]
"""Says how far a call is: with a text, and a fraction from 0 to 1 if that is known."""


def progress_callback(report: Progress | None) -> ProgressFnT | None:
    """What passes on what a server says about the progress of a call."""
    if report is None:
        return None

    async def pass_on(progress: float, total: float | None, message: str | None) -> None:
        fraction = min(max(progress / total, 0.0), 1.0) if total and total > 0 else None
        report(message or f"{progress:g}" + ("" if total is None else f" of {total:g}"), fraction)

    return pass_on


class Round(BaseModel):
    """The questions with which a call came back.

    Attributes:
        state: What the server wants to get back with the answers.
        requests: Its questions, as JSON data.
        responses: The answers so far, as JSON data.
    """

    state: str | None = None
    requests: dict[str, Any] = Field(default_factory=dict)
    responses: dict[str, Any] = Field(default_factory=dict)


class AskedForm(BaseModel):
    """A call that waits for a person, as it is stored.

    Attributes:
        form: What the person is asked.
        answers: What was answered during this call so far: the key of each form, and the answer.
        attempt: Which attempt at the call it is.
        round: The questions that it is part of, if the call came back with them; else None.
        in_doubt: Whether the call is gone, and the person is asked whether it ran.
        charged: The runs that answered what the server asked a model so far.
    """

    form: Form
    answers: list[tuple[str, Answer]] = Field(default_factory=list[tuple[str, Answer]])
    attempt: int = 1
    round: Round | None = None
    in_doubt: bool = False
    charged: list[str] = Field(default_factory=list[str])


class ServerChannel(Protocol):
    """The server, as a call sees it."""

    @property
    def label(self) -> str:
        """The name of the server."""
        ...

    @property
    def parked(self) -> dict[str, Flight]:
        """The calls that wait for a person in this process."""
        ...

    def own(self, task: asyncio.Task[Any]) -> None:
        """Wait for a task, at the latest when the server is closed."""
        ...

    async def exchange(
        self, flight: Flight, name: str, request: Callable[[Client], Any]
    ) -> types.CallToolResult | types.InputRequiredResult:
        """Send the call; what the server asks during the call goes to its flight."""
        ...

    async def finish(self, call: ToolCall, name: str, result: types.CallToolResult) -> ToolResult:
        """The result of the call as a tool's result."""
        ...


@dataclass(eq=False)
class Flight:
    """A call that is being made, in a task of its own.

    Attributes:
        name: The tool at the server.
        arguments: The arguments.
        answers: What was answered so far.
        known: The answers of an earlier attempt that were not asked for yet.
        asked: What a person is asked now, or None.
        came_back: How many times it came back with questions.
        is_over: Whether the server does not work on it any more.
        report: Says how far it is; None if nobody follows the run.
        samples: Answers what the server asks a model; None if it may not, or while the call waits for a person.
        sampled: How many times it asked each thing.
    """

    name: str
    arguments: dict[str, Any]
    answers: list[tuple[str, Answer]] = field(default_factory=list[tuple[str, Answer]])
    known: list[tuple[str, Answer]] = field(default_factory=list[tuple[str, Answer]])
    asked: AskedForm | None = None
    came_back: int = 0
    is_over: bool = False
    report: Progress | None = None
    samples: Samples | None = None
    sampled: Counter[str] = field(default_factory=Counter[str])
    task: asyncio.Task[types.CallToolResult] | None = None
    _question: asyncio.Event = field(default_factory=asyncio.Event)
    _answer: asyncio.Future[Answer] | None = None
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    def start(self, channel: ServerChannel, seed: Round | None) -> None:
        """Begin it."""
        self.task = asyncio.create_task(self._drive(channel, seed), name=f"agentfsm-mcp-call-{self.name}")
        channel.own(self.task)

    async def _drive(self, channel: ServerChannel, seed: Round | None) -> types.CallToolResult:
        """Make the call, again and again with the answers to its questions."""
        from mcp import types

        pending = seed
        for _ in range(MAX_ROUNDS):
            responses: Any = None
            if pending is not None and pending.requests:
                responses = await self._responses(pending)
            state = None if pending is None else pending.state
            request = partial(self._send, responses=responses, state=state)
            result = await channel.exchange(self, self.name, request)
            if not isinstance(result, types.InputRequiredResult):
                return result
            self.came_back += 1
            requests = {key: _dump(each) for key, each in (result.input_requests or {}).items()}
            pending = Round(state=result.request_state, requests=requests)
            if not requests:
                await asyncio.sleep(STATE_ONLY_WAIT_S)
        raise ToolError(f"the MCP server {channel.label!r} came back with questions more than {MAX_ROUNDS} times")

    def _send(self, client: Client, responses: Any, state: str | None) -> Awaitable[Any]:
        return client.session.call_tool(
            self.name,
            self.arguments,
            progress_callback=progress_callback(self._report if self.report is not None else None),
            input_responses=responses,
            request_state=state,
            allow_input_required=True,
        )

    def _report(self, message: str, fraction: float | None) -> None:
        if self.report is not None:  # that of the run as it continues now
            self.report(message, fraction)

    async def _responses(self, pending: Round) -> dict[str, Any]:
        from mcp import types

        for key, data in pending.requests.items():
            if key in pending.responses:
                continue
            match data.get("method"):
                case "elicitation/create":
                    request = types.ElicitRequest.model_validate(data, by_name=False)
                    answer = await self.ask(Form.from_sdk(request.params), pending)
                    pending.responses[key] = answer.model_dump(exclude_none=True)
                case "sampling/createMessage" if self.samples is not None:
                    sampling = types.CreateMessageRequest.model_validate(data, by_name=False)
                    pending.responses[key] = _dump(await self.sample(sampling.params))
                case method:
                    raise ToolError(f"the MCP server asks for {method}, which this program does not allow")
        kinds: dict[str, type[BaseModel]] = {
            "elicitation/create": types.ElicitResult,
            "sampling/createMessage": types.CreateMessageResult,
        }
        return {
            key: kinds[pending.requests[key]["method"]].model_validate(each) for key, each in pending.responses.items()
        }

    async def sample(self, params: Any) -> Any:
        """A model's reply to what the server asks.

        Raises:
            ToolError: There is none; the text says why.
        """
        if self.samples is None:
            raise ToolError("a model can be asked only while the call is being made, and this program allows it")
        return await self.samples.answer(params, self.sampled)

    async def ask(self, form: Form, pending: Round | None) -> Answer:
        """A person's answer. It is awaited as long as this process lives.

        Raises:
            ToolError: The form cannot be shown.
        """
        if form.problem:
            raise ToolError(f"the MCP server asks for something that cannot be answered: {form.problem}")
        async with self._turn:  # one question at a time
            answer = next((each for key, each in self.known if key == form.key), None)
            if answer is not None:
                self.known.remove((form.key, answer))
            else:
                self._answer = asyncio.get_running_loop().create_future()
                self.asked = AskedForm(form=form, answers=list(self.answers), round=pending)
                self._question.set()
                answer = await self._answer
            self.answers.append((form.key, answer))
            return answer

    def answer(self, answer: Answer) -> None:
        """Answer what is asked."""
        self.asked = None
        self._question.clear()
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(answer)

    async def outcome(self) -> types.CallToolResult | AskedForm:
        """The result, or what a person must be asked first. A cancellation cancels the call."""
        task = self.task
        if task is None:
            raise RuntimeError("the call was not started")
        asked = asyncio.ensure_future(self._question.wait())
        try:
            await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            task.cancel()
            raise
        finally:
            asked.cancel()
        return await task if task.done() or self.asked is None else self.asked


@dataclass(frozen=True, eq=False)
class RemoteCalls:
    """Answers the calls of one tool, as a tool's ``delegate``.

    Attributes:
        channel: The server.
        name: The tool's name at the server.
        idempotent: Whether the tool may be called again.
        sampler: Answers what the server asks a model; None if it may not ask.
    """

    channel: ServerChannel
    name: str
    idempotent: bool
    sampler: Sampler | None = None

    @property
    def is_agent(self) -> bool:
        """False."""
        return False

    @property
    def tools(self) -> Mapping[str, Tool]:
        """None: a server's tools call no others."""
        return MappingProxyType({})

    @property
    def toolsets(self) -> tuple[Any, ...]:
        """None."""
        return ()

    @property
    def hooks(self) -> Mapping[str, tuple[Any, ...]]:
        """None."""
        return MappingProxyType({})

    def __call__(self, caller: CallingRun, call_state: CallState, attempt: int) -> RemoteCall:
        """One call."""
        return RemoteCall(self, caller, call_state, attempt)

    async def left_runs(self, caller: CallingRun) -> Sequence[str]:
        """The runs that were answering what the server asks a model."""
        return () if self.sampler is None else await self.sampler.left_runs(caller)

    async def dismiss(self, caller: CallingRun, run_id: str, reason: str) -> None:
        """End one of those."""
        if self.sampler is not None:
            await self.sampler.dismiss(caller, run_id, reason)

    async def check_reply(self, caller: CallingRun, held: SuspendedSubRun, reply: HumanReply) -> None:
        """Check that a reply fits what the server asks.

        Raises:
            HumanReplyError: It does not; the error names each field.
        """
        waiting = AskedForm.model_validate_json(held.record)
        if not waiting.in_doubt:
            read_reply(waiting.form, reply)


class RemoteCall:
    """One call of a tool whose server may ask a person or a model during the call."""

    def __init__(self, calls: RemoteCalls, caller: CallingRun, call_state: CallState, attempt: int) -> None:
        self._calls, self._channel = calls, calls.channel
        self._call_state, self._attempt, self._report = call_state, attempt, caller.progress
        held = call_state.held
        self._waiting = None if held is None else AskedForm.model_validate_json(held.record)
        self._samples: Samples | None = None
        if calls.sampler is not None:
            charged = () if self._waiting is None else self._waiting.charged
            self._samples = Samples(calls.sampler, caller, call_state, charged)

    @property
    def run_id(self) -> str:
        """Empty: no single run answers it."""
        return ""

    @property
    def usage(self) -> Usage:
        """What models have used for it since it was started or resumed."""
        return Usage() if self._samples is None else self._samples.usage

    @property
    def model_calls(self) -> int:
        """How many model calls were made for it since then."""
        return 0 if self._samples is None else self._samples.model_calls

    @property
    def secrets(self) -> tuple[Any, ...]:
        """Nothing: what the server was given as secret is known (``Tool.known_secrets``)."""
        return ()

    async def execute(self, arguments: Mapping[str, Any]) -> ToolResult | SuspendedSubRun:
        """The call's result; or what is suspended, if the server asks a person.

        Raises:
            ToolError: The call failed.
        """
        try:
            return await self._execute(arguments)
        finally:
            if self._samples is not None:
                await self._samples.end()

    async def _execute(self, arguments: Mapping[str, Any]) -> ToolResult | SuspendedSubRun:
        call, held, reply = self._call_state.call, self._call_state.held, self._call_state.answer
        waiting = self._waiting
        if held is None or reply is None or waiting is None:
            return await self._continue(self._begin(dict(arguments), []))
        if waiting.in_doubt:
            if reply.kind == "ran":
                return ToolResult(call.id, call.name, reply.text)
            if reply.kind == "give_up":
                return ToolResult(call.id, call.name, GIVEN_UP_TEXT, status="skipped")
            return await self._continue(self._begin(dict(arguments), waiting.answers))
        try:
            answer = read_reply(waiting.form, reply)
        except HumanReplyError as error:  # the reply was checked when it was given
            raise ToolError(str(error)) from error
        flight = self._channel.parked.pop(held.suspension, None)
        if flight is not None and flight.task is not None and not flight.task.done():
            flight.report, flight.samples = self._report, self._samples
            flight.answer(answer)
            return await self._continue(flight)
        answers = [*waiting.answers, (waiting.form.key, answer)]
        if waiting.round is not None:
            flight = self._begin(dict(arguments), answers[-1:], waiting.round, waiting.answers)
            try:
                return await self._continue(flight)
            except RefusedError as error:
                if flight.came_back or error.code != _INVALID_PARAMS:
                    raise
        # A call that came back with questions is not in flight. If the server has forgotten it, it starts over.
        decided = self._attempt > waiting.attempt + 1  # an attempt was cut off, and a person said that it did not run
        if waiting.round is not None or self._calls.idempotent or decided:
            return await self._continue(self._begin(dict(arguments), answers))
        return self._doubt(waiting.model_copy(update={"answers": answers, "in_doubt": True}))

    def _begin(
        self,
        arguments: dict[str, Any],
        known: list[tuple[str, Answer]],
        seed: Round | None = None,
        answers: list[tuple[str, Answer]] | None = None,
    ) -> Flight:
        flight = Flight(self._calls.name, arguments, list(answers or ()), list(known), report=self._report)
        flight.samples = self._samples
        flight.start(self._channel, seed)
        return flight

    async def _continue(self, flight: Flight) -> ToolResult | SuspendedSubRun:
        try:
            outcome = await flight.outcome()
        finally:
            flight.samples = None
        if not isinstance(outcome, AskedForm):
            return await self._channel.finish(self._call_state.call, self._calls.name, outcome)
        suspension = secrets.token_hex(8)
        self._channel.parked[suspension] = flight
        form, call = outcome.form, self._call_state.call
        request = PendingRequest(
            "form",
            form.message,
            form.describe(self._channel.label),
            form.choices,
            call.id,
            call.name,
            call.arguments,
            asker=call.name,
            form=form.fields,
        )
        return self._suspended(suspension, request, outcome)

    def _doubt(self, waiting: AskedForm) -> SuspendedSubRun:
        call = self._call_state.call
        request = PendingRequest(
            "in_doubt",
            f"The call of {call.name!r} was cut off while it waited for your answer, and it is not known what it has "
            "done. Did it run?",
            f"If it did not run, it is called again, and the MCP server {self._channel.label!r} gets your answer.",
            call_id=call.id,
            tool=call.name,
            arguments=call.arguments,
            asker=call.name,
        )
        return self._suspended(secrets.token_hex(8), request, waiting)

    def _suspended(self, suspension: str, request: PendingRequest, waiting: AskedForm) -> SuspendedSubRun:
        charged = [] if self._samples is None else self._samples.charged
        stored = waiting.model_copy(update={"attempt": self._attempt, "charged": charged})
        record = stored.model_dump_json()
        return SuspendedSubRun(
            "", request, suspension, record, self.usage, self.usage, self.model_calls, self.model_calls
        )


def _dump(request: Any) -> Any:
    return request.model_dump(by_alias=True, mode="json", exclude_none=True)
