"""The charts of a watched job over time: parts of a step, lateness, loss and load."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from ddpbench.present import theme
from ddpbench.present.charts.kinds import Axis, Colors, Lines
from ddpbench.present.columns import digits
from ddpbench.present.document import Chart, make_table
from ddpbench.present.load import load_charts
from ddpbench.present.watch.timeline import Timeline, find_top
from ddpbench.records.table import Table
from ddpbench.records.watched import COLUMNS, LOSS

HEIGHT = 130  # pixels
WIDE = 50.0  # ratio of the largest value to the least, from which an axis is logarithmic
CUT_NOTE = " Rare larger values are cut off; the table has them."

Values = Mapping[str, Sequence[float | None]]  # name → a value for each moment


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{digits(seconds * 1e3)} ms"


def draw(timeline: Timeline, backend: str) -> Iterator[Chart]:
    """Yield all charts over time, one below the other on the same axis."""
    yield draw_parts(timeline)
    yield from draw_lateness(timeline)
    yield draw_exposed(timeline)
    yield from draw_values(timeline)
    yield from draw_load(timeline, backend)


def _table(timeline: Timeline, title: str, columns: Mapping[str, Sequence[Any]]) -> Table:
    """Return the moments that have a value, each with its values."""
    steps = [moment.step for moment in timeline.moments]
    rows = zip(timeline.clocks(), steps, *columns.values(), strict=True)
    known = [row for row in rows if any(value is not None for value in row[2:])]
    return make_table(title, ["UTC", "step", *columns], known, left=("UTC",))


def _lines(
    timeline: Timeline, values: Values, y: Axis, show: Callable[[float], str], legend: str = ""
) -> Lines:
    """Return a line for each name; y: the axis of "value". show: formats a value of a tooltip."""
    moments = zip(timeline.at, timeline.clocks(), timeline.moments, strict=True)
    data = [
        {"at": at, "time": clock, "step": m.step, "name": n, "value": value, "text": show(value)}
        for i, (at, clock, m) in enumerate(moments)
        for n, each in values.items()
        if (value := each[i]) is not None
    ]
    return Lines(
        data=pd.DataFrame(data),
        x=timeline.x,
        y=y,
        tips={"time": "time", "step": "step"},
        colors=Colors("name", tuple(values), legend or None),
        cursor=True,
        rules=timeline.unlabelled,
        height=HEIGHT,
    )


def draw_parts(timeline: Timeline) -> Chart:
    moments = timeline.moments
    parts = {name: [m.seconds[i] for m in moments] for i, name in enumerate(COLUMNS)}
    top = find_top([sum(m.seconds) for m in moments])
    y = Axis("value", "time of a step", theme.TIME_LABELS, domain=top and (0.0, top))
    lines = _lines(timeline, parts, y, milliseconds)
    steps = {moment.step: milliseconds(moment.step_seconds) for moment in moments}
    drawing = replace(
        lines,
        data=lines.data.assign(whole=lines.data["step"].map(steps)),
        tips={**lines.tips, "whole": "whole step"},
        colors=Colors("name", theme.PHASES),
        stacked=True,
        held=True,
        rules=timeline.rules,
        height=260,
    )
    table = {
        "step ms": [m.step_seconds * 1e3 for m in moments],
        **{f"{name} ms": [value * 1e3 for value in parts[name]] for name in COLUMNS},
    }
    return Chart(
        "watch-parts",
        "Parts of a step",
        "Time of each part in the median rank, median over the steps of each point. Dashed: where "
        f"a finding begins or ends.{CUT_NOTE if top else ''}",
        drawing,
        _table(timeline, "parts of a step", table),
    )


def draw_exposed(timeline: Timeline) -> Chart:
    shares = [m.exposed_seconds / m.step_seconds if m.step_seconds else 0 for m in timeline.moments]
    y = Axis("value", "share of a step", theme.SHARE_LABELS, zero=True)
    lines = _lines(timeline, {"exposed": shares}, y, "{:.1%} of a step".format)
    return Chart(
        "watch-exposed",
        "Exposed communication",
        "The least that any rank was blocked in collectives, as a share of the step; median over "
        "the steps of each point.",
        replace(lines, held=True),
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
    y = Axis("value", "late by", theme.TIME_LABELS, zero=True, domain=domain)
    lines = _lines(timeline, late, y, milliseconds, "rank")
    beside = [name for name in late if int(name) not in timeline.named] if timeline.named else []
    yield Chart(
        "watch-lateness",
        "Lateness of the latest ranks",
        "A rank's own time beyond that of the other ranks, mean over the steps of each point: "
        f"above 0, the others wait for it.{' Pale: no finding names the rank.' if beside else ''}"
        f"{CUT_NOTE if top else ''}",
        replace(lines, data=lines.data.assign(pale=lines.data["name"].isin(beside)), held=True),
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


def _draw_values(timeline: Timeline, name: str, title: str, caption: str, values: Values) -> Chart:
    numbers = [value for each in values.values() for value in each if value is not None]
    wide = 0 < WIDE * min(numbers) < max(numbers)
    y = Axis("value", title.lower(), theme.NUMBER_LABELS, log=wide)
    lines = _lines(timeline, values, y, digits)
    return Chart(name, title, caption, lines, _table(timeline, title, values))


def draw_load(timeline: Timeline, backend: str) -> Iterator[Chart]:
    moments = zip(timeline.at, timeline.clocks(), timeline.moments, strict=True)
    loads = [
        ({"at": at, "backend": backend, "time": clock, "step": moment.step}, moment.load)
        for at, clock, moment in moments
    ]
    shown = ("backend", "time", "step")
    when = "report of the ranks"
    yield from load_charts(
        "watch-load", loads, timeline.x, when, shown=shown, rules=timeline.unlabelled
    )
