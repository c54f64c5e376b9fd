"""Join the values that the script computes in each rank."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ddpbench.records.watched import MOST_VALUES
from ddpbench.watch.window import Values


def join_values(parts: Sequence[Values]) -> Values:
    """Return the median of each value, and of its step, over those that have it."""
    names = list(dict.fromkeys(name for part in parts for name in part))[: MOST_VALUES + 1]
    grouped = {name: [part[name] for part in parts if name in part] for name in names}
    return {
        name: (
            int(statistics.median(step for step, _ in known)),
            statistics.median(value for _, value in known),
        )
        for name, known in grouped.items()
    }
