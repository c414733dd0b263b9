"""A state of your own: every answer passes an editor before it leaves.

Shows: with_state, an effect of your own, what it leaves on the run, and a guard that reads it.
"""

from agentfsm import LOOP, Agent, Message, RunState, State, StateResult, StateSpec, Transition
from agentfsm.testing import ScriptedModel

LONGEST = 60


def edit(run: RunState) -> StateResult:
    """The effect: judge the answer; what it returns stands in ``run.notes["edit"]``."""
    if len(str(run.answer)) <= LONGEST:
        return StateResult("good")
    return StateResult("too long", (Message.user(f"Say it in {LONGEST} characters at most."),))


def too_long(run: RunState) -> bool:
    """The guard of the way back to the model."""
    return run.state_results["edit"] == "too long"


GRAPH = LOOP.with_state(
    StateSpec("edit", "judge the answer", effect=edit),
    [Transition("edit", too_long, State.PRE_STEP), Transition("edit", None, State.TERMINAL)],
    entered_by="post_llm.otherwise",
)


def main() -> None:
    """Run an agent whose first answer is too long."""
    model = ScriptedModel(["The capital of France, as is well known to everybody, is Paris.", "Paris."])
    result = Agent(model, graph=GRAPH).run_sync("What is the capital of France?")
    for decision in result.decisions:
        print(decision)
    print("Answer:", result.output)


if __name__ == "__main__":
    main()
