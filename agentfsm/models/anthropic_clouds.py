"""``BedrockMessages`` and ``VertexMessages``: Anthropic's models in the clouds of Amazon and Google.

Both take the body of Anthropic's messages API without the model, whose name stands in the URL, and with a version of
their own in a field; each documents one value of it, and ``ModelSettings(extra_body={"anthropic_version": ...})`` sends
another (https://docs.aws.amazon.com/bedrock/latest/userguide/model-parameters-anthropic-claude-messages.html,
https://cloud.google.com/vertex-ai/generative-ai/docs/partner-models/claude/use-claude). Google streams server-sent
events, Amazon its own frames.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any
from urllib.parse import quote

from agentfsm.loop.model import ModelRequest
from agentfsm.models.anthropic import AnthropicMessages
from agentfsm.models.event_stream import EventStreamParser

__all__ = ["BedrockMessages", "VertexMessages"]


class _CloudMessages(AnthropicMessages):
    """What both have in common."""

    _headers = MappingProxyType[str, str]({})
    _key_header, _key_scheme = "authorization", "Bearer "
    _version: str
    """The value of ``anthropic_version``."""

    @property
    def _is_official(self) -> bool:
        return False  # what Anthropic's own address has is not all there, and comes later

    @property
    def _quoted_model(self) -> str:
        """The model's name as one segment of a path; an ARN contains slashes."""
        return quote(self.model, safe=":@")

    def _encode(self, request: ModelRequest, *, stream: bool) -> dict[str, Any]:
        body = super()._encode(request, stream=stream)
        del body["model"]
        return {"anthropic_version": self._version} | body


class BedrockMessages(_CloudMessages):
    """A client of Anthropic's models in Amazon Bedrock (``bedrock:anthropic.claude-...``).

    Arguments and errors are those of ``HttpModel``. The key is in ``AWS_BEARER_TOKEN_BEDROCK``; without it, AWS
    credentials sign the calls (``AwsAccount``).
    """

    _default_provider = "bedrock-anthropic"
    _version = "bedrock-2023-05-31"
    _frame_parser = EventStreamParser

    def _path(self) -> str:
        return f"/model/{self._quoted_model}/invoke"

    def _stream_path(self) -> str:
        return f"/model/{self._quoted_model}/invoke-with-response-stream"

    def _encode(self, request: ModelRequest, *, stream: bool) -> dict[str, Any]:
        body = super()._encode(request, stream=False)  # the path says whether it streams
        features = self._http.options.header("anthropic-beta")  # Bedrock reads them in the body, as the SDK knows
        return {"anthropic_beta": features.split(",")} | body if features else body


class VertexMessages(_CloudMessages):
    """A client of Anthropic's models in Vertex AI (``vertex:claude-...``), with Google credentials (``GoogleAccount``).

    Arguments and errors are those of ``HttpModel``. A ``base_url`` ends with ``/publishers/anthropic/models``.
    """

    _default_provider = "vertex-anthropic"
    _version = "vertex-2023-10-16"

    def _path(self) -> str:
        return f"/{self._quoted_model}:rawPredict"

    def _stream_path(self) -> str:
        return f"/{self._quoted_model}:streamRawPredict"
