"""The charts of a watched job's ranks, collectives and links."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import altair as alt
import pandas as pd

from ddpbench.records.schema import Run
from ddpbench.records.table import Table, TableColumn
from ddpbench.records.watched import COLUMNS, Watched, WatchedCollective, WatchedRank
from ddpbench.report import theme
from ddpbench.report.chart import Chart
from ddpbench.report.charts.watch_over_time import milliseconds, part_scale
from ddpbench.report.charts.watch_timeline import LATE_CODES, find_named
from ddpbench.report.sections.links import MOST_VALUES, build_matrix, draw_matrix

ROW, LEAST_HEIGHT = 22, 60  # pixels
PARTS = alt.Legend(title=None, columns=3, values=list(COLUMNS))
ROOM = 1.5  # length of an axis, in lengths of its longest bar: room for a text
MOST_BARS = 12  # collectives
OWN = COLUMNS[:-1]
SHOWN_SHARE = 0.01  # of the longest wait: shorter ones have no bar


def draw_ranks(run: Run, watched: Watched) -> Iterator[Chart]:
    """Yield where each rank's step goes, the most own time first."""
    ranks = _sort(watched)
    if len(ranks) < 2:
        return
    names = _name(watched, ranks)
    marked = find_named(run)
    longest = max(sum(_parts(rank)) for rank in ranks)
    rows = [
        {
            "rank": names[rank.rank], "part": part, "seconds": seconds, "order": i,
            "text": milliseconds(seconds), "own": milliseconds(_own(rank)), "steps": rank.steps,
        }
        for rank in ranks
        for i, (part, seconds) in enumerate(zip(COLUMNS, _parts(rank), strict=True))
    ]  # fmt: skip
    y = alt.Y("rank:N", title=None, sort=list(names.values()), axis=alt.Axis(labelLimit=110))
    bars = (
        alt.Chart(pd.DataFrame(rows))
        .mark_bar(size=14)
        .encode(
            x=alt.X(
                "seconds:Q",
                title="time of a step",
                axis=alt.Axis(labelExpr=theme.SIGNED_TIME_LABELS, tickCount=5),
                scale=alt.Scale(domain=[0, longest * (ROOM if marked else 1)], nice=False),
            ),
            y=y,
            color=alt.Color("part:N", scale=part_scale(), legend=PARTS),
            order="order:Q",
            tooltip=[
                alt.Tooltip("rank:N", title="rank"),
                alt.Tooltip("part:N", title="part"),
                alt.Tooltip("text:N", title=_statistic(ranks).lower()),
                alt.Tooltip("own:N", title="own time"),
                alt.Tooltip("steps:Q", title="steps"),
            ],
        )
    )
    late = [
        {"rank": names[rank.rank], "seconds": sum(_parts(rank)), "text": marked[rank.rank]}
        for rank in ranks
        if rank.rank in marked
    ]
    layers: list[alt.Chart] = [bars]
    if late:
        text = alt.Chart(pd.DataFrame(late)).mark_text(align="left", dx=5, fontWeight=600)
        layers.append(text.encode(x="seconds:Q", y=y, text="text:N"))
    yield Chart(
        "watch-ranks",
        "Ranks",
        f"{_statistic(ranks)} of each part of a step, the rank with the most own time first. The "
        f"straggler has the most own time and is blocked least.{_count(watched, ranks)}",
        alt.layer(*layers, height=max(LEAST_HEIGHT, ROW * len(ranks))).to_dict(),
        Table(
            "ranks",
            (
                TableColumn("rank"), TableColumn("host", "left"), TableColumn("own ms"),
                *(TableColumn(f"{part} ms") for part in COLUMNS), TableColumn("finding", "left"),
            ),
            tuple(
                (
                    rank.rank, rank.host, _own(rank) * 1e3, *(s * 1e3 for s in _parts(rank)),
                    marked.get(rank.rank, ""),
                )
                for rank in ranks
            ),
        ),
    )  # fmt: skip


def draw_extra(run: Run, watched: Watched) -> Iterator[Chart]:
    """Yield how much longer each phase takes each rank than the median rank: a heat map."""
    ranks = _sort(watched)
    extra = {rank.rank: rank.extra_seconds for rank in ranks if rank.extra_seconds}
    if len(extra) < 2:
        return
    names = _name(watched, ranks)
    marked = {
        (finding.place.get("rank"), finding.place.get("phase"))
        for finding in run.findings
        if finding.code in LATE_CODES
    }
    most = max(1e-9, *(value for values in extra.values() for value in values))
    rows = [
        {
            "rank": names[rank], "part": part, "seconds": max(value, 0.0),
            "text": _signed(value), "tip": f"{_signed(value)} ms",
            "beyond": value > most / 2, "marked": (rank, part) in marked,
        }
        for rank, values in extra.items()
        for part, value in zip(OWN, values, strict=True)
    ]  # fmt: skip
    base = alt.Chart(pd.DataFrame(rows)).encode(
        x=alt.X("part:N", title=None, sort=list(OWN), axis=alt.Axis(labelAngle=0, orient="top")),
        y=alt.Y("rank:N", title=None, sort=list(names.values()), axis=alt.Axis(labelLimit=110)),
        tooltip=[
            alt.Tooltip("rank:N", title="rank"),
            alt.Tooltip("part:N", title="part"),
            alt.Tooltip("tip:N", title="beyond the others"),
        ],
    )
    color = alt.Color("seconds:Q", scale=alt.Scale(domain=[0, most]), legend=None)
    layers = [base.mark_rect().encode(color=color)]
    if len(ranks) <= MOST_VALUES:
        for style, chosen in (("on-low", "!datum.beyond"), ("on-high", "datum.beyond")):
            text = base.mark_text(style=style, fontSize=11).encode(text="text:N")
            layers.append(text.transform_filter(chosen))
    if any(row["marked"] for row in rows):
        layers.append(base.mark_rect(style="marked").transform_filter("datum.marked"))
    yield Chart(
        "watch-extra",
        "Extra time of each rank",
        "How many ms longer each phase takes than in the other ranks, mean over the steps."
        + (" Outlined: named by a finding." if marked else ""),
        alt.layer(*layers, height=max(LEAST_HEIGHT, ROW * len(ranks))).to_dict(),
        Table(
            "extra time of each rank",
            (TableColumn("rank"), *(TableColumn(f"{part} ms") for part in OWN)),
            tuple((rank, *(v * 1e3 for v in values)) for rank, values in extra.items()),
        ),
    )


def draw_collectives(watched: Watched) -> Iterator[Chart]:
    """Yield how long the earliest rank waits for the latest in each kind of call."""
    rows = sorted(watched.collectives, key=lambda row: -_wait(watched, row))
    if not rows:
        return
    what = "step" if watched.steps else "call"
    longest = _wait(watched, rows[0])
    bars = [row for row in rows[:MOST_BARS] if _wait(watched, row) >= SHOWN_SHARE * longest]
    several = len({row.group for row in bars}) > 1
    data = pd.DataFrame(
        [
            {
                "name": _describe(row, several), "seconds": _wait(watched, row), "last": _last(row),
                "wait": milliseconds(row.wait_seconds), "wire": milliseconds(row.wire_seconds),
                "group": row.group, "calls": f"{row.calls:.3g}",
            }
            for row in bars
        ]
    )  # fmt: skip
    names = list(data["name"])
    base = alt.Chart(data).encode(
        x=alt.X(
            "seconds:Q",
            title=f"wait for the last rank per {what}",
            axis=alt.Axis(labelExpr=theme.SIGNED_TIME_LABELS, tickCount=6),
            scale=alt.Scale(domain=[0, longest * ROOM or 1.0], nice=False),
        ),
        y=alt.Y("name:N", title=None, sort=names, axis=alt.Axis(labelLimit=150)),
        tooltip=[
            alt.Tooltip("name:N", title="call"),
            alt.Tooltip("group:N", title="group"),
            alt.Tooltip("calls:N", title="calls per step" if watched.steps else "calls"),
            alt.Tooltip("wait:N", title="wait per call"),
            alt.Tooltip("wire:N", title="transfer"),
            alt.Tooltip("last:N", title="last"),
        ],
    )
    marks = base.transform_calculate(part="'blocked'").mark_bar(size=14)
    text = base.mark_text(align="left", dx=5, fontSize=11).encode(text="last:N")
    yield Chart(
        "watch-collectives",
        "Waits in collectives",
        f"How long the earliest rank waits for the latest, median over calls, per {what}; beside "
        "each bar the rank that is last most often, in which share of the calls.",
        alt.layer(
            marks.encode(color=alt.Color("part:N", scale=part_scale(), legend=None)),
            text,
            height=max(LEAST_HEIGHT, ROW * len(bars)),
        ).to_dict(),
        _tabulate(rows, "calls per step" if watched.steps else "calls"),
    )


def _tabulate(rows: Sequence[WatchedCollective], count: str) -> Table:
    return Table(
        "collectives",
        (
            TableColumn("group", "left"), TableColumn("ranks"), TableColumn("operation", "left"),
            TableColumn("kB"), TableColumn(count), TableColumn("wait ms"), TableColumn("wire ms"),
            TableColumn("last rank", "left"),
        ),
        tuple(
            (
                row.group, row.ranks, row.operation, row.nbytes / 1e3, row.calls,
                row.wait_seconds * 1e3,
                None if row.wire_seconds is None else row.wire_seconds * 1e3, _last(row) or None,
            )
            for row in rows
        ),
    )  # fmt: skip


def draw_links(run: Run, watched: Watched) -> Iterator[Chart]:
    """Yield the rates of the links between hosts."""
    hosts = [host for host in watched.hosts if any(host in (x.host, x.peer) for x in watched.links)]
    slow = {
        (finding.place.get("host"), finding.place.get("peer"))
        for finding in run.findings
        if finding.code == "slow-link"
    }
    known = [
        {
            "from": link.host, "to": link.peer,
            "value": float(f"{link.bytes_per_second / 1e6:.3g}"),
            "slow": (link.host, link.peer) in slow, "interface": link.interface,
            "carried": f"{link.nbytes / 1e6:.4g} MB",
            "round trip": "-" if link.rtt_seconds is None else f"{link.rtt_seconds * 1e6:.4g} µs",
            "retransmitted": str(link.retransmitted),
        }
        for link in watched.links
        if link.bytes_per_second and {link.host, link.peer} <= set(hosts)
    ]  # fmt: skip
    if len(hosts) < 2 or not known:
        return
    cells = pd.DataFrame(known)
    yield Chart(
        "watch-links",
        "Links of the job",
        "Rate of the job's connections from host to host while data is on its way, in MB/s; more "
        f"is better.{' Outlined: slow.' if cells['slow'].any() else ''}",
        draw_matrix(cells, hosts, "host", "MB/s"),
        build_matrix(cells, hosts, "host", "MB/s"),
    )


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


def _wait(watched: Watched, row: WatchedCollective) -> float:
    return row.wait_seconds * (row.calls if watched.steps else 1)


def _describe(row: WatchedCollective, several_groups: bool) -> str:
    size = f"{row.nbytes / 1e3:.4g} kB" if row.nbytes < 1e6 else f"{row.nbytes / 1e6:.4g} MB"
    return f"{row.operation} {size}" + (f", {row.group}" if several_groups else "")


def _last(row: WatchedCollective) -> str:
    return "" if row.last_rank is None else f"rank {row.last_rank} ({row.last_share:.0%})"
