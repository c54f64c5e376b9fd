"""Repetitions with two usual times: a median between them describes no call.

Hartigan's dip test, the usual method, shows whether there are two modes, but not where they are or
whether it matters: among 1,000 calls it finds the steps of a clock. Its only package (diptest) has
a licence that would bind ours. Here a Gaussian kernel density of the logarithms finds both modes
and the valley between them. `tests/perf/modes.py` compares it with the dip test.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

FEWEST = 100  # repetitions
LEAST_SHARE = 0.1  # of the repetitions in the smaller mode; fewer are a tail, which p99 shows
LEAST_RATIO = 1.25  # of the modes' times; the interval shows a smaller one
DEEPEST = 0.5  # the valley's density, at most, as a share of the lower peak's
BETWEEN = 8  # steps between neighbouring quantiles: without them a long tail has gaps
POINTS = 256  # at which the density is computed


@dataclass(frozen=True)
class Mode:
    """One of two usual times of a call."""

    seconds: float  # median of its repetitions
    share: float  # of all repetitions


def modes(quantiles: Floats, repetitions: int) -> tuple[Mode, ...]:
    """Return the two usual times of repetitions, the shorter first; empty unless there are two.

    Launches that differ from each other have no modes. quantiles: float64[launch, quantile],
    seconds, of each launch, evenly spaced by rank. repetitions: of all launches.
    """
    if repetitions < FEWEST or not quantiles.size or quantiles.min() <= 0:
        return ()
    few = np.arange(quantiles.shape[1])
    many = np.linspace(0, few[-1], BETWEEN * int(few[-1]) + 1)
    logs = np.array([np.interp(many, few, each) for each in np.log(quantiles)])
    cut = _valley(np.sort(logs.ravel()), repetitions)
    if cut is None:
        return ()
    below = (logs < cut).mean(axis=1)
    if np.median(np.minimum(below, 1 - below)) < LEAST_SHARE / 2:
        return ()  # most launches have only one of them
    low, high = (math.exp(float(np.median(logs[side]))) for side in (logs < cut, logs >= cut))
    if high < LEAST_RATIO * low:
        return ()
    share = float((logs < cut).mean())
    return Mode(low, share), Mode(high, 1 - share)


def _valley(logs: Floats, repetitions: int) -> float | None:
    """Return the value between two peaks where the density of these sorted values is lowest."""
    low, high = np.percentile(logs, [0.5, 99.5])  # beyond lies no mode
    quarter, three = np.percentile(logs, [25, 75])
    deviation = float(logs.std())
    if not (deviation and high > low):
        return None
    width = 0.6 * min(deviation, (three - quarter) / 1.34 or deviation) * repetitions**-0.2
    grid = np.linspace(low - 3 * width, high + 3 * width, POINTS)
    density = np.exp(-0.5 * ((grid[:, None] - logs) / width) ** 2).sum(axis=1)
    rising = density[1:] > density[:-1]
    peaks = 1 + np.flatnonzero(rising[:-1] & ~rising[1:])
    best: tuple[float, float] | None = None  # depth, value
    for first, second in pairwise(peaks):
        lowest = first + int(density[first:second].argmin())
        share = float((logs < grid[lowest]).mean())
        if not LEAST_SHARE <= share <= 1 - LEAST_SHARE:
            continue
        beside = min(density[:lowest].max(), density[lowest:].max())
        depth = float(density[lowest] / beside)
        if depth <= DEEPEST and (best is None or depth < best[0]):
            best = depth, float(grid[lowest])
    return None if best is None else best[1]
