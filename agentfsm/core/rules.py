"""The choices in which the published loops differ, as one validated object that guards and folds read."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

__all__ = ["Rules"]


class Rules(BaseModel):
    """How a run behaves where sensible loops differ. A preset is a ``Rules`` and its companions.

    Attributes:
        text_is_answer: Whether a reply of text without calls ends the run as its answer; where it does
            not, it is ``no_progress``.
        control_tools: Whether ``ask_user``, ``return_done`` and ``return_unable`` are registered.
        envelope: Whether the model answers in JSON envelopes (``{"kind": "final" | "tool_call", ...}``)
            in place of the wire's own tool calls.
        feedback: Whether feedback that answers no call stands in one request (``once``) or is stored as
            a tool message (``kept``).
        environment_errors: Whether the model may try again after an OSError of a tool (``retry``) or the
            run is handed off at once (``terminal``).
        attempts_scope: Whether a success sets the count of a kind's strikes back (``streak``) or the
            whole run counts (``run``).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    text_is_answer: bool = True
    control_tools: bool = False
    envelope: bool = False
    feedback: Literal["once", "kept"] = "once"
    environment_errors: Literal["retry", "terminal"] = "retry"
    attempts_scope: Literal["streak", "run"] = "streak"
