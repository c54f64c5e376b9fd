"""Each kind of chart as Vega-Lite: one function for a kind, with the looks of `theme`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import altair as alt
import pandas as pd

from ddpbench.present import theme
from ddpbench.present.charts.channels import (
    EXTENT,
    LABEL_LIMIT,
    PALE,
    color,
    finish,
    has,
    names,
    opacity,
    other_data,
    position,
    shape,
    tooltip,
)
from ddpbench.present.charts.kinds import (
    GAP,
    LANE,
    ROOMY,
    Bars,
    Drawing,
    Heat,
    Lines,
    Matrix,
    Spans,
)

FEW = 60  # points of a line that are drawn
CROWDED = 100  # points of a chart that are small
BAR, BETWEEN = 15, 9  # pixels: height of a bar, and what is between two rows
ROOM = 1.35  # of the longest bar, for the text behind it, also on a phone
ROW, LEAST_HEIGHT, MOST_HEIGHT = 26, 80, 420  # pixels of a matrix
PHONE, CHARACTER = 280, 7  # pixels: width of all columns on a phone, width of a character
RING = 220  # size around a marked point
DASHED, DOTTED = [5, 3], [2, 3]


def draw(drawing: Drawing) -> dict[str, Any]:
    """Return the Vega-Lite of a chart."""
    if isinstance(drawing, Lines):
        return _draw_lines(drawing)
    if isinstance(drawing, Bars):
        return _draw_bars(drawing)
    return _draw_spans(drawing) if isinstance(drawing, Spans) else _draw_matrix(drawing)


# --- lines ----------------------------------------------------------------------------------------


def _draw_lines(lines: Lines) -> dict[str, Any]:
    data = lines.data
    numbers = [c for c in (lines.y.field, "low", "high", "reference") if c in data]
    x = position(alt.X, lines.x, data[lines.x.field], grid=False)
    y = position(alt.Y, lines.y, data[numbers].astype(float).stack(), minExtent=EXTENT)
    base = alt.Chart().encode(x=x, color=color(data, lines.colors), detail=list(lines.detail))
    marks = _areas(lines, base, y) if lines.stacked else _points(lines, base, y)
    layers = [*marks, *_levels(lines, y), *_rules(lines, x)]
    if lines.cursor:
        layers.append(_cursor(lines, x))
    return finish(lines, layers, lines.height)


def _areas(lines: Lines, base: alt.Chart, y: alt.Y) -> Iterator[alt.Chart]:
    order = list(lines.data[lines.colors.field].unique())
    known = base.transform_calculate(order=f"indexof({order}, datum['{lines.colors.field}'])")
    y = y.copy()
    y["stack"] = "zero"
    areas = known.mark_area(clip=True, opacity=0.9, interpolate=_interpolate(lines))
    yield areas.encode(y=y, order="order:Q")


def _points(lines: Lines, base: alt.Chart, y: alt.Y) -> Iterator[alt.Chart]:
    """Yield lines, their points, intervals and references."""
    data, clip = lines.data, lines.y.domain is not None
    texts = {c: f"{c}_text" for c in (lines.y.field, "low", "high") if c in lines.tips}
    tips = tooltip(data, {texts.get(name, name): title for name, title in lines.tips.items()})
    if texts:
        written = {texts[c]: theme.write_number(c, lines.y.labels) for c in texts}
        base = base.transform_calculate(**written)
    if has(data, "reference"):
        dotted = base.mark_line(strokeDash=DOTTED, opacity=0.8).transform_filter("datum.reference")
        yield dotted.encode(y="reference:Q", tooltip=tips)
    if has(data, "low"):
        mark = base.mark_area(fillOpacity=0.2) if lines.band else base.mark_rule(strokeWidth=2)
        ends = mark.transform_filter("isValid(datum.low)").encode(y="low:Q", y2="high:Q")
        yield ends.encode(**({} if lines.band else opacity(data, 0.55)))
    if lines.connected:
        line = base.mark_line(strokeWidth=1.5, clip=clip, interpolate=_interpolate(lines))
        dash = {"strokeDash": alt.StrokeDash(f"{lines.dash}:N", sort=None, title=None)}
        yield line.encode(y=y, **opacity(data), **(dash if lines.dash else {}))
    if not lines.cursor or len(data) <= FEW * data[lines.colors.field].nunique():
        size = 50 if len(data) <= CROWDED else 18
        form = {"shape": shape(data, lines.shape, lines.shapes)} if lines.shape else {}
        points = base.mark_point(size=size, clip=clip)
        yield points.encode(y=y, tooltip=tips, **form, **opacity(data))
    if has(data, "marked"):
        marked = alt.Chart().transform_filter("datum.marked").encode(x=base.encoding.x)
        yield marked.mark_point(style="marked", size=RING).encode(y=lines.y.field + ":Q")
        # Once for the points of several lines, which lie close together.
        words = marked.mark_text(dx=14, align="left")
        yield words.encode(y=f"max({lines.y.field}):Q", text="marked:N")


def _interpolate(lines: Lines) -> Any:
    return "step-before" if lines.held else "linear"


def _levels(lines: Lines, y: alt.Y) -> Iterator[alt.Chart]:
    """Yield horizontal lines with their labels at the right, and bands."""
    frame = lines.datasets.get("levels")
    if frame is None:
        return
    base = other_data("levels", frame)
    if has(frame, "low"):
        band = base.mark_rect(opacity=0.12).transform_filter("isValid(datum.low)")
        yield band.encode(y="low:Q", y2="high:Q", x=alt.value(0), x2=alt.value("width"))
    yield base.mark_rule(strokeDash=DASHED).encode(y=y)
    text = base.mark_text(align="right", baseline="bottom", dx=-3, dy=-2)
    yield text.encode(x=alt.value("width"), y=y, text="label:N")


def _rules(lines: Lines, x: alt.X) -> Iterator[alt.Chart]:
    """Yield vertical lines; "row" of their labels counts from the top, "left" is their side."""
    frame = lines.datasets.get("rules")
    if frame is None:
        return
    base = other_data("rules", frame).encode(x=x)
    if has(frame, "why"):
        base = base.encode(tooltip=alt.Tooltip("why:N", title="finding"))
    yield base.mark_rule(strokeDash=DASHED, strokeWidth=1.5)
    if has(frame, "label"):
        sides = {"align": "datum.left ? 'right' : 'left'", "dx": "datum.left ? -5 : 5"}
        text = base.mark_text(fontSize=11, **{k: alt.ExprRef(v) for k, v in sides.items()})
        yield text.encode(text="label:N", y=alt.Y("row:Q", scale=None, axis=None))


def _cursor(lines: Lines, x: alt.X) -> alt.Chart:
    """Return a band at the x below the pointer, with the texts of all colours in its tooltip."""
    frame = lines.datasets["cursor"]
    near = alt.selection_point(
        name="near", on="pointerover", clear="pointerout", fields=[lines.x.field], empty=False
    )
    titles = {f"t{i}": str(name) for i, name in enumerate(lines.data[lines.colors.field].unique())}
    cursor: alt.Chart = (
        other_data("cursor", frame)
        .mark_rule(strokeWidth=alt.ExprRef(f"width / {len(frame)}"))
        .encode(
            x=x,
            opacity=alt.condition(near, alt.value(0.2), alt.value(0)),
            tooltip=tooltip(frame, {**lines.tips, **titles}),
        )
        .add_params(near)
    )
    return cursor


# --- bars -----------------------------------------------------------------------------------------


def _draw_bars(bars: Bars) -> dict[str, Any]:
    data, value = bars.datasets["data"], bars.x.field
    place, count = _rows(bars, data)
    base = alt.Chart().encode(**place)
    tips = tooltip(data, bars.tips)
    hue = {"color": color(data, bars.colors)} if bars.colors else {}
    x = _length(bars, data)
    layers = []
    if has(data, "band_low"):
        band = base.mark_rule(opacity=0.2, strokeWidth=BAR + BETWEEN)
        layers.append(band.encode(x="band_low:Q", x2="band_high:Q"))
    if bars.dots:
        form = {"shape": shape(data, bars.shape, bars.shapes)} if bars.shape else {}
        rules = base.mark_rule(strokeWidth=2).transform_filter("isValid(datum.low)")
        layers += [rules.encode(x="low:Q", x2="high:Q", **hue)] if has(data, "low") else []
        layers.append(base.mark_point(size=80).encode(x=x, tooltip=tips, **hue, **form))
    else:
        marks = base.mark_bar(height={"band": 0.85}).encode(tooltip=tips, **hue, **opacity(data))
        layers.append(marks.encode(x=x, x2="begin:Q"))
        rules = base.mark_rule(strokeWidth=1.5).transform_filter("isValid(datum.low)")
        layers += [rules.encode(x="low:Q", x2="high:Q")] if has(data, "low") else []
    if has(data, "reference"):
        tick = base.mark_tick(thickness=3, height=24).transform_filter("datum.reference")
        layers.append(tick.encode(x="reference:Q", tooltip=tips, **hue))
    if bars.ticks is not None and len(bars.ticks):
        ticks = other_data("ticks", bars.ticks).mark_tick(thickness=1.5).encode(**place)
        layers.append(ticks.encode(x=f"{value}:Q", tooltip=tooltip(bars.ticks, bars.tick_tips)))
    if has(data, "text"):
        text = base.mark_text(align="left", dx=5).transform_filter("datum.text")
        layers.append(text.encode(x="right:Q", text="text:N"))
    return finish(bars, layers, count)


def _rows(bars: Bars, data: pd.DataFrame) -> tuple[dict[str, Any], int]:
    """Return the channels of a bar's place, and the pixels of all rows."""
    axis = alt.Axis(labelLimit=LABEL_LIMIT, ticks=False, domain=False, grid=bars.dots)
    place: dict[str, Any] = {"y": alt.Y("row:N", title=None, sort=None, axis=axis)}
    within = 1
    if bars.within:
        within = data[bars.within].nunique()
        place["yOffset"] = alt.YOffset(f"{bars.within}:N", sort=list(data[bars.within].unique()))
    return place, data["row"].nunique() * (within * BAR + BETWEEN)


def _length(bars: Bars, data: pd.DataFrame) -> alt.X:
    """Return the x channel of the ends of bars: with room for the texts behind them."""
    columns = [c for c in ("begin", bars.x.field, "low", "high", "right", "reference") if c in data]
    ends = data[columns].astype(float).stack()
    x = position(alt.X, bars.x, ends)
    if bars.x.domain is None and not bars.x.log:
        room = ROOM if has(data, "text") else 1.0
        x["scale"] = alt.Scale(domain=[min(0.0, ends.min()), ends.max() * room or 1.0], nice=False)
    return x


# --- spans ----------------------------------------------------------------------------------------


def _draw_spans(spans: Spans) -> dict[str, Any]:
    data, lanes, pixels = spans.data, spans.lanes, spans.lane_pixels
    height = len(lanes) * pixels
    middles = [(n + 1) * pixels - GAP - LANE / 2 for n in range(len(lanes))]
    labels = alt.Axis(
        values=middles,
        grid=False,
        labelLimit=LABEL_LIMIT,
        labelExpr=f"{lanes}[indexof({middles}, datum.value)]",
    )
    top = alt.Scale(domain=[height, 0], nice=False)
    rects = alt.Chart().mark_rect()
    layer = rects.encode(
        x=position(alt.X, spans.x, [*data["begin"], *data["end"]]),
        x2="end:Q",
        y=alt.Y("top:Q", title=None, scale=top, axis=labels),
        y2="bottom:Q",
        color=color(data, spans.colors),
        tooltip=tooltip(data, spans.tips),
        **opacity(data),
    )
    return finish(spans, [layer], height)


# --- matrix ---------------------------------------------------------------------------------------


def _draw_matrix(matrix: Matrix) -> dict[str, Any]:
    data, x, y = matrix.datasets["data"], matrix.x, matrix.y
    columns = data[x.field].astype(str).unique()
    level = len(columns) > ROOMY or sum(map(len, columns)) * CHARACTER < PHONE
    base = alt.Chart().encode(
        x=alt.X(
            f"{x.field}:O",
            axis=alt.Axis(labelAngle=0 if level else -40, labelOverlap="greedy"),
            **names(x),
        ),
        y=alt.Y(
            f"{y.field}:O",
            axis=alt.Axis(labelOverlap="greedy", labelLimit=LABEL_LIMIT, ticks=False),
            **names(y),
        ),
        tooltip=tooltip(data, matrix.tips),
    )
    layers = [_cells(matrix, base), *_texts(matrix, base, len(columns))]
    if has(data, "marked"):
        outline = base.mark_rect(style="marked", strokeWidth=2.5 if matrix.written else 1)
        layers.append(outline.transform_filter("datum.marked"))
    rows = ROW * data[y.field].nunique()
    return finish(matrix, layers, min(MOST_HEIGHT, max(LEAST_HEIGHT, rows)))


def _cells(matrix: Matrix, base: alt.Chart) -> alt.Chart:
    colors = matrix.colors
    if not isinstance(colors, Heat):  # pale, so that texts can be read on all colours
        paled: alt.Chart = base.mark_rect(opacity=PALE).encode(
            color=color(matrix.data, colors, alone=True)
        )
        return paled
    values = matrix.data[colors.field]
    pale, dark = colors.ends(values)
    scale = alt.Scale(
        type="log" if colors.log(values) else "linear",
        domain=sorted((pale, dark)),
        reverse=pale > dark,
        clamp=True,
    )
    legend = alt.Legend(format=colors.labels, tickCount=3)
    shade = alt.Color(f"{colors.field}:Q", title=colors.title, scale=scale, legend=legend)
    heat: alt.Chart = base.mark_rect().encode(color=shade)
    return heat


def _texts(matrix: Matrix, base: alt.Chart, columns: int) -> Iterator[alt.Chart]:
    """Yield the texts of the cells, in ink that can be read on their colours."""
    if not matrix.written:
        return
    text = {"fontSize": 11 if columns <= 8 else 9}
    if isinstance(matrix.colors, Heat):
        for style, chosen in (("on-low", "!datum.dark"), ("on-high", "datum.dark")):
            ink = base.mark_text(style=style, **text).transform_filter(chosen)
            yield ink.encode(text="text:N")
    else:
        yield base.mark_text(**text).encode(text="text:N")
