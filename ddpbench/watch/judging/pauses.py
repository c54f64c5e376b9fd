"""Steps that take much longer than usual: who pauses, how often, at which line, what it costs.

They are counted over the whole job in bounded memory. Pauses of one kind have the same rank, or
all ranks, the same phase, and the same line of the program.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ddpbench.records.watched import COLUMNS, MOST_PAUSES, WatchedPause
from ddpbench.watch.window import ALL, BLOCKED, LongStep, join_long_steps

KINDS = 64  # of pauses
NEWEST = 512  # pauses of a kind, whose steps and sizes are kept
OF_ALL = 0.5  # of the additional time of one rank, that all ranks have as well
ABOUT = 2.0  # times as long: a pause without a line may be of a kind with one
PERIODIC = 0.6  # of the pauses that follow another one by exactly the period
LONGEST_PERIOD = 1000  # steps
NEIGHBOURS = 3  # pauses before one that may be the one a period ago


@dataclass
class Pauses:
    """Pauses of one kind.

    rank: that pauses, or ALL; phase: index of COLUMNS, BLOCKED if every rank is blocked for longer;
    lines: seconds by line; count, seconds: how many, and how long together; newest: steps and
    seconds.
    """

    rank: int
    phase: int
    first_step: int
    count: int = 0
    seconds: float = 0.0
    longest_seconds: float = 0.0
    newest: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=NEWEST))
    lines: dict[str, float] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """The line at which these pauses spend most; "" if it is unknown."""
        return max(self.lines, key=self.lines.__getitem__, default="")

    def resembles(self, step: int, line: str, seconds: float) -> bool:
        """Return whether a pause is of this kind.

        It is at the same line, or it is about as long and has no line or is the next of a period:
        after a call that held Python's lock, the line is one that the thread has come to since.
        """
        if line and line == self.line:
            return True
        usual = self.seconds / self.count
        if not usual / ABOUT <= seconds <= usual * ABOUT:
            return False
        if not line or not self.lines:
            return True
        every = self.find_period()
        return every > 0 and (step - self.newest[-1][0]) % every == 0

    def find_period(self) -> int:
        """Return the steps from one pause to the next; 0 if that varies."""
        steps = [step for step, _ in self.newest]
        known = set(steps)
        apart = Counter(
            step - before
            for i, step in enumerate(steps)
            for before in steps[max(0, i - NEIGHBOURS) : i]
        )
        for every, _ in sorted(apart.most_common(NEIGHBOURS), key=lambda gap: gap[0]):
            follow = sum(step - every in known for step in steps)
            if follow >= max(2.0, PERIODIC * (len(steps) - 1)) and every <= LONGEST_PERIOD:
                return every
        return 0

    def summarize(self, steps: int) -> WatchedPause:
        """Return these pauses in figures. steps: of the job."""
        return WatchedPause(
            rank=None if self.rank == ALL else self.rank,
            phase=COLUMNS[self.phase],
            line=self.line,
            count=self.count,
            every=self.find_period(),
            first_step=self.first_step,
            seconds=float(np.median([seconds for _, seconds in self.newest])),
            longest_seconds=self.longest_seconds,
            mean_seconds=self.seconds / steps,
        )


class PauseHistory:
    """All pauses of a job, by kind."""

    def __init__(self) -> None:
        self.kinds: list[Pauses] = []

    def add(self, steps: Sequence[LongStep]) -> None:
        """Add the long steps of a round, each of one rank or of several."""
        for step in join_long_steps(steps):
            rank, phase, seconds = step.rank, int(np.argmax(step.extra[:BLOCKED])), step.own
            if seconds < step.waited / 2:
                rank, phase, seconds = ALL, BLOCKED, step.waited
            elif step.ranks > 1 and step.shared >= OF_ALL * seconds:
                rank = ALL
            line = max(step.lines, key=step.lines.__getitem__, default="")
            alike = [kind for kind in self.kinds if (kind.rank, kind.phase) == (rank, phase)]
            same = [kind for kind in alike if kind.resembles(step.number, line, seconds)]
            kind = max(same, key=lambda kind: (kind.line == line, kind.count), default=None)
            if kind is None:
                kind = Pauses(rank, phase, step.number)
                self.kinds.append(kind)
                if len(self.kinds) > KINDS:
                    self.kinds.remove(min(self.kinds[:-1], key=lambda kind: kind.seconds))
            if line:
                kind.lines[line] = kind.lines.get(line, 0.0) + seconds
            kind.count += 1
            kind.seconds += seconds
            kind.longest_seconds = max(kind.longest_seconds, seconds)
            kind.newest.append((step.number, seconds))

    def summarize(self, steps: int) -> tuple[WatchedPause, ...]:
        """Return the kinds of pauses, those that cost most first. steps: of the job so far."""
        kinds = sorted(self.kinds, key=lambda kind: -kind.seconds)[:MOST_PAUSES]
        return tuple(kind.summarize(steps) for kind in kinds)
