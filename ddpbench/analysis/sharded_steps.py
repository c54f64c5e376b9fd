"""Figures of a step whose collectives were timed one by one: pure functions of arrays.

The parts of the step come from the arms, as steps.py explains. The spans of the arm "timed" divide
the exposed communication among operations and layer groups.

A rank's time in a collective is the transfer plus its wait for other ranks. The rank that comes
last waits least, so the least over the ranks of a process group is the transfer. If several groups
work at once, the slowest counts. This does not need a common clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ddpbench.analysis import steps
from ddpbench.analysis.flags import group_by
from ddpbench.analysis.stats import Floats
from ddpbench.analysis.steps import EXPOSED_OF, HIDDEN_OF, OPERATIONS, Samples, Timed, figure
from ddpbench.records.schema import Collective, Part, StepSummary

LEAST_SECONDS = 1e-6  # hidden time below this is the rounding of stamps


def summarise(samples: Samples, batch_of_all_ranks: int, warm_up: int) -> StepSummary:
    """Return all figures of one case in one launch; arguments as of `steps.summarise`."""
    summary = steps.summarise(samples, batch_of_all_ranks, warm_up)
    peak_nbytes = 0 if samples.peak_nbytes is None else int(samples.peak_nbytes.max())
    summary = replace(summary, peak_nbytes=peak_nbytes)
    if samples.timed is None or not samples.timed.ns.size:
        return summary
    measured, step = _measure(samples, samples.timed), summary.step.value
    parts = [*summary.budget, *_parts(samples, measured, step)]
    parts.sort(key=lambda part: part.rank is not None)  # the wait for a rank comes last
    collectives = tuple(_collectives(samples, measured, step))
    return replace(summary, budget=tuple(parts), collectives=collectives)


@dataclass(frozen=True)
class _Measured:
    """The collectives: seconds[collective, round]; `blocked` is [collective, world, round]."""

    timed: Timed
    exposed: Floats
    hidden: Floats
    wait: Floats
    blocked: Floats


def _measure(samples: Samples, timed: Timed) -> _Measured:
    seconds = np.moveaxis(timed.ns[:, : samples.rounds] * 1e-9, 2, 0)
    rows = []
    for spans, groups in zip(seconds, timed.groups, strict=True):
        begin, blocked, end = np.moveaxis(spans, 2, 0)  # [world, round]
        exposed, whole = _slowest_group(blocked, groups), _slowest_group(end - begin, groups)
        hidden = np.where(whole - exposed < LEAST_SECONDS, 0.0, whole - exposed)
        wait = np.max([np.ptp(blocked[list(ranks)], axis=0) for ranks in groups], axis=0)
        rows.append((exposed, hidden, wait, blocked))
    return _Measured(timed, *map(np.array, zip(*rows, strict=True)))


def _slowest_group(seconds: Floats, groups: Sequence[Sequence[int]]) -> Floats:
    """Return the largest, over all groups, of the least over the ranks of each group."""
    of_groups = [seconds[list(ranks)].min(axis=0) for ranks in groups]
    return np.asarray(np.max(of_groups, axis=0), dtype=np.float64)


def _total(seconds: Floats, numbers: Sequence[int]) -> Floats:
    """Return the sum over some collectives."""
    return np.asarray(seconds[numbers].sum(axis=0), dtype=np.float64)


def _parts(samples: Samples, measured: _Measured, step: float) -> Iterator[Part]:
    """Yield the parts of the exposed communication, then what is hidden.

    exposed all_gather, …   how long the compute waits for them, without waits for other ranks
    communication overhead  exposed communication, from the arms, less all of these: the difference
                            of arms and spans, from ranks out of step, waking threads, bookkeeping
    hidden all_gather, …    how long they are in flight while the compute continues
    """
    spans = measured.timed.spans
    found = group_by(range(len(spans)), lambda i: spans[i].operation)
    kinds = {name: found[name] for name in OPERATIONS if name in found}
    exposed = {name: _total(measured.exposed, numbers) for name, numbers in kinds.items()}
    for name, seconds in exposed.items():
        yield steps.difference(EXPOSED_OF[name], step, seconds)
    if "noop" in samples.stamps:
        arms = (steps.arm_seconds(samples, name) for name in ("ddp", "noop"))
        yield steps.difference(steps.OVERHEAD, step, *arms, *exposed.values())
    for name, numbers in kinds.items():
        yield steps.difference(HIDDEN_OF[name], step, _total(measured.hidden, numbers))


def _collectives(samples: Samples, measured: _Measured, step: float) -> Iterator[Collective]:
    """Yield the figures of each operation of each layer group in each phase."""
    spans = measured.timed.spans
    kinds = group_by(
        range(len(spans)), lambda i: (spans[i].layers, spans[i].phase, spans[i].operation)
    )
    confidence = 1 - 0.05 / samples.world / len(kinds)
    for (layers, phase, operation), numbers in kinds.items():
        blocked = _total(measured.blocked, numbers)
        late: int | None = None
        for ranks in measured.timed.groups[numbers[0]]:
            number = steps.late_rank(blocked[list(ranks)], confidence, steps.LATE_SHARE * step)
            if late is None and number is not None:
                late = ranks[number]
        yield Collective(
            layers=layers,
            phase=phase,
            operation=operation,
            calls=len(numbers),
            nbytes=sum(spans[number].nbytes for number in numbers),
            exposed=figure(_total(measured.exposed, numbers)),
            hidden=figure(_total(measured.hidden, numbers)),
            wait=figure(_total(measured.wait, numbers)),
            late_rank=late,
        )
