"""The budget of a DDP step and its layer groups as bars, and its buckets by size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from ddpbench.analysis import steps
from ddpbench.analysis.spans import EXPOSED_OF, HIDDEN_OF, OPERATIONS, SAVES, WOULD_SAVE
from ddpbench.analysis.step_lines import StepLine
from ddpbench.present import theme
from ddpbench.present.charts.kinds import Axis, Bars, Colors, Lines
from ddpbench.present.document import Chart, make_table
from ddpbench.present.steps.budget import (
    LAYER_HEADINGS,
    LAYER_LEFT,
    bucket_row,
    disagreement,
    is_known,
    layer_rows,
    merge_layers,
    name_layers,
    peak_memory,
    timers,
    timing_cost,
)
from ddpbench.present.steps.columns import ms, percent, span, uncertain
from ddpbench.records.schema import Bucket, Interval, Part
from ddpbench.records.table import Table

STEP, LATE = "= step", "waiting for a rank"
COMPONENTS = (steps.TRANSFER, *EXPOSED_OF.values(), steps.OVERHEAD)  # of the exposed communication
BEFORE = (steps.HIDDEN, *HIDDEN_OF.values())  # drawn so that they end where it begins
PARTS = (*steps.CHAINS[0], STEP, *COMPONENTS, *BEFORE, SAVES, WOULD_SAVE, LATE)
NOTES = (disagreement, peak_memory, timers)
UNEQUAL = 1.5  # ratio of sizes of buckets from which their chart tells something


def budget(lines: Sequence[StepLine], name: str) -> Chart | None:
    """Return the parts of a workload's step on all backends; None if none is known."""
    known = [line for line in lines if any(is_known(part) for part in _parts(line))]
    if not known:
        return None
    bars = [row for line in known for row in _bars(line)]
    frame = pd.DataFrame(sorted(bars, key=lambda bar: PARTS.index(bar["row"])))
    launches = pd.DataFrame([row for line in known for row in _launches(line, frame)])
    of = "launches" if len(launches) else "rounds"
    transfer = "that of each operation" if known[0].case.mesh else "exposed transfer"
    caption = (
        f"Median over {of}, and share of the step. Each part begins where "
        f"the one before ends; {transfer} and overhead make up the exposed communication, "
        "hidden communication lies before it. Pale and in parentheses: not clearly above 0."
    )
    if frame["low"].notna().any():
        caption += " Rules: 95 % interval."
    if len(launches):
        caption += " Ticks: the launches."
    notes = [text for line in known for kind in NOTES for text in kind(line)]
    table = _budget_table(pd.DataFrame(bars), notes)
    drawing = Bars(
        data=frame,
        x=Axis("end", "time of a step", theme.TIME_LABELS),
        tips={
            "row": "part",
            "backend": "backend",
            "ms": "ms",
            "interval": "interval",
            "text": "of the step",
        },
        within="backend",
        ticks=launches,
        tick_tips={"row": "part", "launch": "launch", "backend": "backend", "ms": "ms"},
    )
    return Chart(name, "Budget of a step", caption, drawing, table)


def _parts(line: StepLine) -> tuple[Part, ...]:
    return line.summary.budget if line.summary else ()


def _bars(line: StepLine) -> Iterator[dict[str, Any]]:
    """Yield a bar for each part of the step, and for the step."""
    seconds = line.seconds or 0.0
    yield from _chain(line, steps.CHAINS[0], 0.0)
    if line.part(steps.EXPOSED):
        yield _bar(line, STEP, 0.0, seconds, line.interval)
    before = [line.part(name) for name in steps.CHAINS[0] if name != steps.EXPOSED]
    exposed = sum(part.figure.value for part in before if part)
    yield from _chain(line, COMPONENTS, exposed)
    for name in BEFORE:
        yield from _ending(line, name, exposed)
    yield from _chain(line, (SAVES,), seconds)
    yield from _ending(line, WOULD_SAVE, seconds)
    if late := line.part(steps.WAITING):
        yield _bar(line, LATE, 0.0, late.figure.value, late.figure.interval, part=late)


def _ending(line: StepLine, name: str, end: float) -> Iterator[dict[str, Any]]:
    """Yield the bar of a part that ends there, with its interval at its begin."""
    if part := line.part(name):
        bar = _bar(line, name, end - part.figure.value, end, None, part=part)
        if bounds := part.figure.interval:
            bar |= {"low": end - bounds.high, "high": end - bounds.low}
        yield bar


def _chain(line: StepLine, names: Sequence[str], begin: float) -> Iterator[dict[str, Any]]:
    for name in names:
        if part := line.part(name):
            end = begin + part.figure.value
            yield _bar(line, name, begin, end, part.figure.interval, part=part)
            begin = end


def _bar(
    line: StepLine,
    name: str,
    begin: float,
    end: float,
    interval: Interval | None,
    *,
    part: Part | None = None,
) -> dict[str, Any]:
    """Return a bar. interval: of its length; drawn at its end."""
    step, length = line.seconds, end - begin
    own = part.figure.interval if part else line.interval
    share = percent(length / step) if step else "-"
    rank = f": rank {part.rank}" if part and part.rank is not None and part.resolved else ""
    return {
        "row": name,
        "backend": line.case.backend,
        "begin": begin,
        "end": end,
        "low": begin + interval.low if interval else None,
        "high": begin + interval.high if interval else None,
        "pale": part is not None and not part.resolved,
        "ms": uncertain(part, ms(length, step)) if part else ms(length, step),
        "interval": span(own, step),
        "text": (uncertain(part, f"{share} %") if part else f"{share} %") + rank,
        "source": part.source if part else "",
    }


def _launches(line: StepLine, frame: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Yield where the parts of each launch end, if there are several."""
    if len(line.results) < 2:
        return
    own = frame[frame["backend"] == line.case.backend].set_index("row")
    for number, result in enumerate(line.results, 1):
        if result.summary is None:
            continue
        values = {part.name: part.figure.value for part in result.summary.budget}
        values[STEP] = result.summary.step.value
        for name, seconds in values.items():
            if name not in own.index:
                continue
            ending = name in (*BEFORE, WOULD_SAVE)
            at = own.at[name, "end"] - seconds if ending else own.at[name, "begin"] + seconds
            yield {
                "row": name,
                "backend": line.case.backend,
                "end": at,
                "ms": f"{ms(seconds, line.seconds)} ms",
                "launch": number,
            }


def _budget_table(frame: pd.DataFrame, legend: Sequence[str]) -> Table:
    names = ["backend", "row", "ms", "interval", "text"]
    headings = ["backend", "part of a step", "ms", "95 %", "of the step"]
    if frame["source"].any():
        names, headings = [*names, "source"], [*headings, "from"]
    rows = frame[names].itertuples(index=False, name=None)
    return make_table("budget", headings, rows, ("backend", "part of a step", "from"), legend)


def buckets(lines: Sequence[StepLine], name: str) -> Chart | None:
    """Return DDP's buckets on all backends; None if they were not timed."""
    timed = [(line, bucket) for line in lines if line.summary for bucket in line.summary.buckets]
    if not timed:
        return None
    sizes = [bucket.nbytes for _, bucket in timed]
    several = max(sizes) > UNEQUAL * min(sizes)
    caption = (
        "Wire: from the handover of the last rank until the bucket is reduced, including earlier "
        "buckets in the queue; median over rounds, of the rank that waits least."
    )
    if several and any(bucket.wire.interval for _, bucket in timed):
        caption += " Rules: 95 % interval."
    if several and any(bucket.late_rank is not None for _, bucket in timed):
        caption += " Circled: the others wait for one rank."
    headings = ["backend", "#", "MB", "n", "parameters", "ready after ms", "wire ms", "95 %"]
    table = make_table(
        "buckets",
        [*headings, "wait ms", "late rank"],
        [_bucket_cells(line, bucket) for line, bucket in timed],
        left=("backend", "parameters"),
        legend=timing_cost(lines, "buckets"),
    )
    drawing = _draw_buckets(timed) if several else None
    return Chart(name, "Buckets", caption, drawing, table)


def _bucket_cells(line: StepLine, bucket: Bucket) -> tuple[str, ...]:
    *first, wait, late = bucket_row(bucket, line.seconds)
    return (line.case.backend, *first, span(bucket.wire.interval, line.seconds), wait, late)


def _draw_buckets(timed: Sequence[tuple[StepLine, Bucket]]) -> Lines:
    return Lines(
        data=pd.DataFrame([_point(line, bucket) for line, bucket in timed]),
        x=Axis("nbytes", "size of the bucket", theme.MEGABYTE_LABELS, zero=True),
        y=Axis("seconds", "wire time", theme.TIME_LABELS, zero=True),
        tips={
            "bucket": "bucket",
            "backend": "backend",
            "size": "size",
            "wire": "wire",
            "interval": "interval",
            "wait": "wait",
            "marked": "late rank",
        },
        connected=False,
        height=220,
    )


def _point(line: StepLine, bucket: Bucket) -> dict[str, Any]:
    interval = bucket.wire.interval
    backend, index, size, _, _, _, wire, bounds, wait, late = _bucket_cells(line, bucket)
    return {
        "nbytes": bucket.nbytes,
        "seconds": bucket.wire.value,
        "low": interval.low if interval else None,
        "high": interval.high if interval else None,
        "bucket": index,
        "backend": backend,
        "size": f"{size} MB",
        "wire": f"{wire} ms",
        "interval": bounds,
        "wait": f"{wait} ms",
        "marked": "" if late == "-" else f"rank {late}",
    }


def layer_groups(lines: Sequence[StepLine], name: str) -> Chart | None:
    """Return the communication of a workload's layer groups; None if it was not timed."""
    timed = [line for line in lines if line.summary and line.summary.collectives]
    if not timed:
        return None
    frame = pd.DataFrame([bar for line in timed for bar in _layer_bars(line)])
    table = make_table(
        "layer groups",
        ["backend", *LAYER_HEADINGS],
        [(line.case.backend, *row) for line in timed for row in layer_rows(line)],
        ("backend", *LAYER_LEFT),
        timing_cost(timed, "collectives"),
    )
    caption = (
        "How long each group of layers communicates in a step, in the rank that waits least; "
        "median over rounds. Full colour: exposed, the compute waits. Pale: hidden, the compute "
        "goes on."
    )
    drawing = Bars(
        data=frame,
        x=Axis("seconds", "time in a step", theme.TIME_LABELS),
        tips={
            "row": "layers",
            "operation": "operation",
            "what": "part",
            "groups": "layer groups",
            "backend": "backend",
            "ms": "ms",
        },
        colors=Colors("operation", OPERATIONS),
        within="backend",
    )
    return Chart(name, "Layer groups", caption, drawing, table)


def _layer_bars(line: StepLine) -> Iterator[dict[str, Any]]:
    """Yield the exposed and the hidden time of each operation, one behind the other in a row."""
    known = line.summary.collectives if line.summary else ()
    for same in merge_layers(known):
        for what in ("exposed", "hidden"):
            seconds = sum(getattr(each, what).value for each in same)
            yield {
                "row": f"{name_layers(same)}, {same[0].phase}",
                "backend": line.case.backend,
                "operation": same[0].operation,
                "what": what,
                "groups": len(same),
                "seconds": seconds,
                "ms": ms(seconds, line.seconds),
                "pale": what == "hidden",
            }
