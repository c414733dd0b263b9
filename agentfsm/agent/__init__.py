"""``Agent``, and what creates, resumes and nests its runs."""

from agentfsm.agent.agent import Agent

__all__ = ["Agent"]
