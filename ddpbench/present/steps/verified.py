"""Verdicts on the replicas: since when they were not equal, and what the proof cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from ddpbench.analysis import step_lines
from ddpbench.analysis.step_lines import StepLine
from ddpbench.present import theme
from ddpbench.present.charts.kinds import Axis, Spans
from ddpbench.present.document import Chart, ReportRun, Section, make_table, side_by_side
from ddpbench.present.steps.columns import ms, percent, span
from ddpbench.present.steps.replicas import verdict
from ddpbench.records.schema import Replicas

_, DIFFERENT, EQUAL, NOT_FINITE, UNKNOWN = theme.VERDICTS
MOST_TENSORS = 6  # that are named
HEADINGS = (
    *("workload", "backend", "launch", "verdict", "verified steps", "equal until step"),
    *("first bad step", "ranks", "tensors", "verification ms", "95 %", "% of a step"),
)
LEFT = ("workload", "backend", "verdict", "ranks", "tensors")


def section(runs: Sequence[ReportRun]) -> Section | None:
    rows = side_by_side(runs, _charts)
    if not rows:
        return None
    lines = dict.fromkeys(line for run in runs for line in _sentences(run))
    return Section("replicas", "Replicas", lines=tuple(lines), rows=rows)


def _sentences(run: ReportRun) -> Iterator[str]:
    """Yield the verdict on each case; the findings of a failure are in the summary of the page."""
    for line in step_lines.lines(run.run):
        if (replicas := line.replicas) is not None:
            texts = list(verdict(line, run.run.plan.verify))
            if replicas.failed or replicas.unproved:
                texts = texts[:2]
            sentences = " ".join(f"{text.strip()}." for text in texts)
            yield f"{line.case.workload} on {line.case.backend}: {sentences}"


def _charts(run: ReportRun) -> Iterator[Chart]:
    """Yield the table of all cases, drawn over the steps if the replicas ever failed."""
    verified = [
        (line, launch, result.replicas)
        for line in step_lines.lines(run.run)
        for launch, result in enumerate(line.results, 1)
        if result.replicas is not None
    ]
    if not verified:
        return
    failed = [each for each in verified if each[2].failed and each[2].first_bad is not None]
    caption = "Replicas are compared bit for bit. Cost: median over verifications, slowest rank."
    if failed:
        caption = f"What was found over the steps of a case, warm-up included. {caption}"
    if any((replicas.equal_until or 0) + 1 < (replicas.first_bad or 0) for *_, replicas in failed):
        caption += " Not known: between the last good verification and the first bad one."
    rows = [_cells(*each) for each in verified]
    yield Chart(
        "replicas",
        "Verified steps",
        caption,
        _draw(verified) if failed else None,
        make_table("replicas", HEADINGS, rows, LEFT),
    )


def _state(replicas: Replicas) -> str:
    if not replicas.failed:
        return EQUAL
    return NOT_FINITE if replicas.equal else DIFFERENT


def _cells(line: StepLine, launch: int, replicas: Replicas) -> tuple[Any, ...]:
    cost, more = replicas.cost, len(replicas.tensors) - MOST_TENSORS
    tensors = ", ".join(replicas.tensors[:MOST_TENSORS]) + (f" and {more} more" if more > 0 else "")
    return (
        line.case.workload,
        line.case.backend,
        launch,
        _state(replicas) + (f", {replicas.unproved.lower()}" if replicas.unproved else ""),
        replicas.verified,
        replicas.equal_until,
        replicas.first_bad,
        ", ".join(map(str, replicas.ranks)) or "-",
        tensors or "-",
        "-" if cost is None else ms(cost.value, line.seconds),
        "-" if cost is None else span(cost.interval, line.seconds),
        percent(replicas.share),
    )


def _draw(verified: Sequence[tuple[StepLine, int, Replicas]]) -> Spans:
    return Spans(
        data=pd.DataFrame([bar for each in verified for bar in _bars(*each)]),
        x=Axis("step", theme.COUNT_LABELS),
        lane="case",
        color="found",
        order=theme.VERDICTS,
    )


def _bars(line: StepLine, launch: int, replicas: Replicas) -> Iterator[dict[str, Any]]:
    """Yield what was found over the steps. A step lies left of its number."""
    launches = f", launch {launch}" if len(line.results) > 1 else ""
    until, bad, last = replicas.equal_until or 0, replicas.first_bad, replicas.last_step
    first = last + 1 if bad is None else bad
    ends = [(EQUAL, 0, until), (UNKNOWN, until, first - 1), (_state(replicas), first - 1, last)]
    for found, begin, end in ends:
        if end > begin:
            wrong = found != EQUAL
            yield {
                "case": f"{line.case.workload} on {line.case.backend}{launches}",
                "backend": line.case.backend,
                "_begin": begin,
                "_end": end,
                "found": found,
                "steps": f"{begin + 1} to {end}" if end > begin + 1 else f"{end}",
                "ranks": ", ".join(map(str, replicas.ranks)) if wrong and replicas.ranks else "-",
                "tensors": ", ".join(replicas.tensors[:MOST_TENSORS]) if wrong else "-",
            }
