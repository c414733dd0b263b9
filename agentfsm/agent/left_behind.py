"""Which runs of a store were cut off, with nobody at them: what a program goes on with when it starts."""

from __future__ import annotations

from agentfsm.agent.going_on import Reply, resumed, store_of
from agentfsm.errors import JournalError, RecordError, RunError
from agentfsm.runtime.context import Parts
from agentfsm.runtime.logs import log
from agentfsm.runtime.run import Run

__all__ = ["left_behind"]


def left_behind(parts: Parts) -> list[Run]:
    """The runs of the host's store that were cut off, ready to go on; a sub-agent's are not among them.

    One that cannot go on under this graph, or at all, is left as it is, with a warning in the log. Others of
    the same store may be at the same work: what they have gone on with meanwhile is left to them.

    Raises:
        ConfigurationError: The host has no store.
        StoreError: It cannot be read.
    """
    found: list[Run] = []
    for head in store_of(parts).heads("running"):
        if head.owner is not None or not head.seq:
            continue
        try:
            run = resumed(parts, head.run_id, Reply(None))
        except JournalError as error:
            log.warning("%s", error)
        except (RecordError, RunError):  # since the list was read, it has ended, or come to wait for a person
            continue
        else:
            if run.state.parent is None:
                found.append(run)
    return found
