"""When the level of a series of steps changed, and whether some steps are larger by a period.

Splits are found by ranks (Pettitt's test), which heavy tails do not disturb; a split counts if the
medians on its two sides differ by as much as matters. No torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ddpbench.watch.judging.history import Floats, FloatsOrLess

SHORTEST = 16  # steps of one level
CHANCE = 1e-4  # of a split where there is none, if neighbouring steps are independent
LONGEST = 128  # steps of a period
FEWEST = 4  # periods
CLEAR = 6.0  # standard errors between the late steps and the others
FAR = 6.0  # spreads, at which single steps are clipped
FITS = 0.8  # of the late steps are nearer to their level than to the others'


def find_parts(values: FloatsOrLess, least: float) -> list[slice]:
    """Divide a series into parts whose medians differ from their neighbours' by at least this."""
    splits = _splits(values, 0)
    while splits:
        levels = [float(np.median(part)) for part in np.split(values, splits)]
        changes = np.abs(np.diff(levels))
        smallest = int(changes.argmin())
        if changes[smallest] >= least:
            break
        del splits[smallest]
    return [slice(a, b) for a, b in zip([0, *splits], [*splits, len(values)], strict=True)]


def _splits(values: FloatsOrLess, first: int) -> list[int]:
    """Return the indices, plus `first`, at which parts of unlike distribution meet."""
    count = len(values)
    if count < 2 * SHORTEST:
        return []
    ranks = np.argsort(np.argsort(values)) + 1
    after = np.arange(1, count + 1)
    apart = np.abs(2 * np.cumsum(ranks) - after * (count + 1))[SHORTEST - 1 : count - SHORTEST]
    split = int(apart.argmax()) + SHORTEST
    if 2 * math.exp(-6 * float(apart.max()) ** 2 / (count**3 + count**2)) > CHANCE:
        return []
    before, later = _splits(values[:split], first), _splits(values[split:], first + split)
    return [*before, first + split, *later]


def standard_error(values: FloatsOrLess) -> float:
    """Return the standard error of the median of neighbouring steps, which resemble each other."""
    low, middle, high = np.percentile(values, [25, 50, 75])
    deviation = float(high - low) / 1.349
    clipped = np.clip(values, middle - 3 * deviation, middle + 3 * deviation) - middle
    power = float((clipped**2).mean())
    alike = max(0.0, float((clipped[1:] * clipped[:-1]).mean()) / power) if power else 0.0
    alike = min(alike, 0.95)
    return 1.2533 * deviation * math.sqrt((1 + alike) / (1 - alike) / len(values))


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
