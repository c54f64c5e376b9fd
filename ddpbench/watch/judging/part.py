"""Some steps of one rank, compared with the other ranks. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ddpbench.records.watched import PHASES
from ddpbench.watch.judging import history as columns
from ddpbench.watch.judging.history import Floats

LEAST_SHARE = 0.03  # of a step, from which a rank is a straggler


@dataclass(frozen=True)
class Part:
    """Steps of one rank. number: int64[steps]; values: [steps, RANK_COLUMNS] of its samples."""

    rank: int
    number: npt.NDArray[np.int64]
    values: Floats
    step_seconds: float  # of the job
    apart: float  # by how much ranks differ that are not late

    def __getitem__(self, chosen: slice | npt.NDArray[np.bool_]) -> Part:
        return replace(self, number=self.number[chosen], values=self.values[chosen])

    def __len__(self) -> int:
        return len(self.number)

    @property
    def own(self) -> Floats:
        """How much more own time than the other ranks it has."""
        return np.asarray(self.values[:, columns.EXCESS_OWN])

    @property
    def excess(self) -> Floats:
        """How much longer than in the other ranks each phase is: [steps, phase]."""
        return np.asarray(self.values[:, columns.EXCESS][:, : len(PHASES)])

    @property
    def blocked(self) -> float:
        """How much longer than the other ranks it is blocked, median."""
        return float(np.median(self.values[:, columns.EXCESS_BLOCKED]))

    @property
    def least(self) -> float:
        """Seconds from which a difference counts."""
        return max(LEAST_SHARE * self.step_seconds, self.apart)

    def in_phases(self, names: Iterable[str]) -> Floats:
        """How much longer than in the other ranks these phases together are."""
        chosen = [PHASES.index(name) for name in names]
        return np.asarray(self.excess[:, chosen].sum(axis=1))
