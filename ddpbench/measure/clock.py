"""The clock every stamp is read from, and what reading it costs.

`time.perf_counter_ns` is CLOCK_MONOTONIC: one for all processes of a host (boot id, time
namespace), so that stamps of different ranks in one clock domain are comparable.
"""

from __future__ import annotations

import time
from itertools import pairwise

now_ns = time.perf_counter_ns

# A repetition shorter than this many read costs, or steps, is measured in batches.
COSTS, STEPS = 20, 10


def properties(reads: int = 20_000) -> dict[str, float]:
    """Seconds that one reading costs (median of pairs), and the smallest step between two."""
    stamps = [now_ns() for _ in range(reads)]
    steps = sorted(b - a for a, b in pairwise(stamps))
    positive = [step for step in steps if step > 0]
    return {
        "cost_seconds": steps[len(steps) // 2] * 1e-9,
        "step_seconds": (positive[0] if positive else 1) * 1e-9,
    }


def shortest_seconds(clock: dict[str, float]) -> float:
    """What a repetition must last at least to be timed on its own."""
    return max(COSTS * clock["cost_seconds"], STEPS * clock["step_seconds"])
