"""Why a rank is late, from the facts of its process. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ddpbench.watch.judging.history import History
from ddpbench.watch.judging.stragglers import Late

EXPLAINS = 0.4  # of the lateness, that a cause must explain
PAGES = 10.0  # read from a disk in a second, that name a lack of memory
GPU = "gpu_slowed_by_"
MORE_OFTEN = 0.5  # of the reads: by which a late rank's GPU is slowed more often than others


@dataclass(frozen=True)
class Cause:
    """Why a rank is late, and what to do about it."""

    name: str
    sentence: str
    next_step: str


# Of a rank's seconds, more than its host's ranks usually have: name of the fact → cause.
SECONDS = {
    "throttled_seconds": Cause(
        "throttled",
        "the CPU quota of its control group stops it",
        "raise the CPU quota of rank {rank}'s container, or use fewer threads",
    ),
    "queued_seconds": Cause(
        "host busy",
        "its main thread waits for a core",
        "find what shares the cores of rank {rank} (top, taskset -cp PID), or use fewer threads",
    ),
    "gc_seconds": Cause(
        "gc",
        "Python's garbage collector stops it",
        "after the set-up, call gc.freeze() and gc.disable(); then call gc.collect() on all ranks "
        "in the same step",
    ),
    "compile_seconds": Cause(
        "compile",
        "torch.compile spends the time compiling",
        "to see why rank {rank} recompiles, start the job again after: export "
        "TORCH_LOGS=recompiles",
    ),
}
SWAP = Cause(
    "swap",
    "it reads pages of its memory from a disk",
    "see on rank {rank}'s host whether its memory is full: free -h; then use less of it",
)


def find_cause(history: History, late: Late) -> Cause | None:
    """Return what explains most of a rank's lateness; None if no fact does."""
    host = next((host for host, ranks in history.hosts.items() if late.rank in ranks), "")
    shares: dict[str, list[float]] = {}
    for ranks, hosts in zip(history.facts, history.host_facts, strict=True):
        facts, usual = ranks.get(late.rank, {}), hosts.get(host, {})
        if not facts.get("seconds"):
            continue
        for name in (*SECONDS, "major_faults"):
            if name in facts:
                rate = facts[name] / facts["seconds"]
                common = usual.get(name, 0.0) / (usual.get("seconds") or 1.0)
                shares.setdefault(name, []).append(rate - common)
    explained = {
        name: float(np.mean(values)) * late.step_seconds / late.cost
        for name, values in shares.items()
        if name in SECONDS
    }
    most = max(explained, key=explained.__getitem__, default="")
    if most and explained[most] >= EXPLAINS:
        return SECONDS[most]
    if reasons := ", ".join(_why_slowed(history, late.rank)):
        return Cause(
            "gpu clock",
            f"its GPU lowers its clock ({reasons})",
            "run on rank {rank}'s host: nvidia-smi -q -d PERFORMANCE",
        )
    if np.mean(shares.get("major_faults", [0.0])) >= PAGES:
        return SWAP
    return None


def _why_slowed(history: History, rank: int) -> list[str]:
    """Return the reasons that the rank's GPU gives for a lower clock, and other ranks' do not."""
    own = [ranks[rank] for ranks in history.facts if rank in ranks]
    others = [facts for ranks in history.facts for r, facts in ranks.items() if r != rank]
    names = {name for facts in own for name in facts if name.startswith(GPU)}

    def share(reads: Sequence[Mapping[str, float]], name: str) -> float:
        return sum(name in facts for facts in reads) / max(1, len(reads))

    more = [name for name in names if share(own, name) - share(others, name) >= MORE_OFTEN]
    return sorted(name.removeprefix(GPU) for name in more)
