"""For tests, with no model: scripts, a clock, paths over a graph, and drivers that take them.

Names load when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentfsm.core.examples import Example, detector
    from agentfsm.testing.clock import FakeClock
    from agentfsm.testing.compose import NoExampleError
    from agentfsm.testing.contest import Contest, contests, hold
    from agentfsm.testing.forced import force, forcing
    from agentfsm.testing.models import RecordingModel, ScriptedModel, ScriptExhaustedError, call
    from agentfsm.testing.pathfinder import Path, Paths, paths
    from agentfsm.testing.scripts import DISMISSED, EXPIRED, Moment, Said, Script
    from agentfsm.testing.stage import Played, Stage
    from agentfsm.testing.witness import Clash, ClashError, Walk, Witness, bench
    from agentfsm.testing.witnesses import Examples

__all__ = [
    "DISMISSED",
    "EXPIRED",
    "Clash",
    "ClashError",
    "Contest",
    "Example",
    "Examples",
    "FakeClock",
    "Moment",
    "NoExampleError",
    "Path",
    "Paths",
    "Played",
    "RecordingModel",
    "Said",
    "Script",
    "ScriptExhaustedError",
    "ScriptedModel",
    "Stage",
    "Walk",
    "Witness",
    "bench",
    "call",
    "contests",
    "detector",
    "force",
    "forcing",
    "hold",
    "paths",
]

_WHERE = {
    "Clash": "agentfsm.testing.witness",
    "ClashError": "agentfsm.testing.witness",
    "Contest": "agentfsm.testing.contest",
    "DISMISSED": "agentfsm.testing.scripts",
    "EXPIRED": "agentfsm.testing.scripts",
    "Example": "agentfsm.core.examples",
    "Examples": "agentfsm.testing.witnesses",
    "FakeClock": "agentfsm.testing.clock",
    "Moment": "agentfsm.testing.scripts",
    "NoExampleError": "agentfsm.testing.compose",
    "Path": "agentfsm.testing.pathfinder",
    "Paths": "agentfsm.testing.pathfinder",
    "Played": "agentfsm.testing.stage",
    "RecordingModel": "agentfsm.testing.models",
    "Said": "agentfsm.testing.scripts",
    "Script": "agentfsm.testing.scripts",
    "ScriptExhaustedError": "agentfsm.testing.models",
    "ScriptedModel": "agentfsm.testing.models",
    "Stage": "agentfsm.testing.stage",
    "Walk": "agentfsm.testing.witness",
    "Witness": "agentfsm.testing.witness",
    "bench": "agentfsm.testing.witness",
    "call": "agentfsm.testing.models",
    "contests": "agentfsm.testing.contest",
    "detector": "agentfsm.core.examples",
    "force": "agentfsm.testing.forced",
    "forcing": "agentfsm.testing.forced",
    "hold": "agentfsm.testing.contest",
    "paths": "agentfsm.testing.pathfinder",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
