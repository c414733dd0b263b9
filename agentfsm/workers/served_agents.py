"""``ServedAgents``: the agents of a worker, the queues that it serves, and which stored runs it can continue."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from agentfsm.agent.agent import Agent
from agentfsm.agent.pinned_approvals import is_as_strict, pin_approvals
from agentfsm.agent.recover import accepts_graph, began_with, pinned_approvals
from agentfsm.errors import ConfigurationError
from agentfsm.journal.records import SealedRecord, is_kind, open_record
from agentfsm.journal.run_info import first_info
from agentfsm.journal.store import Head
from agentfsm.runtime.event_filter import WITHHELD
from agentfsm.runtime.toolsets import is_open, toolset_name
from agentfsm.workers.submission import agent_tag, submission_queue


@dataclass(frozen=True)
class ServedAgent:
    """An agent under the name by which runs are submitted to it."""

    name: str
    agent: Agent[Any, Any]

    @property
    def version(self) -> str:
        """What its runs depend on, as 12 hex digits: graph, tools, limits, who approves calls, secrets and so on."""
        config = self.agent.config
        tools = sorted((tool.name, tool.digest) for tool in config.tools.values())
        toolsets = [toolset_name(each) for each in config.toolsets]
        key_ids = sorted(config.host.keyring.key_ids)
        settings = [each.model_dump(mode="json") for each in (config.behavior, config.guardrails)]
        depends_on = [config.machine.graph.fingerprint, tools, toolsets, pin_approvals(config), key_ids, settings]
        text = json.dumps(depends_on, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def queue(self) -> str:
        """The queue of its runs that have begun: only workers of the same version serve it."""
        return f"{self.name}@{self.version}"

    @property
    def queues(self) -> tuple[str, ...]:
        """Its queues: those of new runs, under the current secret and those of before, and that of begun ones."""
        new = (submission_queue(self.name, key_id) for key_id in self.agent.config.host.keyring.key_ids)
        return (*new, self.queue)

    def lacks(self, first: Mapping[str, Any]) -> str:
        """What a run that was submitted to it needs to continue, and it does not have; empty if it has everything.

        The run's tools may have changed since. Which tools a toolset returns is known only when the run continues.
        """
        config, graph, tools = self.agent.config, str(first["graph"]["fingerprint"]), first.get("tools", {})
        if not accepts_graph(config, graph):
            return f"the graph {graph[:12]}, or a migration from it"
        if not any(map(is_open, config.toolsets)) and (missing := sorted(tools.keys() - config.tools.keys())):
            return f"the tool {', '.join(map(repr, missing))}"
        return "" if is_as_strict(config, pinned_approvals(first), graph) else "approval rules as strict as the run's"


class ServedAgents:
    """The agents of a worker.

    Raises:
        ConfigurationError: There is none, or a name cannot be that of a queue.
    """

    def __init__(self, agents: Mapping[str, Agent[Any, Any]]) -> None:
        if not agents:
            raise ConfigurationError("a worker serves at least one agent")
        for name in agents:
            if not name.strip() or ":" in name or "@" in name:
                raise ConfigurationError(f"{name!r} is not a name for an agent: it has no ':' and no '@'")
        self._served = [ServedAgent(name, agent) for name, agent in agents.items()]
        self.keyring = self._served[0].agent.config.host.keyring
        self._by_queue = {queue: each for each in self._served for queue in each.queues}

    @property
    def queues(self) -> tuple[str, ...]:
        """The queues that the worker serves: those of all its agents."""
        return tuple(self._by_queue)

    def mask(self, text: str) -> str:
        """A text in which no secret is left that the agents know of before a run begins."""
        for each in self._served:
            text = each.agent.config.open_withholder().with_mask(WITHHELD).clean_text(text)
        return text

    def by_queue(self, queue: str) -> ServedAgent:
        """The agent whose queue it is."""
        return self._by_queue[queue]

    def for_run(self, head: Head, begun: SealedRecord) -> ServedAgent | None:
        """The agent that can continue a stored run, or None if this worker has none.

        A run that was submitted belongs to the agent with its name. Another one belongs to the one agent that
        accepts its graph and has the very tools that it began with; a run that fits several of them is left to the
        program that started it, and so is one with the tags of several agents. An agent that requires less approval
        than the run began with fits neither, and so does any that lacks the secret under which it was last written.

        Raises:
            JournalError: The first record cannot be read.
        """
        first, tags = open_record(begun), first_info(head.run_id, begun).tags
        if not is_kind(begun, "run.created") or "call" in first.get("parent", {}):
            return None  # a fork is resumed by whoever made it, and a sub-agent's run by the run that called it
        if self.keyring.foreign_key_id(head.mac):
            return None
        if any(tag.startswith(agent_tag("")) for tag in tags):
            named = self._named(tags)
            return None if named is None or named.lacks(first) else named
        fitting = [each for each in self._served if began_with(each.agent.config, begun)]
        return fitting[0] if len(fitting) == 1 else None

    def reason_to_leave(self, head: Head, begun: SealedRecord) -> str:
        """What the agent lacks that a stored run was submitted to; empty if it lacks nothing, or is not of this worker.

        Raises:
            JournalError: The first record cannot be read.
        """
        named = self._named(first_info(head.run_id, begun).tags)
        lacks = "" if named is None or self.keyring.foreign_key_id(head.mac) else named.lacks(open_record(begun))
        return f"agent {named.name!r} of this worker lacks {lacks}" if named is not None and lacks else ""

    def _named(self, tags: Iterable[str]) -> ServedAgent | None:
        """The agent that a run with some tags was submitted to, if it is of this worker."""
        named = {tag for tag in tags if tag.startswith(agent_tag(""))}
        return next((each for each in self._served if {agent_tag(each.name)} == named), None)
