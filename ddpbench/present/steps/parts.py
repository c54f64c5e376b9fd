"""The budget of a DDP step and its layer groups as bars, and its buckets by size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from ddpbench.analysis import steps
from ddpbench.analysis.spans import EXPOSED_OF, HIDDEN_OF, OPERATIONS, SAVES, WOULD_SAVE
from ddpbench.analysis.step_lines import StepLine
from ddpbench.present import theme
from ddpbench.present.charts.kinds import Axis, Bars, Lines
from ddpbench.present.document import Chart, draw_chart, make_table
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
from ddpbench.present.steps.columns import bounded, ms, percent, span, uncertain
from ddpbench.records.schema import Figure, Part

STEP, LATE = "= step", "waiting for a rank"
COMPONENTS = (steps.TRANSFER, *EXPOSED_OF.values(), steps.OVERHEAD)  # of the exposed communication
BEFORE = (steps.HIDDEN, *HIDDEN_OF.values())  # drawn so that they end where it begins
PARTS = (*steps.CHAINS[0], STEP, *COMPONENTS, *BEFORE, SAVES, WOULD_SAVE, LATE)
NOTES = (disagreement, peak_memory, timers)
BUCKET = ("#", "MB", "n", "parameters", "ready after ms", "wire ms", "wait ms", "late rank")
UNEQUAL = 1.5  # ratio of sizes of buckets from which their chart tells something


def budget(lines: Sequence[StepLine], name: str) -> Chart | None:
    """Return the parts of a workload's step on all backends; None if none is known."""
    known = [line for line in lines if line.summary and any(map(is_known, line.summary.budget))]
    if not known:
        return None
    bars = [sorted(_bars(line), key=lambda bar: PARTS.index(bar["part"])) for line in known]
    frame = pd.DataFrame([bar for each in bars for bar in each])
    ticks = pd.DataFrame([row for line in known for row in _launches(line, frame)])
    transfer = "that of each operation" if known[0].case.mesh else "exposed transfer"
    caption = (
        f"Median over {'launches' if len(ticks) else 'rounds'}, and share of the step. Each part "
        f"begins where the one before ends; {transfer} and overhead make up the exposed "
        "communication, hidden communication lies before it. Pale and in parentheses: not clearly "
        "above 0."
    )
    if frame["_low"].notna().any():
        caption += " Rules: 95 % interval."
    if len(ticks):
        caption += " Ticks: the launches."
    if not frame["from"].any():
        frame = frame.drop(columns="from")
    x = Axis("time of a step", theme.TIME_LABELS)
    drawing = Bars(data=frame, x=x, row="part", within="backend", ticks=ticks)
    notes = [text for line in known for kind in NOTES for text in kind(line)]
    return draw_chart(name, "Budget of a step", caption, drawing, notes)


def _bars(line: StepLine) -> Iterator[dict[str, Any]]:
    """Yield a bar for each part of the step, and for the step."""
    step, exposed = line.seconds or 0.0, 0.0
    before = [line.part(name) for name in steps.CHAINS[0] if name != steps.EXPOSED]
    exposed = sum(part.figure.value for part in before if part)
    for names, begin in ((steps.CHAINS[0], 0.0), (COMPONENTS, exposed), ((SAVES,), step)):
        for part in filter(None, map(line.part, names)):
            yield _bar(line, part, begin, begin + part.figure.value)
            begin += part.figure.value
    for names, end in ((BEFORE, exposed), ((WOULD_SAVE,), step)):
        for part in filter(None, map(line.part, names)):
            yield _bar(line, part, end - part.figure.value, end, anchor=end)
    if line.part(steps.EXPOSED):
        yield _bar(line, Part(STEP, Figure(step, line.interval), 1.0, True), 0.0, step)
    if late := line.part(steps.WAITING):
        yield _bar(line, replace(late, name=LATE), 0.0, late.figure.value)


def _bar(
    line: StepLine, part: Part, begin: float, end: float, *, anchor: float | None = None
) -> dict[str, Any]:
    """Return a bar. anchor: its end that does not depend on its length; None: its begin."""
    value, interval = bounded(part, line.seconds)
    share = percent(part.figure.value / line.seconds) if line.seconds else "-"
    share = uncertain(part, f"{share} %")
    if part.rank is not None and part.resolved:
        share += f": rank {part.rank}"
    bounds, bar = part.figure.interval, dict[str, Any](_low=None, _high=None)
    if bounds and anchor is None:
        bar = {"_low": begin + bounds.low, "_high": begin + bounds.high}
    elif bounds:
        bar = {"_low": end - bounds.high, "_high": end - bounds.low}
    return {
        "backend": line.case.backend,
        "part": part.name,
        "ms": value,
        "95 %": interval,
        "of the step": share,
        "from": part.source,
        "_text": share,
        "_pale": not part.resolved,
        "_begin": begin,
        "_end": end,
        **bar,
    }


def _launches(line: StepLine, frame: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Yield where the parts of each launch end, if there are several."""
    own = frame[frame["backend"] == line.case.backend].set_index("part")
    for number, result in enumerate(line.results if len(line.results) > 1 else (), 1):
        if result.summary is None:
            continue
        values = {part.name: part.figure.value for part in result.summary.budget}
        values[STEP] = result.summary.step.value
        for name, seconds in values.items():
            if name in own.index:
                ending = name in (*BEFORE, WOULD_SAVE)
                at = own.at[name, "_end"] - seconds if ending else own.at[name, "_begin"] + seconds
                yield {
                    "part": name,
                    "launch": number,
                    "backend": line.case.backend,
                    "ms": ms(seconds, line.seconds),
                    "_end": at,
                }


def buckets(lines: Sequence[StepLine], name: str) -> Chart | None:
    """Return DDP's buckets on all backends; None if they were not timed."""
    rows: list[dict[str, Any]] = []
    for line, bucket in ((x, b) for x in lines if x.summary for b in x.summary.buckets):
        interval = bucket.wire.interval
        rows.append(
            {
                "backend": line.case.backend,
                **dict(zip(BUCKET, bucket_row(bucket, line.seconds), strict=True)),
                "95 %": span(interval, line.seconds),
                "_x": bucket.nbytes,
                "_y": bucket.wire.value,
                "_low": interval.low if interval else None,
                "_high": interval.high if interval else None,
                "_marked": "" if bucket.late_rank is None else f"rank {bucket.late_rank}",
            }
        )
    if not rows:
        return None
    frame = pd.DataFrame(rows)
    caption = (
        "Wire: from the handover of the last rank until the bucket is reduced, including earlier "
        "buckets in the queue; median over rounds, of the rank that waits least."
    )
    several = frame["_x"].max() > UNEQUAL * frame["_x"].min()
    if several and frame["_low"].notna().any():
        caption += " Rules: 95 % interval."
    if several and any(frame["_marked"]):
        caption += " Circled: the others wait for one rank."
    x = Axis("size of the bucket", theme.MEGABYTE_LABELS, zero=True)
    y = Axis("wire time", theme.TIME_LABELS, zero=True)
    drawing = Lines(data=frame, x=x, y=y, connected=False, height=220)
    chart = draw_chart(name, "Buckets", caption, drawing, timing_cost(lines, "buckets"))
    return chart if several else replace(chart, drawing=None)


def layer_groups(lines: Sequence[StepLine], name: str) -> Chart | None:
    """Return the communication of a workload's layer groups; None if it was not timed."""
    timed = [line for line in lines if line.summary and line.summary.collectives]
    if not timed:
        return None
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
        data=pd.DataFrame([bar for line in timed for bar in _layer_bars(line)]),
        x=Axis("time in a step", theme.TIME_LABELS),
        row="layers",
        within="backend",
        color="operation",
        order=OPERATIONS,
    )
    return Chart(name, "Layer groups", caption, drawing, table)


def _layer_bars(line: StepLine) -> Iterator[dict[str, Any]]:
    """Yield the exposed and the hidden time of each operation, one behind the other in a row."""
    for same in merge_layers(line.summary.collectives if line.summary else ()):
        for what in ("exposed", "hidden"):
            seconds = sum(getattr(each, what).value for each in same)
            yield {
                "layers": f"{name_layers(same)}, {same[0].phase}",
                "operation": same[0].operation,
                "part": what,
                "layer groups": len(same),
                "backend": line.case.backend,
                "ms": ms(seconds, line.seconds),
                "_end": seconds,
                "_pale": what == "hidden",
            }
