"""``agentfsm answer`` and ``cancel``: reach a stored run, in whatever process, without its agent."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import asdict, dataclass

import click

from agentfsm.cli.console import open_console, single_line
from agentfsm.cli.local_store import (
    await_result,
    complete_run_id,
    open_runs,
    require_keyring,
    store_option,
    tenant_option,
)
from agentfsm.cli.options import collect_options, option
from agentfsm.cli.terminal_prompt import TerminalPrompter, claimed_actor, parse_extension, parse_reply, require_name
from agentfsm.errors import HumanReplyError
from agentfsm.journal.load import StoredRequest
from agentfsm.journal.rehydrate import rehydrate
from agentfsm.journal.send_signal import SentSignal
from agentfsm.journal.signals import read_signals, without_refused
from agentfsm.journal.store import Store
from agentfsm.journal.store_url import StoreLocation
from agentfsm.loop.human_input import Edit, Extend, HumanInput
from agentfsm.loop.keys import Keyring
from agentfsm.loop.quorum import Actor


@dataclass(frozen=True, kw_only=True)
class SenderOptions:
    """Who sends something, and how what happened is printed."""

    by: str = option("--by", default="", metavar="NAME", help="Who sends it; recorded as claimed, not verified.")
    roles: tuple[str, ...] = option("--role", multiple=True, metavar="ROLE", help="A role of that person; repeatable.")
    as_json: bool = option("--json", is_flag=True, help="Print one JSON object.")

    def actor(self) -> Actor | str:
        """Who sends it, as the command line claims."""
        return claimed_actor(self.by, self.roles)

    def report(self, sent: SentSignal, what: str, otherwise: str) -> None:
        """Print what happened."""
        if self.as_json:
            click.echo(json.dumps(asdict(sent)))
            return
        who = f"{sent.owner} was told" if sent.owner else otherwise
        click.echo(single_line(f"run {sent.run_id} {what}: {who}"))


sender_options = collect_options(SenderOptions, "sender")

ACTED_ON_WITHIN_S = 2.0
"""Seconds to wait for a process that has the agent to act on an answer that it must check."""

PAUSE_S = 0.05
"""Seconds between two looks whether that has happened."""

_WAITS = "it waits for the next process that has its agent"


_ANSWER_EXAMPLES = """\b
Examples:
  agentfsm answer 3f9c0a1b2c3d4e5f                      show what it asks, and ask you
  agentfsm answer 3f9c0a1b2c3d4e5f allow --by Ann --role manager
  agentfsm answer 3f9c "deny not on a Friday" --by Ann
  agentfsm answer 3f9c '{"amount": 3}' --to 9b2f6c1e0d4a
  agentfsm answer 3f9c --extend tokens=5000 --json
"""


@click.command(epilog=_ANSWER_EXAMPLES)
@click.argument("run_id", metavar="RUN", shell_complete=complete_run_id)
@click.argument("reply", required=False)
@click.option(
    "--extend",
    metavar="UNIT=AMOUNT",
    help="Extend the limit that the run waits at: tokens=, usd=, seconds= or model_calls=.",
)
@click.option("--to", "digest", metavar="DIGEST", help="The digest of the request that you saw.")
@sender_options
@store_option
@tenant_option
def answer(
    run_id: str,
    reply: str | None,
    extend: str | None,
    digest: str | None,
    sender: SenderOptions,
    location: StoreLocation,
) -> None:
    """Answer what RUN waits for, without its agent; without a REPLY, you are asked at the terminal.

    REPLY is what agentfsm resume takes: an answer; for an approval allow, deny, "deny REASON", or the new arguments
    as a JSON object. The answer is kept in the store, under its secret, and the process that has the agent acts on it:
    at once if it waits for answers, otherwise when agentfsm resume, or an app that uses the store, takes up the run.

    RUN may be the beginning of an id. An answer that does not fit what the run waits for is refused, and so is a
    second one. New arguments and extensions are checked by the process that has the agent: the command waits up to 2
    seconds for it, and later agentfsm runs shows what came of them.

    Exit codes: 0 the answer is in the store; 2 it was refused, or wrong usage.
    """
    store, runs = open_runs(location)
    run = await_result(runs.get(run_id))
    if run.request is None:
        raise HumanReplyError(f"run {run.info.run_id!r} asks nothing: it is {run.info.status}")
    require_name(run.request.quorum, sender.by)
    chosen, shown = _reply(store, run.request, reply, extend)
    sent = await_result(runs.answer(run.info.run_id, chosen, by=sender.actor(), to=digest or shown))
    if isinstance(chosen, Edit | Extend):
        await_result(_acted_on(store, require_keyring(location), run.info.run_id))
        run = await_result(runs.get(run.info.run_id))
        if run.refused:
            raise HumanReplyError(run.refused)
    await_result(store.aclose())
    sender.report(sent, "was answered", _WAITS)


async def _acted_on(store: Store, keyring: Keyring, run_id: str) -> None:
    """Wait until a process has acted on the answers to a run, for ``ACTED_ON_WITHIN_S`` at most."""
    deadline = time.monotonic() + ACTED_ON_WITHIN_S
    while time.monotonic() < deadline:
        if not without_refused(await read_signals(store.signals, keyring, run_id)):
            return
        await asyncio.sleep(PAUSE_S)


def _reply(
    store: Store, request: StoredRequest, reply: str | None, extend: str | None
) -> tuple[HumanInput, str | None]:
    """The reply, and the digest of the request if the user was shown it now."""
    if extend is not None:
        return parse_extension(extend, reply or ""), None
    if reply is not None:
        return parse_reply(request.kind, reply), None
    console = open_console()
    if not console.interactive:
        raise click.UsageError(f"there is no terminal to ask at: give a REPLY to {request.question!r}")
    pending = rehydrate(await_result(store.records(request.run_id))).run.pending_request
    if pending is None:
        raise HumanReplyError(f"run {request.run_id!r} asks nothing any more")
    return TerminalPrompter(console.err).answer(pending), request.digest


_CANCEL_EXAMPLES = """\b
Examples:
  agentfsm cancel 3f9c0a1b2c3d4e5f
  agentfsm cancel 3f9c --reason "no longer needed" --by Ann
"""


@click.command(epilog=_CANCEL_EXAMPLES)
@click.argument("run_id", metavar="RUN", shell_complete=complete_run_id)
@click.option("--reason", default="cancelled", metavar="TEXT", help="Why; recorded in the journal.")
@sender_options
@store_option
@tenant_option
def cancel(run_id: str, reason: str, sender: SenderOptions, location: StoreLocation) -> None:
    """Cancel RUN, whatever process runs it; RUN may be the beginning of an id.

    A process that works on it cancels the current call at once. A run that waits for a person, or that was interrupted,
    ends as cancelled when a process that has its agent takes it up; agentfsm resume RUN --dismiss ends it here.

    Exit codes: 0 the cancellation is in the store; 2 it was refused, or wrong usage.
    """
    store, runs = open_runs(location)
    sent = await_result(runs.cancel(run_id, reason, by=sender.actor()))
    await_result(store.aclose())
    sender.report(sent, "is cancelled", _WAITS)
