"""Each workload on a GPU, which torch simulates: see simulated_gpu.py.

A copy between host and GPU, or a value that the host reads, would be part of a measured step, and
the host would wait for the GPU there. A backward needs a real GPU: torch asks it for streams.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from simulated_gpu import CUDA, SimulatedGpu, fake_group
from test_workloads import SMALL
from torch.utils._pytree import tree_leaves

from ddpbench.catalog import models
from ddpbench.catalog.task import RankSetup
from ddpbench.catalog.workloads import WORKLOADS

pytestmark = pytest.mark.thorough  # a compiler makes the simulation


@pytest.fixture(autouse=True)
def _new_parameters() -> Iterator[None]:
    """Let Module.to make new parameters: simulated ones cannot replace the CPU's in place."""
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    yield
    torch.__future__.set_overwrite_module_params_on_conversion(before)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_forward_stays_on_the_gpu(simulated_gpu: SimulatedGpu, name: str) -> None:
    """Model, buffers, batch and loss are on the rank's GPU; the forward copies nothing to or from
    it, reads no value of it, and computes what the CPU computes."""
    far, near = (
        WORKLOADS[name].build(SMALL[name], RankSetup(0, 1, 4, device, 3, None))
        for device in (CUDA, torch.device("cpu"))
    )
    for step in (0, 5):
        tensors = [*far.model.parameters(), *far.model.buffers(), *tree_leaves(far.batch(step))]
        assert {tensor.device for tensor in tensors} == {CUDA}
        crossed, called = len(simulated_gpu.crossed), len(simulated_gpu.called)
        loss = far.loss(far.model, far.batch(step))
        (loss / 2).detach()  # as with two micro-batches
        assert simulated_gpu.crossed[crossed:] == []
        of_step = simulated_gpu.called[called:]
        assert of_step
        assert not [each for each in of_step if each.endswith("→cpu")]
        assert loss.device == CUDA
        assert loss.dim() == 0
        torch.testing.assert_close(loss.cpu(), near.loss(near.model, near.batch(step)))


def test_the_joined_batch_is_gathered_from_gpu_to_gpu(simulated_gpu: SimulatedGpu) -> None:
    """The loss of contrastive gathers the features of all ranks, and its backward sums their
    gradients, with tensors on the GPU alone."""
    with fake_group(1, 3) as group:
        setup = RankSetup(1, 3, 4, CUDA, 3, group)
        task = WORKLOADS["contrastive"].build(SMALL["contrastive"], setup)
        called = len(simulated_gpu.called)
        assert task.loss(task.model, task.batch(0)).device == CUDA
        gather: Any = models.make_gather(setup)
        share = gather.__self__.backward(None, torch.ones(2, 12, 16, device=CUDA))
    assert (share.device, share.shape) == (CUDA, (2, 4, 16))
    assert not [each for each in simulated_gpu.called[called:] if each.endswith("→cpu")]
    names = [name for name, _ in simulated_gpu.collectives]
    assert [name.split(".")[1] for name in names] == ["allgather_", "allreduce_"]
    for _, arguments in simulated_gpu.collectives:
        tensors = [each for each in tree_leaves(arguments) if isinstance(each, torch.Tensor)]
        assert {tensor.device for tensor in tensors} == {CUDA}
