"""Digests and located differences of tensors on a GPU, which torch simulates: simulated_gpu.py."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
from simulated_gpu import CUDA, SimulatedGpu, fake_group
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from two_replicas import flip_bit, locate_bit, make_values

from ddpbench.replicas import digest, locate
from ddpbench.replicas.channel import Channel

pytestmark = pytest.mark.thorough  # a compiler makes the simulation

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
OTHERS = [torch.complex64, torch.bool, torch.int8, torch.int32, torch.int64, torch.uint8]
OTHERS += [torch.uint16, torch.uint32, torch.uint64]
DTYPES = [*FLOATS, *FLOAT8, *OTHERS]


@pytest.mark.parametrize("sizes", [[1], [1, 0, 9, 5000], [3] * 40, [1 << 20, 7, (1 << 20) + 1]])
def test_digests_of_many_tensors_wait_once(simulated_gpu: SimulatedGpu, sizes: list[int]) -> None:
    """However many tensors there are, the host waits for the GPU once for their digests and once to
    learn that all are finite; a digest does not depend on the tensors beside it."""
    tensors = [torch.full((size,), 1.0 + i).to("cuda") for i, size in enumerate(sizes)]
    simulated_gpu.called.clear()
    digests, counts = digest.read(tensors, range(len(tensors)))
    assert len(simulated_gpu.reads) <= 2
    assert not counts.any()
    alone = [int(digest.read([tensor])[0][0]) for tensor in tensors]
    assert digests.tolist() == alone


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
    content = make_values(dtype)
    reference = layout(flip_bit(content, 4321))
    near = locate_bit(layout(content), reference)
    far = layout(content.to("cuda"))
    simulated_gpu.called.clear()
    details = locate_bit(far, reference)
    piece = 4096 // max(content.itemsize, 8)
    assert len(simulated_gpu.reads) == -(-content.numel() // piece)
    assert details == near
    assert details[0].differing == 1
    assert details[0].bit == 0


def test_messages_about_replicas_are_sent_from_the_gpu(
    simulated_gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a group that moves CUDA tensors only, as nccl does, every exchange sends a tensor of the
    GPU that holds the parameters, and each waits for the GPU once."""
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: "cuda:nccl")
    vector = np.arange(5, dtype=np.int64)
    with fake_group(0, 2):
        channel = Channel(None, nn.Linear(3, 2, device="cuda"))
        simulated_gpu.called.clear()
        # The fake group moves nothing.
        assert channel.gather_sums([0, 1], [2, 3]) == ([True, False], [2, 3])
        assert channel.gather_rows(vector).shape == (2, 5)
        assert channel.broadcast_bytes(vector.view(np.uint8), 0).size == vector.nbytes
    assert len(simulated_gpu.reads) == 3
    sent = [t for _, args in simulated_gpu.collectives for t in tree_leaves(args)]
    tensors = [one for one in sent if isinstance(one, Tensor)]
    assert {tensor.device for tensor in tensors} == {CUDA}
