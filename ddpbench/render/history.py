"""From series of runs to text: one entry of FORMATS adds an output."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from ddpbench.analysis.stats import FEWEST
from ddpbench.records.visible import escaped
from ddpbench.render.comparison import difference, label, percent, time, width
from ddpbench.render.style import TERMINAL
from ddpbench.verdicts import matching
from ddpbench.verdicts.differences import MACHINE
from ddpbench.verdicts.trend import LONE, Change, Point, Series

HEADS = ["date", "run", "launches", "median", "95 %", "of the longest", "flags", "changed to"]
# What a row tells of the environment; at a change point all that differs is told.
VERSIONS = ("ddpbench", "git", "python", "torch", "cuda", "nccl", "driver", "kernel", *MACHINE)
BAR = 16  # cells, each of eight steps
EIGHTHS = " ▏▎▍▌▋▊▉█"


def table(found: Sequence[Series]) -> str:
    """A table for each series, its change points below it, and what all come to."""
    blocks = []
    for number, series in enumerate(found, 1):
        lines = [_title(number, series, found), "", _table(series), *_legend(series), ""]
        blocks.append("\n".join([*lines, *_level(series)]))
    count = sum(len(series.changes) for series in found)
    words = f"{len(found)} series, {_many(count, 'change point')}"
    return "\n\n".join([*blocks, words] if len(found) > 1 else blocks) + "\n"


def csv(found: Sequence[Series]) -> str:
    """One row a run of a series; seconds, and changes as fractions (0.03 is 3 % longer)."""
    import pandas as pd

    rows = [
        {"series": number, "case": label(series.case), **row}
        for number, series in enumerate(found, 1)
        for row in _rows(series)
    ]
    return str(pd.DataFrame(rows).to_csv(index=False))


def as_json(found: Sequence[Series]) -> str:
    """The series with their identities, runs and change points."""
    shown = [
        {
            "case": label(series.case),
            "identity": asdict(series.case),
            "runs": list(_rows(series)),
            "noise": None if series.noise is None else math.expm1(series.noise),
            "changes": [_change(series, change) for change in series.changes],
            "changes_unsought": series.unsought,
        }
        for series in found
    ]
    return json.dumps(shown, indent=1, allow_nan=False) + "\n"


FORMATS: dict[str, Callable[[Sequence[Series]], str]] = {
    "table": escaped(table),
    "csv": escaped(csv),
    "json": as_json,
}


def _title(number: int, series: Series, found: Sequence[Series]) -> str:
    """The case; and how it differs from the series before that was asked for as the same row."""
    title = label(series.case) if len(found) == 1 else f"{number}  {label(series.case)}"
    same = [
        (len(matching.fields_differing(other.case, series.case)), i)
        for i, other in enumerate(found[: number - 1])
        if matching.row_of(other.case) == matching.row_of(series.case)
    ]
    if not same:
        return title
    _, nearest = min(same)
    differing = matching.differing(found[nearest].case, series.case)
    return f"{title}\nnot to be compared with {nearest + 1}: {differing}"


def _table(series: Series) -> str:
    """The runs as a table; a column that is empty throughout is left out."""
    longest = max((point.seconds or 0.0 for point in series.points), default=0.0)
    cells = [
        [
            point.run.started.replace("T", " ")[:16],
            point.run.id,
            str(len(point.medians) or "-"),
            "-" if point.seconds is None else time(series.case, point.seconds),
            width(point.interval) + ("*" if _within(point) else ""),
            bar(point.seconds / longest) if point.seconds else "",
            ", ".join(_flags(point)),
            ", ".join(_versions(point)),
        ]
        for point in series.points
    ]
    used = [i for i in range(len(HEADS)) if any(row[i] for row in cells)]
    return TERMINAL.table([[row[i] for i in used] for row in cells], [HEADS[i] for i in used])


def bar(share: float) -> str:
    """A bar from 0, to an eighth of a cell."""
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
    for each in point.changed:
        if each.name in VERSIONS or each.name.startswith("library of "):
            yield f"{each.name} {', '.join(each.new)}"


def _legend(series: Series) -> Iterator[str]:
    points = series.points
    if any(map(_within, points)):
        yield f"*      within one launch; over launches from {FEWEST} on"
    if any(point.busy for point in points):
        yield "busy   other processes used more than 5 % of the cores meanwhile"
    if any(point.lone for point in points):
        yield f"alone  off from both neighbours by more than {LONE:g} noise widths: no new level"


def _level(series: Series) -> Iterator[str]:
    """What the series comes to: its change points, and what it could be judged by."""
    measured = [point.seconds for point in series.points if point.seconds is not None]
    if len(measured) > 1:
        since = math.log(measured[-1] / measured[0])
        yield (
            f"{len(measured)} runs, from {time(series.case, measured[0])} to "
            f"{time(series.case, measured[-1])} ({percent(since)})" + _noise(series)
        )
    if series.unsought:
        yield f"change points were not looked for: {series.unsought}"
    elif not series.changes:
        yield "no change point"
    for change in series.changes:
        before, after = series.points[change.at - 1].run, series.points[change.at].run
        yield (
            f"CHANGE {percent(change.log_ratio)} between {before.id} and {after.id}: "
            f"{time(series.case, change.before_seconds)} → "
            f"{time(series.case, change.after_seconds)}, {change.noise_widths:.1f} noise widths"
        )
        known = [f"  differs: {difference(each)}" for each in change.differences]
        yield from known or ["  nothing differs in what is recorded of the environment"]


def _noise(series: Series) -> str:
    if series.noise is None:
        return ""
    return f"; noise between runs ±{math.expm1(series.noise) * 100:.1f} %"


def _rows(series: Series) -> Iterator[dict[str, Any]]:
    """The runs for machines."""
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


def _many(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"
