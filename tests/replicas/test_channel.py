"""The device of the messages about replicas: where the module's parameters are."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ddpbench.replicas.channel import choose_device


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
