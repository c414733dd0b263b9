"""``agentfsm resume``: a suspended run goes on with a reply."""

from __future__ import annotations

from pathlib import Path

import click

from agentfsm.cli.ask import Person, parse_reply
from agentfsm.cli.options import AgentOptions, RunOptions, agent_options, run_options
from agentfsm.cli.screen import open_screen
from agentfsm.cli.telling import need_secret, tell
from agentfsm.core.events import UserInputRequested
from agentfsm.core.suspension import SuspensionRecord
from agentfsm.runtime.replies import Answer

__all__ = ["resume"]


_EXAMPLES = """\b
Examples:
  agentfsm resume wait.json allow -m gpt-5-mini -t my_tools.py
  agentfsm resume wait.json "deny not on a Friday" -m gpt-5-mini -t my_tools.py
  agentfsm resume wait.json --dismiss "no longer needed" -m gpt-5-mini -t my_tools.py
"""


@click.command(epilog=_EXAMPLES, short_help="Go on with a suspended run.")
@click.argument("record_file", metavar="RECORD", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("reply", required=False)
@click.option("--dismiss", metavar="REASON", help="End the run without a reply.")
@agent_options
@run_options
@click.pass_context
def resume(
    ctx: click.Context,
    record_file: Path,
    reply: str | None,
    dismiss: str | None,
    agent_is: AgentOptions,
    how: RunOptions,
) -> None:
    """Go on with the suspended run in RECORD, with REPLY; without one you are asked at the terminal.

    To a question, REPLY is the answer. To an approval it is: allow, deny, "deny REASON", or the new arguments
    as a JSON object. To a call that may or may not have run: ran, "ran RESULT", did-not-run, or give-up.

    Give the model, tools and other options of the run; a record holds none of them. AGENTFSM_SECRET must be
    what it was when the record was written. Each record is good for one reply.
    """
    need_secret("resume")
    if dismiss is not None and reply is not None:
        raise click.UsageError("give a REPLY or --dismiss, not both")
    opened = SuspensionRecord.from_json(record_file.read_bytes())
    agent = agent_is.agent()
    if dismiss is not None:
        run = agent.dismiss(opened, dismiss)
    else:
        run = agent.resume(opened, _asked(opened) if reply is None else parse_reply(opened.kind, reply))
    ctx.exit(tell(agent, run, agent_is, how))


def _asked(record: SuspensionRecord) -> Answer:
    screen = open_screen()
    if not screen.person:
        raise click.UsageError(f"there is no terminal to ask at: give a REPLY to {record.question!r}")
    shared = ("run_id", "kind", "question", "context", "choices", "tool", "arguments", "originating_failure_kind")
    told = {name: getattr(record, name) for name in shared}
    return Person(screen.err).answer(
        UserInputRequested(seq=0, time=record.created_at, suspension_record=record, **told)
    )
