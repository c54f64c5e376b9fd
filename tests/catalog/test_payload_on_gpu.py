"""Inputs and the exact check with tensors on a GPU, which torch simulates: see simulated_gpu.py."""

from __future__ import annotations

import pytest
import torch
from simulated_gpu import OnGpu, SimulatedGpu

from ddpbench.catalog import payload
from ddpbench.catalog.dtypes import DTYPES, REDUCE_OPS

pytestmark = pytest.mark.thorough  # a compiler makes the simulation
PERIOD = payload.PERIOD


def bits(tensor: torch.Tensor) -> list[int]:
    """The bytes of a tensor, wherever it is."""
    held = tensor.held if isinstance(tensor, OnGpu) else tensor
    return held.view(torch.uint8).tolist()


def both(count: int, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A buffer on the GPU and one on the CPU."""
    kind = getattr(torch, dtype)
    return torch.zeros(count, dtype=kind, device="cuda"), torch.zeros(count, dtype=kind)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_gets_the_bits_of_the_cpu(simulated_gpu: SimulatedGpu, dtype: str) -> None:
    """Filled and poisoned buffers on a GPU hold the CPU's bits, and filling them waits for
    nothing; the values cross in the buffer's dtype, because not every GPU has float64."""
    far, near = both(2 * PERIOD + 7, dtype)
    for reduce_op in (None, *REDUCE_OPS):
        values = payload.table(1, 3, dtype, reduce_op, 2)
        for buffer in (far, near):
            payload.poison(buffer)
        assert bits(far) == bits(near)
        for buffer in (far, near):
            payload.fill(buffer, values)
        assert bits(far) == bits(near)
    assert simulated_gpu.reads == []
    assert {size for name, size in simulated_gpu.crossed if name == "aten._to_copy"} == {
        DTYPES[dtype].nbytes
    }
