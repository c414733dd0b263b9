"""Model checking of a graph: properties that hold for every run, bounds on a run's length, graph diffs."""

from agentfsm.analysis.analyse import Analysis, DeadTransition, Verdict, analyse
from agentfsm.analysis.analysis_limits import AnalysisLimits
from agentfsm.analysis.assumptions import Assumptions, GuardAssumption, Update, Variable, iff
from agentfsm.analysis.bounds import Bounds
from agentfsm.analysis.compared_table import DeclarationChange
from agentfsm.analysis.decision_diff import DecisionChange, MovedRow
from agentfsm.analysis.graph_diff import GraphDiff, Renamed, diff, format_reviewed, graph_from_table, reviewed_table
from agentfsm.analysis.loop_assumptions import AgentTraits, exported_model, graph_assumptions
from agentfsm.analysis.safety_properties import (
    ApprovalProperty,
    Property,
    SafetyProperty,
    must_pass,
    needs_approvals,
    never_after,
)

__all__ = [
    "AgentTraits",
    "Analysis",
    "AnalysisLimits",
    "ApprovalProperty",
    "Assumptions",
    "Bounds",
    "DeadTransition",
    "DecisionChange",
    "DeclarationChange",
    "GraphDiff",
    "GuardAssumption",
    "MovedRow",
    "Property",
    "Renamed",
    "SafetyProperty",
    "Update",
    "Variable",
    "Verdict",
    "analyse",
    "diff",
    "exported_model",
    "format_reviewed",
    "graph_assumptions",
    "graph_from_table",
    "iff",
    "must_pass",
    "needs_approvals",
    "never_after",
    "reviewed_table",
]
