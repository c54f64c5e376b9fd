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


MAKES: dict[str, Any] = {name: hook.make for name, hook in HOOKS.items() if not hook.fails}
MAKES["of an arm"] = lambda _: (None, hooks.noop)


@pytest.mark.parametrize("name", MAKES)
def test_a_hook_trains_alone(alone: Any, name: str) -> None:
    """DDP accepts each entry, and in a world of one nothing gets lost; bf16 says what it needs."""
    model = DistributedDataParallel(torch.nn.Linear(8, 4), process_group=alone)
    make = MAKES[name]
    if name == "bf16" and torch.version.cuda is None and torch.version.hip is None:
        with pytest.raises(TypeError, match="BF16"):
            model.register_comm_hook(*make(alone))
        return
    if make is not None:
        model.register_comm_hook(*make(alone))
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(g is not None and bool((g == 6).all()) for g in gradients)
