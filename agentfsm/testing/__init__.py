"""Tools for testing an agent without a model: fakes, scenarios, paths through a graph, and drivers that follow them.

Names load when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentfsm.lazy_imports import lazy_exports

if TYPE_CHECKING:
    from agentfsm.loop.detectors import Example, detector
    from agentfsm.testing.evaluation import Case, CaseAttempt, Evaluation, evaluate
    from agentfsm.testing.fakes import FakeClock, RecordingModel, ScriptedModel, ScriptEntry, ScriptExhaustedError, call
    from agentfsm.testing.graph_conformance import LOOP_CHECKS
    from agentfsm.testing.guard_examples import GuardExamples
    from agentfsm.testing.guard_priority import (
        GuardConflict,
        check_priority,
        check_priority_async,
        guard_conflicts,
    )
    from agentfsm.testing.invariants import check_stored_run
    from agentfsm.testing.loop_conformance import LoopCheck
    from agentfsm.testing.path_generation import Path, Paths, paths
    from agentfsm.testing.path_runner import (
        PathDivergence,
        PathDivergenceError,
        PathRun,
        WitnessDriver,
        default_agent,
        force,
        force_async,
    )
    from agentfsm.testing.path_to_scenario import NoExampleError
    from agentfsm.testing.reviewed_paths import ReviewedPaths
    from agentfsm.testing.simulation import (
        DISMISSED,
        ESCALATED,
        EXPIRED,
        RUN_TOOL,
        ModelTurn,
        Scenario,
        SideEvent,
        SimulationResult,
        Simulator,
    )
    from agentfsm.testing.tool_calls import random_scenarios

__all__ = [
    "DISMISSED",
    "ESCALATED",
    "EXPIRED",
    "LOOP_CHECKS",
    "RUN_TOOL",
    "Case",
    "CaseAttempt",
    "Evaluation",
    "Example",
    "FakeClock",
    "GuardConflict",
    "GuardExamples",
    "LoopCheck",
    "ModelTurn",
    "NoExampleError",
    "Path",
    "PathDivergence",
    "PathDivergenceError",
    "PathRun",
    "Paths",
    "RecordingModel",
    "ReviewedPaths",
    "Scenario",
    "ScriptEntry",
    "ScriptExhaustedError",
    "ScriptedModel",
    "SideEvent",
    "SimulationResult",
    "Simulator",
    "WitnessDriver",
    "call",
    "check_priority",
    "check_priority_async",
    "check_stored_run",
    "default_agent",
    "detector",
    "evaluate",
    "force",
    "force_async",
    "guard_conflicts",
    "paths",
    "random_scenarios",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "agentfsm.loop.detectors": "Example detector",
            "agentfsm.testing.evaluation": "Case CaseAttempt Evaluation evaluate",
            "agentfsm.testing.fakes": "FakeClock RecordingModel ScriptEntry ScriptExhaustedError ScriptedModel call",
            "agentfsm.testing.graph_conformance": "LOOP_CHECKS",
            "agentfsm.testing.loop_conformance": "LoopCheck",
            "agentfsm.testing.guard_examples": "GuardExamples",
            "agentfsm.testing.guard_priority": "GuardConflict check_priority check_priority_async guard_conflicts",
            "agentfsm.testing.path_runner": (
                "PathDivergence PathDivergenceError PathRun WitnessDriver default_agent force force_async"
            ),
            "agentfsm.testing.path_generation": "Path Paths paths",
            "agentfsm.testing.path_to_scenario": "NoExampleError",
            "agentfsm.testing.tool_calls": "random_scenarios",
            "agentfsm.testing.reviewed_paths": "ReviewedPaths",
            "agentfsm.testing.invariants": "check_stored_run",
            "agentfsm.testing.simulation": (
                "DISMISSED ESCALATED EXPIRED RUN_TOOL ModelTurn Scenario SideEvent SimulationResult Simulator"
            ),
        },
    )
