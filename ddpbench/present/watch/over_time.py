"""The charts of a watched job over time: parts of a step, lateness, loss and load."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import altair as alt
import numpy as np
import pandas as pd

from ddpbench.present import theme
from ddpbench.present.columns import digits
from ddpbench.present.document import Chart, make_table
from ddpbench.present.load import EXTENT, load_charts
from ddpbench.present.watch.timeline import HEIGHT, LOW_HEIGHT, Timeline, find_top
from ddpbench.records.table import Table
from ddpbench.records.watched import COLUMNS, LOSS

FEW = 60  # values of a line, each of which has a point
BESIDE = 0.4  # opacity of the lines that do not stand out
WIDE = 50.0  # ratio of the largest value to the least, from which an axis is logarithmic
STROKES = alt.Legend(
    title=None,
    columns=3,
    values=list(COLUMNS),
    symbolType="stroke",
    symbolStrokeWidth=9,
    symbolSize=160,
)
HELD: Literal["step-before"] = "step-before"  # a moment's steps are those since the one before
CUT_NOTE = " Rare larger values are cut off; the table has them."


def part_scale() -> alt.Scale:
    """Return the colours of the parts of a step, the same in all charts."""
    return alt.Scale(domain=list(theme.PHASES), range="category")


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{digits(seconds * 1e3)} ms"


def _table(timeline: Timeline, title: str, columns: Mapping[str, Sequence[Any]]) -> Table:
    """Return the moments that have a value, each with its values."""
    steps = [moment.step for moment in timeline.moments]
    rows = zip(timeline.clocks(), steps, *columns.values(), strict=True)
    known = [row for row in rows if any(value is not None for value in row[2:])]
    return make_table(title, ["UTC", "step", *columns], known, left=("UTC",))


def draw(timeline: Timeline, backend: str) -> Iterator[Chart]:
    """Yield all charts over time, one below the other on the same axis."""
    yield draw_parts(timeline)
    yield from draw_lateness(timeline)
    yield draw_exposed(timeline)
    yield from draw_values(timeline)
    yield from draw_load(timeline, backend)


def draw_parts(timeline: Timeline) -> Chart:
    moments = timeline.moments
    parts = {name: [m.seconds[i] for m in moments] for i, name in enumerate(COLUMNS)}
    top = find_top([sum(m.seconds) for m in moments])
    texts = {f"{name}_": [milliseconds(value) for value in parts[name]] for name in COLUMNS}
    texts["step_"] = [milliseconds(m.step_seconds) for m in moments]
    tips = theme.tips(step_="whole step", **{f"{name}_": name for name in COLUMNS})
    layers = [
        _stack(timeline, parts, top),
        *timeline.draw_cursor(timeline.frame(texts), tips),
        *timeline.draw_rules(labels=True),
    ]
    table = {
        "step ms": [m.step_seconds * 1e3 for m in moments],
        **{f"{name} ms": [value * 1e3 for value in parts[name]] for name in COLUMNS},
    }
    return Chart(
        "watch-parts",
        "Parts of a step",
        "Time of each part in the median rank, median over the steps of each point. Dashed: where "
        f"a finding begins or ends.{CUT_NOTE if top else ''}",
        theme.layered(layers, HEIGHT),
        _table(timeline, "parts of a step", table),
    )


def _stack(
    timeline: Timeline, parts: Mapping[str, Sequence[float]], top: float | None
) -> alt.Chart:
    """Return an area for each part; top: where larger values are cut off, in seconds."""
    stacked: alt.Chart = (
        alt.Chart(pd.DataFrame({"at": timeline.at, **parts}))
        .transform_fold(list(COLUMNS), as_=["part", "seconds"])
        .transform_calculate(order=f"indexof({list(COLUMNS)}, datum.part)")
        .mark_area(clip=True, strokeWidth=0, interpolate=HELD)
        .encode(
            x=timeline.x(),
            y=alt.Y(
                "seconds:Q",
                title="time of a step",
                stack="zero",
                axis=theme.time_axis(tickCount=alt.Undefined, minExtent=EXTENT),
                scale=alt.Scale(domain=[0, top]) if top else alt.Scale(),
            ),
            fill=alt.Fill("part:N", scale=part_scale(), legend=STROKES),
            fillOpacity=alt.value(0.9),
            # A legend of areas would have the opacity of the theme's bands.
            stroke=alt.Stroke("part:N", scale=part_scale(), legend=STROKES),
            order="order:Q",
        )
    )
    return stacked


@dataclass(frozen=True)
class Axis:
    """The y axis of lines. show: formats a value for a tooltip."""

    title: str
    show: Callable[[float], str]
    labels: str  # an expression
    zero: bool = False
    held: bool = False  # whether a value is that of all steps since the one before
    domain: tuple[float, float] | None = None  # what is shown, if values beyond are cut off


def draw_lines(
    timeline: Timeline,
    values: Mapping[str, Sequence[float | None]],
    axis: Axis,
    legend: str = "",
    main: Sequence[str] = (),
) -> dict[str, Any]:
    """Return a line for each name, through the values that are known.

    main: the names whose lines stand out; all if there are none.
    """
    names = list(values)
    known = [
        {"at": at, "name": name, "value": value, "main": not main or name in main}
        for name, column in values.items()
        for at, value in zip(timeline.at, column, strict=True)
        if value is not None
    ]
    colors = alt.Scale(domain=names, range="category")
    shown = alt.Legend(title=legend or None, columns=4) if len(names) > 1 else None
    color = alt.Color("name:N", scale=colors, legend=shown)
    points = not axis.held and len(known) <= FEW * len(names)
    marks = alt.Chart(pd.DataFrame(known)).mark_line(
        strokeWidth=1.5,
        clip=axis.domain is not None,
        interpolate=HELD if axis.held else "linear",
        point=alt.OverlayMarkDef(size=18) if points else False,
    )
    lines = marks.encode(
        x=timeline.x(),
        y=_y(known, axis),
        color=color,
        opacity=alt.condition("datum.main", alt.value(1), alt.value(BESIDE)),
    )
    some = [any(v is not None for v in row) for row in zip(*values.values(), strict=True)]
    texts = {
        f"t{i}": ["-" if value is None else axis.show(value) for value in values[name]]
        for i, name in enumerate(names)
    }
    tips = theme.tips(**{f"t{i}": f"{legend} {name}".strip() for i, name in enumerate(names)})
    cursor = timeline.draw_cursor(timeline.frame(texts)[some], tips)
    return theme.layered([lines, *cursor, *timeline.draw_rules()], LOW_HEIGHT)


def _y(known: Sequence[Mapping[str, Any]], axis: Axis) -> alt.Y:
    """Return the y axis: logarithmic for orders of magnitude, unless 0 belongs to it."""
    numbers = [float(row["value"]) for row in known]
    if not axis.zero and axis.domain is None and 0 < WIDE * min(numbers) < max(numbers):
        y = theme.log_axis("value:Q", axis.title, numbers, axis.labels)
        y["axis"]["minExtent"] = EXTENT
        return y
    scale = {"domain": list(axis.domain)} if axis.domain else {"zero": axis.zero}
    labels = alt.Axis(tickCount=4, labelExpr=axis.labels, minExtent=EXTENT)
    return alt.Y("value:Q", title=axis.title, axis=labels, scale=alt.Scale(**scale))


def draw_exposed(timeline: Timeline) -> Chart:
    shares = [m.exposed_seconds / m.step_seconds if m.step_seconds else 0 for m in timeline.moments]
    labels = "format(datum.value, '.0%')"
    axis = Axis("share of a step", "{:.1%} of a step".format, labels, zero=True, held=True)
    return Chart(
        "watch-exposed",
        "Exposed communication",
        "The least that any rank was blocked in collectives, as a share of the step; median over "
        "the steps of each point.",
        draw_lines(timeline, {"exposed": shares}, axis),
        _table(timeline, "exposed communication", {"% of step": [100 * s for s in shares]}),
    )


def draw_lateness(timeline: Timeline) -> Iterator[Chart]:
    """Yield the own time of the latest ranks beyond that of the others, over time."""
    ranks = sorted(timeline.late, key=lambda rank: (rank not in timeline.named, rank))
    late = {str(rank): timeline.late[rank] for rank in ranks}
    known = [value for values in late.values() for value in values if value is not None]
    if len(late) < 2 or not known:
        return
    top = find_top([abs(value) for value in known])
    domain = None if top is None else (-min(top, 1.1 * abs(float(np.quantile(known, 0.01)))), top)
    axis = Axis("late by", milliseconds, theme.SIGNED_TIME_LABELS, held=True, domain=domain)
    main = [name for name in late if int(name) in timeline.named]
    yield Chart(
        "watch-lateness",
        "Lateness of the latest ranks",
        "A rank's own time beyond that of the other ranks, mean over the steps of each point: "
        f"above 0, the others wait for it.{' Pale: no finding names the rank.' if main else ''}"
        f"{CUT_NOTE if top else ''}",
        draw_lines(timeline, late, axis, "rank", main),
        _table(
            timeline,
            "lateness",
            {f"rank {n} ms": [None if v is None else v * 1e3 for v in late[n]] for n in late},
        ),
    )


def draw_values(timeline: Timeline) -> Iterator[Chart]:
    """Yield the loss, with recorded values that are losses too, and each other recorded value."""
    moments = timeline.moments
    values: dict[str, list[float | None]] = {"training loss": [m.loss for m in moments]}
    for name in dict.fromkeys(name for m in moments for name in m.values):
        values[name] = [m.values.get(name) for m in moments]
    known = {n: v for n, v in values.items() if any(x is not None for x in v)}
    losses = {name: v for name, v in known.items() if name.lower().endswith(LOSS)}
    if losses:
        caption = (
            "The tensor passed to backward, of one step in each round of reports, and losses that "
            "the script records; medians over ranks."
        )
        yield _draw_values(timeline, "watch-loss", "Loss", caption, losses)
    for number, name in enumerate((name for name in known if name not in losses), 1):
        caption = "Recorded by the script; median over the ranks that recorded it."
        yield _draw_values(timeline, f"watch-value-{number}", name, caption, {name: known[name]})


def _draw_values(
    timeline: Timeline, name: str, title: str, caption: str, values: dict[str, list[float | None]]
) -> Chart:
    axis = Axis(title.lower(), digits, "format(datum.value, '~g')")
    spec = draw_lines(timeline, values, axis)
    return Chart(name, title, caption, spec, _table(timeline, title, dict(values)))


def draw_load(timeline: Timeline, backend: str) -> Iterator[Chart]:
    facts = [
        {"at": at, "backend": backend, "time": clock, "step": moment.step}
        for at, moment, clock in zip(timeline.at, timeline.moments, timeline.clocks(), strict=True)
    ]
    loads = zip(facts, (moment.load for moment in timeline.moments), strict=True)
    yield from load_charts(
        "watch-load",
        loads,
        timeline.x(),
        "report of the ranks",
        notes=("time", "step"),
        behind=list(timeline.draw_rules()),
    )
