"""Adapters from the ``Model`` protocol to providers' HTTP APIs, imported on first use.

``resolve("openai:gpt-5-mini")`` is the usual entry point. ``OpenAIChat``, ``OpenAIResponses``, ``AnthropicMessages``
and ``OllamaChat`` are the wires behind it, for settings that a name cannot express. ``FallbackModel``, ``Limited`` and
``Priced`` wrap other models. Importing this package imports no HTTP library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentfsm.models.anthropic import AnthropicMessages
    from agentfsm.models.limits import ConcurrencyLimit, Limited, RateLimit
    from agentfsm.models.model_registry import resolve
    from agentfsm.models.ollama import OllamaChat
    from agentfsm.models.openai_chat import OpenAIChat
    from agentfsm.models.openai_responses import OpenAIResponses
    from agentfsm.models.settings import ModelSettings
    from agentfsm.models.wrappers import FallbackModel, Price, Priced

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

_LAZY_IMPORTS = {
    "AnthropicMessages": "agentfsm.models.anthropic",
    "ConcurrencyLimit": "agentfsm.models.limits",
    "FallbackModel": "agentfsm.models.wrappers",
    "Limited": "agentfsm.models.limits",
    "ModelSettings": "agentfsm.models.settings",
    "OllamaChat": "agentfsm.models.ollama",
    "OpenAIChat": "agentfsm.models.openai_chat",
    "OpenAIResponses": "agentfsm.models.openai_responses",
    "Price": "agentfsm.models.wrappers",
    "Priced": "agentfsm.models.wrappers",
    "RateLimit": "agentfsm.models.limits",
    "resolve": "agentfsm.models.model_registry",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY_IMPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY_IMPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
