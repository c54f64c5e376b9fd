"""Report hangs of a watched job: the watchdog, from when the ranks have a process group."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpbench.hang.guard import Guard


class Hangs:
    """Switches the watchdog on once the default process group exists; look at it now and then.

    A hang within the time-out ends the job with exit code 5. A watchdog that the script itself has
    switched on is left alone.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._guard: Guard | None = None

    def look(self) -> None:
        """Switch the watchdog on if there is a group now. For any thread."""
        distributed = sys.modules.get("torch.distributed")
        if self._timeout and distributed is not None and distributed.is_initialized():
            from ddpbench.hang.guard import watchdog

            timeout, self._timeout = self._timeout, 0.0
            try:
                self._guard = watchdog(timeout)
            except RuntimeError:  # the script has one on, or has destroyed its groups just now
                self._guard = None

    def close(self) -> None:
        """Switch the watchdog off."""
        if self._guard is not None:
            self._guard.close()
