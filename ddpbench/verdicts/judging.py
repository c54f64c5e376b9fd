"""The verdicts on several pairs of sides at once: what `compare` and the pytest plugin share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ddpbench.verdicts import verdict
from ddpbench.verdicts.verdict import INCONCLUSIVE, Floats, Shift


@dataclass(frozen=True)
class Pair:
    """Two sides that may be compared: float64[launch], seconds, and the margin of a change."""

    base: Floats
    new: Floats
    margin: float
    drift: float = 0.0  # what the sides may differ by because they are apart in time


@dataclass(frozen=True)
class Judged:
    """What is found of a pair."""

    verdict: str
    shift: Shift | None
    needed: int | None = None  # launches a side, about, where it is INCONCLUSIVE
    why: str = ""
    drifts: bool = False  # it is INCONCLUSIVE for no other reason than that they are apart in time


def judged(
    pairs: Sequence[Pair], paired: bool = False, confidence: float = verdict.CONFIDENCE
) -> list[Judged]:
    """One of several must also pass the test that is corrected for their number.

    paired: launches at the same place are neighbours in time, and judged as pairs with intervals
    of this confidence; the pairs then have as many on both sides.
    """
    shift, chance, false_share = verdict.shift, verdict.chance, verdict.FALSE_SHARE
    if paired:
        shift = partial(verdict.paired_shift, confidence=confidence)
        chance, false_share = verdict.paired_chance, 1 - confidence
    shifts = [shift(each.base, each.new) for each in pairs]
    tested = [i for i, found in enumerate(shifts) if found is not None]
    chances: dict[int, verdict.Chance] = {}
    if len(tested) > 1:
        each_alone = [chance(pairs[i].base, pairs[i].new, pairs[i].margin) for i in tested]
        chances = dict(zip(tested, verdict.adjusted(each_alone), strict=True))
    return [
        _one(found, each, chances.get(i), false_share, len(pairs))
        for i, (found, each) in enumerate(zip(shifts, pairs, strict=True))
    ]


def _one(
    found: Shift | None, pair: Pair, swept: verdict.Chance | None, false_share: float, of: int
) -> Judged:
    margin = pair.margin
    name = verdict.judge(found, margin, swept, false_share, pair.drift)
    if name != INCONCLUSIVE:
        return Judged(name, found)
    if verdict.judge(found, margin, swept, false_share) != INCONCLUSIVE:
        return Judged(
            name, found, None, f"runs apart may differ by ±{pair.drift * 100:.1f} %", True
        )
    needed = verdict.launches_needed(found, margin, of)
    return Judged(name, found, needed, _why(found, margin, needed))


def _why(found: Shift | None, margin: float, needed: int | None) -> str:
    """Why it is INCONCLUSIVE, and what would help."""
    if found is None:
        return f"too few launches, needs {needed} a side"
    if verdict.beyond(found, margin):
        return f"may be chance among so many cases, needs about {needed} launches a side"
    width = f"±{math.expm1(found.half_width) * 100:.1f} %"
    if needed is None:
        return f"{width}, at the margin"
    return f"{width}, needs about {needed} launches a side"
