"""A watched job: its step and its ranks over time, loss and load, collectives and links."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from ddpbench.present import theme
from ddpbench.present.charts.kinds import Axis, Bars, Colors, Heat, Matrix
from ddpbench.present.columns import scaled
from ddpbench.present.document import Chart, ReportRun, Section, make_table, side_by_side
from ddpbench.present.matrix import build_matrix, draw_matrix
from ddpbench.present.watch import over_time as watch_over_time
from ddpbench.present.watch.over_time import milliseconds
from ddpbench.present.watch.timeline import LATE_CODES, build_timeline, find_named
from ddpbench.records.schema import Finding, Run
from ddpbench.records.table import Table
from ddpbench.records.watched import COLUMNS, Watched, WatchedCollective, WatchedLink, WatchedRank

MOST_BARS = 12  # collectives
SHOWN_SHARE = 0.01  # of the longest wait: shorter ones have no bar
OWN = COLUMNS[:-1]


def section(runs: Sequence[ReportRun]) -> Section | None:
    made = {run.label: list(_rows(run.run)) for run in runs}
    watched = [run for run in runs if made[run.label]]
    if not watched:
        return None
    rows = tuple(made[watched[0].label])
    if len(watched) > 1:
        rows = side_by_side(watched, lambda run: [c for row in made[run.label] for c in row])
    return Section(
        "watch",
        "Watched job",
        "Where the time of a step went while the job ran. Seconds are of one step; a rank's own "
        "time is all but what it is blocked in collectives.",
        rows=rows,
    )


def _rows(run: Run) -> Iterator[tuple[Chart, ...]]:
    for result in run.steps:
        if (watched := result.watched) is None:
            continue
        if balance := tuple(draw_balance(watched)):
            yield balance
        if len(watched.moments) > 1:
            timeline = build_timeline(run, watched)
            for chart in watch_over_time.draw(timeline, result.case.backend):
                yield (chart,)
        ranks = (*draw_ranks(run, watched), *draw_extra(run, watched))
        collectives, links = tuple(draw_collectives(watched)), tuple(draw_links(run, watched))
        yield from filter(None, (ranks, collectives, links))


def draw_balance(watched: Watched) -> Iterator[Chart]:
    """Yield where all the time of the job went, and what the long steps did meanwhile."""
    if watched.balance is None:
        return
    parts = watched.balance.parts()
    wall = watched.balance.wall_seconds
    yield Chart(
        "watch-balance",
        "Total time",
        "Where the time of rank 0 went while it was watched. A long step takes at least 1.5 times "
        "as long as usual; its extra time is a part of its own.",
        _draw_bars([(name, seconds, f"{seconds / wall:.1%}") for name, seconds in parts.items()]),
        make_table(
            "total time",
            ["time", "s", "% of time"],
            [(name, seconds, seconds / wall * 100) for name, seconds in parts.items()],
            left=("time",),
        ),
    )
    if not watched.pauses:
        return
    who = ["all" if pause.rank is None else str(pause.rank) for pause in watched.pauses]
    yield Chart(
        "watch-pauses",
        "Pauses",
        "What the extra time of long steps costs per step, the average over all steps, by rank and "
        "line; beside each bar, number and median size of the pauses.",
        _draw_bars(
            [
                (
                    f"{rank}: {pause.line or pause.phase}",
                    pause.mean_seconds,
                    f"{pause.count} of {pause.seconds * 1e3:.3g} ms",
                )
                for rank, pause in zip(who, watched.pauses, strict=True)
            ]
        ),
        make_table(
            "pauses",
            [
                *("rank", "phase", "line", "waits at", "steps", "every", "first", "last"),
                *("ms", "longest ms", "ms per step"),
            ],
            [
                (
                    *(rank, p.phase, p.line, p.waits_at),
                    *(p.count, p.every or None, p.first_step, p.last_step),
                    *_ms((p.seconds, p.longest_seconds, p.mean_seconds)),
                )
                for rank, p in zip(who, watched.pauses, strict=True)
            ],
            left=("phase", "line", "waits at"),
        ),
    )


def _draw_bars(rows: Iterable[tuple[str, float, str]]) -> Bars:
    """Return a bar for each name, its seconds, and a text beside it."""
    data = pd.DataFrame(rows, columns=["row", "seconds", "text"])
    return Bars(
        data=data.assign(time=data["seconds"].map(milliseconds)),
        x=Axis("seconds", "time", theme.TIME_LABELS),
        tips={"row": "what", "time": "time", "text": "share"},
        colors=None,
    )


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


def _draw_waits(watched: Watched, rows: Sequence[WatchedCollective], what: str, count: str) -> Bars:
    """Return a bar for each of the longest waits; what: it is per; count: the name of calls."""
    longest = _wait(watched, rows[0])
    rows = [row for row in rows[:MOST_BARS] if _wait(watched, row) >= SHOWN_SHARE * longest]
    several = len({row.group for row in rows}) > 1
    values = [
        {
            "row": _describe(row, several),
            "seconds": _wait(watched, row),
            "part": "blocked",
            "text": _last(row),
            "wait": milliseconds(row.wait_seconds),
            "wire": milliseconds(row.wire_seconds),
            "group": row.group,
            "calls": f"{row.calls:.3g}",
        }
        for row in rows
    ]
    return Bars(
        data=pd.DataFrame(values),
        x=Axis("seconds", f"wait for the last rank per {what}", theme.TIME_LABELS),
        tips={
            "row": "call",
            "group": "group",
            "calls": count,
            "wait": "wait per call",
            "wire": "transfer",
            "text": "last",
        },
        colors=Colors("part", theme.PHASES),
    )


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
    cells = [[read(row) for read in columns.values()] for row in rows]
    return make_table("collectives", columns, cells, left=("group", "operation", "last rank"))


def draw_links(run: Run, watched: Watched) -> Iterator[Chart]:
    """Yield the rates of the links between hosts."""
    hosts = [host for host in watched.hosts if any(host in (x.host, x.peer) for x in watched.links)]
    known = [
        {
            "from": link.host,
            "to": link.peer,
            "value": float(f"{link.bytes_per_second / 1e6:.3g}"),
            "marked": "slow" if any(_is_named(link, found) for found in run.findings) else "",
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
        f"is better.{' Outlined: slow.' if cells['marked'].any() else ''}",
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


def draw_ranks(run: Run, watched: Watched) -> Iterator[Chart]:
    """Yield where each rank's step goes, the most own time first."""
    ranks = _sort(watched)
    if len(ranks) < 2:
        return
    marked, count = find_named(run), sum(watched.hosts.values())
    shown = f" Shown: {len(ranks)} of {count} ranks." if len(ranks) < count else ""
    yield Chart(
        "watch-ranks",
        "Ranks",
        "Mean of each part of a step, the rank with the most own time first. The "
        f"straggler has the most own time and is blocked least.{shown}",
        _stack_parts(ranks, _name(watched, ranks), marked),
        make_table(
            "ranks",
            ["rank", "host", *(f"{part} ms" for part in ("own", *COLUMNS)), "finding"],
            [
                (r.rank, r.host, *_ms((_own(r), *r.mean_seconds)), marked.get(r.rank, ""))
                for r in ranks
            ],
            left=("host", "finding"),
        ),
    )


def _stack_parts(
    ranks: Sequence[WatchedRank], names: Mapping[int, str], marked: Mapping[int, str]
) -> Bars:
    """Return a bar for each rank; names, marked: of a rank, its name and its finding's code."""
    rows = [
        {
            "row": names[rank.rank],
            "part": part,
            "seconds": seconds,
            "time": milliseconds(seconds),
            "own": milliseconds(_own(rank)),
            "steps": rank.steps,
            "text": marked.get(rank.rank, "") if part == COLUMNS[-1] else "",
        }
        for rank in ranks
        for part, seconds in zip(COLUMNS, rank.mean_seconds, strict=True)
    ]
    return Bars(
        data=pd.DataFrame(rows),
        x=Axis("seconds", "time of a step", theme.TIME_LABELS),
        tips={"row": "rank", "part": "part", "time": "mean", "own": "own time", "steps": "steps"},
        colors=Colors("part", theme.PHASES),
    )


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
    names = _name(watched, ranks)
    cells = [
        {
            "rank": names[rank],
            "part": part,
            "ms": max(value, 0.0) * 1e3,
            "text": _signed(value),
            "time": f"{_signed(value)} ms",
            "marked": "late" if (rank, part) in marked else "",
        }
        for rank, values in extra.items()
        for part, value in zip(OWN, values, strict=True)
    ]
    yield Chart(
        "watch-extra",
        "Extra time of each rank",
        "How many ms longer each phase takes than in the other ranks, mean over the steps."
        + (" Outlined: named by a finding." if marked else ""),
        Matrix(
            data=pd.DataFrame(cells),
            x=Axis("part"),
            y=Axis("rank"),
            tips={"rank": "rank", "part": "part", "time": "beyond the others"},
            colors=Heat("ms", "ms"),
        ),
        make_table(
            "extra time of each rank",
            ["rank", *(f"{part} ms" for part in OWN)],
            [(rank, *_ms(values)) for rank, values in extra.items()],
        ),
    )


def _ms(seconds: Iterable[float]) -> list[float]:
    return [value * 1e3 for value in seconds]


def _sort(watched: Watched) -> list[WatchedRank]:
    return sorted(watched.ranks, key=lambda rank: -_own(rank))


def _own(rank: WatchedRank) -> float:
    return sum(rank.mean_seconds[:-1])


def _name(watched: Watched, ranks: Sequence[WatchedRank]) -> dict[int, str]:
    several = len(watched.hosts) > 1
    return {r.rank: f"{r.rank} on {r.host}" if several else f"rank {r.rank}" for r in ranks}


def _signed(seconds: float) -> str:
    """Format milliseconds with their sign, to a hundredth or three digits."""
    return f"{seconds * 1e3:+.{2 if abs(seconds) < 1e-2 else 1}f}"
