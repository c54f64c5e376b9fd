"""MPI's counterparts of torch's dtypes and reduce operations, and tensors in a form for MPI.

That form is contiguous memory, on the CPU unless MPI is CUDA-aware.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddpbench.mpi_backend.library import cuda_aware, mpi

DEVICES = ["cpu", "cuda"]  # devices of supported tensors
UNDIVIDED = (torch.bool, torch.uint16, torch.uint32, torch.uint64)  # by torch
Reduction = tuple[Any, Any, bool]  # MPI's datatype, MPI's op, whether to divide afterwards


@cache
def reductions() -> dict[torch.dtype, dict[int, Reduction]]:
    """Return how MPI reduces: dtype → hash of torch's reduce op → Reduction.

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
        if dtype not in UNDIVIDED:
            entries[dtype][hash(op(op.AVG))] = kind, ops[op.SUM], True
    return entries


def _combine(function: Any, dtype: torch.dtype) -> Callable[[Any, Any, Any], None]:
    """Return a function for MPI that reduces a dtype which MPI itself cannot reduce."""

    def combine(source: Any, target: Any, _: Any) -> None:
        if len(target):
            total = torch.frombuffer(target, dtype=dtype)
            function(torch.frombuffer(source, dtype=dtype), total, out=total)

    return combine


def require(name: str, holds: bool, rule: str) -> None:
    """Raise ValueError with the rule unless `holds` is true."""
    if not holds:
        raise ValueError(f"{name} over mpi4py: {rule}")


def is_plain(tensor: Tensor) -> bool:
    """Return whether MPI can use the memory of a CPU tensor directly."""
    try:
        # A negated view can be contiguous, although its memory is not negated yet.
        lazy = tensor.is_neg() or tensor.is_conj()
        return tensor.is_cpu and tensor.is_contiguous() and not lazy
    except RuntimeError:
        return False  # a tensor that is not dense


def _is_staged(tensor: Tensor) -> bool:
    """Return whether MPI needs the tensor in host memory; halves are reduced there, by torch."""
    return not tensor.is_cpu and (tensor.itemsize == 2 or not cuda_aware())


def _is_direct(name: str, tensor: Tensor) -> bool:
    """Return whether MPI can use the memory, of a host or a GPU; raise unless it is dense."""
    where = f"{tensor.layout} on {tensor.device}"
    dense = tensor.layout == torch.strided and tensor.device.type in DEVICES
    require(name, dense, f"a tensor must be dense and on the CPU or a GPU, not {where}")
    lazy = tensor.is_neg() or tensor.is_conj()
    return tensor.is_contiguous() and not lazy and not _is_staged(tensor)


def _new_space(like: Tensor, shape: Sequence[int]) -> Tensor:
    """New memory that MPI can read and write, in place of a tensor like this."""
    if _is_staged(like):  # torch keeps freed pinned memory for the next call
        return torch.empty(shape, dtype=like.dtype, pin_memory=True)
    return like.new_empty(shape)


def room_for(name: str, tensor: Tensor) -> Tensor:
    """The tensor, or new memory of its size if MPI cannot write to the tensor."""
    return tensor if _is_direct(name, tensor) else _new_space(tensor, tensor.shape)


def flatten(name: str, tensor: Tensor) -> Tensor:
    """The tensor, or a copy that MPI can read; on a GPU the copy is in the current stream."""
    room = room_for(name, tensor)
    return tensor if room is tensor else room.copy_(tensor.detach(), non_blocking=True)


def _find_row(name: str, tensors: Sequence[Tensor]) -> Tensor | None:
    """Return one flat tensor over the memory of these tensors if they are adjacent; else None."""
    if not all(_is_direct(name, tensor) for tensor in tensors):
        return None
    first = tensors[0]
    start, storage = first.storage_offset(), first.untyped_storage().data_ptr()
    end = start
    for tensor in tensors:
        if tensor.storage_offset() != end or tensor.untyped_storage().data_ptr() != storage:
            return None
        end += tensor.numel()
    return first.detach().as_strided((end - start,), (1,), start)


def join(name: str, tensors: Sequence[Tensor]) -> Tensor:
    """A flat tensor with the elements of all tensors, in order."""
    if len(tensors) == 1:
        return flatten(name, tensors[0])
    row = _find_row(name, tensors)
    if row is None:
        row = flatten(name, torch.cat([tensor.detach().reshape(-1) for tensor in tensors]))
    return row


def rooms_for(name: str, tensors: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
    """A flat tensor with room for all of these, and its part for each of them."""
    if len(tensors) == 1:
        room = room_for(name, tensors[0])
        return room, [room]
    row = _find_row(name, tensors)
    if row is not None:
        return row, tensors
    counts = [tensor.numel() for tensor in tensors]
    whole = _new_space(tensors[0], (sum(counts),))
    return whole, torch.split(whole, counts)


def keep_apart(source: Tensor, target: Tensor) -> Tensor:
    """Return the source, or a copy if it shares memory with the target, which MPI forbids."""
    start, other = source.data_ptr(), target.data_ptr()
    shared = start < other + target.nbytes and other < start + source.nbytes
    return source.detach().clone() if shared else source


def finish(outputs: Sequence[Tensor], flats: Sequence[Tensor], divisor: int) -> None:
    """Divide the sums by the divisor, if any, and copy them to outputs that MPI could not write."""
    for output, flat in zip(outputs, flats, strict=False):
        if divisor:
            _divide(flat, divisor)
        if flat is not output:
            output.detach().copy_(flat.view(output.shape))


def _divide(flat: Tensor, size: int) -> None:
    """Divide sums in place by the number of ranks; integers towards zero."""
    flat = flat.detach()
    if flat.is_complex():  # complex division rounds differently from the division of its parts
        flat = torch.view_as_real(flat)
    if flat.is_floating_point():
        flat.div_(size)
    else:
        flat.div_(size, rounding_mode="trunc")


def on_device(call: Callable[[], Any], like: Tensor) -> Callable[[], Any]:
    """Return a call with the tensor's GPU current, whose work has ended when it returns.

    Waits for the current work of the caller's stream first: MPI does not support streams, and can
    use a GPU's memory only if that GPU is current.
    """
    if like.is_cpu:
        return call
    device = like.device
    module: Any = torch.get_device_module(device)
    module.current_stream(device).synchronize()

    def run() -> Any:
        with module.device(device):
            result = call()
            module.current_stream(device).synchronize()
        return result

    return run
