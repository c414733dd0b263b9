"""Declared graphs and the engine that runs them: pure data and pure functions, no I/O, no clock, no await."""

from agentfsm.machine.engine import Decision, Machine
from agentfsm.machine.graph import Graph, Guard, State, StateSpec, Transition

__all__ = ["Decision", "Graph", "Guard", "Machine", "State", "StateSpec", "Transition"]
