"""Collectives that move no byte: what the mode "noop" calls in place of torch's own."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def resolve_group(group: Any) -> Any:
    """Return the process group of an operator's argument: its name, or the group itself."""
    resolve: Any = dist.distributed_c10d._resolve_process_group
    return resolve(group) if isinstance(group, str) else group


class _Done(dist.Work):
    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def leave_gather(
    output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
) -> Any:
    own = dist.get_rank(group)
    flat = input_tensor.reshape(-1)
    for rank, slot in enumerate(output_tensor.view(-1).split(flat.numel())):
        if rank != own or slot.data_ptr() != flat.data_ptr():  # the input may be its own slot
            slot.copy_(flat)
    return _Done() if async_op else None


def leave_scatter(
    output: Tensor,
    input: Tensor,  # noqa: A002
    op: Any = None,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    output.view(-1).copy_(input.view(-1).split(output.numel())[dist.get_rank(group)])
    return _Done() if async_op else None


def leave_reduce(tensor: Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> Any:
    return _Done() if async_op else None


# torch's operator → the operation, and what is called in the operator's place
OPERATORS: dict[str, tuple[str, Any]] = {
    "all_reduce": ("all_reduce", lambda tensor, op, group: tensor.clone()),
    "all_gather_into_tensor": (
        "all_gather",
        lambda tensor, size, group: torch.cat([tensor] * size),
    ),
    "reduce_scatter_tensor": (
        "reduce_scatter",
        lambda tensor, op, size, group: tensor.chunk(size)[resolve_group(group).rank()].clone(),
    ),
}
