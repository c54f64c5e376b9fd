"""Join what the ranks read beside their steps: their load, and values that the script computes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ddpbench.records.load import Load
from ddpbench.records.watched import MOST_VALUES
from ddpbench.runtime.load import over_ranks
from ddpbench.watch.window import RankWindow, Values


def join_rank_loads(windows: Sequence[RankWindow]) -> Load | None:
    """Return the load of a host's ranks; None if none was read."""
    loads = [window.load for window in windows if window.load is not None]
    return over_ranks(loads) if loads else None


def join_loads(hosts: Sequence[Load]) -> Load | None:
    """Return the medians over hosts of medians over ranks, and the most of all ranks."""
    if not hosts:
        return None
    shares = [load.gpu_share for load in hosts if load.gpu_share is not None]
    sizes = [load.gpu_memory_nbytes for load in hosts if load.gpu_memory_nbytes is not None]
    return Load(
        cpu_cores=statistics.median(load.cpu_cores for load in hosts),
        most_cpu_cores=max(load.most_cpu_cores for load in hosts),
        memory_nbytes=max(load.memory_nbytes for load in hosts),
        gpu_share=statistics.median(shares) if shares else None,
        gpu_memory_nbytes=max(sizes, default=None),
    )


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
