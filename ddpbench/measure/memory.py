"""Explain a lack of memory, and release what is unused."""

from __future__ import annotations

import gc
import re
from typing import TYPE_CHECKING

from ddpbench.records.wording import counted
from ddpbench.runtime import devices
from ddpbench.runtime.world import World

if TYPE_CHECKING:
    import torch

OUT_OF_MEMORY = re.compile(
    "out of memory|can't allocate memory|cannot allocate memory|status_alloc_failed", re.IGNORECASE
)
# The first two sentences of torch's message, which has many.
REFUSED = re.compile(r"(.* out of memory)\. Tried (to allocate [\d.]+ \w+)")


def describe_shortage(error: BaseException, device_type: str, advice: str) -> str | None:
    """Describe an out-of-memory error, and what to do; None for any other error."""
    line = next(filter(OUT_OF_MEMORY.search, str(error).splitlines()), None)
    if line is None and not isinstance(error, MemoryError):
        return None
    detail = (line or type(error).__name__).strip()[:200]
    if refused := REFUSED.match(detail):
        detail = f"{refused[1]} (tried {refused[2]})"
    nccl = ", or a smaller NCCL_BUFFSIZE" if "nccl" in str(error).lower() else ""
    memory = devices.get(device_type).memory
    return f"not enough memory on the {memory}: {detail}; {advice}{nccl}"


def explain_too_large(
    world: World, device: torch.device, nbytes: float, purpose: str = ""
) -> str | None:
    """Return why this many bytes per rank do not fit in the memory that ranks share; else None."""
    kind, sharers = devices.of(device), len(world.memory_mates(device))
    free, needed = kind.free_nbytes(device), nbytes * sharers
    if free is None or needed <= 0.9 * free:
        return None
    return (
        f"the {counted(sharers, 'rank')} on this {kind.memory} would need {needed / 1e9:.1f} GB of "
        f"memory{purpose}, but only {free / 1e9:.1f} GB is free"
    )


def release_memory(device: torch.device) -> None:
    """Release unused memory if the device refuses allocations beyond its memory."""
    if devices.of(device).refuses:
        gc.collect()
        devices.of(device).release_memory()
