"""The version of NCCL, or of RCCL on AMD, that this process uses. Importing this loads no torch."""

from __future__ import annotations

import ctypes
import os
from typing import Any


def loaded_version() -> tuple[int, ...] | None:
    """Return the version that the loaded library reports; None if none is loaded.

    Opening the library by name could load a second copy, with another version.
    """
    number = ctypes.c_int()
    for name in ("librccl.so.1", "librccl.so") if _is_rccl() else ("libnccl.so.2",):
        try:
            library = ctypes.CDLL(name, mode=os.RTLD_NOLOAD)
            if library.ncclGetVersion(ctypes.byref(number)) == 0:
                return number.value // 10000, number.value // 100 % 100, number.value % 100
        except (OSError, AttributeError):
            continue
    return None


def version() -> tuple[int, ...] | None:
    """Return the version of the loaded library, else that of the headers torch was built with."""
    import torch

    loaded = loaded_version()
    if loaded is not None:
        return loaded
    built: Any = torch.cuda.nccl
    try:
        return tuple(built.version()[:3])
    except AttributeError:  # a torch without NCCL
        return None


def describe_version() -> str | None:
    """Return "2.30.7", or "2.30.7 (as built)" if no library is loaded; None without NCCL."""
    number = version()
    if number is None:
        return None
    return ".".join(map(str, number)) + ("" if loaded_version() else " (as built)")


def describe() -> str:
    """Return the library's name and version."""
    return f"{'RCCL' if _is_rccl() else 'NCCL'} {describe_version() or 'of unknown version'}"


def _is_rccl() -> bool:
    import torch

    return bool(torch.version.hip)
