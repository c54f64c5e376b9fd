"""The chart of one case: its repetitions in order, and beside them how often each time occurs.

Both share the axis of time, so that a mode is one band in the order and one peak beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from ddpbench.report import theme
from ddpbench.report.chart import Choice

HEIGHT = 300
ORDER_END = 100.0  # x: the repetitions lie from 0 to here
SHARES = 106.0, 140.0  # x: the bars lie from here to here
# x of a point that cannot be seen: Vega-Lite warns of a dataset without any.
OUTSIDE = -50.0
Columns = dict[str, tuple[Any, ...]]
# The datasets of a choice and their columns. Times are seconds of one call.
DATASETS: dict[str, tuple[str, ...]] = {
    # in order: x; of the repetitions of one point the shortest, the median, the longest
    "timed": ("x", "low", "middle", "high", "launch", "backend"),
    "warm_up": ("x", "low", "middle", "high", "launch"),
    "cold": ("x", "middle", "launch"),
    "shares": ("low", "high", "x", "share", "backend"),  # of repetitions; x: where the bar ends
    "marks": ("middle", "label"),
    "interval": ("low", "high"),  # one; without an interval both are the median
    "launches": ("x", "launch"),  # where one begins
}
TICKS = [step * 10.0**decade for decade in range(-9, 5) for step in (1, 2, 5)]


def case_spec(first: Choice, backends: Sequence[str]) -> dict[str, Any]:
    """Return the chart, which shows its first choice."""
    color = alt.Color("backend:N", scale=theme.backend_colors(backends), legend=None)
    axis = alt.Axis(labelExpr=theme.TIME_LABELS, values=TICKS, labelOverlap="greedy")
    scale = alt.Scale(type="log", nice=False, padding=10)
    y = alt.Y("middle:Q", title="time", scale=scale, axis=axis)
    x = alt.X(
        "x:Q",
        title="repetitions in order, by launch; right: their shares",
        scale=alt.Scale(domain=[0, SHARES[1]], nice=False),
        axis=alt.Axis(labels=False, ticks=False, grid=False, titlePadding=20),
    )
    chart = alt.layer(
        *_order(x, y, color),
        _bars(x, color),
        *_marks(y),
        *_launches(x),
    ).properties(height=HEIGHT)
    spec: dict[str, Any] = chart.to_dict()
    return {**spec, "datasets": first.datasets}


def _data(name: str, *times: str) -> alt.Chart:
    """Return a chart of a dataset; the named times also as text, "12.3 µs"."""
    chart: alt.Chart = alt.Chart(alt.NamedData(name=name))
    if not times:
        return chart
    texts: alt.Chart = chart.transform_calculate(
        **{f"{time}_text": theme.time_text(time) for time in times}
    )
    return texts


def _tooltip(**fields: str) -> list[alt.Tooltip]:
    return [alt.Tooltip(f"{name}:N", title=title) for name, title in fields.items()]


def _order(x: alt.X, y: alt.Y, color: alt.Color) -> list[alt.Chart]:
    """Return the repetitions in order: hollow in the warm-up, a triangle for the cold one."""
    spread = {"low_text": "shortest", "middle_text": "median", "high_text": "longest"}
    ends = {"y": alt.Y("low:Q"), "y2": "high:Q"}
    timed, warm_up = (_data(name, "low", "middle", "high") for name in ("timed", "warm_up"))
    told = _tooltip(launch="launch", **spread)
    return [
        timed.mark_rule(opacity=0.35, strokeWidth=1.5).encode(x=x, **ends, color=color),
        timed.mark_point(filled=True, size=14, opacity=0.9).encode(
            x=x, y=y, color=color, tooltip=told
        ),
        warm_up.mark_rule(opacity=0.5, clip=True).encode(x=x, **ends),
        warm_up.mark_point(filled=False, size=14, strokeWidth=1, style="muted", clip=True).encode(
            x=x, y=y, tooltip=_tooltip(launch="warm-up of launch", **spread)
        ),
        _data("cold", "middle")
        .mark_point(filled=False, size=45, shape="triangle-up", style="muted", clip=True)
        .encode(x=x, y=y, tooltip=_tooltip(launch="first call of launch", middle_text="time")),
    ]


def _bars(x: alt.X, color: alt.Color) -> alt.Chart:
    """Return the share of the repetitions at each time."""
    bars: alt.Chart = (
        _data("shares", "low", "high")
        .transform_calculate(begin=str(SHARES[0]))
        .mark_rect(opacity=0.4)
        .encode(
            x=alt.X("begin:Q"),
            x2="x:Q",
            y=alt.Y("low:Q"),
            y2="high:Q",
            color=color,
            tooltip=[
                *_tooltip(low_text="from", high_text="to"),
                alt.Tooltip("share:Q", title="repetitions", format=".1%"),
            ],
        )
    )
    return bars


def _marks(y: alt.Y) -> list[alt.Chart]:
    """Return the interval as a band, and a labelled line for each of the usual times."""
    marks = _data("marks", "middle")
    return [
        _data("interval", "low", "high")
        .mark_rect(opacity=0.12)
        .encode(
            x=alt.value(0),
            x2=alt.value("width"),
            y=alt.Y("low:Q"),
            y2="high:Q",
            tooltip=_tooltip(low_text="95 % interval of the median from", high_text="to"),
        ),
        marks.mark_rule(strokeDash=[4, 3]).encode(
            y=y, tooltip=_tooltip(label="line", middle_text="time")
        ),
        marks.transform_calculate(text="datum.label + ' ' + " + theme.time_text("middle", 3))
        .mark_text(align="right", baseline="bottom", dx=-3, dy=-2, fontSize=11)
        .encode(x=alt.value("width"), y=y, text="text:N"),
    ]


def _launches(x: alt.X) -> list[alt.Chart]:
    """Return a line where a launch begins, and its number below."""
    launches = _data("launches")
    return [
        launches.mark_rule(opacity=0.4).encode(x=x),
        launches.mark_text(align="left", baseline="top", dy=4, style="muted").encode(
            x=x, y=alt.value("height"), text="launch:N"
        ),
    ]
