"""``from_litellm``: a model that LiteLLM calls, in this process, as a model of an agent here.

It needs the extra ``litellm``, which is large. To call a LiteLLM proxy, use ``resolve("litellm:...")``: that needs no
extra.

::

    agent = Agent(from_litellm("vertex_ai/gemini-2.5-pro"), tools=[...])

Only the call of the model is LiteLLM's; tools, retries, limits and the journal are those of the agent.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any

from pydantic import SecretStr

from agentfsm.errors import MissingExtraError, TransientProviderError
from agentfsm.integrations.foreign_models import ForeignModel
from agentfsm.loop.messages import Reply
from agentfsm.loop.model import ModelRequest, StreamChunk, StreamingModel
from agentfsm.models.model_wrappers import close_if_supported
from agentfsm.models.openai_chat import ChatAccumulator, decode, encode
from agentfsm.models.settings import ModelSettings
from agentfsm.models.wire_format import call_ids, refuse_parts
from agentfsm.models.wire_json import repair_surrogates

try:
    import litellm  # pyright: ignore[reportMissingImports]  # too large to be installed for a check of types
except ImportError as error:
    raise MissingExtraError("a model that LiteLLM calls", "litellm") from error

_LITELLM: Any = litellm


def from_litellm(
    model: str,
    *,
    base_url: str | None = None,
    api_key: str | SecretStr | None = None,
    settings: ModelSettings | None = None,
    options: Mapping[str, object] | None = None,
) -> StreamingModel:
    """A model that LiteLLM calls, as a model of an agent here.

    Args:
        model: Its name in LiteLLM (``"vertex_ai/gemini-2.5-pro"``).
        base_url: An address to use instead of the provider's own.
        api_key: The key; by default LiteLLM reads the provider's environment variable.
        settings: Sampling and output settings.
        options: More arguments of ``litellm.acompletion``, such as ``vertex_project``.
    """
    key = SecretStr(api_key) if isinstance(api_key, str) else api_key
    return _Adapter(model, base_url, key, settings or ModelSettings(), dict(options or {}))


class _Adapter(ForeignModel):
    """A model that LiteLLM calls; requests and replies have the form of chat completions."""

    def __init__(
        self, model: str, base_url: str | None, key: SecretStr | None, settings: ModelSettings, options: dict[str, Any]
    ) -> None:
        self._model, self._base_url, self._key = model, base_url, key
        self._settings, self._options = settings, options

    @property
    def name(self) -> str:
        return f"litellm:{self._model}"

    @property
    def secrets(self) -> tuple[SecretStr, ...]:
        """The key, if one was given."""
        return () if self._key is None else (self._key,)

    def __repr__(self) -> str:
        return f"from_litellm({self._model!r})"

    async def _call(self, request: ModelRequest) -> Reply:
        response = await _LITELLM.acompletion(**self._arguments(request))
        return self._decode(response.model_dump(), request)

    async def _open_stream(self, request: ModelRequest) -> AsyncGenerator[StreamChunk | Reply]:
        accumulator, stream = ChatAccumulator(), None
        try:
            more = {"stream": True, "stream_options": {"include_usage": True}}
            stream = await _LITELLM.acompletion(**self._arguments(request), **more)
            async for part in stream:
                for chunk in accumulator.add(part.model_dump()):
                    yield chunk
        finally:
            await close_if_supported(stream)
        if not accumulator.complete:
            raise TransientProviderError(f"{self.name}: the stream ended before the reply did")
        yield self._decode(accumulator.body(), request)

    def _arguments(self, request: ModelRequest) -> dict[str, Any]:
        """The arguments of ``acompletion``; LiteLLM itself makes no second attempt, since the agent does."""
        settings = self._settings or ModelSettings()
        refuse_parts(request.messages, settings.images, bool(settings.files))
        body = encode(request, self._model, settings, origin=self.name)
        if "response_format" in body and not _LITELLM.supports_response_schema(model=self._model):
            del body["response_format"]
        where = {"base_url": self._base_url, "api_key": self._key and self._key.get_secret_value()}
        given = {name: value for name, value in where.items() if value}
        return {"num_retries": 0, "max_retries": 0, **body, **given, **self._options}

    def _decode(self, body: object, request: ModelRequest) -> Reply:
        return decode(repair_surrogates(body), used_ids=call_ids(request.messages), origin=self.name)
