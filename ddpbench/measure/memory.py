"""The memory that a case's tensors lie in, and how much of it the kernel backs with huge pages."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ddpbench.runtime.cpu import read

if TYPE_CHECKING:
    import torch

KINDS = ("torch", "huge")
HUGE_NBYTES = 1 << 21
# Where torch's allocator puts a large tensor within its page, so that kinds differ by pages alone.
# 16 bytes below a peer's buffer, AMD's Zen 3 copies at a quarter of its rate.
IN_PAGE = 64


def zeros(count: int, dtype: torch.dtype, device: torch.device, kind: str) -> torch.Tensor:
    """A flat tensor in torch's own memory or, `huge`, in memory that asks for huge pages.

    Raises what torch raises where there is no memory, and OSError where the kernel has no huge
    pages to ask for.
    """
    import torch

    nbytes = count * dtype.itemsize
    if kind == "torch" or not nbytes:
        return torch.zeros(count, dtype=dtype, device=device)
    whole = -(-(IN_PAGE + nbytes) // HUGE_NBYTES) * HUGE_NBYTES
    mapped = mmap.mmap(-1, whole + HUGE_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped.madvise(mmap.MADV_HUGEPAGE)
    start = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
    # The tensor keeps the mapping alive, whose memory is zero until it is written.
    return torch.frombuffer(mapped, dtype=dtype, count=count, offset=-start % HUGE_NBYTES + IN_PAGE)


def _may_be_huge(kind: str) -> bool:
    """Whether the kernel backs any memory of this kind with huge pages: looking costs 50 ms."""
    enabled = read("/sys/kernel/mm/transparent_hugepage/enabled") or "[always]"
    return kind == "huge" or "[always]" in enabled


def huge_share(tensors: Iterable[torch.Tensor], kind: str) -> float | None:
    """The share, 0 to 1, of the tensors' bytes that lie in huge pages, once they were written.

    The kernel counts by mapping: a tensor has the share of what is resident in its mapping. None
    for memory of a GPU, for no bytes, and where the kernel does not tell.
    """
    places = {(tensor.data_ptr(), tensor.nbytes) for tensor in tensors if tensor.is_cpu}
    total = sum(nbytes for _, nbytes in places)
    if total and not _may_be_huge(kind):
        return 0.0
    counted = huge = 0.0
    for text in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", read("/proc/self/smaps") or "", flags=re.M):
        span = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", text)
        low, high = (int(span[1], 16), int(span[2], 16)) if span else (0, 0)
        if nbytes := sum(nbytes for at, nbytes in places if low <= at < high):
            resident, granted = (
                int(found[1]) if (found := re.search(rf"^{name}: +(\d+)", text, re.M)) else 0
                for name in ("Rss", "AnonHugePages")
            )
            counted += nbytes
            huge += nbytes * min(1.0, granted / max(resident, 1))
    return huge / counted if total and counted == total else None
