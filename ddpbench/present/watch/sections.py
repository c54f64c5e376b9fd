"""A watched job: the breakdown of a step, pauses, ranks, collectives, links and the timeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ddpbench.analysis import step_lines
from ddpbench.analysis.step_lines import StepLine
from ddpbench.present import theme
from ddpbench.present.charts.kinds import Axis, Bars
from ddpbench.present.columns import format_half_width, format_number, format_ranks, scale_known
from ddpbench.present.document import Chart, ReportRun, Section, make_table, tabulate_rows
from ddpbench.present.header import of_watch
from ddpbench.present.steps.columns import format_ms, format_percent
from ddpbench.present.watch import over_time
from ddpbench.records.schema import Run
from ddpbench.records.table import Table
from ddpbench.records.watched import COLUMNS, Watched

RANKS, PAUSES, COLLECTIVES, LINKS, MOMENTS = 8, 5, 12, 12, 10  # rows of a table, at most
GROUP = 32  # characters of a group's name
LEGEND = (
    "input … other: a rank's own time; input: waiting for the data loader; blocked: waiting in "
    "collectives, send and recv for other ranks, and for the transfer",
    "slowest rank: the rank with the longest part, and its share of the steps; the straggler has "
    "the most own time and is blocked least",
    "exposed communication: the least that any rank was blocked in a step",
)
WAIT = (
    "wait ms: how long the earliest rank waited for the latest; last rank: the rank that most "
    "often arrives last, - if no rank is clearly last"
)


def build_sections(run: ReportRun, *, drawn: bool = False) -> Iterator[Section]:
    """Yield the section on the job. drawn: with charts over time instead of the table."""
    if not of_watch(run.run):
        return
    rows: list[tuple[Chart, ...]] = []
    legend: list[str] = []
    for line in step_lines.lines(run.run):
        rows.append((Chart("watch-step", "Step", "", _list_parts(line, run.run)),))
        for watched in (result.watched for result in line.results if result.watched):
            rows += _list_rows(run.run, watched, drawn=drawn)
            legend += LEGEND if watched.steps else ()
            legend += [WAIT] if watched.collectives else []
    if rows:
        known = tuple(filter(None, rows))
        yield Section("watch", "Watched job", rows=known, legend=tuple(dict.fromkeys(legend)))


def _list_rows(run: Run, watched: Watched, *, drawn: bool) -> Iterator[tuple[Chart, ...]]:
    yield (*_list_balance(watched), *_list_pauses(watched))
    if drawn and len(watched.moments) > 1:
        yield (over_time.draw(run, watched),)
    yield tuple(_draw_ranks(run, watched))
    yield tuple(_list_collectives(watched))
    yield tuple(_list_links(watched))
    if not drawn:
        yield tuple(_list_moments(watched))


def _list_parts(line: StepLine, run: Run) -> Table:
    """Return the breakdown of a step, in the median rank and in the slowest one."""
    case = line.case
    parts = [case.workload, " ".join(case.settings), format_ranks(case), case.backend, case.device]
    title = "  ".join(filter(None, parts))
    result = next((result for result in line.results if result.watched), None)
    watched, summary = (result.watched, result.summary) if result else (None, None)
    if watched is None or summary is None:
        why = line.reason or "no optimizer step was seen on all ranks"
        return make_table(title, (), (), (), (why,))
    step = watched.step_seconds
    cells = [
        [
            phase.name,
            format_ms(seconds, step),
            format_percent(seconds / step),
            format_ms(phase.slowest.value, step),
            f"{phase.slowest_rank} ({phase.slowest_share * 100:.0f} %)",
            format_ms(phase.fastest_seconds, step),
        ]
        for phase, seconds in zip(summary.phases, watched.median_seconds, strict=True)
    ]
    cells.append(["= step", format_ms(step, step), "100.0", "", "", ""])
    mean = watched.balance.mean_seconds if watched.balance else step
    if watched.balance:
        cells.append(
            ["= mean step", format_ms(mean, step), format_percent(mean / step), "", "", ""]
        )
    headings = ["part of a step", "ms", "% of step", "slowest ms", "slowest rank", "fastest ms"]
    text = (
        f"{watched.steps} of {watched.last_step + 1} steps; 95 % interval of a step "
        f"{format_half_width(line)}"
    )
    # If a rank is missing, the others may wait for it.
    if all(finding.code != "missing-ranks" for finding in run.findings):
        gain = mean / max(mean - watched.exposed_seconds, 1e-9)
        exposed = format_ms(watched.exposed_seconds, step)
        text += (
            f"; exposed communication {exposed} ms per step: without it at most ×{gain:.2f} faster"
        )
    return make_table(title, headings, cells, headings[:1], (text,))


def _list_balance(watched: Watched) -> Iterator[Chart]:
    """Yield the parts of all the time of the job."""
    balance = watched.balance
    if balance is None:
        return
    rows = []
    for name, seconds in {**balance.parts(), "= wall time": balance.wall_seconds}.items():
        share = format_percent(seconds / balance.wall_seconds)
        rows.append({"time": name, "s": f"{seconds:.3f}", "% of time": share})
    caption = (
        "Time of rank 0 while it was watched. A long step takes at least 1.5 times as long as "
        "usual; its extra time is a part of its own."
    )
    table = tabulate_rows("total time of rank 0", rows)
    yield Chart("watch-balance", "Total time", caption, table)


def _list_pauses(watched: Watched) -> Iterator[Chart]:
    """Yield the steps that took much longer than usual, by cause."""
    rows = [
        {
            "rank": "all" if pause.rank is None else str(pause.rank),
            "part": pause.phase,
            "line": pause.line or "-",
            "times": str(pause.count),
            "every": str(pause.every or "-"),
            "ms": f"{pause.seconds * 1e3:.1f}",
            "longest ms": f"{pause.longest_seconds * 1e3:.1f}",
            "ms per step": format_ms(pause.mean_seconds, watched.step_seconds),
        }
        for pause in watched.pauses
    ]
    caption = "Extra time of long steps, by rank and line; per step: the average over all steps."
    if rows:
        table = tabulate_rows("pauses, the most costly first", rows)
        yield Chart("watch-pauses", "Pauses", caption, table, most=PAUSES)


def _draw_ranks(run: Run, watched: Watched) -> Iterator[Chart]:
    """Yield the ranks with the most own time, if there are several."""
    ranks = sorted(watched.ranks, key=lambda rank: -sum(rank.seconds[:-1]))
    if len(ranks) < 2:
        return
    step, count = watched.step_seconds, sum(watched.hosts.values())
    cells = []
    for rank in ranks:
        own = format_ms(sum(rank.seconds[:-1]), step)
        cells.append([str(rank.rank), rank.host, own, *_ms(rank.seconds, step)])
    known = f", {len(ranks)} of {count}" if len(ranks) < count else ""
    headings = ["rank", "host", "own ms", *COLUMNS]
    table = make_table(f"ranks, the most own time first{known}", headings, cells, ("host",))
    named, several = over_time.find_late_ranks(run), len(watched.hosts) > 1
    bars = [
        {
            "rank": f"{rank.rank} on {rank.host}" if several else f"rank {rank.rank}",
            "part": part,
            "mean": over_time.format_milliseconds(seconds),
            "_end": seconds,
            "_text": named.get(rank.rank, "") if part == COLUMNS[-1] else "",
        }
        for rank in sorted(watched.ranks, key=lambda rank: -sum(rank.mean_seconds[:-1]))
        for part, seconds in zip(COLUMNS, rank.mean_seconds, strict=True)
    ]
    x = Axis("time of a step", theme.TIME_LABELS)
    drawing = Bars(data=bars, x=x, row="rank", color="part", order=theme.PHASES)
    caption = "Mean of each part of a step, the rank with the most own time first."
    yield Chart("watch-ranks", "Ranks", caption, table, drawing, most=RANKS)


def _list_collectives(watched: Watched) -> Iterator[Chart]:
    """Yield how long the earliest rank waits for the latest in each kind of call."""
    rows = []
    for row in watched.collectives:
        last = "-" if row.last_rank is None else f"{row.last_rank} ({row.last_share * 100:.0f} %)"
        group = row.group if len(row.group) <= GROUP else f"{row.group[: GROUP - 1]}…"
        calls = {"per step": f"{row.calls:.1f}"} if watched.steps else {"calls": f"{row.calls:.0f}"}
        cells = {
            "group": group,
            "ranks": str(row.ranks),
            "operation": row.operation,
            "kB": format_number(row.nbytes / 1e3),
            **calls,
            "wait ms": format_ms(row.wait_seconds, watched.step_seconds),
            "last rank": last,
        }
        rows.append(cells)
    if rows:
        table = tabulate_rows("collectives, the longest waits first", rows, ("group",))
        yield Chart("watch-collectives", "Waits in collectives", "", table, most=COLLECTIVES)


def _list_links(watched: Watched) -> Iterator[Chart]:
    """Yield the links between hosts."""
    rows = [
        {
            "link": f"{link.host} → {link.peer}",
            "interface": link.interface,
            "MB": format_number(link.nbytes / 1e6),
            "MB/s": format_number(scale_known(link.bytes_per_second, 1e-6)),
            "round trip µs": format_number(scale_known(link.rtt_seconds, 1e6)),
            "retransmitted": str(link.retransmitted),
        }
        for link in watched.links
    ]
    caption = "Rate of the job's connections from host to host while data is in transfer."
    if rows:
        table = tabulate_rows("links, the busiest first", rows)
        yield Chart("watch-links", "Links of the job", caption, table, most=LINKS)


def _list_moments(watched: Watched) -> Iterator[Chart]:
    step, rows = watched.step_seconds, []
    for moment in watched.moments:
        parts = dict(zip(COLUMNS, _ms(moment.seconds, step), strict=True))
        clock, whole = over_time.format_clock(moment.ended), format_ms(moment.step_seconds, step)
        rows.append({"UTC": clock, "step": moment.step, "ms": whole, **parts})
    if len(rows) > 1:
        table = tabulate_rows("timeline", rows)
        yield Chart("watch-timeline", "Timeline", "", table, most=MOMENTS, spread=True)


def _ms(seconds: Sequence[float], step: float) -> list[str]:
    return [format_ms(each, step) for each in seconds]
