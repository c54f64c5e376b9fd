"""Formats of a history, series of runs: one entry of FORMATS adds an output."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from ddpbench.analysis.flags import BUSY_SHARE
from ddpbench.analysis.stats import FEWEST
from ddpbench.records.terminal_text import escaped
from ddpbench.records.wording import counted
from ddpbench.render.column import Column, text_column
from ddpbench.render.labels import (
    format_change,
    format_difference,
    format_interval,
    format_time,
    label,
)
from ddpbench.render.style import TERMINAL
from ddpbench.verdicts import matching
from ddpbench.verdicts.differences import MACHINE
from ddpbench.verdicts.trend import LONE, Change, Point, Series

# What a row shows of the environment; a change point lists all that differs.
VERSIONS = ("ddpbench", "git", "python", "torch", "cuda", "nccl", "driver", "kernel", *MACHINE)
BAR = 16  # cells, each of eight steps
EIGHTHS = " ▏▎▍▌▋▊▉█"


def table(all_series: Sequence[Series]) -> str:
    """Format a table for each series, its change points below it, and a summary."""
    blocks = []
    for number, series in enumerate(all_series, 1):
        title = _title(number, series, all_series)
        blocks.append("\n".join([title, "", _table(series), *_legend(series), "", *_level(series)]))
    if len(all_series) > 1:
        changes = sum(len(series.changes) for series in all_series)
        blocks.append(f"{len(all_series)} series, {counted(changes, 'change point')}")
    return "\n\n".join(blocks) + "\n"


def csv(all_series: Sequence[Series]) -> str:
    """Format one row per run of a series: seconds, and changes as fractions."""
    import pandas as pd

    rows = [
        {"series": number, "case": label(series.case), **row}
        for number, series in enumerate(all_series, 1)
        for row in _rows(series)
    ]
    return str(pd.DataFrame(rows).to_csv(index=False))


def as_json(all_series: Sequence[Series]) -> str:
    """Format the series with their identities, runs and change points."""
    document = [
        {
            "case": label(series.case),
            "identity": asdict(series.case),
            "runs": list(_rows(series)),
            "noise": None if series.noise is None else math.expm1(series.noise),
            "changes": [_change(series, change) for change in series.changes],
            "changes_unsought": series.unsought,
        }
        for series in all_series
    ]
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


FORMATS: dict[str, Callable[[Sequence[Series]], str]] = {
    "table": escaped(table),
    "csv": escaped(csv),
    "json": as_json,
}


def _title(number: int, series: Series, all_series: Sequence[Series]) -> str:
    """Name the case, and how it differs from an earlier series with the same row."""
    title = label(series.case) if len(all_series) == 1 else f"{number}  {label(series.case)}"
    same = [
        (len(matching.fields_differing(other.case, series.case)), i)
        for i, other in enumerate(all_series[: number - 1])
        if matching.row_of(other.case) == matching.row_of(series.case)
    ]
    if not same:
        return title
    _, nearest = min(same)
    differing = matching.differing(all_series[nearest].case, series.case)
    return f"{title}\nnot comparable with {nearest + 1}: {differing}"


def _table(series: Series) -> str:
    """Format the runs; empty columns are left out."""
    longest = max((point.seconds or 0.0 for point in series.points), default=0.0)
    columns: list[Column[Point]] = [
        text_column("date", lambda point: point.run.started.replace("T", " ")[:16]),
        text_column("run", lambda point: point.run.id),
        Column("launches", lambda point: len(point.medians) or "-"),
        Column(
            "median",
            lambda point: (
                None if point.seconds is None else format_time(series.case, point.seconds)
            ),
        ),
        Column(
            "95 %", lambda point: format_interval(point.interval) + ("*" if _within(point) else "")
        ),
        text_column(
            "of the longest", lambda point: bar(point.seconds / longest) if point.seconds else ""
        ),
        text_column("flags", lambda point: ", ".join(_flags(point))),
        text_column("changed to", lambda point: ", ".join(_versions(point))),
    ]
    return TERMINAL.rows(series.points, columns, drop_empty=True)


def bar(share: float) -> str:
    """Draw a bar from 0, to an eighth of a cell."""
    eighths = round(share * BAR * 8)
    return "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()


def _within(point: Point) -> bool:
    return point.interval is not None and len(point.medians) == 1


def _flags(point: Point) -> Iterator[str]:
    if point.fault is not None:
        yield f"INVALID: {point.fault}"
    if point.run.state != "complete":
        yield "partial"
    if point.busy:
        yield "busy"
    if point.lone:
        yield "alone"


def _versions(point: Point) -> Iterator[str]:
    for difference in point.changed:
        if difference.name in VERSIONS or difference.name.startswith("library of "):
            yield f"{difference.name} {', '.join(difference.new)}"


def _legend(series: Series) -> Iterator[str]:
    points = series.points
    if any(map(_within, points)):
        yield f"*      interval within one launch; {FEWEST} launches give one over launches"
    if any(point.busy for point in points):
        yield f"busy   other processes used more than {BUSY_SHARE * 100:g} % of the cores meanwhile"
    if any(point.lone for point in points):
        yield f"alone  more than {LONE:g} noise widths from both neighbours: no new level"


def _level(series: Series) -> Iterator[str]:
    """Summarize the series: first and last run, noise, change points."""
    measured = [point.seconds for point in series.points if point.seconds is not None]
    if len(measured) > 1:
        since = math.log(measured[-1] / measured[0])
        yield (
            f"{len(measured)} runs, from {format_time(series.case, measured[0])} to "
            f"{format_time(series.case, measured[-1])} ({format_change(since)}){_noise(series)}"
        )
    if series.unsought:
        yield f"did not search for change points: {series.unsought}"
    elif not series.changes:
        yield "no change point"
    for change in series.changes:
        before, after = series.points[change.at - 1].run, series.points[change.at].run
        yield (
            f"CHANGE {format_change(change.log_ratio)} between {before.id} and {after.id}: "
            f"{format_time(series.case, change.before_seconds)} → "
            f"{format_time(series.case, change.after_seconds)}, "
            f"{change.noise_widths:.1f} noise widths"
        )
        known = [f"  differs: {format_difference(each)}" for each in change.differences]
        yield from known or ["  the recorded environments do not differ"]


def _noise(series: Series) -> str:
    if series.noise is None:
        return ""
    return f"; noise between runs ±{math.expm1(series.noise) * 100:.1f} %"


def _rows(series: Series) -> Iterator[dict[str, Any]]:
    """Return the runs for machines."""
    begins = {change.at: change for change in series.changes}
    for i, point in enumerate(series.points):
        yield {
            "run": point.run.id,
            "started": point.run.started,
            "launches": len(point.medians),
            "median_seconds": point.seconds,
            "low_seconds": point.interval.low if point.interval else None,
            "high_seconds": point.interval.high if point.interval else None,
            "interval_of": point.interval.of if point.interval else None,
            "flags": ", ".join(_flags(point)),
            "changed_to": ", ".join(_versions(point)),
            "change": math.expm1(begins[i].log_ratio) if i in begins else None,
        }


def _change(series: Series, change: Change) -> dict[str, Any]:
    return {
        "between": [series.points[i].run.id for i in (change.at - 1, change.at)],
        "before_seconds": change.before_seconds,
        "after_seconds": change.after_seconds,
        "change": math.expm1(change.log_ratio),
        "noise_widths": change.noise_widths,
        "differences": [asdict(each) for each in change.differences],
    }
