"""Proofs about a table: what no run of it can do, how long one can get, and how two tables differ."""

from agentfsm.analysis.analyse import Analysis, Dead, Verdict, analyse
from agentfsm.analysis.bounds import Bounds
from agentfsm.analysis.diff import Decides, Difference, Moved, diff, from_table
from agentfsm.analysis.facts import Change, Counter, Facts, Known, exactly
from agentfsm.analysis.known import loop_facts
from agentfsm.analysis.properties import Property, must_pass, never_after

__all__ = [
    "Analysis",
    "Bounds",
    "Change",
    "Counter",
    "Dead",
    "Decides",
    "Difference",
    "Facts",
    "Known",
    "Moved",
    "Property",
    "Verdict",
    "analyse",
    "diff",
    "exactly",
    "from_table",
    "loop_facts",
    "must_pass",
    "never_after",
]
