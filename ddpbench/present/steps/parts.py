"""The budget of a DDP step and its layer groups as bars, and its buckets by size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import altair as alt
import pandas as pd

from ddpbench.analysis import steps
from ddpbench.analysis.spans import EXPOSED_OF, HIDDEN_OF, OPERATIONS, SAVES, WOULD_SAVE
from ddpbench.analysis.step_lines import StepLine
from ddpbench.present import theme
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
BAR, BETWEEN = 15, 9  # pixels: height of a bar, and what is between two rows
ROOM = 1.35  # of the longest bar, for the text behind it, also on a phone
UNEQUAL = 1.5  # ratio of sizes of buckets from which their chart tells something


def budget(lines: Sequence[StepLine], name: str) -> Chart | None:
    """Return the parts of a workload's step on all backends; None if none is known."""
    known = [line for line in lines if any(is_known(part) for part in _parts(line))]
    if not known:
        return None
    frame = pd.DataFrame([row for line in known for row in _bars(line)])
    launches = pd.DataFrame([row for line in known for row in _launches(line, frame)])
    if len(launches):  # the text stands behind the ticks
        ticks = launches.groupby(["part", "backend"])["at"].max().to_dict()
        keys = zip(frame["part"], frame["backend"], frame["right"], strict=True)
        frame["right"] = [max(right, ticks.get((part, name), right)) for part, name, right in keys]
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
    table = _budget_table(frame, notes)
    return Chart(name, "Budget of a step", caption, _draw_budget(frame, launches), table)


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
        "part": name,
        "backend": line.case.backend,
        "begin": begin,
        "end": end,
        "low": begin + interval.low if interval else None,
        "high": begin + interval.high if interval else None,
        "right": max(begin, end, begin + interval.high if interval else end),
        "resolved": part is None or part.resolved,
        "ms": uncertain(part, ms(length, step)) if part else ms(length, step),
        "interval": span(own, step),
        "share": (uncertain(part, f"{share} %") if part else f"{share} %") + rank,
        "source": part.source if part else "",
    }


def _launches(line: StepLine, frame: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Yield where the parts of each launch end, if there are several."""
    if len(line.results) < 2:
        return
    own = frame[frame["backend"] == line.case.backend].set_index("part")
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
            text = f"{ms(seconds, line.seconds)} ms"
            yield {
                "part": name,
                "backend": line.case.backend,
                "at": at,
                "ms": text,
                "launch": number,
            }


def _draw_budget(frame: pd.DataFrame, launches: pd.DataFrame) -> dict[str, Any]:
    backends = list(dict.fromkeys(frame["backend"]))
    parts = [name for name in PARTS if name in set(frame["part"])]
    ends = pd.concat([frame["begin"], frame["low"], frame["right"]]).astype(float)
    most, least = float(ends.max()), min(0.0, float(ends.min()))
    x = alt.X(
        "begin:Q",
        title="time of a step",
        scale=alt.Scale(domain=[least, most * ROOM], nice=False),
        axis=theme.time_axis(),
    )
    y = alt.Y("part:N", title=None, sort=parts, axis=alt.Axis(labelLimit=150, grid=False))
    offset = alt.YOffset("backend:N", sort=backends)
    tips = theme.tips("part", "backend", "ms", "interval", share="of the step")
    base = theme.choose_backends(alt.Chart(frame), backends).encode(y=y, yOffset=offset)
    bars = base.mark_bar(height={"band": 0.85}).encode(
        x=x,
        x2="end:Q",
        color=theme.backend_color(backends),
        opacity=alt.condition("datum.resolved", alt.value(1.0), alt.value(0.35)),
        tooltip=tips,
    )
    texts = base.mark_text(align="left", dx=5, fontSize=11).encode(x="right:Q", text="share:N")
    layers = [bars, texts]
    if frame["low"].notna().any():
        rules = base.mark_rule(strokeWidth=1.5).encode(x="low:Q", x2="high:Q", tooltip=tips)
        layers.append(rules.transform_filter("isValid(datum.low)"))
    if len(launches):
        tips = theme.tips("part", "launch", "backend", "ms")
        ticks = theme.choose_backends(alt.Chart(launches), backends).mark_tick(thickness=1.5)
        layers.append(ticks.encode(y=y, yOffset=offset, x="at:Q", tooltip=tips))
    return theme.layered(layers, len(parts) * (len(backends) * BAR + BETWEEN))


def _budget_table(frame: pd.DataFrame, legend: Sequence[str]) -> Table:
    names = ["backend", "part", "ms", "interval", "share"]
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
    spec = _draw_buckets(timed) if several else None
    return Chart(name, "Buckets", caption, spec, table)


def _bucket_cells(line: StepLine, bucket: Bucket) -> tuple[str, ...]:
    *first, wait, late = bucket_row(bucket, line.seconds)
    return (line.case.backend, *first, span(bucket.wire.interval, line.seconds), wait, late)


def _draw_buckets(timed: Sequence[tuple[StepLine, Bucket]]) -> dict[str, Any]:
    frame = pd.DataFrame([_point(line, bucket) for line, bucket in timed])
    backends = list(dict.fromkeys(frame["backend"]))
    x = alt.X(
        "nbytes:Q",
        title="size of the bucket",
        scale=alt.Scale(zero=True),
        axis=alt.Axis(labelExpr="format(datum.value / 1e6, '~g') + ' MB'", tickCount=5),
    )
    y = alt.Y("seconds:Q", title="wire time", axis=theme.time_axis(tickCount=5))
    tips = theme.tips("bucket", "backend", "size", "wire", "interval", "wait", "late rank")
    base = theme.choose_backends(alt.Chart(frame), backends).encode(x=x, tooltip=tips)
    color = theme.backend_color(backends)
    layers = [base.mark_point(size=60).encode(y=y, color=color)]
    if frame["low"].notna().any():
        low = alt.Y("low:Q", title="wire time")
        rules = base.mark_rule().encode(y=low, y2="high:Q", color=color)
        layers.append(rules.transform_filter("isValid(datum.low)"))
    if (frame["late rank"] != "-").any():
        ring = base.mark_point(style="marked", size=220).encode(y="seconds:Q")
        layers.append(ring.transform_filter("datum['late rank'] != '-'"))
    return theme.layered(layers, 220)


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
        "late rank": late,
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
    return Chart(name, "Layer groups", caption, _draw_layers(frame), table)


def _layer_bars(line: StepLine) -> Iterator[dict[str, Any]]:
    """Yield the exposed and the hidden time of each operation, one behind the other in a row."""
    known = line.summary.collectives if line.summary else ()
    ends: dict[str, float] = {}
    for same in merge_layers(known):
        row = f"{name_layers(same)}, {same[0].phase}"
        for what in ("exposed", "hidden"):
            seconds = sum(getattr(each, what).value for each in same)
            begin = ends.get(row, 0.0)
            ends[row] = begin + seconds
            yield {
                "row": row,
                "backend": line.case.backend,
                "operation": same[0].operation,
                "what": what,
                "groups": len(same),
                "begin": begin,
                "end": ends[row],
                "ms": ms(seconds, line.seconds),
            }


def _draw_layers(frame: pd.DataFrame) -> dict[str, Any]:
    rows = list(dict.fromkeys(frame["row"]))
    backends = list(dict.fromkeys(frame["backend"]))
    shown = [name for name in OPERATIONS if name in set(frame["operation"])]
    titles = {"row": "layers", "operation": "operation", "what": "part", "groups": "layer groups"}
    chart = (
        theme.choose_backends(alt.Chart(frame), backends)
        .mark_bar(height={"band": 0.85})
        .encode(
            x=alt.X(
                "begin:Q",
                title="time in a step",
                axis=theme.time_axis(),
            ),
            x2="end:Q",
            y=alt.Y("row:N", title=None, sort=rows, axis=alt.Axis(labelLimit=150, grid=False)),
            yOffset=alt.YOffset("backend:N", sort=backends),
            color=theme.named_color("operation", OPERATIONS, shown),
            opacity=alt.condition("datum.what === 'exposed'", alt.value(1.0), alt.value(0.35)),
            tooltip=[*theme.tips(**titles), *theme.tips("backend", "ms")],
        )
        .properties(height=len(rows) * (len(backends) * BAR + BETWEEN))
    )
    spec: dict[str, Any] = chart.to_dict()
    return spec
