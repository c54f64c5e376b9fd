"""The cases whose repetitions vary most: their times in order, and their distribution."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from ddpbench.analysis.lines import Line
from ddpbench.analysis.stats import PERCENTILES, Floats
from ddpbench.catalog.sizes import readable
from ddpbench.present import theme
from ddpbench.present.charts.kinds import Axis, Lines
from ddpbench.present.columns import digits, scaled, title_parts
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
QUANTILES = {"min": 0, "5 %": 5, "median": 50, "95 %": 95, "p99": 99, "max": 100}
INTRO = (
    "The cases whose repetitions vary most: those with two modes first, then those with the widest "
    "spread. Do the times drift, jump, or differ from launch to launch?"
)
CAPTION = (
    "Each point is the median of neighbouring repetitions, with a line from the shortest to the "
    "longest; seconds of one call on the slowest rank."
)
SHARES = "Share of the repetitions at each time; every launch counts alike."


@dataclass(frozen=True)
class Shown:
    """A case that the chart can show: its samples in each launch, in order."""

    label: str
    backend: str
    parts: tuple[Repetitions, ...]
    line: Line | None = None  # None: a part of a DDP step

    def result(self, launch: int) -> Result | None:
        """Return the result of a launch; None of a part of a step."""
        results = self.line.results if self.line else ()
        return next((result for result in results if result.launch == launch), None)

    def times(self) -> list[Floats]:
        """Return the seconds of a call in each timed repetition, launch by launch."""
        results = [self.result(part.launch) for part in self.parts]
        return [
            np.maximum(part.seconds / (result.calls if result else 1), SHORTEST)
            for part, result in zip(self.parts, results, strict=True)
        ]


def build_sections(run: ReportRun) -> Iterator[Section]:
    cases = sorted(_cases(run), key=_spread, reverse=True)[:MOST_CASES]
    if rows := tuple(_draw(case, number) for number, case in enumerate(cases, 1)):
        yield Section("cases", "Repetitions", INTRO, rows=rows)


def _draw(case: Shown, number: int) -> tuple[Chart, Chart]:
    """Return the repetitions of a case in order, and their distribution."""
    shares = f"cases-shares-{number}", f"{case.label}: distribution", SHARES, NO_VALUES
    return (
        Chart(f"cases-{number}", case.label, CAPTION, _table(case), _draw_order(case)),
        Chart(*shares, _draw_shares(case)),
    )


def _cases(run: ReportRun) -> Iterator[Shown]:
    """Yield the cases that have samples, in the order of the tables."""
    parts: dict[str, list[Repetitions]] = {}
    for part in run.repetitions:
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
    times = np.concatenate(case.times())
    if len(times) < FEWEST:
        return 0.0
    low, high = np.percentile(times, [5, 95])
    return float(high / low)


def _draw_order(case: Shown) -> Lines:
    """Return the repetitions in order, launch by launch."""
    begins = accumulate((len(part.seconds) for part in case.parts[:-1]), initial=0)
    return Lines(
        data=list(_list_points(case)),
        x=Axis("repetitions in order; above: their launch", theme.NUMBER_LABELS),
        y=Axis("time", theme.TIME_LABELS, log=True),
        color="",
        connected=False,
        rules=[
            {"_x": begin, "_label": str(part.launch), "_row": 8}
            for begin, part in zip(begins, case.parts, strict=True)
        ],
    )


def _list_points(case: Shown) -> Iterator[dict[str, Any]]:
    """Yield the shortest, median and longest of neighbouring repetitions of one launch."""
    begin, size = 0, -(-sum(len(part.seconds) for part in case.parts) // MOST_POINTS)
    for part, times in zip(case.parts, case.times(), strict=True):
        for at in range(0, len(times), size):
            near = sorted(times[at : at + size].tolist())
            middle = statistics.median(near)
            yield {
                "launch": part.launch,
                "median": f"{digits(middle * 1e6)} µs",
                "_x": begin + at + len(near) // 2,
                "_low": near[0],
                "_y": middle,
                "_high": near[-1],
            }
        begin += len(times)


def _draw_shares(case: Shown) -> Lines:
    """Return the share of the repetitions at each time, each launch counted alike."""
    times = case.times()
    every = np.concatenate(times)
    weights = np.concatenate([np.full(len(each), 1 / len(each) / len(times)) for each in times])
    low, high = every.min(), every.max()
    edges = np.geomspace(low, high if high > low else low * 1.01, BINS + 1)
    shares, _ = np.histogram(every, edges, weights=weights)
    middles = np.sqrt(edges[1:] * edges[:-1]).tolist()
    return Lines(
        data=[{"_x": x, "_y": share} for x, share in zip(middles, shares.tolist(), strict=True)],
        x=Axis("time", theme.TIME_LABELS, log=True),
        y=Axis("share of the repetitions", theme.SHARE_LABELS, zero=True),
        color="",
        stacked=True,
    )


def _table(case: Shown) -> Table:
    """Return QUANTILES of each launch in µs."""
    rows = []
    for part, times in zip(case.parts, case.times(), strict=True):
        result, enough = case.result(part.launch), len(times) >= PERCENTILES["p99"]
        quantiles = [
            float(np.percentile(times, percent)) * 1e6 if name != "p99" or enough else None
            for name, percent in QUANTILES.items()
        ]
        first = scaled(result.cold_seconds, 1e6) if result else None
        rows.append((part.launch, len(times), *quantiles, first))
    headings = ("launch", "repetitions", *(f"{name} µs" for name in QUANTILES), "first µs")
    return make_table(case.label, headings, rows)
