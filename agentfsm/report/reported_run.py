"""What a report says of a run besides its ledger.

That is what verification found and how far it could look, the graph that the journal pins with the run's path through
it, and the requests to the model as they were sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import NamedTuple

from agentfsm.analysis import graph_from_table
from agentfsm.diagrams import RunPath
from agentfsm.errors import ConfigurationError
from agentfsm.journal.records import UNREADABLE, VOUCHED_BY_NEXT, Record, SealedRecord, is_kind, open_record
from agentfsm.journal.rehydrate import RehydratedRun
from agentfsm.journal.verification import GOOD, OPEN, TAMPERED, VerificationReport
from agentfsm.loop.messages import Message
from agentfsm.loop.presets import PRESETS
from agentfsm.loop.prompts import render_messages
from agentfsm.loop.transition_table import LOOP
from agentfsm.machine.graph import Graph

_VERDICTS = {GOOD: "intact", OPEN: "intact, not finished", TAMPERED: "tampered"}
_KEY_ID_DIGITS = 8


@dataclass(frozen=True, slots=True)
class ReportedRun:
    """A run of a report.

    Attributes:
        run_id: The run.
        sealed: Its records, as the store keeps them; empty if they cannot be read.
        verification: What its verification found.
    """

    run_id: str
    sealed: tuple[SealedRecord, ...]
    verification: VerificationReport


@dataclass(frozen=True, slots=True)
class Findings:
    """How the runs of a report were verified, and what else was found in the store.

    Attributes:
        store: The name of the store's file.
        key_ids: The ids of the secrets with which MACs were checked; empty if there was no secret.
        checkpoint: The checkpoint that the runs were compared with, in words; empty if there was none.
        unchecked: What could not be checked, one line each.
        problems: What is wrong with the store itself, such as a trigger that is missing.
    """

    store: str = ""
    key_ids: tuple[str, ...] = ()
    checkpoint: str = ""
    unchecked: tuple[str, ...] = ()
    problems: tuple[VerificationReport, ...] = ()

    def worst(self, runs: Iterable[ReportedRun]) -> str:
        """The verdict over the store and all runs of the report: ``tampered`` if one of them is."""
        verdicts = {verdict_of(each) for each in (*self.problems, *(run.verification for run in runs))}
        order = ("tampered", "cannot be verified", "intact, not finished")
        return next((verdict for verdict in order if verdict in verdicts), "intact")


def verdict_of(report: VerificationReport) -> str:
    """``intact``, ``intact, not finished``, ``tampered`` or ``cannot be verified``."""
    return _VERDICTS.get(report.code, "cannot be verified")


def key_ids_of(sealed: Iterable[SealedRecord]) -> tuple[str, ...]:
    """The ids of the secrets under which records were sealed, 8 hex digits each, in order."""
    return tuple(dict.fromkeys(row.mac[:_KEY_ID_DIGITS] for row in sealed if row.mac not in ("", VOUCHED_BY_NEXT)))


def graph_of_run(run_records: Sequence[Record]) -> Graph:
    """The graph that a run's journal pins, or the last one if the run was migrated; its guards are names only.

    A preset's graph is returned as it is. In any other graph, states that the default loop also has get its
    notes and lanes, which a journal does not hold.
    """
    table = next(record.data["graph"] for record in reversed(run_records) if "graph" in record.data)
    graph = graph_from_table(table, str(table.get("name", "graph")))
    known = next((each.graph for each in PRESETS.values() if each.graph.fingerprint == graph.fingerprint), None)
    if known is not None:
        return known
    loop_states = {spec.name: spec for spec in LOOP.states}
    states = (
        replace(spec, note=loop_states[spec.name].note, lane=loop_states[spec.name].lane)
        if spec.name in loop_states
        else spec
        for spec in graph.states
    )
    return replace(graph, states=tuple(states))


def path_of_run(run_records: Sequence[Record], graph: Graph) -> RunPath:
    """The path of a run through a graph, without the rows it took on an earlier graph before a migration.

    Raises:
        ConfigurationError: The run is on another graph.
    """
    pinned_at = max(index for index, record in enumerate(run_records) if "graph" in record.data)
    ids = {row.id for row in graph}
    moves = [record.data for record in run_records if record.kind == "transition"]
    on_this_graph = [record.data for record in run_records[pinned_at:] if record.kind == "transition"]
    unknown = [move["transition"] for move in on_this_graph if move["transition"] not in ids]
    if unknown:
        raise ConfigurationError(f"the run took {unknown[0]}, but graph {graph.name!r} has no such row")
    state = run_records[0].data.get("state", {}).get("state", graph.initial)
    current = moves[-1]["to"] if moves else state
    return RunPath.from_ids((move["transition"] for move in moves if move["transition"] in ids), str(current))


class SentRequest(NamedTuple):
    """What a model was sent in one call.

    Attributes:
        seq: The sequence number of the record of the call.
        same: How many messages it begins with that the request before had, too.
        added: The messages after those.
    """

    seq: int
    same: int
    added: tuple[Message, ...]


def sent_requests(sealed: Sequence[SealedRecord]) -> Iterator[SentRequest]:
    """The requests of a run, in order; they end at a record that cannot be read, or of which a value was redacted.

    The calls that the effect of a user-defined state makes are not among them.
    """
    run, before = RehydratedRun(), tuple[Message, ...]()
    for row in sealed:
        try:
            run.add(row)
            if not is_kind(row, "effect.intent") or "." in str(open_record(row)["eid"]):
                continue
            messages = tuple(render_messages(run.run))
        except UNREADABLE:
            return
        pairs = zip(before, messages, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1] or pair[0] == pair[1], pairs))
        yield SentRequest(row.seq, same, messages[same:])
        before = messages
