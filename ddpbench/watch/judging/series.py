"""When the level of a series of steps changed, and whether some steps are larger by a period.

Splits are found by ranks (Pettitt's test), which heavy tails do not disturb; a split counts if the
medians on its two sides differ by as much as matters. No torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ddpbench.watch.judging.history import Floats

SHORTEST = 16  # steps of one level
CHANCE = 1e-4  # of a split where there is none, if neighbouring steps are independent
LONGEST = 128  # steps of a period
FEWEST = 4  # periods
CLEAR = 6.0  # standard errors between the late steps and the others
FAR = 6.0  # spreads, at which single steps are clipped
FITS = 0.8  # of the late steps are nearer to their level than to the others'


def find_parts(values: Floats, least: float) -> list[slice]:
    """Divide a series into parts whose medians differ from their neighbours' by at least this."""
    splits = _find_splits(values, 0)
    while splits:
        changes = np.abs(np.diff([np.median(part) for part in np.split(values, splits)]))
        smallest = int(changes.argmin())
        if changes[smallest] >= least:
            break
        del splits[smallest]
    return [slice(a, b) for a, b in zip([0, *splits], [*splits, len(values)], strict=True)]


def _find_splits(values: Floats, first: int) -> list[int]:
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
    before, later = values[:split], values[split:]
    return [*_find_splits(before, first), first + split, *_find_splits(later, first + split)]


def find_standard_error(values: Floats) -> float:
    """Return the standard error of the median of neighbouring steps, which resemble each other."""
    low, middle, high = np.percentile(values, [25, 50, 75])
    deviation = float(high - low) / 1.349
    clipped = np.clip(values, middle - 3 * deviation, middle + 3 * deviation) - middle
    power = float((clipped**2).mean())
    alike = float((clipped[1:] * clipped[:-1]).mean()) / power if power else 0.0
    alike = min(max(alike, 0.0), 0.95)
    return 1.2533 * deviation * math.sqrt((1 + alike) / (1 - alike) / len(values))


@dataclass(frozen=True)
class Period:
    """Steps first, first + every, … of a series are larger, by `clear` standard errors."""

    every: int
    first: int
    clear: float


def find_period(series: Floats) -> Period | None:
    """Return the clearest period in a series of steps; None without one."""
    low, usual, middle = np.percentile(series, [10, 25, 40])
    far = FAR * float(middle - low) / 1.028
    clipped = np.clip(series, usual - far, usual + far) - usual
    place, count, best = np.arange(len(series)), len(series), None
    for every in range(2, min(LONGEST, count // FEWEST) + 1):
        sums, sizes = np.bincount(place % every, clipped), np.bincount(place % every)
        first = int((sums / sizes).argmax())
        is_late = place % every == first
        others = clipped[~is_late]
        error = float(others.std()) / math.sqrt(sizes[first])
        clear = float(sums[first] / sizes[first] - others.mean()) / (error or 1e-9)
        if clear > (best.clear if best else CLEAR) and _fits(series, is_late):
            best = Period(every, first, clear)
    return best


def _fits(series: Floats, is_late: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> bool:
    """Return whether nearly all late values are on their own side of the middle."""
    middle = (np.median(series[is_late]) + np.median(series[~is_late])) / 2
    return bool((series[is_late] > middle).mean() >= FITS)
