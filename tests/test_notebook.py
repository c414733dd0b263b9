"""The notebook of the examples: its cells run in order, as in Jupyter, and show what its texts say."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import json
from pathlib import Path
from typing import Any

NOTEBOOK = json.loads((Path(__file__).parents[1] / "examples" / "notebook.ipynb").read_text(encoding="utf-8"))
CELLS = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


async def run_cell(source: str, names: dict[str, Any]) -> tuple[str, Any]:
    """What a cell prints, and the value of its last line; ``await`` is allowed outside functions, as in Jupyter."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    with contextlib.redirect_stdout(printed):
        value = eval(compile(tree, "<cell>", "exec", flags), names)
        if inspect.isawaitable(value):
            await value
        shown = None
        if isinstance(last, ast.Expr):
            shown = eval(compile(ast.Expression(last.value), "<cell>", "eval", flags), names)
            shown = await shown if inspect.iscoroutine(shown) else shown
    return printed.getvalue(), shown


def test_the_cells_run_in_order_and_graphs_and_results_are_pictures() -> None:
    async def main() -> list[tuple[str, Any]]:
        names: dict[str, Any] = {}
        return [await run_cell(source, names) for source in CELLS]

    shown = asyncio.run(main())
    graph, first, waiting, resumed, steps, refused = shown
    for value in (graph[1], first[1]):
        assert value._repr_svg_().startswith("<svg")
    assert "compact" in graph[1]._repr_svg_()
    assert first[0] == "Hello Ann.\n"
    assert waiting[0] == "approval: May 'refund' run with these arguments?  refund {\"usd\": 20}\n"
    assert resumed[0].splitlines()[-2:] == ["tool: refunded 20.00 USD", "assistant: Refunded."]
    assert steps[0].splitlines()[-1] == "dispatch_tool.approval_required -> suspended"
    assert steps[1] == "suspended"
    assert "use 'await agent.run(...)' there" in refused[0]


def test_no_output_is_kept_in_the_file() -> None:
    assert [cell["outputs"] for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"] == [[]] * len(CELLS)
