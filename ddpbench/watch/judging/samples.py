"""Steps of a job of any length in bounded memory: the newest all, older ones ever more thinly."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]

NEWEST = 1024  # steps that are all kept
OLDER = 1024  # steps kept of those before
GOLDEN = 0x9E3779B9  # 2**32 / the golden ratio: its multiples lie evenly, at any scale


@dataclass
class Samples:
    """Values of steps, oldest first.

    Of older steps one in 2**thinned is kept, whatever period the job has. number: int64[kept], of
    the step; values: [kept], of any dtype; steps: all that were added.
    """

    values: npt.NDArray[Any]
    number: Integers = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    thinned: int = 0
    steps: int = 0

    def __len__(self) -> int:
        return len(self.number)

    def add(self, number: Integers, values: npt.NDArray[Any]) -> None:
        """Add steps that are newer than all before."""
        self.steps += len(number)
        self.number = np.concatenate([self.number, number])
        self.values = np.concatenate([self.values, values.astype(self.values.dtype)])
        while len(self) > NEWEST and len(older := self._thin(self.number[:-NEWEST])) > OLDER:
            self.thinned += 1
        if len(self) > NEWEST:
            kept = np.concatenate([older, np.arange(len(self) - NEWEST, len(self))])
            self.number, self.values = self.number[kept], self.values[kept]

    def _thin(self, number: Integers) -> Integers:
        """Return the indices of those that stay among older steps."""
        return np.flatnonzero(number * GOLDEN % 2**32 < 2**32 >> self.thinned)

    def evenly(self) -> Integers:
        """Return the indices of kept steps that lie evenly over all steps."""
        return self._thin(self.number)


def empty(dtype: npt.DTypeLike) -> Samples:
    """Return samples without a step."""
    return Samples(np.empty(0, dtype))
