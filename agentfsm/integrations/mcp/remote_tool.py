"""One MCP tool as an agent's tool: ``MCPSettings``, and argument validation by its JSON schema."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, TypeAdapter, model_validator

from agentfsm.errors import ToolDefinitionError
from agentfsm.integrations.mcp.remote_call import Progress, RemoteCalls, ServerChannel
from agentfsm.integrations.mcp.sampling import SamplingAgent, sampler_of
from agentfsm.loop.canonical_json import canonical_json
from agentfsm.loop.model import ToolSpec
from agentfsm.runtime.delegation import Sampler
from agentfsm.runtime.run_context import ToolContext
from agentfsm.runtime.tools import ApprovalRequirement, SchemaTool

if TYPE_CHECKING:
    from mcp.types import Tool as Listed


class MCPSettings(BaseModel):
    """How the tools of an MCP server are used.

    Attributes:
        prefix: A prefix for each tool's name.
        only: Names of the server's tools to use; all by default.
        timeout: Seconds for one call; the guardrails' ``tool_timeout_s`` by default.
        requires_approval: Whether a person must approve a call, as ``@tool`` takes it.
        parallel: Whether calls may run concurrently with other parallel calls.
        recheck: Whether to read the list of tools before each call; if False, only after a restart and when the
            server reports a change of the list.
        idempotent: Names of the server's tools of which two equal calls have the same effect as one, so that a call
            that was cut off is repeated; or ``annotated`` for those that the server says are read-only or idempotent,
            if you trust it in that.
        elicitation: Whether the server may ask a person during a call. The run then waits, as it does for any person,
            with a request of kind ``form``.
        sampling: An ``Agent`` without tools, whose model the server may ask during a call; None if it may not. Each
            request is a run of that agent, within what is left of the calling run's budgets and charged to it. It gets
            the server's system prompt after its own instructions, and at most the tokens that its own guardrails allow.
        results: What the model gets of a result that has both texts and structured content: the texts (``text``), or
            the structured content as JSON (``structured``). Images and other parts are passed on in both cases, and a
            result that has only one of the two is passed on as it is.
        start_timeout: Seconds for the server to start and respond; one that is installed on its first start takes long.
        resource_tools: Whether the model also gets the tools ``list_resources`` and ``read_resource``, with the prefix.
        prompt_tools: Whether it also gets the tools ``list_prompts`` and ``get_prompt``, with the prefix.
        instructions: Whether the model is told what the server says about its use (``MCPTools.instructions``), once in
            the system prompt, fenced and labelled as data.
        files: A folder for results that a model cannot be shown (audio and other binary data); the model gets the
            path. Images are also stored there. Without it, the model only gets a note that there was such a result.

    Raises:
        pydantic.ValidationError: A setting is invalid; the error names the field.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, arbitrary_types_allowed=True)

    prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{0,63}$")] = ""
    only: tuple[str, ...] | None = None
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    requires_approval: ApprovalRequirement = False
    parallel: bool = False
    recheck: bool = True
    idempotent: tuple[str, ...] | Literal["annotated"] = ()
    elicitation: bool = False
    sampling: SamplingAgent | None = None
    results: Literal["text", "structured"] = "text"
    start_timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 60.0
    instructions: bool = False
    resource_tools: bool = False
    prompt_tools: bool = False
    files: Path | None = None

    _sampler: Sampler | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _check_sampling(self) -> MCPSettings:
        if self.sampling is not None:
            self._sampler = sampler_of(self.sampling)
        return self

    @property
    def sampler(self) -> Sampler | None:
        """What answers requests for a model's reply; None if there may be none."""
        return self._sampler


MAX_NAME_CHARS = 64

_ANY_ARGUMENTS: TypeAdapter[Any] = TypeAdapter(dict[str, Any])


@dataclass(frozen=True)
class RemoteTool(SchemaTool):
    """A tool of an MCP server."""


def make_remote_tool(
    listed: Listed,
    call: Callable[[str, dict[str, Any], Progress | None], Awaitable[object]],
    settings: MCPSettings,
    notes: str = "",
    channel: ServerChannel | None = None,
) -> RemoteTool:
    """The tool for a definition in a server's list.

    Raises:
        ToolDefinitionError: With the prefix its name is too long.
    """
    own = listed.name
    name = model_name(own, settings.prefix)
    if not is_valid_name(own, settings.prefix):
        raise ToolDefinitionError(
            f"{name!r} is not a valid tool name (letters, digits, '_' and '-', {MAX_NAME_CHARS} at most): choose "
            "another prefix, or select other tools of the server with only=..."
        )

    async def remote(context: ToolContext[Any] | None = None, /, **arguments: Any) -> object:
        return await call(own, arguments, None if context is None else context.progress)

    idempotent = _is_idempotent(listed, settings)
    return RemoteTool(
        ToolSpec(name, listed.description or listed.title or "", listed.input_schema),
        remote,
        _ANY_ARGUMENTS,
        takes_context=True,
        is_async=True,
        timeout=settings.timeout,
        requires_approval=settings.requires_approval,
        parallel=settings.parallel,
        idempotent=idempotent,
        delegate=None if channel is None else RemoteCalls(channel, own, idempotent, settings.sampler),
        definition=definition_pin(listed),
        notes=notes,
    )


def _is_idempotent(listed: Listed, settings: MCPSettings) -> bool:
    if settings.idempotent != "annotated":
        return listed.name in settings.idempotent
    hints = listed.annotations
    return hints is not None and bool(hints.read_only_hint or hints.idempotent_hint)


def model_name(own: str, prefix: str) -> str:
    """The name of a server's tool for models."""
    return prefix + re.sub(r"[^A-Za-z0-9_-]", "_", own)


def is_valid_name(own: str, prefix: str) -> bool:
    """Whether the name of a server's tool is valid for models, once it has the prefix."""
    return re.fullmatch(rf"[A-Za-z0-9_-]{{1,{MAX_NAME_CHARS}}}", model_name(own, prefix)) is not None


def definition_pin(listed: Listed) -> str:
    """The parts of a tool definition that must not change while an agent uses the tool, as canonical JSON."""
    annotations = listed.annotations
    return canonical_json(
        {
            "name": listed.name,
            "annotations": None if annotations is None else annotations.model_dump(mode="json", exclude_none=True),
            "description": listed.description,
            "input_schema": listed.input_schema,
            "output_schema": listed.output_schema,
            "title": listed.title,
        }
    )
