"""A replica that differs from this process's own in one bit, for the code that locates it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ddpbench.replicas import locate
from ddpbench.replicas.channel import Channel
from ddpbench.replicas.report import Detail


class TwoRanks(Channel):
    """A channel to another rank, which has these bytes."""

    def __init__(self, other: npt.NDArray[np.uint8]) -> None:
        self.ranks, self.rank, self.other, self.sent = [0, 1], 0, other, 0

    def broadcast_bytes(self, content: Any, source: int) -> Any:
        part = self.other[self.sent : self.sent + content.size]
        self.sent += content.size
        return part

    def gather_rows(self, vector: Any) -> Any:
        return np.stack([vector, vector])


def make_values(dtype: torch.dtype, count: int = 5000) -> Tensor:
    """Return elements on the CPU that are not all alike."""
    numbers = torch.arange(count) % 7
    return (numbers % 2 == 0) if dtype == torch.bool else numbers.to(dtype)


def flip_bit(tensor: Tensor, index: int) -> Tensor:
    """Return a copy of a CPU tensor in which the lowest bit of one element differs."""
    copy = tensor.clone()
    copy.view(torch.uint8)[index * copy.itemsize] ^= 1
    return copy


def locate_bit(tensor: Tensor, other: Tensor) -> tuple[Detail, ...]:
    """Compare a tensor on any device with another rank's, a CPU tensor of the same shape."""
    content = other.contiguous().view(-1).view(torch.uint8).numpy()
    dtype = str(tensor.dtype).removeprefix("torch.")
    part = locate.Part(dtype, tuple(tensor.shape), (0,) * tensor.dim())
    return locate.gather_details(TwoRanks(content), tensor, part, [[1], [0]])
