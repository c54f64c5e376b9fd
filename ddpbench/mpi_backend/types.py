"""MPI's counterparts of torch's dtypes, reduce operations and sizes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddpbench.mpi_backend.library import mpi

# The largest count of MPI before version 4: an int in C. Moves count bytes, whatever the dtype, and
# reductions count elements.
most = 2**31 - 1

Reduction = tuple[Any, Any, bool]  # MPI's datatype, MPI's op, whether to divide afterwards


@cache
def reductions() -> dict[torch.dtype, dict[int, Reduction]]:
    """dtype → hash of torch's reduce op → how MPI reduces.

    The key is a hash because comparing a ReduceOp costs more than the MPI call.
    """
    op, lib = dist.ReduceOp, mpi()
    complexes = {op.SUM: lib.SUM, op.PRODUCT: lib.PROD}
    floats = complexes | {op.MIN: lib.MIN, op.MAX: lib.MAX}
    integers = floats | {op.BAND: lib.BAND, op.BOR: lib.BOR, op.BXOR: lib.BXOR}
    # On bool, torch's sum is "or" and its product "and".
    logical = dict.fromkeys((op.SUM, op.MAX, op.BOR), lib.LOR) | {op.BXOR: lib.LXOR}
    logical |= dict.fromkeys((op.PRODUCT, op.MIN, op.BAND), lib.LAND)
    halves = {op.SUM: torch.add, op.PRODUCT: torch.mul}
    halves |= {op.MIN: torch.minimum, op.MAX: torch.maximum}
    table = {torch.bool: (lib.C_BOOL, logical)}
    table |= {torch.float32: (lib.FLOAT, floats), torch.float64: (lib.DOUBLE, floats)}
    table[torch.complex64] = lib.C_FLOAT_COMPLEX, complexes
    table[torch.complex128] = lib.C_DOUBLE_COMPLEX, complexes
    for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"):
        table[getattr(torch, name)] = getattr(lib, f"{name.upper()}_T"), integers
    for half in (torch.float16, torch.bfloat16):
        own = {key: lib.Op.Create(_combine(f, half), True) for key, f in halves.items()}
        table[half] = lib.INT16_T, own
    entries: dict[torch.dtype, dict[int, Reduction]] = {}
    for dtype, (kind, ops) in table.items():
        entries[dtype] = {hash(op(key)): (kind, ops[key], False) for key in ops}
        if dtype != torch.bool:
            entries[dtype][hash(op(op.AVG))] = kind, ops[op.SUM], True
    return entries


def _combine(function: Any, dtype: torch.dtype) -> Callable[[Any, Any, Any], None]:
    """A function for MPI to call, which reduces a dtype that MPI cannot."""

    def combine(source: Any, target: Any, _: Any) -> None:
        if len(target):
            total = torch.frombuffer(target, dtype=dtype)
            function(torch.frombuffer(source, dtype=dtype), total, out=total)

    return combine


def mean(flat: Tensor, size: int) -> None:
    """Divide sums in place by the number of ranks; integers towards zero."""
    flat = flat.detach()
    if flat.is_complex():  # its own division rounds unlike that of its parts
        flat = torch.view_as_real(flat)
    if flat.is_floating_point():
        flat.div_(size)
    elif flat.dtype in (torch.uint16, torch.uint32, torch.uint64):  # torch cannot divide these
        flat = flat.view(-1)
        flat.copy_(torch.from_numpy(flat.cpu().numpy() // size))
    else:
        flat.div_(size, rounding_mode="trunc")


def memory(flat: Tensor) -> Any:
    """A contiguous tensor's memory for mpi4py; the tensor must outlive the call."""
    return mpi().buffer.fromaddress(flat.data_ptr(), flat.nbytes)
