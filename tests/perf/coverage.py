"""Whether the verdicts of `compare` hold what they promise, on simulated launches.

    ./run_bench.sh python tests/perf/coverage.py [TRIALS]

A launch is a median of 200 autocorrelated repetitions (lag 1: 0.3) around a level of its own:
levels vary by 1.5 %, repetitions by 10 %. Printed: how often the 95 % intervals hold the truth; how
often identical code is called SLOWER or FASTER, also while the machine drifts, and by `ab`, which
looks several times; how often a planted slowdown is found. Exits with 1 when identical code is
called different in more than 5 %.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from scipy.signal import lfilter
from scipy.stats import mannwhitneyu

from ddpbench.analysis import stats
from ddpbench.commands.ab import LOOKS
from ddpbench.verdicts import verdict
from ddpbench.verdicts.verdict import FASTER, INCONCLUSIVE, SLOWER, Shift

Floats = npt.NDArray[np.float64]

REPETITIONS, LAG1, WITHIN, BETWEEN = 200, 0.3, 0.10, 0.015
MARGIN = verdict.MARGIN
DRIFT = 0.12  # of all launches of both sides, from the first to the last
SWEEP = 20
MOST = LOOKS[-1][0]  # pairs


def repetitions(draw: np.random.Generator, launches: int, between: float = BETWEEN) -> Floats:
    """float64[launch, repetition], seconds; the true median is 1."""
    noise = draw.normal(0, math.sqrt(1 - LAG1**2), (launches, REPETITIONS + 20))
    correlated = lfilter([1], [1, -LAG1], noise, axis=1)[:, 20:]
    levels = draw.normal(0, between, (launches, 1))
    return np.asarray(np.exp(levels + WITHIN * correlated), dtype=np.float64)


def medians(draw: np.random.Generator, launches: int, between: float = BETWEEN) -> Floats:
    """float64[launch], seconds."""
    return np.asarray(np.median(repetitions(draw, launches, between), axis=1), dtype=np.float64)


def share(trials: int, happens: Callable[[np.random.Generator], bool]) -> float:
    """Of so many trials, those in which it happens."""
    return sum(happens(np.random.default_rng(seed)) for seed in range(trials)) / trials


def coverage(trials: int) -> None:
    """How often intervals hold what they are of."""

    def within(draw: np.random.Generator) -> bool:
        found = stats.median_interval(repetitions(draw, 1)[0])
        return found is not None and found.low <= 1 <= found.high

    def over(draw: np.random.Generator, launches: int) -> bool:
        found = stats.over_launches(medians(draw, launches))[1]
        return found is not None and found.low <= 1 <= found.high

    def shifted(draw: np.random.Generator, launches: int) -> bool:
        found = verdict.shift(medians(draw, launches), medians(draw, launches) * 1.1)
        return found is not None and found.low <= math.log(1.1) <= found.high

    def paired(draw: np.random.Generator, launches: int) -> bool:
        found = verdict.paired_shift(medians(draw, launches), medians(draw, launches) * 1.1)
        return found is not None and found.low <= math.log(1.1) <= found.high

    print("the 95 % interval holds the truth in")
    print(f"  {share(trials, within):6.1%}  within one launch (of the median over all launches)")
    for launches in (6, 10, 20):
        print(f"  {share(trials, lambda d, n=launches: over(d, n)):6.1%}  {launches} launches")
    for launches in (5, 6, 10, 20):
        got = share(trials, lambda d, n=launches: shifted(d, n))
        print(f"  {got:6.1%}  shift, {launches} launches a side")
    for launches in (6, 10, 20):
        got = share(trials, lambda d, n=launches: paired(d, n))
        print(f"  {got:6.1%}  shift, {launches} pairs")


def false_verdicts(trials: int) -> float:
    """How often identical code is called SLOWER or FASTER: printed; the worst of compare's."""

    def pooled(draw: np.random.Generator) -> bool:
        a, b = (repetitions(draw, 6).ravel() for _ in range(2))
        return bool(mannwhitneyu(a, b).pvalue < 0.05)

    def alone(draw: np.random.Generator, launches: int, between: float) -> bool:
        return changed(verdict.shift(*(medians(draw, launches, between) for _ in range(2))))

    def sweep(draw: np.random.Generator, launches: int, between: float) -> bool:
        sides = [[medians(draw, launches, between) for _ in range(2)] for _ in range(SWEEP)]
        chances = verdict.adjust_chances([verdict.chance(*side, MARGIN) for side in sides])
        shifts = [verdict.shift(*side) for side in sides]
        judged = map(verdict.judge, shifts, [MARGIN] * SWEEP, chances)
        return any(name in (SLOWER, FASTER) for name in judged)

    print(f"\nidentical code is called different, margin {MARGIN:.0%}, in")
    print(f"  {share(trials // 2, pooled):6.1%}  a test of all repetitions of 6 launches, pooled")
    worst = 0.0
    for between in (BETWEEN, 0.10):
        for launches in (5, 6, 10):
            got = share(trials, lambda d, n=launches, b=between: alone(d, n, b))
            print(f"  {got:6.1%}  {launches} launches a side that vary by {between:.1%}")
            worst = max(worst, got)
        got = share(trials // 10, lambda d, b=between: sweep(d, 6, b))
        print(f"  {got:6.1%}  any of {SWEEP} cases, 6 launches a side that vary by {between:.1%}")
        worst = max(worst, got)
    return worst


def changed(found: Shift | None) -> bool:
    """Whether a case alone would be called changed."""
    return verdict.judge(found, MARGIN) in (SLOWER, FASTER)


def drift(trials: int) -> None:
    """Identical code on a machine that slows down steadily."""

    def drifting(draw: np.random.Generator, launches: int) -> Floats:
        slope = np.exp(np.linspace(0, DRIFT, 2 * launches))
        return np.asarray(medians(draw, 2 * launches, 0.005) * slope, dtype=np.float64)

    def one_after_the_other(draw: np.random.Generator, launches: int) -> Shift | None:
        both = drifting(draw, launches)
        return verdict.shift(both[:launches], both[launches:])

    def blocks(draw: np.random.Generator, launches: int) -> Floats:
        both = drifting(draw, launches).reshape(launches, 2)
        return np.asarray(draw.permuted(both, axis=1), dtype=np.float64)

    def by_turns(draw: np.random.Generator, launches: int) -> Shift | None:
        return verdict.shift(*blocks(draw, launches).T)

    def pairs(draw: np.random.Generator, launches: int) -> Shift | None:
        return verdict.paired_shift(*blocks(draw, launches).T)

    ways = {"all of BASE, then all of NEW": one_after_the_other, "by turns": by_turns,
            "by turns, judged as pairs": pairs}  # fmt: skip
    print(f"\nidentical code while the machine slows down by {DRIFT:.0%}: different, left open in")
    for name, way in ways.items():
        for launches in (6, 10):
            wrong = share(trials, lambda d, w=way, n=launches: changed(w(d, n)))
            unsure = share(
                trials,
                lambda d, w=way, n=launches: verdict.judge(w(d, n), MARGIN) == INCONCLUSIVE,
            )
            print(f"  {wrong:6.1%} {unsure:6.1%}  {name}, {launches} launches a side")


def looks(trials: int) -> float:
    """How often `ab`, which looks several times, settles on a change of identical code, and on
    SLOWER for a slowdown: printed; the worst of the first."""

    def launches(draw: np.random.Generator, slow: float, by: float = 1.0) -> Floats:
        base = medians(draw, MOST)
        return np.where(draw.random(MOST) < slow, 1.5 * base, base) * by

    def settled(draw: np.random.Generator, slow: float, by: float) -> str:
        base, new = launches(draw, slow), launches(draw, slow, by)
        for blocks, confidence in LOOKS:
            found = verdict.paired_shift(base[:blocks], new[:blocks], confidence)
            if (name := verdict.judge(found, MARGIN)) != INCONCLUSIVE:
                return name
        return INCONCLUSIVE

    print(f"\nab, up to {MOST} pairs: identical code is called different, + 10 % SLOWER in")
    worst = 0.0
    for slow in (0.0, 0.1):
        wrong = share(trials, lambda d, s=slow: settled(d, s, 1.0) in (SLOWER, FASTER))
        right = share(trials, lambda d, s=slow: settled(d, s, 1.1) == SLOWER)
        told = f"; {slow:.0%} of them half as slow again" if slow else ""
        print(f"  {wrong:6.1%} {right:6.1%}  launches that vary by {BETWEEN:.1%}{told}")
        worst = max(worst, wrong)
    return worst


def power(trials: int) -> None:
    """How often a slowdown of 1.5 margins and one spread of the launches is called SLOWER."""
    print("\na slowdown of 1.5 × margin + the launches' variation is found in")
    for between in (0.005, BETWEEN, 0.05):
        factor = 1 + 1.5 * MARGIN + between
        for launches in (6, 10, 20):

            def slower(draw: np.random.Generator, n: int, b: float, by: float) -> bool:
                found = verdict.shift(medians(draw, n, b), medians(draw, n, b) * by)
                return verdict.judge(found, MARGIN) == SLOWER

            got = share(trials, lambda d, n=launches, b=between, by=factor: slower(d, n, b, by))
            print(f"  {got:6.1%}  {factor - 1:.1%}, {launches} launches a side that vary by "
                  f"{between:.1%}")  # fmt: skip


def main(trials: int) -> int:
    """Print all; 1 if identical code is called different too often."""
    coverage(trials)
    worst = max(false_verdicts(trials), looks(trials))
    drift(trials)
    power(trials)
    print(f"\nworst share of false verdicts: {worst:.1%} (at most 5 %)")
    return int(worst > 0.05)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 400))
