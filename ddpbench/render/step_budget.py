"""The tables of where a step's time goes: the budget, and DDP's buckets."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ddpbench.analysis import steps
from ddpbench.analysis.step_lines import StepLine
from ddpbench.records.schema import Bucket, Part, Run
from ddpbench.render.step_columns import bounded, ms, named, percent, span, uncertain
from ddpbench.render.style import Style

BUCKETS, ENDS = 12, 5  # so many buckets are shown, else so many of either end
NAME = 24  # characters of a parameter's name


def budget(group: list[StepLine], run: Run, style: Style) -> str:
    """What the step is made of, and what could be gained; empty where it is not known."""
    measured = [line for line in group if line.summary and line.summary.budget]
    told = [line for line in measured if any(_known(part) for part in _parts(line))]
    cells = [row for line in told for row in named(line, list(_rows(line)))]
    body = [style.table(cells, ["backend", "part of a step", "ms", "95 %", "% of step"])]
    body = [*body, *_gain(told)] if told else []
    if few := [line.case.backend for line in measured if line not in told]:
        body.append(f"too few rounds, or launches, on {', '.join(few)}: a budget needs six")
    body += [words for line in measured for words in _timers(line)]
    return style.block("budget", style.gap.join(body), 1) if body else ""


def _parts(line: StepLine) -> tuple[Part, ...]:
    return line.summary.budget if line.summary else ()


def _known(part: Part) -> bool:
    return part.resolved or part.figure.interval is not None


def _rows(line: StepLine) -> Iterator[list[str]]:
    """A row a part, and the step below those that make it."""
    total = 0.0
    for part in _parts(line):
        # What is not resolved accuses no rank.
        noise = part.rank is not None and not part.resolved
        name = "waiting for any one rank" if noise else part.name
        share = uncertain(part, percent(part.share))
        yield [name, *bounded(part, line.seconds), share]
        total += part.figure.value
        if part.name == steps.EXPOSED and math.isclose(total, line.seconds or 0.0, rel_tol=1e-6):
            yield ["= step", ms(total, total), span(line.interval, total), "100.0"]


def _gain(measured: list[StepLine]) -> Iterator[str]:
    """What could be gained at most by communicating for nothing."""
    known = [(line, _factor(line)) for line in measured]
    told = [f"{factor} faster on {line.case.backend}" for line, factor in known if factor]
    if told:
        both = all(line.part(steps.COMPUTE) for line in measured)
        what = "communication and bucket copies" if both else "communication"
        yield f"without {what}, at most: {', '.join(told)}"


def _factor(line: StepLine) -> str | None:
    found = line.summary.speed_up if line.summary else None
    if found is None or found.interval is None:
        return None
    if found.interval.low <= 1:
        return f"less than ×{max(found.interval.high, 1):.2f}"
    return f"×{found.value:.2f} [{found.interval.low:.2f} … {found.interval.high:.2f}]"


def _timers(line: StepLine) -> Iterator[str]:
    timers = line.summary.timers if line.summary else {}
    if timers:
        words = [f"{name} {ms(seconds, line.seconds)}" for name, seconds in timers.items()]
        yield f"DDP's own timers, slowest rank's ms on {line.case.backend}: {', '.join(words)}"


def buckets(group: list[StepLine], run: Run, style: Style) -> str:
    """Each bucket of DDP's, in the order of reduction; empty where they were not timed."""
    measured = [line for line in group if line.summary and line.summary.buckets]
    cells = [row for line in measured for row in named(line, _bucket_rows(line))]
    if not cells:
        return ""
    heads = ["backend", "#", "MB", "n", "parameters", "handed over ms", "wire ms", "wait ms",
             "late rank"]  # fmt: skip
    told = [f"{words} on {line.case.backend}" for line in measured for words in _observer(line)]
    hook = [f"the hook that timed them adds to a step: {', '.join(told)}"] if told else []
    return style.block("buckets", style.gap.join([style.table(cells, heads), *hook]), 1)


def _bucket_rows(line: StepLine) -> list[list[str]]:
    assert line.summary is not None
    buckets = line.summary.buckets
    if len(buckets) <= BUCKETS:
        return [_bucket_row(bucket, line.seconds) for bucket in buckets]
    first, rest, last = buckets[:ENDS], buckets[ENDS:-ENDS], buckets[-ENDS:]
    late = {bucket.late_rank for bucket in rest} - {None}
    between = [
        "…",
        f"{sum(bucket.nbytes for bucket in rest) / 1e6:.2f}",
        str(sum(bucket.parameters for bucket in rest)),
        f"{len(rest)} buckets: sums, largest ms",
        ms(max(bucket.handed_seconds for bucket in rest), line.seconds),
        ms(max(bucket.wire.value for bucket in rest), line.seconds),
        ms(max(bucket.wait.value for bucket in rest), line.seconds),
        " ".join(sorted(map(str, late))) or "-",
    ]
    rows = [[_bucket_row(bucket, line.seconds) for bucket in those] for those in (first, last)]
    return [*rows[0], between, *rows[1]]


def _bucket_row(bucket: Bucket, step: float | None) -> list[str]:
    first, last = _short(bucket.first), _short(bucket.last)
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


def _short(name: str) -> str:
    return name if len(name) <= NAME else f"…{name[1 - NAME :]}"


def _observer(line: StepLine) -> Iterator[str]:
    part = line.summary.observer if line.summary else None
    if part is not None and _known(part):
        value, interval = bounded(part, line.seconds)
        yield f"{value} ms {interval}"
