"""When the level of a series changed. No torch.

Splits are found by ranks (Pettitt's test), which heavy tails do not disturb; a split counts if the
medians on its two sides differ by as much as matters.
"""

from __future__ import annotations

import math

import numpy as np

from ddpbench.watch.judging.history import FloatsOrLess

SHORTEST = 16  # steps of one level
CHANCE = 1e-4  # of a split where there is none, if neighbouring steps are independent


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
