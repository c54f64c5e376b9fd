"""Means of load, values and lateness in each moment of a timeline. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ddpbench.records.load import Load
from ddpbench.records.watched import LOSS, Moment
from ddpbench.watch.judging.history import EXCESS_OWN, READ, WHEN, Floats, History
from ddpbench.watch.judging.samples import Samples

Array = npt.NDArray[Any]
DIGITS = 6  # of a stored mean
RESOLUTION = 6  # decimals of a lateness in seconds


def add_readings(history: History, moments: Sequence[Moment]) -> list[Moment]:
    """Return the moments with the load, the loss and the values of their time."""
    if not moments:
        return []
    ends = np.array([moment.ended for moment in moments])
    loads = [_make_load(row) for row in _take_means(history.loads, ends).tolist()]
    steps = np.array([moment.step for moment in moments])
    values: list[dict[str, float]] = [{} for _ in moments]
    for name, kept in history.values.items():
        means = _take_means(kept, steps)[:, 0]
        for place in np.flatnonzero(np.isfinite(means)).tolist():
            values[place][name] = float(f"{means[place]:.{DIGITS}g}")
    return [
        replace(moment, load=load, loss=named.pop(LOSS, None), values=named)
        for moment, load, named in zip(moments, loads, values, strict=True)
    ]


def find_lateness(kept: Samples, moments: Sequence[Moment]) -> tuple[float | None, ...]:
    """Return a rank's own time beyond that of the others, the mean in each moment, in seconds."""
    even = kept.evenly()
    steps = np.array([moment.step for moment in moments])
    excess = kept.values[even][:, EXCESS_OWN, None]
    late = _find_means(kept.number[even], excess, steps)[:, 0].tolist()
    return tuple(round(each, RESOLUTION) if math.isfinite(each) else None for each in late)


def _make_load(row: Sequence[float]) -> Load | None:
    cores, most_cores, memory, gpu_share, gpu_memory = row
    if not math.isfinite(cores):
        return None
    return Load(
        cpu_cores=round(cores, 3),
        most_cpu_cores=round(most_cores, 3),
        memory_nbytes=round(memory),
        gpu_share=round(gpu_share, 3) if math.isfinite(gpu_share) else None,
        gpu_memory_nbytes=round(gpu_memory) if math.isfinite(gpu_memory) else None,
    )


def _take_means(kept: Samples, ends: Array) -> Floats:
    """Return the means of what was read, for each moment."""
    read = kept.values[kept.evenly()]
    return _find_means(read[:, WHEN], read[:, READ], ends)


def _find_means(when: Array, values: Array, ends: Array) -> Floats:
    """Return the mean of the values of each moment; NaN where it has none, or an unknown one.

    when: of each value; values: [values, columns]; ends: of the moments, in the unit of `when`; the
    result: [moments, columns]. What is newer than the last moment counts there.
    """
    place = np.minimum(np.searchsorted(ends, when), len(ends) - 1)
    counts = np.bincount(place, minlength=len(ends))
    sums = [np.bincount(place, column, minlength=len(ends)) for column in values.T]
    with np.errstate(invalid="ignore"):
        return np.stack(sums, axis=1) / counts[:, None]
