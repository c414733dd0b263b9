"""Models of other libraries pass the conformance checks, called through those libraries at a loopback server."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
from pydantic import SecretStr

from agentfsm import Agent, Image, Message, ModelRequest, Reply, RunResult, TextDelta
from agentfsm.errors import ProviderError
from agentfsm.loop.model import Model, secrets_of
from agentfsm.models import OpenAIChat
from agentfsm.testing.model_conformance import ModelCheck, Turn, checks
from tests.helpers.fake_model_server import ModelOutput, ServerError, fake_model_server, text_output, tool_call_output
from tests.helpers.model_clients import WEATHER
from tests.helpers.scripted_server import server_reply

KEY = "sk-test-0123456789"


def pydantic_ai_model(url: str) -> Model:
    openai = pytest.importorskip("openai", reason="the vendor's client, by which pydantic-ai calls the server")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    from agentfsm.integrations.pydantic_ai import from_pydantic_ai

    client = openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0)
    return from_pydantic_ai(OpenAIChatModel("gpt-4o", provider=OpenAIProvider(openai_client=client)))


def langchain_model(url: str) -> Model:
    pytest.importorskip("langchain_openai", reason="the client by which LangChain calls the server")
    from langchain_openai import ChatOpenAI

    from agentfsm.integrations.langchain import from_langchain

    return from_langchain(
        ChatOpenAI(model="gpt-4o", base_url=url, api_key=SecretStr(KEY), max_retries=0, stream_usage=True)
    )


def litellm_model(url: str) -> Model:
    from agentfsm.integrations.litellm import from_litellm

    return from_litellm("openai/gpt-4o", base_url=url, api_key=KEY)


LIBRARIES = {"pydantic_ai": pydantic_ai_model, "langchain_core": langchain_model, "litellm": litellm_model}
LACKS: dict[str, list[Any]] = {}


def marks(name: str) -> list[pytest.MarkDecorator]:
    skip = pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed")
    return [skip, pytest.mark.filterwarnings("ignore")] if name == "litellm" else [skip]  # it warns of its own code


CASES = [
    pytest.param(name, check, marks=marks(name), id=f"{name}-{check.__name__}")
    for name in LIBRARIES
    for check in checks(without=LACKS.get(name, ()))
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "check"), CASES)
def test_foreign_models_conform(name: str, check: ModelCheck) -> None:
    @asynccontextmanager
    async def open_model(*turns: Turn) -> AsyncGenerator[Model]:
        if name == "litellm":  # it keeps a task for its logs in each event loop, from the first call on
            import_module("litellm.litellm_core_utils.logging_worker").GLOBAL_LOGGING_WORKER.start()
        with fake_model_server(*map(server_reply, turns)) as server:
            yield LIBRARIES[name](server.url)

    asyncio.run(check(open_model))


# -- runs, and what the libraries are given ------------------------------------------------------------------------


def lookup(city: str) -> list[Any]:
    """Look up a city."""
    return [f"sunny in {city}", Image.from_bytes(b"GIF89a...")]


def needs(*names: str) -> None:
    for name in names:
        pytest.importorskip(name, reason=f"{name} is not installed")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_run_with_a_tool(name: str, streamed: bool) -> None:
    needs(name)
    said = (tool_call_output(("lookup", {"city": "Łódź"})), text_output("Sunny."))

    async def go(agent: Agent) -> tuple[RunResult, str]:
        run = agent.run("How is the weather?")
        shown = "".join([event.text async for event in run if isinstance(event, TextDelta)]) if streamed else ""
        return await run, shown

    def requests(open_model: Any) -> list[dict[str, Any]]:
        with fake_model_server(*said) as server:
            agent = Agent(open_model(server.url), tools=[lookup], instructions="Be brief.")
            result, shown = asyncio.run(go(agent))
            assert (result.output, shown) == ("Sunny.", "Sunny." if streamed else "")
            assert (result.usage.input_tokens, result.usage.output_tokens) == (20, 10)
            return server.requests

    ours = requests(lambda url: OpenAIChat("gpt-4o", base_url=url, api_key=KEY))
    for sent, expected in zip(requests(LIBRARIES[name]), ours, strict=True):
        assert transcript(sent) == transcript(expected)
        assert [tool["function"]["name"] for tool in sent["tools"]] == ["lookup"]
        wanted = expected["tools"][0]["function"]
        assert sent["tools"][0]["function"]["parameters"]["properties"] == wanted["parameters"]["properties"]


def transcript(body: dict[str, Any]) -> list[Any]:
    """The messages of a request, with each content as a list of its texts and images.

    What our own wire puts between a result and an image is left out: the libraries have rules of their own for that.
    """
    found = list[Any]()
    for message in body["messages"]:
        if message == {"role": "assistant", "content": "OK."}:
            continue
        content = message.get("content") or []
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        texts = [block["text"] for block in blocks if block["type"] == "text"]
        images = [block["image_url"]["url"] for block in blocks if block["type"] == "image_url"]
        raw = message.get("tool_calls") or ()
        calls = [(c["id"], c["function"]["name"], json.loads(c["function"]["arguments"])) for c in raw]
        found.append((message["role"], message.get("tool_call_id"), calls, texts, images))
    return found


def test_pydantic_ai_gets_an_output_schema_where_its_model_takes_one() -> None:
    needs("pydantic_ai", "openai")
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    request = ModelRequest((Message.user("One."),), output_schema=schema, output_name="a number")
    with fake_model_server(ModelOutput('{"n":1}')) as server:
        asyncio.run(pydantic_ai_model(server.url).reply(request))
        asyncio.run(pydantic_ai_model(server.url).reply(replace(request, tools=(WEATHER,))))
    assert server.requests[0]["response_format"]["json_schema"]["name"] == "a_number"
    assert server.requests[0]["response_format"]["json_schema"]["schema"]["required"] == ["n"]
    assert "response_format" not in server.requests[1]


def test_pydantic_ai_gets_its_reasoning_back_unchanged() -> None:
    needs("pydantic_ai")
    from pydantic_ai import messages as theirs
    from pydantic_ai.models.function import AgentInfo, FunctionModel

    from agentfsm.integrations.pydantic_ai import from_pydantic_ai

    thought = theirs.ThinkingPart("Hm.", signature="c2ln", provider_name="function")
    called = theirs.ToolCallPart("lookup", {"city": "Rome"}, "toolu_1")
    seen = list[list[theirs.ModelMessage]]()

    def answer(messages: list[theirs.ModelMessage], info: AgentInfo) -> theirs.ModelResponse:
        seen.append(messages)
        parts = [theirs.TextPart("Sunny.")] if len(seen) == 2 else [thought, called]
        return theirs.ModelResponse(parts)

    model = from_pydantic_ai(FunctionModel(answer, model_name="m-1"))
    result = Agent(model, tools=[lookup]).run_sync("How is the weather?")
    assert result.output == "Sunny."
    (reply,) = [message for message in seen[1] if isinstance(message, theirs.ModelResponse)]
    assert list(reply.parts) == [thought, called]


def test_langchain_gets_its_reasoning_back_unchanged() -> None:
    needs("langchain_core")
    from langchain_core.language_models import BaseChatModel
    from langchain_core.messages import AIMessage, BaseMessage
    from langchain_core.messages.tool import tool_call
    from langchain_core.outputs import ChatGeneration, ChatResult

    from agentfsm.integrations.langchain import from_langchain

    blocks = [{"type": "thinking", "thinking": "Hm.", "signature": "c2ln"}, {"type": "text", "text": "Let me see."}]
    called = tool_call(name="lookup", args={"city": "Rome"}, id="toolu_1")
    seen = list[list[BaseMessage]]()

    class Fake(BaseChatModel):
        @property
        def _llm_type(self) -> str:
            return "fake"

        def bind_tools(self, tools: Any, **more: Any) -> Any:
            return self

        def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **more: Any) -> ChatResult:
            seen.append(messages)
            last = AIMessage("Sunny.")
            message = last if len(seen) == 2 else AIMessage(content=blocks, tool_calls=[called])
            return ChatResult(generations=[ChatGeneration(message=message)])

    result = Agent(from_langchain(Fake()), tools=[lookup]).run_sync("How is the weather?")
    assert result.output == "Sunny."
    (reply,) = [message for message in seen[1] if isinstance(message, AIMessage)]
    assert (reply.content, reply.tool_calls) == (blocks, [called])


def test_langchain_completes_no_arguments_that_were_cut_off() -> None:
    needs("langchain_core")
    from langchain_core.messages import AIMessageChunk
    from langchain_core.messages.tool import tool_call_chunk

    from agentfsm.integrations.langchain import from_langchain

    class Stream:
        """The one method of a chat model that is called here."""

        async def astream(self, messages: Any) -> AsyncGenerator[AIMessageChunk]:
            for text in ('{"city": ', '"Par'):
                part = tool_call_chunk(name="lookup" if text[0] == "{" else None, args=text, id="c1", index=0)
                yield AIMessageChunk(content="", tool_call_chunks=[part])

    model: Any = from_langchain(Stream())  # type: ignore[arg-type]

    async def last() -> Reply:
        parts = [part async for part in model.stream(ModelRequest((Message.user("Go."),)))]
        return parts[-1]

    (call,) = asyncio.run(last()).message.tool_calls
    assert (call.arguments, call.malformed is not None) == ({}, True)


def test_a_langchain_model_without_tools_says_so() -> None:
    needs("langchain_core")
    from langchain_core.language_models.fake_chat_models import FakeListChatModel

    from agentfsm.integrations.langchain import from_langchain

    model = from_langchain(FakeListChatModel(responses=["hi"]))
    assert asyncio.run(model.reply(ModelRequest((Message.user("Go."),)))).message.content == "hi"
    with pytest.raises(ProviderError, match="FakeListChatModel: this LangChain model cannot call tools"):
        asyncio.run(model.reply(ModelRequest((Message.user("Go."),), tools=(WEATHER,))))


@pytest.mark.parametrize("name", ["pydantic_ai", "langchain_core"])
def test_a_key_stands_in_no_error(name: str) -> None:
    needs(name)
    echo = ServerError(401, {"message": f"Incorrect API key provided: {KEY}", "code": "invalid_api_key"})
    with fake_model_server(echo) as server:
        model = LIBRARIES[name](server.url)
        with pytest.raises(ProviderError) as caught:
            asyncio.run(model.reply(ModelRequest((Message.user("Go."),))))
    assert "Incorrect API key" in str(caught.value)
    assert KEY not in str(caught.value)
    assert [secret.get_secret_value() for secret in secrets_of(model)] == [KEY]


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [("pydantic_ai", "pydantic_ai", "pydantic-ai"), ("langchain", "langchain_core", "langchain"), ("litellm",) * 3],
)
def test_a_library_that_is_not_installed_is_named(module: str, package: str, extra: str) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from agentfsm.errors import MissingExtraError\n"
        f"try: import agentfsm.integrations.{module}\n"
        "except MissingExtraError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert f"pip install 'agentfsm[{extra}]'" in done.stdout
