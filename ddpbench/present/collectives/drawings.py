"""Charts of collectives: time and bandwidth over message sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddpbench.analysis.flags import UNUSABLE
from ddpbench.analysis.lines import Line
from ddpbench.present import theme
from ddpbench.present.charts.kinds import Axis, Lines
from ddpbench.present.collectives.columns import COLUMNS
from ddpbench.present.document import ReportRun

TOOLTIPS = {
    "seconds": ("size", "backend", "time", "interval", "faster", "p99", "skew", "launch", "check"),
    "rate": ("size", "backend", "busbw", "limit", "check"),
}
Point = tuple[ReportRun, Line]
AXES = {
    "seconds": Axis("time of a call", theme.TIME_LABELS, log=True),
    "rate": Axis("busbw", theme.RATE_LABELS, log=True),
}


def draw_sizes(shown: Sequence[Point], value: str) -> Lines | None:
    """Return the chart of time or bandwidth over sizes; None for fewer than two sizes.

    value: of AXES.
    """
    several = len({run.label for run, _ in shown}) > 1
    points = [
        {**({"run": run.label} if several else {}), **_point(line, value)} for run, line in shown
    ]
    points = [point for point in points if point["_x"] and point["_y"]]  # for logarithmic axes
    if len({point["_x"] for point in points}) < 2:
        return None
    return Lines(
        data=points,
        x=Axis("message size", theme.SIZE_LABELS, log=True),
        y=AXES[value],
        dash="run" if several else "",
    )


def _point(line: Line, value: str) -> dict[str, Any]:
    """Return a point of a chart: its numbers, and the texts of its tooltip."""
    ends = (line.interval.low, line.interval.high) if line.interval else (None, None)
    point: dict[str, Any] = {
        **{COLUMNS[name].heading: COLUMNS[name].show(line) for name in TOOLTIPS[value]},
        "flags": " ".join(line.flags),
        "_x": line.case.nbytes,
        "_marked": "do not use" if UNUSABLE & set(line.flags) else "",
    }
    if value == "seconds":
        return {**point, "_y": line.seconds, "_low": ends[0], "_high": ends[1]}
    limits = [r.limit for r in line.results if r.limit and line.fraction is not None]
    mean = sum(limit.bytes_per_second for limit in limits) / len(limits) if limits else None
    return {
        **point,
        "limit": limits[0].source if limits else None,
        "_y": line.busbw,
        "_low": _rate(line, ends[1]),
        "_high": _rate(line, ends[0]),
        "_reference": mean,
    }


def _rate(line: Line, seconds: float | None) -> float | None:
    """Return the busbw of a call of this duration."""
    return seconds and line.busbw and line.seconds and line.busbw * line.seconds / seconds
