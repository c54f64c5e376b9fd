"""The cases whose repetitions vary most: their times in order, and their distribution."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ddpbench.analysis.lines import Line
from ddpbench.analysis.stats import PERCENTILES, Floats
from ddpbench.catalog.sizes import readable
from ddpbench.present import theme
from ddpbench.present.charts.kinds import Axis, Lines
from ddpbench.present.columns import format_number, title_parts
from ddpbench.present.document import NO_VALUES, Chart, ReportRun, Section, make_table, make_titles
from ddpbench.records.schema import Run
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


@dataclass
class Shown:
    """The samples of a case or of a part of a DDP step."""

    label: str
    line: Line | None = None  # None: a part of a step
    times: dict[int, Floats] = field(default_factory=dict)  # launch → seconds of a call, in order

    @property
    def spread(self) -> float:
        """Return how far apart the times are: two modes count more than any other spread."""
        if self.line and self.line.modes:
            low, high = self.line.modes
            return 1e3 * high.seconds / low.seconds * min(low.share, high.share)
        times = np.concatenate(list(self.times.values()))
        low_time, high_time = np.percentile(times, [5, 95])
        return float(high_time / low_time) if len(times) >= FEWEST else 0.0


def build_sections(run: ReportRun) -> Iterator[Section]:
    """Yield the section on the cases that vary most, if samples are stored."""
    cases = sorted(_list_cases(run), key=lambda case: case.spread, reverse=True)[:MOST_CASES]
    rows = []
    for number, case in enumerate(cases, 1):
        order = Chart(f"cases-{number}", case.label, CAPTION, _tabulate(case), _draw_order(case))
        words = f"cases-shares-{number}", f"{case.label}: distribution", SHARES, NO_VALUES
        rows.append((order, Chart(*words, _draw_shares(case))))
    if rows:
        yield Section("cases", "Repetitions", INTRO, rows=tuple(rows))


def _list_cases(run: ReportRun) -> list[Shown]:
    """Return the cases that have samples, in the order of the tables."""
    short = make_titles(title_parts(line.case) for line in run.lines)
    known: dict[str, Shown] = {}
    for line in run.lines:
        case = line.case
        size = [readable(case.nbytes)] if case.nbytes else []
        label = " ".join([short[title_parts(case)], *size, case.backend])
        known[case.key] = Shown(label, line)
    for part in run.repetitions:
        shown = known.setdefault(part.case, Shown(_label_part(part.case, run.run)))
        results = shown.line.results if shown.line else ()
        calls = next((r.calls for r in results if r.launch == part.launch), 1)
        shown.times[part.launch] = np.maximum(part.seconds / calls, SHORTEST)
    return [case for case in known.values() if case.times]


def _label_part(name: str, run: Run) -> str:
    """Return the label of a part of a DDP step: "mlp gloo: ddp backward"."""
    for case in (result.case for result in run.steps):
        if name.startswith(f"{case.key}/"):
            part = name[len(case.key) + 1 :].replace("/", " ")
            return f"{case.workload} {case.backend}: {part}"
    return name


def _draw_order(case: Shown) -> Lines:
    """Return the shortest, median and longest of neighbouring repetitions, launch by launch."""
    begin, size = 0, -(-sum(map(len, case.times.values())) // MOST_POINTS)
    points: list[dict[str, Any]] = []
    rules = []
    for launch, times in case.times.items():
        rules.append({"_x": begin, "_label": str(launch), "_row": 8})
        for at in range(0, len(times), size):
            near = sorted(times[at : at + size].tolist())
            middle = statistics.median(near)
            x = begin + at + len(near) // 2
            texts = {"launch": launch, "median": f"{format_number(middle * 1e6)} µs"}
            points.append({**texts, "_x": x, "_low": near[0], "_y": middle, "_high": near[-1]})
        begin += len(times)
    x_axis = Axis("repetitions in order; above: their launch", theme.NUMBER_LABELS)
    y_axis = Axis("time", theme.TIME_LABELS, log=True)
    return Lines(data=points, x=x_axis, y=y_axis, color="", connected=False, rules=rules)


def _draw_shares(case: Shown) -> Lines:
    """Return the share of the repetitions at each time; each launch counts alike."""
    times = list(case.times.values())
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


def _tabulate(case: Shown) -> Table:
    """Return QUANTILES of each launch in µs."""
    rows = []
    for launch, times in case.times.items():
        enough = len(times) >= PERCENTILES["p99"]
        quantiles = [
            float(np.percentile(times, percent)) * 1e6 if name != "p99" or enough else None
            for name, percent in QUANTILES.items()
        ]
        rows.append((launch, len(times), *quantiles))
    headings = ("launch", "repetitions", *(f"{name} µs" for name in QUANTILES))
    return make_table(case.label, headings, rows)
