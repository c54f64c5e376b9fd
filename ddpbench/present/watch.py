"""A watched job: the breakdown of a step, pauses, ranks, collectives, links and the timeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timezone

import numpy as np

from ddpbench.analysis import step_lines
from ddpbench.analysis.step_lines import StepLine
from ddpbench.present import theme
from ddpbench.present.charts.kinds import Axis, Bars, Lines, Rows
from ddpbench.present.columns import format_half_width, format_number, format_ranks, scale_known
from ddpbench.present.document import Chart, ReportRun, Section, make_table, tabulate_rows
from ddpbench.present.header import of_watch
from ddpbench.present.steps.columns import format_ms, format_percent
from ddpbench.records.schema import Finding, Run
from ddpbench.records.table import Table
from ddpbench.records.watched import COLUMNS, Moment, Watched

RANKS, PAUSES, COLLECTIVES, LINKS, MOMENTS = 8, 5, 12, 12, 10  # rows of a table, at most
GROUP = 32  # characters of a group's name
LATE_CODES = ("straggler", "intermittent-straggler", "late-arrival", "slow-host")
RARE, CUT = 0.98, 3.0  # values beyond this quantile are cut if they exceed it by this factor
LABEL_ROW, LABEL_ROWS = 14, 8  # pixels of a label; labels one below the other
CUT_NOTE = " Rare larger values are cut off; the table has them."
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


def build_sections(run: ReportRun) -> Iterator[Section]:
    """Yield the section on the job."""
    if not of_watch(run.run):
        return
    rows: list[tuple[Chart, ...]] = []
    legend: list[str] = []
    for line in step_lines.lines(run.run):
        rows.append((Chart("watch-step", "Step", "", _list_parts(line, run.run)),))
        for watched in (result.watched for result in line.results if result.watched):
            rows += [
                (*_list_balance(watched), *_list_pauses(watched)),
                tuple(_draw_ranks(run.run, watched)),
                tuple(_list_collectives(watched)),
                tuple(_list_links(watched)),
                tuple(_draw_over_time(run.run, watched)),
            ]
            legend += LEGEND if watched.steps else ()
            legend += [WAIT] if watched.collectives else []
    if rows:
        known = tuple(filter(None, rows))
        yield Section("watch", "Watched job", rows=known, legend=tuple(dict.fromkeys(legend)))


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
    named, several = _find_late_ranks(run), len(watched.hosts) > 1
    bars = [
        {
            "rank": f"{rank.rank} on {rank.host}" if several else f"rank {rank.rank}",
            "part": part,
            "mean ms": format_ms(seconds, step),
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


def _ms(seconds: Sequence[float], step: float) -> list[str]:
    return [format_ms(each, step) for each in seconds]


# --- over time ------------------------------------------------------------------------------------


def _draw_over_time(run: Run, watched: Watched) -> Iterator[Chart]:
    """Yield the parts of a step over time, if there are at least two moments."""
    moments = watched.moments
    if len(moments) < 2:
        return
    total = moments[-1].ended - moments[0].ended
    scale, unit = (3600, "hours") if total >= 7200 else (60, "minutes")
    scale, unit = (scale, unit) if total >= 120 else (1, "seconds")
    at = [(moment.ended - moments[0].ended) / scale for moment in moments]
    rows, cells = [], []
    for x, moment in zip(at, moments, strict=True):
        whole, *parts = _ms((moment.step_seconds, *moment.seconds), watched.step_seconds)
        clock = datetime.fromtimestamp(moment.ended, timezone.utc).strftime("%H:%M:%S")
        facts = {"UTC": clock, "step": moment.step, "ms": whole}
        cells.append({**facts, **dict(zip(COLUMNS, parts, strict=True))})
        rows += [
            {**facts, "part": name, "part ms": text, "_x": x, "_y": seconds}
            for name, text, seconds in zip(COLUMNS, parts, moment.seconds, strict=True)
        ]
    top = _find_top([sum(moment.seconds) for moment in moments])
    drawing = Lines(
        data=rows,
        x=Axis(f"{unit} since {cells[0]['UTC']} UTC", theme.NUMBER_LABELS, domain=(0.0, at[-1])),
        y=Axis("time of a step", theme.TIME_LABELS, domain=(0.0, top) if top else None),
        color="part",
        order=theme.PHASES,
        stacked=True,
        rules=_list_rules(run, moments, at),
    )
    caption = (
        "Time of each part in the median rank, median over the steps of each point. Dashed: a "
        f"finding begins or ends.{CUT_NOTE if top else ''}"
    )
    table = tabulate_rows("timeline", cells)
    yield Chart("watch-parts", "Timeline", caption, table, drawing, most=MOMENTS, spread=True)


def _list_rules(run: Run, moments: Sequence[Moment], at: Sequence[float]) -> Rows:
    """Return where findings begin and end: `Lines.rules`."""
    steps = [moment.step for moment in moments]
    events = sorted(
        (float(np.interp(step, steps, at)), label, finding.sentence)
        for finding in run.findings
        for step, label in _list_events(finding)
    )
    return [
        {"_x": x, "finding": text, "_label": label, "_row": 8 + LABEL_ROW * (i % LABEL_ROWS)}
        for i, (x, label, text) in enumerate(events)
    ]


def _list_events(finding: Finding) -> Iterator[tuple[float, str]]:
    """Yield the steps at which a finding begins and ends, each with a label."""
    place = finding.place
    rank = f"rank {place['rank']}: " if "rank" in place else ""
    for name, word in (("since_step", ""), ("until_step", "end of "), ("step", "")):
        step = place.get(name)
        if isinstance(step, (int, float)):
            yield step, f"{rank}{word}{finding.code}"


def _find_top(values: Sequence[float]) -> float | None:
    """Return the end of an axis that a few huge values must not flatten; None: show all."""
    usual, most = (float(q) for q in np.quantile(values, [RARE, 1.0]))
    return 1.5 * usual if most > CUT * usual > 0 else None


def _find_late_ranks(run: Run) -> dict[int, str]:
    """Return the ranks in findings on late ranks and hosts, each with the finding's code."""
    named: dict[int, str] = {}
    for finding in run.findings:
        if finding.code in LATE_CODES:
            ranks = finding.place.get("ranks", [finding.place.get("rank")])
            for rank in ranks if isinstance(ranks, list) else []:
                if isinstance(rank, int):
                    named.setdefault(rank, finding.code)
    return named
