"""Drift: how much runs of identical code on one machine differ if they are apart in time.

The intervals of one run do not show it. Pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

import numpy as np

from ddpbench.records.schema import Run
from ddpbench.verdicts import matching
from ddpbench.verdicts.environments import compare_environments
from ddpbench.verdicts.matching import AnyCase, Source
from ddpbench.verdicts.verdict import FALSE_SHARE

ASSUMED = 0.35  # drift, while there are too few runs to measure it
FEWEST_RUNS = 5  # earlier runs that measure it
# A run that differs only in these counts for the drift. All other differences may change times.
HARMLESS = ("git", "commit", "plan: ")


@dataclass(frozen=True)
class Drift:
    """How far apart in time two sides are, and log times of earlier runs like them."""

    seconds: float  # from the end of the earlier side to the beginning of the later one
    # case → log times of stored runs in BASE's environment, one per run
    known: Mapping[AnyCase, tuple[float, ...]] = field(default_factory=dict)


def drift_margin(logs: Sequence[float], cases: int) -> float:
    """Return the change, a fraction, that two runs of identical code seldom exceed.

    It is the 95th percentile of the changes among earlier runs. If these are few, or if the
    comparison has many cases, the quantile of Student's t is larger: at most 5 % of comparisons
    then show a larger change in any case (Bonferroni).
    """
    if len(logs) < FEWEST_RUNS:
        return ASSUMED
    from scipy.stats import t

    first, second = np.triu_indices(len(logs), 1)
    changes = np.abs(np.take(logs, first) - np.take(logs, second))
    reach = t.ppf(1 - FALSE_SHARE / cases, len(logs) - 1) * np.std(logs, ddof=1) * math.sqrt(2)
    return math.expm1(max(float(np.percentile(changes, 95)), float(reach)))


def estimate_drift(base: Source, new: Source, stored: Iterable[Run]) -> Drift | None:
    """Estimate the drift between two sides; None if launches took turns or have no time stamps.

    stored: runs to learn from; runs in another environment than BASE, and NEW's own, are left out.
    """
    spans = [_find_span(source) for source in (base, new)]
    if not all(spans):
        return None
    first, second = sorted(filter(None, spans))
    if second[0] < first[1] or first[0] == second[0]:
        return None
    others = {run.id: run for run in (*stored, *base.runs)}
    for run in new.runs:
        others.pop(run.id, None)
    known: dict[AnyCase, tuple[float, ...]] = {}
    for run in others.values():
        changed = [each.name for each in compare_environments(base.runs, [run])]
        if run.state != "complete" or not all(name.startswith(HARMLESS) for name in changed):
            continue
        for case, found in matching.find_cases(Source(run.id, (run,))).items():
            if found.side is not None:
                known[case] = (*known.get(case, ()), math.log(found.side.seconds))
    return Drift(second[0] - first[1], known)


def _find_span(source: Source) -> tuple[float, float] | None:
    """Return when the launches of a side began and ended, in seconds; None without stamps."""
    launches = [launch for run in source.runs for launch in run.launches]
    if not launches or not all(launch.started for launch in launches):
        return None
    begins = [launch.started for launch in launches]
    ends = [launch.ended or launch.started for launch in launches]
    stamps = [
        datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()
        for stamp in (min(begins), max(ends))
    ]
    return stamps[0], stamps[1]
