"""``agentfsm resume``: a suspended run goes on with a reply, or one that was cut off just goes on."""

from __future__ import annotations

from pathlib import Path

import click

from agentfsm.agent import Agent
from agentfsm.cli.ask import Asked, Person, parse_reply
from agentfsm.cli.options import AgentOptions, RunOptions, agent_options, run_options
from agentfsm.cli.screen import open_screen
from agentfsm.cli.telling import need_secret, tell
from agentfsm.core.suspension import SuspensionRecord
from agentfsm.journal.restore import restore
from agentfsm.runtime.replies import Answer
from agentfsm.runtime.run import Run

__all__ = ["resume"]

_EXAMPLES = """\b
Examples:
  agentfsm resume 3f9c0a1b2c3d4e5f allow -m gpt-5-mini -t my_tools.py
  agentfsm resume wait.json "deny not on a Friday" -m gpt-5-mini -t my_tools.py
  agentfsm resume 3f9c0a1b2c3d4e5f -m gpt-5-mini          it was cut off
  agentfsm resume wait.json --dismiss "no longer needed" -m gpt-5-mini
"""


@click.command(epilog=_EXAMPLES, short_help="Go on with a suspended run.")
@click.argument("which", metavar="RUN")
@click.argument("reply", required=False)
@click.option("--dismiss", metavar="REASON", help="End the run without a reply.")
@agent_options
@run_options
@click.pass_context
def resume(
    ctx: click.Context,
    which: str,
    reply: str | None,
    dismiss: str | None,
    agent_is: AgentOptions,
    how: RunOptions,
) -> None:
    """Go on with RUN, with REPLY; where it waits for one and there is none, you are asked at the terminal.

    RUN is the id of a run in the store (agentfsm runs lists them), or the file of a record. A record must have
    been signed with the same AGENTFSM_SECRET, and is good for one reply.

    To a question, REPLY is the answer. To an approval it is: allow, deny, "deny REASON", or the new arguments
    as a JSON object. To a call that may or may not have run: ran, "ran RESULT", did-not-run, or give-up.

    Give the model, tools and other options of the run; neither store nor record holds them.
    """
    if dismiss is not None and reply is not None:
        raise click.UsageError("give a REPLY or --dismiss, not both")
    file = Path(which)
    if file.suffix == ".json" or file.is_file():
        need_secret("resume with a record")
        record = SuspensionRecord.from_json(file.read_bytes())
        agent = agent_is.agent()
        ctx.exit(tell(agent, _from_record(agent, record, reply, dismiss), agent_is, how))
    agent = agent_is.agent(from_store=True)
    ctx.exit(tell(agent, _from_store(agent, which, reply, dismiss), agent_is, how))


def _from_record(agent: Agent, record: SuspensionRecord, reply: str | None, dismiss: str | None) -> Run:
    if dismiss is not None:
        return agent.dismiss(record, dismiss)
    return agent.resume(record, _answer(record, reply))


def _from_store(agent: Agent, run_id: str, reply: str | None, dismiss: str | None) -> Run:
    store = agent.parts.host.store
    if store is None:
        raise click.UsageError(f"{run_id!r} is no file, and without a store there are no runs")
    if dismiss is not None:
        return agent.dismiss(run_id, dismiss)
    past = restore(store.rows(run_id))
    waiting = past.run.waiting if past.suspended is not None else None
    if waiting is None:
        return agent.resume(run_id, reply)  # cut off, or over: it says so, should it not go on
    return agent.resume(run_id, _answer(waiting, reply))


def _answer(asked: Asked, reply: str | None) -> Answer:
    """The reply that was given, or the one that is given at the terminal."""
    if reply is not None:
        return parse_reply(asked.kind, reply)
    screen = open_screen()
    if not screen.person:
        raise click.UsageError(f"there is no terminal to ask at: give a REPLY to {asked.question!r}")
    return Person(screen.err).answer(asked)
