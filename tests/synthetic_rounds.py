"""The rounds of a simulated job whose ranks wait for one another, with the noise of a busy host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from scipy.signal import lfilter

from ddpbench.records.watched import PHASES
from ddpbench.watch.judging.history import History
from ddpbench.watch.window import STEPS, Window

ROUND_SECONDS = 5.0
BEGAN_NS = 1_790_000_000_000_000_000
WORK = (0.006, 0.030, 0.060, 0.010, 0.004)  # seconds of each phase
TRANSFER = 0.010  # seconds of a step, exposed


@dataclass(frozen=True)
class Fault:
    """Extra seconds of one rank in one phase, in some steps."""

    rank: int
    phase: str
    seconds: float
    every: int = 1
    since: int = 0
    until: int = 10**9


@dataclass
class Job:
    """A job to watch. noise: of each phase, relative; modes: all ranks change between two speeds;
    spikes: share of a rank's steps that something else delays by up to 100 ms and more."""

    hosts: Mapping[str, Sequence[int]] = field(default_factory=lambda: {"a": range(4)})
    faults: Sequence[Fault] = ()
    seed: int = 0
    noise: float = 0.05
    spikes: float = 0.02
    modes: bool = False
    work: Sequence[float] = WORK
    transfer: float = TRANSFER
    slower_since: tuple[int, float] | None = None  # the step, and the factor

    def rows(self, steps: int) -> npt.NDArray[np.float32]:
        """float32[rank, step, COLUMNS]: the ranks wait for one another at the end of backward."""
        draw = np.random.default_rng(self.seed)
        world = sum(map(len, self.hosts.values()))
        shape = (world, steps, len(PHASES))
        white = draw.normal(0, self.noise, shape) + draw.normal(0, self.noise, shape[1:])
        own = np.array(self.work) * np.exp(lfilter([0.8], [1, -0.6], white, axis=1))
        own *= 1 + draw.normal(0, 0.003, (world, 1, 1))  # no two cores are alike
        hit = draw.random(shape[:2]) < self.spikes
        own[hit, draw.integers(0, 5, hit.sum())] += 0.01 * draw.pareto(1.5, hit.sum())
        own[:, :3] += draw.exponential(0.3, (world, 3, 5))  # warm-up
        if self.modes:
            own *= np.where(np.cumsum(draw.random(steps) < 0.02) % 2, 1.3, 1.0)[:, None]
        if self.slower_since:
            own[:, self.slower_since[0] :] *= self.slower_since[1]
        number = np.arange(steps)
        for fault in self.faults:
            late = (number % fault.every == 0) & (number >= fault.since) & (number < fault.until)
            own[fault.rank, late, PHASES.index(fault.phase)] += fault.seconds
        # A rank's way from one backward's end, where all meet, to the next one's.
        alone = own.sum(axis=2)
        alone[:, 1:] += own[:, :-1, 3:].sum(axis=2) - own[:, 1:, 3:].sum(axis=2)
        transfer = self.transfer * np.exp(draw.normal(0, 0.2, (world, steps)))
        blocked = alone.max(axis=0) - alone + transfer.min(axis=0)
        return np.concatenate([own, blocked[:, :, None]], axis=2, dtype=np.float32)

    def rounds(self, steps: int) -> list[Window]:
        """Return the windows that rank 0 receives for so many steps."""
        rows = self.rows(steps)
        ends = BEGAN_NS + (np.cumsum(np.median(rows.sum(axis=2), axis=0)) * 1e9).astype(np.int64)
        hosts = {host: [*ranks] for host, ranks in self.hosts.items()}
        windows, first = list[Window](), 0
        while first < steps:
            began = ends[first - 1] if first else BEGAN_NS
            last = int(np.searchsorted(ends, began + ROUND_SECONDS * 1e9))
            last = max(first + 1, min(last, first + STEPS, steps))
            of_ranks = dict(enumerate(rows[:, first:last]))
            windows.append(Window(len(windows), hosts, int(ends[last - 1]), first, of_ranks))
            first = last
        return windows

    def watch(self, steps: int) -> History:
        """Return the history of so many steps."""
        history = History()
        for round_ in self.rounds(steps):
            history.add(round_)
        return history
