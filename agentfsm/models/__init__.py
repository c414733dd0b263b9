"""Adapters from the ``Model`` protocol to providers' HTTP APIs, imported on first use.

``resolve("openai:gpt-5-mini")`` is the usual entry point. ``OpenAIChat``, ``OpenAIResponses``, ``AnthropicMessages``
and ``OllamaChat`` are the wires behind it, for options that a name cannot express. ``AwsAccount`` and
``GoogleAccount`` stand in place of an API key. ``FallbackModel``, ``Limited``,
``Priced`` and ``Unstreamed`` wrap other models. Importing this package does not import an HTTP library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentfsm.lazy_imports import lazy_exports

if TYPE_CHECKING:
    from agentfsm.loop.model import (
        KeepAlive,
        ReasoningChunk,
        StreamChunk,
        StreamingModel,
        StreamRestart,
        TextChunk,
        ToolCallChunk,
    )
    from agentfsm.models.anthropic import AnthropicMessages
    from agentfsm.models.aws import AwsAccount
    from agentfsm.models.google import GoogleAccount
    from agentfsm.models.http_client import HttpOptions
    from agentfsm.models.limits import ConcurrencyLimit, RateLimit
    from agentfsm.models.model_registry import resolve
    from agentfsm.models.model_wrappers import FallbackModel, Limited, Price, Priced, Unstreamed
    from agentfsm.models.ollama import OllamaChat
    from agentfsm.models.openai_chat import OpenAIChat
    from agentfsm.models.openai_responses import OpenAIResponses
    from agentfsm.models.settings import ModelSettings

__all__ = [
    "AnthropicMessages",
    "AwsAccount",
    "ConcurrencyLimit",
    "FallbackModel",
    "GoogleAccount",
    "HttpOptions",
    "KeepAlive",
    "Limited",
    "ModelSettings",
    "OllamaChat",
    "OpenAIChat",
    "OpenAIResponses",
    "Price",
    "Priced",
    "RateLimit",
    "ReasoningChunk",
    "StreamChunk",
    "StreamRestart",
    "StreamingModel",
    "TextChunk",
    "ToolCallChunk",
    "Unstreamed",
    "resolve",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "agentfsm.loop.model": (
                "KeepAlive ReasoningChunk StreamChunk StreamingModel StreamRestart TextChunk ToolCallChunk"
            ),
            "agentfsm.models.anthropic": "AnthropicMessages",
            "agentfsm.models.aws": "AwsAccount",
            "agentfsm.models.google": "GoogleAccount",
            "agentfsm.models.http_client": "HttpOptions",
            "agentfsm.models.limits": "ConcurrencyLimit RateLimit",
            "agentfsm.models.model_registry": "resolve",
            "agentfsm.models.ollama": "OllamaChat",
            "agentfsm.models.openai_chat": "OpenAIChat",
            "agentfsm.models.openai_responses": "OpenAIResponses",
            "agentfsm.models.settings": "ModelSettings",
            "agentfsm.models.model_wrappers": "FallbackModel Limited Price Priced Unstreamed",
        },
    )
