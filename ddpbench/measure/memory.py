"""Allocate the tensors of a case, and explain a lack of memory."""

from __future__ import annotations

import gc
import mmap
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ddpbench.records.wording import counted
from ddpbench.runtime import devices
from ddpbench.runtime.cpu import read
from ddpbench.runtime.world import World

if TYPE_CHECKING:
    import torch

KINDS = ("torch", "huge")
HUGE_NBYTES = 1 << 21
OUT_OF_MEMORY = re.compile(
    "out of memory|can't allocate memory|cannot allocate memory|status_alloc_failed", re.IGNORECASE
)
# The first two sentences of torch's message, which has many.
REFUSED = re.compile(r"(.* out of memory)\. Tried (to allocate [\d.]+ \w+)")
MAPPING = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) .*?^Rss: +(\d+).*?^AnonHugePages: +(\d+)", re.DOTALL | re.MULTILINE
)
# Offset of a large tensor within its page, the same as from torch's allocator: then the kinds of
# memory differ only in their pages. On AMD's Zen 3, a copy to an address that ends 16 bytes below
# the source's runs at a quarter of the rate.
IN_PAGE = 64


def zeros(count: int, dtype: torch.dtype, device: torch.device, kind: str) -> torch.Tensor:
    """Return a flat tensor in torch's own memory or, if `huge`, in memory advised as huge pages.

    Raises torch's error if memory is short, and OSError if the kernel has no huge pages.
    """
    import torch

    nbytes = count * dtype.itemsize
    if kind == "torch" or not nbytes:
        return torch.zeros(count, dtype=dtype, device=device)
    whole = -(-(IN_PAGE + nbytes) // HUGE_NBYTES) * HUGE_NBYTES
    mapped = mmap.mmap(-1, whole + HUGE_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped.madvise(mmap.MADV_HUGEPAGE)
    start = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
    # The tensor keeps the mapping alive. New mappings are zero.
    return torch.frombuffer(mapped, dtype=dtype, count=count, offset=-start % HUGE_NBYTES + IN_PAGE)


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


def huge_share(tensors: Iterable[torch.Tensor]) -> float | None:
    """Return the share, 0 to 1, of the tensors' resident memory that is in huge pages.

    The kernel counts per mapping. None for no tensors, and if the kernel does not report it.
    """
    addresses = {tensor.data_ptr() for tensor in tensors if tensor.is_cpu and tensor.nbytes}
    resident = huge = 0
    for low, high, resident_kb, huge_kb in MAPPING.findall(read("/proc/self/smaps") or ""):
        if any(int(low, 16) <= address < int(high, 16) for address in addresses):
            resident += int(resident_kb)
            huge += int(huge_kb)
    return huge / resident if resident else None
