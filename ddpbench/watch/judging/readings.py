"""What was read over time, as means of each moment of a timeline. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ddpbench.records.load import Load
from ddpbench.records.watched import LOSS, Moment
from ddpbench.watch.judging.history import EXCESS_OWN, READ, STEP, Floats, History
from ddpbench.watch.judging.samples import Samples

DIGITS = 6  # of a stored mean
RESOLUTION = 6  # decimals of a lateness in seconds


def add_readings(history: History, moments: Sequence[Moment]) -> list[Moment]:
    """Return the moments with the load, the loss and the values of their steps."""
    if not moments:
        return []
    loads = _read_load_means(history.loads, moments)
    values: list[dict[str, float]] = [{} for _ in moments]
    for name, kept in history.values.items():
        read = kept.values[kept.evenly()]
        means = _take_means(read[:, STEP], read[:, READ], moments)[:, 0]
        for place in np.flatnonzero(np.isfinite(means)).tolist():
            values[place][name] = float(f"{means[place]:.{DIGITS}g}")
    return [
        replace(moment, load=load, loss=named.pop(LOSS, None), values=named)
        for moment, load, named in zip(moments, loads, values, strict=True)
    ]


def find_lateness(kept: Samples, moments: Sequence[Moment]) -> tuple[float | None, ...]:
    """Return a rank's own time beyond that of the others, the mean in each moment, in seconds."""
    even = kept.evenly()
    late = _take_means(kept.number[even], kept.values[even][:, EXCESS_OWN, None], moments)[:, 0]
    return tuple(round(each, RESOLUTION) if each == each else None for each in late.tolist())


def _read_load_means(kept: Samples, moments: Sequence[Moment]) -> list[Load | None]:
    read = kept.values[kept.evenly()]
    means = _take_means(read[:, STEP], read[:, READ], moments)
    return [_make_load(row) if row[0] == row[0] else None for row in means.tolist()]


def _make_load(row: Sequence[float]) -> Load:
    cores, most_cores, memory, gpu_share, gpu_memory = row
    return Load(
        cpu_cores=round(cores, 3),
        most_cpu_cores=round(most_cores, 3),
        memory_nbytes=round(memory),
        gpu_share=round(gpu_share, 3) if gpu_share == gpu_share else None,
        gpu_memory_nbytes=round(gpu_memory) if gpu_memory == gpu_memory else None,
    )


def _take_means(
    steps: npt.NDArray[np.generic], values: npt.NDArray[np.generic], moments: Sequence[Moment]
) -> Floats:
    """Return the mean of the values of each moment; NaN where it has none, or an unknown one.

    steps: of each value; values: [values, columns]; the result: [moments, columns]. What is newer
    than the last moment counts there.
    """
    ends = np.array([moment.step for moment in moments])
    place = np.minimum(np.searchsorted(ends, steps), len(ends) - 1)
    counts = np.bincount(place, minlength=len(ends))
    sums = [np.bincount(place, column, minlength=len(ends)) for column in values.T]
    with np.errstate(invalid="ignore"):
        return np.stack(sums, axis=1) / counts[:, None]
