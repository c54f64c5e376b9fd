"""Time and bandwidth of every operation over message sizes: backends and runs in one chart.

The charts and tables show the texts of the terminal's columns, so that both say the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import altair as alt
import pandas as pd

from ddpbench.analysis.flags import UNUSABLE
from ddpbench.analysis.lines import FLAGS, Line
from ddpbench.catalog.sizes import readable
from ddpbench.present import theme
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
HEIGHT = 260
STATES = {"no flag": "circle", "flagged": "diamond", "do not use": "cross"}  # of a point → shape
POINTS = "points"  # the dataset
LIMIT_DASH = [2, 3]
RATE_LABELS = (
    "datum.value >= 1e9 ? format(datum.value / 1e9, '~g') + ' GB/s' : datum.value >= 1e6 ? "
    "format(datum.value / 1e6, '~g') + ' MB/s' : format(datum.value / 1e3, '~g') + ' kB/s'"
)
AXES = {
    "seconds": {"title": "time of a call", "labels": theme.TIME_LABELS},
    "rate": {"title": "busbw", "labels": RATE_LABELS},
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
    rows = list(_compare_backends(run))
    if not any(row["backend"] for row in rows) or len({row["nbytes"] for row in rows}) < 2:
        return []
    headings = ("operation", "size", "fastest", "times as long", "median times in µs")
    cells = [
        (row["operation"], row["size"], row["backend"] or "-", row["ratio"], row["times"])
        for row in rows
    ]
    table = make_table("Fastest backend", headings, cells, left=headings)
    data = pd.DataFrame(row for row in rows if row["backend"])
    return [Chart("fastest", "Fastest backend", FASTEST, _draw_fastest(data), table)]


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
        yield {
            "operation": operation,
            "nbytes": nbytes,
            "size": readable(nbytes),
            "backend": fastest.case.backend if fastest else "",
            "ratio": f"{ratio:.{1 if ratio < 9.95 else 0}f}" if fastest else "-",
            "times": ", ".join(f"{x.case.backend} {COLUMNS['time'].show(x)}" for x in group),
        }


def _color(backends: Sequence[str]) -> alt.Color:
    """Return the colour of each backend, with a legend even if there is only one."""
    scale = theme.backend_colors(backends)
    present = [backend for backend in scale.domain if backend in backends]
    legend = alt.Legend(title=None, values=present, symbolOpacity=1)
    return alt.Color("backend:N", scale=scale, legend=legend)


def _draw_fastest(data: pd.DataFrame) -> dict[str, Any]:
    operations = list(dict.fromkeys(data["operation"]))
    base = alt.Chart(data).encode(
        x=theme.size_columns(),
        y=alt.Y("operation:N", title=None, sort=operations, axis=alt.Axis(ticks=False)),
    )
    cells = base.mark_rect(opacity=0.35).encode(
        color=_color(list(data["backend"])),
        tooltip=theme.tips(
            "operation", "size", backend="fastest", ratio="times as long", times="median µs"
        ),
    )
    numbers = base.mark_text(fontSize=11).encode(text="ratio:N")
    return theme.layered([cells, numbers], max(60, 26 * len(operations)))


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
            "limited": sum(x.bytes_per_second for x in limits) / len(limits) if limits else None,
            "source": limits[0].source if limits else None,
            "backend": line.case.backend,
            "run": run.label,
            "of": f"{line.case.backend} {run.label}" if several else line.case.backend,
            "state": state,
        }
        texts = {name: COLUMNS[name].show(line) for name in names} | {"flags": " ".join(line.flags)}
        rows.append({**row, **{f"{name}_": text for name, text in texts.items()}})
    frame: pd.DataFrame = pd.DataFrame(rows)
    return frame


def _rate(line: Line, seconds: float | None) -> float | None:
    """Return the busbw of a call that takes so many seconds."""
    return seconds and line.busbw and line.seconds and line.busbw * line.seconds / seconds


def over_sizes(data: pd.DataFrame, value: str, names: Sequence[str]) -> dict[str, Any]:
    """Return the chart of a column of `point_frame`, its interval and its limit.

    value: "seconds" or "rate". names: the columns of the tooltip.
    """
    several = data["run"].nunique() > 1
    columns = ["nbytes", "backend", "of", "state", value, f"{value}_low", f"{value}_high"]
    columns += ["run"] if several else []
    columns += [*(["limited", "source"] if value == "rate" else []), *(f"{n}_" for n in names)]
    data = data.loc[data[value] > 0, columns]
    if data["nbytes"].nunique() > 1:
        data = data[data["nbytes"] > 0].drop(columns="of")  # a logarithmic axis
    present = [state for state in STATES if state in set(data["state"])]
    shapes = alt.Scale(domain=present, range=[STATES[state] for state in present])
    legend = alt.Legend(title=None) if present != ["no flag"] else None
    shape = alt.Shape("state:N", scale=shapes, legend=legend)
    # Along sizes, or in a row per backend if there is one size.
    several_sizes = data["nbytes"].nunique() > 1
    along, to = ("y", "y2") if several_sizes else ("x", "x2")
    place = {"x": theme.size_axis()} if several_sizes else {"y": alt.Y("of:N", title=None)}
    values = {along: _log_channel(along, value, data[value])}
    solid = {"strokeDash": alt.value([1, 0])}
    base = _colored(data, several).encode(**place)
    layers: list[alt.Chart] = []
    if data[f"{value}_low"].notna().any():
        known = base.transform_filter(f"datum.{value}_low > 0")
        bars = known.mark_rule(opacity=0.55, strokeWidth=2)
        layers.append(bars.encode(**{along: f"{value}_low:Q", to: f"{value}_high:Q"}, **solid))
    if along == "y":
        layers.append(base.mark_line(strokeWidth=1.5).encode(**values))
    points = base.mark_point(filled=True, size=50, opacity=1)
    layers.append(
        points.encode(shape=shape, tooltip=_tooltip(data, names, several), **values, **solid)
    )
    if value == "rate" and data["limited"].notna().any():
        layers.insert(0, _limit(base, along, several))
    height = HEIGHT if along == "y" else 40 + 32 * data["of"].nunique()
    spec = theme.layered(layers, height)
    rows = data.astype(object).where(data.notna(), None).to_dict("records")
    return {**spec, "datasets": {POINTS: rows}}


def _colored(data: pd.DataFrame, several: bool) -> alt.Chart:
    """Return the chart of this data without a mark: its colours, and a dash per run."""
    backends = list(data["backend"])
    encodings: dict[str, Any] = {"color": _color(backends)}
    if several:
        runs = list(dict.fromkeys(data["run"]))
        encodings["strokeDash"] = alt.StrokeDash("run:N", sort=runs, title=None)
    # By name: altair would copy and hash the data of every layer.
    chart = alt.Chart(alt.NamedData(name=POINTS)).encode(**encodings)
    return theme.choose_backends(chart, backends)


def _log_channel(channel: str, field: str, values: pd.Series[float]) -> Any:
    """Return a logarithmic channel with ticks at decades, of few decades also at 2 and 5."""
    low, high = (math.floor(math.log10(end)) for end in (values.min(), values.max()))
    decades = 3 if channel == "y" else 2  # that have room for more labels
    steps = (1,) if high - low >= decades else (1, 2, 5)
    ticks = [step * 10.0**decade for decade in range(low - 1, high + 2) for step in steps]
    return {"x": alt.X, "y": alt.Y}[channel](
        f"{field}:Q",
        title=AXES[field]["title"],
        scale=alt.Scale(type="log"),
        axis=alt.Axis(labelExpr=AXES[field]["labels"], values=ticks),
    )


def _limit(base: alt.Chart, along: str, several: bool) -> alt.Chart:
    """Return each backend's limit: a dotted line, or of one size a mark."""
    known = base.transform_filter("datum.limited > 0")
    line = known.mark_line(opacity=0.8) if along == "y" else known.mark_tick(thickness=3, size=24)
    dash = {"strokeDash": alt.value(LIMIT_DASH)} if along == "y" else {}
    limit: alt.Chart = line.encode(
        **{along: "limited:Q"},
        **dash,
        tooltip=theme.tips("backend", source="limit"),
        **({"detail": "run:N"} if several else {}),
    )
    return limit


def _tooltip(data: pd.DataFrame, names: Sequence[str], several: bool) -> list[alt.Tooltip]:
    """Return the lines of a tooltip: columns of the table that hold anything."""
    known = [name for name in names if not data[f"{name}_"].isin(["-", ""]).all()]
    headings = {f"{name}_": COLUMNS[name].heading for name in known}
    return theme.tips(*(["run"] if several else []), **headings)
