"""Allocate the tensors of a case, and measure their share in huge pages."""

from __future__ import annotations

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


def describe_shortage(error: BaseException, device: torch.device) -> str | None:
    """Describe an out-of-memory error, and what to do; None for any other error."""
    lines = str(error).splitlines()
    line = next(filter(OUT_OF_MEMORY.search, lines), None)
    if line is None and not isinstance(error, MemoryError):
        return None
    detail = f" ({line.strip()[:200]})" if line else ""
    nccl = ", or a smaller NCCL_BUFFSIZE" if "nccl" in str(error).lower() else ""
    return (
        f"the {devices.of(device).memory} has too little memory{detail}: choose smaller "
        f"--sizes{nccl}, or end other programs that use its memory"
    )


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


def huge_share(tensors: Iterable[torch.Tensor], kind: str) -> float | None:
    """Return the share, 0 to 1, of the written tensors' bytes that are in huge pages.

    The kernel counts per mapping: a tensor gets the share of its mapping's resident memory. None
    for GPU memory, for no bytes, and if the kernel does not report it.
    """
    buffers = {(tensor.data_ptr(), tensor.nbytes) for tensor in tensors if tensor.is_cpu}
    total = sum(nbytes for _, nbytes in buffers)
    enabled = read("/sys/kernel/mm/transparent_hugepage/enabled") or "[always]"
    if total and kind != "huge" and "[always]" not in enabled:
        return 0.0  # reading smaps would cost 50 ms
    counted = huge = 0.0
    for text in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", read("/proc/self/smaps") or "", flags=re.M):
        span = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", text)
        low, high = (int(span[1], 16), int(span[2], 16)) if span else (0, 0)
        if nbytes := sum(nbytes for address, nbytes in buffers if low <= address < high):
            resident, granted = (
                int(match[1]) if (match := re.search(rf"^{name}: +(\d+)", text, re.M)) else 0
                for name in ("Rss", "AnonHugePages")
            )
            counted += nbytes
            huge += nbytes * min(1.0, granted / max(resident, 1))
    return huge / counted if total and counted == total else None
