"""Steps that take much longer than usual: who pauses, how often, at which line, what it costs.

They are counted over the whole job in bounded memory. Pauses of one kind have the same rank, or
all ranks, and the same phase, and are at the same lines of the program.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ddpbench.records.watched import COLUMNS, MOST_PAUSES, WatchedPause
from ddpbench.watch.window import ALL, BLOCKED, LongStep, join_long_steps

KINDS = 64  # of pauses
NEWEST = 512  # pauses of a kind, whose steps and sizes are kept
LINES = 16  # of a kind
OF_ALL = 0.5  # of the additional time of one rank, that all ranks have as well
ALIKE = 0.3  # of the time of two pauses, at the same lines
ABOUT = 2.0  # times as long
PERIODIC = 0.6  # of the pauses that follow another one by exactly the period
LONGEST_PERIOD = 1000  # steps
NEIGHBOURS = 3  # pauses before one that may be the one a period ago


@dataclass
class Pauses:
    """Pauses of one kind.

    rank: that pauses, or ALL; phase: index of COLUMNS, BLOCKED if every rank is blocked for longer;
    count, seconds: how many, and how long together; lines, waits: seconds by line of the rank that
    pauses, and of the rank that waits for it longest; first, recent: step, end in ns, and seconds
    of the first pause and of the newest ones.
    """

    rank: int
    phase: int
    count: int = 0
    seconds: float = 0.0
    longest_seconds: float = 0.0
    lines: dict[str, float] = field(default_factory=dict)
    waits: dict[str, float] = field(default_factory=dict)
    first: tuple[int, int, float] | None = None
    recent: deque[tuple[int, int, float]] = field(default_factory=lambda: deque(maxlen=NEWEST))

    def add(self, step: LongStep, seconds: float) -> None:
        """Add a pause of so many seconds."""
        self.count += 1
        self.seconds += seconds
        self.longest_seconds = max(self.longest_seconds, seconds)
        self.recent.append((step.number, step.ended_ns, seconds))
        self.first = self.first or self.recent[0]
        _add_lines(self.lines, step.lines)
        if self.rank != ALL and step.waited >= seconds / 2 and step.waits_at:
            _add_lines(self.waits, {step.waits_at: step.waited})

    def resembles(self, step: LongStep, seconds: float) -> bool:
        """Return whether a pause is of this kind.

        It is at the same lines, or it is about as long and has no line or is the next of a period:
        after a call that held Python's lock, the line is one that the thread has come to since.
        """
        own, others = _find_shares(step.lines), _find_shares(self.lines)
        if sum(min(share, others.get(line, 0.0)) for line, share in own.items()) >= ALIKE:
            return True
        usual = self.seconds / self.count
        if not usual / ABOUT <= seconds <= usual * ABOUT:
            return False
        if not self.lines or not step.lines:
            return True
        every = self.find_period()
        return every > 0 and (step.number - self.recent[-1][0]) % every == 0

    def find_period(self) -> int:
        """Return the steps from one pause to the next; 0 if that varies."""
        steps = [step for step, _, _ in self.recent]
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
        every, pauses = self.find_period(), [self.first or self.recent[0], *self.recent]
        first_step, first_ns, _ = pauses[0]
        if every:  # one of another reason may have come before
            ((phase, _),) = Counter(step % every for step, _, _ in pauses).most_common(1)
            first_step, first_ns, _ = next(one for one in pauses if one[0] % every == phase)
        return WatchedPause(
            rank=None if self.rank == ALL else self.rank,
            phase=COLUMNS[self.phase],
            line=max(self.lines, key=self.lines.__getitem__, default=""),
            waits_at=max(self.waits, key=self.waits.__getitem__, default=""),
            count=self.count,
            every=every,
            first_step=first_step,
            first_ended=first_ns * 1e-9,
            last_step=self.recent[-1][0],
            seconds=float(np.median([seconds for _, _, seconds in self.recent])),
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
            alike = [kind for kind in self.kinds if (kind.rank, kind.phase) == (rank, phase)]
            same = [kind for kind in alike if kind.resembles(step, seconds)]
            kind = max(same, key=lambda kind: kind.count, default=None)
            if kind is None:
                kind = Pauses(rank, phase)
                self.kinds.append(kind)
                if len(self.kinds) > KINDS:
                    self.kinds.remove(min(self.kinds[:-1], key=lambda kind: kind.seconds))
            kind.add(step, seconds)

    def summarize(self, steps: int) -> tuple[WatchedPause, ...]:
        """Return the kinds of pauses, those that cost most first. steps: of the job so far."""
        kinds = sorted(self.kinds, key=lambda kind: -kind.seconds)[:MOST_PAUSES]
        return tuple(kind.summarize(steps) for kind in kinds)


def _find_shares(lines: Mapping[str, float]) -> dict[str, float]:
    total = sum(lines.values())
    return {line: seconds / total for line, seconds in lines.items()}


def _add_lines(kept: dict[str, float], lines: Mapping[str, float]) -> None:
    for line, seconds in lines.items():
        kept[line] = kept.get(line, 0.0) + seconds
    while len(kept) > LINES:
        del kept[min(kept, key=kept.__getitem__)]
