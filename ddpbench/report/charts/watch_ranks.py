"""The charts of a watched job's ranks: where their steps go, and what takes them longer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from ddpbench.records.schema import Run
from ddpbench.records.table import Table, TableColumn
from ddpbench.records.watched import COLUMNS, Watched, WatchedRank
from ddpbench.report import theme
from ddpbench.report.chart import Chart
from ddpbench.report.charts.matrix import MOST_VALUES, write_values
from ddpbench.report.charts.watch_over_time import milliseconds, part_scale
from ddpbench.report.charts.watch_timeline import LATE_CODES, find_named

ROW, LEAST_HEIGHT = 22, 60  # pixels
PARTS = alt.Legend(title=None, columns=3, values=list(COLUMNS))
ROOM = 1.5  # length of an axis, in lengths of its longest bar: room for a text
OWN = COLUMNS[:-1]


def draw_ranks(run: Run, watched: Watched) -> Iterator[Chart]:
    """Yield where each rank's step goes, the most own time first."""
    ranks = _sort(watched)
    if len(ranks) < 2:
        return
    marked = find_named(run)
    yield Chart(
        "watch-ranks",
        "Ranks",
        f"{_statistic(ranks)} of each part of a step, the rank with the most own time first. The "
        f"straggler has the most own time and is blocked least.{_count(watched, ranks)}",
        _stack_parts(ranks, _name(watched, ranks), marked),
        Table(
            "ranks",
            (
                TableColumn("rank"),
                TableColumn("host", "left"),
                TableColumn("own ms"),
                *_part_columns(COLUMNS),
                TableColumn("finding", "left"),
            ),
            tuple(
                (r.rank, r.host, *_ms((_own(r), *_parts(r))), marked.get(r.rank, "")) for r in ranks
            ),
        ),
    )


def _stack_parts(
    ranks: Sequence[WatchedRank], names: Mapping[int, str], marked: Mapping[int, str]
) -> dict[str, Any]:
    """Return a bar for each rank; names, marked: of a rank, its name and its finding's code."""
    longest = max(sum(_parts(rank)) for rank in ranks)
    rows = [
        {
            "rank": names[rank.rank],
            "part": part,
            "seconds": seconds,
            "order": i,
            "text": milliseconds(seconds),
            "own": milliseconds(_own(rank)),
            "steps": rank.steps,
        }
        for rank in ranks
        for i, (part, seconds) in enumerate(zip(COLUMNS, _parts(rank), strict=True))
    ]
    x = alt.X(
        "seconds:Q",
        title="time of a step",
        axis=alt.Axis(labelExpr=theme.SIGNED_TIME_LABELS, tickCount=5),
        scale=alt.Scale(domain=[0, longest * (ROOM if marked else 1)], nice=False),
    )
    tips = [
        alt.Tooltip("rank:N", title="rank"),
        alt.Tooltip("part:N", title="part"),
        alt.Tooltip("text:N", title=_statistic(ranks).lower()),
        alt.Tooltip("own:N", title="own time"),
        alt.Tooltip("steps:Q", title="steps"),
    ]
    color = alt.Color("part:N", scale=part_scale(), legend=PARTS)
    bars = alt.Chart(pd.DataFrame(rows)).mark_bar(size=14)
    layers = [bars.encode(x=x, y=_rank_axis(names), color=color, order="order:Q", tooltip=tips)]
    ends = {rank.rank: sum(_parts(rank)) for rank in ranks if rank.rank in marked}
    late = [{"rank": names[r], "seconds": end, "text": marked[r]} for r, end in ends.items()]
    if late:
        text = alt.Chart(pd.DataFrame(late)).mark_text(align="left", dx=5, fontWeight=600)
        layers.append(text.encode(x="seconds:Q", y=_rank_axis(names), text="text:N"))
    return layer_rows(layers, len(ranks))


def draw_extra(run: Run, watched: Watched) -> Iterator[Chart]:
    """Yield how much longer each phase takes each rank than the median rank: a heat map."""
    ranks = _sort(watched)
    extra = {rank.rank: rank.extra_seconds for rank in ranks if rank.extra_seconds}
    if len(extra) < 2:
        return
    marked = {
        (finding.place.get("rank"), finding.place.get("phase"))
        for finding in run.findings
        if finding.code in LATE_CODES
    }
    yield Chart(
        "watch-extra",
        "Extra time of each rank",
        "How many ms longer each phase takes than in the other ranks, mean over the steps."
        + (" Outlined: named by a finding." if marked else ""),
        _map_extra(extra, _name(watched, ranks), marked),
        Table(
            "extra time of each rank",
            (TableColumn("rank"), *_part_columns(OWN)),
            tuple((rank, *_ms(values)) for rank, values in extra.items()),
        ),
    )


def _map_extra(
    extra: Mapping[int, Sequence[float]],
    names: Mapping[int, str],
    marked: Collection[tuple[object, object]],
) -> dict[str, Any]:
    """Return a row for each rank, a column for each phase; marked: ranks with phases."""
    most = max(1e-9, *(value for values in extra.values() for value in values))
    rows = [
        {
            "rank": names[rank],
            "part": part,
            "seconds": max(value, 0.0),
            "text": _signed(value),
            "tip": f"{_signed(value)} ms",
            "beyond": value > most / 2,
            "marked": (rank, part) in marked,
        }
        for rank, values in extra.items()
        for part, value in zip(OWN, values, strict=True)
    ]
    base = alt.Chart(pd.DataFrame(rows)).encode(
        x=alt.X("part:N", title=None, sort=list(OWN), axis=alt.Axis(labelAngle=0, orient="top")),
        y=_rank_axis(names),
        tooltip=[
            alt.Tooltip("rank:N", title="rank"),
            alt.Tooltip("part:N", title="part"),
            alt.Tooltip("tip:N", title="beyond the others"),
        ],
    )
    color = alt.Color("seconds:Q", scale=alt.Scale(domain=[0, most]), legend=None)
    layers = [base.mark_rect().encode(color=color)]
    if len(names) <= MOST_VALUES:
        layers += write_values(base, "text")
    if any(row["marked"] for row in rows):
        layers.append(base.mark_rect(style="marked").transform_filter("datum.marked"))
    return layer_rows(layers, len(names))


def _rank_axis(names: Mapping[int, str]) -> alt.Y:
    return alt.Y("rank:N", title=None, sort=list(names.values()), axis=alt.Axis(labelLimit=110))


def layer_rows(layers: Sequence[alt.Chart], rows: int) -> dict[str, Any]:
    """Return layers that have so many rows of bars or cells."""
    spec: dict[str, Any] = alt.layer(*layers, height=max(LEAST_HEIGHT, ROW * rows)).to_dict()
    return spec


def _part_columns(parts: Sequence[str]) -> list[TableColumn]:
    return [TableColumn(f"{part} ms") for part in parts]


def _ms(seconds: Iterable[float]) -> list[float]:
    return [value * 1e3 for value in seconds]


def _sort(watched: Watched) -> list[WatchedRank]:
    return sorted(watched.ranks, key=lambda rank: -_own(rank))


def _own(rank: WatchedRank) -> float:
    return sum(_parts(rank)[:-1])


def _parts(rank: WatchedRank) -> Sequence[float]:
    """Return the mean of each part, or the median in old runs."""
    return rank.mean_seconds or rank.seconds


def _statistic(ranks: Sequence[WatchedRank]) -> str:
    return "Mean" if ranks[0].mean_seconds else "Median"


def _name(watched: Watched, ranks: Sequence[WatchedRank]) -> dict[int, str]:
    several = len(watched.hosts) > 1
    return {r.rank: f"{r.rank} on {r.host}" if several else f"rank {r.rank}" for r in ranks}


def _count(watched: Watched, ranks: Sequence[WatchedRank]) -> str:
    count = sum(watched.hosts.values())
    return f" Shown: {len(ranks)} of {count} ranks." if len(ranks) < count else ""


def _signed(seconds: float) -> str:
    """Format milliseconds with their sign, to a hundredth or three digits."""
    return f"{seconds * 1e3:+.{2 if abs(seconds) < 1e-2 else 1}f}"
