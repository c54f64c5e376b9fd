"""Time and bandwidth of every operation over message sizes: backends and runs in one chart.

The charts and tables show the texts of the terminal's columns, so that both say the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from ddpbench.analysis.flags import UNUSABLE
from ddpbench.analysis.lines import FLAGS, Line
from ddpbench.catalog.sizes import readable
from ddpbench.present import theme
from ddpbench.present.charts.kinds import Axis, Bars, Lines, Matrix, visible
from ddpbench.present.collectives.columns import COLUMNS
from ddpbench.present.columns import (
    Column,
    digits,
    explain,
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
TIME = ("time", "interval", "faster", "p99", "skew", "launch", "check", "flags")
BANDWIDTH = ("algbw", "busbw", "limit", "check", "flags")
FASTEST = (
    "Colour: the backend whose 95 % interval lies below those of all others. Number: how many "
    "times as long the next backend takes. Empty: not measured, or none is clearly the fastest."
)
Point = tuple[ReportRun, Line]
STATES = {"no flag": "circle", "flagged": "diamond", "do not use": "cross"}  # of a point → shape
AXES = {
    "seconds": Axis("time of a call", theme.TIME_LABELS, log=True),
    "rate": Axis("busbw", theme.RATE_LABELS, log=True),
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
    time = Chart(
        f"{name}-time",
        f"{title}: time",
        f"{_statistic(shown)} {describe(of)}.",
        draw_sizes(shown, "seconds", ("size", "backend", *TIME)),
        _table(f"{title}: time", points, TIME, several=several),
        operation=of[0],
    )
    if not shown or not any(line.busbw for _, line in shown):
        return (time,)
    bandwidth = Chart(
        f"{name}-bandwidth",
        f"{title}: bandwidth",
        f"busbw = size / time × bus factor of nccl-tests, in GB/s (10⁹ bytes). {_limits(shown)}",
        draw_sizes(shown, "rate", ("size", "backend", *BANDWIDTH)),
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
    columns = [COLUMNS[name] for name in (chosen if measured else (*SAME, "flags"))]
    cells = [
        [*([run.label] if several else []), *(_cell(column, line) for column in columns)]
        for run, line in points
    ]
    run_column = [text_column("run", str)] if several else []
    return tabulate(title, [*run_column, *columns], cells, explain(measured, columns, FLAGS))


def _cell(column: Column[Line], line: Line) -> str:
    """Return a cell of a row; of a skipped case only what it is, and the reason."""
    if line.seconds is not None or column.name in SAME:
        return column.show(line)
    return f"skipped: {line.reason}" if column.name == "flags" else "-"


def fastest_charts(run: ReportRun) -> list[Chart]:
    """Return a chart of operations and sizes; none unless several backends share them."""
    data = pd.DataFrame(list(_compare_backends(run)))
    if data.empty or (data["fastest"] == "-").all() or data["size"].nunique() < 2:
        return []
    known = data[data["fastest"] != "-"]
    drawing = Matrix(
        data=known,
        column="size",
        row="operation",
        titles=("message size", None),
        ends=tuple(data.sort_values("_nbytes")["size"].unique()),
        color="fastest",
        order=tuple(theme.order_backends(known["fastest"])),
    )
    shown = data[visible(data)]
    rows = shown.itertuples(index=False, name=None)
    table = make_table("Fastest backend", shown.columns, rows, left=shown.columns)
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
        fastest = next((line for line in group if line.faster), None)
        ratio = (fastest.faster if fastest else None) or 0.0
        times = f"{ratio:.{1 if ratio < 9.95 else 0}f}" if fastest else "-"
        yield {
            "operation": operation,
            "size": readable(nbytes),
            "fastest": fastest.case.backend if fastest else "-",
            "times as long": times,
            "_text": times,
            "_nbytes": nbytes,
            "median times in µs": ", ".join(
                f"{x.case.backend} {COLUMNS['time'].show(x)}" for x in group
            ),
        }


def draw_sizes(shown: Sequence[Point], value: str, names: Sequence[str]) -> Lines | Bars | None:
    """Return the chart of time or bandwidth, its interval and its limit: along sizes, or in a row
    for each backend if there is one size. None: there is nothing to draw.

    value: "seconds" or "rate". names: columns of the tooltip.
    """
    several = len({run.label for run, _ in shown}) > 1
    data = pd.DataFrame([_point(*point, value, names) for point in shown])
    data = data[data["_y"].notna()] if len(data) else data
    if data.empty:
        return None
    data = data if several else data.drop(columns="run")
    look: dict[str, Any] = {"shape": "_state", "shapes": STATES}
    if data["_x"].nunique() == 1:
        rows = data["backend"].str.cat(data["run"], " ") if several else data["backend"]
        data = data.rename(columns={"_y": "_end"}).assign(_row=rows)
        return Bars(data=data, x=AXES[value], row="_row", dots=True, **look)
    return Lines(
        data=data[data["_x"] > 0],  # the axis is logarithmic
        x=Axis("message size", theme.SIZE_LABELS, log=True),
        y=AXES[value],
        dash="run" if several else "",
        detail=("run",) if several else (),
        **look,
    )


def _point(run: ReportRun, line: Line, value: str, names: Sequence[str]) -> dict[str, Any]:
    """Return a point of a chart: its numbers, and the texts of the named columns."""
    unflagged, flagged, unusable = STATES
    state = unusable if UNUSABLE & set(line.flags) else flagged if line.flags else unflagged
    ends = (line.interval.low, line.interval.high) if line.interval else (None, None)
    point: dict[str, Any] = {
        "run": run.label,
        **{COLUMNS[name].heading: COLUMNS[name].show(line) for name in names},
        **({"flags": " ".join(line.flags)} if "flags" in names else {}),
        "_x": line.case.nbytes,
        "_state": state,
    }
    if value == "seconds":
        return {**point, "_y": line.seconds, "_low": ends[0], "_high": ends[1]}
    limits = [r.limit for r in line.results if r.limit and line.fraction is not None]
    mean = sum(limit.bytes_per_second for limit in limits) / len(limits) if limits else None
    return {
        **point,
        "limit": limits[0].source if limits else None,
        "_y": line.busbw or None,
        "_low": _rate(line, ends[1]),
        "_high": _rate(line, ends[0]),
        "_reference": mean,
    }


def _rate(line: Line, seconds: float | None) -> float | None:
    """Return the busbw of a call that takes so many seconds."""
    return seconds and line.busbw and line.seconds and line.busbw * line.seconds / seconds
