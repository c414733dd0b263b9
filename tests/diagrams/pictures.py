"""The pictures of the README and of ``docs/``: ``python -m tests.diagrams.pictures`` draws them anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from agentfsm import LOOP, Action, Agent, Failure, FailureKind, Host, RunState, ToolError, TransientProviderError, tool
from agentfsm.analysis import diff, must_pass
from agentfsm.diagrams import Counterexample, Coverage, Difference, diagram
from agentfsm.testing import FakeClock, ScriptedModel, Witness, call, paths

__all__ = ["FOLDER", "PICTURES", "hasty", "hurried", "reviewed"]

FOLDER = Path(__file__).parents[2] / "diagrams"


def too_much(run: RunState) -> Failure | None:
    """A reply wants to pay more than 500."""
    if all(c.call.name != "pay" or c.call.arguments.get("amount", 0) <= 500 for c in run.batch):
        return None
    return Failure(kind=FailureKind.policy_violation, explanation="more than 500", suggested_action=Action.ask_user)


reviewed = replace(LOOP.with_detector("post_llm", too_much, before="tool_calls"), name="payments")
hurried = replace(LOOP.with_detector("post_llm", too_much), name="payments")

hasty = replace(
    LOOP,
    name="hasty",
    transitions=tuple(
        replace(row, target="call_llm", spends="a retry") if row.id == "recover.otherwise" else row for row in LOOP
    ),
)


def run() -> str:
    """A busy provider, a tool that fails once, and a payment that waits for leave."""

    @tool(idempotent=True, retryable=True)
    def look_up(order: str) -> str:
        """Look an order up."""
        if not looked:
            looked.append(order)
            raise ToolError("the archive is busy")
        return f"{order}: paid, delivered"

    @tool(requires_approval=True)
    def refund(order: str, amount: int) -> str:
        """Give money back."""
        return f"refunded {amount}"

    looked: list[str] = []
    busy = TransientProviderError("529, overloaded")
    script = [busy, call("look_up", order="A-1"), call("refund", order="A-1", amount=20)]
    agent = Agent(ScriptedModel(script), tools=[look_up, refund], host=Host(clock=FakeClock()))
    return agent.run_sync("Give me 20 back for A-1.").diagram()


def coverage() -> str:
    """What seven of the twenty runs that cover every row take."""
    witness = Witness(LOOP)
    walks = [witness.walk(path).check() for path in paths(LOOP, "transitions")[:7]]
    return diagram(LOOP, overlay=Coverage(Counter(d.transition.id for walk in walks for d in walk.decisions)))


def difference() -> str:
    """One row in the wrong place: every edge is there, and a decision is not."""
    return diagram(hurried, overlay=Difference(reviewed, [str(each) for each in diff(reviewed, hurried).decisions]))


def counterexample() -> str:
    """The shortest run that calls the model without having passed the budgets."""
    broken = next(v for v in hasty.analyse(must_pass("call_llm", through="pre_step")).verdicts if v.path and not v.loop)
    return diagram(hasty, overlay=Counterexample(broken.path, broken.loop, broken.text))


PICTURES: dict[str, Callable[[], str]] = {
    "run.svg": run,
    "coverage.svg": coverage,
    "difference.svg": difference,
    "counterexample.svg": counterexample,
}
"""What draws each file of ``diagrams/`` that is not a form of the loop itself."""


def main() -> None:
    """Draw them all."""
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw(), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
