"""Time and bandwidth of every operation over message sizes: backends and runs in one chart.

The charts and tables show the texts of the terminal's columns, so that both say the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from ddpbench.analysis.flags import UNUSABLE, find_fastest
from ddpbench.analysis.lines import FLAGS, Line
from ddpbench.catalog.sizes import readable
from ddpbench.present import theme
from ddpbench.present.charts.kinds import Axis, Bars, Colors, Lines, Matrix
from ddpbench.present.collectives.columns import COLUMNS
from ddpbench.present.columns import (
    Column,
    common_legend,
    digits,
    rows_by_backend,
    text_column,
    title_parts,
)
from ddpbench.present.document import (
    Chart,
    Kind,
    ReportRun,
    Section,
    describe,
    make_table,
    plain_name,
    side_by_side,
    tabulate,
    titles,
)
from ddpbench.records.table import Table

SAME = ("size", "count", "backend")  # columns of both tables
TIME = ("time", "interval", "p99", "skew", "launch", "check", "flags")
BANDWIDTH = ("algbw", "busbw", "limit", "check", "flags")
FASTEST = (
    "Colour: the backend whose 95 % interval lies below those of all others. Number: how many "
    "times as long the next backend takes. Empty: not measured, or none is clearly the fastest."
)
Point = tuple[ReportRun, Line]
STATES = {"no flag": "circle", "flagged": "diamond", "do not use": "cross"}  # of a point → shape
AXES = {
    "seconds": Axis("seconds", "time of a call", theme.TIME_LABELS, log=True),
    "rate": Axis("rate", "busbw", theme.RATE_LABELS, log=True),
}


def section(runs: Sequence[ReportRun]) -> Section | None:
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
    columns: list[Column[Any]] = [
        *([text_column("run", str)] if several else []),
        *(COLUMNS[n] for n in chosen),
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
    return tabulate(title, columns, [row for row, _ in cells], legend)


def _cells(row: dict[str, str], line: Line) -> dict[str, str]:
    """Return the cells of a row; of a skipped case only what it is, and the reason."""
    if line.seconds is not None:
        return row
    known = {name: text if name in SAME else "-" for name, text in row.items()}
    return {**known, "flags": f"skipped: {line.reason}"}


def fastest_charts(run: ReportRun) -> list[Chart]:
    """Return a chart of operations and sizes; none unless several backends share them."""
    rows = list(_compare_backends(run))
    if not any(row["fastest"] for row in rows) or len({row["nbytes"] for row in rows}) < 2:
        return []
    headings = ("operation", "size", "fastest", "times as long", "median times in µs")
    cells = [
        (row["operation"], row["size"], row["fastest"] or "-", row["text"], row["times"])
        for row in rows
    ]
    table = make_table("Fastest backend", headings, cells, left=headings)
    sizes = {row["size"]: row["nbytes"] for row in rows}
    tips = {
        "operation": "operation",
        "size": "size",
        "fastest": "fastest",
        "text": "times as long",
        "times": "median µs",
    }
    backends = theme.order_backends(row["fastest"] for row in rows)
    drawing = Matrix(
        data=pd.DataFrame([row for row in rows if row["fastest"]]).drop(columns="nbytes"),
        x=Axis("size", "message size", order=tuple(sorted(sizes, key=sizes.__getitem__))),
        y=Axis("operation"),
        tips=tips,
        colors=Colors("fastest", tuple(backends)),
    )
    return [Chart("fastest", "Fastest backend", FASTEST, drawing, table)]


def _compare_backends(run: ReportRun) -> Iterator[dict[str, Any]]:
    """Yield a cell for each operation and size that several backends measured."""
    known = [line for line in run.lines if line.seconds and line.case.nbytes]
    short = titles(title_parts(line.case) for line in known)
    groups: dict[tuple[str, int], list[Line]] = {}
    for line in known:
        groups.setdefault((short[title_parts(line.case)], line.case.nbytes), []).append(line)
    for (operation, nbytes), group in groups.items():
        if len({line.case.backend for line in group}) < 2:
            continue
        fastest = find_fastest(group)
        best, second, *_ = sorted(line.seconds or 0.0 for line in group)
        ratio = second / best
        yield {
            "operation": operation,
            "nbytes": nbytes,
            "size": readable(nbytes),
            "fastest": fastest.case.backend if fastest else "",
            "text": f"{ratio:.{1 if ratio < 9.95 else 0}f}" if fastest else "-",
            "times": ", ".join(f"{x.case.backend} {COLUMNS['time'].show(x)}" for x in group),
        }


def point_frame(shown: Sequence[Point], names: Sequence[str]) -> pd.DataFrame:
    """Return a row per point: its numbers, and the texts of the named columns for its tooltip."""
    rows: list[dict[str, Any]] = []
    several = len({run.label for run, _ in shown}) > 1
    unflagged, flagged, unusable = STATES
    for run, line in shown:
        state = unusable if UNUSABLE & set(line.flags) else flagged if line.flags else unflagged
        limits = [r.limit for r in line.results if r.limit and line.fraction is not None]
        ends = (line.interval.low, line.interval.high) if line.interval else (None, None)
        row: dict[str, Any] = {
            "nbytes": line.case.nbytes,
            "seconds": line.seconds,
            "seconds_low": ends[0],
            "seconds_high": ends[1],
            "rate": line.busbw or None,
            "rate_low": _rate(line, ends[1]),
            "rate_high": _rate(line, ends[0]),
            "reference": sum(x.bytes_per_second for x in limits) / len(limits) if limits else None,
            "source": limits[0].source if limits else None,
            "backend": line.case.backend,
            "run": run.label,
            "row": f"{line.case.backend} {run.label}" if several else line.case.backend,
            "state": state,
        }
        texts = {name: COLUMNS[name].show(line) for name in names}
        rows.append({**row, **{f"{name}_": text for name, text in texts.items()}})
    frame: pd.DataFrame = pd.DataFrame(rows)
    return frame


def _rate(line: Line, seconds: float | None) -> float | None:
    """Return the busbw of a call that takes so many seconds."""
    return seconds and line.busbw and line.seconds and line.busbw * line.seconds / seconds


def over_sizes(data: pd.DataFrame, value: str, names: Sequence[str]) -> Lines | Bars:
    """Return the chart of a column of `point_frame`, its interval and its limit: along sizes, or in
    a row for each backend if there is one size.

    value: "seconds" or "rate". names: the columns of the tooltip.
    """
    limits = {"source": "limit"} if value == "rate" else {}
    runs = {"run": "run"} if data["run"].nunique() > 1 else {}
    tips = {**runs, **{f"{name}_": COLUMNS[name].heading for name in names}, **limits}
    data = data.rename(columns={f"{value}_low": "low", f"{value}_high": "high"})
    columns = ["nbytes", "backend", "row", "state", value, "low", "high", *tips]
    data = data.loc[data[value] > 0, [*columns, *(["reference"] if limits else [])]]
    if data["nbytes"].nunique() == 1:
        return Bars(data=data, x=AXES[value], tips=tips, dots=True, shape="state", shapes=STATES)
    return Lines(
        data=data[data["nbytes"] > 0].drop(columns="row"),  # the axis is logarithmic
        x=Axis("nbytes", "message size", theme.SIZE_LABELS, log=True),
        y=AXES[value],
        tips=tips,
        dash="run" if runs else "",
        detail=tuple(runs),
        shape="state",
        shapes=STATES,
    )
