"""Charts of collectives: time and bandwidth over message sizes, and the fastest backends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ddpbench.analysis.flags import UNUSABLE
from ddpbench.analysis.lines import Line
from ddpbench.catalog.sizes import readable
from ddpbench.present import theme
from ddpbench.present.charts.kinds import Axis, Bars, Drawing, Lines, Matrix
from ddpbench.present.collectives.columns import COLUMNS
from ddpbench.present.columns import title_parts
from ddpbench.present.document import NO_VALUES, Chart, ReportRun, make_titles

TOOLTIPS = {
    "seconds": ("size", "backend", "time", "interval", "faster", "p99", "skew", "launch", "check"),
    "rate": ("size", "backend", "busbw", "limit", "check"),
}
FASTEST = (
    "Colour: the backend whose 95 % interval is below all others. Number: time of the "
    "second-fastest backend / its time. Empty: not measured, or none is clearly the fastest."
)
Point = tuple[ReportRun, Line]
AXES = {
    "seconds": Axis("time of a call", theme.TIME_LABELS, log=True),
    "rate": Axis("busbw", theme.RATE_LABELS, log=True),
}


def draw_fastest(run: ReportRun) -> Iterator[Chart]:
    """Yield the matrix of operations and sizes, if any backend is clearly the fastest."""
    known = [line for line in run.lines if line.seconds and line.case.nbytes]
    names = make_titles(title_parts(line.case) for line in known)
    cells = [
        {
            "operation": names[title_parts(line.case)],
            "size": readable(line.case.nbytes),
            "fastest": line.case.backend,
            "time": f"{COLUMNS['time'].show(line)} µs",
            "_text": f"{line.faster:.{1 if line.faster < 9.95 else 0}f}",
        }
        for line in known
        if line.faster
    ]
    sizes = sorted({line.case.nbytes for line in known})
    if not cells or len(sizes) < 2:
        return
    drawing = Matrix(
        data=cells,
        column="size",
        row="operation",
        titles=("message size", None),
        ends=tuple(map(readable, sizes)),
        color="fastest",
        order=tuple(theme.order_backends(cell["fastest"] for cell in cells)),
    )
    yield Chart("fastest", "Fastest backend", FASTEST, NO_VALUES, drawing)


def draw_sizes(shown: Sequence[Point], value: str) -> Drawing | None:
    """Return the chart of time or bandwidth over sizes, or of one size with a row per backend.

    value: of AXES. None: there is nothing to draw.
    """
    several = len({run.label for run, _ in shown}) > 1
    points = [
        {**({"run": run.label} if several else {}), **_point(line, value)} for run, line in shown
    ]
    points = [point for point in points if point["_y"]]
    if not points:
        return None
    if len({point["_x"] for point in points}) == 1:
        rows = [
            {**p, "_end": p["_y"], "_row": f"{p['backend']} {p.get('run', '')}".strip()}
            for p in points
        ]
        return Bars(data=rows, x=AXES[value], row="_row", dots=True)
    return Lines(
        data=[point for point in points if point["_x"]],  # the axis is logarithmic
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
