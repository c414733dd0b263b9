"""``ModelSettings``: sampling and output settings of a model, the same for every wire."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from agentfsm.loop.canonical_json import canonical_json

__all__ = ["ModelSettings"]

_RESERVED_FIELDS = frozenset({"input", "instructions", "messages", "model", "stream", "system", "tools"})


class ModelSettings(BaseModel):
    """How a model is asked to answer. What is None (or empty) is not sent: the provider's default holds.

    A wire that has no word for a setting refuses it when the model is built, so nothing is dropped unseen.

    Attributes:
        temperature: Randomness, 0 to 2 (Anthropic: 0 to 1, and its models since Opus 4.7 take neither this nor
            ``top_p``).
        max_tokens: The cap on a reply, in tokens, where the run itself asks for none.
        top_p: Nucleus sampling, above 0 and up to 1.
        stop: Texts that end the reply when the model writes them.
        seed: For providers that try to repeat themselves; Anthropic has none.
        tool_choice: ``auto``, ``none``, ``required``, or the name of the one tool to call. Sent only in
            requests that carry tools (and that tool).
        reasoning_effort: How much thinking a reasoning model may spend. Which values a model takes is up to
            its provider; Anthropic has no ``none`` and no ``minimal``.
        prompt_cache: How long Anthropic is to keep the prompt's unchanging beginning, so that the next step
            pays less for it: ``5m``, ``1h`` or ``off``. None means ``5m`` at Anthropic's own address and
            ``off`` elsewhere. Other providers do this by themselves.
        images: Whether the model sees pictures. For one that does not, say False, and a word stands in place of
            those that tools give; its server would refuse the run from the first one on.
        extra_body: More top-level fields of the request's body, sent as they are; JSON. They win over every
            field above; what the loop owns (messages, input, model, stream, system, instructions, tools)
            is refused.

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
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    prompt_cache: Literal["off", "5m", "1h"] | None = None
    images: bool = True
    extra_body: dict[str, Any] = Field(default_factory=dict[str, Any])

    @field_validator("extra_body")
    @classmethod
    def _check_extra_body(cls, value: dict[str, Any]) -> dict[str, Any]:
        if owned := sorted(_RESERVED_FIELDS & value.keys()):
            raise ValueError(f"the loop owns {', '.join(owned)}")
        try:
            canonical_json(value)
        except TypeError as error:
            raise ValueError(f"no JSON: {error}") from None
        return value
