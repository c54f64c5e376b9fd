"""Charts of a step: budget and layer groups as bars, buckets by size, replicas over the steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from ddpbench.analysis import steps
from ddpbench.analysis.spans import EXPOSED_OF, HIDDEN_OF, OPERATIONS, SAVES, WOULD_SAVE
from ddpbench.analysis.step_lines import StepLine
from ddpbench.present import theme
from ddpbench.present.charts.kinds import Axis, Bars, Lines, Spans
from ddpbench.present.steps.budget import bucket_row, merge_layers, name_layers
from ddpbench.present.steps.columns import bounded, ms, percent, span, uncertain
from ddpbench.records.schema import Bucket, Figure, Part, Replicas

STEP, LATE = "= step", "waiting for a rank"
COMPONENTS = (steps.TRANSFER, *EXPOSED_OF.values(), steps.OVERHEAD)  # of the exposed communication
BEFORE = (steps.HIDDEN, *HIDDEN_OF.values())  # drawn so that they end where it begins
_, DIFFERENT, EQUAL, NOT_FINITE, UNKNOWN = theme.VERDICTS
MOST_TENSORS = 6  # that are named
PARTS = (*steps.CHAINS[0], STEP, *COMPONENTS, *BEFORE, SAVES, WOULD_SAVE, LATE)


def draw_budget(known: Sequence[StepLine]) -> Bars:
    """Return the parts of a workload's step on all backends."""
    bars = [sorted(_bars(line), key=lambda bar: PARTS.index(bar["part"])) for line in known]
    frame = pd.DataFrame([bar for each in bars for bar in each])
    ticks = pd.DataFrame([row for line in known for row in _launches(line, frame)])
    x = Axis("time of a step", theme.TIME_LABELS)
    return Bars(data=frame, x=x, row="part", within="backend", ticks=ticks)


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


def draw_buckets(known: Sequence[tuple[StepLine, Bucket]]) -> Lines:
    """Return DDP's buckets on all backends, by their sizes."""
    rows: list[dict[str, Any]] = []
    for line, bucket in known:
        interval = bucket.wire.interval
        texts = bucket_row(bucket, line.seconds)
        rows.append(
            {
                "backend": line.case.backend,
                "bucket": texts[0],
                "parameters": texts[3],
                "wire ms": texts[5],
                "95 %": span(interval, line.seconds),
                "_x": bucket.nbytes,
                "_y": bucket.wire.value,
                "_low": interval.low if interval else None,
                "_high": interval.high if interval else None,
                "_marked": "" if bucket.late_rank is None else f"rank {bucket.late_rank}",
            }
        )
    x = Axis("size of the bucket", theme.MEGABYTE_LABELS, zero=True)
    y = Axis("wire time", theme.TIME_LABELS, zero=True)
    return Lines(data=pd.DataFrame(rows), x=x, y=y, connected=False, height=220)


def draw_layers(timed: Sequence[StepLine]) -> Bars:
    """Return the communication of a workload's layer groups on all backends."""
    return Bars(
        data=pd.DataFrame([bar for line in timed for bar in _layer_bars(line)]),
        x=Axis("time in a step", theme.TIME_LABELS),
        row="layers",
        within="backend",
        color="operation",
        order=OPERATIONS,
    )


def _layer_bars(line: StepLine) -> Iterator[dict[str, Any]]:
    """Yield the exposed and the hidden time of each operation, one behind the other in a row."""
    for same in merge_layers(line):
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


def draw_replicas(verified: Sequence[tuple[StepLine, int, Replicas]]) -> Spans:
    """Return what was found over the steps of each launch, numbered from 1."""
    return Spans(
        data=pd.DataFrame([bar for each in verified for bar in _verdict_bars(*each)]),
        x=Axis("step", theme.COUNT_LABELS),
        lane="case",
        color="found",
        order=theme.VERDICTS,
    )


def _verdict_bars(line: StepLine, launch: int, replicas: Replicas) -> Iterator[dict[str, Any]]:
    """Yield what was found over the steps. A step lies left of its number."""
    until, bad, last = replicas.equal_until or 0, replicas.first_bad, replicas.last_step
    first = last + 1 if bad is None else bad
    state = EQUAL if not replicas.failed else NOT_FINITE if replicas.equal else DIFFERENT
    ends = [(EQUAL, 0, until), (UNKNOWN, until, first - 1), (state, first - 1, last)]
    for found, begin, end in ends:
        if end > begin:
            wrong = found != EQUAL
            yield {
                "case": f"{line.case.backend}, launch {launch}",
                "backend": line.case.backend,
                "_begin": begin,
                "_end": end,
                "found": found,
                "steps": f"{begin + 1} to {end}" if end > begin + 1 else f"{end}",
                "ranks": ", ".join(map(str, replicas.ranks)) if wrong and replicas.ranks else "-",
                "tensors": ", ".join(replicas.tensors[:MOST_TENSORS]) if wrong else "-",
            }
