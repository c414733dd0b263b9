"""``agentfsm resume``: a suspended run goes on with a reply, or what was cut off just goes on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import click

from agentfsm.agent import Agent
from agentfsm.agent.going_on import store_of
from agentfsm.cli.ask import Asked, Person, parse_reply
from agentfsm.cli.fitting import need_tools
from agentfsm.cli.options import AgentOptions, RunOptions, agent_options, run_options
from agentfsm.cli.runs import complete_run, default_store
from agentfsm.cli.screen import open_screen
from agentfsm.cli.telling import need_secret, tell
from agentfsm.cli.unfinished import go_on_with_all
from agentfsm.core.suspension import SuspensionRecord
from agentfsm.journal.migration import Migration
from agentfsm.journal.records import Row
from agentfsm.journal.restore import restore
from agentfsm.runtime.replies import Answer
from agentfsm.runtime.run import Run

__all__ = ["resume"]

_EXAMPLES = """\b
Examples:
  agentfsm resume -m gpt-5-mini -t my_tools.py            all that was cut off
  agentfsm resume 3f9c0a1b2c3d4e5f -m gpt-5-mini          this one, which was cut off
  agentfsm resume 3f9c0a1b2c3d4e5f allow --by Ann -m gpt-5-mini -t my_tools.py
  agentfsm resume wait.json "deny not on a Friday" -m gpt-5-mini -t my_tools.py
  agentfsm resume 3f9c0a1b2c3d4e5f --dismiss "no longer needed" -m gpt-5-mini
  agentfsm resume 3f9c0a1b2c3d4e5f -m gpt-5-mini --graph my_graph.py:NEW --migrate
"""


@click.command(epilog=_EXAMPLES, short_help="Go on with runs that wait or were cut off.")
@click.argument("which", metavar="[RUN]", required=False, shell_complete=complete_run)
@click.argument("reply", required=False)
@click.option("--dismiss", metavar="REASON", help="End the run without a reply.")
@click.option("--to", "digest", default="", metavar="DIGEST", help="What you were shown: refuse if it has changed.")
@click.option("--by", default="", metavar="NAME", help="Who replies; it is recorded.")
@click.option("--migrate", is_flag=True, help="Take a run of another graph, if its path is the same on this one.")
@click.option("--rename", multiple=True, metavar="OLD=NEW", help="A state, or STATE.GUARD, that has a new name here.")
@click.option("--vouch", is_flag=True, help="Take RUN of another graph though its path would have been another.")
@agent_options
@run_options
@click.pass_context
def resume(
    ctx: click.Context,
    which: str | None,
    reply: str | None,
    dismiss: str | None,
    digest: str,
    by: str,
    migrate: bool,
    rename: tuple[str, ...],
    vouch: bool,
    agent_is: AgentOptions,
    how: RunOptions,
) -> None:
    """Go on with RUN, with REPLY; where it waits for one and there is none, you are asked at the terminal.

    RUN is the id of a run in the store (agentfsm runs lists them), or the file of a record. A record must have
    been signed with the same AGENTFSM_SECRET, and is good for one reply. Without RUN, all runs of the store that
    were cut off go on, and those that wait for a person are listed.

    To a question, REPLY is the answer. To an approval it is: allow, deny, "deny REASON", or the new arguments
    as a JSON object. To a call that may or may not have run: ran, "ran RESULT", did-not-run, or give-up.

    Give the model, tools and other options of the run; neither store nor record holds them.

    Exit codes: 0 it worked, or nothing was cut off; 1 a run did not complete, or could not go on; 2 wrong usage;
    3 a run waits for a person; 130 interrupted.
    """
    if dismiss is not None and reply is not None:
        raise click.UsageError("give a REPLY or --dismiss, not both")
    if vouch and which is None:
        raise click.UsageError("--vouch is for one run: name it")
    changes = _Changes(migrate or vouch or bool(rename), rename, vouch)
    if which is None:
        agent = changes.let_in(_agent_of_store(agent_is, None), None)
        ctx.exit(go_on_with_all(agent, agent_is, how))
    said = _Said(reply, dismiss, digest, by)
    file = Path(which)
    if file.suffix == ".json" or file.is_file():
        need_secret("resume with a record")
        record = SuspensionRecord.from_json(file.read_bytes())
        agent = agent_is.agent()
        ctx.exit(tell(agent, said.to_record(agent, record), agent_is, how))
    agent = changes.let_in(_agent_of_store(agent_is, which), which)
    ctx.exit(tell(agent, said.to_run(agent, which), agent_is, how))


def _agent_of_store(agent_is: AgentOptions, run_id: str | None) -> Agent:
    """The agent, on a store that is there: a name that was mistyped would be a new, empty one, and all in order.

    Raises:
        click.UsageError: It is not.
        ConfigurationError: Something does not fit together.
    """
    run = "" if run_id is None else f": no run {run_id!r}"
    if agent_is.no_store:
        raise click.UsageError(f"without a store there are no runs{run}")
    where = agent_is.store or default_store()
    if not where.exists():
        raise click.UsageError(f"there is no store at {where}{run}")
    return agent_is.agent(from_store=True)


@dataclass(frozen=True)
class _Said:
    """What was said to one run: a reply, or that it is to end."""

    reply: str | None
    dismiss: str | None
    digest: str
    by: str

    def to_record(self, agent: Agent, record: SuspensionRecord) -> Run:
        if self.dismiss is not None:
            return agent.dismiss(record, self.dismiss)
        answer = self._answer(record)
        return _fitting(agent, agent.resume(record, answer, to=self.digest, by=self.by), answer)

    def to_run(self, agent: Agent, run_id: str) -> Run:
        if self.dismiss is not None:
            return agent.dismiss(run_id, self.dismiss)
        past = restore(_rows(agent, run_id))
        waiting = past.run.waiting if past.suspended is not None else None
        if waiting is None or past.asked is None:
            cut_off = agent.resume(run_id, self.reply)  # or over: it says so, should it not go on
            return _fitting(agent, cut_off, None)
        asked_here = past.asked[1] if self.reply is None else ""
        answer = self._answer(waiting)
        return _fitting(agent, agent.resume(run_id, answer, to=self.digest or asked_here, by=self.by), answer)

    def _answer(self, asked: Asked) -> Answer:
        """The reply that was given, or the one that is given at the terminal."""
        if self.reply is not None:
            return parse_reply(asked.kind, self.reply)
        screen = open_screen()
        if not screen.person:
            raise click.UsageError(f"there is no terminal to ask at: give a REPLY to {asked.question!r}")
        return Person(screen.err).answer(asked)


def _fitting(agent: Agent, run: Run, answer: Answer | None) -> Run:
    """The run, which has not begun to go on, where the agent has what it needs.

    Raises:
        ConfigurationError: It does not.
    """
    need_tools(agent, run.state, answer)
    return run


@dataclass(frozen=True)
class _Changes:
    """What lets runs of another graph in."""

    wanted: bool
    renamed: tuple[str, ...]
    vouched: bool

    def let_in(self, agent: Agent, run_id: str | None) -> Agent:
        """An agent that takes runs of other graphs, or the one of a run, where that is wanted.

        Raises:
            ConfigurationError: What is renamed is not there.
        """
        if not self.wanted:
            return agent
        old = None if run_id is None else str(restore(_rows(agent, run_id)).graph["fingerprint"])
        migration = Migration(old, self._names(dots=False), self._names(dots=True), self.vouched)
        migration.check(agent.graph)
        return agent.made_of(replace(agent.parts, migrations=(migration,)))

    def _names(self, *, dots: bool) -> dict[str, str]:
        names: dict[str, str] = {}
        for each in self.renamed:
            old, equals, new = each.partition("=")
            if not (equals and old and new) or ("." in old) != ("." in new):
                raise click.BadParameter(f"{each!r} is no OLD=NEW", param_hint="--rename")
            if ("." in old) == dots:
                names[old] = new
        return names


def _rows(agent: Agent, run_id: str) -> list[Row]:
    """A run's journal.

    Raises:
        agentfsm.errors.StoreError: The store does not have it.
    """
    return store_of(agent.parts).rows(run_id)
