"""``resolve``: the model for a name, and ``WIRES``, the table of the APIs that models are called through.

To add a wire, write one module with a subclass of ``HttpModel``, and add its entry to ``WIRES``. Rows of
``providers.PROVIDERS`` can then name it.
"""

from __future__ import annotations

from difflib import get_close_matches
from fnmatch import fnmatchcase
from importlib import import_module
from typing import TYPE_CHECKING, cast

from agentfsm.errors import UnknownModelError
from agentfsm.loop.model import Model
from agentfsm.models.providers import PROVIDERS, ApiKey, Provider

if TYPE_CHECKING:
    from agentfsm.models.http_client import HttpOptions
    from agentfsm.models.http_model import HttpModel
    from agentfsm.models.settings import ModelSettings

WIRES = {
    "openai": "agentfsm.models.openai_chat:OpenAIChat",
    "responses": "agentfsm.models.openai_responses:OpenAIResponses",
    "anthropic": "agentfsm.models.anthropic:AnthropicMessages",
    "ollama": "agentfsm.models.ollama:OllamaChat",
    "bedrock-anthropic": "agentfsm.models.anthropic_clouds:BedrockMessages",
    "vertex-anthropic": "agentfsm.models.anthropic_clouds:VertexMessages",
}
"""Every wire by its name in ``Provider.wire``: the module and class that implement it, imported on first use."""


def wire_class(wire: str) -> type[HttpModel]:
    """The class that implements a wire of ``WIRES``."""
    module, _, name = WIRES[wire].partition(":")
    return cast("type[HttpModel]", getattr(import_module(module), name))


def resolve(
    name: str,
    *,
    base_url: str | None = None,
    api_key: ApiKey | None = None,
    settings: ModelSettings | None = None,
    http: HttpOptions | None = None,
) -> Model:
    """The model for a name.

    ``provider:model`` is a row of ``providers.PROVIDERS`` and a model of that provider; the first colon separates
    them (``ollama:llama3.2:1b``). ``claude-*``, ``gpt-*``, ``o3`` and similar names need no provider. With a
    ``base_url``, any name without a colon is a model behind chat completions at that address.

    Args:
        name: The model's name.
        base_url: An address to use instead of the provider's own. Only ``api_key`` is sent to it.
        api_key: The API key; a function (plain or ``async``) that returns it and is called again when the provider
            rejects the key; or an ``AwsAccount`` or ``GoogleAccount``. By default the one in the provider's environment
            variable, or the account of this machine.
        settings: Sampling and output settings.
        http: Headers, query parameters, certificates, proxy, timeouts and limits of the HTTP calls.

    Raises:
        UnknownModelError: No provider is known for the name; the text lists those that are.
        MissingKeyError: The provider needs an API key and there is none.
        MissingExtraError: The provider needs an account of a cloud, and the packages for it are not installed.
        ConfigurationError: The address or the key is invalid, or the wire does not support a setting.
    """
    provider, model = _parse_name(name, base_url)
    model_class = wire_class(provider.wire)
    return model_class(model, provider=provider.name, base_url=base_url, api_key=api_key, settings=settings, http=http)


_OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "amazon": ("bedrock",),
    "aws": ("bedrock",),
    "azure-openai": ("azure",),
    "chatgpt": ("openai",),
    "claude": ("anthropic",),
    "google": ("gemini", "vertex"),
    "grok": ("xai", "groq"),
    "microsoft": ("azure",),
}
"""What people call providers whose own name is not similar."""


def _parse_name(name: str, base_url: str | None) -> tuple[Provider, str]:
    """The row of the provider, and the name of the model there."""
    text = name.strip()
    if not text:
        raise UnknownModelError(f"the model name is empty. {_known_names()}")
    if any(c.isspace() or not c.isprintable() for c in text):
        raise UnknownModelError(f"a model name has no blanks: {_shorten(text)}. {_known_names()}")
    before, colon, model = text.partition(":")
    row = PROVIDERS.get(before.lower())
    if row and colon and model:
        return PROVIDERS[row.variant(model)], model
    if row:
        raise UnknownModelError(f"{text!r} names a provider and no model: write {row.name}:{row.example}, for example")
    for row in PROVIDERS.values():
        if any(fnmatchcase(text, bare) and (":" in bare or not colon) for bare in row.bare_patterns):
            return row, text
    if base_url is not None and not colon:
        return PROVIDERS["openai"], text
    raise UnknownModelError(f"no provider is known for the model {_shorten(text)}.{_suggestion(text)} {_known_names()}")


def _suggestion(text: str) -> str:
    """A sentence that suggests a similar name."""
    before, colon, model = text.partition(":")
    meant = _OTHER_NAMES.get(before.lower()) or get_close_matches(before.lower(), PROVIDERS, n=1)
    if colon and meant:
        return f" Did you mean {' or '.join(f'{each}:{_shorten(model, quote=False)}' for each in meant)}?"
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
