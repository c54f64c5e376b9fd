"""Tables of a watched job: where a step's time goes, ranks, collectives, links and timeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone

from ddpbench.analysis import step_lines
from ddpbench.analysis.step_lines import StepLine
from ddpbench.present.columns import Value, digits, format_half_width, format_ranks
from ddpbench.present.document import Section, as_row, make_table
from ddpbench.present.steps.columns import ms, percent
from ddpbench.records.schema import Run
from ddpbench.records.table import Table
from ddpbench.records.watched import COLUMNS, Moment, Watched

RANKS, PAUSES, COLLECTIVES, LINKS, MOMENTS = 8, 5, 12, 12, 10  # rows of a table, at most
GROUP = 32  # characters of a group's name
LEGEND = (
    "input … other: a rank's own time; input: waiting for the data loader; blocked: waiting in "
    "collectives, send and recv for other ranks, and for the transfer",
    "slowest rank: the one with the most, and in how many of the steps; the straggler has the most "
    "own time and is blocked least",
    "exposed communication: the least that any rank was blocked in a step",
)
WAIT = (
    "wait ms: how long the earliest rank waited for the latest; wire ms: the transfer alone, - if "
    "unknown; last rank: the rank that most often arrives last, - if none stands out"
)


def build_sections(run: Run) -> Iterator[Section]:
    """Yield the tables of the job, then the legend."""
    whole = all(finding.code != "missing-ranks" for finding in run.findings)
    for line in step_lines.lines(run):
        case = line.case
        parts = [case.workload, " ".join(case.settings), format_ranks(case), case.backend]
        title = "  ".join(filter(None, [*parts, case.device]))
        tables, legend = [_parts(line, title, whole)], []
        for watched in (result.watched for result in line.results if result.watched):
            tables += [table for build in TABLES if (table := build(watched)) is not None]
            legend += [*(LEGEND if watched.steps else ()), *[WAIT] * bool(watched.collectives)]
        yield Section("watch", "", rows=tuple(map(as_row, tables)))
        yield Section("legend", "", lines=tuple(legend))


def _parts(line: StepLine, title: str, whole: bool) -> Table:
    """Return where the time of a step goes, in the median rank and in the slowest one."""
    watched = next((result.watched for result in line.results if result.watched), None)
    if watched is None or not watched.steps:
        why = line.reason or "no optimizer step was seen on all ranks"
        return make_table(title, (), (), (), (why,))
    step = watched.step_seconds
    cells = [
        [
            phase.name,
            ms(phase.seconds, step),
            percent(phase.seconds / step),
            ms(phase.slowest_seconds, step),
            f"{phase.slowest_rank} ({phase.slowest_share * 100:.0f} %)",
            ms(phase.fastest_seconds, step),
        ]
        for phase in watched.phases
    ]
    cells.append(["= step", ms(step, step), "100.0", "", "", ""])
    mean = watched.balance.mean_seconds if watched.balance else step
    if watched.balance:
        cells.append(["= mean step", ms(mean, step), percent(mean / step), "", "", ""])
    headings = ["part of a step", "ms", "% of step", "slowest ms", "slowest rank", "fastest ms"]
    gain = mean / max(mean - watched.exposed_seconds, 1e-9)
    text = (
        f"{watched.steps} of {watched.last_step + 1} steps; 95 % interval of a step "
        f"{format_half_width(line)}"
    )
    if whole:  # else the ranks may wait for one that is missing
        text += (
            f"; exposed communication {ms(watched.exposed_seconds, step)} ms per step: without it "
            f"at most ×{gain:.2f} faster"
        )
    return make_table(title, headings, cells, headings[:1], (text,))


def _balance(watched: Watched) -> Table | None:
    """Return where all the time of the job went."""
    balance = watched.balance
    if balance is None:
        return None
    parts = balance.parts() | {"= wall time": balance.wall_seconds}
    cells = [
        [name, f"{seconds:.3f}", percent(seconds / balance.wall_seconds)]
        for name, seconds in parts.items()
    ]
    return make_table("total time of rank 0", ("time", "s", "% of time"), cells, ("time",))


def _pauses(watched: Watched) -> Table | None:
    """Return the steps that took much longer than usual, by what delayed them."""
    cells = [
        [
            "all" if pause.rank is None else str(pause.rank),
            pause.phase,
            pause.line or "-",
            str(pause.count),
            str(pause.every or "-"),
            f"{pause.seconds * 1e3:.1f}",
            f"{pause.longest_seconds * 1e3:.1f}",
            ms(pause.mean_seconds, watched.step_seconds),
        ]
        for pause in watched.pauses[:PAUSES]
    ]
    headings = ["rank", "part", "line", "times", "every", "ms", "longest ms", "ms per step"]
    title = "pauses, the most costly first" + _more(len(cells), len(watched.pauses))
    return make_table(title, headings, cells, headings[1:3]) if cells else None


def _ranks(watched: Watched) -> Table | None:
    """Return the ranks with the most own time; None if there is only one."""
    most = sorted(watched.ranks, key=lambda rank: -sum(rank.seconds[:-1]))[:RANKS]
    if len(most) < 2:
        return None
    step = watched.step_seconds
    cells = [
        [str(rank.rank), rank.host, ms(sum(rank.seconds[:-1]), step), *_ms(rank.seconds, step)]
        for rank in most
    ]
    headings = ["rank", "host", "own ms", *COLUMNS]
    title = "ranks, the most own time first" + _more(len(most), sum(watched.hosts.values()))
    return make_table(title, headings, cells, ("host",))


def _collectives(watched: Watched) -> Table | None:
    cells = [
        [
            row.group if len(row.group) <= GROUP else f"{row.group[: GROUP - 1]}…",
            str(row.ranks),
            row.operation,
            digits(row.nbytes / 1e3),
            f"{row.calls:.1f}" if watched.steps else f"{row.calls:.0f}",
            ms(row.wait_seconds, watched.step_seconds),
            ms(row.wire_seconds, watched.step_seconds),
            "-" if row.last_rank is None else f"{row.last_rank} ({row.last_share * 100:.0f} %)",
        ]
        for row in watched.collectives[:COLLECTIVES]
    ]
    count = "per step" if watched.steps else "calls"
    headings = ["group", "ranks", "operation", "kB", count, "wait ms", "wire ms", "last rank"]
    title = "collectives, the longest waits first" + _more(len(cells), len(watched.collectives))
    return make_table(title, headings, cells, ("group", "operation")) if cells else None


def _links(watched: Watched) -> Table | None:
    cells = [
        [
            f"{link.host} → {link.peer}",
            link.interface,
            digits(link.nbytes / 1e6),
            digits(None if link.bytes_per_second is None else link.bytes_per_second / 1e6),
            digits(None if link.rtt_seconds is None else link.rtt_seconds * 1e6),
            str(link.retransmitted),
        ]
        for link in watched.links[:LINKS]
    ]
    headings = ["link", "interface", "MB", "MB/s", "round trip µs", "retransmitted"]
    title = "links, the busiest first" + _more(len(cells), len(watched.links))
    return make_table(title, headings, cells, headings[:2]) if cells else None


def _timeline(watched: Watched) -> Table | None:
    moments, step = watched.moments, watched.step_seconds
    if len(moments) < 2:
        return None
    read = {name: pick for name, pick in READ.items() if any(pick(m) is not None for m in moments)}
    cells = [
        [
            _clock(moments[i]),
            str(moments[i].step),
            ms(moments[i].step_seconds, step),
            *_ms(moments[i].seconds, step),
            *(digits(_find_latest(moments[: i + 1], pick)) for pick in read.values()),
        ]
        for i in _spread(len(moments))
    ]
    headings = ["UTC", "step", "ms", *COLUMNS, *read]
    return make_table("timeline", headings, cells)


def _spread(known: int) -> Iterator[int]:
    """Yield the positions of at most MOMENTS, evenly, the last one among them."""
    count = min(MOMENTS, known)
    return ((i + 1) * known // count - 1 for i in range(count))


def _find_latest(moments: Sequence[Moment], pick: Callable[[Moment], Value]) -> Value:
    """Return the newest value that is known: not each moment has a report of the ranks."""
    return next((value for m in reversed(moments) if (value := pick(m)) is not None), None)


def _clock(moment: Moment) -> str:
    return datetime.fromtimestamp(moment.ended, timezone.utc).strftime("%H:%M:%S")


def _ms(seconds: Sequence[float], step: float) -> list[str]:
    return [ms(each, step) for each in seconds]


def _more(shown: int, known: int) -> str:
    return f" ({shown} of {known})" if shown < known else ""


def _gpu_percent(moment: Moment) -> float | None:
    share = moment.load.gpu_share if moment.load is not None else None
    return None if share is None else share * 100


# What may be known of a moment besides its step: heading → value.
READ: dict[str, Callable[[Moment], Value]] = {
    "loss": lambda moment: moment.loss,
    "cores": lambda moment: None if moment.load is None else moment.load.cpu_cores,
    "GPU %": _gpu_percent,
}
TABLES: tuple[Callable[[Watched], Table | None], ...] = (
    *(_balance, _pauses, _ranks, _collectives, _links, _timeline),
)
