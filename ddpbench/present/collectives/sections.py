"""Collectives: a table per operation, charts of time and bandwidth, fits, limits, skipped cases.

The tooltips of the charts show the texts of the table's columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ddpbench.analysis import fit, lines
from ddpbench.analysis.fit import Estimate, Fit
from ddpbench.analysis.flags import UNUSABLE
from ddpbench.analysis.lines import Line
from ddpbench.catalog.sizes import readable
from ddpbench.present import theme
from ddpbench.present.charts.kinds import Axis, Lines
from ddpbench.present.collectives.columns import COLUMNS
from ddpbench.present.columns import (
    Column,
    choose_columns,
    explain,
    format_number,
    title_parts,
)
from ddpbench.present.document import (
    NO_VALUES,
    Chart,
    Kind,
    ReportRun,
    Section,
    make_titles,
    plain_name,
    show_rows,
)
from ddpbench.records.table import Table, TableColumn

BANDWIDTH = (
    "busbw = size / time × bus factor of nccl-tests. Dotted: the limit of the links, if it is "
    "known; its source is below the tables."
)
TOOLTIPS = {
    "seconds": ("size", "backend", "time", "interval", "faster", "p99", "skew", "launch", "check"),
    "rate": ("size", "backend", "busbw", "limit", "check"),
}
Point = tuple[ReportRun, Line]
AXES = {
    "seconds": Axis("time of a call", theme.TIME_LABELS, log=True),
    "rate": Axis("busbw", theme.RATE_LABELS, log=True),
}


def build_sections(
    runs: Sequence[ReportRun],
    wanted: tuple[str, ...] | None = None,
    *,
    drawn: bool = False,
    fitted: bool = True,
) -> Iterator[Section]:
    """Yield the tables of all operations with their legend, and why cases were skipped.

    wanted: columns. drawn: with charts. fitted: whether the fits of an ended run are below its
    tables.
    """
    points = [(run, line) for run in runs for line in run.lines]
    groups: dict[Kind, list[Point]] = {}
    for run, line in points:
        if line.seconds is not None:
            groups.setdefault(title_parts(line.case), []).append((run, line))
    shown = [line for group in groups.values() for _, line in group]
    columns = choose_columns(wanted, COLUMNS, shown)
    names, fits = make_titles(groups), list[Fit]()
    rows: list[tuple[Chart, ...]] = []
    for kind, group in groups.items():
        own = [each for run in runs if fitted for each in _fit(run, group)]
        fits += own
        table = _tabulate(kind, group, columns, map(_format_fit, own))
        if drawn:
            rows.append(_draw(kind, names[kind], group, table))
        else:
            grouped = table.columns[0].heading == "size"
            rows.append((Chart("", "", "", table, grouped=grouped),))
    if rows:
        legend = tuple(_explain(shown, columns, fits))
        yield Section("collectives", "Collectives", rows=tuple(rows), legend=legend)
    if skipped := tuple(_explain_skipped(line for _, line in points)):
        yield Section("skipped", "Skipped cases", lines=skipped)


def _tabulate(
    kind: Kind, group: Sequence[Point], columns: Sequence[Column[Line]], fits: Iterable[str]
) -> Table:
    """Return a row per line; the title states what the lines share."""
    operation, form, *others = kind
    title = "  ".join(filter(None, (operation, f"({form})" if form else "", *others)))
    table = show_rows(title, columns, [line for _, line in group], fits)
    if len({run.label for run, _ in group}) < 2:
        return table
    labelled = zip(group, table.rows, strict=True)
    rows = tuple((run.label, *row) for (run, _), row in labelled)
    return replace(table, columns=(TableColumn("run", "left"), *table.columns), rows=rows)


def _draw(kind: Kind, title: str, group: Sequence[Point], table: Table) -> tuple[Chart, ...]:
    """Return the charts of time, which has the table, and of bandwidth, if there is any."""
    name, operation = plain_name(title), kind[0]
    timed = [point for point in group if point[1].seconds]  # 0: too short for a device's clock
    caption = f"{_describe_times(timed)} {', '.join(filter(None, kind[1:]))}."
    seconds, rate = _draw_sizes(timed, "seconds"), _draw_sizes(timed, "rate")
    time = Chart(f"{name}-time", f"{title}: time", caption, table, seconds, operation)
    if rate is None:
        return (time,)
    words = f"{name}-bandwidth", f"{title}: bandwidth", BANDWIDTH, NO_VALUES
    return time, Chart(*words, rate, operation)


def _describe_times(timed: Sequence[Point]) -> str:
    """Return the sentences of a caption on the statistic."""
    ranks = {"max": "the slowest rank", "mean": "all ranks"}
    names = dict.fromkeys(
        f"{case.statistic} over calls, of {ranks.get(case.rank_reduction, case.rank_reduction)}"
        for case in (line.case for _, line in timed)
    )
    bars = "; bars: 95 % interval" if any(line.interval for _, line in timed) else ""
    return f"Time of one call: {' or '.join(names)}{bars}. Axes are logarithmic."


def _draw_sizes(shown: Sequence[Point], value: str) -> Lines | None:
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


def _fit(run: ReportRun, group: Sequence[Point]) -> list[Fit]:
    if run.run.state not in ("complete", "interrupted"):
        return []
    return fit.fits([line for other, line in group if other is run])


def _format_fit(one: Fit) -> str:
    """Format latency and bandwidth of one backend: "fit gloo: 4 B to 4 MiB: α 4.900 µs (…), …"."""
    parts = []
    for segment in one.segments:
        figures = [
            f"α {_format_estimate(segment.latency, 1e6, ' µs')}" if segment.latency else "",
            f"1/β {_format_estimate(segment.rate, 1e-9, ' GB/s')}" if segment.rate else "",
            f"n½ {_format_estimate(segment.half, 2**-10, ' KiB')}" if segment.half else "",
        ]
        sizes = f"{readable(segment.first)} to {readable(segment.last)}"
        parts.append(f"{sizes}: {', '.join(filter(None, figures))}")
    return f"fit {one.case.backend}: {'; '.join(parts)}"


def _format_estimate(estimate: Estimate, scale: float, unit: str) -> str:
    """Format a figure and its interval: "4.900 µs (4.700 to 5.200)"."""
    value, low, high = (
        format_number(v * scale) for v in (estimate.value, estimate.low, estimate.high)
    )
    return f"{value}{unit} ({low} to {high})"


def _explain_skipped(every: Iterable[Line]) -> list[str]:
    """Explain why cases have no row; one line per case and reason, with its sizes."""
    reasons: dict[tuple[str, str, str], list[int]] = {}
    for line in every:
        if line.reason is not None:
            case = line.case
            name = " ".join(filter(None, (case.called, case.dtype, case.reduce_op)))
            reasons.setdefault((name, case.backend, line.reason), []).append(case.nbytes)
    return [
        f"skipped {name} on {backend}, {readable(sizes[0])}"
        + (f" … {readable(sizes[-1])}" if len(sizes) > 1 else "")
        + f": {reason}"
        for (name, backend, reason), sizes in reasons.items()
    ]


def _explain(
    shown: Sequence[Line], columns: Sequence[Column[Line]], fits: Sequence[Fit]
) -> Iterator[str]:
    """Yield the legend of all tables."""
    yield from explain(shown, columns, lines.FLAGS)
    if COLUMNS["limit"] in columns:
        yield from _limits(shown)
    if fits:
        over = " or ".join(dict.fromkeys(f"{one.launches} launches" for one in fits))
        yield (
            f"fit: time = α + βn for messages of n bytes, with 95 % intervals over {over}; 1/β: "
            "asymptotic algbw; n½: size at which α is half the time; figures that the times do not "
            "determine are left out"
        )


def _limits(shown: Sequence[Line]) -> Iterator[str]:
    """Yield the rates behind the column `limit`: one line per backend, source and group."""
    rates: dict[tuple[str, str, str], list[float]] = {}
    operations: dict[tuple[str, str, str], dict[str, None]] = {}
    for line in shown:
        for limit in (result.limit for result in line.results):
            if limit is not None and line.fraction is not None:
                key = (line.case.backend, limit.source, line.case.group)
                rates.setdefault(key, []).append(limit.bytes_per_second / 1e9)
                operations.setdefault(key, {})[line.case.called] = None
    for key, values in rates.items():
        backend, source, _ = key
        low, high = format_number(min(values)), format_number(max(values))
        span = low if low == high else f"{low} … {high} (by size)"
        names = ", ".join(operations[key])
        yield f"limit on {backend} of {names}: busbw as a share of {span} GB/s, {source}"
    # A hard limit shows that ddpbench looked for limits.
    looked = (r for line in shown for r in line.results if r.hard_limit and r.case.nbytes)
    if any(result.limit is None and result.case.world_size > 1 for result in looked):
        yield "limit -: no rate of these links is known here; give one with --peak-bandwidth GB/S"
