"""``MCPSettings``: which tools of an MCP server an agent gets, and how their calls are treated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["MCPSettings"]


class MCPSettings(BaseModel):
    """How the tools of an MCP server are used.

    Attributes:
        prefix: What stands in front of each tool's name.
        only: Names of the server's tools to take; all unless given.
        timeout: Seconds for one call; the guardrails' ``tool_timeout_s`` unless given.
        requires_approval: True, or a function of the arguments: whether a person must allow a call.
        parallel: Whether calls may run together with others that may.
        recheck: Whether the list of tools is read again before each call; without it only after a restart, and
            when the server says that the list has changed.
        files: A folder for what a model cannot be shown (sound, other binary results), of which it is told the
            path; pictures are kept there too. Without it, the model is told only that there was something.

    Raises:
        pydantic.ValidationError: A setting cannot be one; the error names the field.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{0,63}$")] = ""
    only: tuple[str, ...] | None = None
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    requires_approval: bool | Callable[[Mapping[str, Any]], bool] = False
    parallel: bool = False
    recheck: bool = True
    files: Path | None = None
