"""How long the next launches of two variants in turns should be. Pure.

A launch's time varies for two reasons. A short launch contains few repetitions: this part shrinks
as the launch gets longer. And launches differ: only more launches reduce that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ddpbench.verdicts.matching import Side
from ddpbench.verdicts.verdict import Floats

USUAL_BETWEEN = 0.03**2  # variance from launch to launch before three pairs show it
# Variance of log times from launch to launch that a few launches may fail to show: 1 %. It keeps
# launches short enough for the error to be the smaller part of what remains.
LEAST_BETWEEN = 0.01**2


@dataclass(frozen=True)
class Spread:
    """Variances of the log time of a launch."""

    within: float  # of a launch with one second per case; it falls as seconds grow
    between: float  # from launch to launch, however long they are


def estimate_spread(differences: Floats, within: Floats, seconds: float) -> Spread:
    """Estimate both variances from launches in pairs.

    differences: log(NEW / BASE) of each pair. within: the variance that each launch's own
    repetitions show. seconds: harmonic mean of the time per case.
    """
    mean = float(np.mean(within))
    if len(differences) < 3:
        return Spread(mean * seconds, USUAL_BETWEEN)
    total = float(np.var(differences, ddof=1)) / 2
    return Spread(mean * seconds, max(total - mean, LEAST_BETWEEN))


def best_seconds(spreads: Sequence[Spread], start_seconds: float, cases: int) -> float:
    """Return the seconds per case with which launches in a given time narrow the interval most.

    A launch takes start_seconds + cases × seconds, and has the variance between + within / seconds.
    The product is smallest at sqrt(start × within / (between × cases)).
    """
    within = sum(each.within for each in spreads)
    between = sum(each.between for each in spreads)
    return math.sqrt(start_seconds * within / (between * cases))


def spread_of(base: Side, new: Side, seconds: Sequence[float]) -> Spread | None:
    """Return the spread of a case; None if launches are too few or do not show their own.

    seconds: per case, in each launch. The launches of both sides are pairs.
    """
    pairs = min(len(base.within), len(new.within), len(seconds))
    if not pairs:
        return None
    logs = np.log([base.times[:pairs], new.times[:pairs]])
    within = np.array([base.within[:pairs], new.within[:pairs]])
    harmonic = 1 / float(np.mean(1 / np.array(seconds[:pairs])))
    return estimate_spread(logs[1] - logs[0], within, harmonic)
