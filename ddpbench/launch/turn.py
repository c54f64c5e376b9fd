"""Two launches that are measured in turns within seconds: while one measures, the other sleeps.

Each waits for its turn in a named pipe. A drift of the machine then affects both alike.
"""

from __future__ import annotations

import os
import select
import time

SECONDS = 0.1  # of a turn; the burst that ends it may take longer
POLL_SECONDS = 1.0
YOURS, ENDED = b"y", b"e"


class Turn:
    """One side's turns: it measures while it has the turn.

    own, other: the pipes of both sides; `ab` creates them and keeps them open. patience: if the
    turn does not come within these seconds, the other side counts as ended.
    """

    def __init__(self, own: str, other: str, patience: float) -> None:
        self._own, self._other = (os.open(name, os.O_RDWR | os.O_NONBLOCK) for name in (own, other))
        self._patience, self._since = patience, time.monotonic()
        self._held, self._alone = True, False

    def take(self) -> None:
        """Wait until this side may begin a launch."""
        self._held, self._since = False, time.monotonic()
        while not self._held:
            self._poll()
        if self._alone:  # for the rank that asks next
            os.write(self._own, ENDED)

    def end(self) -> None:
        os.write(self._other, ENDED)

    def waits(self) -> bool:
        """Return whether the other side measures now; pass on the turn when it is over."""
        if not self._held:
            self._poll()
        elif not self._alone and time.monotonic() - self._since > SECONDS:
            self._held, self._since = False, time.monotonic()
            os.write(self._other, YOURS)
        return not self._held

    def _poll(self) -> None:
        late = time.monotonic() - self._since > self._patience
        if late or select.select([self._own], [], [], POLL_SECONDS)[0]:
            self._alone = late or os.read(self._own, 1) == ENDED
            self._held, self._since = True, time.monotonic()
