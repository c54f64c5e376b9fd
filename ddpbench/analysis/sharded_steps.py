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
from ddpbench.analysis.stats import Floats
from ddpbench.analysis.steps import (
    EXPOSED_OF,
    HIDDEN_OF,
    OPERATIONS,
    SAVES,
    WOULD_SAVE,
    Samples,
    Span,
    difference,
    figure,
)
from ddpbench.records.schema import Collective, Part, StepSummary

LEAST_SECONDS = 1e-6  # hidden time below this is the rounding of stamps


def summarise(samples: Samples, batch_of_all_ranks: int, warm_up: int) -> StepSummary:
    """Return all figures of one case in one launch; arguments as of `steps.summarise`."""
    summary = steps.summarise(samples, batch_of_all_ranks, warm_up)
    step = summary.step.value
    measured = _measure(samples)
    last = [part for part in summary.budget if part.name.startswith(steps.WAITING)]
    parts = [part for part in summary.budget if part not in last]
    parts += [*_parts(samples, measured, step), *_prefetch(samples, step), *last]
    return replace(
        summary,
        budget=tuple(parts),
        collectives=tuple(_collectives(samples, measured, step)),
        peak_nbytes=0 if samples.peak_nbytes is None else int(samples.peak_nbytes.max()),
    )


@dataclass(frozen=True)
class _Measured:
    """A collective: seconds[round]; `blocked` is seconds[world, round]."""

    span: Span
    groups: tuple[tuple[int, ...], ...]
    exposed: Floats
    hidden: Floats
    wait: Floats
    blocked: Floats


def _measure(samples: Samples) -> list[_Measured]:
    timed = samples.timed
    if timed is None or not timed.ns.size:
        return []
    seconds: Floats = np.asarray(timed.ns[:, : samples.rounds], np.float64) * 1e-9
    measured = []
    for number, (span, groups) in enumerate(zip(timed.spans, timed.groups, strict=True)):
        begin, blocked, end = np.moveaxis(seconds[:, :, number], 2, 0)
        least = _slowest_group(blocked, groups)
        whole = _slowest_group(end - begin, groups)
        spreads = [np.ptp(blocked[list(ranks)], axis=0) for ranks in groups]
        wait: Floats = np.asarray(np.max(spreads, axis=0), np.float64)
        hidden = np.where(whole - least < LEAST_SECONDS, 0.0, whole - least)
        measured.append(_Measured(span, groups, least, hidden, wait, blocked))
    return measured


def _slowest_group(seconds: Floats, groups: Sequence[Sequence[int]]) -> Floats:
    """Return the largest, over all groups, of the least over the ranks of each group."""
    of_groups = [seconds[list(ranks)].min(axis=0) for ranks in groups]
    return np.asarray(np.max(of_groups, axis=0), dtype=np.float64)


def _parts(samples: Samples, measured: Sequence[_Measured], step: float) -> Iterator[Part]:
    """Yield the parts of the exposed communication, then what is hidden.

    exposed all_gather, …   how long the compute waits for them, without waits for other ranks
    communication overhead  exposed communication, from the arms, less all of these: the difference
                            of arms and spans, from ranks out of step, waking threads, bookkeeping
    hidden all_gather, …    how long they are in flight while the compute continues
    """
    if not measured:
        return
    kinds = [name for name in OPERATIONS if any(m.span.operation == name for m in measured)]
    exposed, hidden = (
        {n: _sum([getattr(m, what) for m in measured if m.span.operation == n]) for n in kinds}
        for what in ("exposed", "hidden")
    )
    known = [difference(EXPOSED_OF[name], step, exposed[name]) for name in kinds]
    if "noop" in samples.stamps:
        arms = (steps.arm_seconds(samples, "ddp"), steps.arm_seconds(samples, "noop"))
        known.append(difference(steps.OVERHEAD, step, *arms, *exposed.values()))
    known += [difference(HIDDEN_OF[name], step, hidden[name]) for name in kinds]
    yield from filter(None, known)


def _sum(values: Sequence[Floats]) -> Floats:
    return np.asarray(np.sum(values, axis=0), dtype=np.float64)


def _prefetch(samples: Samples, step: float) -> Iterator[Part]:
    """Yield the time per step that gathering the next layers early saves, or would save."""
    for name, slower, faster in ((SAVES, "no_prefetch", "ddp"), (WOULD_SAVE, "ddp", "prefetch")):
        seconds = (steps.arm_seconds(samples, arm) for arm in (slower, faster))
        if (part := difference(name, step, *seconds)) is not None:
            yield part


def _collectives(
    samples: Samples, measured: Sequence[_Measured], step: float
) -> Iterator[Collective]:
    """Yield the figures of each operation of each layer group in each phase."""
    kinds: dict[tuple[str, str, str], list[_Measured]] = {}
    for each in measured:
        key = (each.span.layers, each.span.phase, each.span.operation)
        kinds.setdefault(key, []).append(each)
    for (layers, phase, operation), same in kinds.items():
        exposed, hidden, wait = (
            figure(_sum([getattr(each, name) for each in same]))
            for name in ("exposed", "hidden", "wait")
        )
        assert exposed is not None
        assert hidden is not None
        assert wait is not None
        confidence = 1 - 0.05 / samples.world / len(kinds)
        yield Collective(
            layers=layers,
            phase=phase,
            operation=operation,
            calls=len(same),
            nbytes=sum(each.span.nbytes for each in same),
            exposed=exposed,
            hidden=hidden,
            wait=wait,
            late_rank=_late_rank(same, confidence, steps.LATE_SHARE * step),
        )


def _late_rank(same: Sequence[_Measured], confidence: float, least: float) -> int | None:
    """Return the rank for which the others of its group wait; None if none exceeds the noise."""
    blocked = _sum([each.blocked for each in same])
    for ranks in same[0].groups:
        late = steps.late_rank(blocked[list(ranks)], confidence, least)
        if late is not None:
            return ranks[late]
    return None
