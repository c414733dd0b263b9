"""Every text format has every transition with its number, and is valid in its language."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest

from agentfsm.diagrams import FORMATS, Coverage, Format, RunPath, diagram, image, write
from agentfsm.diagrams.style import DARK, LIGHT, Palette, Theme
from agentfsm.errors import ConfigurationError, GraphError
from agentfsm.loop.transition_table import LOOP
from agentfsm.machine import Graph
from tests.helpers.graphs import (
    ODD_NAMES_GRAPH,
    SINGLE_STATE_GRAPH,
    SMALL_GRAPH,
    all_graphs,
    extended_loop,
    random_graph,
)

Row = tuple[str, int, str, str]  # source, number, guard, target

SMALL_ROWS: list[Row] = [  # by hand
    ("plan", 1, "too_long", "end"),
    ("plan", 2, "declared_done", "end"),
    ("plan", 3, "otherwise", "work"),
    ("work", 1, "cancelled", "end"),
    ("work", 2, "again", "work"),
    ("work", 3, "revise", "plan"),
    ("work", 4, "otherwise", "end"),
]


def rows_of(graph: Graph) -> list[Row]:
    return sorted(
        (str(s.name), n, t.name, str(t.target)) for s in graph.states for n, t in enumerate(graph.rows(s.name), 1)
    )


# How a reader who knows only the format finds the rows in it


def read_svg(text: str) -> list[Row]:
    found: list[Row] = []
    for state in ET.fromstring(text).iterfind(".//{*}g[@data-state]"):
        source = state.attrib["data-state"]
        for row in state.iterfind("{*}g[@data-edge]"):
            tip = row.findtext("{*}title") or ""
            target = tip.partition(" → ")[2].partition(":")[0]
            number, guard = (t.text or "" for t in row.iterfind("{*}text"))
            assert row.attrib["data-edge"] == f"{source}.{guard}"
            found.append((source, int(number), guard, target))
    return found


def read_dot(text: str) -> list[Row]:
    found: list[Row] = []
    source, target = "", ""
    for line in text.splitlines():
        if opening := re.match(r'  "(\w+)" \[.*label=<$', line):
            source = opening[1]
        target = found_target[1] if (found_target := re.search(r">→ (\w+)<", line)) else target
        if row := re.search(r'>(\d+)</FONT></TD><TD [^>]*ID="(\w+)\.(\w+)"', line):
            assert row[2] == source
            found.append((source, int(row[1]), row[3], target))
    return found


def read_edges(text: str, edge: str, stop: str, split: str) -> list[Row]:
    """The rows of Mermaid and PlantUML: edges with labels, and bad endings as text in their state."""
    found: list[Row] = []
    for source, words, target in re.findall(edge, text, re.MULTILINE):
        found += [(source, *row(words), target) for words in words.split(split)]
    for state, lines in re.findall(stop, text, re.MULTILINE):
        for words, target in re.findall(r"(?:^|<i>)([^<→]*) → (\w+)", lines):
            found += [(state, *row(w), target) for w in words.split(", ")]
    return found


def row(words: str) -> tuple[int, str]:
    number, _, guard = words.removesuffix(" (completed)").partition(" ")
    return int(number), guard


def read_mermaid(text: str) -> list[Row]:
    found = read_edges(text, r'^  (\w+) [=.>-]+\|"(.*)"\| (\w+)$', r'^  (\w+)\W*"<b>(.*)"', "<br/>")
    return [(name(a), n, guard, name(b)) for a, n, guard, b in found]


def name(mermaid: str) -> str:
    return mermaid.rstrip("_") if mermaid in ("end_", "default_") else mermaid


def read_plantuml(text: str) -> list[Row]:
    swapped = re.sub(r"^(\w+) -\[.*\]-> (\w+) : (.*)$", r"\1 -> \3 : \2", text, flags=re.MULTILINE)
    return read_edges(swapped, r"^(\w+) -> (.*) : (\w+)$", r"^(\w+) : (\d.*)$", r"\n")


def read_markdown(text: str) -> list[Row]:
    found = re.findall(r"^\| `(\w+)` \| (\d+) \| [`*](\w+)[`*] \| `(\w+)`(?: \([\w ]+\))? \|", text, re.MULTILINE)
    return [(a, int(n), guard, b) for a, n, guard, b in found]


def read_text(text: str) -> list[Row]:
    found: list[Row] = []
    source = ""
    for line in text.splitlines()[1:]:
        if state := re.match(r"(\w+)", line):
            source = state[1]
        if row := re.match(r" +(\d+)  (\w+) +-> (\w+)", line):
            found.append((source, int(row[1]), row[2], row[3]))
    return found


def read_scxml(text: str) -> list[Row]:
    found: list[Row] = []
    ours = "{urn:agentfsm}"
    for state in ET.fromstring(text):
        for place, edge in enumerate(state, 1):
            assert int(edge.attrib[ours + "order"]) == place
            found.append((state.attrib["id"], place, edge.get("cond", "otherwise"), edge.attrib["target"]))
            assert edge.attrib[ours + "id"] == f"{found[-1][0]}.{found[-1][2]}"
    return found


def read_xstate(text: str) -> list[Row]:
    found: list[Row] = []
    for source, state in json.loads(text)["states"].items():
        for place, edge in enumerate(state.get("on", {}).get("step", []), 1):
            found.append((source, place, edge.get("guard", "otherwise"), edge["target"]))
            assert edge["meta"]["order"] == place
            assert edge["meta"]["id"] == f"{source}.{found[-1][2]}"
    return found


def read_promela(text: str) -> list[Row]:
    found = re.findall(r"state = S_(\w+) } /\* (\d+) (\w+)\.(\w+)", text)
    return list(dict.fromkeys((a, int(n), guard, b) for b, n, a, guard in found))  # a row has an option per result


READERS: dict[str, Callable[[str], list[Row]]] = {
    "svg": read_svg,
    "dot": read_dot,
    "mermaid": read_mermaid,
    "markdown": read_markdown,
    "text": read_text,
    "plantuml": read_plantuml,
    "scxml": read_scxml,
    "xstate": read_xstate,
    "promela": read_promela,
}


def test_every_text_format_has_a_reader_here() -> None:
    assert READERS.keys() == {name for name, form in FORMATS.items() if not form.image}


@pytest.mark.parametrize("format_name", READERS)
def test_every_format_has_every_row_with_its_number(format_name: str) -> None:
    assert sorted(READERS[format_name](diagram(SMALL_GRAPH, format_name))) == SMALL_ROWS
    for graph in (LOOP, extended_loop(), *(random_graph(seed) for seed in range(12))):
        assert sorted(READERS[format_name](diagram(graph, format_name))) == rows_of(graph), graph.name


@pytest.mark.parametrize("format_name", READERS)
def test_every_format_but_that_of_spin_says_how_runs_end(format_name: str) -> None:
    text = diagram(SMALL_GRAPH, format_name)
    endings = ("completed", "partial")  # by hand; the third, ``cancelled``, is also the name of a guard
    assert all(ending in text for ending in endings) is (format_name != "promela")


@pytest.mark.parametrize("format_name", [name for name, form in FORMATS.items() if form.overlays and not form.image])
def test_an_overlay_keeps_every_row_and_adds_its_counts(format_name: str) -> None:
    text = diagram(LOOP, format_name, overlay=Coverage({"post_tool.otherwise": 4321}))
    assert "4321" in text
    assert "never" in text
    plain = re.sub(r" \((?:never|\u00d7\d+)\)", "", text)
    if format_name not in ("svg", "dot"):
        assert sorted(READERS[format_name](plain)) == rows_of(LOOP)
    for transition in LOOP:
        assert transition.name in text


def test_the_svg_lists_on_each_line_the_transitions_that_run_along_it() -> None:
    lines = ET.fromstring(diagram(LOOP)).findall("{*}path[@data-edge]")
    ids = {i for line in lines for i in line.attrib["data-edge"].split()}
    ends = {t.id for t in LOOP if t.target == "terminal"} - {"post_llm.otherwise", "post_tool.declared_done"}
    assert ids == {t.id for t in LOOP} - ends
    assert all(line.find("{*}title") is not None for line in lines)


@pytest.mark.parametrize("format_name", ["svg", "scxml"])
@pytest.mark.parametrize("graph", all_graphs().values(), ids=all_graphs().keys())
def test_xml_is_well_formed(format_name: str, graph: Graph) -> None:
    ET.fromstring(diagram(graph, format_name))


MERMAID = (
    r"flowchart TD",
    r"  %% [^\n]*",
    r"  start-mark\(\( \)\) --> \w+",
    r'  \w+(\["[^"\n]*"\]|\(\["[^"\n]*"\]\)):::(happy|recover|wait|stop|dim|gone)',
    r'  \w+ (==>|-->|-\.->)\|"[^"\n|]*"\| \w+',
    r"  classDef \w+ fill:#\w{6},stroke:#\w{6},color:#\w{6}(,stroke-dasharray:4 3)?",
    r"  style \w+ stroke-width:4px",
    r'  subgraph legend-box\["legend"\]',
    r'    legend-\w+\["[^"]*"\](:::\w+)?',
    r"    style legend-current stroke-width:4px",
    r"  end",
    r"  linkStyle \d+(,\d+)* stroke:#\w{6}",
)


@pytest.mark.parametrize(
    "graph", [LOOP, SMALL_GRAPH, ODD_NAMES_GRAPH, SINGLE_STATE_GRAPH, extended_loop()], ids=lambda g: g.name
)
def test_mermaid_lines_match_its_grammar(graph: Graph) -> None:
    # The parser of Mermaid 12 accepts these; it needs a browser, so its grammar is written as the patterns above.
    text = diagram(graph, "mermaid")
    first = graph.initial
    text += diagram(graph, "mermaid", overlay=RunPath({}, first)) if graph is not SINGLE_STATE_GRAPH else ""
    assert not [line for line in text.splitlines() if not any(re.fullmatch(p, line) for p in MERMAID)]
    edges = len(re.findall(r'\|"', diagram(graph, "mermaid")))
    styled = re.findall(r"linkStyle ([\d,]+)", diagram(graph, "mermaid"))
    assert sorted(int(n) for numbers in styled for n in numbers.split(",")) == list(range(1, edges + 1))
    for word in ("end", "default"):  # keywords of Mermaid
        assert not re.search(rf"^  {word}\b(?!$)", text, re.MULTILINE)  # "end" alone ends the legend


def test_xstate_has_guards_in_order_and_none_on_the_last_row() -> None:
    for state in json.loads(diagram(LOOP, "xstate"))["states"].values():
        rows = state.get("on", {}).get("step", [])
        assert all("guard" in r for r in rows[:-1])
    machine = json.loads(diagram(SMALL_GRAPH, "xstate"))
    assert machine["initial"] == "plan"
    assert machine["states"]["end"]["type"] == "final"
    assert [r.get("guard") for r in machine["states"]["work"]["on"]["step"]] == ["cancelled", "again", "revise", None]


def test_scxml_starts_and_ends_where_the_graph_does() -> None:
    root = ET.fromstring(diagram(SMALL_GRAPH, "scxml"))
    assert root.attrib["initial"] == "plan"
    assert [child.tag.partition("}")[2] for child in root] == ["state", "state", "final"]


@pytest.mark.parametrize(
    "graph",
    [LOOP, SMALL_GRAPH, ODD_NAMES_GRAPH, SINGLE_STATE_GRAPH, extended_loop(), random_graph(4)],
    ids=lambda g: g.name,
)
def test_spin_accepts_the_promela(graph: Graph, tmp_path: Path) -> None:
    spin = shutil.which("spin")
    if spin is None:
        pytest.skip("spin is not installed")
    (tmp_path / "graph.pml").write_text(diagram(graph, "promela"), encoding="utf-8")
    done = subprocess.run([spin, "-a", "graph.pml"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "error" not in done.stdout.lower()
    assert (tmp_path / "pan.c").exists()


@pytest.mark.parametrize(
    "graph",
    [LOOP, SMALL_GRAPH, ODD_NAMES_GRAPH, SINGLE_STATE_GRAPH, extended_loop(), random_graph(4)],
    ids=lambda g: g.name,
)
def test_graphviz_accepts_the_dot(graph: Graph) -> None:
    dot = shutil.which("dot")
    if dot is None:
        pytest.skip("Graphviz is not installed")
    for text in (diagram(graph, "dot"), diagram(graph, "dot", theme="dark", overlay=Coverage({}))):
        done = subprocess.run([dot, "-Tsvg"], input=text, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_text_formats_are_the_same_bytes_under_any_hash_seed() -> None:
    program = (
        "import hashlib\n"
        "from agentfsm.loop.transition_table import LOOP\n"
        "from agentfsm.diagrams import FORMATS, Coverage, RunPath, diagram\n"
        "from tests.helpers.graphs import extended_loop\n"
        "texts = [diagram(g, f) for g in (LOOP, extended_loop()) for f in FORMATS if not FORMATS[f].image]\n"
        "counts = {t.id: 3 for t in list(LOOP)[::2]}\n"
        "texts += [diagram(LOOP, f, overlay=o) for o in (Coverage(counts), RunPath(counts))\n"
        "          for f, form in FORMATS.items() if form.overlays and not form.image]\n"
        "print(hashlib.sha256(chr(0).join(texts).encode()).hexdigest())\n"
    )
    root = Path(__file__).parents[2]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=root,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("0", "1", "4242")
    ]
    digests = {process.communicate()[0] for process in running}
    assert len(digests) == 1
    assert len(digests.pop().strip()) == 64


def test_the_svg_has_a_light_and_a_dark_theme() -> None:
    auto, light, dark = (diagram(LOOP, theme=theme) for theme in ("auto", "light", "dark"))
    for colour in ("#1a7f37", "#9a6700", "#0969da", "#cf222e"):
        assert colour in auto
        assert colour in light
        assert colour not in dark
    for colour in ("#3fb950", "#d29922", "#4493f8", "#f85149"):
        assert colour in auto
        assert colour in dark
        assert colour not in light
    assert "prefers-color-scheme:dark" in auto
    assert "prefers-color-scheme" not in light + dark


SKIN = ("defaultFontColor", "backgroundColor")


def luminance(colour: str) -> float:
    """The relative luminance of WCAG 2.2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_every_text_has_the_contrast_that_readers_need(palette: Palette) -> None:
    assert contrast("#ffffff", "#767676") == pytest.approx(4.54, abs=0.01)  # the example of WCAG
    marks = [palette.never, palette.added, palette.changed]
    grounds = [palette.paper, palette.box, *marks, *palette.tint.values()]
    pairs = [(text, ground) for text in (palette.ink, palette.grey, palette.dim) for ground in grounds]
    for kind, colour in palette.line.items():
        pairs += [(colour, ground) for ground in (palette.paper, palette.box, palette.tint[kind], *marks)]
    low = [(text, ground, contrast(text, ground)) for text, ground in pairs if contrast(text, ground) < 4.5]
    assert low == []


@pytest.mark.parametrize(("theme", "palette"), [("light", LIGHT), ("dark", DARK)])
def test_every_text_of_a_faded_dot_picture_has_that_contrast(theme: Theme, palette: Palette) -> None:
    text = diagram(LOOP, "dot", theme=theme, overlay=RunPath({"pre_step.otherwise": 1}, "call_llm"))
    colours = set(re.findall(r'<FONT [^>]*COLOR="([^"]+)"', text))
    assert {palette.dim, palette.ink} <= colours
    assert [each for each in colours if contrast(each, palette.box) < 4.5] == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_texts_of_a_plantuml_picture_have_that_contrast(theme: Theme) -> None:
    text = diagram(LOOP, "plantuml", theme=theme, overlay=RunPath({"pre_step.otherwise": 1}, "suspended"))
    ink, paper = (re.findall(rf"^skinparam {name} (#\w{{6}})$", text, re.MULTILINE)[0] for name in SKIN)
    grounds = {paper, *re.findall(r"^state \w+ (#\w{6});", text, re.MULTILINE)}
    assert len(grounds) >= 3  # states of the happy path, that wait, and that were not reached, which may be as the page
    assert [ground for ground in grounds if contrast(ink, ground) < 4.5] == []


def test_every_colour_of_a_dot_picture_is_in_its_legend() -> None:
    heading, _, boxes = diagram(LOOP, "dot").partition("  node [")
    named = dict(re.findall(r'<FONT [^>]*COLOR="([^"]+)">([^<]+)</FONT>', heading))
    assert named["#0969da"] == "waiting"
    assert set(re.findall(r' color="([^"]+)"', boxes)) - {LIGHT.ink} <= set(named)


def test_the_svg_is_readable_in_greyscale() -> None:
    text = diagram(LOOP)
    dashes = {
        kind: re.search(rf"\.line\.{kind}{{stroke-dasharray:([^}}]*)}}", text) for kind in ("wait", "resume", "done")
    }
    assert len({match[1] for match in dashes.values() if match}) == 3
    weights = [re.search(rf"\.line\.{kind}{{stroke-width:([\d.]+)}}", text) for kind in ("happy", "recover")]
    happy, recover = (float(match[1]) for match in weights if match)
    assert happy > recover
    assert re.search(r"\.otherwise{font-style:italic}", text)


def test_errors_for_unknown_formats_list_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"'jpeg'.*svg, dot, mermaid, markdown, text"):
        diagram(LOOP, "jpeg")
    with pytest.raises(ConfigurationError, match="png is an image"):
        diagram(LOOP, "png")
    with pytest.raises(ConfigurationError, match="png, pdf"):
        image(LOOP, "gif")
    with pytest.raises(ConfigurationError, match=r"\.xyz'.*\.svg.*\.mmd.*\.png"):
        write(LOOP, tmp_path / "loop.xyz")
    with pytest.raises(ConfigurationError, match=r"'blue'.*auto, light, dark"):
        diagram(LOOP, theme="blue")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"'round'.*wide, vertical"):
        diagram(LOOP, layout="round")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="'dot' has no vertical layout; these do: svg"):
        write(LOOP, tmp_path / "loop.dot", layout="vertical")
    assert not list(tmp_path.iterdir())


def test_interchange_formats_reject_overlays() -> None:
    for format_name in ("scxml", "xstate", "promela"):
        with pytest.raises(ConfigurationError, match="shows no overlays; these do: svg"):
            diagram(LOOP, format_name, overlay=Coverage({}))


def test_an_overlay_with_an_unknown_transition_is_rejected() -> None:
    with pytest.raises(GraphError, match=r"pre_step\.nonsense"):
        diagram(LOOP, overlay=Coverage({"pre_step.nonsense": 1}))


def test_a_new_format_is_one_entry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(FORMATS, "names", Format(lambda view, theme: " ".join(b.name for b in view.boxes), (".names",)))
    assert diagram(SMALL_GRAPH, "names") == "plan work end"
    assert write(SMALL_GRAPH, tmp_path / "small.names").read_text() == "plan work end"


def test_write_takes_the_format_from_the_file_extension(tmp_path: Path) -> None:
    for name, form in FORMATS.items():
        for ending in form.suffixes:
            if not form.image:
                path = write(SMALL_GRAPH, tmp_path / f"small{ending.upper()}")
                assert path.read_bytes() == diagram(SMALL_GRAPH, name).encode()


def test_notes_and_names_are_escaped() -> None:
    assert "&lt;b&gt;" in diagram(ODD_NAMES_GRAPH, "svg")
    assert "<b>" not in diagram(ODD_NAMES_GRAPH, "svg")
    assert "\x00" not in diagram(ODD_NAMES_GRAPH, "svg")
    assert "\\<b\\>" in diagram(ODD_NAMES_GRAPH, "markdown")
    assert "\\[a\\|b\\] \\*/" in diagram(ODD_NAMES_GRAPH, "markdown")
    assert "[a|b] * / " in diagram(ODD_NAMES_GRAPH, "promela")
    assert "S__e9tat" in diagram(ODD_NAMES_GRAPH, "promela")  # Promela knows ASCII names only


def test_plain_text_is_ascii_if_names_are() -> None:
    assert diagram(LOOP, "text").isascii()
    assert diagram(LOOP, "text", overlay=RunPath({"pre_step.otherwise": 2}, "call_llm")).isascii()
