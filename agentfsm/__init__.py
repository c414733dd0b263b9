"""agentfsm: an AI agent's loop as one declared, checked table of states, guards and transitions.

Names load when they are first used, so importing the package costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentfsm.agent import Agent
    from agentfsm.errors import (
        AgentfsmError,
        BlankHumanReplyError,
        ConfigurationError,
        ContextOverflowError,
        GraphError,
        HumanReplyError,
        JournalError,
        JournalGraphError,
        MissingExtraError,
        MissingKeyError,
        ModelError,
        NoTransitionError,
        ProviderError,
        RunError,
        RunExistsError,
        StaleHumanReplyError,
        StaleLease,
        StoreError,
        StoreFormatError,
        StoreFullError,
        StoreLockedError,
        SuspensionExpiredError,
        SuspensionFormatError,
        SuspensionGraphError,
        SuspensionRecordError,
        SuspensionTamperedError,
        SuspensionUsedError,
        ToolDefinitionError,
        ToolError,
        TransientProviderError,
        UnknownModelError,
        UnknownRunError,
    )
    from agentfsm.journal.memory_store import MemoryStore
    from agentfsm.journal.migration import Migration
    from agentfsm.journal.records import Record
    from agentfsm.journal.sqlite.sqlite_store import SqliteStore
    from agentfsm.journal.store import Store
    from agentfsm.loop.detectors import Example, detector
    from agentfsm.loop.events import (
        Event,
        Handoff,
        ModelReplied,
        PartialRunSummary,
        ReasoningDelta,
        RecoveryStarted,
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
    from agentfsm.loop.failures import Action, Failure, FailureKind
    from agentfsm.loop.guardrails import AgentGuardrails, Behavior
    from agentfsm.loop.messages import FinishReason, Image, Message, Reply, Role, ToolCall, ToolResult, Usage
    from agentfsm.loop.model import Model, ModelRequest, ToolSpec
    from agentfsm.loop.outcomes import StateResult
    from agentfsm.loop.policy import DefaultPolicy, RecoveryPolicy
    from agentfsm.loop.presets import Preset
    from agentfsm.loop.state import RunState
    from agentfsm.loop.suspension import SuspensionRecord
    from agentfsm.loop.table import LOOP
    from agentfsm.machine.engine import Decision, Machine
    from agentfsm.machine.graph import Graph, State, StateSpec, Transition
    from agentfsm.runtime.approval import Allow, Deny, Edit, GiveUp, ItDidNotRun, ItRan
    from agentfsm.runtime.hooks import AbortRun, AskApproval, DenyCall, HookContext, SkipCall, hook, observer
    from agentfsm.runtime.host import Clock, FileReplayGuard, Host, Memory
    from agentfsm.runtime.permissions import ArgumentMatcher, allow, ask, deny, permissions
    from agentfsm.runtime.result import RunResult
    from agentfsm.runtime.run import Run
    from agentfsm.runtime.tools import Tool, ToolContext, tool

__version__ = "0.1.0"

__all__ = [
    "LOOP",
    "AbortRun",
    "Action",
    "Agent",
    "AgentGuardrails",
    "AgentfsmError",
    "Allow",
    "ArgumentMatcher",
    "AskApproval",
    "Behavior",
    "BlankHumanReplyError",
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
    "FileReplayGuard",
    "FinishReason",
    "GiveUp",
    "Graph",
    "GraphError",
    "Handoff",
    "HookContext",
    "Host",
    "HumanReplyError",
    "Image",
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
    "PartialRunSummary",
    "Preset",
    "ProviderError",
    "ReasoningDelta",
    "Record",
    "RecoveryPolicy",
    "RecoveryStarted",
    "Reply",
    "ReplyRestarted",
    "Role",
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
    "StaleHumanReplyError",
    "StaleLease",
    "State",
    "StateResult",
    "StateSpec",
    "Store",
    "StoreError",
    "StoreFormatError",
    "StoreFullError",
    "StoreLockedError",
    "SuspensionExpiredError",
    "SuspensionFormatError",
    "SuspensionGraphError",
    "SuspensionRecord",
    "SuspensionRecordError",
    "SuspensionTamperedError",
    "SuspensionUsedError",
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

_MODULE_OF = {
    name: module
    for module, names in {
        "agent": "Agent",
        "errors": (
            "AgentfsmError BlankHumanReplyError ConfigurationError ContextOverflowError GraphError "
            "HumanReplyError JournalError JournalGraphError MissingExtraError MissingKeyError ModelError "
            "NoTransitionError ProviderError RunError RunExistsError StaleHumanReplyError StaleLease StoreError "
            "StoreFormatError StoreFullError StoreLockedError SuspensionExpiredError SuspensionFormatError "
            "SuspensionGraphError SuspensionRecordError SuspensionTamperedError SuspensionUsedError "
            "ToolDefinitionError ToolError TransientProviderError UnknownModelError UnknownRunError"
        ),
        "journal.memory_store": "MemoryStore",
        "journal.migration": "Migration",
        "journal.records": "Record",
        "journal.sqlite.sqlite_store": "SqliteStore",
        "journal.store": "Store",
        "loop.detectors": "Example detector",
        "loop.events": (
            "Event Handoff ModelReplied PartialRunSummary ReasoningDelta RecoveryStarted ReplyRestarted "
            "RunCancelled RunCompleted RunResumed RunStarted RunWarning TextDelta ToolCallDelta ToolFinished "
            "ToolStarted Transitioned UserInputRequested"
        ),
        "loop.failures": "Action Failure FailureKind",
        "loop.guardrails": "AgentGuardrails Behavior",
        "loop.messages": "FinishReason Image Message Reply Role ToolCall ToolResult Usage",
        "loop.model": "Model ModelRequest ToolSpec",
        "loop.outcomes": "StateResult",
        "loop.policy": "DefaultPolicy RecoveryPolicy",
        "loop.presets": "Preset",
        "loop.state": "RunState",
        "loop.suspension": "SuspensionRecord",
        "loop.table": "LOOP",
        "machine.engine": "Decision Machine",
        "machine.graph": "Graph State StateSpec Transition",
        "runtime.approval": "Allow Deny Edit GiveUp ItDidNotRun ItRan",
        "runtime.hooks": "AbortRun AskApproval DenyCall HookContext SkipCall hook observer",
        "runtime.host": "Clock FileReplayGuard Host Memory",
        "runtime.permissions": "ArgumentMatcher allow ask deny permissions",
        "runtime.result": "RunResult",
        "runtime.run": "Run",
        "runtime.tools": "Tool ToolContext tool",
    }.items()
    for name in names.split()
}
"""In which module each name lives: for the interpreter, as the imports above are for type checkers."""


if not TYPE_CHECKING:  # where type checkers see it, they take any name for one that is there

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'agentfsm' has no attribute {name!r}")
        value = getattr(import_module(f"agentfsm.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
