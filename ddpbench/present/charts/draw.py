"""Each kind of chart as Vega-Lite: one function for a kind, with the looks of `theme`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import altair as alt

from ddpbench.present import theme
from ddpbench.present.charts import channels
from ddpbench.present.charts.channels import color, finish, has, opacity, other, position, tooltip
from ddpbench.present.charts.kinds import GAP, LANE, ROOMY, Bars, Drawing, Lines, Matrix, Spans

FEW = 60  # points of a line that are drawn
CROWDED = 100  # points of a chart that are small
BAR, BETWEEN = 15, 9  # pixels: height of a bar, and what is between two rows
TALL = 20  # rows of a chart whose axis is above them, where readers begin
ROOM = 1.5  # of the longest bar, for the text behind it, also on a phone
ROW, LEAST_HEIGHT, MOST_HEIGHT = 26, 80, 380  # pixels of a matrix
PHONE, CHARACTER = 280, 7  # pixels: width of all columns on a phone, width of a character
RING = 220  # size around a marked point
DASHED, DOTTED = [5, 3], [2, 3]


def draw(drawing: Drawing) -> dict[str, Any]:
    """Return the Vega-Lite of a chart."""
    return DRAW[type(drawing)](drawing)


# --- lines ----------------------------------------------------------------------------------------


def _draw_lines(lines: Lines) -> dict[str, Any]:
    data = lines.data
    numbers = data[[c for c in ("_y", "_low", "_high", "_reference") if c in data]]
    x = position(alt.X("_x:Q"), lines.x, data["_x"], grid=False)
    y = position(alt.Y("_y:Q"), lines.y, numbers.stack(), minExtent=channels.EXTENT)
    base = alt.Chart().encode(x=x, detail=[f"{name}:N" for name in lines.detail], **color(lines))
    marks = _areas(lines, base, y) if lines.stacked else _points(lines, base, y)
    layers = [*marks, *_levels(lines, y), *_rules(lines, x)]
    return finish(lines, [*layers, *_cursor(lines, x)], lines.height)


def _areas(lines: Lines, base: alt.Chart, y: alt.Y) -> Iterator[alt.Chart]:
    order = json.dumps(list(lines.data[lines.color].unique()) if lines.color else [])
    known = base.transform_calculate(_order=f"indexof({order}, datum['{lines.color}'])")
    areas = known.mark_area(clip=True, opacity=0.9, interpolate=_interpolate(lines))
    yield areas.encode(y=y.stack("zero"), order="_order:Q")


def _points(lines: Lines, base: alt.Chart, y: alt.Y) -> Iterator[alt.Chart]:
    """Yield references, intervals, lines, points, and what is marked."""
    data, clip, tips = lines.data, lines.y.domain is not None, tooltip(lines.data)
    crowded = len(data) > CROWDED
    if has(data, "_reference"):
        dotted = base.mark_line(strokeDash=DOTTED, opacity=0.8).encode(tooltip=tips)
        yield dotted.transform_filter("datum._reference").encode(y="_reference:Q")
    if has(data, "_low"):
        known = base.transform_filter("isValid(datum._low)").encode(y="_low:Q", y2="_high:Q")
        rules = known.mark_rule(strokeWidth=1 if crowded else 2).encode(**opacity(data, 0.55))
        yield known.mark_area(fillOpacity=0.2) if lines.band else rules
    if lines.connected:
        line = base.mark_line(strokeWidth=1.5, clip=clip, interpolate=_interpolate(lines))
        dash = {"strokeDash": alt.StrokeDash(f"{lines.dash}:N", sort=None, title=None)}
        yield line.encode(y=y, **opacity(data), **(dash if lines.dash else {}))
    if not lines.cursor or data.groupby(lines.color).size().max() <= FEW:
        points = base.mark_point(size=18 if crowded else 50, clip=clip).encode(y=y)
        for name, title in lines.numbers.items():
            text = theme.write_number(name, lines.y.labels)
            points = points.transform_calculate(**{f"{name}_text": text})
            tips.append(alt.Tooltip(field=f"{name}_text", type="nominal", title=title))
        yield points.encode(tooltip=tips, **channels.shape(lines), **opacity(data))
    if has(data, "_marked"):
        marked = alt.Chart().transform_filter("datum._marked").encode(x=base.encoding.x)
        yield marked.mark_point(style="marked", size=RING).encode(y="_y:Q")
        # Once for the points of several lines, which lie close together.
        words = marked.mark_text(dx=14, align="left")
        yield words.encode(y="max(_y):Q", text="_marked:N")


def _interpolate(lines: Lines) -> Any:
    return "step-before" if lines.held else "linear"


def _levels(lines: Lines, y: alt.Y) -> Iterator[alt.Chart]:
    """Yield bands, and horizontal lines with their labels at the right."""
    if "levels" in lines.datasets:
        base = other(lines, "levels")
        band = base.mark_rect(opacity=0.12).transform_filter("isValid(datum._low)")
        yield band.encode(y="_low:Q", y2="_high:Q", x=alt.value(0), x2=alt.value("width"))
        yield base.mark_rule(strokeDash=DASHED).encode(y=y)
        text = base.mark_text(align="right", baseline="bottom", dx=-3, dy=-2)
        yield text.encode(x=alt.value("width"), y=y, text="_label:N")


def _rules(lines: Lines, x: alt.X) -> Iterator[alt.Chart]:
    """Yield vertical lines with their labels."""
    if "rules" in lines.datasets:
        base = other(lines, "rules").encode(x=x, tooltip=tooltip(lines.datasets["rules"]))
        yield base.mark_rule(strokeDash=DASHED, strokeWidth=1.5)
        if has(lines.datasets["rules"], "_label"):
            sides = {"align": "datum._left ? 'right' : 'left'", "dx": "datum._left ? -5 : 5"}
            text = base.mark_text(**{name: alt.ExprRef(side) for name, side in sides.items()})
            yield text.encode(text="_label:N", y=alt.Y("_row:Q", scale=None, axis=None))


def _cursor(lines: Lines, x: alt.X) -> Iterator[alt.Chart]:
    """Yield a band at the x below the pointer, with the texts of all colours in its tooltip."""
    if lines.cursor:
        frame = lines.datasets["cursor"]
        near = alt.selection_point(
            name="near", on="pointerover", clear="pointerout", fields=["_x"], empty=False
        )
        base = other(lines, "cursor").mark_rule(strokeWidth=alt.ExprRef(f"width / {len(frame)}"))
        seen = alt.condition(near, alt.value(0.2), alt.value(0))
        tips = tooltip(frame, lines.titles)
        yield base.encode(x=x, opacity=seen, tooltip=tips).add_params(near)


# --- bars -----------------------------------------------------------------------------------------


def _draw_bars(bars: Bars) -> dict[str, Any]:
    data = bars.datasets["data"]
    axis = alt.Axis(labelLimit=channels.LABELS, ticks=False, domain=False, grid=bars.dots)
    place: dict[str, Any] = {"y": alt.Y(f"{bars.row}:N", title=None, sort=None, axis=axis)}
    within = 1
    if bars.within:
        within = data[bars.within].nunique()
        sort = list(data[bars.within].unique())
        place["yOffset"] = alt.YOffset(f"{bars.within}:N", sort=sort)
    height = data[bars.row].nunique() * (within * BAR + BETWEEN)
    layers = [*_marks(bars, alt.Chart().encode(**place))]
    if "ticks" in bars.datasets:
        ticks = other(bars, "ticks").mark_tick(thickness=1.5).encode(**place)
        layers.append(ticks.encode(x="_end:Q", tooltip=tooltip(bars.datasets["ticks"])))
    return finish(bars, layers, height)


def _marks(bars: Bars, base: alt.Chart) -> Iterator[alt.Chart]:
    """Yield bars or dots, with intervals, references and texts."""
    data, tips, hue, x = bars.datasets["data"], tooltip(bars.data), color(bars), _length(bars)
    if has(data, "_band_low"):
        band = base.mark_rule(opacity=0.2, strokeWidth=BAR + BETWEEN)
        yield band.encode(x="_band_low:Q", x2="_band_high:Q")
    if bars.dots:
        dots = base.mark_point(size=80, opacity=1).encode(x=x, tooltip=tips, **hue)
        yield dots.encode(**channels.shape(bars))
    else:
        marks = base.mark_bar(height={"band": 0.85}).encode(tooltip=tips, **hue, **opacity(data))
        yield marks.encode(x=x, x2="_begin:Q")
    if has(data, "_low"):
        rules = base.mark_rule(strokeWidth=1.5).transform_filter("isValid(datum._low)")
        yield rules.encode(x="_low:Q", x2="_high:Q", **(hue if bars.dots else {}))
    if has(data, "_reference"):
        tick = base.mark_tick(thickness=3).transform_filter("datum._reference")
        yield tick.encode(x="_reference:Q", tooltip=tips, **hue)
    if has(data, "_text"):
        text = base.mark_text(align="left", dx=5).transform_filter("datum._text")
        yield text.encode(x="_right:Q", text="_text:N")


def _length(bars: Bars) -> alt.X:
    """Return the x channel of the ends of bars: with room for the texts behind them."""
    data = bars.datasets["data"]
    columns = ("_begin", "_end", "_low", "_high", "_right", "_reference")
    ends = data[[c for c in columns if c in data]].astype(float).stack()
    side: Any = "top" if data[bars.row].nunique() > TALL else "bottom"
    x = position(alt.X("_end:Q"), bars.x, ends, orient=side, grid=bars.dots)
    if bars.x.domain is None and not bars.x.log:
        most = ends.max() * (ROOM if has(data, "_text") else 1.0)
        return x.scale(domain=[min(0.0, ends.min()), most or 1.0], nice=False)
    return x


# --- spans ----------------------------------------------------------------------------------------


def _draw_spans(spans: Spans) -> dict[str, Any]:
    data, pixels = spans.data, spans.lane_pixels
    lanes = list(data[spans.lane].unique())
    middles = [(n + 1) * pixels - GAP - LANE / 2 for n in range(len(lanes))]
    labels = alt.Axis(
        values=middles,
        grid=False,
        labelLimit=channels.LABELS,
        labelExpr=f"{json.dumps(lanes)}[indexof({middles}, datum.value)]",
    )
    top = alt.Scale(domain=[len(lanes) * pixels, 0], nice=False)
    rects = alt.Chart().mark_rect().encode(**color(spans), **opacity(data), tooltip=tooltip(data))
    layer = rects.encode(
        x=position(alt.X("_begin:Q"), spans.x, data["_end"]),
        x2="_end:Q",
        y=alt.Y("_top:Q", title=None, scale=top, axis=labels),
        y2="_bottom:Q",
    )
    return finish(spans, [layer], len(lanes) * pixels)


# --- matrix ---------------------------------------------------------------------------------------


def _draw_matrix(matrix: Matrix) -> dict[str, Any]:
    data, sort = matrix.data, list(matrix.ends) or None
    columns = data[matrix.column].astype(str).unique()
    level = len(columns) > ROOMY or sum(map(len, columns)) * CHARACTER < PHONE
    overlap: dict[str, Any] = {"labelOverlap": "greedy", "labelSeparation": channels.SEPARATION}
    across = alt.Axis(labelAngle=0 if level else -40, **overlap)
    down = alt.Axis(labelLimit=channels.LABELS, ticks=False, **overlap)
    base = alt.Chart().encode(
        x=alt.X(f"{matrix.column}:O", title=matrix.titles[0], sort=sort, axis=across),
        y=alt.Y(f"{matrix.row}:O", title=matrix.titles[1], sort=sort, axis=down),
        tooltip=tooltip(data),
    )
    layers = [_cells(matrix, base), *_texts(matrix, base, 11 if len(columns) <= 8 else 9)]
    if has(data, "_marked"):
        outline = base.mark_rect(style="marked", strokeWidth=2.5 if matrix.written else 1)
        layers.append(outline.transform_filter("datum._marked"))
    height = ROW * data[matrix.row].nunique()
    return finish(matrix, layers, min(MOST_HEIGHT, max(LEAST_HEIGHT, height)))


def _cells(matrix: Matrix, base: alt.Chart) -> alt.Chart:
    if matrix.color:  # pale, so that texts can be read on all colours
        names: alt.Chart = base.mark_rect(opacity=channels.PALE).encode(**color(matrix, alone=True))
        return names
    pale, dark = matrix.heat
    kind: Any = "log" if matrix.log else "linear"
    scale = alt.Scale(type=kind, domain=sorted((pale, dark)), reverse=pale > dark, clamp=True)
    legend = alt.Legend(format="~r", tickCount=3)
    shade = alt.Color("_value:Q", title=matrix.unit, scale=scale, legend=legend)
    heat: alt.Chart = base.mark_rect().encode(color=shade)
    return heat


def _texts(matrix: Matrix, base: alt.Chart, size: int) -> Iterator[alt.Chart]:
    """Yield the texts of the cells, in ink that can be read on their colours."""
    if matrix.written:
        inks = {"on-low": "!datum._dark", "on-high": "datum._dark"}
        for style, chosen in {"text": "true"}.items() if matrix.color else inks.items():
            ink = base.mark_text(fontSize=size, style=style).transform_filter(chosen)
            yield ink.encode(text="_text:N")


DRAW: dict[type[Drawing], Callable[[Any], dict[str, Any]]] = {
    Lines: _draw_lines,
    Bars: _draw_bars,
    Spans: _draw_spans,
    Matrix: _draw_matrix,
}
