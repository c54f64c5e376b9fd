"""Starts of a repetition on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddpbench.measure import start
from ddpbench.runtime import devices


def test_nccl_is_bound_where_it_would_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    """From torch 2.15 on, new_group gets the device. Before, a bound group would change NCCL's
    mode. Other backends and the CPU are never bound. NVIDIA's containers call theirs an alpha."""
    version = type(torch.__version__)
    device = torch.device("cuda", 3)
    bound = {}
    for number in ("2.7.0", "2.14.1+cu130", "2.15.0a0+1a2b3c4", "2.15.0"):
        monkeypatch.setattr(torch, "__version__", version(number))
        bound[number] = devices.of(device).group_options(device, "nccl")
        assert devices.of(device).group_options(device, "gloo") == {}
        assert devices.get("cpu").group_options(torch.device("cpu"), "nccl") == {}
    new = {name for name, options in bound.items() if options == {"device_id": device}}
    assert new == {"2.15.0a0+1a2b3c4", "2.15.0"}
    assert bound["2.7.0"] == bound["2.14.1+cu130"] == {}


def test_a_start_on_a_device_holds_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """From torch 2.15 on, nccl's barrier returns once it is issued: the start waits for it."""
    waited = []
    monkeypatch.setattr(dist, "barrier", lambda **options: waited.append(options))
    monkeypatch.setattr(devices.KINDS["cpu"], "clock", "device", raising=False)
    synchronize = waited.append
    monkeypatch.setattr(devices.KINDS["cpu"], "synchronize_stream", synchronize, raising=False)
    group: Any = "group"
    start.barrier(group, torch.device("cpu"))()
    assert waited == [{"group": "group"}, torch.device("cpu")]
