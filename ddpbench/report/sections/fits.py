"""Latency and bandwidth fitted to the times of each operation: the lines, and their figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from ddpbench.analysis import fit
from ddpbench.analysis.fit import Fit, Segment
from ddpbench.catalog.sizes import readable
from ddpbench.records.table import Table, TableColumn
from ddpbench.render import fit_lines
from ddpbench.render.column import digits, title_parts
from ddpbench.render.labels import format_time
from ddpbench.report import theme
from ddpbench.report.case_titles import describe
from ddpbench.report.chart import Chart, ReportRun, Section, pair, plain_name

HEIGHT = 260
CURVE = 24  # points of a segment's curve: a straight line bends on logarithmic axes
INTRO = (
    "Time = α + βn for messages of n bytes, fitted to the logarithms of the measured times. "
    "1/β is the algbw of an endless message. At n½ half of the time is α: smaller messages pay for "
    "latency, larger ones for bandwidth. A change of slope or α is a change of the algorithm."
)
FIGURES = (
    "operation",
    "backend",
    "sizes",
    "α µs (95 %)",
    "1/β GB/s (95 %)",
    "busbw GB/s",
    "n½ (95 %)",
    "interval over",
)
POINTS = ("backend", "size", "time µs", "fit µs", "off")
LEFT = {"run", "operation", "backend", "sizes", "interval over", "why"}
LEGEND = (
    "unknown: these sizes do not determine the figure (the 95 % interval spans more than a factor "
    f"of {fit.WIDEST:g}); busbw: 1/β × the operation's bus factor (nccl-tests)"
)
RunFit = tuple[ReportRun, Fit]


def section(runs: Sequence[ReportRun]) -> Section | None:
    """Return a chart for each operation with a valid fit; None if no run has four sizes of one."""
    kinds: dict[tuple[str, str], list[RunFit]] = {}
    for run in runs:
        for one in fit.fits(run.lines):
            if one.segments:
                variant = describe(title_parts(one.lines[0].case))
                kinds.setdefault((one.case.called, variant), []).append((run, one))
    if not kinds:
        return None
    several, called = len(runs) > 1, [name for name, _ in kinds]
    titled = {
        name if called.count(name) == 1 else f"{name}, {variant}": (variant, fits)
        for (name, variant), fits in kinds.items()
    }
    drawn = [
        _chart(title, variant, fits, [run.label for run in runs])
        for title, (variant, fits) in titled.items()
        if any(one.valid for _, one in fits)
    ]
    flat = [(title, *pair) for title, (_, fits) in titled.items() for pair in fits]
    tables = (_table_of_figures(flat, several=several), _table_of_missing(flat, several=several))
    rows = (*pair(drawn), *((chart,) for chart in tables if chart.table.rows))
    return Section("fits", "Latency and bandwidth", INTRO, rows=rows)


def _chart(title: str, variant: str, fits: Sequence[RunFit], names: Sequence[str]) -> Chart:
    """Return the chart of one kind of calls; names: of all runs of the page."""
    of = " or ".join(dict.fromkeys(one.of for _, one in fits))
    caption = (
        f"Points: median time of a call; line: the fit; ring: n½. Intervals over {of}. {variant}."
    )
    return Chart(
        f"{plain_name(title)}-fit",
        f"{title}: latency and bandwidth",
        caption,
        _draw(fits, names),
        _table_of_points(title, fits, several=len(names) > 1),
        operation=fits[0][1].case.operation,
    )


def _draw(fits: Sequence[RunFit], names: Sequence[str]) -> dict[str, Any]:
    points = pd.DataFrame([row for run, one in fits for row in _point_rows(run, one)])
    curves = pd.DataFrame([row for run, one in fits for row in _curve_rows(run, one)])
    halves = pd.DataFrame([row for run, one in fits for row in _half_rows(run, one)])
    backends, sizes, seconds = sorted(set(points["backend"])), points["nbytes"], points["seconds"]
    tips = ["backend", "sizes", "α", "1/β", "n½"]
    dash: dict[str, Any] = {}
    shape: dict[str, Any] = {}
    if len(names) > 1:
        runs: dict[str, Any] = {"title": None, "scale": alt.Scale(domain=list(names))}
        dash = {"strokeDash": alt.StrokeDash("run:N", **runs)}
        shape = {"shape": alt.Shape("run:N", **runs)}
        tips.insert(0, "run")

    def base(data: pd.DataFrame, tips: Sequence[str]) -> alt.Chart:
        chart = alt.Chart(data).encode(
            x=theme.size_axis(sizes),
            y=theme.log_axis("seconds:Q", "time of a call", seconds, theme.TIME_LABELS).scale(
                type="log", domain=theme.extent(theme.powers_of_ten(seconds))
            ),
            color=theme.backend_color(backends),
            tooltip=[alt.Tooltip(f"{tip}:N") for tip in tips],
        )
        return theme.choose_backends(chart, backends)

    shown = [*tips[: tips.index("sizes")], "size", "time"]
    layers = [
        base(points, shown).mark_point(opacity=0.75).encode(**shape),
        base(curves, tips).mark_line().encode(detail=["segment:N", "run:N"], **dash),
    ]
    if len(halves):
        layers.append(base(halves, tips).mark_point(size=140, filled=False, strokeWidth=2))
    spec: dict[str, Any] = alt.layer(*layers).properties(height=HEIGHT).to_dict()
    return spec


def _point_rows(run: ReportRun, one: Fit) -> Iterator[dict[str, Any]]:
    for line in one.lines:
        yield {
            "nbytes": line.case.nbytes,
            "seconds": line.seconds,
            "backend": line.case.backend,
            "run": run.label,
            "size": readable(line.case.nbytes),
            "time": format_time(line.case, line.seconds or 0.0),
        }


def _curve_rows(run: ReportRun, one: Fit) -> Iterator[dict[str, Any]]:
    for number, segment in enumerate(one.valid):
        for nbytes in np.geomspace(segment.first, segment.last, CURVE):
            yield {**_figures(run, one, segment, nbytes), "segment": number}


def _half_rows(run: ReportRun, one: Fit) -> Iterator[dict[str, Any]]:
    for segment in one.valid:
        if segment.half and segment.first <= segment.half.value <= segment.last:
            yield _figures(run, one, segment, segment.half.value)


def _figures(run: ReportRun, one: Fit, segment: Segment, nbytes: float) -> dict[str, Any]:
    """Return a row at a place of the curve: where it lies, and what its tooltip shows."""
    _, sizes, latency, rate, _, half, _ = _cells(one, segment)
    return {
        "nbytes": nbytes,
        "seconds": segment.seconds(nbytes),
        "backend": one.case.backend,
        "run": run.label,
        "sizes": sizes,
        "α": f"{latency} µs" if segment.latency else "unknown",
        "1/β": f"{rate} GB/s" if segment.rate else "unknown",
        "n½": half,
    }


def _cells(one: Fit, segment: Segment) -> tuple[str, ...]:
    latency, rate, half = segment.latency, segment.rate, segment.half
    return (
        one.case.backend,
        fit_lines.format_sizes(segment),
        fit_lines.format_estimate(latency, 1e6) if latency else "unknown",
        fit_lines.format_estimate(rate, 1e-9) if rate else "unknown",
        digits(rate.value * 1e-9 * one.bus_factor) if rate else "unknown",
        fit_lines.format_half(half) if half else "unknown",
        one.of,
    )


def _columns(headings: Sequence[str], *, several: bool) -> tuple[TableColumn, ...]:
    names = [*(["run"] if several else []), *headings]
    return tuple(TableColumn(name, "left" if name in LEFT else "right") for name in names)


def _table_of_points(title: str, fits: Sequence[RunFit], *, several: bool) -> Table:
    """Return measured and fitted times, and by how much the measured ones are longer."""
    rows = []
    for run, one in fits:
        for line in one.lines:
            nbytes, seconds = line.case.nbytes, line.seconds or 0.0
            curve = next(
                (s.seconds(nbytes) for s in one.valid if s.first <= nbytes <= s.last), None
            )
            fitted = digits(curve * 1e6) if curve else "-"
            off = f"{(seconds / curve - 1) * 100:+.1f} %" if curve else "-"
            cells = (one.case.backend, readable(nbytes), digits(seconds * 1e6), fitted, off)
            rows.append((*([run.label] if several else []), *cells))
    return Table(title, _columns(POINTS, several=several), tuple(rows))


def _table_of_figures(fits: Sequence[tuple[str, ReportRun, Fit]], *, several: bool) -> Chart:
    rows = [
        (*([run.label] if several else []), title, *_cells(one, segment))
        for title, run, one in fits
        for segment in one.valid
    ]
    columns = _columns(FIGURES, several=several)
    return _table_alone("fit-figures", "Figures", columns, rows, LEGEND)


def _table_of_missing(fits: Sequence[tuple[str, ReportRun, Fit]], *, several: bool) -> Chart:
    rows = [
        (*([run.label] if several else []), title, one.case.backend, sizes, why)
        for title, run, one in fits
        for sizes, why in fit_lines.explain_missing(one)
    ]
    columns = _columns(("operation", "backend", "sizes", "why"), several=several)
    return _table_alone("fit-missing", "Sizes without a fit", columns, rows)


def _table_alone(
    name: str,
    title: str,
    columns: tuple[TableColumn, ...],
    rows: Sequence[tuple[str, ...]],
    legend: str = "",
) -> Chart:
    table = Table(title, columns, tuple(rows), (legend,) if legend else ())
    return Chart(name, title, "", None, table)
