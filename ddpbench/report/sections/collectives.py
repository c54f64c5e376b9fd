"""Time and bandwidth of every operation over message sizes: backends and runs in one chart.

The charts and tables show the texts of the terminal's columns, so that both say the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from ddpbench.analysis.lines import FLAGS, Line
from ddpbench.records.table import Table, TableColumn
from ddpbench.render.collective_columns import COLUMNS
from ddpbench.render.column import common_legend, digits, rows_by_backend, title_parts
from ddpbench.report.case_titles import Kind, describe, titles
from ddpbench.report.chart import Chart, ReportRun, Section, plain_name, side_by_side
from ddpbench.report.charts.fastest_backend import fastest_charts
from ddpbench.report.charts.over_sizes import Point, over_sizes, point_frame

SAME = ("size", "count", "backend")  # columns of both tables
TIME = ("time", "interval", "p99", "skew", "launch", "check", "flags")
BANDWIDTH = ("algbw", "busbw", "limit", "check", "flags")


def section(runs: Sequence[ReportRun]) -> Section | None:
    """Return the charts of all operations; None if no run measured any."""
    groups: dict[Kind, list[Point]] = {}
    for run in runs:
        for line in run.lines:
            groups.setdefault(title_parts(line.case), []).append((run, line))
    if not groups:
        return None
    known = titles(groups)
    rows = [_row(of, known[of], points) for of, points in groups.items()]
    rows = [*side_by_side(runs, fastest_charts), *rows]
    return Section("collectives", "Collectives", rows=tuple(rows))


def _row(of: Kind, title: str, points: Sequence[Point]) -> tuple[Chart, ...]:
    name = plain_name(title)
    shown = [point for point in points if point[1].seconds]  # 0: too short for a device's clock
    several = len({run.label for run, _ in points}) > 1
    data = point_frame(shown, (*SAME, *TIME, *BANDWIDTH))
    time = Chart(
        f"{name}-time",
        f"{title}: time",
        f"{_statistic(shown)} {describe(of)}.",
        over_sizes(data, "seconds", ("size", "backend", *TIME)) if shown else None,
        _table(f"{title}: time", points, TIME, several=several),
        operation=of[0],
    )
    if not shown or not any(line.busbw for _, line in shown):
        return (time,)
    bandwidth = Chart(
        f"{name}-bandwidth",
        f"{title}: bandwidth",
        f"busbw = size / time × bus factor of nccl-tests, in GB/s (10⁹ bytes). {_limits(shown)}",
        over_sizes(data, "rate", ("size", "backend", *BANDWIDTH)),
        _table(f"{title}: bandwidth", points, BANDWIDTH, several=several),
        operation=of[0],
    )
    return time, bandwidth


def _statistic(shown: Sequence[Point]) -> str:
    """Return the sentences of a time chart's caption that name the statistic."""
    if not shown:
        return "Not measured:"
    ranks = {"max": "the slowest rank", "mean": "all ranks"}
    names = dict.fromkeys(
        f"{case.statistic} over calls, of {ranks.get(case.rank_reduction, case.rank_reduction)}"
        for case in (line.case for _, line in shown)
    )
    bars = "; bars: 95 % interval" if any(line.interval for _, line in shown) else ""
    axes = "Both axes are" if _has_sizes(shown) else "The axis is"
    return f"Time of one call: {' or '.join(names)}{bars}. {axes} logarithmic."


def _has_sizes(shown: Sequence[Point]) -> bool:
    return len({line.case.nbytes for _, line in shown}) > 1


def _limits(shown: Sequence[Point]) -> str:
    """Return the sentence of a caption that names the sources of the limits."""
    rates: dict[tuple[str, str], list[float]] = {}
    for _, line in shown:
        for limit in (result.limit for result in line.results):
            if limit is not None and line.fraction is not None:
                key = line.case.backend, limit.source
                rates.setdefault(key, []).append(limit.bytes_per_second / 1e9)
    if not rates:
        return "No limit of these links is known."
    texts = []
    for (backend, source), values in rates.items():
        low, high = digits(min(values)), digits(max(values))
        texts.append(f"{backend}: {source}, {low if low == high else f'{low} … {high}'} GB/s")
    mark = "Dotted" if _has_sizes(shown) else "Upright mark"
    return f"{mark}: the limit ({'; '.join(texts)})."


def _table(title: str, points: Sequence[Point], names: Sequence[str], *, several: bool) -> Table:
    """Return the rows of the terminal's table, and why the other cases were skipped."""
    measured = [line for _, line in points if line.seconds is not None]
    chosen = [*SAME, *(n for n in names if not measured or any(map(COLUMNS[n].applies, measured)))]
    if not measured:
        chosen = [*SAME, "flags"]
    columns = [
        TableColumn(COLUMNS[name].heading, "left" if COLUMNS[name].left else "right")
        for name in chosen
    ]
    groups: dict[tuple[str, int], list[Line]] = {}
    for run, line in points:
        groups.setdefault((run.label, line.case.nbytes), []).append(line)
    cells = [
        ((*([label] if several else []), *_cells(row, line).values()), row)
        for (label, _), group in groups.items()
        for line, row in zip(group, rows_by_backend(group, chosen, COLUMNS), strict=True)
    ]
    legend = common_legend([row for _, row in cells], measured, chosen, FLAGS)
    return Table(
        title,
        (*([TableColumn("run", "left")] if several else []), *columns),
        tuple(row for row, _ in cells),
        tuple(legend),
    )


def _cells(row: dict[str, str], line: Line) -> dict[str, str]:
    """Return the cells of a row; of a skipped case only what it is, and the reason."""
    if line.seconds is not None:
        return row
    known = {name: text if name in SAME else "-" for name, text in row.items()}
    return {**known, "flags": f"skipped: {line.reason}"}
