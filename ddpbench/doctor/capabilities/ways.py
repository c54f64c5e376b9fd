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
from pathlib import Path
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
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.tensor.parallel",
)
WIDTH, ROWS = 8, 4  # of the layers, and of each rank's part of the batch
LEARNING_RATE = 0.1
TOLERANCE = 1e-4  # relative and absolute: the ranks add up in another order than one process
Parameters = dict[str, "torch.Tensor"]  # by name


@dataclass(frozen=True)
class Ranks:
    """What one rank works with."""

    world: World
    group: dist.ProcessGroup  # all ranks, on the backend that is tried
    device: torch.device
    folder: Path  # for files, the same in all ranks

    def make_model(self) -> nn.Module:
        """Return two layers with numbers that are the same in every process."""
        import torch
        from torch import nn

        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).to(self.device)

    def make_batch(self, whole: bool) -> torch.Tensor:
        """Return the whole batch, or this rank's rows of it."""
        import torch

        torch.manual_seed(1)
        batch = torch.randn(ROWS * self.group.size(), WIDTH).to(self.device)
        return batch if whole else batch.chunk(self.group.size())[self.group.rank()]

    def step(
        self,
        model: nn.Module,
        *,
        whole: bool = False,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> nn.Module:
        """Train a step with the whole batch or this rank's rows of it; return the model."""
        import torch

        optimizer = optimizer or torch.optim.SGD(model.parameters(), LEARNING_RATE)
        model(self.make_batch(whole)).square().mean().backward()
        optimizer.step()
        return model

    def shard(self, mesh: DeviceMesh | None = None) -> nn.Module:
        """Return the model under fully_shard, over all ranks or a mesh."""
        from torch.distributed.fsdp import fully_shard

        model = self.make_model()
        fully_shard(model, mesh=mesh or self.line())
        return model

    def line(self) -> DeviceMesh:
        """Return all ranks in a row."""
        from torch.distributed.device_mesh import DeviceMesh

        return DeviceMesh.from_group(self.group, self.device.type, mesh_dim_names=("ranks",))


def attempt(name: str, ranks: Ranks) -> Verdict:
    """Train one step in this way; return whether the parameters are those of one process.

    Raises what the way raises.
    """
    import torch

    expected = dict(ranks.step(ranks.make_model(), whole=True).named_parameters())
    for parameter, value in WAYS[name](ranks).items():
        wanted = expected[parameter].detach()
        if not torch.allclose(value, wanted, rtol=TOLERANCE, atol=TOLERANCE):
            index = int((value - wanted).abs().argmax())
            got, right = (float(tensor.flatten()[index]) for tensor in (value, wanted))
            rank = ranks.group.rank()
            why = f"rank {rank} has {got:g} at index {index} of {parameter} after a step, "
            wrong = {"rank": rank, "index": index, "expected": right, "got": got}
            return Verdict(WRONG, why + f"one process {right:g}", wrong)
    return Verdict(OK)


def _gather_whole(model: nn.Module) -> Parameters:
    """Return the parameters by name, each joined from its shards. All ranks call it."""
    return {
        name: getattr(parameter, "full_tensor", lambda own=parameter: own)().detach()
        for name, parameter in model.named_parameters()
    }


def _train_ddp(ranks: Ranks, shards_optimizer: bool = False) -> Parameters:
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model, optimizer = ranks.make_model(), None
    if shards_optimizer:
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, process_group=ranks.group, lr=LEARNING_RATE
        )
    ranks.step(DistributedDataParallel(model, process_group=ranks.group), optimizer=optimizer)
    return _gather_whole(model)


def _train_hsdp(ranks: Ranks) -> Parameters:
    """Train replicas with one shard each, so that two ranks suffice."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

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
        return _gather_whole(ranks.step(ranks.shard(mesh)))


def _train_tensor_parallel(ranks: Ranks) -> Parameters:
    from torch.distributed.tensor import parallel

    plan = {"0": parallel.ColwiseParallel(), "1": parallel.RowwiseParallel()}
    model = parallel.parallelize_module(ranks.make_model(), ranks.line(), plan)
    return _gather_whole(ranks.step(model, whole=True))


def _save_and_load(ranks: Ranks) -> Parameters:
    from torch.distributed import checkpoint

    model, loaded = ranks.step(ranks.shard()), ranks.shard()
    state = loaded.state_dict()
    try:
        checkpoint.save(model.state_dict(), checkpoint_id=ranks.folder, process_group=ranks.group)
        checkpoint.load(state, checkpoint_id=ranks.folder, process_group=ranks.group)
    except checkpoint.CheckpointException as error:  # no Exception, and its text is a traceback
        first, *_ = error.failures.values()
        raise RuntimeError(str(first[0])) from error
    loaded.load_state_dict(state)
    return _gather_whole(loaded)


WAYS: dict[str, Callable[[Ranks], Parameters]] = {
    "DDP": _train_ddp,
    "ZeroRedundancyOptimizer": partial(_train_ddp, shards_optimizer=True),
    "fully_shard": lambda ranks: _gather_whole(ranks.step(ranks.shard())),
    "HSDP": _train_hsdp,
    "tensor parallel": _train_tensor_parallel,
    "sharded checkpoint": _save_and_load,
}
