"""``resolve`` and ``WIRES``: each model name gives its wire and address, and an unknown name a helpful error."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace

import pytest

from agentfsm.errors import ConfigurationError, MissingKeyError, UnknownModelError
from agentfsm.loop.messages import Message, Role
from agentfsm.loop.model import ModelRequest
from agentfsm.models import AnthropicMessages, ModelSettings, OllamaChat, OpenAIChat, OpenAIResponses, resolve
from agentfsm.models.http_model import HttpModel
from agentfsm.models.model_registry import WIRES, wire_class
from agentfsm.models.providers import PROVIDERS, Provider


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_BASE_URL", "ANTHROPIC_BASE_URL", "OLLAMA_HOST"):
        monkeypatch.delenv(name, raising=False)
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "OPENROUTER_API_KEY"):
        monkeypatch.setenv(name, "k" * 20)


@pytest.mark.parametrize(
    ("name", "full", "address"),
    [
        ("openai:gpt-5-mini", "openai:gpt-5-mini", "https://api.openai.com/v1"),
        ("OpenAI:gpt-5-mini", "openai:gpt-5-mini", "https://api.openai.com/v1"),
        ("gpt-5-mini", "openai:gpt-5-mini", "https://api.openai.com/v1"),
        (" gpt-4o\n", "openai:gpt-4o", "https://api.openai.com/v1"),
        ("chatgpt-4o-latest", "openai:chatgpt-4o-latest", "https://api.openai.com/v1"),
        ("o1", "openai:o1", "https://api.openai.com/v1"),
        ("o3-mini", "openai:o3-mini", "https://api.openai.com/v1"),
        ("o4-mini", "openai:o4-mini", "https://api.openai.com/v1"),
        ("ft:gpt-4o-mini:acme::x1", "openai:ft:gpt-4o-mini:acme::x1", "https://api.openai.com/v1"),
        ("openai:ft:gpt-4o:acme", "openai:ft:gpt-4o:acme", "https://api.openai.com/v1"),
        ("anthropic:claude-sonnet-4-6", "anthropic:claude-sonnet-4-6", "https://api.anthropic.com"),
        ("claude-opus-4-6", "anthropic:claude-opus-4-6", "https://api.anthropic.com"),
        ("openai-responses:gpt-5-mini", "openai-responses:gpt-5-mini", "https://api.openai.com/v1"),
        ("ollama:llama3.2", "ollama:llama3.2", "http://127.0.0.1:11434"),
        ("ollama:gpt-oss:20b", "ollama:gpt-oss:20b", "http://127.0.0.1:11434"),
        ("llamacpp:any", "llamacpp:any", "http://127.0.0.1:8080/v1"),
        ("vllm:Qwen/Qwen3-8B", "vllm:Qwen/Qwen3-8B", "http://127.0.0.1:8000/v1"),
        ("openrouter:openai/gpt-5-mini:nitro", "openrouter:openai/gpt-5-mini:nitro", "https://openrouter.ai/api/v1"),
    ],
)
def test_a_known_name_resolves_to_its_wire_and_address(name: str, full: str, address: str) -> None:
    model = resolve(name)
    wires = {"anthropic": AnthropicMessages, "openai-responses": OpenAIResponses, "ollama": OllamaChat}
    assert type(model) is wires.get(full.partition(":")[0], OpenAIChat)
    assert model.name == full
    assert f"base_url={address!r}" in repr(model)


@pytest.mark.parametrize("name", ["", "  ", "\n"])
def test_an_empty_name_is_reported_as_empty(name: str) -> None:
    with pytest.raises(UnknownModelError, match="empty"):
        resolve(name)


@pytest.mark.parametrize("name", ["openai:", "openai", "Ollama"])
def test_a_provider_name_without_a_model_is_an_error_with_an_example(name: str) -> None:
    with pytest.raises(UnknownModelError, match=r"no model: write (openai|ollama):\w"):
        resolve(name)


@pytest.mark.parametrize("name", ["gpt 5", "openai:gpt\t5", "gpt\x00", "openai: gpt-5"])
def test_blanks_inside_a_name_are_rejected(name: str) -> None:
    with pytest.raises(UnknownModelError, match="no blanks"):
        resolve(name)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("opnai:gpt-5", "Did you mean openai:gpt-5?"),
        ("grok:grok-4", "Did you mean xai:grok-4 or groq:grok-4?"),
        ("google:gemini-2.5-flash", "Did you mean gemini:gemini-2.5-flash or vertex:gemini-2.5-flash?"),
        ("azure-openai:gpt-4o", "Did you mean azure:gpt-4o?"),
        ("antropic:claude-sonnet-4-6", "Did you mean anthropic:claude-sonnet-4-6?"),
        ("cluade-sonnet-4-6", "Did you mean anthropic:claude-sonnet-4-6"),
        ("gtp-5-mini", "Did you mean openai:gpt-5-mini"),
        ("zephyr", "ollama:zephyr"),
        ("gpt-oss:20b", "ollama:gpt-oss:20b"),
        (":gpt-5", "openai:gpt-5-mini"),
    ],
)
def test_an_unknown_name_error_lists_known_names_and_a_suggestion(name: str, hint: str) -> None:
    with pytest.raises(UnknownModelError) as caught:
        resolve(name)
    text = str(caught.value)
    assert hint in text
    for known in ("openai:gpt-5-mini", "anthropic:claude-sonnet-4-6", "ollama:llama3.2", "claude-*"):
        assert known in text


def test_a_very_long_name_is_shortened_in_errors() -> None:
    with pytest.raises(UnknownModelError) as caught:
        resolve("x" * 100_000)
    assert len(str(caught.value)) < 1000


def test_a_base_url_replaces_a_providers_address_or_needs_no_provider() -> None:
    assert "'http://lan:8000/v1'" in repr(resolve("openai:gpt-5", base_url="http://lan:8000/v1"))
    assert "'http://lan:8000'" in repr(resolve("claude-x", base_url="http://lan:8000"))
    model = resolve("Qwen/Qwen3-8B", base_url="http://lan:8000/v1")
    assert isinstance(model, OpenAIChat)
    assert model.model == "Qwen/Qwen3-8B"
    with pytest.raises(UnknownModelError):
        resolve("opnai:gpt-5", base_url="http://lan:8000/v1")


def test_settings_reach_the_model() -> None:
    model = resolve("claude-x", settings=ModelSettings(temperature=0.5))
    assert isinstance(model, AnthropicMessages)
    assert model.settings.temperature == 0.5
    with pytest.raises(ConfigurationError):
        resolve("claude-x", settings=ModelSettings(seed=1))


def test_a_missing_key_error_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANTHROPIC_API_KEY")
    with pytest.raises(MissingKeyError, match="ANTHROPIC_API_KEY"):
        resolve("claude-sonnet-4-6")


@pytest.mark.parametrize("provider", PROVIDERS.values(), ids=PROVIDERS)
def test_each_provider_names_a_registered_wire(provider: Provider) -> None:
    assert provider.wire in WIRES


@pytest.mark.parametrize("wire", WIRES)
def test_all_wires_are_http_models_with_the_same_arguments(wire: str) -> None:
    model_class = wire_class(wire)
    assert issubclass(model_class, HttpModel)
    assert inspect.signature(model_class) == inspect.signature(HttpModel)


def test_a_wire_serves_any_provider_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    row = replace(PROVIDERS["vllm"], name="local", wire="responses", base_url="http://127.0.0.1:5/v1")
    monkeypatch.setitem(PROVIDERS, "local", row)
    model = resolve("local:tiny")
    assert isinstance(model, OpenAIResponses)
    assert model.name == "local:tiny"
    assert repr(model) == "OpenAIResponses('tiny', base_url='http://127.0.0.1:5/v1')"
    body = json.loads(model._request_body(ModelRequest([Message(Role.USER, "hi")]), stream=False))
    assert "include" not in body  # encrypted reasoning is requested from OpenAI alone
