"""Ask CUDA from threads of ours without disturbing the job. None of this has run on a GPU."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RELAXED = 2  # cudaStreamCaptureModeRelaxed, and HIP's


def open_library(name: str) -> ctypes.CDLL:
    """Open a library of torch, which has been loaded. Raises OSError if there is none."""
    import torch

    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"libtorch_{name}.so"))


@contextlib.contextmanager
def relaxed_capture() -> Iterator[None]:
    """Let this thread query events while any thread captures a CUDA graph.

    A dump of nccl's recorder makes such queries. By default, one in any thread ends the capture
    with an error. Does nothing where CUDA is not in use.
    """
    import torch

    exchange: Any = None
    if torch.cuda.is_initialized():
        kind = "hip" if torch.version.hip else "cuda"
        with contextlib.suppress(OSError, AttributeError):
            exchange = getattr(open_library(kind), f"{kind}ThreadExchangeStreamCaptureMode")
    if exchange is None:
        yield
        return
    mode = ctypes.c_int(RELAXED)
    exchange(ctypes.byref(mode))  # mode is now the thread's previous one
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


def is_gpu_busy() -> bool:
    """Return whether a GPU of this process has run kernels, of any process, about a second ago.

    Neither NVML nor torch's allocator, which are asked, waits for the GPU or takes part in a
    capture. False if they have no answer.
    """
    import torch

    if not torch.cuda.is_initialized():
        return False
    try:
        used = [i for i in range(torch.cuda.device_count()) if torch.cuda.memory_reserved(i)]
        return any(map(torch.cuda.utilization, used))
    except Exception:  # NVML is missing, or does not know this of the GPU: it has its own errors
        return False
