"""``resolve``: the model behind a name, ``provider:model`` or a well-known model name without a provider."""

from __future__ import annotations

from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from pydantic import SecretStr

from agentfsm.errors import UnknownModelError
from agentfsm.loop.model import Model
from agentfsm.models.providers import PROVIDERS, Provider

if TYPE_CHECKING:
    from agentfsm.models.settings import ModelSettings

__all__ = ["resolve"]


def resolve(
    name: str,
    *,
    base_url: str | None = None,
    api_key: str | SecretStr | None = None,
    settings: ModelSettings | None = None,
) -> Model:
    """The model that a name means.

    ``provider:model`` names a row of ``providers.PROVIDERS`` and a model there (the first colon parts the
    two: ``ollama:llama3.2:1b``). ``claude-*``, ``gpt-*``, ``o3`` and the like need no provider. With a
    ``base_url``, any name without a colon is a model behind chat completions at that address.

    Args:
        name: The model's name.
        base_url: Another address than the provider's own. It gets no key but ``api_key``.
        api_key: The key; else the one in the provider's variable.
        settings: How the model is asked to answer.

    Raises:
        UnknownModelError: No provider claims the name; the text lists what is known.
        MissingKeyError: The provider needs a key and there is none.
        ConfigurationError: The address or the key cannot be one, or the wire has no word for a setting.
    """
    provider, model = _parse_name(name, base_url)
    match provider.wire:
        case "anthropic":
            from agentfsm.models.anthropic import AnthropicMessages

            return AnthropicMessages(model, base_url=base_url, api_key=api_key, settings=settings)
        case "responses":
            from agentfsm.models.openai_responses import OpenAIResponses

            return OpenAIResponses(model, base_url=base_url, api_key=api_key, settings=settings)
        case "ollama":
            from agentfsm.models.ollama import OllamaChat

            return OllamaChat(model, base_url=base_url, api_key=api_key, settings=settings)
        case "openai":
            from agentfsm.models.openai_chat import OpenAIChat

            return OpenAIChat(model, provider=provider.name, base_url=base_url, api_key=api_key, settings=settings)


def _parse_name(name: str, base_url: str | None) -> tuple[Provider, str]:
    """The provider's row and the model's name there."""
    text = name.strip()
    if not text:
        raise UnknownModelError(f"the model's name is empty. {_known_names()}")
    if any(c.isspace() or not c.isprintable() for c in text):
        raise UnknownModelError(f"a model's name holds no blanks: {_shorten(text)}. {_known_names()}")
    before, colon, model = text.partition(":")
    row = PROVIDERS.get(before.lower())
    if row and colon and model:
        return row, model
    if row:
        raise UnknownModelError(f"{text!r} names a provider and no model: write {row.name}:{row.example}, for instance")
    for row in PROVIDERS.values():
        if any(fnmatchcase(text, bare) and (":" in bare or not colon) for bare in row.bare_patterns):
            return row, text
    if base_url is not None and not colon:
        return PROVIDERS["openai"], text
    raise UnknownModelError(f"no provider is known for the model {_shorten(text)}.{_suggestion(text)} {_known_names()}")


def _suggestion(text: str) -> str:
    """What was meant, perhaps."""
    before, colon, model = text.partition(":")
    if colon and (near := get_close_matches(before.lower(), PROVIDERS, n=1)):
        return f" Did you mean {near[0]}:{_shorten(model, quote=False)}?"
    stems = {stem: row.name for row in reversed(PROVIDERS.values()) for stem in (row.example, *row.bare_patterns)}
    if not colon and (near := get_close_matches(text.lower(), stems, n=1, cutoff=0.5)):
        row = PROVIDERS[stems[near[0]]]
        return f" Did you mean {row.name}:{row.example}, or another model of {row.name}?"
    return f" If it runs on this machine: ollama:{_shorten(text, quote=False)}?"


def _known_names() -> str:
    names = ", ".join(f"{row.name}:{row.example}" for row in PROVIDERS.values())
    bare = ", ".join(pattern for row in PROVIDERS.values() for pattern in row.bare_patterns)
    return f"Write provider:model, such as {names}; these need no provider: {bare}."


def _shorten(text: str, *, quote: bool = True) -> str:
    text = text if len(text) <= 60 else text[:60] + "..."
    return repr(text) if quote else text
