"""``ModelSettings``: sampling and output settings of a model, the same for every wire."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import Annotated, Any, Literal, Protocol, Self, TypeGuard, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator

from agentfsm.errors import ConfigurationError
from agentfsm.loop.canonical_json import canonical_json
from agentfsm.loop.model import Model

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

EFFORTS: tuple[str, ...] = get_args(Effort)
"""The values of ``ModelSettings.reasoning_effort``."""

_RESERVED_FIELDS = frozenset({"input", "instructions", "messages", "model", "stream", "system", "tools"})


class ModelSettings(BaseModel):
    """Sampling and output settings. A setting that is None (or empty) is not sent: the provider's default applies.

    A wire that does not support a setting raises ``ConfigurationError`` when the model is built, so that no setting
    is ignored silently.

    Attributes:
        temperature: Randomness, 0 to 2 (Anthropic: 0 to 1, and its models since Opus 4.7 accept neither this nor
            ``top_p``).
        max_tokens: The maximum length of a reply, in tokens, for requests that set no limit of their own.
        top_p: Nucleus sampling, above 0 and up to 1.
        stop: Stop sequences: texts that end the reply when the model writes them.
        seed: For reproducible sampling, where the provider supports it; Anthropic does not.
        tool_choice: ``auto``, ``none``, ``required``, or the name of the one tool to call. Sent only in
            requests that contain tools (and that tool).
        reasoning_effort: How much a reasoning model may think. Which values a model accepts depends on its
            provider; Anthropic has no ``none`` and no ``minimal``.
        prompt_cache: How long Anthropic caches the unchanging start of the prompt, which makes the next step
            cheaper: ``5m``, ``1h`` or ``off``. None means ``5m`` at Anthropic's own address and ``off``
            elsewhere. Other providers cache prompts automatically.
        images: Whether the model accepts images. If False, images from tools are replaced by a note, and a prompt with
            images is refused; the server of a model without image support would otherwise reject every request after
            the first image.
        files: Whether the model accepts PDFs in prompts. None for what is known: Anthropic's API, the Responses API,
            and the chat completions of OpenAI and OpenRouter do. A prompt with a PDF is refused before a request that
            the model would reject.
        extra_body: More top-level fields of the request body, sent as they are; JSON. They override every
            field above. Fields that the agent sets itself (messages, input, model, stream, system,
            instructions, tools) are rejected.

    Raises:
        pydantic.ValidationError: A setting is out of range; the error names the field.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    max_tokens: Annotated[int, Field(gt=0)] | None = None
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    seed: int | None = None
    tool_choice: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")] | None = None
    reasoning_effort: Effort | None = None
    prompt_cache: Literal["off", "5m", "1h"] | None = None
    images: bool = True
    files: bool | None = None
    extra_body: dict[str, Any] = Field(default_factory=dict[str, Any])

    @field_validator("extra_body")
    @classmethod
    def _check_extra_body(cls, value: dict[str, Any]) -> dict[str, Any]:
        if reserved := sorted(_RESERVED_FIELDS & value.keys()):
            raise ValueError(f"the agent sets {', '.join(reserved)} itself")
        try:
            canonical_json(value)
        except TypeError as error:
            raise ValueError(f"not JSON: {error}") from None
        return value


class AdjustableModel(Model, Protocol):
    """A model with settings that one run may change."""

    def with_settings(self, settings: ModelSettings) -> Model:
        """The same model with other settings; those that are not set stay as they are.

        Raises:
            ConfigurationError: It does not support one of them.
        """
        ...


class WithSettings(ABC):
    """A base class of models with settings.

    Attributes:
        settings: Sampling and output settings.
    """

    settings: ModelSettings

    @staticmethod
    @abstractmethod
    def _validate_settings(settings: ModelSettings) -> ModelSettings:
        """The settings, if the wire supports each of them.

        Raises:
            ConfigurationError: It does not support one.
        """

    def with_settings(self, settings: ModelSettings) -> Self:
        """The same model with other settings; those that are not set stay as they are. It shares the connections.

        Args:
            settings: The settings.

        Raises:
            ConfigurationError: The wire does not support one of them.
        """
        both = {**self.settings.model_dump(exclude_unset=True), **settings.model_dump(exclude_unset=True)}
        model = copy.copy(self)
        model.settings = self._validate_settings(ModelSettings.model_validate(both))
        return model


def _is_adjustable(model: Model) -> TypeGuard[AdjustableModel]:
    return callable(getattr(model, "with_settings", None))


def with_settings(model: Model, settings: ModelSettings) -> Model:
    """A model with other settings; those that are not set stay as they are.

    Raises:
        ConfigurationError: The model takes no settings, or does not support one of them.
    """
    if not _is_adjustable(model):
        raise ConfigurationError(f"the model {model.name!r} takes no settings: it has no method with_settings")
    return model.with_settings(settings)


def reject_prompt_cache(settings: ModelSettings, wire: str) -> ModelSettings:
    """The settings, for a wire whose servers cache prompts automatically.

    Raises:
        ConfigurationError: The settings say how long to cache the prompt.
    """
    if settings.prompt_cache not in (None, "off"):
        raise ConfigurationError(f"{wire} has no prompt_cache setting: its servers cache prompts automatically")
    return settings
