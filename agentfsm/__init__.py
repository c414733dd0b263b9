"""agentfsm: an AI agent's loop as one declared, checked table of states, guards and transitions.

Names load when they are first used, so importing the package costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentfsm.agent import Agent
    from agentfsm.core.events import (
        AgentError,
        Event,
        Handoff,
        ModelReplied,
        PartialRunSummary,
        ReasoningDelta,
        ReplyRestarted,
        RunCancelled,
        RunCompleted,
        RunResumed,
        RunStarted,
        RunWarning,
        TextDelta,
        ToolCallDelta,
        ToolFinished,
        ToolStarted,
        Transitioned,
        UserInputRequested,
    )
    from agentfsm.core.examples import Example, detector
    from agentfsm.core.failures import Action, Failure, FailureKind
    from agentfsm.core.guardrails import AgentGuardrails
    from agentfsm.core.images import Image
    from agentfsm.core.loop import LOOP
    from agentfsm.core.messages import FinishReason, Message, Reply, Role, ToolCall, ToolResult, Usage
    from agentfsm.core.model import Model, ModelRequest, ToolSpec
    from agentfsm.core.outcomes import Noted
    from agentfsm.core.policy import DefaultPolicy, RecoveryPolicy
    from agentfsm.core.presets import Preset
    from agentfsm.core.rules import Rules
    from agentfsm.core.state import RunState
    from agentfsm.core.suspension import SuspensionRecord
    from agentfsm.errors import (
        AgentfsmError,
        BlankReplyError,
        ConfigurationError,
        ContextOverflowError,
        GraphError,
        JournalError,
        JournalGraphError,
        MissingExtraError,
        MissingKeyError,
        ModelError,
        NoTransitionError,
        ProviderError,
        RecordError,
        RecordExpiredError,
        RecordFormatError,
        RecordGraphError,
        RecordTamperedError,
        RecordUsedError,
        ReplyError,
        RunError,
        RunExistsError,
        StaleLease,
        StaleReplyError,
        StoreError,
        StoreFormatError,
        StoreFullError,
        StoreLockedError,
        ToolDefinitionError,
        ToolError,
        TransientProviderError,
        UnknownModelError,
        UnknownRunError,
    )
    from agentfsm.journal.memory import MemoryStore
    from agentfsm.journal.migration import Migration
    from agentfsm.journal.records import Record
    from agentfsm.journal.sqlite import SqliteStore
    from agentfsm.journal.store import Store
    from agentfsm.machine.engine import Decision, Machine
    from agentfsm.machine.graph import Graph, State, StateSpec, Transition
    from agentfsm.runtime.hooks import AbortRun, AskApproval, DenyCall, HookContext, SkipCall, hook, observer
    from agentfsm.runtime.host import Clock, Host, UsedInFolder
    from agentfsm.runtime.memory import Memory
    from agentfsm.runtime.permissions import Is, allow, ask, deny, permissions
    from agentfsm.runtime.replies import Allow, Deny, Edit, GiveUp, ItDidNotRun, ItRan
    from agentfsm.runtime.result import RunResult
    from agentfsm.runtime.run import Run
    from agentfsm.runtime.tools import Tool, ToolContext, tool

__version__ = "0.1.0"

__all__ = [
    "LOOP",
    "AbortRun",
    "Action",
    "Agent",
    "AgentError",
    "AgentGuardrails",
    "AgentfsmError",
    "Allow",
    "AskApproval",
    "BlankReplyError",
    "Clock",
    "ConfigurationError",
    "ContextOverflowError",
    "Decision",
    "DefaultPolicy",
    "Deny",
    "DenyCall",
    "Edit",
    "Event",
    "Example",
    "Failure",
    "FailureKind",
    "FinishReason",
    "GiveUp",
    "Graph",
    "GraphError",
    "Handoff",
    "HookContext",
    "Host",
    "Image",
    "Is",
    "ItDidNotRun",
    "ItRan",
    "JournalError",
    "JournalGraphError",
    "Machine",
    "Memory",
    "MemoryStore",
    "Message",
    "Migration",
    "MissingExtraError",
    "MissingKeyError",
    "Model",
    "ModelError",
    "ModelReplied",
    "ModelRequest",
    "NoTransitionError",
    "Noted",
    "PartialRunSummary",
    "Preset",
    "ProviderError",
    "ReasoningDelta",
    "Record",
    "RecordError",
    "RecordExpiredError",
    "RecordFormatError",
    "RecordGraphError",
    "RecordTamperedError",
    "RecordUsedError",
    "RecoveryPolicy",
    "Reply",
    "ReplyError",
    "ReplyRestarted",
    "Role",
    "Rules",
    "Run",
    "RunCancelled",
    "RunCompleted",
    "RunError",
    "RunExistsError",
    "RunResult",
    "RunResumed",
    "RunStarted",
    "RunState",
    "RunWarning",
    "SkipCall",
    "SqliteStore",
    "StaleLease",
    "StaleReplyError",
    "State",
    "StateSpec",
    "Store",
    "StoreError",
    "StoreFormatError",
    "StoreFullError",
    "StoreLockedError",
    "SuspensionRecord",
    "TextDelta",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "ToolContext",
    "ToolDefinitionError",
    "ToolError",
    "ToolFinished",
    "ToolResult",
    "ToolSpec",
    "ToolStarted",
    "TransientProviderError",
    "Transition",
    "Transitioned",
    "UnknownModelError",
    "UnknownRunError",
    "Usage",
    "UsedInFolder",
    "UserInputRequested",
    "allow",
    "ask",
    "deny",
    "detector",
    "hook",
    "observer",
    "permissions",
    "tool",
]

_HOME = {
    name: module
    for module, names in {
        "agent": "Agent",
        "core.events": (
            "AgentError Event Handoff ModelReplied PartialRunSummary ReasoningDelta ReplyRestarted RunCancelled "
            "RunCompleted RunResumed RunStarted RunWarning TextDelta ToolCallDelta ToolFinished ToolStarted "
            "Transitioned UserInputRequested"
        ),
        "core.examples": "Example detector",
        "core.failures": "Action Failure FailureKind",
        "core.guardrails": "AgentGuardrails",
        "core.images": "Image",
        "core.loop": "LOOP",
        "core.messages": "FinishReason Message Reply Role ToolCall ToolResult Usage",
        "core.model": "Model ModelRequest ToolSpec",
        "core.outcomes": "Noted",
        "core.policy": "DefaultPolicy RecoveryPolicy",
        "core.presets": "Preset",
        "core.rules": "Rules",
        "core.state": "RunState",
        "core.suspension": "SuspensionRecord",
        "errors": (
            "AgentfsmError BlankReplyError ConfigurationError ContextOverflowError GraphError JournalError "
            "JournalGraphError MissingExtraError MissingKeyError ModelError NoTransitionError ProviderError "
            "RecordError RecordExpiredError RecordFormatError RecordGraphError RecordTamperedError "
            "RecordUsedError ReplyError RunError RunExistsError StaleLease StaleReplyError StoreError "
            "StoreFormatError StoreFullError StoreLockedError ToolDefinitionError ToolError "
            "TransientProviderError UnknownModelError UnknownRunError"
        ),
        "journal.records": "Record",
        "journal.store": "Store",
        "journal.memory": "MemoryStore",
        "journal.migration": "Migration",
        "journal.sqlite": "SqliteStore",
        "machine.engine": "Decision Machine",
        "machine.graph": "Graph State StateSpec Transition",
        "runtime.hooks": "AbortRun AskApproval DenyCall HookContext SkipCall hook observer",
        "runtime.host": "Clock Host UsedInFolder",
        "runtime.memory": "Memory",
        "runtime.permissions": "Is allow ask deny permissions",
        "runtime.replies": "Allow Deny Edit GiveUp ItDidNotRun ItRan",
        "runtime.result": "RunResult",
        "runtime.run": "Run",
        "runtime.tools": "Tool ToolContext tool",
    }.items()
    for name in names.split()
}
"""In which module each name lives: for the interpreter, as the imports above are for type checkers."""


if not TYPE_CHECKING:  # where type checkers see it, they take any name for one that is there

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'agentfsm' has no attribute {name!r}")
        value = getattr(import_module(f"agentfsm.{_HOME[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
