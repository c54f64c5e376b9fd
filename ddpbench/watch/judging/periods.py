"""Whether a rank is late in every so many steps. No torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ddpbench.watch.judging.history import Floats

LONGEST = 128  # steps of a period
FEWEST = 4  # periods
CLEAR = 6.0  # standard errors between the late steps and the others
FAR = 6.0  # spreads, at which single steps are clipped
FITS = 0.8  # of the late steps are nearer to their level than to the others'


@dataclass(frozen=True)
class Period:
    """Steps first, first + every, … are larger by `clear` standard errors. every 0: none is."""

    every: int
    first: int
    clear: float


def find_period(series: Floats) -> Period:
    """Return the period in a series of steps."""
    low, usual, middle = np.percentile(series, [10, 25, 40])
    spread = float(middle - low) / 1.028
    clipped = np.clip(series, usual - FAR * spread, usual + FAR * spread) - usual
    place, count, total, power = np.arange(len(series)), len(series), clipped.sum(), clipped**2
    best = Period(0, 0, CLEAR)
    for every in range(2, min(LONGEST, count // FEWEST) + 1):
        residue = place % every
        sums = np.bincount(residue, clipped)
        sizes = np.bincount(residue)
        first = int((sums / sizes).argmax())
        size, rest = int(sizes[first]), count - int(sizes[first])
        rest_mean = (total - sums[first]) / rest
        variance = (power.sum() - power[first::every].sum()) / rest - rest_mean**2
        error = (max(variance, 0.0) / size) ** 0.5
        clear = float(sums[first] / size - rest_mean) / (error or 1e-9)
        if clear > best.clear and _fits(series, residue == first):
            best = Period(every, first, clear)
    return best if best.every else Period(0, 0, 0.0)


def _fits(series: Floats, chosen: npt.NDArray[np.bool_]) -> bool:
    """Whether nearly all chosen values are on their own side of the middle."""
    middle = (np.median(series[chosen]) + np.median(series[~chosen])) / 2
    return bool((series[chosen] > middle).mean() >= FITS)
