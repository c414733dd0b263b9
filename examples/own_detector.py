"""Your own detector: a pure function that reports a failure, as one more row of the table.

Shows: with_detector, the position of the new row, and how the loop recovers from the failure.
"""

from agentfsm import LOOP, Action, Agent, Failure, FailureKind, RunState, State
from agentfsm.testing import RecordingModel, ScriptedModel


def promises_a_refund(run: RunState) -> Failure | None:
    """The answer promises a refund, which only a human may do."""
    if run.reply is None or "refund" not in run.reply.message.content.lower():
        return None
    return Failure(
        kind=FailureKind.policy_violation,
        explanation="only a human may promise a refund",
        suggested_action=Action.narrow_scope,  # once; the second time, the run is handed off
    )


GRAPH = LOOP.with_detector(State.POST_LLM, promises_a_refund, before="no_progress")


def main() -> None:
    """Run an agent whose first answer promises a refund."""
    model = RecordingModel(ScriptedModel(["You will get a refund!", "I have passed this on to a colleague."]))
    result = Agent(model, graph=GRAPH).run_sync("My parcel never came.")

    print("The rows of post_llm:", ", ".join(row.name for row in GRAPH.rows(State.POST_LLM)))
    for decision in result.decisions:
        print(decision)
    print("Instruction to the model:", model.requests[1].messages[-1].content.splitlines()[0])
    print("Answer:", result.output)


if __name__ == "__main__":
    main()
