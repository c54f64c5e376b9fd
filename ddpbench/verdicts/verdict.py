"""The verdict on two sets of launches: pure functions of launch medians, in seconds.

The launch is the replicate. Repetitions of one launch share the placement of its processes and
pages, so a test on them would find differences in identical code. All computations use logarithms,
so that twice and half are equally far from no change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ddpbench.analysis import stats
from ddpbench.analysis.stats import Floats

MARGIN = 0.03  # the smallest change that counts if both sides are measured in turns
CONFIDENCE = 0.95
FALSE_SHARE = 0.05  # of the changes that a sweep reports may be false, at most
FEWEST = 5  # launches per side that an interval of the shift needs; pairs: stats.FEWEST
MOST = 100  # launches per side; a case that needs more is not settled by launches

SLOWER, FASTER, SAME = "SLOWER", "FASTER", "SAME"
INCONCLUSIVE, INCOMPARABLE, INVALID = "INCONCLUSIVE", "INCOMPARABLE", "INVALID"


@dataclass(frozen=True)
class Shift:
    """The change log(NEW / BASE), and its interval."""

    estimate: float
    low: float
    high: float
    launches: int  # on the side that has fewer; or pairs

    @property
    def half_width(self) -> float:
        """Half the interval's width, in log."""
        return (self.high - self.low) / 2


@dataclass(frozen=True)
class Chance:
    """One-sided p values: NEW is slower than BASE, or faster, by more than the margin."""

    slower: float
    faster: float


def shift(base: Floats, new: Floats, confidence: float = CONFIDENCE) -> Shift | None:
    """The Hodges–Lehmann estimate and its interval (scipy's theilslopes); None below 5 per side.

    base, new: float64[launch], above 0, of independent launches.
    """
    if min(len(base), len(new)) < FEWEST:
        return None
    from scipy.stats import theilslopes

    logs = np.log(np.concatenate([base, new]))
    # Ties make theilslopes' interval too narrow, so tiny offsets separate them.
    logs += np.arange(len(logs)) * 1e-12
    side = np.repeat([0.0, 1.0], [len(base), len(new)])
    found = theilslopes(logs, side, confidence)
    ends = float(found.low_slope), float(found.high_slope)
    return Shift(float(found.slope), *ends, min(len(base), len(new)))


def paired_shift(base: Floats, new: Floats, confidence: float = CONFIDENCE) -> Shift | None:
    """Return how much neighbouring launches differ: the one-sample Hodges–Lehmann estimate.

    It is the median of all means of two differences (also of one with itself). Its exact interval
    inverts Wilcoxon's signed-rank test. Returns None below 6 pairs, or if they are too few for the
    confidence.

    base, new: float64[pair]. Drift from pair to pair cancels. The test needs differences that are
    symmetric about the shift: the random order within each pair ensures this. An interval of their
    plain median (signs only) needs twice the pairs if one launch in ten is slow.
    """
    pairs = len(base)
    if pairs < stats.FEWEST:
        return None
    means = _means(np.log(new) - np.log(base))
    beyond = int(np.searchsorted(_signed_rank(pairs), (1 - confidence) / 2, side="right"))
    if not beyond:
        return None
    return Shift(float(np.median(means)), float(means[beyond - 1]), float(means[-beyond]), pairs)


def _means(differences: Floats) -> Floats:
    """Return the sorted means of any two differences, also of one with itself (Walsh)."""
    first, second = np.triu_indices(len(differences))
    return np.sort((differences[first] + differences[second]) / 2)


@lru_cache(maxsize=MOST)
def _signed_rank(pairs: int) -> Floats:
    """Return P(T <= t) for t = 0 … n(n+1)/2 of Wilcoxon's signed-rank sum without a shift."""
    ways = np.zeros(pairs * (pairs + 1) // 2 + 1)
    ways[0] = 1.0
    for rank in range(1, pairs + 1):
        ways[rank:] = (ways[rank:] + ways[:-rank]) / 2
        ways[:rank] /= 2
    return np.cumsum(ways)


def chance(base: Floats, new: Floats, margin: float) -> Chance:
    """Run one-sided Mann–Whitney tests of a change beyond the margin."""
    from scipy.stats import mannwhitneyu

    slower = mannwhitneyu(new, base * (1 + margin), alternative="greater").pvalue
    faster = mannwhitneyu(new * (1 + margin), base, alternative="less").pvalue
    return Chance(float(slower), float(faster))


def paired_chance(base: Floats, new: Floats, margin: float) -> Chance:
    """Run the same on pairs, by the signed-rank tests that the paired interval inverts."""
    means, limit = _means(np.log(new) - np.log(base)), math.log1p(margin)
    at_most = _signed_rank(len(base))
    slower, faster = (int(n.sum()) for n in (means <= limit, means >= -limit))
    return Chance(float(at_most[slower]), float(at_most[faster]))


def adjust_chances(chances: Sequence[Chance]) -> list[Chance]:
    """Correct the chances of a sweep for their number, per direction (Benjamini–Hochberg)."""
    from scipy.stats import false_discovery_control

    slower = false_discovery_control([each.slower for each in chances])
    faster = false_discovery_control([each.faster for each in chances])
    return [Chance(float(a), float(b)) for a, b in zip(slower, faster, strict=True)]


def judge(
    found: Shift | None,
    margin: float,
    swept: Chance | None = None,
    false_share: float = FALSE_SHARE,
    drift: float = 0.0,
) -> str:
    """Return SLOWER, FASTER, SAME or INCONCLUSIVE.

    swept: the adjusted chances in a sweep of several cases. drift: by how much the sides may differ
    because they are apart in time, a fraction; no smaller change is claimed.
    """
    if found is None:
        return INCONCLUSIVE
    limit, beyond = math.log1p(margin), math.log1p(max(margin, drift))
    if found.low > beyond and (swept is None or swept.slower <= false_share):
        return SLOWER
    if found.high < -beyond and (swept is None or swept.faster <= false_share):
        return FASTER
    return SAME if -limit <= found.low and found.high <= limit else INCONCLUSIVE


def beyond(found: Shift, margin: float) -> bool:
    """Whether the interval is beyond the margin, on either side."""
    return found.low > math.log1p(margin) or found.high < -math.log1p(margin)


def noticeable(strict: Shift, margin: float, drift: float) -> float:
    """Return the change, a fraction, that such a comparison notices.

    A change 1.5 times as large is decided in 19 of 20 simulated comparisons
    (`tests/perf/verdicts.py noticed`), although the middle of its interval and the drift vary.
    strict: the interval that the correction for the number of cases requires.
    """
    varies = math.hypot(2 * strict.half_width, 2 / 3 * math.log1p(drift))
    return math.expm1(math.log1p(max(margin, drift)) + varies)


def launches_needed(found: Shift | None, margin: float) -> int:
    """Return about how many launches per side would decide: R·(half-width/margin)², in log."""
    if found is None:
        return stats.FEWEST
    if beyond(found, margin):  # only the test of the sweep failed
        return found.launches + 1
    needed = found.launches * (found.half_width / math.log1p(margin)) ** 2
    return max(found.launches + 1, math.ceil(needed - 1e-9))
