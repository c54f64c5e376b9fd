"""The cases whose repetitions vary most: their times in order, and their distribution."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import pandas as pd

from ddpbench.analysis.lines import Line
from ddpbench.analysis.stats import PERCENTILES, Floats
from ddpbench.catalog.sizes import readable
from ddpbench.present import theme
from ddpbench.present.charts.kinds import Axis, Lines
from ddpbench.present.columns import digits, title_parts
from ddpbench.present.document import (
    NO_VALUES,
    Chart,
    ReportRun,
    Section,
    make_table,
    titles,
)
from ddpbench.present.repetitions import Repetitions
from ddpbench.records.schema import Result, Run
from ddpbench.records.table import Table

MOST_CASES = 3
MOST_POINTS = 200  # of a case
BINS = 40
FEWEST = 30  # repetitions that can show a spread
SHORTEST = 1e-9  # seconds: a device's clock may show 0, which a logarithmic axis cannot
MERGED = 0.04  # of the axis: lines that are closer have one label
QUANTILES = {"min": 0, "5 %": 5, "median": 50, "95 %": 95, "p99": 99, "max": 100}
INTRO = (
    "The cases whose repetitions vary most: those with two modes first, then those with the widest "
    "spread. Do the times drift, jump, or differ from launch to launch?"
)
CAPTION = (
    "Each point is the median of neighbouring repetitions, with a line from the shortest to the "
    "longest; seconds of one call on the slowest rank. Band: 95 % interval of the median."
)
SHARES = "Share of the repetitions at each time; every launch counts alike."
KINDS = {"": "circle", "warm-up": "cross", "first call": "triangle-up"}
REPETITION, WARM_UP, FIRST = KINDS
TICKS = tuple(step * 10.0**decade for decade in range(-9, 5) for step in (1, 2, 5))


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


def build_sections(run: ReportRun) -> Iterator[Section]:
    cases = sorted(_cases(run), key=_spread, reverse=True)[:MOST_CASES]
    if rows := tuple(_draw(case, number) for number, case in enumerate(cases, 1)):
        yield Section("cases", "Repetitions", INTRO, rows=rows)


def _draw(case: Shown, number: int) -> tuple[Chart, Chart]:
    """Return the repetitions of a case in order, and their distribution."""
    shares = f"cases-shares-{number}", f"{case.label}: distribution", SHARES, NO_VALUES
    return (
        Chart(f"cases-{number}", case.label, CAPTION, _table(case), lambda: _draw_order(case)),
        Chart(*shares, lambda: _draw_shares(case)),
    )


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


def _draw_order(case: Shown) -> Lines:
    """Return the repetitions in order, launch by launch."""
    begins = accumulate((len(part.numbers) for part in case.parts[:-1]), initial=0)
    rules = [
        {"_x": begin, "_label": str(part.launch), "_row": 8, "_left": False}
        for begin, part in zip(begins, case.parts, strict=True)
    ]
    return Lines(
        data=pd.DataFrame(list(_list_points(case))),
        x=Axis("repetitions in order; above: their launch", theme.NUMBER_LABELS),
        y=Axis("time", theme.TIME_LABELS, log=True, ticks=TICKS),
        numbers={"_low": "shortest", "_y": "median", "_high": "longest"},
        color="",
        connected=False,
        shape="what",
        shapes=KINDS,
        rules=pd.DataFrame(rules),
        levels=_levels(case),
    )


def _list_points(case: Shown) -> Iterator[dict[str, Any]]:
    """Yield the shortest, median and longest of neighbouring repetitions of one kind."""
    begin, size = 0, -(-sum(len(part.numbers) for part in case.parts) // MOST_POINTS)
    for part in case.parts:
        seconds = np.maximum(part.seconds / case.calls(part.launch), SHORTEST).tolist()
        first, timed = 0, int((part.numbers < 0).sum())
        if cold := _cold(case, part):
            seconds[0], first = cold, 1
        ends = ((FIRST, 0, first), (WARM_UP, first, timed), (REPETITION, timed, len(seconds)))
        for what, start, end in ends:
            for at in range(start, end, size):
                near = sorted(seconds[at : min(at + size, end)])
                numbers = {"_low": near[0], "_y": statistics.median(near), "_high": near[-1]}
                x = begin + at + len(near) // 2
                yield {"launch": part.launch, "what": what, "_x": x, **numbers}
        begin += len(seconds)


def _draw_shares(case: Shown) -> Lines:
    """Return the share of the repetitions at each time, each launch counted alike."""
    times = _times(case)
    every = np.concatenate(times)
    weights = np.concatenate([np.full(len(each), 1 / len(each) / len(times)) for each in times])
    low, high = every.min(), every.max()
    edges = np.geomspace(low, high if high > low else low * 1.01, BINS + 1)
    shares, _ = np.histogram(every, edges, weights=weights)
    return Lines(
        data=pd.DataFrame({"_x": edges, "_y": [0.0, *shares]}),
        x=Axis("time", theme.TIME_LABELS, log=True, ticks=TICKS),
        y=Axis("share of the repetitions", theme.SHARE_LABELS, zero=True),
        color="",
        stacked=True,
        held=True,
    )


def _cold(case: Shown, part: Repetitions) -> float | None:
    """Return the time of a launch's first call; None if its samples do not hold it."""
    seconds = (r.cold_seconds for r in case.results if r.launch == part.launch)
    return next(seconds, None) if part.numbers[0] < 0 else None


def _levels(case: Shown) -> pd.DataFrame:
    """Return the lines of the usual times, and the interval of the median."""
    marks = _marks(case, np.concatenate(_times(case)))
    interval = case.line.interval if case.line else None
    middle, *others = marks.values()
    levels: pd.DataFrame = pd.DataFrame(
        {
            "_y": [middle, *others],
            "_label": [f"{label} {digits(each * 1e6)} µs" for label, each in marks.items()],
            "_low": [interval.low if interval else middle, *[None] * len(others)],
            "_high": [interval.high if interval else middle, *[None] * len(others)],
        }
    )
    return levels


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
    """Return QUANTILES of each launch in µs."""
    rows = []
    for part, times in zip(case.parts, _times(case), strict=True):
        cold, enough = _cold(case, part), len(times) >= PERCENTILES["p99"]
        quantiles = [
            float(np.percentile(times, percent)) * 1e6 if name != "p99" or enough else None
            for name, percent in QUANTILES.items()
        ]
        first = None if cold is None else cold * 1e6
        rows.append((part.launch, len(times), *quantiles, first))
    headings = ("launch", "repetitions", *(f"{name} µs" for name in QUANTILES), "first µs")
    return make_table(case.label, headings, rows)
