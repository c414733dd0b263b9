"""MCP servers, through the official SDK (extra ``mcp``)."""

from __future__ import annotations

from agentfsm.integrations.mcp.oauth import OAuth, TokenStorage
from agentfsm.integrations.mcp.remote_tool import MCPSettings
from agentfsm.integrations.mcp.resources import Prompt, PromptArgument, Resource, ResourceContent, ResourceTemplate
from agentfsm.integrations.mcp.toolset import MCPTools

__all__ = [
    "MCPSettings",
    "MCPTools",
    "OAuth",
    "Prompt",
    "PromptArgument",
    "Resource",
    "ResourceContent",
    "ResourceTemplate",
    "TokenStorage",
]
