"""Charts of a watched job: total time, pauses, ranks, collectives and links."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from ddpbench.present import theme
from ddpbench.present.charts.kinds import Axis, Bars, Matrix
from ddpbench.present.columns import digits
from ddpbench.present.document import Chart, draw_chart
from ddpbench.present.matrix import draw_matrix
from ddpbench.present.watch.over_time import milliseconds
from ddpbench.present.watch.timeline import LATE_CODES, find_named
from ddpbench.records.schema import Finding, Run
from ddpbench.records.watched import (
    COLUMNS,
    Watched,
    WatchedBalance,
    WatchedCollective,
    WatchedLink,
    WatchedPause,
    WatchedRank,
)

OWN = COLUMNS[:-1]


def draw_balance(balance: WatchedBalance) -> Bars:
    parts = [
        {
            "time": name,
            "_end": seconds,
            "seconds": digits(seconds),
            "_text": f"{seconds / balance.wall_seconds:.1%}",
        }
        for name, seconds in balance.parts().items()
    ]
    return _draw_bars(parts, "time", "time")


def draw_pauses(pauses: Sequence[WatchedPause]) -> Bars:
    rows = [
        {
            "_row": f"{'all' if pause.rank is None else pause.rank}: {pause.line or pause.phase}",
            "_end": pause.mean_seconds,
            "_text": f"{pause.count} of {pause.seconds * 1e3:.3g} ms",
            "phase": pause.phase,
            "line": pause.line,
            "waits at": pause.waits_at,
            "every": pause.every or None,
            "first": pause.first_step,
            "last": pause.last_step,
            "longest": milliseconds(pause.longest_seconds),
            "per step": milliseconds(pause.mean_seconds),
        }
        for pause in pauses
    ]
    return _draw_bars(rows, "_row", "time")


def _draw_bars(rows: Sequence[Mapping[str, Any]], row: str, title: str, color: str = "") -> Bars:
    """Return bars of seconds; row, color: columns of their names and colours."""
    x = Axis(title, theme.TIME_LABELS)
    return Bars(data=pd.DataFrame(rows), x=x, row=row, color=color, order=theme.PHASES)


def draw_collectives(watched: Watched) -> Bars:
    several = len({row.group for row in watched.collectives}) > 1
    rows: list[dict[str, Any]] = [
        {
            "group": row.group,
            "ranks": row.ranks,
            "calls per step" if watched.steps else "calls": f"{row.calls:.3g}",
            "wait per call": milliseconds(row.wait_seconds),
            "transfer": milliseconds(row.wire_seconds),
            "_end": row.wait_seconds * (row.calls if watched.steps else 1),
            "_row": _describe(row) + (f", {row.group}" if several else ""),
            "_text": _last(row),
            "_part": "blocked",
        }
        for row in watched.collectives
    ]
    longest = sorted(rows, key=lambda row: -row["_end"])
    title = f"wait for the last rank per {'step' if watched.steps else 'call'}"
    return _draw_bars(longest, "_row", title, "_part")


def draw_links(run: Run, watched: Watched) -> Matrix | None:
    """Return the rates of the links between hosts; None if they are unknown."""
    hosts = [host for host in watched.hosts if any(host in (x.host, x.peer) for x in watched.links)]
    known = [
        {
            "from": link.host,
            "to": link.peer,
            "_value": float(f"{link.bytes_per_second / 1e6:.3g}"),
            "_marked": "slow" if any(_is_named(link, found) for found in run.findings) else "",
            "interface": link.interface,
            "carried": f"{link.nbytes / 1e6:.4g} MB",
            "retransmitted": str(link.retransmitted),
        }
        for link in watched.links
        if link.bytes_per_second and {link.host, link.peer} <= set(hosts)
    ]
    if len(hosts) < 2 or not known:
        return None
    return draw_matrix(pd.DataFrame(known), hosts, "host", "MB/s")


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


def draw_ranks(run: Run, watched: Watched) -> Bars:
    """Return where each rank's step goes, the most own time first."""
    ranks, marked = _sort(watched), find_named(run)
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
    return _draw_bars(bars, "rank", "time of a step", "part")


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
