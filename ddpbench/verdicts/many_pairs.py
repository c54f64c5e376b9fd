"""Verdicts on several pairs of sides at once, shared by `compare` and the pytest plugin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import expm1

from ddpbench.analysis.stats import Floats
from ddpbench.verdicts import differences, verdict
from ddpbench.verdicts.verdict import FASTER, INCONCLUSIVE, MOST, SLOWER, Chance, Shift

DRIFT, BUSY = "drift", "busy"  # reasons to withhold SLOWER or FASTER; more launches do not help
BUSY_LAUNCHES = 0.5  # share of a side's launches at which a busy host may explain its times


@dataclass(frozen=True)
class Pair:
    """Two comparable sides: float64[launch], seconds, and the smallest change that counts."""

    base: Floats
    new: Floats
    margin: float
    drift: float = 0.0  # by which the sides may differ because they are apart in time
    earlier: int = 0  # runs that show the drift
    busy: tuple[float, float] = (0.0, 0.0)  # share of the launches of each side on a busy host


@dataclass(frozen=True)
class Judgement:
    verdict: str
    shift: Shift | None
    needed: int | None = None  # launches per side, about, to settle INCONCLUSIVE
    why: str = ""
    withheld: str = ""  # DRIFT or BUSY: INCONCLUSIVE for that reason alone
    noticeable: float | None = None  # the change that such a comparison notices; None: none


def judge_pairs(
    pairs: Sequence[Pair], paired: bool = False, confidence: float = verdict.CONFIDENCE
) -> list[Judgement]:
    """Judge each pair; one of several must also pass the test corrected for their number.

    paired: launches at the same index ran one after the other. They are judged as pairs with
    intervals of this confidence, and both sides have the same number.
    """
    shift, chance, false_share = verdict.shift, verdict.chance, verdict.FALSE_SHARE
    if paired:
        shift, chance = verdict.paired_shift, verdict.paired_chance
        false_share = 1 - confidence
    shifts = [shift(pair.base, pair.new, 1 - false_share) for pair in pairs]
    tested = [i for i, found in enumerate(shifts) if found is not None]
    chances: dict[int, Chance] = {}
    if len(tested) > 1:
        alone = [chance(pairs[i].base, pairs[i].new, pairs[i].margin) for i in tested]
        chances = dict(zip(tested, verdict.adjust_chances(alone), strict=True))
    judgements = []
    for i, (found, pair) in enumerate(zip(shifts, pairs, strict=True)):
        judge = partial(verdict.judge, found, pair.margin, chances.get(i), false_share)
        judgement = Judgement(judge(pair.drift), found)
        if judgement.verdict == INCONCLUSIVE and judge() != INCONCLUSIVE:
            why = differences.explain_drift(pair.drift, pair.earlier)
            judgement = replace(judgement, why=why, withheld=DRIFT)
        elif judgement.verdict == INCONCLUSIVE:
            needed = verdict.launches_needed(found, pair.margin, len(pairs))
            judgement = replace(judgement, needed=needed, why=_why(found, pair.margin, needed))
        elif busy := _find_busy_side(judgement.verdict, pair, paired):
            why = f"{busy} was measured on a busy host: measure again"
            judgement = replace(judgement, verdict=INCONCLUSIVE, why=why, withheld=BUSY)
        strict = shift(pair.base, pair.new, 1 - false_share / len(pairs))
        enough = paired or len(pair.base) >= verdict.separable(len(pairs), verdict.FEWEST)
        if found is not None and strict is not None and enough:
            learned = pair.earlier >= differences.FEWEST_RUNS
            change = verdict.noticeable(found, pair.margin, pair.drift, strict, learned)
            judgement = replace(judgement, noticeable=change)
        judgements.append(judgement)
    return judgements


def _find_busy_side(decided: str, pair: Pair, paired: bool) -> str:
    """Return the side that other processes slowed down, if that may explain the verdict.

    If both sides of a pair ran on a busy host, both were slowed down alike.
    """
    base, new = (share >= BUSY_LAUNCHES for share in pair.busy)
    if paired and base and new:
        return ""
    return "NEW" if new and decided == SLOWER else "BASE" if base and decided == FASTER else ""


def _why(shift: Shift | None, margin: float, needed: int | None) -> str:
    launches = f"{f'about {needed}' if needed and needed <= MOST else f'more than {MOST}'} launches"
    if shift is None:
        return f"too few launches: needs {needed} per side"
    if verdict.beyond(shift, margin):
        return f"may be chance among so many cases: needs {launches} per side"
    width = f"±{expm1(shift.half_width) * 100:.1f} %"
    if needed is None:
        return f"{width}: the change is about as large as the margin"
    return f"{width}: needs {launches} per side"
