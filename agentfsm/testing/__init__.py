"""For tests, with no model: scripts, a clock, paths over a graph, and drivers that take them."""

from agentfsm.core.examples import Example, detector
from agentfsm.testing.clock import FakeClock
from agentfsm.testing.compose import NoExampleError
from agentfsm.testing.contests import Contest, contests
from agentfsm.testing.forced import force, forcing
from agentfsm.testing.models import RecordingModel, ScriptedModel, ScriptExhaustedError, call
from agentfsm.testing.paths import Path, Paths, paths
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
    "paths",
]
