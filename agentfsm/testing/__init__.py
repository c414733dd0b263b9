"""For tests, with no model: ``ScriptedModel``, ``RecordingModel`` and ``FakeClock``."""

from agentfsm.testing.clock import FakeClock
from agentfsm.testing.models import RecordingModel, ScriptedModel, ScriptExhaustedError, call

__all__ = ["FakeClock", "RecordingModel", "ScriptExhaustedError", "ScriptedModel", "call"]
