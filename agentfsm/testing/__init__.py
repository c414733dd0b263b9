"""Tools for testing an agent without a model: fakes, scenarios, paths through a graph, and drivers that follow them.

Names load when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentfsm.loop.detectors import Example, detector
    from agentfsm.testing.fakes import FakeClock, RecordingModel, ScriptedModel, ScriptExhaustedError, call
    from agentfsm.testing.guard_examples import GuardExamples
    from agentfsm.testing.guard_priority import GuardConflict, check_priority, guard_conflicts
    from agentfsm.testing.path_drivers import (
        PathDivergence,
        PathDivergenceError,
        PathRun,
        WitnessDriver,
        default_agent,
        force,
        force_async,
    )
    from agentfsm.testing.path_generation import Path, Paths, paths
    from agentfsm.testing.path_to_scenario import NoExampleError
    from agentfsm.testing.simulation import (
        DISMISSED,
        EXPIRED,
        ModelTurn,
        Scenario,
        SideEvent,
        SimulationResult,
        Simulator,
    )

__all__ = [
    "DISMISSED",
    "EXPIRED",
    "Example",
    "FakeClock",
    "GuardConflict",
    "GuardExamples",
    "ModelTurn",
    "NoExampleError",
    "Path",
    "PathDivergence",
    "PathDivergenceError",
    "PathRun",
    "Paths",
    "RecordingModel",
    "Scenario",
    "ScriptExhaustedError",
    "ScriptedModel",
    "SideEvent",
    "SimulationResult",
    "Simulator",
    "WitnessDriver",
    "call",
    "check_priority",
    "default_agent",
    "detector",
    "force",
    "force_async",
    "guard_conflicts",
    "paths",
]

_MODULE_OF = {
    "DISMISSED": "agentfsm.testing.simulation",
    "EXPIRED": "agentfsm.testing.simulation",
    "Example": "agentfsm.loop.detectors",
    "FakeClock": "agentfsm.testing.fakes",
    "GuardConflict": "agentfsm.testing.guard_priority",
    "GuardExamples": "agentfsm.testing.guard_examples",
    "ModelTurn": "agentfsm.testing.simulation",
    "NoExampleError": "agentfsm.testing.path_to_scenario",
    "Path": "agentfsm.testing.path_generation",
    "PathDivergence": "agentfsm.testing.path_drivers",
    "PathDivergenceError": "agentfsm.testing.path_drivers",
    "PathRun": "agentfsm.testing.path_drivers",
    "Paths": "agentfsm.testing.path_generation",
    "RecordingModel": "agentfsm.testing.fakes",
    "Scenario": "agentfsm.testing.simulation",
    "ScriptExhaustedError": "agentfsm.testing.fakes",
    "ScriptedModel": "agentfsm.testing.fakes",
    "SideEvent": "agentfsm.testing.simulation",
    "SimulationResult": "agentfsm.testing.simulation",
    "Simulator": "agentfsm.testing.simulation",
    "WitnessDriver": "agentfsm.testing.path_drivers",
    "call": "agentfsm.testing.fakes",
    "check_priority": "agentfsm.testing.guard_priority",
    "default_agent": "agentfsm.testing.path_drivers",
    "detector": "agentfsm.loop.detectors",
    "force": "agentfsm.testing.path_drivers",
    "force_async": "agentfsm.testing.path_drivers",
    "guard_conflicts": "agentfsm.testing.guard_priority",
    "paths": "agentfsm.testing.path_generation",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
