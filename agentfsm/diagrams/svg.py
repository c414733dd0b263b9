"""SVG, written without any other program, and the same bytes on every machine.

Each state is a group with ``data-state``, each row a group with ``data-edge``, and each line a path whose
``data-edge`` lists the transitions that run along it, so that a web page can find and style them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from agentfsm.diagrams.box import BASELINE_OFFSET, FONT_SIZES, FONT_STACK, HEAD_HEIGHT, ROW_HEIGHT, Label, RowGroup
from agentfsm.diagrams.edge_routing import Point, Segment, Side, bends, point_toward
from agentfsm.diagrams.layout import (
    ARROW_LENGTH,
    BAR_WIDTH,
    LEGEND_LINE_LENGTH,
    Layout,
    LegendSample,
    PlacedBox,
    compute_layout,
)
from agentfsm.diagrams.style import DARK, LIGHT, LINE_DASHES, LINE_WIDTHS, Palette, Theme, escape_xml
from agentfsm.diagrams.view import TableRow, View

CORNER_RADIUS = 8  # pixels


def svg(view: View, theme: Theme = "auto") -> str:
    """A view as an SVG picture."""
    layout = compute_layout(view)
    return "\n".join(_document(view, layout, theme)) + "\n"


def _document(view: View, layout: Layout, theme: Theme) -> Iterator[str]:
    w, h = layout.width, layout.height
    title = escape_xml(f"{view.title}: {view.caption}")
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{w}" height="{h}" viewBox="0 0 {w} {h}" '
        f'class="agentfsm-{theme}" role="img" aria-label="{title}" data-graph="{escape_xml(view.graph.name)}">'
    )
    yield f"<style>{style_sheet(theme)}</style>"
    yield f'<rect class="paper" width="{w}" height="{h}"/>'
    yield from (_label(label) for label in layout.labels)
    yield f'<g class="legend">{"".join(map(_legend_sample, layout.legend))}</g>'
    x, y = layout.start
    yield f'<circle class="start" cx="{x}" cy="{y - 22}" r="5"/>'
    yield f'<path class="begin" d="M{x} {y - 22}V{y - ARROW_LENGTH + 1}"/>'
    yield f'<path class="start" d="{_arrow_head((x, y - ARROW_LENGTH), (x, y))}"/>'
    emphasize = any(segment.dim for line in layout.lines for segment in line)
    for line in sorted(layout.lines, key=lambda line: not all(segment.dim for segment in line)):
        casing = "".join(_path(segment.points) for segment in line)
        yield f'<path class="casing" d="{casing}"/>'
        for segment in sorted(line, key=lambda s: not s.dim):
            yield from _segment(segment, thick=emphasize and not segment.dim)
    for box in layout.boxes:
        yield from _box(view, box)
    yield "</svg>"


def _legend_sample(sample: LegendSample) -> str:
    if sample.key is None and sample.kind != "stop":
        return f'<path class="line {sample.kind}" d="M{sample.x} {sample.y}h{LEGEND_LINE_LENGTH}"/>'
    place = f'x="{sample.x + 2}" y="{sample.y - 5}" width="18" height="10" rx="3"'
    if sample.key is None or sample.key in ("dim", "current"):
        return f"<rect {_class_attribute('box', sample.kind, sample.key)} {place}/>"
    return f'<rect class="mark {sample.key}" {place}/><rect class="box dim" {place}/>'


def style_sheet(theme: Theme) -> str:
    """The style sheet of the pictures of a theme. Its rules apply to these only, because a page may embed several."""
    rules = [
        f"text{{font-family:{FONT_STACK}}}",
        *(f".{style}{{font-size:{size:g}px}}" for style, size in FONT_SIZES.items()),
    ]
    rules += [
        ".title,.name,.never.tag{font-weight:700}",
        ".otherwise{font-style:italic}",
        ".struck{text-decoration:line-through}",
        ".line,.casing,.begin,.bracket,.box{fill:none}",
        ".box,.begin{stroke-width:1.4}",
        ".bracket{stroke-width:1}",
        ".casing{stroke-width:7}",
        ".box.current{stroke-width:4}",
        ".box.removed{stroke-dasharray:4 3}",
    ]
    rules += [f".line.{kind}{{stroke-width:{weight:g}}}" for kind, weight in LINE_WIDTHS.items()]
    rules += [f".line.{kind}{{stroke-dasharray:{dash}}}" for kind, dash in LINE_DASHES.items()]
    rules.append(".line.thick{stroke-width:3.4}")
    scope = f".agentfsm-{theme}"
    style = _scoped([*rules, *_color_rules(DARK if theme == "dark" else LIGHT)], scope)
    if theme == "auto":
        style += f"@media (prefers-color-scheme:dark){{{_scoped(_color_rules(DARK), scope)}}}"
    return style


def _scoped(rules: list[str], scope: str) -> str:
    split = (rule.partition("{") for rule in rules)
    return "".join(",".join(f"{scope} {s}" for s in selectors.split(",")) + "{" + body for selectors, _, body in split)


def _color_rules(p: Palette) -> list[str]:
    rules = [
        f".paper{{fill:{p.paper}}}",
        f".casing{{stroke:{p.paper}}}",
        f".inside{{fill:{p.box}}}",
        f"text,.start{{fill:{p.ink}}}",
        f".begin{{stroke:{p.ink}}}",
        f".note,.number,.tag,.caption,.ends{{fill:{p.grey}}}",
    ]
    for kind, color in p.line.items():
        rules.append(f".line.{kind},.box.{kind},.bracket.{kind}{{stroke:{color}}}")
        rules.append(f".arrow.{kind},.bar.{kind},text.{kind}{{fill:{color}}}")
        rules.append(f".head.{kind}{{fill:{p.tint[kind]}}}")
    return [
        *rules,
        f".mark.never,.mark.removed{{fill:{p.never}}}",
        f".mark.added{{fill:{p.added}}}",
        f".mark.moved,.mark.changed,.mark.often{{fill:{p.changed}}}",
        f".line.dim,.box.dim,.bracket.dim{{stroke:{p.faint}}}",
        f".arrow.dim,.bar.dim{{fill:{p.faint}}}",
        f"text.dim{{fill:{p.dim}}}",
        f".head.dim{{fill:{p.box}}}",
    ]


def _class_attribute(*names: str | None, dim: bool = False) -> str:
    """A class attribute of the names that are not empty."""
    return f'class="{" ".join(n for n in (*names, "dim" if dim else None) if n)}"'


def _label(label: Label, x: int = 0, y: int = 0, mark: str = "") -> str:
    classes = _class_attribute(label.style, label.kind, mark, "struck" if label.strikethrough else None, dim=label.dim)
    end = ' text-anchor="end"' if label.align_right else ""
    return f'<text {classes} x="{label.x + x}" y="{label.y + y}"{end}>{escape_xml(label.text)}</text>'


def _segment(segment: Segment, *, thick: bool) -> Iterator[str]:
    points = list(segment.points)
    if segment.arrow:  # the line ends one pixel inside its head
        points[-1] = point_toward(points[-1], points[-2], ARROW_LENGTH - 1)
    classes = _class_attribute("line", segment.kind, "thick" if thick else None, dim=segment.dim)
    tip = escape_xml("\n".join(segment.ids))
    ids = escape_xml(" ".join(segment.ids))
    yield f'<path {classes} data-edge="{ids}" d="{_path(points)}"><title>{tip}</title></path>'
    if segment.arrow:
        classes = _class_attribute("arrow", segment.kind, dim=segment.dim)
        yield f'<path {classes} d="{_arrow_head(points[-1], segment.points[-1])}"/>'


def _path(points: Sequence[Point]) -> str:
    """A path through points, with rounded corners."""
    out = [f"M{points[0][0]} {points[0][1]}"]
    out += [f"L{a[0]} {a[1]}Q{corner[0]} {corner[1]} {b[0]} {b[1]}" for a, corner, b in bends(points)]
    out.append(f"L{points[-1][0]} {points[-1][1]}")
    return "".join(out)


def _arrow_head(base: Point, tip: Point) -> str:
    """An arrow head, from the middle of its base to its tip."""
    if base[0] == tip[0]:
        return f"M{tip[0]} {tip[1]}L{tip[0] - 4} {base[1]}H{tip[0] + 4}Z"
    return f"M{tip[0]} {tip[1]}L{base[0]} {tip[1] - 4}V{tip[1] + 4}Z"


def _box(view: View, placed: PlacedBox) -> Iterator[str]:
    box, table = placed.box, placed.table
    x, y, w, h, r = placed.x, placed.y, placed.width, placed.height, CORNER_RADIUS
    rect = f'x="{x}" y="{y}" width="{w}" height="{h}" rx="{r}"'
    tip = f"{box.name}: {box.note}" if box.note else box.name
    yield f'<g data-state="{escape_xml(box.name)}"><title>{escape_xml(tip)}</title>'
    yield f"<rect {_class_attribute('head', box.kind, dim=box.dim)} {rect}/>"
    if h > HEAD_HEIGHT:
        corners = f"a{r} {r} 0 0 1 -{r} {r}h{2 * r - w}a{r} {r} 0 0 1 -{r} -{r}Z"
        yield f'<path class="inside" d="M{x} {y + HEAD_HEIGHT}h{w}V{y + h - r}{corners}"/>'
    yield from (_label(label, x, y) for label in (*table.head, *table.foot))
    for row, labels in table.rows:
        yield from _row(view, row, labels, placed)
    for group, side in zip(table.groups, placed.exits, strict=True):
        yield from _group(group, side, placed)
    state = ("current" if box.current else None, box.mark)
    yield f"<rect {_class_attribute('box', box.kind, *state, dim=box.dim)} {rect}/></g>"


def _row(view: View, row: TableRow, labels: tuple[Label, ...], placed: PlacedBox) -> Iterator[str]:
    edge, x, y = row.transition, placed.x, placed.y
    of = "" if row.mark == "removed" else f" of {len(view.graph.rows(edge.source))}"
    spends = f", spends {', '.join(edge.spends)}" if edge.spends else ""
    ends = f", ends the run: {edge.ends.replace('_', ' ')}" if edge.ends else ""
    tag = f" ({row.tag})" if row.tag else ""
    tip = f"{edge.id} → {edge.target}: row {row.order}{of}{spends}{ends}{tag}"
    yield f'<g data-edge="{escape_xml(edge.id)}"><title>{escape_xml(tip)}</title>'
    if row.mark:
        top = labels[0].y + y - BASELINE_OFFSET
        width = max(2, round((placed.width - 2) * row.share))
        yield f'<rect class="mark {row.mark}" x="{x + 1}" y="{top}" width="{width}" height="{ROW_HEIGHT}"/>'
    yield "".join(_label(label, x, y, row.mark) for label in labels) + "</g>"


def _group(group: RowGroup, side: Side | None, placed: PlacedBox) -> Iterator[str]:
    """What adjacent rows share: a bar where their line leaves, a bracket, and the target."""
    x, top, height = placed.x, placed.y + group.top, ROW_HEIGHT * len(group.rows)
    if side is not None:
        left = x if side == "left" else x + placed.width - BAR_WIDTH
        classes = _class_attribute("bar", group.kind, dim=group.dim)
        yield f'<rect {classes} x="{left}" y="{top + 2}" width="{BAR_WIDTH}" height="{height - 4}"/>'
    if len(group.rows) > 1:
        hook = f"M{x + group.label.x - 8} {top + 3}h3v{height - 6}h-3"
        yield f'<path {_class_attribute("bracket", group.kind, dim=group.dim)} d="{hook}"/>'
    yield _label(group.label, x, placed.y)
