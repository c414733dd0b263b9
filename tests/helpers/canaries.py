"""Runs full of secrets, in two processes: what they write and show goes to one folder, what tools got to another file.

    python -m tests.helpers.canaries begin FOLDER     each run, until it ends or waits for a person
    python -m tests.helpers.canaries resume FOLDER    in another process: the person answers, and the runs go on

``FOLDER/out`` gets whatever somebody may see: the store and its log, suspension records, exports, reports, spans, log
lines, pictures, and the ``repr`` and ``str`` of results, events, agents, hosts, models, errors and contexts.
``FOLDER/got.jsonl`` gets the arguments with which tools were called.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import hashlib
import json
import logging
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import BaseModel, SecretBytes, SecretStr

from agentfsm import (
    AbortRun,
    Actor,
    Agent,
    AgentGuardrails,
    Allow,
    Approval,
    AskApproval,
    DenyCall,
    Edit,
    Event,
    Failure,
    FailureKind,
    FileReplayGuard,
    HookContext,
    Host,
    Message,
    Reply,
    Runs,
    SkipCall,
    SqliteStore,
    ToolContext,
    ToolError,
    UserInputRequested,
    hook,
    observer,
    tool,
)
from agentfsm.errors import AgentfsmError, ProviderError
from agentfsm.integrations.mcp import MCPSettings, MCPTools
from agentfsm.integrations.otel import tracing
from agentfsm.loop.messages import FinishReason
from agentfsm.models import FallbackModel
from agentfsm.testing import FakeClock, ScriptedModel, call
from tests.helpers.model_clients import build_model

HOST_SECRET = b"the secret of the host, 32 bytes or more"
PLACES = (
    "environment: a key",
    "environment: a short password",
    "environment: a password in DATABASE_URL",
    "environment: a private key in PEM",
    "environment: a private key in a JSON file",
    "environment: a cookie",
    "host: a declared secret",
    "host: a short declared secret",
    "model: its key, in the body of an error",
    "model: the key of the second of two",
    "argument: secret",
    "argument: a secret number",
    "argument: inside a secret object",
    "argument: inside a secret list",
    "argument: SecretStr",
    "argument: SecretBytes in a dict",
    "argument: SecretStr in a model",
    "argument: SecretStr in a dataclass",
    "argument: SecretStr in a list in a model",
    "argument: a password by its JSON schema",
    "edit: a secret argument",
    "edit: inside a model",
    "votes: approved by two people",
    "sub-agent: a secret argument of its tool",
    "sub-agent: a secret of its caller",
    "MCP: a password by the server's schema",
    "MCP: a variable of the server",
    "result: SecretStr",
    "result: SecretStr in a model",
    "result: SecretBytes in a list of dataclasses",
    "result: SecretStr before a restart",
    "ending: SecretStr in the output",
    "history: a secret argument of an earlier run",
    "record: a secret argument in a suspension record",
    "record: a result in a suspension record",
    "answer: SecretStr in a structured answer",
    "answer: SecretStr in one that is not valid",
    "answer: SecretStr in one that is cut off",
    "envelope: a secret argument of a call",
    "signal: a secret argument in an edit that waits in the store",
    "signal: a variable in a cancellation that waits in the store",
)
"""Where each secret stands; further places only repeat them (texts, URLs, headers, errors, hooks, memory)."""


def canary(place: str) -> str:
    """The secret of a place; some have characters that are escaped in JSON, URLs and Python."""
    digest = hashlib.sha256(f"canary {place}".encode()).hexdigest()
    number = PLACES.index(place)
    if "number" in place:
        return str(10**11 + number * 7919 + int(digest[:8], 16))
    if "short" in place:
        return f"Q{digest[0]}#{digest[1]}z7"[:6]
    if "PEM" in place or "JSON file" in place:
        body = base64.b64encode(hashlib.sha512(digest.encode()).digest()).decode()
        return f"-----BEGIN PRIVATE KEY-----\n{body[:44]}\n{body[44:]}\n-----END PRIVATE KEY-----\n"
    if place.startswith("model"):
        return f"sk-{digest[:20]}"
    if "URL" in place or "MCP" in place:
        return f"pw%{digest[:14]}" if "URL" not in place else f"pw-{digest[:14]}"
    return f'k"{digest[:9]}/+ü{digest[9:18]}' if number % 3 == 0 else f"cn-{digest[:20]}"


def environment() -> dict[str, str]:
    """The variables of the processes."""
    return {
        "STRIPE_API_KEY": canary("environment: a key"),
        "DB_PASS": canary("environment: a short password") + "-93",
        "DATABASE_URL": f"postgres://app:{canary('environment: a password in DATABASE_URL')}@db.example:5432/x",
        "DEPLOY": canary("environment: a private key in PEM"),
        "SERVICE_CREDENTIALS": json.dumps({"type": "x", "key": canary("environment: a private key in a JSON file")}),
        "SHOP_TOKEN": canary("signal: a variable in a cancellation that waits in the store"),
        "SESSION_COOKIE": canary("environment: a cookie"),
    }


class Login(BaseModel):
    user: str
    password: SecretStr
    more: list[dict[str, list[SecretStr]]] = []


@dataclass
class Credentials:
    user: str
    token: SecretStr


class Key(BaseModel):
    name: str
    value: SecretStr


@dataclass
class Raw:
    value: SecretBytes


class World:
    """The tools, and where everything goes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, folder / "out"
        self.out.mkdir(exist_ok=True)
        self.shown: list[str] = []
        self.spans, self.provider = InMemorySpanExporter(), TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.spans))

    def got(self, **arguments: Any) -> None:
        def plain(value: Any) -> Any:
            if isinstance(value, SecretStr | SecretBytes):
                secret = value.get_secret_value()
                return secret.decode() if isinstance(secret, bytes) else secret
            if isinstance(value, BaseModel):
                return {name: plain(item) for name, item in vars(value).items()}
            if dataclasses.is_dataclass(value):
                return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
            if isinstance(value, dict):
                return {name: plain(item) for name, item in cast("dict[str, Any]", value).items()}
            return [*map(plain, value)] if isinstance(value, list) else value  # pyright: ignore[reportUnknownArgumentType]

        with (self.folder / "got.jsonl").open("a") as file:
            file.write(json.dumps(plain(arguments)) + "\n")

    def show(self, thing: object) -> None:
        """Keep what a program may print of a thing."""
        self.shown += [repr(thing), str(thing)]

    def tools(self) -> list[Any]:
        @tool(secret=["password", "pin", "account", "codes"], requires_approval=True)
        def enter(
            context: ToolContext,
            user: str,
            password: str,
            pin: int,
            account: dict[str, Any],
            codes: list[Any],
            token: SecretStr,
            raw: dict[str, SecretBytes],
            login: Login,
            credentials: Credentials,
            text: str,
        ) -> str:
            """Log in."""
            self.show(context)
            given = {**locals()}
            del given["self"], given["context"]
            self.got(**given)
            return f"logged in as {user} with {password}, {pin}, {json.dumps(account)} and {token.get_secret_value()}"

        @tool
        def echo(text: str) -> str:
            """Say it again."""
            return text

        @tool
        def fail(text: str, how: str) -> str:
            """Fail."""
            if how == "os":
                raise OSError(5, text, f"/tmp/{text}")
            raise ToolError(text, blockers=(text,)) if how == "tool" else ValueError({"at": text})

        @tool
        def report(text: str) -> Failure:
            """Report a failure."""
            return Failure(kind=FailureKind.tool_error, explanation=text, partial_data={"x": [text]})

        @tool
        def reveal(what: str) -> Any:
            """Return a secret."""
            value = canary(what)
            if what == "result: SecretStr in a model":
                return Key(name="k", value=SecretStr(value))
            if what == "result: SecretBytes in a list of dataclasses":
                return [Raw(SecretBytes(value.encode()))]
            return SecretStr(value)

        @tool
        def leak(what: str) -> str:
            """Return a secret as text."""
            return f"the value is {canary(what)}"

        @tool(secret=["password"], requires_approval=Approval(n=1))
        def open_door(password: str) -> str:
            """Open."""
            self.got(password=password)
            return f"opened with {password}"

        @tool(requires_approval=Approval(n=2))
        def open_safe(key: Key) -> str:
            """Open."""
            self.got(key=key)
            return f"opened with {key.value.get_secret_value()}"

        return [enter, echo, fail, report, reveal, leak, open_door, open_safe]

    def host(self, **more: Any) -> Host:
        secrets = [SecretStr(canary(place)) for place in ("host: a declared secret", "host: a short declared secret")]
        return Host(clock=FakeClock(), secret=HOST_SECRET, secrets=secrets, **more)

    def agent(self, host: Host, script: Any, **more: Any) -> Agent:
        def watch(event: Event) -> None:
            self.show(event)
            raise ValueError(canary("environment: a key"))

        model = script if hasattr(script, "reply") else ScriptedModel(script)
        traced = tracing(content=True, tracer_provider=self.provider)
        hooks: list[Any] = [*traced, observer(watch), *more.get("hooks", ())]
        settings: dict[str, Any] = {"tools": self.tools(), **more, "hooks": hooks}
        agent = Agent(model, host=host, **settings)
        self.shown += [repr(each) for each in (agent, host, model)]
        return agent

    async def finish(self, run: Any) -> Any:
        """The result of a run, after each of its events was shown."""
        try:
            result = await run
        except AgentfsmError as error:
            self.shown += ["".join(traceback.format_exception(error)), repr(error)]
            raise
        self.show(result)
        self.show(run)
        self.show(result.outcome)
        self.shown += [result.diagram(kind) for kind in ("svg", "mermaid", "text")]
        return result

    def save(self, name: str, text: str) -> None:
        (self.out / name).write_text(text)

    def close(self, part: str) -> None:
        self.save(f"shown-{part}.txt", "\n".join(self.shown))
        self.save(f"spans-{part}.txt", "\n".join(span.to_json() for span in self.spans.get_finished_spans()))


def known_texts() -> list[str]:
    """Texts with the secrets of the environment and of the host, as they may stand in an honest text."""
    url = environment()["DATABASE_URL"]
    values = [
        *(v for k, v in environment().items() if k not in ("DATABASE_URL", "SERVICE_CREDENTIALS")),
        canary("environment: a private key in a JSON file"),
        canary("host: a declared secret"),
        canary("host: a short declared secret"),
    ]
    texts = [f"connect to {url}", f"DATABASE_URL={url}\n", f'psycopg.connect("{url}")']
    for value in values:
        basic = base64.b64encode(f"user:{value}".encode()).decode()
        texts += [
            f"Authorization: Bearer {value}",
            f"Authorization: Basic {basic}",
            f"https://x.example/?token={httpx.QueryParams({'t': value})}",
            json.dumps({"a": {"b": [value]}}),
            json.dumps(json.dumps({"a": value})),
            repr({"a": value}),
            value.encode().hex(),
            *value.splitlines(),
        ]
    return [text for text in texts if "-----" not in text or "\n" in text or "BEGIN" not in text]


ENTER: dict[str, Any] = {
    "user": "ann",
    "password": canary("argument: secret"),
    "pin": int(canary("argument: a secret number")),
    "account": {"deep": [{"token": canary("argument: inside a secret object")}, None, True]},
    "codes": [[canary("argument: inside a secret list")], 1.5],
    "token": canary("argument: SecretStr"),
    "raw": {"a": canary("argument: SecretBytes in a dict")},
    "login": {
        "user": "bob",
        "password": canary("argument: SecretStr in a model"),
        "more": [{"x": [canary("argument: SecretStr in a list in a model")]}],
    },
    "credentials": {"user": "cy", "token": canary("argument: SecretStr in a dataclass")},
    "text": f"with {canary('environment: a key')} and {environment()['DATABASE_URL']}",
}


class Recalling:
    """A memory that knows a secret, and fails with another."""

    async def recall(self, prompt: str) -> str:
        return f"the key is {canary('environment: a key')}"

    async def remember(self, messages: Any) -> None:
        raise ValueError(f"no room for {canary('host: a declared secret')}")


def gates() -> list[Any]:
    """Hooks whose reasons have secrets."""
    secret = canary("environment: a key")

    @hook("dispatch_tool")
    def decide(context: HookContext) -> Any:
        text = "" if context.call is None else str(context.arguments.get("text", ""))
        match text:
            case "deny":
                return DenyCall(f"not with {secret}")
            case "skip":
                return SkipCall(f"because of {secret}")
            case "ask":
                return AskApproval(f"may it use {secret}?")
            case "abort":
                return AbortRun(f"found {secret}")
            case _:
                return None

    @hook("pre_step", fail_open=True)
    def raises(context: HookContext) -> None:
        raise ValueError(f"hook: {secret}")

    return [decide, raises]


def wired(how: str) -> Any:
    """A model whose server answers with an error that says its key."""
    key, second = canary("model: its key, in the body of an error"), canary("model: the key of the second of two")

    def handler(request: httpx.Request) -> httpx.Response:
        given = request.headers.get("authorization", "")
        body = {"error": {"message": f"bad key {given} {key} {canary('environment: a key')}", "type": "x"}}
        return httpx.Response(400 if how == "refused" else 503, json=body, headers={"x-key": key})

    first = build_model("openai", handler, api_key=key)
    return FallbackModel(first, build_model("anthropic", handler, api_key=second)) if how == "two" else first


async def begin(world: World) -> None:
    """Each run, until it ends or waits."""
    with SqliteStore(world.out / "runs.db") as store:
        host = world.host(store=store)
        texts = known_texts()
        script: list[Any] = [
            [call("echo", text=text) for text in texts],
            [call("fail", text=text, how=how) for text in texts[:12] for how in ("os", "tool", "value")],
            [call("report", text=text) for text in texts[:6]],
            *(f"it is {text}" for text in texts[:1]),
        ]
        limits = AgentGuardrails(max_calls_per_reply=200, max_tool_retries=9)
        talk = world.agent(host, script, instructions=f"Use {texts[0]}.", memory=Recalling(), guardrails=limits)
        await world.finish(talk.run(" ".join(texts), run_id="texts", message_history=[Message.user(texts[5])]))
        await world.finish(world.agent(host, [call("enter", **ENTER)]).run("go", run_id="enter"))
        for text in ("deny", "skip", "ask", "abort"):
            gated = world.agent(host, [call("echo", text=text), "done"], hooks=gates())
            await world.finish(gated.run("go", run_id=f"gate-{text}"))
        for how in ("refused", "busy", "two"):
            await world.finish(world.agent(host, wired(how)).run("go", run_id=f"model-{how}"))
        script = [ProviderError(f"the provider says {texts[4]}"), "done"]
        await world.finish(world.agent(host, script).run("go", run_id="provider"))
        await results(world, host)
        await edits(world, host)
        await subagents(world, host)
        await servers(world, host)
        await cancelled(world, host, texts[3])
    await records(world)


async def results(world: World, host: Host) -> None:
    """Secrets that a tool returns as such count as secrets from then on, also after a restart."""
    script: list[Any] = []
    for what in PLACES:
        if what.startswith("result: ") and "restart" not in what:
            script += [call("reveal", what=what), call("leak", what=what)]
    await world.finish(world.agent(host, [*script, "done"]).run("go", run_id="results"))
    what = "result: SecretStr before a restart"
    script = [call("reveal", what=what), [call("open_door", password="a door 1"), call("leak", what=what)]]
    await world.finish(world.agent(host, script).run("go", run_id="restart"))
    what = "ending: SecretStr in the output"
    done = [call("return_done", output={"name": "k", "value": canary(what)})]
    ending = world.agent(host, done, output_type=Key, preset="funnel")
    result = await world.finish(ending.run("go", run_id="ending"))
    assert result.output.value.get_secret_value() == canary(what)
    await answers(world, host)
    password = canary("history: a secret argument of an earlier run")
    first = world.agent(Host(clock=FakeClock()), [call("open_door", password=password)])
    earlier = await world.finish(first.run("open it"))
    later = world.agent(host, [f"it was {password}"])
    await world.finish(later.run("go on", message_history=earlier.messages, run_id="history"))


async def answers(world: World, host: Host) -> None:
    """Secrets in texts that a model writes: structured answers, calls in envelopes, and known ones in odd escapes."""
    good, wrong, cut = (
        json.dumps({"name": "k", "value": canary(f"answer: SecretStr in {what}")})
        for what in ("a structured answer", "one that is not valid", "one that is cut off")
    )
    truncated = Reply(Message.assistant(cut[:-8]), FinishReason.LENGTH)
    script = [wrong.replace('"name"', '"names"'), truncated, cut[-8:]]
    result = await world.finish(world.agent(host, script, output_type=Key).run("go", run_id="answer"))
    assert result.output.value.get_secret_value() == canary("answer: SecretStr in one that is cut off")
    await world.finish(world.agent(host, [f"It is this:\n```json\n{good}\n```"], output_type=Key).run("go"))
    arguments = {"password": canary("envelope: a secret argument of a call")}
    envelope = json.dumps({"kind": "tool_call", "tool_name": "open_door", "arguments": arguments})
    await world.finish(world.agent(host, [envelope], preset="feedback").run("go", run_id="envelope"))
    known = canary("host: a declared secret") + canary("environment: a key")
    odd = "".join(f"\\u{ord(char):04X}" if number % 2 else f"&#{ord(char)};" for number, char in enumerate(known))
    await world.finish(world.agent(host, [odd]).run("go", run_id="odd"))


async def edits(world: World, host: Host) -> None:
    """Runs that wait for a person who will edit a secret argument."""
    await world.finish(world.agent(host, [call("open_door", password="a door 1")]).run("go", run_id="edit"))
    for run_id in ("edited", "to-be-cancelled"):
        await world.finish(world.agent(host, [call("open_door", password="a door 1")]).run("go", run_id=run_id))
    assert host.store is not None
    runs = Runs(host.store, secret=HOST_SECRET)  # what it sends is never acted on, so it stays in the store
    password = canary("signal: a secret argument in an edit that waits in the store")
    await runs.answer("edited", Edit({"password": password}))
    await runs.cancel("to-be-cancelled", canary("signal: a variable in a cancellation that waits in the store"))
    key = {"name": "k", "value": canary("votes: approved by two people")}
    await world.finish(world.agent(host, [call("open_safe", key=key)]).run("go", run_id="votes"))


async def subagents(world: World, host: Host) -> None:
    """A sub-agent that gets a secret of its caller, and tells one of its own."""
    outer, inner = canary("sub-agent: a secret of its caller"), canary("sub-agent: a secret argument of its tool")
    helper = world.agent(host, [call("open_door", password=inner), f"opened with {inner} as {outer}"])
    script = [call("open_door", password=outer), call("helper", task=f"use {outer}"), f"{inner} and {outer}"]
    tools = [*world.tools(), helper.as_tool("helper", "Helps.")]
    await world.finish(world.agent(host, script, tools=tools).run("go", run_id="calls"))


async def servers(world: World, host: Host) -> None:
    """A server that knows a password by its schema, and whose variables are secrets."""
    folder = world.folder / "server"
    folder.mkdir(exist_ok=True)
    (folder / "descriptions.json").write_text("{}")
    password = {"type": "object", "properties": {"text": {"type": "string", "format": "password"}}}
    (folder / "schemas.json").write_text(json.dumps({"log_in": {"description": "Logs in.", "inputSchema": password}}))
    file = Path(__file__).parent / "mcp_stdio_server.py"
    variable = {"SERVER_TOKEN": canary("MCP: a variable of the server")}
    settings = MCPSettings(prefix="")
    async with MCPTools.stdio(sys.executable, [str(file), str(folder)], env=variable, settings=settings) as server:
        given = canary("MCP: a password by the server's schema")
        script = [
            call("log_in", text=given),
            call("echo", text=f"{given} and {variable['SERVER_TOKEN']}"),
            f"{given} and {variable['SERVER_TOKEN']}",
        ]
        await world.finish(world.agent(host, script, tools=list(server)).run("go", run_id="server"))
        world.show(server)
        world.shown += [repr(each) for each in server]


async def cancelled(world: World, host: Host, text: str) -> None:
    """A run that is cancelled for a reason with a secret."""
    run = world.agent(host, [call("open_door", password="a door 1"), "done"]).run("go", run_id="cancelled")
    run.cancel(text)
    await world.finish(run)


async def records(world: World) -> None:
    """Runs without a store, which wait in suspension records."""
    host = world.host(replay_guard=FileReplayGuard(world.folder / "used"))
    password = canary("record: a secret argument in a suspension record")
    what = "record: a result in a suspension record"
    script = [
        call("reveal", what=what),
        call("leak", what=what),
        call("open_door", password=password),
    ]
    result = await world.finish(world.agent(host, script).run(f"use {canary('environment: a key')}"))
    world.save("record.json", result.outcome.suspension_record.to_json())
    world.show(result.outcome.suspension_record)
    world.save("journal.json", json.dumps([record.data for record in result.journal], default=repr))


async def resume(world: World) -> None:
    """The person answers."""
    with SqliteStore(world.out / "runs.db") as store:
        host = world.host(store=store)

        async def answer(run_id: str, reply: Any, *script: Any, **more: Any) -> Any:
            return await world.finish(world.agent(host, list(script) or ["done"]).resume(run_id, reply, **more))

        await answer("enter", Allow(), f"logged in with {canary('argument: secret')}")
        await answer("gate-ask", Allow())
        await answer(
            "restart", Edit({"password": "a door 2"}), call("leak", what="result: SecretStr before a restart"), "x"
        )
        password = canary("edit: a secret argument")
        again = [call("leak", what="edit: a secret argument"), call("open_door", password="a door 3")]
        await answer("edit", Edit({"password": password}), *again)
        await answer("votes", Allow(), by=Actor("ann"))
        await answer("votes", Allow(), call("leak", what="votes: approved by two people"), "x", by=Actor("bob"))
        outer, inner = canary("sub-agent: a secret of its caller"), canary("sub-agent: a secret argument of its tool")
        await subagents_go_on(world, host, outer, inner)
    host = world.host(replay_guard=FileReplayGuard(world.folder / "used"))
    agent = world.agent(host, [call("leak", what="record: a secret argument in a suspension record"), "done"])
    result = await world.finish(agent.resume((world.out / "record.json").read_text(), Allow()))
    world.save("journal-2.json", json.dumps([record.data for record in result.journal], default=repr))


async def subagents_go_on(world: World, host: Host, outer: str, inner: str) -> None:
    """The two approvals of the run with a sub-agent."""
    for _ in range(2):
        helper = world.agent(host, [f"opened with {inner} as {outer}"])
        if _ == 0:
            helper = world.agent(host, [call("open_door", password=inner)])
        rest = [call("helper", task=f"use {outer}")] if _ == 0 else [f"{inner} and {outer}"]
        tools = [*world.tools(), helper.as_tool("helper", "Helps.")]
        result = await world.finish(world.agent(host, rest, tools=tools).resume("calls", Allow()))
        assert isinstance(result.outcome, UserInputRequested) is (_ == 0), result.outcome


def main(part: str, folder: Path) -> None:
    """One part; see above."""
    world = World(folder)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(f"{record.getMessage()} {record.exc_text or ''}")  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    logging.getLogger("agentfsm").setLevel(logging.DEBUG)
    parts: dict[str, Callable[[World], Any]] = {"begin": begin, "resume": resume}
    asyncio.run(parts[part](world))
    world.close(part)
    world.save(f"log-{part}.txt", "\n".join(lines))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
