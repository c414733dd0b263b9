"""Generated parts of the documentation: the README's loop table and the example diagrams.

``python -m tests.helpers.generated_docs`` writes them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from agentfsm import (
    LOOP,
    Action,
    Agent,
    AgentGuardrails,
    Failure,
    FailureKind,
    Graph,
    Host,
    ProviderError,
    RunState,
    ToolError,
    TransientProviderError,
    event_schema,
    tool,
)
from agentfsm.analysis import diff, must_pass
from agentfsm.diagrams import Counterexample, Coverage, DiffOverlay, diagram
from agentfsm.machine.declaration import Counter as Limit
from agentfsm.machine.graph import Transition
from agentfsm.testing import FakeClock, ScriptedModel, WitnessDriver, call, paths

__all__ = ["FOLDER", "PICTURES", "graph_with_late_review", "graph_with_review", "graph_without_review"]


README = Path(__file__).parents[2] / "README.md"
BEGIN = "<!-- loop: written by `make diagrams`, compared by a test -->\n"
END = "<!-- /loop -->\n"


def readme_table(graph: Graph) -> str:
    """A graph as a Markdown table; neighbouring rows with one destination share a line."""
    return "\n".join(_table_lines(graph)) + "\n"


def _table_lines(graph: Graph) -> Iterator[str]:
    yield "| in | what it does | if | go to |"
    yield "| --- | --- | --- | --- |"
    for spec in graph.states:
        head, note = f"**{spec.name}**", spec.note
        if spec.final:
            yield f"| {head} | {note} | | |"
        for target, rows in groupby(graph.rows(spec.name), lambda row: row.target):
            names = ", ".join("*otherwise*" if row.guard is None else f"`{row.name}`" for row in rows)
            yield f"| {head} | {note} | {names} | {target} |"
            head = note = ""


def split_readme(text: str) -> tuple[str, str, str]:
    """The README before the table, the table, and the README after it."""
    before, found, rest = text.partition(BEGIN)
    shown, ended, after = rest.partition(END)
    if not (found and ended):
        raise ValueError(f"{README} has lost its markers {BEGIN.strip()} and {END.strip()}")
    return before + found, shown, ended + after


def write_readme_table() -> None:
    """Write the table into the README."""
    before, _, after = split_readme(README.read_text(encoding="utf-8"))
    README.write_text(before + readme_table(LOOP) + after, encoding="utf-8")


FOLDER = Path(__file__).parents[2] / "diagrams"


def too_much(run: RunState) -> Failure | None:
    """A reply wants to pay more than 500."""
    if all(c.call.name != "pay" or c.call.arguments.get("amount", 0) <= 500 for c in run.batch):
        return None
    return Failure(kind=FailureKind.policy_violation, explanation="more than 500", suggested_action=Action.ask_user)


graph_with_review = replace(LOOP.with_detector("post_llm", too_much, before="tool_calls"), name="payments")
graph_with_late_review = replace(LOOP.with_detector("post_llm", too_much), name="payments")


def busy_provider(run: RunState) -> bool:
    """The provider was busy."""
    return run.failure is not None and run.failure.kind is FailureKind.transient_provider


graph_without_review = replace(
    LOOP.with_counter(Limit("quick_retries", 3)).with_transition(
        Transition("recover", busy_provider, "call_llm", spends="quick_retries")
    ),
    name="hasty",
)


def run_picture() -> str:
    """A busy provider, a tool that fails once, and a payment that waits for approval."""

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
    model = ScriptedModel([busy, call("look_up", order="A-1"), call("refund", order="A-1", amount=20)])
    agent = Agent(model, tools=[look_up, refund], host=Host(clock=FakeClock()))
    return agent.run_sync("Give me 20 back for A-1.").diagram()


def coverage_picture() -> str:
    """What seven of the twenty runs that cover every row take."""
    witness = WitnessDriver(LOOP)
    walks = [witness.run(path).check() for path in paths(LOOP, "transitions")[:7]]
    return diagram(LOOP, overlay=Coverage(Counter(d.transition.id for walk in walks for d in walk.decisions)))


def difference_picture() -> str:
    """One row in the wrong place: no edge is missing, but a decision has changed."""
    return diagram(
        graph_with_late_review,
        overlay=DiffOverlay(
            graph_with_review, [str(each) for each in diff(graph_with_review, graph_with_late_review).decisions]
        ),
    )


def counterexample_picture() -> str:
    """The shortest run that calls the model without checking the budgets."""
    broken = next(
        v
        for v in graph_without_review.analyse(must_pass("call_llm", through="pre_step")).verdicts
        if v.path and not v.loop
    )
    return diagram(graph_without_review, overlay=Counterexample(broken.path, broken.loop, broken.text))


def look() -> str:
    """Look for the answer."""
    return "nothing yet"


def guard_picture() -> str:
    """A run that calls a tool and answers: the row whose guard held, in each state."""
    return Agent(ScriptedModel([call("look"), "Nothing is there."]), tools=[look]).run_sync("Find it.").diagram()


def detector_picture() -> str:
    """The loop with one more detector."""
    return diagram(graph_with_review, overlay=DiffOverlay(LOOP))


def ending_picture() -> str:
    """A run that is handed off: the provider refuses the key."""
    refused = ProviderError("401, the key is not valid")
    return Agent(ScriptedModel([refused])).run_sync("Find it.").diagram()


def budget_picture() -> str:
    """A run whose two model calls are used up."""
    limits = AgentGuardrails(max_iterations=2, on_limit="stop")
    agent = Agent(ScriptedModel([call("look"), call("look")]), tools=[look], guardrails=limits)
    return agent.run_sync("Find it.").diagram()


PICTURES: dict[str, Callable[[], str]] = {
    "guard.svg": guard_picture,
    "detector.svg": detector_picture,
    "ending.svg": ending_picture,
    "budget.svg": budget_picture,
    "run.svg": run_picture,
    "coverage.svg": coverage_picture,
    "difference.svg": difference_picture,
    "counterexample.svg": counterexample_picture,
}
"""The function that draws each file of ``diagrams/`` other than the formats of the loop itself."""


def write_event_schema() -> None:
    """Update the JSON schema of events."""
    text = json.dumps(event_schema(), indent=1) + "\n"
    (README.parent / "docs" / "event-schema.json").write_text(text, encoding="utf-8", newline="\n")


def write_pictures() -> None:
    """Draw all of them."""
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw(), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    write_pictures()
    write_readme_table()
    write_event_schema()
