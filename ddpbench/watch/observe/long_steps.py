"""Steps of this rank that take much longer than usual, and the line that they spend the time at.

A thread of its own looks up many times a second at which line the training thread is.

What is usual is known from the steps around a step, so a job whose steps change their length for
good has no long steps.
"""

from __future__ import annotations

import sys
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ddpbench.hang.places import describe_line
from ddpbench.records.watched import WatchedBalance
from ddpbench.watch.observe.phases import Observer
from ddpbench.watch.observe.steps import Marks, Step
from ddpbench.watch.window import BLOCKED, LINES, LONG_STEPS, WARM_UP, LongStep

CHUNK = 64  # steps that are judged together, by themselves and as many before them
FEWEST = 16  # steps that this needs
LONGER = 0.5  # of a usual step, by which a long one is longer
FAR = 6.0  # spreads of usual steps, by which it is longer, too
IN_A_ROW = 4  # long steps; more are a new level
LINE_SHARE = 0.2  # of the additional time, which makes a line one of a long step's
LOOK_SECONDS = 0.05  # between two looks, which take 0.2 ms
OVERDUE_SECONDS = 0.01  # the same, while a step takes longer than usual
MOST_LOOKS = 4096  # looks that wait to be taken; of more, the oldest are lost

Floats = npt.NDArray[np.float64]


class Look(NamedTuple):
    """Where the training thread is.

    ns: by the system clock; seconds: since the look before.
    """

    ns: int
    seconds: float
    line: str


class Stacks:
    """Looks at the training thread from its first step until `close`.

    overdue_seconds: the time of a step from which looks are more frequent.
    """

    def __init__(self, marks: Marks, observer: Observer) -> None:
        self._marks, self._observer = marks, observer
        self.overdue_seconds = float("inf")
        self._looks = deque[Look](maxlen=MOST_LOOKS)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._look, name="ddpbench-stacks", daemon=True)
        self._thread.start()

    def take(self) -> list[Look]:
        """Return the looks since the last time, and forget them."""
        return [self._looks.popleft() for _ in range(len(self._looks))]

    def close(self) -> None:
        """Look no more."""
        self._closing.set()
        self._thread.join(1.0)

    def _look(self) -> None:
        before, seconds = time.time_ns(), LOOK_SECONDS
        while not self._closing.wait(seconds):
            frame = sys._current_frames().get(self._observer.thread or 0)
            now = time.time_ns()
            if frame is not None and self._marks.stepped_ns:
                self._looks.append(Look(now, (now - before) * 1e-9, describe_line(frame)))
            del frame  # it would keep the values of the training thread alive
            overdue = (now - self._marks.stepped_ns) * 1e-9 > self.overdue_seconds
            before, seconds = now, OVERDUE_SECONDS if overdue else LOOK_SECONDS


class LongSteps:
    """Finds long steps among all steps of this rank. limit_seconds: how long such a step is."""

    def __init__(self, rank: int) -> None:
        self._rank, self.limit_seconds = rank, float("inf")
        self._first_ns = 0  # when the first step began
        self._last: Step | None = None
        self._count, self._seconds = 0, 0.0  # long steps, and their additional time
        self._waiting: list[Step] = []  # to be judged
        self._recent = deque[Step](maxlen=2 * CHUNK)
        self._found: list[LongStep] = []
        self._looks: list[Look] = []
        self._lines: dict[str, float] = {}  # looks' seconds by line in usual steps
        self._usual = 0  # number of these steps

    def add(self, steps: Sequence[Step], looks: Sequence[Look]) -> None:
        """Add the steps that have ended, and the looks at the program, since the last time."""
        self._looks.extend(looks)
        if steps:
            self._first_ns, self._last = self._first_ns or steps[0].began_ns, steps[-1]
        self._waiting.extend(step for step in steps if step.number >= WARM_UP)
        while self._waiting and len(self._recent) + len(self._waiting) >= FEWEST:
            chunk, self._waiting = self._waiting[:CHUNK], self._waiting[CHUNK:]
            self._recent.extend(chunk)
            self._judge(chunk)

    def take(self, until_ns: int) -> list[LongStep]:
        """Return the long steps that ended by this time: the longest."""
        ended = [step for step in self._found if step.ended_ns <= until_ns]
        self._found = [step for step in self._found if step.ended_ns > until_ns]
        return sorted(ended, key=lambda step: -sum(step.extra))[:LONG_STEPS]

    def usual_lines(self) -> dict[str, float]:
        """Return the seconds of a usual step by line of the program: the lines with the most."""
        most = sorted(self._lines, key=lambda line: -self._lines[line])[:LINES]
        return {line: self._lines[line] / max(1, self._usual) for line in most}

    def make_balance(self, since_ns: int) -> WatchedBalance | None:
        """Return where the time went since then; None before the second step."""
        if self._last is None:
            return None
        return WatchedBalance(
            before_seconds=(self._first_ns - since_ns) * 1e-9,
            steps=self._last.number,
            usual_seconds=(self._last.ended_ns - self._first_ns) * 1e-9 - self._seconds,
            long_steps=self._count,
            longer_seconds=self._seconds,
            after_seconds=(time.time_ns() - self._last.ended_ns) * 1e-9,
        )

    def _judge(self, chunk: Sequence[Step]) -> None:
        rows = np.array([step.row for step in self._recent])
        is_long = _find_long(rows.sum(axis=1))
        usual = np.median(rows[~is_long], axis=0)
        self.limit_seconds = (1 + LONGER) * float(usual.sum())
        for step, long in zip(chunk, is_long[-len(chunk) :].tolist(), strict=True):
            lines = self._take_lines(step, step.began_ns if long else 0)
            if long:
                extra = np.array(step.row) - usual
                self._count += 1
                self._seconds += float(extra.sum())
                self._found.append(self._describe(step, extra, lines))
            else:
                self._usual += 1
                for line, seconds in lines.items():
                    self._lines[line] = self._lines.get(line, 0.0) + seconds

    def _take_lines(self, step: Step, since_ns: int) -> dict[str, float]:
        """Return the seconds by line of the looks at a step; forget them, and older ones.

        since_ns: before which the time of a look does not count.
        """
        lines: dict[str, float] = {}
        end = bisect_right(self._looks, step.ended_ns, key=lambda look: look.ns)
        for look in self._looks[:end]:
            if look.line and look.ns > step.began_ns:
                seconds = min(look.seconds, (look.ns - since_ns) * 1e-9)
                lines[look.line] = lines.get(look.line, 0.0) + seconds
        del self._looks[:end]
        return lines

    def _describe(self, step: Step, extra: Floats, lines: Mapping[str, float]) -> LongStep:
        least = LINE_SHARE * float(extra.sum())
        usual = {line: seconds / max(1, self._usual) for line, seconds in self._lines.items()}
        more = {line: seconds - usual.get(line, 0.0) for line, seconds in lines.items()}
        chosen = {line: seconds for line, seconds in more.items() if seconds >= least}
        return LongStep(
            number=step.number,
            ended_ns=step.ended_ns,
            rank=self._rank,
            extra=tuple(extra.tolist()),
            lines=chosen,
            shared=float(extra[:BLOCKED].sum()),
            waited=float(extra[BLOCKED]),
        )


def _find_long(seconds: Floats) -> npt.NDArray[np.bool_]:
    """Return which steps are much longer than usual: of a new level, than usual there."""
    low, usual, middle = np.percentile(seconds, [10, 25, 40])
    limit = usual + max(LONGER * usual, FAR * (middle - low) / 1.028)
    is_long: npt.NDArray[np.bool_] = seconds > limit
    edges = np.flatnonzero(np.diff(is_long, prepend=False, append=False)).reshape(-1, 2)
    for begin, end in edges:
        if end - begin > IN_A_ROW:
            level = np.median(seconds[begin:end])
            is_long[begin:end] = seconds[begin:end] > (1 + LONGER) * level
    return is_long
