"""Raw samples reduced case by case, so that a run of 10⁷ stamps needs the memory of one case."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ddpbench.analysis.stats import Floats
from ddpbench.records import store

if TYPE_CHECKING:
    import pandas as pd

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Repetitions:
    """One case in one launch."""

    case: str  # as its samples name it
    launch: int
    seconds: Floats  # of all calls of each timed repetition, on its slowest rank
    ranks: Ints  # that have stamps, ascending
    # float64[rank], median over repetitions, seconds: the delay after the first rank's entry (by
    # the clocks' stamps, comparable or not), and the time in the call.
    late: Floats
    stay: Floats


def reduce_samples(folder: Path) -> Iterator[Repetitions]:
    """Reduce the samples of a stored run. Raises InvalidRun for a damaged file."""
    for (case, launch), frame in _join_cases(folder):
        timed = frame[frame["repetition"] >= 0]  # below: warm-up
        if len(timed):
            yield _reduce(case, launch, timed)


def _join_cases(folder: Path) -> Iterator[tuple[tuple[str, int], pd.DataFrame]]:
    """Join successive row groups of the same case and launch."""
    import pandas as pd

    last: tuple[tuple[str, int], pd.DataFrame] | None = None
    for frame in store.iterate_samples(folder):
        groups: Any = frame.groupby(["case", "launch"], observed=True, sort=False)
        for (case, launch), part in groups:
            name = str(case), int(launch)
            if last and last[0] == name:
                part = pd.concat([last[1], part])
            elif last:
                yield last
            last = name, part
    if last:
        yield last


def _reduce(case: str, launch: int, frame: pd.DataFrame) -> Repetitions:
    order = np.lexsort((frame["rank"].to_numpy(), frame["repetition"].to_numpy()))
    columns = ("repetition", "rank", "entry_ns", "exit_ns", "device_ns")
    stamps = (frame[name].to_numpy(np.int64)[order] for name in columns)
    repetition, rank, entry, exits, device = stamps
    spent = device if (device >= 0).all() else exits - entry
    starts = np.flatnonzero(np.diff(repetition, prepend=repetition[0] - 1))
    seconds = np.maximum.reduceat(spent, starts) * 1e-9
    ranks = np.unique(rank)
    # If there are very many ranks, later repetitions have only some of them.
    whole = np.diff(starts, append=len(rank)) == len(ranks)
    cells = starts[whole][:, None] + np.arange(len(ranks))  # [repetition, rank]
    late = entry[cells] - entry[cells].min(axis=1, keepdims=True, initial=2**62)
    return Repetitions(case, launch, seconds, ranks, _median(late), _median(spent[cells]))


def _median(values: Ints) -> Floats:
    if not len(values):
        return np.full(values.shape[1], np.nan)
    return np.asarray(np.median(values, axis=0) * 1e-9, dtype=np.float64)
