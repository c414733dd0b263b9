"""agentfsm: an AI agent's loop as one declared, checked table of states, guards and transitions.

Names load on first use, so importing the package is cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentfsm.lazy_imports import lazy_exports

if TYPE_CHECKING:
    from agentfsm.agent import Agent
    from agentfsm.agent.run_options import RunOptions
    from agentfsm.agent.sessions import Session
    from agentfsm.errors import (
        ActorIsRequesterError,
        ActorRoleError,
        AgentfsmError,
        AuthenticationError,
        BlankHumanReplyError,
        BudgetSpentError,
        ConfigurationError,
        ContextOverflowError,
        GraphError,
        HumanReplyError,
        JournalError,
        JournalGraphError,
        MissingDepsError,
        MissingExtraError,
        MissingKeyError,
        MissingModelError,
        ModelError,
        ModelMismatchError,
        NoTransitionError,
        ProviderError,
        ReadOnlyError,
        RepeatedVoteError,
        RunEndedError,
        RunError,
        RunExistsError,
        RunHeldError,
        SessionBusyError,
        SessionOpenError,
        StaleHumanReplyError,
        StaleLease,
        StateEffectError,
        StoreError,
        StoreFormatError,
        StoreFullError,
        StoreLockedError,
        StoreMovedError,
        SuspensionApprovalError,
        SuspensionExpiredError,
        SuspensionFormatError,
        SuspensionGraphError,
        SuspensionGuardrailsError,
        SuspensionRecordError,
        SuspensionRegistryError,
        SuspensionRulesError,
        SuspensionTamperedError,
        SuspensionToolError,
        SuspensionUsedError,
        ToolDefinitionError,
        ToolError,
        ToolsetError,
        TransientProviderError,
        UnknownModelError,
        UnknownRunError,
    )
    from agentfsm.journal.memory_store import MemoryStore
    from agentfsm.journal.migration import Migration
    from agentfsm.journal.postgres import PostgresStore
    from agentfsm.journal.records import Record
    from agentfsm.journal.run_info import RunInfo, RunPage, RunQuery, WaitingFor
    from agentfsm.journal.send_signal import SentSignal
    from agentfsm.journal.sqlite import SqliteStore
    from agentfsm.journal.store import Store
    from agentfsm.journal.store_url import open_store
    from agentfsm.loop.approval_rows import with_votes
    from agentfsm.loop.detectors import Example, detector
    from agentfsm.loop.event_json import event_schema
    from agentfsm.loop.events import (
        Event,
        Handoff,
        ModelReplied,
        PartialRunSummary,
        ReasoningDelta,
        RecoveryStarted,
        ReplyRestarted,
        RunAborted,
        RunCancelled,
        RunCompleted,
        RunResumed,
        RunStarted,
        RunWarning,
        SubagentEvent,
        TextDelta,
        ToolCallDelta,
        ToolFinished,
        ToolProgress,
        ToolStarted,
        Transitioned,
        UserInputRequested,
    )
    from agentfsm.loop.failures import Action, Failure, FailureKind
    from agentfsm.loop.guardrails import AgentGuardrails, Behavior
    from agentfsm.loop.guards import came_back
    from agentfsm.loop.history import KeepAll, KeepLast, Summarize
    from agentfsm.loop.human_input import Allow, Deny, Edit, Extend, Fill, GiveUp, ItDidNotRun, ItRan, ReachedLimit
    from agentfsm.loop.messages import (
        Compaction,
        File,
        FinishReason,
        Image,
        Message,
        Reply,
        Role,
        ToolCall,
        ToolResult,
        Usage,
    )
    from agentfsm.loop.model import Model, ModelRequest, ToolSpec
    from agentfsm.loop.outcomes import StateResult
    from agentfsm.loop.partial_output import PartialOutput
    from agentfsm.loop.presets import PRESETS, Preset
    from agentfsm.loop.quorum import Actor, Approval
    from agentfsm.loop.recovery_policy import DefaultPolicy, Recovery, RecoveryPolicy
    from agentfsm.loop.state import RunState, RunView
    from agentfsm.loop.suspension import SuspensionRecord
    from agentfsm.loop.transition_table import LOOP
    from agentfsm.machine.declaration import Counter, Exhausted, Guard, exhausted
    from agentfsm.machine.engine import Decision, Machine
    from agentfsm.machine.graph import Graph, State, StateSpec, Transition
    from agentfsm.runs import Runs, StoredRun
    from agentfsm.runtime.argument_matcher import ArgumentMatcher
    from agentfsm.runtime.control_tools import ask_user, return_done, return_unable
    from agentfsm.runtime.hooks import AbortRun, AskApproval, DenyCall, HookContext, SkipCall, hook, observer
    from agentfsm.runtime.host import Clock, FileReplayGuard, Host, Memory, ReplayGuard
    from agentfsm.runtime.permissions import allow, ask, deny, permissions
    from agentfsm.runtime.result import RunResult
    from agentfsm.runtime.run import Run, hand_over
    from agentfsm.runtime.run_context import RunContext, ToolContext
    from agentfsm.runtime.state_context import StateContext
    from agentfsm.runtime.tools import Tool, tool
    from agentfsm.runtime.toolsets import FilteredToolset, Toolset

__version__ = "0.1.0"

__all__ = [
    "LOOP",
    "PRESETS",
    "AbortRun",
    "Action",
    "Actor",
    "ActorIsRequesterError",
    "ActorRoleError",
    "Agent",
    "AgentGuardrails",
    "AgentfsmError",
    "Allow",
    "Approval",
    "ArgumentMatcher",
    "AskApproval",
    "AuthenticationError",
    "Behavior",
    "BlankHumanReplyError",
    "BudgetSpentError",
    "Clock",
    "Compaction",
    "ConfigurationError",
    "ContextOverflowError",
    "Counter",
    "Decision",
    "DefaultPolicy",
    "Deny",
    "DenyCall",
    "Edit",
    "Event",
    "Example",
    "Exhausted",
    "Extend",
    "Failure",
    "FailureKind",
    "File",
    "FileReplayGuard",
    "Fill",
    "FilteredToolset",
    "FinishReason",
    "GiveUp",
    "Graph",
    "GraphError",
    "Guard",
    "Handoff",
    "HookContext",
    "Host",
    "HumanReplyError",
    "Image",
    "ItDidNotRun",
    "ItRan",
    "JournalError",
    "JournalGraphError",
    "KeepAll",
    "KeepLast",
    "Machine",
    "Memory",
    "MemoryStore",
    "Message",
    "Migration",
    "MissingDepsError",
    "MissingExtraError",
    "MissingKeyError",
    "MissingModelError",
    "Model",
    "ModelError",
    "ModelMismatchError",
    "ModelReplied",
    "ModelRequest",
    "NoTransitionError",
    "PartialOutput",
    "PartialRunSummary",
    "PostgresStore",
    "Preset",
    "ProviderError",
    "ReachedLimit",
    "ReadOnlyError",
    "ReasoningDelta",
    "Record",
    "Recovery",
    "RecoveryPolicy",
    "RecoveryStarted",
    "RepeatedVoteError",
    "ReplayGuard",
    "Reply",
    "ReplyRestarted",
    "Role",
    "Run",
    "RunAborted",
    "RunCancelled",
    "RunCompleted",
    "RunContext",
    "RunEndedError",
    "RunError",
    "RunExistsError",
    "RunHeldError",
    "RunInfo",
    "RunOptions",
    "RunPage",
    "RunQuery",
    "RunResult",
    "RunResumed",
    "RunStarted",
    "RunState",
    "RunView",
    "RunWarning",
    "Runs",
    "SentSignal",
    "Session",
    "SessionBusyError",
    "SessionOpenError",
    "SkipCall",
    "SqliteStore",
    "StaleHumanReplyError",
    "StaleLease",
    "State",
    "StateContext",
    "StateEffectError",
    "StateResult",
    "StateSpec",
    "Store",
    "StoreError",
    "StoreFormatError",
    "StoreFullError",
    "StoreLockedError",
    "StoreMovedError",
    "StoredRun",
    "SubagentEvent",
    "Summarize",
    "SuspensionApprovalError",
    "SuspensionExpiredError",
    "SuspensionFormatError",
    "SuspensionGraphError",
    "SuspensionGuardrailsError",
    "SuspensionRecord",
    "SuspensionRecordError",
    "SuspensionRegistryError",
    "SuspensionRulesError",
    "SuspensionTamperedError",
    "SuspensionToolError",
    "SuspensionUsedError",
    "TextDelta",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "ToolContext",
    "ToolDefinitionError",
    "ToolError",
    "ToolFinished",
    "ToolProgress",
    "ToolResult",
    "ToolSpec",
    "ToolStarted",
    "Toolset",
    "ToolsetError",
    "TransientProviderError",
    "Transition",
    "Transitioned",
    "UnknownModelError",
    "UnknownRunError",
    "Usage",
    "UserInputRequested",
    "WaitingFor",
    "allow",
    "ask",
    "ask_user",
    "came_back",
    "deny",
    "detector",
    "event_schema",
    "exhausted",
    "hand_over",
    "hook",
    "observer",
    "open_store",
    "permissions",
    "return_done",
    "return_unable",
    "tool",
    "with_votes",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "agentfsm.agent": "Agent",
            "agentfsm.agent.run_options": "RunOptions",
            "agentfsm.agent.sessions": "Session",
            "agentfsm.errors": (
                "ActorIsRequesterError ActorRoleError AgentfsmError AuthenticationError BlankHumanReplyError "
                "BudgetSpentError ConfigurationError ContextOverflowError "
                "GraphError HumanReplyError JournalError JournalGraphError MissingDepsError MissingExtraError "
                "MissingKeyError MissingModelError ModelError ModelMismatchError NoTransitionError ProviderError "
                "ReadOnlyError RepeatedVoteError RunEndedError RunError RunExistsError RunHeldError SessionBusyError "
                "SessionOpenError StaleHumanReplyError StaleLease StateEffectError StoreError StoreFormatError "
                "StoreFullError StoreLockedError StoreMovedError SuspensionApprovalError SuspensionExpiredError "
                "SuspensionFormatError SuspensionGraphError SuspensionGuardrailsError SuspensionRecordError "
                "SuspensionRegistryError SuspensionRulesError SuspensionTamperedError SuspensionToolError "
                "SuspensionUsedError ToolDefinitionError ToolError ToolsetError TransientProviderError "
                "UnknownModelError UnknownRunError"
            ),
            "agentfsm.journal.memory_store": "MemoryStore",
            "agentfsm.journal.migration": "Migration",
            "agentfsm.journal.postgres": "PostgresStore",
            "agentfsm.journal.records": "Record",
            "agentfsm.journal.run_info": "RunInfo RunPage RunQuery WaitingFor",
            "agentfsm.journal.send_signal": "SentSignal",
            "agentfsm.journal.sqlite": "SqliteStore",
            "agentfsm.journal.store": "Store",
            "agentfsm.journal.store_url": "open_store",
            "agentfsm.loop.approval_rows": "with_votes",
            "agentfsm.loop.detectors": "Example detector",
            "agentfsm.loop.event_json": "event_schema",
            "agentfsm.loop.events": (
                "Event Handoff ModelReplied PartialRunSummary ReasoningDelta RecoveryStarted ReplyRestarted "
                "RunAborted RunCancelled RunCompleted RunResumed RunStarted RunWarning SubagentEvent TextDelta "
                "ToolCallDelta ToolFinished ToolProgress ToolStarted Transitioned UserInputRequested"
            ),
            "agentfsm.loop.guards": "came_back",
            "agentfsm.loop.history": "KeepAll KeepLast Summarize",
            "agentfsm.loop.failures": "Action Failure FailureKind",
            "agentfsm.loop.guardrails": "AgentGuardrails Behavior",
            "agentfsm.loop.messages": "Compaction File FinishReason Image Message Reply Role ToolCall ToolResult Usage",
            "agentfsm.loop.model": "Model ModelRequest ToolSpec",
            "agentfsm.loop.outcomes": "StateResult",
            "agentfsm.loop.recovery_policy": "DefaultPolicy Recovery RecoveryPolicy",
            "agentfsm.loop.partial_output": "PartialOutput",
            "agentfsm.loop.presets": "PRESETS Preset",
            "agentfsm.loop.quorum": "Actor Approval",
            "agentfsm.loop.human_input": "Allow Deny Edit Extend Fill GiveUp ItDidNotRun ItRan ReachedLimit",
            "agentfsm.loop.state": "RunState RunView",
            "agentfsm.loop.suspension": "SuspensionRecord",
            "agentfsm.loop.transition_table": "LOOP",
            "agentfsm.machine.declaration": "Counter Exhausted Guard exhausted",
            "agentfsm.machine.engine": "Decision Machine",
            "agentfsm.machine.graph": "Graph State StateSpec Transition",
            "agentfsm.runtime.control_tools": "ask_user return_done return_unable",
            "agentfsm.runtime.hooks": "AbortRun AskApproval DenyCall HookContext SkipCall hook observer",
            "agentfsm.runtime.host": "Clock FileReplayGuard Host Memory ReplayGuard",
            "agentfsm.runtime.argument_matcher": "ArgumentMatcher",
            "agentfsm.runtime.permissions": "allow ask deny permissions",
            "agentfsm.runtime.result": "RunResult",
            "agentfsm.runtime.run": "Run hand_over",
            "agentfsm.runtime.run_context": "RunContext ToolContext",
            "agentfsm.runtime.state_context": "StateContext",
            "agentfsm.runtime.tools": "Tool tool",
            "agentfsm.runtime.toolsets": "FilteredToolset Toolset",
            "agentfsm.runs": "Runs StoredRun",
        },
    )
