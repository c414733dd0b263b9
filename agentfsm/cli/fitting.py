"""Whether the agent that was described has the tools that a run cannot go on without."""

from __future__ import annotations

from agentfsm.agent import Agent
from agentfsm.core.state import RunState
from agentfsm.errors import ConfigurationError
from agentfsm.runtime.replies import Allow, Answer, Edit, ItDidNotRun

__all__ = ["need_tools"]


def need_tools(agent: Agent, run: RunState, answer: Answer | None) -> None:
    """Make sure that what was forgotten at the command line does not use up an answer, or end a call for good.

    A call of a tool that an agent does not have is answered so, and the model goes on without it. That is as it
    should be for a model that makes a name up, and not where a person has just allowed the call, or where it had
    begun: there the tool was, and ``--tools`` was left out.

    Args:
        agent: Who goes on with the run.
        run: What the run knows.
        answer: The answer to what it waits for, or None where it was cut off.

    Raises:
        ConfigurationError: It does not have them.
    """
    if run.waiting is not None:
        names = {run.waiting.tool} if isinstance(answer, Allow | Edit | ItDidNotRun) else set[str]()
    else:
        names = {each.call.name for each in run.batch if each.started and each.result is None}
    missing = sorted(name for name in names if name and name not in agent.parts.tools)
    if missing:
        named = ", ".join(map(repr, missing))
        raise ConfigurationError(
            f"run {run.run_id!r} goes on with {named}, and there is no such tool here: name the file that has it with "
            "--tools; nothing was changed"
        )
