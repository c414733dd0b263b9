"""Structured output: an answer that is validated against a type, with feedback to the model if it is invalid.

Shows: output_type with a pydantic model, and the recovery from an answer that does not validate.
"""

from pydantic import BaseModel, Field

from agentfsm import Agent
from agentfsm.testing import RecordingModel, ScriptedModel


class Town(BaseModel):
    """The answer."""

    name: str
    people: int = Field(gt=0)


def main() -> None:
    """Run an agent whose first answer does not validate."""
    answers = ['{"name": "Paris", "people": "about two million"}', '{"name": "Paris", "people": 2113705}']
    model = RecordingModel(ScriptedModel(answers))
    result = Agent(model, output_type=Town).run_sync("The largest town of France?")

    print("Feedback to the model:", model.requests[1].messages[-1].content.splitlines()[0])
    print(repr(result.output))
    print("The guard that caught it:", next(d.guard for d in result.decisions if d.target == "recover"))


if __name__ == "__main__":
    main()
