"""The clock of all time stamps, and the cost of reading it.

`time.perf_counter_ns` reads CLOCK_MONOTONIC. All processes of a host (same boot id and time
namespace) share this clock, so their stamps are comparable.
"""

from __future__ import annotations

import time
from itertools import pairwise

now_ns = time.perf_counter_ns

# A repetition shorter than this many read costs, or clock steps, is timed in batches.
COSTS, STEPS = 20, 10


def measure_clock(reads: int = 20_000) -> dict[str, float]:
    """Return the seconds that one reading costs (median), and the smallest step of the clock."""
    stamps = [now_ns() for _ in range(reads)]
    steps = sorted(b - a for a, b in pairwise(stamps))
    return {
        "cost_seconds": steps[len(steps) // 2] * 1e-9,
        "step_seconds": next((step for step in steps if step > 0), 1) * 1e-9,
    }


def shortest_seconds(clock: dict[str, float]) -> float:
    """Return the shortest repetition that can be timed on its own."""
    return max(COSTS * clock["cost_seconds"], STEPS * clock["step_seconds"])
