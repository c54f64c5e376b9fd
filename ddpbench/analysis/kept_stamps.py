"""The stamps of one case that rank 0 keeps, so that its memory does not grow with the ranks.

Rank 0 keeps all stamps up to KEPT_STAMPS: every repetition of any case below 210 ranks. Of later
repetitions it keeps the ranks that show when a repetition began and ended, and who was slow. These
stamps give the same `Summary` as all stamps, except the means over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ddpbench.analysis import stats
from ddpbench.analysis.stats import OverRanks, Stamps

KEPT_STAMPS = 2**20  # ranks × repetitions
GATHERED_STAMPS = 2**20  # at once: 24 MiB
# int64[row, 5]: repetition, rank, entry, exit, device time
Rows = npt.NDArray[np.int64]


def fitting(world_size: int) -> int:
    """Return the most repetitions that are gathered at once."""
    return max(1, GATHERED_STAMPS // world_size)


@dataclass
class Kept:
    """The repetitions of a case's warm-up, or its timed ones; filled on rank 0 only.

    subgroups: ranks that work together; other ranks are not kept. Empty: all ranks work together.
    """

    subgroups: Sequence[Sequence[int]] = ()
    over: list[OverRanks] = field(default_factory=list)  # of every repetition, burst by burst
    repetitions: int = 0
    _whole: list[Stamps] = field(default_factory=list)
    _telling: list[Rows] = field(default_factory=list)

    def add(self, stamps: Stamps) -> None:
        """Add a gathered burst: int64[world, repetition, 3]."""
        world, count, _ = stamps.shape
        self.over.append(stats.over_ranks(stamps, self.subgroups))
        room = max(0, KEPT_STAMPS // world - self.repetitions)
        if room:
            self._whole.append(stamps[:, :room].copy())
        if room < count:
            self._telling.append(_telling(stamps[:, room:], self.repetitions + room))
        self.repetitions += count

    def rows(self) -> Rows:
        """Return all kept rows; complete repetitions come rank by rank."""
        whole = [_rows(np.concatenate(self._whole, axis=1))] if self._whole else []
        rows = np.concatenate([np.empty((0, 5), np.int64), *whole, *self._telling])
        members = [rank for subgroup in self.subgroups for rank in subgroup]
        return rows[np.isin(rows[:, 1], members)] if members else rows


def _rows(stamps: Stamps) -> Rows:
    world, count, _ = stamps.shape
    repetition = np.tile(np.arange(count), world)
    rank = np.repeat(np.arange(world), count)
    return np.column_stack([repetition, rank, stamps.reshape(-1, 3)])


def _telling(stamps: Stamps, first: int) -> Rows:
    """Select per repetition the slowest rank, the fastest, the first in, last in and last out."""
    spent, entry, exits = stats.spent_ns(stamps), stamps[:, :, 0], stamps[:, :, 1]
    ranks = [spent.argmax(axis=0), spent.argmin(axis=0)]
    ranks += [entry.argmin(axis=0), entry.argmax(axis=0), exits.argmax(axis=0)]
    world, count, _ = stamps.shape
    cells = np.unique(np.arange(count) * world + np.stack(ranks))  # each once, in order
    repetition, rank = cells // world, cells % world
    return np.column_stack([repetition + first, rank, stamps[rank, repetition]])
