"""Mermaid (in a browser) and PlantUML draw our diagrams, without overlaps."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agentfsm.diagrams import Coverage, DiffOverlay, RunPath, diagram
from agentfsm.loop.transition_table import LOOP
from tests.helpers.graphs import (
    ODD_NAMES_GRAPH,
    SINGLE_STATE_GRAPH,
    SMALL_GRAPH,
    claims_graph,
    extended_loop,
    random_graph,
)
from tests.helpers.npm_servers import install_package

MERMAID = "12.3.0"
GRAPHS = {
    "loop": LOOP,
    "more": extended_loop(),
    "small": SMALL_GRAPH,
    "odd": ODD_NAMES_GRAPH,
    "lonely": SINGLE_STATE_GRAPH,
    "random": random_graph(4),
    "claims": claims_graph(),
}

PAGE = """<!doctype html><meta charset="utf-8"><body>
<script src="SCRIPT"></script>
<pre id="result"></pre><div id="drawn"></div>
<script>
mermaid.initialize({startOnLoad: false});
(async () => {
  const results = {};
  for (const [name, text] of Object.entries(TEXTS)) {
    try {
      const {svg} = await mermaid.render('drawing', text);
      document.getElementById('drawn').innerHTML = svg;
      const boxes = (which) => [...document.querySelectorAll(which)].map((e) => {
        const r = e.getBoundingClientRect();
        return [e.textContent, r.left, r.top, r.right, r.bottom];
      }).filter(([, left, , right]) => right > left);
      results[name] = {labels: boxes('#drawn g.edgeLabel'), nodes: boxes('#drawn g.node')};
    } catch (error) { results[name] = {error: String(error)}; }
  }
  document.getElementById('drawn').innerHTML = '';
  document.getElementById('result').textContent = JSON.stringify(results);
})();
</script>
"""


def drawn(texts: dict[str, str], folder: Path) -> dict[str, Any]:
    """Renders Mermaid texts in a browser: the position of each label and node, or the error."""
    browser = next(
        (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
    )
    if browser is None:
        pytest.skip("Mermaid needs a browser, and no chromium is on the PATH")
    script = install_package("mermaid", MERMAID, "dist/mermaid.min.js")
    page = folder / "page.html"
    page.write_text(PAGE.replace("SCRIPT", script.as_uri()).replace("TEXTS", json.dumps(texts).replace("<", "\\u003c")))
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--allow-file-access-from-files",
        f"--user-data-dir={folder}/me",
    ]
    done = subprocess.run(
        [browser, *flags, "--window-size=2000,3000", "--virtual-time-budget=60000", "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    found = re.search(r'<pre id="result">(.+?)</pre>', done.stdout, re.S)
    if found is None:
        pytest.skip(f"the browser drew nothing: {done.stderr[-300:]}")
    results: dict[str, Any] = json.loads(html.unescape(found[1]))
    return results


def apart(one: list[Any], other: list[Any]) -> bool:
    _, left, top, right, bottom = one
    _, left2, top2, right2, bottom2 = other
    return right <= left2 + 1 or right2 <= left + 1 or bottom <= top2 + 1 or bottom2 <= top + 1


@pytest.mark.slow
def test_mermaid_draws_every_graph_without_overlapping_text(tmp_path: Path) -> None:
    texts = {name: diagram(graph, "mermaid") for name, graph in GRAPHS.items()}
    counts = {t.id: n for n, t in enumerate(LOOP) if n % 3}
    texts["dark"] = diagram(LOOP, "mermaid", theme="dark")
    texts["run"] = diagram(LOOP, "mermaid", overlay=RunPath(counts, "suspended"))
    texts["coverage"] = diagram(LOOP, "mermaid", overlay=Coverage(counts))
    texts["difference"] = diagram(extended_loop(), "mermaid", overlay=DiffOverlay(LOOP))
    results = drawn(texts, tmp_path)
    assert results.keys() == texts.keys()
    for name, found in results.items():
        assert "error" not in found, f"{name}: {found['error']}"
        labels = list({tuple(label): label for label in found["labels"]}.values())
        for place, label in enumerate(labels):
            for other in (*labels[:place], *found["nodes"]):
                assert apart(label, other), f"{name}: {label} over {other}"
        graph = GRAPHS.get(name)
        if graph is not None and graph is not ODD_NAMES_GRAPH:
            said = " ".join(text for text, *_ in (*labels, *found["nodes"]))
            assert all(t.name in said for t in graph), name
    print(f"mermaid {MERMAID} draws {len(results)} texts")


def test_plantuml_accepts_every_graph() -> None:
    program = shutil.which("plantuml")
    if program is None:
        pytest.skip("plantuml is not installed")
    texts = [diagram(graph, "plantuml") for graph in GRAPHS.values()]
    texts.append(diagram(LOOP, "plantuml", theme="dark"))
    texts.append(diagram(LOOP, "plantuml", overlay=RunPath({"pre_step.otherwise": 1}, "call_llm")))
    texts.append(diagram(extended_loop(), "plantuml", overlay=DiffOverlay(LOOP)))
    flags = ["-DPLANTUML_LIMIT_SIZE=16384", "-charset", "UTF-8", "-tsvg", "-pipe"]
    for text in texts:
        done = subprocess.run(
            [program, *flags], input=text, capture_output=True, encoding="utf-8", timeout=120, check=False
        )
        assert (done.returncode, done.stderr) == (0, ""), text
        names = re.findall(r"^state (\S+)", text, re.M)
        assert all(f">{name}</text>" in done.stdout for name in names)
    print(f"plantuml draws {len(texts)} texts")
