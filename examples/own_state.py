"""Your own state: every answer is checked before the run ends.

Shows: with_state, your own effect, its result in ``run.state_results``, and a guard that reads it, with the examples by
which ``WitnessDriver(GRAPH).check_examples()`` tests it.
"""

from agentfsm import (
    LOOP,
    Agent,
    Example,
    Message,
    RunState,
    State,
    StateContext,
    StateResult,
    StateSpec,
    Transition,
    detector,
)
from agentfsm.testing import ScriptedModel

MAX_CHARS = 60


def edit(context: StateContext) -> StateResult:
    """The effect: check the answer. What it returns is then ``run.state_results["edit"]``."""
    if len(str(context.run.answer)) <= MAX_CHARS:
        return StateResult("good")
    return StateResult("too long", (Message.user(f"Say it in at most {MAX_CHARS} characters."),))


@detector(fires_on=[Example(state_result="too long")], silent_on=[Example(state_result="good")])
def too_long(run: RunState) -> bool:
    """The guard of the row that leads back to the model."""
    return bool(run.state_results["edit"] == "too long")


GRAPH = LOOP.with_state(
    StateSpec("edit", "check the answer", effect=edit),
    [Transition("edit", too_long, State.PRE_STEP), Transition("edit", None, State.TERMINAL, ends="completed")],
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
