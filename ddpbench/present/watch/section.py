"""A watched job: its step and its ranks over time, loss and load, collectives and links."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from ddpbench.present import theme
from ddpbench.present.charts.kinds import Axis, Bars, Matrix
from ddpbench.present.columns import digits
from ddpbench.present.document import (
    Chart,
    ReportRun,
    Section,
    draw_chart,
    make_table,
    side_by_side,
)
from ddpbench.present.matrix import draw_matrix
from ddpbench.present.watch import over_time as watch_over_time
from ddpbench.present.watch.over_time import milliseconds
from ddpbench.present.watch.timeline import LATE_CODES, build_timeline, find_named
from ddpbench.records.schema import Finding, Run
from ddpbench.records.watched import COLUMNS, Watched, WatchedCollective, WatchedLink, WatchedRank

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
    wall = watched.balance.wall_seconds
    parts = [
        {
            "time": name,
            "_end": seconds,
            "seconds": digits(seconds),
            "share": f"{seconds / wall:.1%}",
            "_text": f"{seconds / wall:.1%}",
        }
        for name, seconds in watched.balance.parts().items()
    ]
    caption = (
        "Where the time of rank 0 went while it was watched. A long step takes at least 1.5 times "
        "as long as usual; its extra time is a part of its own."
    )
    drawing = _draw_bars(parts, "time", "time")
    yield draw_chart("watch-balance", "Total time", caption, drawing)
    pauses = []
    for pause in watched.pauses:
        rank = "all" if pause.rank is None else str(pause.rank)
        pauses.append(
            {
                "_row": f"{rank}: {pause.line or pause.phase}",
                "_end": pause.mean_seconds,
                "_text": f"{pause.count} of {pause.seconds * 1e3:.3g} ms",
                "rank": rank,
                "phase": pause.phase,
                "line": pause.line,
                "waits at": pause.waits_at,
                "steps": pause.count,
                "every": pause.every or None,
                "first": pause.first_step,
                "last": pause.last_step,
                "median": milliseconds(pause.seconds),
                "longest": milliseconds(pause.longest_seconds),
                "per step": milliseconds(pause.mean_seconds),
            }
        )
    if pauses:
        caption = (
            "What the extra time of long steps costs per step, the average over all steps, by rank "
            "and line; beside each bar, number and median size of the pauses."
        )
        drawing = _draw_bars(pauses, "_row", "time")
        yield draw_chart("watch-pauses", "Pauses", caption, drawing)


def _draw_bars(rows: Sequence[Mapping[str, Any]], row: str, title: str, color: str = "") -> Bars:
    """Return bars of seconds; row, color: columns of their names and colours."""
    x = Axis(title, theme.TIME_LABELS)
    return Bars(data=pd.DataFrame(rows), x=x, row=row, color=color, order=theme.PHASES)


def draw_collectives(watched: Watched) -> Iterator[Chart]:
    """Yield how long the earliest rank waits for the latest in each kind of call."""
    what = "step" if watched.steps else "call"
    several = len({row.group for row in watched.collectives}) > 1
    rows: list[dict[str, Any]] = [
        {
            "group": row.group,
            "ranks": row.ranks,
            "call": _describe(row),
            "calls per step" if watched.steps else "calls": f"{row.calls:.3g}",
            "wait per call": milliseconds(row.wait_seconds),
            "transfer": milliseconds(row.wire_seconds),
            "last": _last(row),
            "_end": row.wait_seconds * (row.calls if watched.steps else 1),
            "_row": _describe(row) + (f", {row.group}" if several else ""),
            "_text": _last(row),
            "_part": "blocked",
        }
        for row in watched.collectives
    ]
    if rows:
        longest = sorted(rows, key=lambda row: -row["_end"])
        title = f"wait for the last rank per {what}"
        caption = (
            f"How long the earliest rank waits for the latest, median over calls, per {what}; "
            "beside each bar the rank that is last most often, in which share of the calls."
        )
        drawing = _draw_bars(longest, "_row", title, "_part")
        yield draw_chart("watch-collectives", "Waits in collectives", caption, drawing)


def draw_links(run: Run, watched: Watched) -> Iterator[Chart]:
    """Yield the rates of the links between hosts."""
    hosts = [host for host in watched.hosts if any(host in (x.host, x.peer) for x in watched.links)]
    known = [
        {
            "from": link.host,
            "to": link.peer,
            "_value": float(f"{link.bytes_per_second / 1e6:.3g}"),
            "_marked": "slow" if any(_is_named(link, found) for found in run.findings) else "",
            "interface": link.interface,
            "carried": f"{link.nbytes / 1e6:.4g} MB",
            "round trip": "-" if link.rtt_seconds is None else f"{link.rtt_seconds * 1e6:.4g} µs",
            "retransmitted": str(link.retransmitted),
        }
        for link in watched.links
        if link.bytes_per_second and {link.host, link.peer} <= set(hosts)
    ]
    if len(hosts) > 1 and known:
        cells = pd.DataFrame(known)
        caption = (
            "Rate of the job's connections from host to host while data is on its way, in MB/s; "
            f"more is better.{' Outlined: slow.' if any(cells['_marked']) else ''}"
        )
        drawing = draw_matrix(cells, hosts, "host", "MB/s")
        yield draw_chart("watch-links", "Links of the job", caption, drawing)


def _is_named(link: WatchedLink, finding: Finding) -> bool:
    """Whether a finding names this link, or all links of one of its hosts in this direction."""
    ends = {"sends": [link.host], "receives": [link.peer]}
    named = [ends[way] for way in finding.place.get("bytes_per_second", ())]
    if finding.code == "slow-link":
        named.append([link.host, link.peer])
    return finding.place.get("hosts") in named


def _describe(row: WatchedCollective) -> str:
    size = f"{row.nbytes / 1e3:.4g} kB" if row.nbytes < 1e6 else f"{row.nbytes / 1e6:.4g} MB"
    return f"{row.operation} {size}"


def _last(row: WatchedCollective) -> str:
    return "" if row.last_rank is None else f"rank {row.last_rank} ({row.last_share:.0%})"


def draw_ranks(run: Run, watched: Watched) -> Iterator[Chart]:
    """Yield where each rank's step goes, the most own time first."""
    ranks = _sort(watched)
    if len(ranks) < 2:
        return
    marked, count = find_named(run), sum(watched.hosts.values())
    shown = f" Shown: {len(ranks)} of {count} ranks." if len(ranks) < count else ""
    names = _name(watched, ranks)
    bars = [
        {
            "rank": names[rank.rank],
            "part": part,
            "mean": milliseconds(seconds),
            "own time": milliseconds(_own(rank)),
            "steps": rank.steps,
            "_end": seconds,
            "_text": marked.get(rank.rank, "") if part == COLUMNS[-1] else "",
        }
        for rank in ranks
        for part, seconds in zip(COLUMNS, rank.mean_seconds, strict=True)
    ]
    table = make_table(
        "ranks",
        ["rank", "host", *(f"{part} ms" for part in ("own", *COLUMNS)), "finding"],
        [(r.rank, r.host, *_ms((_own(r), *r.mean_seconds)), marked.get(r.rank, "")) for r in ranks],
        left=("host", "finding"),
    )
    caption = (
        "Mean of each part of a step, the rank with the most own time first. The "
        f"straggler has the most own time and is blocked least.{shown}"
    )
    drawing = _draw_bars(bars, "rank", "time of a step", "part")
    yield Chart("watch-ranks", "Ranks", caption, drawing, table)


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
            "beyond the others": f"{_signed(value)} ms",
            "_value": max(value, 0.0) * 1e3,
            "_text": _signed(value),
            "_marked": "late" if (rank, part) in marked else "",
        }
        for rank, values in extra.items()
        for part, value in zip(OWN, values, strict=True)
    ]
    caption = "How many ms longer each phase takes than in the other ranks, mean over the steps."
    caption += " Outlined: named by a finding." if marked else ""
    drawing = Matrix(data=pd.DataFrame(cells), column="part", row="rank", unit="ms")
    yield draw_chart("watch-extra", "Extra time of each rank", caption, drawing)


def _ms(seconds: Sequence[float]) -> list[float]:
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
