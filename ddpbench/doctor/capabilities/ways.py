"""Ways of parallel training: one real step of each on the backend, checked against one process.

Every way trains the same two layers with the same batch. The parameters after the step must be
those of one process that takes the step alone with the whole batch. To add a way, add an entry to
WAYS.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ddpbench.doctor.capabilities.judge import OK, WRONG, Verdict

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from ddpbench.runtime.world import World

# Imported before the first way, because it takes seconds: an optimizer imports torch._dynamo.
MODULES = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.tensor.parallel",
)
WIDTH, ROWS = 8, 4  # of the layers, and of each rank's part of the batch
LEARNING_RATE = 0.1
TOLERANCE = 1e-4  # relative and absolute: the ranks add up in another order than one process


@dataclass(frozen=True)
class Ranks:
    """What one rank works with."""

    world: World
    group: dist.ProcessGroup  # all ranks, on the backend that is tried
    device: torch.device

    def make_model(self) -> nn.Module:
        """Return two layers with numbers that are the same in every process."""
        import torch
        from torch import nn

        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).to(self.device)

    def step(
        self,
        model: nn.Module,
        *,
        whole: bool = False,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> nn.Module:
        """Train a step with the whole batch or this rank's rows of it; return the model."""
        import torch

        torch.manual_seed(1)
        batch = torch.randn(ROWS * self.group.size(), WIDTH).to(self.device)
        rows = batch if whole else batch.chunk(self.group.size())[self.group.rank()]
        optimizer = optimizer or torch.optim.SGD(model.parameters(), LEARNING_RATE)
        model(rows).square().mean().backward()
        optimizer.step()
        return model

    def make_mesh(self) -> DeviceMesh:
        """Return a mesh with all ranks in one dimension."""
        from torch.distributed.device_mesh import DeviceMesh

        return DeviceMesh.from_group(self.group, self.device.type, mesh_dim_names=("ranks",))


def attempt(name: str, ranks: Ranks) -> Verdict:
    """Train one step in this way; return whether the parameters are those of one process.

    All ranks call it. Raises what the way raises.
    """
    import torch

    expected = dict(ranks.step(ranks.make_model(), whole=True).named_parameters())
    for parameter, own in WAYS[name](ranks).named_parameters():
        value = getattr(own, "full_tensor", lambda own=own: own)().detach()  # joined from shards
        wanted = expected[parameter].detach()
        if not torch.allclose(value, wanted, rtol=TOLERANCE, atol=TOLERANCE):
            index = int((value - wanted).abs().argmax())
            got, right = (float(tensor.flatten()[index]) for tensor in (value, wanted))
            rank = ranks.group.rank()
            why = (
                f"rank {rank} has {got:g} at index {index} of {parameter} after a step, "
                f"one process {right:g}"
            )
            return Verdict(
                WRONG, why, {"rank": rank, "index": index, "expected": right, "got": got}
            )
    return Verdict(OK)


def _train_ddp(ranks: Ranks, shards_optimizer: bool = False) -> nn.Module:
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model, optimizer = ranks.make_model(), None
    if shards_optimizer:
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, process_group=ranks.group, lr=LEARNING_RATE
        )
    ranks.step(DistributedDataParallel(model, process_group=ranks.group), optimizer=optimizer)
    return model


def _train_fully_shard(ranks: Ranks, mesh: DeviceMesh | None = None) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = ranks.make_model()
    fully_shard(model, mesh=mesh or ranks.make_mesh())
    return ranks.step(model)


def _train_hsdp(ranks: Ranks) -> nn.Module:
    """Train replicas with one shard each, so that two ranks suffice."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

    size, backend = ranks.group.size(), dist.get_backend(ranks.group)
    with ExitStack() as stack:
        alone = [
            stack.enter_context(ranks.world.agree_group(backend, [rank], ranks.device))
            for rank in range(size)
        ]
        mesh = DeviceMesh.from_group(
            [ranks.group, alone[ranks.group.rank()]],
            ranks.device.type,
            mesh=torch.arange(size).view(-1, 1),
            mesh_dim_names=("dp_replicate", "dp_shard"),
        )
        model = _train_fully_shard(ranks, mesh)
        assert isinstance(model, FSDPModule)
        model.unshard()  # while its groups exist
        return model


def _train_tensor_parallel(ranks: Ranks) -> nn.Module:
    from torch.distributed.tensor import parallel

    plan = {"0": parallel.ColwiseParallel(), "1": parallel.RowwiseParallel()}
    model = parallel.parallelize_module(ranks.make_model(), ranks.make_mesh(), plan)
    return ranks.step(model, whole=True)


WAYS: dict[str, Callable[[Ranks], nn.Module]] = {
    "DDP": _train_ddp,
    "ZeroRedundancyOptimizer": partial(_train_ddp, shards_optimizer=True),
    "fully_shard": _train_fully_shard,
    "HSDP": _train_hsdp,
    "tensor parallel": _train_tensor_parallel,
}
