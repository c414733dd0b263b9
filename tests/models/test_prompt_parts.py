"""Prompts with images and files: how each wire sends them, and what it refuses before a request."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from agentfsm import Agent, ConfigurationError, File, Handoff, Host, Image, MemoryStore, RunError, RunStarted, ask_user
from agentfsm.journal.redact import redact_text
from agentfsm.loop.messages import Message
from agentfsm.loop.model import ModelRequest
from agentfsm.loop.prompts import prompt_message
from agentfsm.models import FallbackModel, ModelSettings, OllamaChat, OpenAIChat
from agentfsm.report.fragments import transcript_html
from agentfsm.runs import Runs
from agentfsm.testing import RecordingModel, ScriptedModel, call
from tests.helpers.model_clients import GOOD_BODIES, MODEL_CLASSES, WIRES, build_model, respond_with
from tests.helpers.provider_rules import request_errors

IMAGE = Image.from_bytes(b"GIF89a...")
REPORT = File.from_bytes(b"%PDF-1.7 ...", "report.pdf")
DATA = f"data:application/pdf;base64,{REPORT.data}"


def body(wire: str, message: Message, **settings: Any) -> dict[str, Any]:
    model = MODEL_CLASSES[wire]("m", base_url="http://127.0.0.1:9/v1", settings=ModelSettings(**settings))
    sent = json.loads(model._request_body(ModelRequest([message]), stream=False))
    assert isinstance(sent, dict)
    return sent


PARTS: dict[str, list[dict[str, Any]]] = {
    "openai": [
        {"type": "text", "text": "Read."},
        {"type": "image_url", "image_url": {"url": f"data:image/gif;base64,{IMAGE.data}"}},
        {"type": "file", "file": {"filename": "report.pdf", "file_data": DATA}},
    ],
    "responses": [
        {"type": "input_text", "text": "Read."},
        {"type": "input_image", "detail": "auto", "image_url": f"data:image/gif;base64,{IMAGE.data}"},
        {"type": "input_file", "filename": "report.pdf", "file_data": DATA},
    ],
    "anthropic": [
        {
            "type": "document",
            "source": {"type": "base64", "media_type": "application/pdf", "data": REPORT.data},
            "title": "report.pdf",
        },
        {"type": "image", "source": {"type": "base64", "media_type": "image/gif", "data": IMAGE.data}},
        {"type": "text", "text": "Read."},
    ],
}


@pytest.mark.parametrize("wire", PARTS)
def test_a_pdf_is_sent_as_the_api_has_it(wire: str) -> None:
    message = Message.user("Read.", [IMAGE], [REPORT])
    sent = body(wire, message, files=True)
    content = sent["input" if wire == "responses" else "messages"][0]["content"]
    assert [{k: v for k, v in part.items() if k != "cache_control"} for part in content] == PARTS[wire]
    assert request_errors(wire, sent) == []
    nameless = Message.user("", files=[File.from_bytes(b"%PDF-1.7 ...")])
    assert request_errors(wire, body(wire, nameless, files=True)) == []


@pytest.mark.parametrize("wire", [*WIRES, "gemini"])
def test_a_text_file_reaches_every_model(wire: str) -> None:
    async def main() -> None:
        handler = respond_with(200, GOOD_BODIES["openai" if wire == "gemini" else wire])
        seen: list[bytes] = []

        def record(request: httpx.Request) -> httpx.Response:
            seen.append(request.content)
            return handler(request)

        model = build_model("openai" if wire == "gemini" else wire, record)
        result = await Agent(model).run(["Sum up.", File.from_bytes(b"a,b", "t.csv")])
        assert result.output == "hello"
        assert b"<file>\\na,b\\n</file>" in seen[0]

    asyncio.run(main())


def kinds(wire: str, content: Any) -> list[str]:
    """The parts of a message as a server gets them: texts, and which image or file."""
    names = {IMAGE.data: "<first>", SECOND.data: "<second>", REPORT.data: "<report>"}
    return [
        part.get("text") or next(name for data, name in names.items() if data in json.dumps(part)) for part in content
    ]


SECOND = Image.from_bytes(b"GIF87a...")
MIXED = ["Is this lamp", SECOND, "on this page", REPORT, IMAGE, "or not?"]
ORDER = ["Is this lamp", "<second>", "on this page", "<report>", "<first>", "or not?"]


@pytest.mark.parametrize("wire", PARTS)
@pytest.mark.parametrize(
    ("prompt", "order"),
    [
        (MIXED, ORDER),
        (["See:", IMAGE], ["See:", "<first>"]),
        ([IMAGE, "What is it?"], ["<first>", "What is it?"]),
        ([REPORT, IMAGE], ["<report>", "<first>"]),
        ([IMAGE, "and again", IMAGE], ["<first>", "and again", "<first>"]),
    ],
)
def test_the_parts_of_a_prompt_are_sent_in_their_order(wire: str, prompt: list[Any], order: list[str]) -> None:
    sent = body(wire, prompt_message(prompt), files=True)
    assert kinds(wire, sent["input" if wire == "responses" else "messages"][0]["content"]) == order
    assert request_errors(wire, sent) == []


def test_ollama_gets_its_images_in_order_and_a_label_where_each_stands() -> None:
    (message,) = body("ollama", prompt_message(["Is this lamp", SECOND, "like that one", IMAGE, "or not?"]))["messages"]
    assert message["images"] == [SECOND.data, IMAGE.data]
    assert message["content"] == "Is this lamp\n\n[image 1]\n\nlike that one\n\n[image 2]\n\nor not?"
    (plain,) = body("ollama", prompt_message(["See:", IMAGE]))["messages"]
    assert plain["content"] == "See:"


def test_the_order_is_kept_in_a_journal_and_after_a_restart() -> None:
    store = MemoryStore()
    host = Host(store=store, secret=b"s" * 32)
    waits = Agent(ScriptedModel([call("ask_user", question="Which?")]), tools=[ask_user], host=host)
    waits.run_sync(MIXED, run_id="r")
    model = RecordingModel(ScriptedModel(["ok"]))
    Agent(model, tools=[ask_user], host=host).resume_sync("r", "that")
    assert list(model.requests[0].messages[0].parts) == MIXED


def refuses(request: httpx.Request) -> httpx.Response:
    raise AssertionError("a request was made")


@pytest.mark.parametrize(
    ("wire", "part", "settings", "words"),
    [
        ("openai", REPORT, {}, "not known to accept files, and the prompt has [file 'report.pdf', application/pdf"),
        ("ollama", REPORT, {}, "not known to accept files"),
        ("anthropic", REPORT, {"files": False}, "not known to accept files"),
        ("responses", REPORT, {"files": False}, "not known to accept files"),
        *((wire, IMAGE, {"images": False}, "accepts no images (ModelSettings(images=False))") for wire in WIRES),
    ],
)
def test_what_a_model_cannot_take_is_said_before_a_request(wire: str, part: Any, settings: Any, words: str) -> None:
    model = build_model(wire, refuses)
    model.settings = ModelSettings(**settings)
    result = Agent(model).run_sync(["Read.", part])
    assert isinstance(result.outcome, Handoff)
    assert words in str(result.outcome.blockers)


def test_ollama_is_not_said_to_take_files() -> None:
    with pytest.raises(ConfigurationError, match="has no files"):
        OllamaChat("m", settings=ModelSettings(files=True))


def test_known_providers_accept_files() -> None:
    def takes(provider: str) -> bool:
        model = OpenAIChat("m", provider=provider, api_key="k")
        sent = model._request_body(ModelRequest([Message.user("x", files=[REPORT])]), stream=False)
        return REPORT.data.encode() in sent

    assert [name for name in ("openai", "openrouter", "gemini", "groq", "vllm") if takes(name)] == [
        "openai",
        "openrouter",
    ]


def test_a_model_that_can_take_a_part_takes_over_from_one_that_cannot() -> None:
    able = RecordingModel(ScriptedModel(["read"]))
    result = Agent(FallbackModel(build_model("ollama", refuses), able)).run_sync(["Read.", REPORT])
    assert result.output == "read"
    assert able.requests[0].messages[-1].files == (REPORT,)


@pytest.mark.parametrize("wire", ["openai", "ollama"])
def test_a_part_that_another_model_has_answered_becomes_a_note(wire: str) -> None:
    """A session goes on with a model that cannot take what was said before."""
    seen: list[bytes] = []

    def record(request: httpx.Request) -> httpx.Response:
        seen.append(request.content)
        return respond_with(200, GOOD_BODIES[wire])(request)

    model = build_model(wire, record)
    model.settings = ModelSettings(images=False)
    history = [Message.user("Read.", [IMAGE], [REPORT]), Message.assistant("I have.")]
    assert Agent(model).run_sync("And?", message_history=history).output == "hello"
    assert b"Read.\\n[file 'report.pdf', application/pdf, 12 bytes]\\n[Images are not shown here.]" in seen[0]
    assert REPORT.data.encode() not in seen[0]


def test_the_parts_are_in_the_journal_and_can_be_redacted_and_reports_count_them() -> None:
    async def main() -> None:
        store = MemoryStore()
        model = RecordingModel(ScriptedModel(["ok", "ok"]))
        agent = Agent(model, host=Host(store=store))
        prompt = ["Read.", IMAGE, REPORT, File.from_bytes(b"ann@example.org", "mail.txt")]
        run = agent.session("s").run(prompt)
        started = [event async for event in run if isinstance(event, RunStarted)]
        assert "[file 'report.pdf', application/pdf, 12 bytes]" in started[0].prompt
        await agent.session("s").run("And?")
        assert model.requests[1].messages[0] == model.requests[0].messages[0]
        (first,) = (r for r in await store.records(run.run_id) if r.seq == 1)
        assert "report.pdf" not in first.body
        assert REPORT.data in first.hidden
        stored = await Runs(store).get(run.run_id)
        assert stored.ledger.transcript[0].images == 2
        assert "2 images or files, not shown" in transcript_html(stored.ledger.transcript)
        await redact_text(store, "ann@example.org", agent.config.host.keyring)
        await redact_text(store, "report.pdf", agent.config.host.keyring)
        left = "".join(r.body + r.hidden for r in await store.records(run.run_id))
        assert "ann@example.org" not in left
        assert "report.pdf" not in left

    asyncio.run(main())


@pytest.mark.parametrize(("prompt", "words"), [([], "at least one part"), ([3], "not int"), (b"x", "not bytes")])
def test_what_is_no_prompt_is_refused(prompt: Any, words: str) -> None:
    agent = Agent(ScriptedModel([]), host=Host(store=MemoryStore()))
    for runner in (agent, agent.session("s")):
        with pytest.raises(RunError, match=words):
            runner.run(prompt)
