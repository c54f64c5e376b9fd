"""The noise of a machine: the change below which identical code cannot be told apart."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from ddpbench.records.schema import Run
from ddpbench.verdicts import matching, verdict
from ddpbench.verdicts.matching import AnyCase, Source
from ddpbench.verdicts.verdict import FEWEST, Floats

COMPARISONS = 300  # of identical launches, drawn for one margin
PERCENTILE = 95
MOST = 48  # launches per side that are drawn; beyond, margins shrink with their root
STEPS = (6, 8, 12, 16, 24, 32, 48)  # launches per side that are proposed
# Facts that make machines alike: noise depends on hardware and load, not on a name.
MACHINE = ("cpu_model", "cores_logical", "cores_physical", "virtual_machine", "container")


@dataclass(frozen=True)
class Noise:
    """A calibration of a machine."""

    name: str
    medians: dict[AnyCase, Floats]  # float64[launch], seconds, of identical code
    quartiles: dict[AnyCase, Floats] = field(default_factory=dict)  # lower ones, where known

    @property
    def used(self) -> dict[AnyCase, Floats]:
        """The times of each case by the statistic that compares sides measured today."""
        return {**self.medians, **self.quartiles}

    def margin(self, case: AnyCase, launches: int, statistic: str = "median") -> float:
        """Return the margin as `margin` below; 0 for a case that was not calibrated."""
        known = self.medians if statistic == "median" else self.quartiles
        return margin(known[case], launches) if case in known else 0.0


def pool_launches(name: str, runs: Iterable[Run]) -> Noise:
    """Pool all launches of these runs. Raises ValueError as matching.find_cases."""
    cases = matching.find_cases(Source(name, tuple(runs)))
    sides = {case: each.side for case, each in cases.items() if each.side is not None}
    return Noise(
        name,
        {case: np.array(side.times) for case, side in sides.items()},
        {case: np.array(side.quartiles) for case, side in sides.items() if side.quartiles},
    )


def spread(times: Floats) -> float:
    """Return how much launches vary: the robust deviation of log medians (1.4826 × MAD)."""
    logs = np.log(times)
    return float(1.4826 * np.median(abs(logs - np.median(logs))))


def margin(times: Floats, launches: int) -> float:
    """Return the smallest change, a fraction, that `launches` per side can show; 0 if unknown.

    times: float64[launch], seconds, of identical code. 95 % of comparisons between launches drawn
    from them, for both sides alike, find a smaller change.
    """
    if len(times) < FEWEST or launches < FEWEST:
        return 0.0
    return _margin(tuple(times), min(launches, MOST)) * math.sqrt(min(launches, MOST) / launches)


@lru_cache(maxsize=4096)
def _margin(times: tuple[float, ...], launches: int) -> float:
    draw = np.random.default_rng(0)
    changes = []
    for _ in range(COMPARISONS):
        base, new = draw.choice(times, (2, launches))
        found = verdict.shift(base, new)
        assert found is not None
        changes.append(abs(found.estimate))
    return math.expm1(float(np.percentile(changes, PERCENTILE)))


def launches_for(times: Floats, wanted: float) -> int | None:
    """Return the fewest launches per side, of STEPS, for this margin; None if none suffices."""
    return next((n for n in STEPS if margin(times, n) <= wanted), None)


def machine(run: Run) -> tuple[str, ...]:
    """Return the facts of a run's machine that affect noise; empty if unknown."""
    if not run.launches:
        return ()
    launch = run.launches[0]
    gpus = sorted({str(rank.get("gpu_name")) for rank in launch.ranks})
    return (*(str(launch.facts.get(name)) for name in MACHINE), *gpus)


def serves(calibration: Run, run: Run) -> bool:
    """Whether a calibration holds for a run: on an equal machine, measured no longer."""
    alike = bool(calibration.launches) and machine(calibration) == machine(run)
    plan, other = calibration.plan, run.plan
    return alike and plan.slice_seconds <= other.slice_seconds and plan.precision >= other.precision
