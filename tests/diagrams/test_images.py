"""Images: rendered from the DOT by Graphviz, with a clear error if it is missing; nothing else needs it."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from agentfsm.diagrams import Coverage, diagram, image, write
from agentfsm.errors import ConfigurationError
from agentfsm.loop.transition_table import LOOP
from agentfsm.machine import Graph
from tests.helpers.graphs import ODD_NAMES_GRAPH, SMALL_GRAPH, extended_loop

needs_graphviz = pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")


@needs_graphviz
@pytest.mark.parametrize("graph", [LOOP, SMALL_GRAPH, ODD_NAMES_GRAPH, extended_loop()], ids=lambda g: g.name)
def test_a_png_shows_all_of_the_dot_at_twice_its_size(graph: Graph, capfd: pytest.CaptureFixture[str]) -> None:
    data = image(graph)
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    laid_out = subprocess.run(["dot", "-Tdot"], input=diagram(graph, "dot").encode(), capture_output=True, check=True)
    left, bottom, right, top = (float(n) for n in re.findall(rb'bb="([^"]*)"', laid_out.stdout)[0].split(b","))
    padding = 2 * 72 * 0.3  # points, at both sides
    assert abs(width - 2 * (right - left + padding)) <= 4
    assert abs(height - 2 * (top - bottom + padding)) <= 4
    assert capfd.readouterr().err == ""  # Graphviz warns of texts that do not fit


@needs_graphviz
def test_images_take_themes_and_overlays(tmp_path: Path) -> None:
    assert image(SMALL_GRAPH, "pdf").startswith(b"%PDF")
    assert image(SMALL_GRAPH, theme="dark", overlay=Coverage({})) != image(SMALL_GRAPH)
    assert write(SMALL_GRAPH, tmp_path / "small.png").read_bytes().startswith(b"\x89PNG")


def test_the_error_without_graphviz_names_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"png image needs Graphviz.*\.svg"):
        image(SMALL_GRAPH)
    assert diagram(SMALL_GRAPH).startswith("<svg")


def test_the_error_without_the_graphviz_package_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "graphviz", None)
    with pytest.raises(ConfigurationError, match="pip install graphviz"):
        image(SMALL_GRAPH)


def test_text_formats_do_not_import_graphviz() -> None:
    program = (
        "import sys; from agentfsm.diagrams import FORMATS, diagram; from agentfsm.loop.transition_table import LOOP\n"
        "for form in FORMATS:\n    if not FORMATS[form].image: diagram(LOOP, form)\n"
        "assert 'graphviz' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])


@needs_graphviz
def test_graphviz_can_render_svg() -> None:
    root = ET.fromstring(image(LOOP, "svg", theme="dark"))
    texts = {"".join(text.itertext()) for text in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {t.name for t in LOOP} <= texts
