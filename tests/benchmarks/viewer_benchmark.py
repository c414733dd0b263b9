"""The viewer in a real browser: how soon pages are there, how quick a step is, and how old news is when it is seen.

Run with ``make bench``. The server, and the run that is followed, are processes of their own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from agentfsm import Agent, AgentGuardrails, Host, SqliteStore
from agentfsm.testing import ScriptedModel, call
from tests.benchmarks.journal_benchmark import fill_listing
from tests.helpers.browser import running_browser, site_page
from tests.helpers.long_runs import look

STEPS = 300
STEP = """async (steps) => {
  const list = document.querySelector('[role=listbox]'), took = [];
  for (let step = 0; step < steps; step += 1) {
    const begun = performance.now();
    list.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowDown', bubbles: true}));
    document.body.getBoundingClientRect();
    took.push(performance.now() - begun);
    await new Promise((done) => setTimeout(done, 33));
  }
  return took;
}"""
WATCH = """() => {
  window.seen = {};
  new MutationObserver(() => {
    for (const row of document.querySelectorAll('.row')) window.seen[row.dataset.place] ??= Date.now();
  }).observe(document.querySelector('.rows'), {childList: true});
}"""
FOLLOWED = """
import asyncio, sys
from agentfsm import Agent, Host, SqliteStore, tool
from agentfsm.testing import ScriptedModel, call

@tool
async def wait(step: int) -> str:
    "Wait."
    await asyncio.sleep(0.3)
    return "waited"

with SqliteStore(sys.argv[1]) as store:
    Agent(ScriptedModel([*(call("wait", step=n) for n in range(12)), "done"]), tools=[wait],
          host=Host(store=store)).run_sync("Wait.", run_id="live")
"""


def make_long_run(path: Path, moves: int) -> None:
    """Add a run with so many moves to a store."""
    steps = moves // 5
    limits = AgentGuardrails(max_iterations=steps + 1, max_execution_time_s=1e6)
    with SqliteStore(path, synchronous="normal") as store:
        model = ScriptedModel([*(call("look", page=n) for n in range(steps)), "done"])
        Agent(model, tools=[look], guardrails=limits, host=Host(store=store)).run_sync("Read all.", run_id="long")


@contextmanager
def viewing(path: Path) -> Generator[str]:
    """The address of a viewer of a store, in a process of its own."""
    command = [sys.executable, "-m", "agentfsm", "view", "--store", str(path), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as viewer:
        assert viewer.stderr is not None
        found = re.search(r"http://[^ ]+:\d+", viewer.stderr.readline())
        assert found is not None
        try:
            yield found[0]
        finally:
            viewer.terminate()


def mark(page: Any, name: str) -> float:
    """When a page has shown something, in milliseconds since it was asked for."""
    page.wait_for_function(f"performance.getEntriesByName('{name}').length")
    found: float = page.evaluate(f"performance.getEntriesByName('{name}')[0].startTime")
    return found


def measure(folder: Path) -> dict[str, tuple[float, float]]:
    """Each figure with its bound, in milliseconds."""
    fill_listing(folder / "many.db")
    make_long_run(folder / "long.db", 10_000)
    found: dict[str, tuple[float, float]] = {}
    with running_browser() as browser:
        with viewing(folder / "many.db") as site, site_page(browser, site, bypass_csp=True) as (page, _):
            page.goto("/")
            found["the first page of 100,000 runs appears"] = mark(page, "runs-shown"), 1000
        with viewing(folder / "long.db") as site, site_page(browser, site, bypass_csp=True) as (page, _):
            page.goto("/run?id=long")
            found["a run of 10,000 moves opens"] = mark(page, "run-shown"), 1000
            page.wait_for_selector(".picture svg")
            page.focus("[role=listbox]")
            took = page.evaluate(STEP, STEPS)
            found["a step, the 95th percentile"] = quantiles(took, n=20)[-1], 16
            command = [sys.executable, "-c", FOLLOWED, str(folder / "long.db")]
            with subprocess.Popen(command) as child:
                page.goto("/")
                page.wait_for_selector("tr[data-run=live]")
                page.goto("/run?id=live")
                page.wait_for_selector(".row")
                page.evaluate(WATCH)
                page.get_by_text("now in terminal").wait_for()
                seen = page.evaluate("window.seen")
                child.wait()
            moves = page.request.get("/api/run?run=live").json()["moves"]
            late = [seen[str(place)] - move[2] for place, move in enumerate(moves) if str(place) in seen]
            found["news of a run is seen, the median"] = median(late), 200
    return found


def main() -> None:
    """Measure, print, and fail if a bound is missed."""
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder))
    for name, (took, bound) in figures.items():
        print(f"{name:45} {took:8.1f} ms   (at most {bound:.0f})")
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    if any(took > bound for took, bound in figures.values()):
        sys.exit("a bound was missed")


if __name__ == "__main__":
    main()
