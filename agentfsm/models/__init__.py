"""Adapters from the ``Model`` port to providers' HTTP interfaces, loaded when they are first used.

``resolve("openai:gpt-5-mini")`` is the usual way in; ``OpenAIChat``, ``OpenAIResponses``, ``AnthropicMessages``
and ``OllamaChat`` are the wires behind it, for settings that a name cannot say. ``FallbackModel``, ``Limited`` and
``Priced`` stand before other models. Importing this package imports no HTTP library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentfsm.models.anthropic import AnthropicMessages
    from agentfsm.models.fallback import FallbackModel
    from agentfsm.models.limits import ConcurrencyLimit, Limited, RateLimit
    from agentfsm.models.names import resolve
    from agentfsm.models.ollama import OllamaChat
    from agentfsm.models.openai_chat import OpenAIChat
    from agentfsm.models.openai_responses import OpenAIResponses
    from agentfsm.models.prices import Price, Priced
    from agentfsm.models.settings import ModelSettings

__all__ = [
    "AnthropicMessages",
    "ConcurrencyLimit",
    "FallbackModel",
    "Limited",
    "ModelSettings",
    "OllamaChat",
    "OpenAIChat",
    "OpenAIResponses",
    "Price",
    "Priced",
    "RateLimit",
    "resolve",
]

_HOMES = {
    "AnthropicMessages": "agentfsm.models.anthropic",
    "ConcurrencyLimit": "agentfsm.models.limits",
    "FallbackModel": "agentfsm.models.fallback",
    "Limited": "agentfsm.models.limits",
    "ModelSettings": "agentfsm.models.settings",
    "OllamaChat": "agentfsm.models.ollama",
    "OpenAIChat": "agentfsm.models.openai_chat",
    "OpenAIResponses": "agentfsm.models.openai_responses",
    "Price": "agentfsm.models.prices",
    "Priced": "agentfsm.models.prices",
    "RateLimit": "agentfsm.models.limits",
    "resolve": "agentfsm.models.names",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
