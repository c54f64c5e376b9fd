"""Tables of where the time of a step goes: the budget, DDP's buckets, and layer groups."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ddpbench.analysis import steps
from ddpbench.analysis.step_lines import StepLine
from ddpbench.present.document import make_table
from ddpbench.present.steps.columns import bounded, ms, percent, span, uncertain, with_backend
from ddpbench.records.schema import Bucket, Collective, Part
from ddpbench.records.table import Table

BUCKETS, ENDS = 12, 5  # up to BUCKETS are shown, else ENDS at either end
NAME = 24  # characters of a parameter's name
LAYERS = 12  # rows; with more, equal layer groups share one
LAYER_HEADINGS = (
    *("layers", "groups", "phase", "operation", "MB", "exposed ms", "hidden ms", "hidden %"),
    *("wait ms", "late rank"),
)
LAYER_LEFT = ("layers", "phase", "operation")


def budget(group: Sequence[StepLine]) -> Table | None:
    """Return the parts of a step, and what could be gained; None if no part is known."""
    measured = [line for line in group if line.summary and line.summary.budget]
    known = [line for line in measured if any(map(is_known, _parts(line)))]
    cells = [row for line in known for row in with_backend(line, list(_rows(line)))]
    headings = ["backend", "part of a step", "ms", "95 %", "% of step", "from"]
    if not any(part.source for line in known for part in _parts(line)):
        cells, headings = [row[:-1] for row in cells], headings[:-1]
    notes = [*gain(known)]
    if few := [line.case.backend for line in measured if line not in known]:
        notes.append(f"no budget on {', '.join(few)}: it needs six rounds, or six launches")
    notes += [text for line in measured for text in (*disagreement(line), *timers(line))]
    notes += [text for line in group for text in peak_memory(line)]
    left = ("backend", "part of a step", "from")
    return make_table("budget", headings, cells, left, notes) if cells or notes else None


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


def gain(known: Sequence[StepLine]) -> Iterator[str]:
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


def disagreement(line: StepLine) -> Iterator[str]:
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


def peak_memory(line: StepLine) -> Iterator[str]:
    if line.summary and line.summary.peak_nbytes:
        on_device = line.case.clock == "device"
        what = "tensors" if on_device else "resident memory, with Python and its libraries"
        size = f"{line.summary.peak_nbytes / 1e6:.0f} MB of {what}"
        yield f"peak of a step on {line.case.backend}: {size}, in the rank that needs most"


def timers(line: StepLine) -> Iterator[str]:
    timers = line.summary.timers if line.summary else {}
    if timers:
        texts = [f"{name} {ms(seconds, line.seconds)}" for name, seconds in timers.items()]
        yield f"DDP's own timers, slowest rank's ms on {line.case.backend}: {', '.join(texts)}"


def buckets(group: Sequence[StepLine]) -> Table | None:
    """Return DDP's buckets in the order of reduction; None if they were not timed."""
    cells = [row for line in group for row in with_backend(line, _bucket_rows(line))]
    headings = ["backend", "#", "MB", "n", "parameters", "ready after ms", "wire ms", "wait ms"]
    headings, left = [*headings, "late rank"], ("backend", "parameters")
    cost = timing_cost(group, "buckets")
    return make_table("buckets", headings, cells, left, cost) if cells else None


def _bucket_rows(line: StepLine) -> list[list[str]]:
    buckets = line.summary.buckets if line.summary else ()
    if len(buckets) <= BUCKETS:
        return [bucket_row(bucket, line.seconds) for bucket in buckets]
    middle = buckets[ENDS:-ENDS]
    late = {bucket.late_rank for bucket in middle} - {None}
    longest = (
        max(bucket.handed_seconds for bucket in middle),
        max(bucket.wire.value for bucket in middle),
        max(bucket.wait.value for bucket in middle),
    )
    between = [
        "…",
        f"{sum(bucket.nbytes for bucket in middle) / 1e6:.2f}",
        str(sum(bucket.parameters for bucket in middle)),
        f"{len(middle)} buckets: sums, largest ms",
        *(ms(seconds, line.seconds) for seconds in longest),
        " ".join(sorted(map(str, late))) or "-",
    ]
    first, last = (
        [bucket_row(bucket, line.seconds) for bucket in end]
        for end in (buckets[:ENDS], buckets[-ENDS:])
    )
    return [*first, between, *last]


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


def timing_cost(group: Sequence[StepLine], what: str) -> list[str]:
    """State by how much taking the time of the buckets, or the collectives, lengthens a step."""
    costs = []
    for line in group:
        summary = line.summary
        part = summary.observer if summary and (summary.buckets or summary.collectives) else None
        if part is not None and is_known(part):
            value, interval = bounded(part, line.seconds)
            costs.append(f"{value} ms {interval} on {line.case.backend}")
    return [f"timing the {what} lengthens a step by {', '.join(costs)}"] if costs else []


def collectives(group: Sequence[StepLine]) -> Table | None:
    """Return what each layer group communicates; None if no collective was timed."""
    cells = [row for line in group for row in with_backend(line, layer_rows(line))]
    headings, left = ["backend", *LAYER_HEADINGS], ("backend", *LAYER_LEFT)
    cost = timing_cost(group, "collectives")
    return make_table("layer groups", headings, cells, left, cost) if cells else None


def layer_rows(line: StepLine) -> list[list[str]]:
    """Return a row for each layer group, phase and operation, equal ones merged if many."""
    known = line.summary.collectives if line.summary else ()
    return [_layer_row(same, line.seconds) for same in merge_layers(known)]


def merge_layers(collectives: Sequence[Collective]) -> list[list[Collective]]:
    """Put equal layer groups together: of one phase, operation and size, in order of the calls."""
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
