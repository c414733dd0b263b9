"""Where the parts meet: ``Agent`` puts a model, tools and limits together on a graph."""

from agentfsm.agent.agent import Agent

__all__ = ["Agent"]
