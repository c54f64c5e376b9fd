"""What runs of identical code differ by when they are apart in time: a machine drifts, and the
launches of one run do not know it. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

import numpy as np

from ddpbench.analysis.lines import DISAGREEING
from ddpbench.records.schema import Run
from ddpbench.verdicts import matching
from ddpbench.verdicts.differences import differences
from ddpbench.verdicts.matching import AnyCase, Side, Source
from ddpbench.verdicts.verdict import FALSE_SHARE

# Standard deviation of a run's log time where too few runs are stored to know it: 95 % of changes
# within 22 %, the most that was measured on a noisy virtual machine, minutes apart.
ASSUMED = 0.08
FEWEST = 5  # stored runs from which a case's own deviation is taken


@dataclass(frozen=True)
class Drift:
    """Two sides that are apart in time, and what is known of runs like them."""

    seconds: float  # from the end of the one to the beginning of the other
    runs: tuple[int, int]  # of BASE, of NEW
    # Case → log times of stored runs of what BASE is, one each.
    known: Mapping[AnyCase, tuple[float, ...]] = field(default_factory=dict)

    def margin(self, case: AnyCase, cases: int) -> float:
        """Of one of so many cases."""
        return margin(self.known.get(case, ()), cases, self.runs)

    def stored(self, case: AnyCase) -> int:
        """The runs that its margin is of; 0: it is assumed."""
        return len(_enough(self.known.get(case, ())))


def margin(logs: Sequence[float], cases: int, runs: tuple[int, int] = (1, 1)) -> float:
    """The change, as a fraction, that identical code exceeds in some case of at most 5 % of
    comparisons of so many cases, either way (Bonferroni).

    logs: log times of stored runs. A t quantile of so many, a normal one of what is assumed where
    they are too few. runs: those pooled on each side.
    """
    from scipy.stats import norm, t

    share, logs = 1 - FALSE_SHARE / cases, _enough(logs)
    reach = float(norm.ppf(share)) * ASSUMED
    if logs:
        reach = float(t.ppf(share, len(logs) - 1)) * float(np.std(logs, ddof=1))
    return math.expm1(reach * math.sqrt(sum(1 / each for each in runs)))


def _enough(logs: Sequence[float]) -> Sequence[float]:
    return logs if len(logs) >= FEWEST else ()


def moved(base: Side, new: Side) -> str:
    """How a change follows where the hypervisor or the kernel put the ranks' cores, in words; ""
    where it does not, or that is not known.

    A handoff takes 0.4 µs between two cores and 6.5 µs or 18 between others, for minutes, and small
    messages over shared memory follow: such runs of identical code differ by half or more.
    """
    if not base.handoffs or not new.handoffs:
        return ""
    before, after = float(np.median(base.handoffs)), float(np.median(new.handoffs))
    longer = math.copysign(1, math.log(new.seconds / base.seconds))
    if longer * math.log(after / before) < math.log(DISAGREEING):
        return ""
    return (
        f"the ranks' cores are not placed alike: a cache line goes there and back in "
        f"{before * 1e6:.2g} µs in BASE, {after * 1e6:.2g} in NEW"
    )


def drift(base: Source, new: Source, stored: Iterable[Run]) -> Drift | None:
    """What is known of the drift between two sides; None where their launches took turns, or when
    they were is not told.

    stored: runs to learn from; those in another environment than BASE, and NEW's own, are left out.
    """
    seconds = apart(base, new)
    if seconds is None:
        return None
    others = {run.id: run for run in (*stored, *base.runs)}
    for run in new.runs:
        others.pop(run.id, None)
    known: dict[AnyCase, tuple[float, ...]] = {}
    for run in others.values():
        if run.state != "complete" or differences(base.runs, [run]):
            continue
        for case, each in matching.found(Source(run.id, (run,))).items():
            if each.side is not None:
                side = each.side.of_quartiles() or each.side
                known[case] = (*known.get(case, ()), math.log(side.seconds))
    return Drift(seconds, (len(base.runs), len(new.runs)), known)


def apart(base: Source, new: Source) -> float | None:
    """Seconds from the end of the side that was first to the beginning of the other; None: their
    launches took turns, or it is not told."""
    spans = []
    for source in (base, new):
        launches = [launch for run in source.runs for launch in run.launches]
        if not launches or not all(launch.started for launch in launches):
            return None
        ends = [launch.ended or launch.started for launch in launches]
        spans.append((min(_at(launch.started) for launch in launches), max(map(_at, ends))))
    first, second = sorted(spans)
    return second[0] - first[1] if second[0] >= first[1] and first[0] < second[0] else None


def _at(stamp: str) -> float:
    """Seconds of "2026-01-31T12:00:00Z"; 0 for what is no time."""
    try:
        return datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return 0.0
