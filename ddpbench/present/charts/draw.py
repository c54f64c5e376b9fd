"""Each kind of chart as Vega-Lite: one function per kind, in the colours of `theme`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import altair as alt
import pandas as pd

from ddpbench.present import theme
from ddpbench.present.charts.kinds import ROOMY, Axis, Bars, Drawing, Lines, Matrix, Spans

PALE = 0.35  # opacity
HIDDEN = "indexof(backends, datum.backend) >= 0"  # the page sets the parameter `backends`
EXTENT = 56  # pixels left of an axis, so that charts one below the other have one x axis
LABELS = alt.ExprRef("windowSize()[0] < 600 ? 130 : 300")  # pixels; a phone has few
OVERLAP: dict[str, Any] = {"labelOverlap": "greedy", "labelSeparation": 6}  # pixels
DECADE = 10.0
HEIGHT = 260  # pixels of lines
NOTHING = ("", "-")  # a column of these has no line in a tooltip
FEW = 60  # points of a line that are visible; of longer lines they only have tooltips
BAR, BETWEEN = 15, 9  # pixels: height of a bar, and gap between two rows
ROOM = 1.5  # of the longest bar, for the text behind it, also on a phone
LANE, GAP = 20, 16  # pixels: height of the lowest row of a lane, and gap below it
UPPER, UPPERS = 7, 70  # pixels: largest height of a row above it, and of all of them
ROW, LEAST_HEIGHT, MOST_HEIGHT = 26, 80, 380  # pixels of a matrix
PHONE, CHARACTER = 280, 7  # pixels: width of all columns on a phone, width of a character
LOGARITHMIC = 8.0  # ratio of the largest value to the least from which heat is logarithmic
INK = "luminance(scale('color', datum._value)) < 0.3"  # a dark cell has white ink
RING = 220  # size around a marked point

Channel = TypeVar("Channel", alt.X, alt.Y)


def draw(drawing: Drawing) -> dict[str, Any]:
    """Return the Vega-Lite of a chart."""
    return DRAW[type(drawing)](drawing, pd.DataFrame(list(drawing.data)))


# --- shared by all kinds --------------------------------------------------------------------------


def _finish(data: pd.DataFrame, layers: Iterable[alt.Chart], height: float) -> dict[str, Any]:
    """Return the Vega-Lite of layers, which show `data` unless they name another dataset."""
    chart = alt.layer(*layers, data=alt.NamedData("data"), height=height)
    if "backend" in data:
        backends = sorted(set(data["backend"]))
        chart = chart.transform_filter(HIDDEN)
        chart = chart.add_params(alt.param(name="backends", value=backends))
    return {**chart.to_dict(), "datasets": {"data": _list_rows(data)}}


def _list_rows(frame: pd.DataFrame) -> Any:
    return json.loads(frame.to_json(orient="records", double_precision=15))


def _place(channel: Channel, axis: Axis, values: Iterable[float], **options: Any) -> Channel:
    """Return the channel of numbers. options: of altair's axis."""
    known = [float(value) for value in values if value is not None and math.isfinite(value)]
    scale: dict[str, Any] = {"zero": axis.zero}
    options |= {"tickCount": 6, "tickMinStep": 1 if axis.labels == theme.COUNT_LABELS else 0}
    if axis.log:
        of_sizes = axis.labels == theme.SIZE_LABELS
        scale = {"type": "log", "base": 2 if of_sizes else 10, "padding": 12, "nice": False}
        if not of_sizes and max(known) >= DECADE * min(known):
            options["values"] = theme.powers_of_ten(known)
    if axis.domain:
        scale |= {"domain": list(axis.domain), "nice": False}
    ticks = alt.Axis(labelExpr=axis.labels, **OVERLAP, **options)
    return channel.title(axis.title).scale(alt.Scale(**scale)).axis(ticks)


def _color(drawing: Drawing, data: pd.DataFrame) -> dict[str, Any]:
    """Return the channel of colours, if any, with a legend of the names in the data."""
    if not drawing.color:
        return {}
    known = list(data[drawing.color].unique())
    order = list(drawing.order) or known
    if drawing.color == "backend":
        order = theme.order_backends(known)
    shown = [name for name in order if name in known and name]
    wide = sum(map(len, shown)) * CHARACTER > 0.75 * PHONE  # beside the symbols
    columns = 3 if len(shown) > 4 else 2 if wide else alt.Undefined  # a phone would cut more
    legend: Any = alt.Legend(title=None, values=shown, columns=columns, symbolOpacity=1)
    if len(shown) < 2 and drawing.color != "backend":
        legend = None
    scale = alt.Scale(domain=order, range="category")
    return {"color": alt.Color(f"{drawing.color}:N", scale=scale, legend=legend)}


def _opacity(data: pd.DataFrame) -> dict[str, Any]:
    """Return the channel that makes pale marks pale, if there are any."""
    if "_pale" not in data or not data["_pale"].any():
        return {}
    return {"opacity": alt.condition("datum._pale", alt.value(PALE), alt.value(1.0))}


def _tooltip(data: pd.DataFrame) -> list[alt.Tooltip]:
    """Return the lines of a tooltip: visible columns with any content, under their names."""
    visible = [name for name in map(str, data) if not name.startswith("_")]
    shown = [n for n in visible if not (data[n].isna() | data[n].isin(NOTHING)).all()]
    return [alt.Tooltip(field=name, type="nominal", title=name) for name in shown]


def _has(data: pd.DataFrame, column: str) -> bool:
    """Whether a column exists and has any content."""
    return column in data and bool((data[column].notna() & (data[column] != "")).any())


# --- lines ----------------------------------------------------------------------------------------


def _draw_lines(lines: Lines, data: pd.DataFrame) -> dict[str, Any]:
    numbers = data[[c for c in ("_y", "_low", "_high", "_reference") if c in data]]
    x = _place(alt.X("_x:Q"), lines.x, data["_x"], grid=False)
    y = _place(alt.Y("_y:Q"), lines.y, numbers.stack(), minExtent=EXTENT)
    apart = [f"{name}:N" for name in ("run", "launch") if name in data]
    base = alt.Chart().encode(x=x, detail=apart, **_color(lines, data))
    layers = [*(_areas(lines, data, base, y) if lines.stacked else _points(lines, data, base, y))]
    if not lines.rules:
        return _finish(data, layers, HEIGHT)
    rules = pd.DataFrame(list(lines.rules))
    spec = _finish(data, [*layers, *_rules(rules, x)], HEIGHT)
    spec["datasets"]["rules"] = _list_rows(rules)
    return spec


def _areas(lines: Lines, data: pd.DataFrame, base: alt.Chart, y: alt.Y) -> Iterator[alt.Chart]:
    """Yield areas, and invisible points that have the tooltips."""
    order = json.dumps(list(data[lines.color].unique()) if lines.color else [])
    known = base.transform_calculate(_order=f"indexof({order}, datum['{lines.color}'])")
    known = known.encode(y=y.stack("zero"), order="_order:Q")
    yield known.mark_area(clip=True, opacity=0.9)
    yield known.mark_point(clip=True, opacity=0).encode(tooltip=_tooltip(data))


def _points(lines: Lines, data: pd.DataFrame, base: alt.Chart, y: alt.Y) -> Iterator[alt.Chart]:
    """Yield references, intervals, lines, points and marks."""
    clip, tips = lines.y.domain is not None, _tooltip(data)
    if _has(data, "_reference"):
        dotted = base.mark_line(strokeDash=[2, 3], opacity=0.8).encode(tooltip=tips)
        yield dotted.transform_filter("datum._reference").encode(y="_reference:Q")
    if _has(data, "_low"):
        known = base.transform_filter("isValid(datum._low)").encode(y="_low:Q", y2="_high:Q")
        yield known.mark_rule(strokeWidth=2, opacity=0.55)
    line = base.mark_line(strokeWidth=1.5, clip=clip).encode(y=y)
    dash = alt.StrokeDash(f"{lines.dash}:N", sort=None, title=None)
    yield line.encode(strokeDash=dash) if lines.dash else line
    crowded = bool(lines.color) and data.groupby(lines.color).size().max() > FEW
    points = base.mark_point(size=50, clip=clip, opacity=0 if crowded else 1)
    yield points.encode(y=y, tooltip=tips)
    if _has(data, "_marked"):
        marked = alt.Chart().transform_filter("datum._marked").encode(x=base.encoding.x)
        yield marked.mark_point(style="marked", size=RING).encode(y="_y:Q")


def _rules(rules: pd.DataFrame, x: alt.X) -> Iterator[alt.Chart]:
    """Yield vertical lines, and labels at the side where there is room."""
    base = alt.Chart(alt.NamedData("rules")).encode(x=x, tooltip=_tooltip(rules))
    yield base.mark_rule(strokeDash=[5, 3], strokeWidth=1.5)
    if _has(rules, "_label"):
        left = "scale('x', datum._x) > 0.6 * width"
        sides = {"align": f"{left} ? 'right' : 'left'", "dx": f"{left} ? -5 : 5"}
        text = base.mark_text(**{name: alt.ExprRef(side) for name, side in sides.items()})
        yield text.encode(text="_label:N", y=alt.Y("_row:Q", scale=None, axis=None))


# --- bars -----------------------------------------------------------------------------------------


def _draw_bars(bars: Bars, data: pd.DataFrame) -> dict[str, Any]:
    axis = alt.Axis(labelLimit=LABELS, ticks=False, domain=False, grid=False)
    place: dict[str, Any] = {"y": alt.Y(f"{bars.row}:N", title=None, sort=None, axis=axis)}
    tips, within = _tooltip(data), 1
    row = [name for name in (bars.row, bars.within) if name]
    if "_begin" not in data:
        ends = data.groupby(row, sort=False)["_end"].cumsum()
        data = data.assign(_begin=ends - data["_end"], _end=ends)
    if bars.within:
        within = data[bars.within].nunique()
        sort = list(data[bars.within].unique())
        place["yOffset"] = alt.YOffset(f"{bars.within}:N", sort=sort)
    height = data[bars.row].nunique() * (within * BAR + BETWEEN)
    base = alt.Chart().encode(**place, tooltip=tips)
    return _finish(data, _marks(bars, data, base, row), height)


def _marks(bars: Bars, data: pd.DataFrame, base: alt.Chart, row: list[str]) -> Iterator[alt.Chart]:
    """Yield bars with intervals and texts."""
    marks = base.mark_bar(height={"band": 0.85}).encode(**_color(bars, data), **_opacity(data))
    yield marks.encode(x=_length(bars, data), x2="_begin:Q")
    if _has(data, "_low"):
        rules = base.mark_rule(strokeWidth=1.5).transform_filter("isValid(datum._low)")
        yield rules.encode(x="_low:Q", x2="_high:Q")
    if _has(data, "_text"):  # behind all marks of its row
        right = base.transform_calculate(_right="max(datum._end, datum._high || 0)")
        right = right.transform_joinaggregate(_right="max(_right)", groupby=row)
        text = right.transform_filter("datum._text").mark_text(align="left", dx=5)
        yield text.encode(x="_right:Q", text="_text:N")


def _length(bars: Bars, data: pd.DataFrame) -> alt.X:
    """Return the x channel of the ends of bars, with room for the texts behind them."""
    columns = [name for name in ("_begin", "_end", "_low", "_high") if name in data]
    ends = data[columns].astype(float).stack()
    most = ends.max() * (ROOM if _has(data, "_text") else 1.0)
    x = _place(alt.X("_end:Q"), bars.x, ends, grid=False)
    low, high = min(0.0, ends.min()), max(0.0, most)
    return x.scale(domain=[low, high if low or high else 1.0], nice=False)


# --- spans ----------------------------------------------------------------------------------------


def _draw_spans(spans: Spans, data: pd.DataFrame) -> dict[str, Any]:
    upper = min(UPPERS, UPPER * spans.above)
    pixels = upper + LANE + GAP
    lane = pd.Series(pd.factorize(data[spans.lane])[0], data.index)
    top, height = lane * float(pixels) + upper, pd.Series(float(LANE), lane.index)
    if spans.above:
        row, each = data["_above"], upper / spans.above
        top = top.where(row == 0, top - (spans.above + 1 - row) * each)
        height = height.where(row == 0, max(1.0, each - 1))
    data = data.assign(_top=top, _bottom=top + height)
    names = list(data[spans.lane].unique())
    middles = [(n + 1) * pixels - GAP - LANE / 2 for n in range(len(names))]
    label = f"{json.dumps(names)}[indexof({middles}, datum.value)]"
    labels = alt.Axis(values=middles, grid=False, labelLimit=LABELS, labelExpr=label)
    scale = alt.Scale(domain=[len(names) * pixels, 0], nice=False)
    rects = alt.Chart().mark_rect().encode(**_color(spans, data), **_opacity(data))
    layer = rects.encode(
        x=_place(alt.X("_begin:Q"), spans.x, data["_end"]),
        x2="_end:Q",
        y=alt.Y("_top:Q", title=None, scale=scale, axis=labels),
        y2="_bottom:Q",
        tooltip=_tooltip(data),
    )
    return _finish(data, [layer], len(names) * pixels)


# --- matrix ---------------------------------------------------------------------------------------


def _draw_matrix(matrix: Matrix, data: pd.DataFrame) -> dict[str, Any]:
    level = len(matrix.ends) > ROOMY or sum(map(len, matrix.ends)) * CHARACTER < PHONE
    across = alt.Axis(labelAngle=0 if level else -40, **OVERLAP)
    down = alt.Axis(labelLimit=LABELS, ticks=False, **OVERLAP)
    base = alt.Chart().encode(
        x=alt.X("to:O", title=matrix.titles[1], sort=matrix.ends, axis=across),
        y=alt.Y("from:O", title=matrix.titles[0], sort=matrix.ends, axis=down),
        tooltip=_tooltip(data),
    )
    written = len(matrix.ends) <= ROOMY
    layers = [base.mark_rect().encode(color=_shade(matrix, data["_value"]))]
    if written:
        texts = base.mark_text(fontSize=11 if len(matrix.ends) <= 8 else 9, style="text")
        ink = alt.condition(INK, alt.value("white"), alt.value("black"))
        layers.append(texts.encode(text="_text:N", color=ink))
    if _has(data, "_marked"):
        outline = base.mark_rect(style="marked", strokeWidth=2.5 if written else 1)
        layers.append(outline.transform_filter("datum._marked"))
    height = ROW * len(matrix.ends)
    return _finish(data, layers, min(MOST_HEIGHT, max(LEAST_HEIGHT, height)))


def _shade(matrix: Matrix, values: pd.Series[float]) -> alt.Color:
    """Return the channel of heat: logarithmic for orders of magnitude."""
    least, most = float(values.min()), float(values.max())
    log = 0 < LOGARITHMIC * least <= most
    kind: Any = "log" if log else "linear"
    scale = alt.Scale(type=kind, domain=[least if log else 0.0, most or 1.0], clamp=True)
    legend = alt.Legend(format="~r", tickCount=3)
    return alt.Color("_value:Q", title=matrix.unit, scale=scale, legend=legend)


DRAW: dict[type[Drawing], Callable[[Any, pd.DataFrame], dict[str, Any]]] = {
    Lines: _draw_lines,
    Bars: _draw_bars,
    Spans: _draw_spans,
    Matrix: _draw_matrix,
}
