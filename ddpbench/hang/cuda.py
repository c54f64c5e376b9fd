"""Query CUDA from ddpbench's threads without disturbing the job. Never run on a GPU."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RELAXED = 2  # cudaStreamCaptureModeRelaxed, and HIP's


def open_library(name: str) -> ctypes.CDLL:
    """Open a library that torch has already loaded. Raises OSError if there is none."""
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
