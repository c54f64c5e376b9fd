"""The device of the messages about replicas: where the module's parameters are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeProcessGroup, FakeStore

from ddpbench.replicas.channel import Channel, choose_device

GPU = "gpu_only"  # a backend that takes tensors of GPUs only, as nccl does


def module_on(*devices: str) -> nn.Module:
    """A module with a parameter on each device; those of a GPU have no memory."""
    with FakeTensorMode():
        return nn.ParameterList(nn.Parameter(torch.empty(2, device=device)) for device in devices)


@pytest.mark.parametrize(
    ("kinds", "devices", "chosen"),
    [
        (["cuda"], ["cuda:1"], "cuda:1"),
        (["cuda"], ["cpu", "cuda:3", "cuda:2"], "cuda:3"),
        (["cuda"], ["cpu"], "cuda"),
        (["cuda"], [], "cuda"),
        (["xpu", "cuda"], ["cuda:1"], "cuda:1"),
        (["cpu", "cuda"], ["cuda:1"], "cpu"),
    ],
)
def test_messages_use_the_device_of_the_parameters(
    kinds: list[str], devices: list[str], chosen: str
) -> None:
    """Of the first that the group takes; the CPU if it takes that; else the current device."""
    assert choose_device(kinds, module_on(*devices).parameters()) == torch.device(chosen)


@pytest.fixture
def gpu_group() -> Iterator[None]:
    """A default group of two ranks on a backend that is registered for GPUs alone."""
    if not hasattr(dist.Backend, GPU.upper()):

        def create(_: Any, rank: int, size: int, __: Any) -> dist.ProcessGroup:
            make = getattr(FakeProcessGroup, "_create_internal", FakeProcessGroup)
            return make(rank, size)

        dist.Backend.register_backend(GPU, create, devices=["cuda"])
    dist.init_process_group(GPU, store=FakeStore(), rank=1, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("gpu_group")
def test_a_group_for_gpus_gets_messages_on_the_gpu_of_the_module() -> None:
    """A script that never calls set_device has GPU 0 as current device on all ranks."""
    assert Channel(None, module_on("cuda:1")).device == torch.device("cuda", 1)
    buffers = nn.Module()
    with FakeTensorMode():
        buffers.register_buffer("mean", torch.empty(2, device="cuda:2"))
    assert Channel(None, buffers).device == torch.device("cuda", 2)
