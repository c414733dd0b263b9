"""What may happen: pure data and pure functions, with no I/O, no clock and no await."""

from agentfsm.machine.engine import Decision, Machine
from agentfsm.machine.graph import Graph, Guard, State, StateSpec, Transition

__all__ = ["Decision", "Graph", "Guard", "Machine", "State", "StateSpec", "Transition"]
