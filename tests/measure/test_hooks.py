"""DDP's communication hooks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpbench.catalog import hooks
from ddpbench.catalog.hooks import HOOKS


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Any]:
    """A gloo group of this process alone."""
    store = dist.FileStore(str(tmp_path / "s"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", [name for name, hook in HOOKS.items() if not hook.fails])
def test_a_hook_trains_alone(alone: Any, name: str) -> None:
    """DDP accepts each entry, and in a world of one nothing gets lost; bf16 says what it needs."""
    make = HOOKS[name].make
    model = DistributedDataParallel(torch.nn.Linear(8, 4), process_group=alone)
    if make is not None:
        if name == "bf16" and torch.version.cuda is None and torch.version.hip is None:
            with pytest.raises(TypeError, match="BF16"):
                model.register_comm_hook(*make(alone))
            return
        model.register_comm_hook(*make(alone))
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(g is not None and bool((g == 6).all()) for g in gradients)


def test_no_reduction_leaves_the_bucket(alone: Any) -> None:
    """DDP takes noop as a hook; every gradient is the rank's own, bit for bit."""
    torch.manual_seed(0)
    model, batch = torch.nn.Linear(8, 4), torch.randn(2, 8)
    model(batch).sum().backward()
    own = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    ddp = DistributedDataParallel(model, process_group=alone)
    ddp.register_comm_hook(None, hooks.noop)
    ddp(batch).sum().backward()
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(own) == 2
    assert all(map(torch.equal, grads, own))
