"""Any one case: the times of its repetitions in order, and their distribution."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import numpy as np

from ddpbench.analysis.lines import Line
from ddpbench.analysis.stats import PERCENTILES, Floats
from ddpbench.catalog.sizes import readable
from ddpbench.present import theme
from ddpbench.present.columns import title_parts
from ddpbench.present.document import (
    Chart,
    Choice,
    ReportRun,
    Section,
    make_table,
    side_by_side,
    titles,
)
from ddpbench.present.repetitions import Repetitions
from ddpbench.records.schema import Result, Run
from ddpbench.records.table import Table

ALL_POINTS = 40_000  # of all cases of a run: what a page can hold
MOST_POINTS, FEWEST_POINTS = 200, 50  # of one case
BINS = 40
FEWEST = 30  # repetitions that can show a spread
SHORTEST = 1e-9  # seconds: a device's clock may show 0, which a logarithmic axis cannot
MERGED = 0.04  # of the axis: lines that are closer have one label
QUANTILES = {"min": 0, "5 %": 5, "median": 50, "95 %": 95, "p99": 99, "max": 100}
INTRO = (
    "Choose a case to see whether its repetitions have two usual times, drift, or differ from "
    "launch to launch. The first case shown has two usual times or the widest spread."
)
CAPTION = (
    "Each point is the median of neighbouring repetitions, with a line from the shortest to the "
    "longest; seconds of one call on the slowest rank. Hollow: warm-up. Triangle: the first call "
    "of a launch. Band: 95 % interval of the median. Bars: share of the repetitions, every launch "
    "counted alike."
)
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


@dataclass(frozen=True)
class Shown:
    """A case that the chart can show: its samples in each launch, in order."""

    label: str
    backend: str
    parts: tuple[Repetitions, ...]
    line: Line | None = None  # None: a part of a DDP step

    def calls(self, launch: int) -> int:
        """Return how many calls one repetition of a launch holds."""
        return next((r.calls for r in self.results if r.launch == launch), 1)

    @property
    def results(self) -> tuple[Result, ...]:
        """Return the results of the launches; none of a part of a step."""
        return self.line.results if self.line else ()


def section(runs: Sequence[ReportRun]) -> Section | None:
    shown = [list(_cases(run)) for run in runs]
    first = next((max(cases, key=_spread).label for cases in shown if cases), "")
    by_run = {run.label: cases for run, cases in zip(runs, shown, strict=True)}
    rows = side_by_side(runs, lambda run: _charts(by_run[run.label], first))
    return Section("cases", "Every repetition of a case", INTRO, rows=rows) if rows else None


def _charts(cases: Sequence[Shown], first: str) -> list[Chart]:
    """Return the chart of these cases; it shows the one with the label `first`, if it is there."""
    if not cases:
        return []
    ordered = sorted(cases, key=lambda case: case.label != first)
    points = min(MOST_POINTS, max(FEWEST_POINTS, ALL_POINTS // len(cases)))
    choices = tuple(Choice(case.label, _data(case, points), _table(case)) for case in ordered)
    spec = case_spec(choices[0], [case.backend for case in cases])
    return [Chart("cases", "Repetitions", CAPTION, spec, choices[0].table, choices=choices)]


def _cases(run: ReportRun) -> Iterator[Shown]:
    """Yield the cases that have samples, in the order of the tables."""
    parts: dict[str, list[Repetitions]] = {}
    for part in run.repetitions:
        if (part.numbers >= 0).any():
            parts.setdefault(part.case, []).append(part)
    known = run.lines
    short = titles(title_parts(line.case) for line in known)
    for line in known:
        if line.case.key in parts:
            case = line.case
            size = [readable(case.nbytes)] if case.nbytes else []
            label = " ".join([short[title_parts(case)], *size, case.backend])
            yield Shown(label, case.backend, tuple(parts.pop(case.key)), line)
    for name, of_step in parts.items():
        label, backend = _step_label(name, run.run)
        yield Shown(label, backend, tuple(of_step))


def _step_label(name: str, run: Run) -> tuple[str, str]:
    """Return a label for a part of a DDP step, "mlp gloo: ddp backward", and its backend."""
    for case in (result.case for result in run.steps):
        if name.startswith(f"{case.key}/"):
            part = name[len(case.key) + 1 :].replace("/", " ")
            return f"{case.workload} {case.backend}: {part}", case.backend
    return name, ""


def _spread(case: Shown) -> float:
    """Return how telling a case is: two usual times count more than any spread."""
    if case.line and case.line.modes:
        low, high = case.line.modes
        return 1e3 * high.seconds / low.seconds * min(low.share, high.share)
    times = np.concatenate(_times(case))
    if len(times) < FEWEST:
        return 0.0
    low, high = np.percentile(times, [5, 95])
    return float(high / low)


def _times(case: Shown) -> list[Floats]:
    """Return the seconds of a call in each timed repetition, launch by launch."""
    return [
        np.maximum(part.seconds[part.numbers >= 0] / case.calls(part.launch), SHORTEST)
        for part in case.parts
    ]


def _data(case: Shown, points: int) -> dict[str, Columns]:
    width = ORDER_END / len(case.parts)
    data: dict[str, dict[str, list[object]]] = {
        name: {column: [] for column in columns} for name, columns in DATASETS.items()
    }
    for number, part in enumerate(case.parts):
        begin = number * width
        at = begin + width * (0.04 + 0.92 * np.arange(len(part.numbers)) / len(part.numbers))
        seconds = np.maximum(part.seconds / case.calls(part.launch), SHORTEST)
        cold = _cold(case, part)
        size = -(-len(seconds) * len(case.parts) // points)  # repetitions of one point
        for name, chosen in (
            ("timed", part.numbers >= 0),
            ("warm_up", (part.numbers < 0) & (np.arange(len(seconds)) >= (cold is not None))),
        ):
            bins = _bins(at[chosen], seconds[chosen], size)
            for column, values in bins.items():
                data[name][column] += values
            data[name]["launch"] += [part.launch] * len(bins["x"])
        if cold:
            _add(data["cold"], x=float(at[0]), middle=cold, launch=part.launch)
        _add(data["launches"], x=begin, launch=part.launch)
    typical = float(np.median(_times(case)[0]))
    for name in ("warm_up", "cold"):
        if not data[name]["x"]:
            _add(data[name], **{**dict.fromkeys(data[name], typical), "x": OUTSIDE, "launch": ""})
    data["timed"]["backend"] = [case.backend] * len(data["timed"]["x"])
    _add_distribution(data, case)
    return {name: {k: tuple(v) for k, v in columns.items()} for name, columns in data.items()}


def _add(columns: dict[str, list[object]], **values: object) -> None:
    for name, value in values.items():
        columns[name].append(value)


def _cold(case: Shown, part: Repetitions) -> float | None:
    """Return the time of a launch's first call; None if its samples do not hold it."""
    seconds = (r.cold_seconds for r in case.results if r.launch == part.launch)
    return next(seconds, None) if part.numbers[0] < 0 else None


def _bins(at: Floats, seconds: Floats, size: int) -> dict[str, list[float]]:
    """Return x and the shortest, median and longest time of `size` neighbours each."""
    if not len(seconds):
        return {"x": [], "low": [], "middle": [], "high": []}
    starts = np.arange(0, len(seconds), size)
    whole = seconds[: len(seconds) // size * size].reshape(-1, size)
    rest = seconds[whole.size :]
    middle = [*np.median(whole, axis=1).tolist(), *([float(np.median(rest))] if rest.size else [])]
    return {
        "x": at[np.minimum(starts + size // 2, len(at) - 1)].tolist(),
        "low": np.fmin.reduceat(seconds, starts).tolist(),
        "middle": middle,
        "high": np.fmax.reduceat(seconds, starts).tolist(),
    }


def _add_distribution(data: dict[str, dict[str, list[object]]], case: Shown) -> None:
    """Add the share of repetitions at each time, each launch counted alike, and usual times."""
    times = _times(case)
    every = np.concatenate(times)
    weights = np.concatenate([np.full(len(each), 1 / len(each) / len(times)) for each in times])
    low, high = every.min(), every.max()
    edges = np.geomspace(low, high, BINS + 1) if high > low else np.array([low, low * 1.01])
    shares, _ = np.histogram(every, edges, weights=weights)
    for start, end, share in zip(edges, edges[1:], shares, strict=False):
        if share:
            x = SHARES[0] + (SHARES[1] - SHARES[0]) * share / shares.max()
            _add(data["shares"], low=start, high=end, x=x, share=share, backend=case.backend)
    for label, seconds in _marks(case, every).items():
        _add(data["marks"], label=label, middle=seconds)
    interval = case.line.interval if case.line else None
    middle = float(np.median(every))
    low, high = (interval.low, interval.high) if interval else (middle, middle)
    _add(data["interval"], low=low, high=high)


def _marks(case: Shown, every: Floats) -> dict[str, float]:
    """Return the lines of the chart with their labels; lines too close to each other are one."""
    line = case.line
    marks = {"median": line.seconds if line and line.seconds else float(np.median(every))}
    if line:
        marks |= {f"{mode.share * 100:.0f} % near": mode.seconds for mode in line.modes}
        marks |= {name: line.percentiles[name] for name in ("p99",) if name in line.percentiles}
    near = MERGED * np.log(every.max() / every.min())
    kept: dict[str, float] = {}
    for label, seconds in marks.items():
        close = [name for name, other in kept.items() if abs(np.log(seconds / other)) <= near]
        if close:
            kept = {f"{k}, {label}" if k == close[0] else k: v for k, v in kept.items()}
        else:
            kept[label] = seconds
    return kept


def _table(case: Shown) -> Table:
    """Return the quantiles of each launch in µs."""
    rows = []
    for part, times in zip(case.parts, _times(case), strict=True):
        p99 = len(times) >= PERCENTILES["p99"]
        cold = _cold(case, part)
        quantiles = np.percentile(times, list(QUANTILES.values())) * 1e6
        shown = zip(QUANTILES, quantiles.tolist(), strict=True)
        rows.append(
            (
                part.launch,
                len(times),
                *(None if name == "p99" and not p99 else value for name, value in shown),
                None if cold is None else cold * 1e6,
            )
        )
    headings = ("launch", "repetitions", *(f"{name} µs" for name in QUANTILES), "first µs")
    return make_table(case.label, headings, rows)


def case_spec(first: Choice, backends: Sequence[str]) -> dict[str, Any]:
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
        *_draw_order(x, y, color),
        _draw_shares(x, color),
        *_draw_marks(y),
        *_draw_launches(x),
    ).properties(height=HEIGHT)
    spec: dict[str, Any] = chart.to_dict()
    return {**spec, "datasets": first.datasets}


def _dataset(name: str, *times: str) -> alt.Chart:
    """Return a chart of a dataset; the named times also as text, "12.3 µs"."""
    chart: alt.Chart = alt.Chart(alt.NamedData(name=name))
    if not times:
        return chart
    texts: alt.Chart = chart.transform_calculate(
        **{f"{time}_text": theme.time_text(time) for time in times}
    )
    return texts


def _draw_order(x: alt.X, y: alt.Y, color: alt.Color) -> list[alt.Chart]:
    """Return the repetitions in order: hollow in the warm-up, a triangle for the cold one."""
    spread = {"low_text": "shortest", "middle_text": "median", "high_text": "longest"}
    ends = {"y": alt.Y("low:Q"), "y2": "high:Q"}
    timed, warm_up = (_dataset(name, "low", "middle", "high") for name in ("timed", "warm_up"))
    told = theme.tips(launch="launch", **spread)
    return [
        timed.mark_rule(opacity=0.35, strokeWidth=1.5).encode(x=x, **ends, color=color),
        timed.mark_point(filled=True, size=14, opacity=0.9).encode(
            x=x, y=y, color=color, tooltip=told
        ),
        warm_up.mark_rule(opacity=0.5, clip=True).encode(x=x, **ends),
        warm_up.mark_point(filled=False, size=14, strokeWidth=1, style="muted", clip=True).encode(
            x=x, y=y, tooltip=theme.tips(launch="warm-up of launch", **spread)
        ),
        _dataset("cold", "middle")
        .mark_point(filled=False, size=45, shape="triangle-up", style="muted", clip=True)
        .encode(x=x, y=y, tooltip=theme.tips(launch="first call of launch", middle_text="time")),
    ]


def _draw_shares(x: alt.X, color: alt.Color) -> alt.Chart:
    """Return the share of the repetitions at each time."""
    bars: alt.Chart = (
        _dataset("shares", "low", "high")
        .transform_calculate(begin=str(SHARES[0]))
        .mark_rect(opacity=0.4)
        .encode(
            x=alt.X("begin:Q"),
            x2="x:Q",
            y=alt.Y("low:Q"),
            y2="high:Q",
            color=color,
            tooltip=[
                *theme.tips(low_text="from", high_text="to"),
                alt.Tooltip("share:Q", title="repetitions", format=".1%"),
            ],
        )
    )
    return bars


def _draw_marks(y: alt.Y) -> list[alt.Chart]:
    """Return the interval as a band, and a labelled line for each of the usual times."""
    marks = _dataset("marks", "middle")
    return [
        _dataset("interval", "low", "high")
        .mark_rect(opacity=0.12)
        .encode(
            x=alt.value(0),
            x2=alt.value("width"),
            y=alt.Y("low:Q"),
            y2="high:Q",
            tooltip=theme.tips(low_text="95 % interval of the median from", high_text="to"),
        ),
        marks.mark_rule(strokeDash=[4, 3]).encode(
            y=y, tooltip=theme.tips(label="line", middle_text="time")
        ),
        marks.transform_calculate(text="datum.label + ' ' + " + theme.time_text("middle", 3))
        .mark_text(align="right", baseline="bottom", dx=-3, dy=-2, fontSize=11)
        .encode(x=alt.value("width"), y=y, text="text:N"),
    ]


def _draw_launches(x: alt.X) -> list[alt.Chart]:
    """Return a line where a launch begins, and its number below."""
    launches = _dataset("launches")
    return [
        launches.mark_rule(opacity=0.4).encode(x=x),
        launches.mark_text(align="left", baseline="top", dy=4, style="muted").encode(
            x=x, y=alt.value("height"), text="launch:N"
        ),
    ]
