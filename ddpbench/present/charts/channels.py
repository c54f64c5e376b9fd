"""What all kinds of chart share: axes, colours, tooltips, pale marks, and hidden backends."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import altair as alt
import pandas as pd

from ddpbench.present import theme
from ddpbench.present.charts.kinds import Axis, Bars, Drawing, Lines, list_columns, visible

PALE = 0.35  # opacity
HIDDEN = "indexof(backends, datum.backend) >= 0"  # the page sets the parameter `backends`
EXTENT = 56  # pixels left of an axis, so that charts one below the other have one x axis
LABELS = alt.ExprRef("windowSize()[0] < 600 ? 130 : 300")  # pixels; a phone has few
TICKS, DECADE = 6, 10.0
SEPARATION = 6  # pixels between labels
NOTHING = ("", "-")  # a column of these has no line in a tooltip

Channel = TypeVar("Channel", alt.X, alt.Y)


def finish(drawing: Drawing, layers: Iterable[alt.Chart], height: int) -> dict[str, Any]:
    """Return the Vega-Lite of layers, which show the dataset "data" unless they name another."""
    chart = alt.layer(*layers, data=alt.NamedData("data"), height=height)
    if "backend" in drawing.data:
        backends = sorted(set(drawing.data["backend"]))
        chart = chart.transform_filter(HIDDEN)
        chart = chart.add_params(alt.param(name="backends", value=backends))
    spec: dict[str, Any] = chart.to_dict()
    datasets = {}
    for name, frame in drawing.datasets.items():
        columns = list_columns(frame)
        rows = zip(*columns.values(), strict=True)
        datasets[name] = [dict(zip(columns, row, strict=True)) for row in rows]
    return {**spec, "datasets": datasets}


def other(drawing: Drawing, name: str) -> alt.Chart:
    """Return a chart of another dataset than "data"."""
    chart: alt.Chart = alt.Chart(alt.NamedData(name))
    return chart.transform_filter(HIDDEN) if "backend" in drawing.datasets[name] else chart


def position(channel: Channel, axis: Axis, values: Iterable[float], **options: Any) -> Channel:
    """Return the channel of numbers. options: of altair's axis."""
    known = [float(value) for value in values if value is not None and math.isfinite(value)]
    overlap: dict[str, Any] = {"labelOverlap": "greedy", "labelSeparation": SEPARATION}
    ticks = alt.Axis(labelExpr=axis.labels, **overlap, **_ticks(axis, known), **options)
    scale: dict[str, Any] = {"zero": axis.zero}
    if axis.log:
        base = 2 if axis.labels == theme.SIZE_LABELS else 10
        narrow = max(known) < DECADE * min(known)  # without round ends it may have no label
        scale = {"type": "log", "base": base, "padding": 12, "nice": narrow}
    if axis.domain:
        scale |= {"domain": list(axis.domain), "nice": False}
    return channel.title(axis.title).scale(alt.Scale(**scale)).axis(ticks)


def _ticks(axis: Axis, values: list[float]) -> dict[str, Any]:
    """Return where labels are: few, at round numbers."""
    most = max(values, default=0.0)
    if axis.ticks:
        return {"values": list(axis.ticks)}
    if axis.labels == theme.SIZE_LABELS and not axis.log and most > 0:
        step = 2.0 ** (int(most).bit_length() - 2)
        return {"values": [step * n for n in range(int(most // step) + 1)]}
    if axis.log and values and axis.labels != theme.SIZE_LABELS:
        return {"values": theme.powers_of_ten(values)}
    if axis.labels == theme.COUNT_LABELS:
        low, high = axis.domain or (0.0, most)
        steps = (digit * 10**power for power in range(12) for digit in (1, 2, 5))
        step = next(step for step in steps if high - low <= TICKS * step)
        return {"values": list(range(math.ceil(low / step) * step, int(high) + 1, step))}
    return {"tickCount": TICKS}


def _list_names(drawing: Drawing) -> tuple[list[str], list[str]]:
    """Return all names that have colours, and those in the legend."""
    known = list(drawing.data[drawing.color].unique())
    if drawing.color == "backend":
        order = theme.order_backends(known)
        return order, [name for name in order if name in known]
    return list(drawing.order) or known, known


def color(drawing: Drawing, *, alone: bool = False) -> dict[str, Any]:
    """Return the channel, if any, with a legend of the names that are there.

    alone: whether the legend is needed even if it has only one name.
    """
    if not drawing.color:
        return {}
    order, shown = _list_names(drawing)
    legend = alt.Legend(
        title=None,
        values=shown,
        columns=3 if len(shown) > 4 else alt.Undefined,  # more would be cut on a phone
        symbolOpacity=1,
    )
    scale = alt.Scale(domain=order, range="category")
    named = alone or drawing.color == "backend" or len(shown) > 1
    name = f"{drawing.color}:N"
    return {"color": alt.Color(name, scale=scale, legend=legend if named else None)}


def shape(drawing: Lines | Bars) -> dict[str, Any]:
    """Return the channel, if any, with a legend unless only the first shape is there.

    Shapes of the names that have colours share the legend of the colours.
    """
    if not drawing.shape:
        return {}
    order, known = [*drawing.shapes], set(drawing.data[drawing.shape])
    shown = [name for name in order if name and name in known]
    plain = shown in ([], order[:1])
    if drawing.shape == drawing.color:
        order, shown = _list_names(drawing)
        plain = len(shown) < 2
    legend = None if plain else alt.Legend(title=None, values=shown, symbolOpacity=1)
    forms = [drawing.shapes.get(name, "circle") for name in order]
    scale = alt.Scale(domain=order, range=forms)
    return {"shape": alt.Shape(f"{drawing.shape}:N", scale=scale, legend=legend)}


def opacity(data: pd.DataFrame, full: float = 1.0) -> dict[str, Any]:
    """Return the channel that makes pale marks pale, if there are any."""
    if "_pale" not in data or not data["_pale"].any():
        return {"opacity": alt.value(full)}
    return {"opacity": alt.condition("datum._pale", alt.value(PALE), alt.value(full))}


def tooltip(data: pd.DataFrame, titles: Mapping[str, str] | None = None) -> list[alt.Tooltip]:
    """Return the lines of a tooltip: columns that hold anything, under their names or titles."""
    shown = [n for n in visible(data) if not (data[n].isna() | data[n].isin(NOTHING)).all()]
    known = {name: (titles or {}).get(name, name) for name in shown}
    return [alt.Tooltip(field=n, type="nominal", title=title) for n, title in known.items()]


def has(data: pd.DataFrame, column: str) -> bool:
    """Whether a column is there and holds anything."""
    return column in data and bool((data[column].notna() & ~data[column].isin(("",))).any())
