"""Changes between two sides as a chart: the ratio of their times, with interval and margin."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import altair as alt
import pandas as pd

from ddpbench.present import theme
from ddpbench.present.comparison.labels import (
    Change,
    shift_estimate,
    shift_interval,
    side_interval,
    side_time,
)
from ddpbench.present.document import Chart
from ddpbench.verdicts.comparison import ONLY_BASE, ONLY_NEW, ORDER
from ddpbench.verdicts.verdict import (
    CONFIDENCE,
    FASTER,
    FEWEST,
    INCOMPARABLE,
    INCONCLUSIVE,
    INVALID,
    SAME,
    SLOWER,
)

DRAWN = 60  # rows of a chart; the table has all
ROW_HEIGHT = 20  # pixels
# Each verdict has the colour of its place: SLOWER is vermilion, FASTER green, SAME grey.
COLORS = (INCOMPARABLE, SLOWER, FASTER, INVALID, INCONCLUSIVE, ONLY_BASE, ONLY_NEW, SAME)
SHAPES = {
    SLOWER: "triangle-right",
    FASTER: "triangle-left",
    SAME: "circle",
    INCONCLUSIVE: "diamond",
}
TEXTS = ("label", "base", "new", "change", "range", "margin", "verdict", "why")  # of the tooltip
DRAWING_ORDER = (SLOWER, FASTER, INCONCLUSIVE, SAME)
TICKS = 14  # labels on each side of no change, at most
LESS = (-1, -2, -5, -10, -20, -30, -40, -50, -60, -70, -80, -90, -95, -98, -99)  # percent
MORE = (1, 2, 5, 10, 20, 30, 50, 100, 150, 200, 300, 400, 600, 900, 1900, 4900, 9900)
CHANGE_LABELS = (
    "abs(datum.value - 1) < 1e-9 ? '0 %' : format(datum.value * 100 - 100, '+.3~g') + ' %'"
)


def draw_changes(listed: Chart, changes: Sequence[Change], confidence: float = CONFIDENCE) -> Chart:
    """Return the table of these changes with a chart of them, the clear ones first.

    confidence: of the intervals.
    """
    changes = [change for change in changes if change.row.shift is not None]
    if not changes:
        why = f"An interval of a change needs {FEWEST} launches on each side."
        return replace(listed, caption=why)
    drawn = sorted(changes, key=lambda change: DRAWING_ORDER.index(change.row.verdict))[:DRAWN]
    rest = f" The chart has {DRAWN} of {len(changes)} cases, the table all."
    caption = (
        f"Change of the time from BASE to NEW, and its {confidence * 100:g} % interval: right is "
        "slower. The band is the margin: a change within it does not count. On this logarithmic "
        f"axis, twice and half are equally far from no change."
        f"{rest if len(changes) > DRAWN else ''}"
    )
    spec = _layers(pd.DataFrame([_values(change) for change in drawn]))
    return replace(listed, caption=caption, drawing=spec.to_dict())


def _layers(data: pd.DataFrame) -> alt.LayerChart:
    """Return the band of the margin, the interval and the change of each row."""
    base = alt.Chart(data).encode(y=row_axis("label"))
    seen = [name for name in ORDER if name in set(data["verdict"])]
    colors = alt.Scale(domain=list(COLORS), range="category")
    shapes = alt.Scale(domain=list(COLORS), range=[SHAPES.get(name, "cross") for name in COLORS])
    legend = alt.Legend(values=seen, title=None, symbolSize=90)
    color = alt.Color("verdict:N", scale=colors, legend=legend)
    texts = theme.tips(*(name for name in TEXTS if data[name].any()))
    ends = data[["low", "high", "margin_low", "margin_high"]]
    band = base.mark_rule(opacity=0.2, strokeWidth=ROW_HEIGHT).encode(
        x=change_axis("margin_low", float(ends.min().min()), float(ends.max().max())),
        x2="margin_high:Q",
    )
    interval = base.mark_rule(strokeWidth=2).encode(
        x="low:Q", x2="high:Q", color=color, tooltip=texts
    )
    dot = base.mark_point(filled=True, opacity=1, size=90).encode(
        x="ratio:Q",
        color=color,
        shape=alt.Shape("verdict:N", scale=shapes, legend=legend),
        tooltip=texts,
    )
    return alt.LayerChart(layer=[band, interval, dot], height=ROW_HEIGHT * len(data))


def change_axis(field: str, low: float, high: float) -> alt.X:
    """Return the x channel of ratios of times from `low` to `high`: a logarithmic axis."""
    low, high = min(low, 0.99), max(high, 1.01)
    axis = alt.Axis(
        values=choose_ticks(low, high),
        labelExpr=CHANGE_LABELS,
        labelOverlap="greedy",
        orient="top",
        grid=True,
    )
    scale = alt.Scale(type="log", domain=[low, high], nice=False, padding=12)
    return alt.X(f"{field}:Q", title="change of the time", scale=scale, axis=axis)


def choose_ticks(low: float, high: float) -> list[float]:
    """Return ratios of round percentages from `low` to `high`, far enough apart for labels.

    low, high: ratios, below and above 1.
    """
    gap, ticks = math.log(high / low) / TICKS, [1.0]
    for side in (LESS, MORE):
        last = 1.0
        for percent in side:
            ratio = 1 + percent / 100
            if low <= ratio <= high and abs(math.log(ratio / last)) >= gap:
                ticks.append(last := ratio)
    return sorted(ticks)


def row_axis(field: str) -> alt.Y:
    """Return the y channel of a chart with a row per name, in the order of the data."""
    limit = alt.ExprRef("windowSize()[0] < 600 ? 130 : 300")  # pixels; a phone has few
    axis = alt.Axis(labelLimit=limit, ticks=False, domain=False, grid=True)
    return alt.Y(f"{field}:N", sort=None, title=None, axis=axis)


def _values(change: Change) -> dict[str, Any]:
    """Return a row of the data: ratios of times, and texts."""
    shift, row, widest = change.row.shift, change.row, 1 + change.row.margin
    assert shift is not None
    base, new = (
        f"{side_time(change.case, side)} {side_interval(side)}"
        for side in (change.base, change.new)
    )
    return {
        "label": change.label,
        "base": base,
        "new": new,
        "change": shift_estimate(shift),
        "range": shift_interval(shift),
        "margin": f"±{row.margin * 100:.3g} %",
        "verdict": row.verdict,
        "why": row.why,
        "ratio": math.exp(shift.estimate),
        "low": math.exp(shift.low),
        "high": math.exp(shift.high),
        "margin_low": 1 / widest,
        "margin_high": widest,
    }
