"""A watched job: where a step's time goes, pauses, ranks, collectives, links and the timeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone

from ddpbench.analysis import step_lines
from ddpbench.analysis.step_lines import StepLine
from ddpbench.present.columns import Value, digits, format_half_width, format_ranks
from ddpbench.present.document import Chart, ReportRun, Section, make_table
from ddpbench.present.header import of_watch
from ddpbench.present.steps.columns import ms, percent
from ddpbench.present.watch import drawings, over_time
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


def build_sections(run: ReportRun, *, drawn: bool = False) -> Iterator[Section]:
    """Yield the section on the job. drawn: with charts over time instead of the table."""
    if not of_watch(run.run):
        return
    whole = all(finding.code != "missing-ranks" for finding in run.run.findings)
    rows: list[tuple[Chart, ...]] = []
    legend: dict[str, None] = {}
    for line in step_lines.lines(run.run):
        case = line.case
        parts = [case.workload, " ".join(case.settings), format_ranks(case), case.backend]
        title = "  ".join(filter(None, [*parts, case.device]))
        rows.append((Chart("watch-step", "Step", "", _parts(line, title, whole)),))
        for watched in (result.watched for result in line.results if result.watched):
            rows += _rows(run.run, watched, case.backend, drawn=drawn)
            legend |= dict.fromkeys(
                [*(LEGEND if watched.steps else ()), *[WAIT] * bool(watched.collectives)]
            )
    if rows:
        kept = tuple(filter(None, rows))
        yield Section("watch", "Watched job", rows=kept, legend=tuple(legend))


def _rows(run: Run, watched: Watched, backend: str, *, drawn: bool) -> Iterator[tuple[Chart, ...]]:
    yield (*_balance(watched), *_pauses(watched))
    if drawn and len(watched.moments) > 1:
        for chart in over_time.draw(run, watched, backend):
            yield (chart,)
    yield (*_ranks(run, watched), *(drawings.draw_extra(run, watched) if drawn else ()))
    yield tuple(_collectives(watched))
    yield tuple(_links(run, watched))
    if not drawn:
        yield tuple(_timeline(watched))


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


def _balance(watched: Watched) -> Iterator[Chart]:
    """Yield where all the time of the job went."""
    balance = watched.balance
    if balance is None:
        return
    parts = balance.parts() | {"= wall time": balance.wall_seconds}
    cells = [
        [name, f"{seconds:.3f}", percent(seconds / balance.wall_seconds)]
        for name, seconds in parts.items()
    ]
    table = make_table("total time of rank 0", ("time", "s", "% of time"), cells, ("time",))
    texts = [f"{row[2]} %" for row in cells]
    bars = drawings.draw_table(table, list(parts), list(parts.values()), texts)
    caption = (
        "Where the time of rank 0 went while it was watched. A long step takes at least 1.5 times "
        "as long as usual; its extra time is a part of its own."
    )
    yield Chart("watch-balance", "Total time", caption, table, bars)


def _pauses(watched: Watched) -> Iterator[Chart]:
    """Yield the steps that took much longer than usual, by what delayed them."""
    if not watched.pauses:
        return
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
        for pause in watched.pauses
    ]
    headings = ["rank", "part", "line", "times", "every", "ms", "longest ms", "ms per step"]
    table = make_table("pauses, the most costly first", headings, cells, headings[1:3])
    caption = (
        "What the extra time of long steps costs per step, the average over all steps, by rank "
        "and line; beside each bar, number and median size of the pauses."
    )
    names = [f"{row[0]}: {row[2] if row[2] != '-' else row[1]}" for row in cells]
    texts = [f"{pause.count} of {pause.seconds * 1e3:.3g} ms" for pause in watched.pauses]
    costs = [pause.mean_seconds for pause in watched.pauses]
    bars = drawings.draw_table(table, names, costs, texts)
    yield Chart("watch-pauses", "Pauses", caption, table, bars, most=PAUSES)


def _ranks(run: Run, watched: Watched) -> Iterator[Chart]:
    """Yield the ranks with the most own time, if there are several."""
    ranks = sorted(watched.ranks, key=lambda rank: -sum(rank.seconds[:-1]))
    if len(ranks) < 2:
        return
    step, count = watched.step_seconds, sum(watched.hosts.values())
    cells = [
        [str(rank.rank), rank.host, ms(sum(rank.seconds[:-1]), step), *_ms(rank.seconds, step)]
        for rank in ranks
    ]
    known = f", {len(ranks)} of {count}" if len(ranks) < count else ""
    headings = ["rank", "host", "own ms", *COLUMNS]
    table = make_table(f"ranks, the most own time first{known}", headings, cells, ("host",))
    caption = (
        "Mean of each part of a step, the rank with the most own time first. The straggler has "
        "the most own time and is blocked least."
    )
    bars = drawings.draw_ranks(run, watched)
    yield Chart("watch-ranks", "Ranks", caption, table, bars, most=RANKS)


def _collectives(watched: Watched) -> Iterator[Chart]:
    """Yield how long the earliest rank waits for the latest in each kind of call."""
    if not watched.collectives:
        return
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
        for row in watched.collectives
    ]
    count = "per step" if watched.steps else "calls"
    headings = ["group", "ranks", "operation", "kB", count, "wait ms", "wire ms", "last rank"]
    title, left = "collectives, the longest waits first", ("group", "operation")
    caption = (
        "How long the earliest rank waits for the latest, median over calls, per "
        f"{'step' if watched.steps else 'call'}; beside each bar the rank that is last most often, "
        "in which share of the calls."
    )
    table = make_table(title, headings, cells, left)
    names = [f"{operation} {size} kB, {group}" for group, _, operation, size, *_ in cells]
    waits = [x.wait_seconds * (x.calls if watched.steps else 1) for x in watched.collectives]
    texts = ["" if row[-1] == "-" else f"rank {row[-1]}" for row in cells]
    bars = drawings.draw_table(table, names, waits, texts)
    words = "watch-collectives", "Waits in collectives", caption
    yield Chart(*words, table, bars, most=COLLECTIVES)


def _links(run: Run, watched: Watched) -> Iterator[Chart]:
    """Yield the links between hosts."""
    if not watched.links:
        return
    cells = [
        [
            f"{link.host} → {link.peer}",
            link.interface,
            digits(link.nbytes / 1e6),
            digits(None if link.bytes_per_second is None else link.bytes_per_second / 1e6),
            digits(None if link.rtt_seconds is None else link.rtt_seconds * 1e6),
            str(link.retransmitted),
        ]
        for link in watched.links
    ]
    headings = ["link", "interface", "MB", "MB/s", "round trip µs", "retransmitted"]
    table = make_table("links, the busiest first", headings, cells, headings[:2])
    caption = (
        "Rate of the job's connections from host to host while data is on its way, in MB/s; more "
        "is better. Outlined: slow."
    )
    heat = drawings.draw_links(run, watched)
    yield Chart("watch-links", "Links of the job", caption, table, heat, most=LINKS)


def _timeline(watched: Watched) -> Iterator[Chart]:
    moments, step = watched.moments, watched.step_seconds
    if len(moments) < 2:
        return
    read = {name: pick for name, pick in READ.items() if any(pick(m) is not None for m in moments)}
    cells = [
        [
            _clock(moment),
            str(moment.step),
            ms(moment.step_seconds, step),
            *_ms(moment.seconds, step),
            *(digits(_find_latest(moments[: i + 1], pick)) for pick in read.values()),
        ]
        for i, moment in enumerate(moments)
    ]
    headings = ["UTC", "step", "ms", *COLUMNS, *read]
    table = make_table("timeline", headings, cells)
    yield Chart("watch-timeline", "Timeline", "", table, most=MOMENTS, spread=True)


def _find_latest(moments: Sequence[Moment], pick: Callable[[Moment], Value]) -> Value:
    """Return the newest value that is known: not each moment has a report of the ranks."""
    return next((value for m in reversed(moments) if (value := pick(m)) is not None), None)


def _clock(moment: Moment) -> str:
    return datetime.fromtimestamp(moment.ended, timezone.utc).strftime("%H:%M:%S")


def _ms(seconds: Sequence[float], step: float) -> list[str]:
    return [ms(each, step) for each in seconds]


def _gpu_percent(moment: Moment) -> float | None:
    share = moment.load.gpu_share if moment.load is not None else None
    return None if share is None else share * 100


# What may be known of a moment besides its step: heading → value.
READ: dict[str, Callable[[Moment], Value]] = {
    "loss": lambda moment: moment.loss,
    "cores": lambda moment: None if moment.load is None else moment.load.cpu_cores,
    "GPU %": _gpu_percent,
}
