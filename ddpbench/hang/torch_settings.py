"""Settings that torch reads from the environment when a process group is made.

They decide whether torch records calls, and when torch itself ends a process that waits.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta

# Entries of the flight recorder. torch 2.7 accepts the second name only, and records nothing
# without it; later versions warn about it in every rank.
BUFFER_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
ENTRIES = "2000"  # the default of later versions of torch
# Seconds after which a monitor ends the process if nccl's own watchdog does not move.
HEARTBEAT, HEARTBEAT_SECONDS = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", 480
BLOCKING_WAITS = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")


@contextlib.contextmanager
def watched_groups(timeout: timedelta) -> Iterator[None]:
    """Let torch record the calls of groups created inside, and keep it from ending processes early.

    timeout: of the groups. Variables that the user has set stay. All others are reset at the end,
    because the record of a run contains the user's settings.
    """
    added = {} if any(map(os.environ.get, BUFFER_SIZES)) else {find_buffer_size(): ENTRIES}
    if not os.environ.get(HEARTBEAT):
        added[HEARTBEAT] = str(max(HEARTBEAT_SECONDS, round(timeout.total_seconds()) + 60))
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def find_buffer_size() -> str:
    """Return this torch's name of the variable for the recorder's entries."""
    from torch._C import _distributed_c10d as c10d

    name, older = BUFFER_SIZES
    return name if hasattr(c10d, "_dump_fr_trace") else older


def count_entries() -> int:
    """Return how many calls torch's recorder keeps, as the environment says."""
    size = next(filter(None, map(os.environ.get, BUFFER_SIZES)), ENTRIES)
    return int(size) if size.isdecimal() else int(ENTRIES)


def find_blocking_wait() -> str:
    """Return the variable that makes nccl wait on the host; "" none.

    nccl then keeps no list of its calls, and the recorder refers to events that no longer exist.
    """
    on = ("1", "t", "true", "y", "yes")
    return next((v for v in BLOCKING_WAITS if os.environ.get(v, "").lower() in on), "")
