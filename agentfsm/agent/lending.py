"""How an agent works for the run of another: on that run's host, within its limits, and waiting where it waits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agentfsm.agent.going_on import as_record, state_of, taken_up
from agentfsm.core.guardrails import AgentGuardrails
from agentfsm.core.state import Held, PersonReply, RunState
from agentfsm.runtime.errand import Errand
from agentfsm.runtime.host import Host
from agentfsm.runtime.run import Run
from agentfsm.runtime.subagent import Lender

if TYPE_CHECKING:
    from agentfsm.agent.agent import Agent

__all__ = ["lender_of"]


def lender_of(agent: Agent) -> Lender:
    """What an agent lends to runs that call it."""
    lent = _Lent(agent)
    secret = {t.name: t.secret for t in agent.parts.tools.values() if t.secret}
    return Lender(lent.begin, lent.go_on, lent.stored, agent.guardrails, secret)


@dataclass(frozen=True, slots=True)
class _Lent:
    """An agent that works on hosts of others; see ``agentfsm.runtime.subagent.Lender``."""

    agent: Agent

    def on(self, host: Host) -> Agent:
        return self.agent.made_of(replace(self.agent.parts, host=host))

    def begin(
        self, host: Host, limits: AgentGuardrails, task: str, run_id: str, session_id: str, parent: tuple[str, str]
    ) -> Run:
        run = self.on(host).run(task, session_id=session_id, run_id=run_id)
        run.state.guardrails, run.state.parent = limits, parent
        return run

    def go_on(self, host: Host, held: Held, answer: PersonReply) -> Run:
        parts, opened = self.on(host).parts, as_record(held.record)
        state = state_of(parts, opened, late=True)  # how long an answer is good is for the run above to say
        return Run(parts, state, Errand(record=opened, reply=answer))

    def stored(self, host: Host, run_id: str, suspension: str, answer: PersonReply | None) -> Run | RunState | None:
        head = None if host.store is None else host.store.head(run_id)
        if host.store is None or head is None or not head.seq:
            return None
        if head.status == "finished":
            from agentfsm.journal.restore import restore  # the journal loads when a run comes from a store

            return restore(host.store.rows(run_id)).run
        parts = self.on(host).parts
        found = taken_up(parts, run_id)
        given = answer if found.suspended is not None and found.suspended == suspension else None
        return Run(parts, found.run, Errand(reply=given, taken_up=found.taken_up))
