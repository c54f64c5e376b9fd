"""The charts of a watched job over time: parts of a step, lateness, loss and load."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from ddpbench.present import theme
from ddpbench.present.charts.kinds import Axis, Lines
from ddpbench.present.columns import digits
from ddpbench.present.document import Chart, draw_chart
from ddpbench.present.load import load_charts
from ddpbench.present.watch.timeline import Timeline, build_timeline, find_top
from ddpbench.records.schema import Run
from ddpbench.records.watched import COLUMNS, LOSS, Watched

WIDE = 50.0  # ratio of the largest value to the least, from which an axis is logarithmic
CUT_NOTE = " Rare larger values are cut off; the table has them."

Values = Mapping[str, Sequence[float | None]]  # name → a value for each moment


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{digits(seconds * 1e3)} ms"


def draw(run: Run, watched: Watched, backend: str) -> Iterator[Chart]:
    """Yield all charts over time, one below the other on the same axis."""
    timeline = build_timeline(run, watched)
    yield draw_parts(timeline)
    yield from draw_lateness(timeline)
    yield draw_exposed(timeline)
    yield from draw_values(timeline)
    moments = zip(timeline.facts(), timeline.moments, strict=True)
    loads = [({**facts, "backend": backend}, moment.load) for facts, moment in moments]
    when, rules = "report of the ranks", timeline.unlabelled
    yield from load_charts("watch-load", loads, timeline.x, when, rules=rules)


def _lines(timeline: Timeline, values: Values, y: Axis, show: Callable[[float], str]) -> Lines:
    """Return a line for each name. show: formats a value of a tooltip and of the table."""
    data = [
        {**facts, "name": name, "_y": value, "_text": show(value)}
        for i, facts in enumerate(timeline.facts())
        for name, each in values.items()
        if (value := each[i]) is not None
    ]
    look: dict[str, Any] = {"color": "name", "order": tuple(values), "cursor": True, "height": 130}
    rules = timeline.unlabelled
    return Lines(data=pd.DataFrame(data), x=timeline.x, y=y, rules=rules, **look)


def draw_parts(timeline: Timeline) -> Chart:
    moments = timeline.moments
    parts = {name: [m.seconds[i] for m in moments] for i, name in enumerate(COLUMNS)}
    top = find_top([sum(m.seconds) for m in moments])
    y = Axis("time of a step", theme.TIME_LABELS, domain=(0.0, top) if top else None)
    lines = _lines(timeline, parts, y, milliseconds)
    whole = lines.data["step"].map({m.step: milliseconds(m.step_seconds) for m in moments})
    caption = (
        "Time of each part in the median rank, median over the steps of each point. Dashed: where "
        f"a finding begins or ends.{CUT_NOTE if top else ''}"
    )
    look: dict[str, Any] = {"order": theme.PHASES, "stacked": True, "held": True, "height": 260}
    data = lines.data.assign(**{"whole step": whole})
    drawing = replace(lines, data=data, rules=timeline.rules, **look)
    return draw_chart("watch-parts", "Parts of a step", caption, drawing)


def draw_exposed(timeline: Timeline) -> Chart:
    shares = [m.exposed_seconds / m.step_seconds if m.step_seconds else 0 for m in timeline.moments]
    y = Axis("share of a step", theme.SHARE_LABELS, zero=True)
    lines = _lines(timeline, {"exposed": shares}, y, "{:.1%}".format)
    caption = (
        "The least that any rank was blocked in collectives, as a share of the step; median over "
        "the steps of each point."
    )
    drawing = replace(lines, held=True)
    return draw_chart("watch-exposed", "Exposed communication", caption, drawing)


def draw_lateness(timeline: Timeline) -> Iterator[Chart]:
    """Yield the own time of the latest ranks beyond that of the others, over time."""
    ranks = sorted(timeline.late, key=lambda rank: (rank not in timeline.named, rank))
    late = {f"rank {rank}": timeline.late[rank] for rank in ranks}
    known = [value for values in late.values() for value in values if value is not None]
    if len(late) < 2 or not known:
        return
    top = find_top([abs(value) for value in known])
    domain = None if top is None else (-min(top, 1.1 * abs(float(np.quantile(known, 0.01)))), top)
    y = Axis("late by", theme.TIME_LABELS, zero=True, domain=domain)
    lines = _lines(timeline, late, y, milliseconds)
    named = {f"rank {rank}" for rank in timeline.named} or set(late)
    pale = ~lines.data["name"].isin(named)
    caption = (
        "A rank's own time beyond that of the other ranks, mean over the steps of each point: "
        "above 0, the others wait for it."
    )
    caption += " Pale: no finding names the rank." if any(pale) else ""
    caption += CUT_NOTE if top else ""
    drawing = replace(lines, data=lines.data.assign(_pale=pale), held=True)
    yield draw_chart("watch-lateness", "Lateness of the latest ranks", caption, drawing)


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
    y = Axis(title.lower(), theme.NUMBER_LABELS, log=wide)
    return draw_chart(name, title, caption, _lines(timeline, values, y, digits))
