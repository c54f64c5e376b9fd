"""The charts of a watched job's communication: waits in collectives, and links between hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import altair as alt
import pandas as pd

from ddpbench.records.schema import Finding, Run
from ddpbench.records.table import Table, TableColumn
from ddpbench.records.watched import Watched, WatchedCollective, WatchedLink
from ddpbench.render.column import scaled
from ddpbench.report import theme
from ddpbench.report.chart import Chart
from ddpbench.report.charts.matrix import build_matrix, draw_matrix
from ddpbench.report.charts.watch_over_time import milliseconds, part_scale
from ddpbench.report.charts.watch_ranks import ROOM, layer_rows

MOST_BARS = 12  # collectives
SHOWN_SHARE = 0.01  # of the longest wait: shorter ones have no bar


def draw_collectives(watched: Watched) -> Iterator[Chart]:
    """Yield how long the earliest rank waits for the latest in each kind of call."""
    rows = sorted(watched.collectives, key=lambda row: -_wait(watched, row))
    if not rows:
        return
    what = "step" if watched.steps else "call"
    count = "calls per step" if watched.steps else "calls"
    yield Chart(
        "watch-collectives",
        "Waits in collectives",
        f"How long the earliest rank waits for the latest, median over calls, per {what}; beside "
        "each bar the rank that is last most often, in which share of the calls.",
        _draw_waits(watched, rows, what, count),
        _tabulate(rows, count),
    )


def _draw_waits(
    watched: Watched, rows: Sequence[WatchedCollective], what: str, count: str
) -> dict[str, Any]:
    """Return a bar for each of the longest waits; what: it is per; count: the name of calls."""
    longest = _wait(watched, rows[0])
    rows = [row for row in rows[:MOST_BARS] if _wait(watched, row) >= SHOWN_SHARE * longest]
    several = len({row.group for row in rows}) > 1
    values = [
        {
            "name": _describe(row, several),
            "seconds": _wait(watched, row),
            "last": _last(row),
            "wait": milliseconds(row.wait_seconds),
            "wire": milliseconds(row.wire_seconds),
            "group": row.group,
            "calls": f"{row.calls:.3g}",
        }
        for row in rows
    ]
    base = alt.Chart(pd.DataFrame(values)).encode(
        x=alt.X(
            "seconds:Q",
            title=f"wait for the last rank per {what}",
            axis=alt.Axis(labelExpr=theme.SIGNED_TIME_LABELS, tickCount=6),
            scale=alt.Scale(domain=[0, longest * ROOM or 1.0], nice=False),
        ),
        y=alt.Y("name:N", title=None, sort=None, axis=alt.Axis(labelLimit=150)),
        tooltip=[
            alt.Tooltip("name:N", title="call"),
            alt.Tooltip("group:N", title="group"),
            alt.Tooltip("calls:N", title=count),
            alt.Tooltip("wait:N", title="wait per call"),
            alt.Tooltip("wire:N", title="transfer"),
            alt.Tooltip("last:N", title="last"),
        ],
    )
    color = alt.Color("part:N", scale=part_scale(), legend=None)
    marks = base.transform_calculate(part="'blocked'").mark_bar(size=14).encode(color=color)
    text = base.mark_text(align="left", dx=5, fontSize=11).encode(text="last:N")
    return layer_rows([marks, text], len(rows))


def _tabulate(rows: Sequence[WatchedCollective], count: str) -> Table:
    columns: dict[str, Callable[[WatchedCollective], Any]] = {
        "group": lambda row: row.group,
        "ranks": lambda row: row.ranks,
        "operation": lambda row: row.operation,
        "kB": lambda row: row.nbytes / 1e3,
        count: lambda row: row.calls,
        "wait ms": lambda row: row.wait_seconds * 1e3,
        "wire ms": lambda row: scaled(row.wire_seconds, 1e3),
        "last rank": lambda row: _last(row) or None,
    }
    left = ("group", "operation", "last rank")
    return Table(
        "collectives",
        tuple(TableColumn(name, "left" if name in left else "right") for name in columns),
        tuple(tuple(read(row) for read in columns.values()) for row in rows),
    )


def draw_links(run: Run, watched: Watched) -> Iterator[Chart]:
    """Yield the rates of the links between hosts."""
    hosts = [host for host in watched.hosts if any(host in (x.host, x.peer) for x in watched.links)]
    known = [
        {
            "from": link.host,
            "to": link.peer,
            "value": float(f"{link.bytes_per_second / 1e6:.3g}"),
            "slow": any(_is_named(link, finding) for finding in run.findings),
            "interface": link.interface,
            "carried": f"{link.nbytes / 1e6:.4g} MB",
            "round trip": "-" if link.rtt_seconds is None else f"{link.rtt_seconds * 1e6:.4g} µs",
            "retransmitted": str(link.retransmitted),
        }
        for link in watched.links
        if link.bytes_per_second and {link.host, link.peer} <= set(hosts)
    ]
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


def _is_named(link: WatchedLink, finding: Finding) -> bool:
    """Whether a finding names this link, or all links of one of its hosts in this direction."""
    ends = {"sends": [link.host], "receives": [link.peer]}
    named = [ends[way] for way in finding.place.get("bytes_per_second", ())]
    if finding.code == "slow-link":
        named.append([link.host, link.peer])
    return finding.place.get("hosts") in named


def _wait(watched: Watched, row: WatchedCollective) -> float:
    return row.wait_seconds * (row.calls if watched.steps else 1)


def _describe(row: WatchedCollective, several_groups: bool) -> str:
    size = f"{row.nbytes / 1e3:.4g} kB" if row.nbytes < 1e6 else f"{row.nbytes / 1e6:.4g} MB"
    return f"{row.operation} {size}" + (f", {row.group}" if several_groups else "")


def _last(row: WatchedCollective) -> str:
    return "" if row.last_rank is None else f"rank {row.last_rank} ({row.last_share:.0%})"
