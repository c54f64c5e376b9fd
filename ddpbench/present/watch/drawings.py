"""Charts of a watched job: total time, pauses, ranks, collectives and links."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ddpbench.present import theme
from ddpbench.present.charts.kinds import Axis, Bars, Matrix, draw_pairs
from ddpbench.present.columns import digits
from ddpbench.present.document import Chart, draw_chart
from ddpbench.records.schema import Finding, Run
from ddpbench.records.watched import COLUMNS, PHASES, Watched, WatchedLink, WatchedRank

LATE_CODES = ("straggler", "intermittent-straggler", "late-arrival", "slow-host")


def milliseconds(seconds: float) -> str:
    return f"{digits(seconds * 1e3)} ms"


def find_named(run: Run) -> dict[int, str]:
    """Return the ranks that findings on late ranks name, directly or by their host, with a code."""
    named: dict[int, str] = {}
    for finding in run.findings:
        if finding.code in LATE_CODES:
            ranks = finding.place.get("ranks", [finding.place.get("rank")])
            for rank in ranks if isinstance(ranks, list) else []:
                if isinstance(rank, int):
                    named.setdefault(rank, finding.code)
    return named


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
    return draw_pairs(known, hosts, "host", "MB/s")


def _is_named(link: WatchedLink, finding: Finding) -> bool:
    """Whether a finding names this link, or all links of one of its hosts in this direction."""
    ends = {"sends": [link.host], "receives": [link.peer]}
    named = [ends[way] for way in finding.place.get("bytes_per_second", ())]
    if finding.code == "slow-link":
        named.append([link.host, link.peer])
    return finding.place.get("hosts") in named


def draw_ranks(run: Run, watched: Watched) -> Bars:
    """Return where each rank's step goes, the most own time first."""
    ranks, marked = _sort(watched), find_named(run)
    names = _name(watched, ranks)
    bars = [
        {
            "rank": names[rank.rank],
            "part": part,
            "mean": milliseconds(seconds),
            "_end": seconds,
            "_text": marked.get(rank.rank, "") if part == COLUMNS[-1] else "",
        }
        for rank in ranks
        for part, seconds in zip(COLUMNS, rank.mean_seconds, strict=True)
    ]
    x = Axis("time of a step", theme.TIME_LABELS)
    return Bars(data=bars, x=x, row="rank", color="part", order=theme.PHASES)


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
            "_value": max(value, 0.0) * 1e3,
            "_text": _signed(value),
            "ms": _signed(value),
            "_marked": "late" if (rank, part) in marked else "",
        }
        for rank, values in extra.items()
        for part, value in zip(PHASES, values, strict=True)
    ]
    drawing = Matrix(data=cells, column="part", row="rank", unit="ms")
    caption = "How many ms longer each phase takes than in the other ranks, mean over the steps."
    caption += " Outlined: named by a finding." if marked else ""
    yield draw_chart("watch-extra", "Extra time of each rank", caption, drawing)


def _sort(watched: Watched) -> list[WatchedRank]:
    return sorted(watched.ranks, key=lambda rank: -sum(rank.mean_seconds[:-1]))


def _name(watched: Watched, ranks: Sequence[WatchedRank]) -> dict[int, str]:
    several = len(watched.hosts) > 1
    return {r.rank: f"{r.rank} on {r.host}" if several else f"rank {r.rank}" for r in ranks}


def _signed(seconds: float) -> str:
    """Format milliseconds with their sign, to a hundredth or three digits."""
    return f"{seconds * 1e3:+.{2 if abs(seconds) < 1e-2 else 1}f}"
