"""Statistics of stamps: pure functions of arrays.

Stamps are int64[world, repetition, 3] in ns: entry, exit, device time; -1 if not taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt

from ddpbench.records.schema import Interval, Summary

Floats = npt.NDArray[np.float64]
Stamps = npt.NDArray[np.int64]

BATCH = 20  # neighbouring repetitions are correlated, medians of batches hardly
FEWEST = 6  # values that a 95 % interval of a median needs
QUANTILES = 21  # of the times of a launch
# percentile → repetitions that its 95 % interval needs
PERCENTILES = {"p50": 6, "p90": 36, "p99": 368, "p99.9": 3688}


@dataclass(frozen=True)
class OverRanks:
    """The stamps of all ranks combined: one value per repetition, in ns."""

    slowest: Stamps
    mean: Floats
    fastest: Stamps
    first_in: Stamps
    last_in: Stamps
    last_out: Stamps
    host_mean: Floats  # by the host's clock, as in other benchmarks, even if `mean` uses another
    host_slowest: Stamps  # by the host's clock

    def times(self, calls: int) -> Floats:
        """Return the seconds of one call in each repetition, on its slowest rank.

        This does not need a common clock.
        """
        return np.asarray(self.slowest * 1e-9 / calls, dtype=np.float64)


def spent_ns(stamps: Stamps) -> Stamps:
    """Return the time of each rank in each repetition: int64[world, repetition]."""
    device = stamps[:, :, 2]
    return device if (device >= 0).all() else stamps[:, :, 1] - stamps[:, :, 0]


def over_ranks(stamps: Stamps, subgroups: Sequence[Sequence[int]] = ()) -> OverRanks:
    """Combine the ranks of each repetition.

    subgroups: of equal size, which work at the same time. Entries and exits are then those of the
    subgroup with the slowest rank, and a rank in no subgroup does not count. Empty: all ranks work
    together.
    """
    spent, host = spent_ns(stamps), stamps[:, :, 1] - stamps[:, :, 0]
    if len(subgroups):
        members = np.array(subgroups)
        slowest = members[spent[members].max(axis=1).argmax(axis=0)].T  # [rank, repetition]
        spent, host = spent[members.ravel()], host[members.ravel()]
        stamps = np.take_along_axis(stamps, slowest[:, :, None], axis=0)
    entry, exits = stamps[:, :, 0], stamps[:, :, 1]
    return OverRanks(
        *(spent.max(axis=0), spent.mean(axis=0), spent.min(axis=0)),
        *(entry.min(axis=0), entry.max(axis=0), exits.max(axis=0)),
        *(host.mean(axis=0), host.max(axis=0)),
    )


def join_repetitions(parts: Sequence[OverRanks]) -> OverRanks:
    """Concatenate repetitions; at least one part."""
    names = [each.name for each in fields(OverRanks)]
    return OverRanks(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def windows_agree(before: Floats, after: Floats) -> bool:
    """Whether two neighbouring warm-up windows agree: means within -50…+10 %, quartiles 5 %."""
    earlier = np.percentile(before, [25, 75])
    if not earlier.all():  # shorter than the clock's step
        return False
    ratio = after.mean() / before.mean()
    quartiles = np.percentile(after, [25, 75]) / earlier
    return bool(0.5 <= ratio <= 1.1 and (abs(quartiles - 1) <= 0.05).all())


def ends_of_median(values: Floats, confidence: float) -> tuple[float, float] | None:
    """Return the exact interval of a median; None if the values are too few for the confidence.

    The ends are the k-th smallest and the k-th largest value. k is the largest number for which
    P(X < k) <= (1 - confidence) / 2, with X binomial of n trials and probability 1/2.
    """
    from scipy.special import bdtr  # scipy.stats has a function for it, but takes 0.9 s to import

    count = np.arange(len(values) // 2)
    k = int((bdtr(count, len(values), 0.5) <= (1 - confidence) / 2).sum())
    inner = np.sort(values)
    return (float(inner[k - 1]), float(inner[-k])) if k else None


def median_interval(times: Floats, confidence: float = 0.95) -> Interval | None:
    """Return the exact binomial interval of the median of batch medians.

    If the batches of 20 are too few for the confidence, the repetitions themselves are used. An
    interval of 95 % needs at least 6 repetitions.
    """
    whole = len(times) // BATCH * BATCH
    batches = np.median(times[:whole].reshape(-1, BATCH), axis=1)
    if (ends := ends_of_median(batches, confidence)) is not None:
        of = f"median of {len(batches)} medians of {BATCH} repetitions"
        return Interval(*ends, confidence, of)
    if (ends := ends_of_median(times, confidence)) is not None:
        return Interval(*ends, confidence, f"median of {len(times)} repetitions")
    return None


def percentiles(times: Floats) -> dict[str, float]:
    """Return the percentiles, in seconds, that FEWEST launches of this length can support."""
    return {
        name: float(np.percentile(times, float(name[1:])))
        for name, fewest in PERCENTILES.items()
        if len(times) * FEWEST >= fewest
    }


def quantiles(times: Floats) -> tuple[float, ...]:
    """Return QUANTILES values from the least to the largest, evenly by rank, to 0.1 ns."""
    return tuple(np.percentile(times, np.linspace(0, 100, QUANTILES)).round(10).tolist())


def outliers(times: Floats, distance: float) -> int:
    """Count values more than `distance` interquartile ranges beyond the quartiles (Tukey)."""
    low, high = np.percentile(times, [25, 75])
    reach = distance * (high - low)
    return int(((times < low - reach) | (times > high + reach)).sum())


def summary(
    over: OverRanks,
    calls: int,
    common_clock: bool,
    single: bool = True,
    *,
    hidden_launch: bool = False,
) -> Summary:
    """Return all figures of one case in one launch, from at least one timed repetition.

    common_clock: whether stamps of different ranks are comparable. single: whether a repetition is
    one call of the operation. Several calls give no percentiles: they would be of averages.
    hidden_launch: whether the host's stamps span the kernel launch alone, not the call.
    """
    times = over.times(calls)
    is_known = common_clock and not hidden_launch

    def median(values: Floats | Stamps) -> float:
        return float(np.median(values)) * 1e-9 / calls

    return Summary(
        repetitions=len(times),
        median_seconds=float(np.median(times)),
        interval=median_interval(times),
        mean_seconds=float(times.mean()),
        min_seconds=float(times.min()),
        max_seconds=float(times.max()),
        percentiles_seconds=percentiles(times) if single else {},
        rank_mean_seconds=median(over.mean),
        rank_min_seconds=median(over.fastest),
        overall_mean_seconds=None if hidden_launch else float(over.host_mean.mean()) * 1e-9 / calls,
        launch_seconds=median(over.host_slowest) if hidden_launch else None,
        outliers=outliers(times, 1.5),
        far_outliers=outliers(times, 3.0),
        quantiles_seconds=quantiles(times) if single else (),
        skew_seconds=float(np.median(over.last_in - over.first_in)) * 1e-9 if is_known else None,
        last_in_seconds=median(over.last_out - over.last_in) if is_known else None,
        global_seconds=median(over.last_out - over.first_in) if is_known else None,
    )


def over_launches(medians: Floats) -> tuple[float, Interval | None]:
    """Return the median of launch medians, and its exact interval, which needs 6 launches."""
    centre = float(np.median(medians))
    if (ends := ends_of_median(medians, 0.95)) is None:
        return centre, None
    return centre, Interval(*ends, 0.95, f"median of {len(medians)} launches")


# Rank 0 keeps at most KEPT_STAMPS stamps of a case's first repetitions, so that its memory does not
# grow with the ranks. Below 210 ranks these are all repetitions. Figures are of all stamps.
KEPT_STAMPS = 2**20  # ranks × repetitions
GATHERED_STAMPS = 2**22  # at once: 96 MiB
# int64[row, 5]: repetition, rank, entry, exit, device time
Rows = npt.NDArray[np.int64]


@dataclass
class Kept:
    """The repetitions of a case's warm-up, or its timed ones; filled on rank 0 only.

    subgroups: ranks that work together; other ranks are not kept. Empty: all ranks work together.
    """

    subgroups: Sequence[Sequence[int]] = ()
    over: list[OverRanks] = field(default_factory=list)  # of every repetition, burst by burst
    repetitions: int = 0
    _whole: list[Stamps] = field(default_factory=list)

    def add(self, stamps: Stamps) -> None:
        """Add a gathered burst: int64[world, repetition, 3]."""
        world, count, _ = stamps.shape
        self.over.append(over_ranks(stamps, self.subgroups))
        room = max(0, KEPT_STAMPS // world - self.repetitions)
        if room:
            self._whole.append(stamps[:, :room].copy())
        self.repetitions += count

    def rows(self) -> Rows:
        """Return all kept rows, rank by rank."""
        if not self._whole:
            return np.empty((0, 5), np.int64)
        stamps = np.concatenate(self._whole, axis=1)
        world, count, _ = stamps.shape
        rank, repetition = np.indices((world, count)).reshape(2, -1)
        rows = np.column_stack([repetition, rank, stamps.reshape(-1, 3)])
        members = [rank for subgroup in self.subgroups for rank in subgroup]
        return rows[np.isin(rank, members)] if members else rows
