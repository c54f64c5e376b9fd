"""What all kinds of chart share: axes, colours, tooltips, marked points, and hidden backends."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from ddpbench.present import theme
from ddpbench.present.charts.kinds import Axis, Colors, Drawing, list_columns

PALE = 0.35  # opacity
SHOWN = "indexof(backends, datum.backend) >= 0"  # the page sets the parameter `backends`
EXTENT = 56  # pixels left of an axis, so that charts one below the other have one x axis
LABEL_LIMIT = alt.ExprRef("windowSize()[0] < 600 ? 130 : 300")  # pixels; a phone has few
NOTHING = ("", "-")  # a column of these has no line in a tooltip


def finish(drawing: Drawing, layers: Iterable[alt.Chart], height: int) -> dict[str, Any]:
    """Return the Vega-Lite of layers, which show the dataset "data" unless they name another."""
    chart = alt.layer(*layers, data=alt.NamedData("data"), height=height)
    data = drawing.datasets
    if "backend" in data["data"]:
        chart = chart.transform_filter(SHOWN)
        chart = chart.add_params(
            alt.param(name="backends", value=sorted(set(data["data"]["backend"])))
        )
    spec: dict[str, Any] = chart.to_dict()
    columns = {name: list_columns(frame) for name, frame in data.items()}
    return {**spec, "datasets": {name: to_rows(known) for name, known in columns.items()}}


def to_rows(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return the rows of a dataset, as Vega-Lite reads them."""
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def other_data(name: str, frame: pd.DataFrame) -> alt.Chart:
    """Return a chart of another dataset than "data"."""
    chart: alt.Chart = alt.Chart(alt.NamedData(name))
    return chart.transform_filter(SHOWN) if "backend" in frame else chart


def position(channel: type, axis: Axis, values: Iterable[float], **options: Any) -> Any:
    """Return the x or y channel of numbers. options: of altair's axis."""
    known = [float(value) for value in values if value is not None and math.isfinite(value)]
    label = {"labelExpr": axis.labels} if axis.labels else {}
    return channel(
        f"{axis.field}:Q",
        title=axis.title,
        scale=_scale(axis),
        axis=alt.Axis(**label, **_ticks(axis, known), labelOverlap="greedy", **options),
    )


def _scale(axis: Axis) -> alt.Scale:
    domain = {"domain": list(axis.domain), "nice": False} if axis.domain else {}
    if axis.log:
        base = 2 if axis.labels == theme.SIZE_LABELS else 10
        return alt.Scale(type="log", base=base, padding=12, **{"nice": False, **domain})
    return alt.Scale(**(domain or {"zero": axis.zero}))


def _ticks(axis: Axis, values: Sequence[float]) -> dict[str, Any]:
    """Return where labels stand: few, at round numbers."""
    most = max(values, default=0.0)
    if axis.ticks:
        return {"values": list(axis.ticks)}
    if axis.labels == theme.SIZE_LABELS:
        if axis.log or most <= 0:
            return {"tickCount": 6}
        step = 2.0 ** (int(most).bit_length() - 2)
        return {"values": [step * n for n in range(int(most // step) + 2)]}
    if axis.log and values:
        return {"values": theme.powers_of_ten(values)}
    return {"tickCount": 5, **({"tickMinStep": 1} if axis.labels == theme.COUNT_LABELS else {})}


def names(axis: Axis) -> dict[str, Any]:
    """Return the options of a channel whose values are names."""
    return {"title": axis.title, "sort": list(axis.order) or None}


def color(data: pd.DataFrame, colors: Colors, *, alone: bool = False) -> alt.Color:
    """Return the channel, with a legend of the names that are there.

    alone: whether the legend is needed even if it has only one name.
    """
    known = list(dict.fromkeys(data[colors.field]))
    of_backends = colors.field == "backend"
    order = theme.order_backends(known) if of_backends else list(colors.order) or known
    shown = [name for name in order if name in known] if of_backends else known
    legend = alt.Legend(
        title=colors.title,
        values=shown,
        columns=3 if len(shown) > 4 else alt.Undefined,  # more would be cut on a phone
        symbolOpacity=1,
    )
    scale = alt.Scale(domain=order, range="category")
    named = alone or of_backends or len(shown) > 1
    return alt.Color(f"{colors.field}:N", scale=scale, legend=legend if named else None)


def shape(data: pd.DataFrame, field: str, shapes: Mapping[str, str]) -> alt.Shape:
    """Return the channel; its legend is left out if only the first shape is there."""
    shown = [name for name in shapes if name in set(data[field])]
    legend = None if shown == [*shapes][:1] else alt.Legend(title=None, values=shown)
    scale = alt.Scale(domain=[*shapes], range=[*shapes.values()])
    return alt.Shape(f"{field}:N", scale=scale, legend=legend)


def opacity(data: pd.DataFrame, full: float = 1.0) -> dict[str, Any]:
    """Return the channel that makes pale marks pale, if there are any."""
    if "pale" not in data or not data["pale"].any():
        return {"opacity": alt.value(full)}
    return {"opacity": alt.condition("datum.pale", alt.value(PALE), alt.value(full))}


def tooltip(data: pd.DataFrame, tips: Mapping[str, str]) -> list[alt.Tooltip]:
    """Return the lines of a tooltip: columns that hold anything, under their titles."""
    empty = [n for n in tips if n in data and (data[n].isna() | data[n].isin(NOTHING)).all()]
    shown = {n: title for n, title in tips.items() if n not in empty}
    return [alt.Tooltip(field=n, type="nominal", title=title) for n, title in shown.items()]


def has(data: pd.DataFrame, column: str) -> bool:
    """Whether a column is there and holds anything."""
    return column in data and bool((data[column].notna() & ~data[column].isin(("",))).any())
