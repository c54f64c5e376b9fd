"""Tensors in a form that MPI takes: contiguous memory, on the CPU unless MPI knows GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ddpbench.mpi_backend import types as mpi_types
from ddpbench.mpi_backend.library import cuda_aware

DEVICES = ["cpu", "cuda"]  # whose tensors the backend takes


def require(name: str, holds: bool, rule: str) -> None:
    """Raises ValueError with the rule unless it holds."""
    if not holds:
        raise ValueError(f"{name} over mpi4py: {rule}")


def require_dense(name: str, tensor: Tensor) -> Tensor:
    """The tensor itself. Raises ValueError unless it is dense and on the CPU or a GPU."""
    if tensor.layout == torch.strided and tensor.device.type in DEVICES:
        return tensor
    where = f"{tensor.layout} on {tensor.device}"
    raise ValueError(
        f"{name} over mpi4py: a tensor must be dense and on the CPU or a GPU, not {where}"
    )


def is_plain(tensor: Tensor) -> bool:
    """Whether MPI can take the tensor's memory as it is."""
    try:
        # A negated view can be contiguous: its memory is still to be negated.
        lazy = tensor.is_neg() or tensor.is_conj()
        return tensor.is_cpu and tensor.is_contiguous() and not lazy
    except RuntimeError:
        return False  # a tensor that is not dense


def is_staged(tensor: Tensor) -> bool:
    """Whether MPI needs the tensor in host memory; halves are reduced there, by torch."""
    return not tensor.is_cpu and (tensor.itemsize == 2 or not cuda_aware())


def new_space(like: Tensor, shape: Sequence[int]) -> Tensor:
    """New memory that MPI can read and write, in place of a tensor like this."""
    if is_staged(like):  # torch keeps freed pinned memory for the next call
        return torch.empty(shape, dtype=like.dtype, pin_memory=True)
    return like.new_empty(shape)


def is_direct(tensor: Tensor) -> bool:
    """Whether MPI can take the tensor's memory as it is, in host or GPU memory."""
    lazy = tensor.is_conj() or tensor.is_neg()  # the memory is still to be conjugated or negated
    return tensor.is_contiguous() and not lazy and not is_staged(tensor)


def room_for(name: str, tensor: Tensor) -> Tensor:
    """The tensor, or new memory of its size if MPI cannot write to the tensor."""
    if is_direct(require_dense(name, tensor)):
        return tensor
    return new_space(tensor, tensor.shape)


def flatten(name: str, tensor: Tensor) -> Tensor:
    """The tensor, or a copy that MPI can read; on a GPU the copy is in the current stream."""
    room = room_for(name, tensor)
    return tensor if room is tensor else room.copy_(tensor.detach(), non_blocking=True)


def row_of(tensors: Sequence[Tensor]) -> Tensor | None:
    """One flat tensor over the memory of these, if they are adjacent; else None."""
    first = tensors[0]
    if not all(map(is_direct, tensors)):
        return None
    offset, storage = first.storage_offset(), first.untyped_storage().data_ptr()
    for tensor in tensors:
        if tensor.storage_offset() != offset or tensor.untyped_storage().data_ptr() != storage:
            return None
        offset += tensor.numel()
    start = first.storage_offset()
    return first.detach().as_strided((offset - start,), (1,), start)


def join(name: str, tensors: Sequence[Tensor]) -> Tensor:
    """A flat tensor with the elements of all tensors, in order."""
    row = row_of([require_dense(name, tensor) for tensor in tensors])
    if row is None:
        row = flatten(name, torch.cat([tensor.detach().reshape(-1) for tensor in tensors]))
    return row


def rooms_for(name: str, tensors: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
    """A flat tensor with room for all of these, and its part for each of them."""
    row = row_of([require_dense(name, tensor) for tensor in tensors])
    if row is not None:
        return row, tensors
    counts = [tensor.numel() for tensor in tensors]
    whole = new_space(tensors[0], (sum(counts),))
    return whole, torch.split(whole, counts)


def keep_apart(source: Tensor, target: Tensor) -> Tensor:
    """The source, or a copy if it shares memory with the target, which MPI forbids."""
    start, other = source.data_ptr(), target.data_ptr()
    shared = start < other + target.nbytes and other < start + source.nbytes
    return source.detach().clone() if shared else source


def finish(outputs: Sequence[Tensor], flats: Sequence[Tensor], divisor: int) -> None:
    """Divide the sums by the divisor, if any, and copy them to outputs that MPI could not write."""
    for output, flat in zip(outputs, flats, strict=False):
        if divisor:
            mpi_types.mean(flat, divisor)
        if flat is not output:
            output.detach().copy_(flat.view(output.shape))


def with_idle_stream(call: Callable[[], Any], like: Tensor) -> Any:
    """Make a call with the tensor's device current, and nothing on its stream before and after.

    MPI knows no streams, and takes a GPU's memory only where that GPU is current.
    """
    if like.is_cpu:
        return call()
    module: Any = torch.get_device_module(like.device)
    with module.device(like.device):
        stream = module.current_stream(like.device)
        stream.synchronize()
        result = call()
        stream.synchronize()
    return result


def after_stream(call: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """The call, delayed until the GPU has done what the caller's stream holds now.

    The call ends when what it has started on the stream of its own thread has ended, too.
    """
    module: Any = torch.get_device_module(device)
    ready = module.current_stream(device).record_event()

    def synchronized() -> None:
        with module.device(device):
            ready.synchronize()
            call()
            module.current_stream(device).synchronize()

    return synchronized


def complete(future: torch.futures.Future[Any], outputs: Sequence[Tensor]) -> None:
    """End a future while the outputs' GPU is current.

    In a new thread GPU 0 is, which torch, and what follows the future, would begin to use.
    """
    device = next((tensor.device for tensor in outputs if not tensor.is_cpu), None)
    module: Any = None if device is None else torch.get_device_module(device)
    with module.device(device) if module else nullcontext():
        future.set_result(None)
