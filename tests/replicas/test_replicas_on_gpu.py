"""Digests and located differences of tensors on a GPU, which torch simulates: simulated_gpu.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from simulated_gpu import SimulatedGpu
from torch import Tensor, nn

from ddpbench.replicas import digest, locate
from ddpbench.replicas.channel import Channel
from ddpbench.replicas.state import Entry

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
OTHERS = [torch.complex64, torch.bool, torch.int8, torch.int32, torch.int64, torch.uint8]
OTHERS += [torch.uint16, torch.uint32, torch.uint64]
DTYPES = [*FLOATS, *FLOAT8, *OTHERS]


def values(dtype: torch.dtype, count: int = 5000) -> Tensor:
    """Elements on the CPU that are not all alike."""
    numbers = torch.arange(count) % 7
    return (numbers % 2 == 0) if dtype == torch.bool else numbers.to(dtype)


def flipped(tensor: Tensor, index: int, bit: int) -> Tensor:
    """A copy in which one bit of one element differs."""
    copy = tensor.clone()
    words = copy.view(torch.uint8)
    words[index * copy.itemsize + bit // 8] ^= 1 << bit % 8
    return copy


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpus_digest_is_of_bits(simulated_gpu: SimulatedGpu, dtype: torch.dtype) -> None:
    """Two equal tensors on a GPU have equal digests; a flipped bit and two exchanged elements
    change the digest; no layout does."""
    content = values(dtype)
    swapped = content.clone()
    swapped[1], swapped[2] = content[2].clone(), content[1].clone()
    wide = torch.stack([content, content], 1).to("cuda")
    tensors = [content, flipped(content, 4321, 0), swapped]
    far = [*(t.to("cuda") for t in tensors), content.to("cuda"), wide[:, 0]]
    digests = digest.read(far, False)[0].tolist()
    assert digests[0] == digests[3] == digests[4]
    assert len({*digests[:3]}) == 3


@pytest.mark.parametrize("sizes", [[1], [1, 0, 9, 5000], [3] * 300, [1 << 20, 7, (1 << 20) + 1]])
def test_digests_of_many_tensors_wait_once(simulated_gpu: SimulatedGpu, sizes: list[int]) -> None:
    """However many tensors there are, the host waits for the GPU once for their digests and once to
    learn that all are finite; a digest does not depend on the tensors beside it."""
    tensors = [torch.full((size,), 1.0 + i).to("cuda") for i, size in enumerate(sizes)]
    simulated_gpu.called.clear()
    digests, counts = digest.read(tensors, True)
    assert len(simulated_gpu.reads) <= 2
    assert not counts.any()
    alone = [int(digest.read([tensor], False)[0][0]) for tensor in tensors]
    assert digests.tolist() == alone


@pytest.mark.parametrize("dtype", [*FLOATS, *FLOAT8, torch.complex64])
def test_nonfinite_elements_on_a_gpu_are_counted(
    simulated_gpu: SimulatedGpu, dtype: torch.dtype
) -> None:
    """Each NaN and infinity of a tensor on a GPU counts; a finite one beside it counts none."""
    bad = values(dtype)
    bad[3] = bad[4000] = math.nan
    counts = digest.read([values(dtype).to("cuda"), bad.to("cuda")], True)[1]
    assert counts.tolist() == [0, 2]


def test_tensors_of_cpu_and_gpu_beside_each_other(simulated_gpu: SimulatedGpu) -> None:
    """Options and CPU tensors of an optimizer's state stand beside its GPU tensors."""
    near = torch.tensor(3.0)
    parameter = nn.Parameter(torch.ones(4, device="cuda"))
    digests, counts = digest.read([near, parameter, 0.1, parameter.detach()], True)
    assert digests[1] == digests[3]
    assert digests[0] == digest.of_cpu(near)
    assert counts.tolist() == [0, 0, 0, 0]


class TwoRanks(Channel):
    """A channel whose other rank has these bytes."""

    def __init__(self, other: npt.NDArray[np.uint8]) -> None:
        self.ranks, self.rank, self.other, self.sent = [0, 1], 0, other, 0

    def broadcast_bytes(self, content: Any, source: int) -> Any:
        part = self.other[self.sent : self.sent + content.size]
        self.sent += content.size
        return part

    def gather_rows(self, vector: Any) -> Any:
        return np.stack([vector, vector])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", [lambda t: t, lambda t: t.reshape(50, 100).t()])
def test_a_flipped_bit_on_a_gpu_is_located(
    simulated_gpu: SimulatedGpu,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    layout: Callable[[Tensor], Tensor],
) -> None:
    """Of a tensor on a GPU, in pieces and in any layout, the flipped bit and its index are named as
    of the CPU's, and the host waits once for each piece."""
    monkeypatch.setattr(locate, "PIECE_NBYTES", 4096)
    content = values(dtype)
    reference = layout(flipped(content, 4321, 0)).contiguous().view(-1).view(torch.uint8).numpy()
    details = []
    for tensor in (layout(content), layout(content.to("cuda"))):
        simulated_gpu.called.clear()
        entry = Entry("weight", tensor, tensor.dtype, tuple(tensor.shape), tensor.device.type)
        difference = locate.gather_difference(
            TwoRanks(reference), "parameters", entry, [[1], [0]], located=True
        )
        details.append(difference.details)
    assert len(simulated_gpu.reads) == -(-content.nbytes // 4096)
    assert details[0] == details[1]
    assert details[0][0].differing == 1
    assert details[0][0].bit == 0
