"""Where the time of a step goes: the budget, DDP's buckets, and layer groups."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from ddpbench.analysis import steps
from ddpbench.analysis.step_lines import StepLine
from ddpbench.present.document import Chart, make_table
from ddpbench.present.steps.columns import bounded, ms, percent, span, uncertain
from ddpbench.records.schema import Bucket, Collective, Part

BUCKETS = 12  # rows of a text
UNEQUAL = 1.5  # ratio of sizes of buckets from which their chart tells something
NAME = 24  # characters of a parameter's name
LAYERS = 12  # rows; with more, equal layer groups share one
LAYER_HEADINGS = (
    *("layers", "groups", "phase", "operation", "MB", "exposed ms", "hidden ms", "hidden %"),
    *("wait ms", "late rank"),
)
LAYER_LEFT = ("layers", "phase", "operation")


def build_budget(name: str, group: Sequence[StepLine]) -> Iterator[Chart]:
    """Yield the parts of a step, and what could be gained."""
    measured = [line for line in group if line.summary and line.summary.budget]
    known = [line for line in measured if any(map(is_known, _parts(line)))]
    cells = [[line.case.backend, *row] for line in known for row in _rows(line)]
    headings = ["backend", "part of a step", "ms", "95 %", "% of step", "from"]
    if not any(part.source for line in known for part in _parts(line)):
        cells, headings = [row[:-1] for row in cells], headings[:-1]
    notes = [*_state_gain(known)]
    if few := [line.case.backend for line in measured if line not in known]:
        notes.append(f"no budget on {', '.join(few)}: it needs six rounds, or six launches")
    notes += [text for line in measured for text in (*_disagreement(line), *_timers(line))]
    notes += [text for line in group for text in _peak_memory(line)]
    if not cells and not notes:
        return
    several = any(len(line.results) > 1 for line in known)
    transfer = "that of each operation" if group[0].case.mesh else "exposed transfer"
    caption = (
        f"Median over {'launches' if several else 'rounds'}, and share of the step. Each part "
        f"begins where the one before ends; {transfer} and overhead make up the exposed "
        "communication, hidden communication lies before it. Pale and in parentheses: not clearly "
        f"above 0. Rules: 95 % interval.{' Ticks: the launches.' if several else ''}"
    )
    table = make_table("budget", headings, cells, ("backend", "part of a step", "from"), notes)
    draw = (lambda: _drawings().draw_budget(known)) if cells else None
    yield Chart(name, "Budget of a step", caption, table, draw, grouped=True)


def _drawings() -> ModuleType:
    from ddpbench.present.steps import drawings  # loads pandas

    return drawings


def _parts(line: StepLine) -> tuple[Part, ...]:
    return line.summary.budget if line.summary else ()


def is_known(part: Part) -> bool:
    return part.resolved or part.figure.interval is not None


def _rows(line: StepLine) -> Iterator[list[str]]:
    """Format one row per part, and the step below the parts that make it up."""
    total = 0.0
    for part in _parts(line):
        # An unresolved wait accuses no rank.
        unnamed = part.rank is not None and not part.resolved
        name = "waiting for any one rank" if unnamed else part.name
        share = uncertain(part, percent(part.share))
        yield [name, *bounded(part, line.seconds), share, part.source]
        total += part.figure.value
        if part.name == steps.EXPOSED and math.isclose(total, line.seconds or 0.0, rel_tol=1e-6):
            yield ["= step", ms(total, total), span(line.interval, total), "100.0", ""]


def _state_gain(known: Sequence[StepLine]) -> Iterator[str]:
    """State what could be gained at most if communication took no time."""
    factors = [(line.case.backend, _factor(line)) for line in known]
    gains = [f"{factor} faster on {backend}" for backend, factor in factors if factor]
    if gains:
        both = all(line.part(steps.COMPUTE) for line in known)
        what = "communication and bucket copies" if both else "communication"
        yield f"without {what}, at most: {', '.join(gains)}"


def _factor(line: StepLine) -> str | None:
    speed_up = line.summary.speed_up if line.summary else None
    if speed_up is None or speed_up.interval is None:
        return None
    low, high = speed_up.interval.low, speed_up.interval.high
    if low <= 1:
        return f"less than ×{max(high, 1):.2f}"
    return f"×{speed_up.value:.2f} [{low:.2f} … {high:.2f}]"


def _disagreement(line: StepLine) -> Iterator[str]:
    """State by how much the exposed communication of the arms differs from that of the spans."""
    overhead, exposed = line.part(steps.OVERHEAD), line.part(steps.EXPOSED)
    if overhead and exposed and line.summary and line.summary.collectives:
        arms = exposed.figure.value
        spans = ms(arms - overhead.figure.value, line.seconds)
        yield (
            f"exposed communication on {line.case.backend}: {ms(arms, line.seconds)} ms from arms, "
            f"{spans} ms from spans; they differ by {percent(abs(overhead.share or 0.0))} % of "
            "the step"
        )


def _peak_memory(line: StepLine) -> Iterator[str]:
    if line.summary and line.summary.peak_nbytes:
        on_device = line.case.clock == "device"
        what = "tensors" if on_device else "resident memory, with Python and its libraries"
        size = f"{line.summary.peak_nbytes / 1e6:.0f} MB of {what}"
        yield f"peak of a step on {line.case.backend}: {size}, in the rank that needs most"


def _timers(line: StepLine) -> Iterator[str]:
    timers = line.summary.timers if line.summary else {}
    if timers:
        texts = [f"{name} {ms(seconds, line.seconds)}" for name, seconds in timers.items()]
        yield f"DDP's own timers, slowest rank's ms on {line.case.backend}: {', '.join(texts)}"


def build_buckets(name: str, group: Sequence[StepLine]) -> Iterator[Chart]:
    """Yield DDP's buckets in the order of reduction, if they were timed."""
    known = [(line, b) for line in group if line.summary for b in line.summary.buckets]
    if not known:
        return
    headings = ["backend", "#", "MB", "n", "parameters", "ready after ms", "wire ms", "wait ms"]
    headings, left = [*headings, "late rank"], ("backend", "parameters")
    cells = [[line.case.backend, *bucket_row(bucket, line.seconds)] for line, bucket in known]
    table = make_table("buckets", headings, cells, left, _timing_cost(group, "buckets"))
    caption = (
        "Wire: from the handover of the last rank until the bucket is reduced, including earlier "
        "buckets in the queue; median over rounds, of the rank that waits least. Rules: 95 % "
        "interval. Circled: the others wait for one rank."
    )
    sizes = [bucket.nbytes for _, bucket in known]
    draw = (lambda: _drawings().draw_buckets(known)) if max(sizes) > UNEQUAL * min(sizes) else None
    more: dict[str, Any] = {"grouped": True, "most": BUCKETS, "spread": True}
    yield Chart(name, "Buckets", caption, table, draw, **more)


def bucket_row(bucket: Bucket, step: float | None) -> list[str]:
    first, last = _shorten(bucket.first), _shorten(bucket.last)
    return [
        str(bucket.index),
        f"{bucket.nbytes / 1e6:.2f}",
        str(bucket.parameters),
        first if bucket.parameters == 1 else f"{first} … {last}",
        ms(bucket.handed_seconds, step),
        ms(bucket.wire.value, step),
        ms(bucket.wait.value, step),
        "-" if bucket.late_rank is None else str(bucket.late_rank),
    ]


def _shorten(name: str) -> str:
    return name if len(name) <= NAME else f"…{name[1 - NAME :]}"


def _timing_cost(group: Sequence[StepLine], what: str) -> list[str]:
    """State by how much taking the time of the buckets, or the collectives, lengthens a step."""
    costs = []
    for line in group:
        summary = line.summary
        part = summary.observer if summary and (summary.buckets or summary.collectives) else None
        if part is not None and is_known(part):
            value, interval = bounded(part, line.seconds)
            costs.append(f"{value} ms {interval} on {line.case.backend}")
    return [f"timing the {what} lengthens a step by {', '.join(costs)}"] if costs else []


def build_layers(name: str, group: Sequence[StepLine]) -> Iterator[Chart]:
    """Yield what each layer group communicates, if the collectives were timed."""
    timed = [line for line in group if line.summary and line.summary.collectives]
    if not timed:
        return
    cells = [
        [line.case.backend, *_layer_row(same, line.seconds)]
        for line in timed
        for same in merge_layers(line)
    ]
    headings, cost = ("backend", *LAYER_HEADINGS), _timing_cost(group, "collectives")
    table = make_table("layer groups", headings, cells, ("backend", *LAYER_LEFT), cost)
    caption = (
        "How long each group of layers communicates in a step, in the rank that waits least; "
        "median over rounds. Full colour: exposed, the compute waits. Pale: hidden, the compute "
        "goes on."
    )
    draw = lambda: _drawings().draw_layers(timed)  # noqa: E731
    yield Chart(name, "Layer groups", caption, table, draw, grouped=True)


def merge_layers(line: StepLine) -> list[list[Collective]]:
    """Put equal layer groups together: of one phase, operation and size, in order of the calls."""
    collectives = line.summary.collectives if line.summary else ()
    if len(collectives) <= LAYERS:
        return [[each] for each in collectives]
    merged: dict[tuple[str, str, int, int], list[Collective]] = {}
    for each in collectives:
        key = (each.phase, each.operation, each.nbytes, each.calls)
        merged.setdefault(key, []).append(each)
    return list(merged.values())


def name_layers(same: Sequence[Collective]) -> str:
    first, last = same[0].layers, same[-1].layers
    return first if first == last else f"{first} … {last}"


def _layer_row(same: Sequence[Collective], step: float | None) -> list[str]:
    exposed = sum(each.exposed.value for each in same)
    hidden = sum(each.hidden.value for each in same)
    late = sorted({each.late_rank for each in same if each.late_rank is not None})
    whole = exposed + hidden
    return [
        name_layers(same),
        str(len(same)),
        same[0].phase,
        same[0].operation,
        f"{sum(each.nbytes for each in same) / 1e6:.2f}",
        ms(exposed, step),
        ms(hidden, step),
        percent(hidden / whole if whole else None),
        ms(sum(each.wait.value for each in same), step),
        " ".join(map(str, late)) or "-",
    ]
