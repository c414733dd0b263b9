"""The rows about approvals: those that count votes, and the check that no row leads past an undecided approval."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import compress

from agentfsm.errors import GraphError
from agentfsm.loop.guards import (
    approval_decided,
    approval_required,
    ask_user,
    doubt_settled,
    escalated,
    expired,
    in_doubt,
    question_asked,
    replied,
    vote_recorded,
)
from agentfsm.loop.outcomes import CLOSES_BATCH, may_leave_undecided
from agentfsm.loop.quorum import MAX_APPROVALS, Approval
from agentfsm.machine.declaration import Counter
from agentfsm.machine.graph import Graph, Guard
from agentfsm.machine.graph import Transition as Row

VOTES = Counter("votes", MAX_APPROVALS - 1)
ESCALATIONS = Counter("escalations", 1)


@lru_cache(maxsize=16)
def with_votes(graph: Graph) -> Graph:
    """A graph in which a wait for an approval counts votes and can be escalated.

    Each waiting state with the row ``approval_decided`` gets two rows to itself in front of it: ``escalated``, and
    ``vote_recorded`` for an approval after which others must approve, too. Each spends a counter that a new request
    refills. An agent whose tools need several approvals runs on such a graph.

    Args:
        graph: The graph; one that has these rows is returned as it is.

    Raises:
        GraphError: It has one of the rows in another place.
    """
    if any(row.guard is vote_recorded for row in graph):
        return graph
    rows: list[Row] = []
    for row in graph.transitions:
        if row.guard is approval_decided and graph.spec(row.source).waits:
            rows.append(Row(row.source, escalated, row.source, spends=ESCALATIONS.name))
            rows.append(Row(row.source, vote_recorded, row.source, spends=VOTES.name))
        asks = row.guard is approval_required and graph.spec(row.target).waits
        refills = (*row.refills, VOTES.name, ESCALATIONS.name) if asks else row.refills
        rows.append(replace(row, refills=refills))
    return replace(graph, counters=(*graph.counters, VOTES, ESCALATIONS), transitions=tuple(rows))


def counts_votes(graph: Graph) -> bool:
    """Whether each wait for an approval has the rows of ``with_votes``, which lead back to it."""
    waits = [row.source for row in graph if row.guard is approval_decided and graph.spec(row.source).waits]
    for state in waits:
        rows = graph.rows(state)
        own = [row.guard for row in rows if row.target == state]
        if escalated not in own or vote_recorded not in own:
            return False
    return bool(waits)


_UNDECIDED = (expired, escalated, vote_recorded)
"""What can happen to an approval that is not decided by it."""

_SILENT_WHILE_UNDECIDED = frozenset(
    {ask_user, question_asked, in_doubt, approval_decided, doubt_settled, replied, *_UNDECIDED}
)
"""Guards that do not hold while an approval is undecided, but for the one that says what has happened to it."""


def check_undecided_rows(graph: Graph, tool: str, rule: Approval | None) -> None:
    """Check that no row leads a run out of the wait for an approval to where it may not go before it is decided.

    A run that took such a row would count as tampered with. A user's own guard may hold whenever it is evaluated.

    Raises:
        GraphError: A row does.
    """
    happens = (True, rule is None or bool(rule.escalate_to), rule is None or rule.n > 1)
    cases = list(compress(_UNDECIDED, happens))
    for state in _waits_for_approval(graph):
        for row in graph.rows(state):
            later = [case.__name__ for case in cases if row in _rows_while(graph, state, case)]
            if not later or may_leave_undecided(graph.spec(row.target)):
                continue
            hint = "let it lead to a state that waits, that ends the run or that drops the call, such as 'pre_step'"
            if row.guard not in _UNDECIDED:
                hint += f"; or put it after rows of its state with the guards {', '.join(later)}"
            raise GraphError(
                f"it may lead to {str(row.target)!r} before the approval of a call of {tool!r} is decided", row.id, hint
            )


def check_answer_row(graph: Graph, asks: Guard, answered: Guard) -> None:
    """Check that a run that waits for an answer can get it, there or in a wait that the run may come to from there.

    Args:
        graph: The graph.
        asks: The guard of the rows that lead to a wait for the answer.
        answered: The guard of the row that takes the answer; a guard of the user's may take it, too.

    Raises:
        GraphError: No row of such a wait takes the answer.
    """
    takes_no_answer = _SILENT_WHILE_UNDECIDED - {answered} | set(graph.first)
    for row in graph:
        if row.guard is not asks or not graph.spec(row.target).waits:
            continue
        waits = [row.target]
        for wait in waits:
            onward = [row for row in graph.rows(wait) if row.guard not in takes_no_answer or row.guard in _UNDECIDED]
            waits += [row.target for row in onward if graph.spec(row.target).waits and row.target not in waits]
        if all(each.guard in takes_no_answer for wait in waits for each in graph.rows(wait)):
            raise GraphError(
                f"nobody can answer what it asks: no row of {str(row.target)!r} takes the answer",
                row.id,
                f"add the row {answered.__name__!r} that LOOP has",
            )


def _waits_for_approval(graph: Graph) -> list[str]:
    """The states in which a run may wait for the approval of a call."""
    asking = [str(spec.name) for spec in graph.states if graph.takes(spec.name, approval_required.__name__)]
    found = list(asking)
    for state in found:
        spec = graph.spec(state)
        only_waits = spec.waits or (state in asking and callable(spec.effect))  # elsewhere, its request is void
        for case in _UNDECIDED if spec.waits else (approval_required,):
            for row in _rows_while(graph, state, case):
                target = graph.spec(row.target)
                goes_on = target.waits or not (only_waits or target.final or target.effect in CLOSES_BATCH)
                if goes_on and target.name not in found:
                    found.append(str(target.name))
    return [state for state in found if graph.spec(state).waits]


def _rows_while(graph: Graph, state: str, case: Guard) -> Iterator[Row]:
    """The rows of a state that a run may take while an approval is undecided, and the guard ``case`` holds."""
    for row in graph.rows(state):
        if row.guard is case or row.guard not in _SILENT_WHILE_UNDECIDED:
            yield row
        if row.guard is case and all(case in _UNDECIDED and _lasts(graph, name) for name in row.spends):
            return


def _lasts(graph: Graph, name: str) -> bool:
    """Whether a counter is full when a request begins, and only the votes and the escalation of a request spend it."""
    if not any(counter.name == name for counter in (VOTES, ESCALATIONS) if counter in graph.counters):
        return False
    own = [row for row in graph if row.guard not in _SILENT_WHILE_UNDECIDED and graph.spec(row.target).waits]
    asking = [row for row in own if graph.takes(row.source, approval_required.__name__)]
    begin = [row for row in asking if row in _rows_while(graph, row.source, approval_required)]
    if any(name in row.spends for row in own) or any(name in spec.spends for spec in graph.states if spec.waits):
        return False
    return all(name in row.refills for row in begin)
