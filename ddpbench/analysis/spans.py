"""The collectives of a training step, timed one by one, and the names of the parts they form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce")
EXPOSED_OF = {name: f"exposed {name}" for name in OPERATIONS}
HIDDEN_OF = {name: f"hidden {name}" for name in OPERATIONS}
SAVES, WOULD_SAVE = "prefetch saves", "prefetch would save"


@dataclass(frozen=True)
class Span:
    """One collective of a step. Times are ns since the step began in this rank.

    exposed_ns is how long the compute waited for the collective: in the call, and in its wait.
    """

    operation: str  # "all_gather", "reduce_scatter", "all_reduce"
    layers: str  # the group of layers: "blocks.3", or "root" for all modules in no other group
    phase: str  # "forward" or "backward"
    nbytes: int  # of the total buffer: all slots of an all_gather, all slices of a reduce_scatter
    begin_ns: int
    exposed_ns: int
    end_ns: int
    ranks: tuple[int, ...] = ()  # of the process group, by their numbers in the default group


@dataclass(frozen=True)
class Timed:
    """The collectives of a step, in the order of the calls, and their times in the arm "timed".

    spans   of one step of rank 0; other ranks differ in times and process groups only
    groups  for each collective, the ranks of the process groups that carry it out at once
    ns      [world, round, collective, 3] of the last step of a round: from the begin of the step
            until the call; exposed; from the begin of the step until the end of the collective
    """

    spans: Sequence[Span]
    groups: Sequence[tuple[tuple[int, ...], ...]]
    ns: npt.NDArray[np.int64]
