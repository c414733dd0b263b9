"""Chat templates as servers of local models render them: they refuse transcripts that break the model's role rules."""

from __future__ import annotations

import datetime
import json
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["TEMPLATES", "TemplateRefusedError", "render"]

FOLDER = Path(__file__).parents[1] / "data" / "chat_templates"
TEMPLATES = sorted(FOLDER.glob("*.jinja"))
"""Templates that llama.cpp ships, of models under the Apache and MIT licences."""


class TemplateRefusedError(Exception):
    """A template refused a transcript."""


def render(template: Path, body: dict[str, Any]) -> str:
    """The prompt that a server makes of a chat completions request.

    Raises:
        TemplateRefusedError: The template refuses the transcript.
    """
    import jinja2

    try:
        prompt: str = _compile(template).render(
            messages=[_message(message) for message in body["messages"]],
            tools=body.get("tools"),
            add_generation_prompt=True,
            bos_token="<s>",
            eos_token="</s>",
        )
    except jinja2.TemplateError as error:
        raise TemplateRefusedError(f"{type(error).__name__}: {error}") from error
    return prompt


@cache
def _compile(template: Path) -> Any:
    """The template, in the environment that transformers gives it."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> NoReturn:
        raise TemplateRefusedError(message)

    def to_json(value: object, indent: int | None = None, **_: object) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    extensions = ["jinja2.ext.loopcontrols"]
    environment: Any = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": refuse, "strftime_now": datetime.datetime(2026, 1, 1).strftime}
    return environment.from_string(template.read_text(encoding="utf-8"))


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """A message as llama-server passes it to a template: arguments are objects, and no content is an empty one."""
    given: dict[str, Any] = {**message, "content": message.get("content") or ""}
    if "tool_calls" in given:
        given["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
            for call in given["tool_calls"]
        ]
    return given
