"""Ways of parallel training: one real step of each on the backend, checked against one process.

Every way trains the same two layers with the same batch. The parameters after the step must be
those of one process that takes the step alone with the whole batch. To add a way, add an entry to
WAYS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ddpbench.doctor.capabilities.verdicts import OK, PARALLEL, WRONG, Combination, Verdict

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


@dataclass(frozen=True)
class Ranks:
    """What a way works with, in one rank.

    group: all ranks; folder: for a checkpoint, the same in all ranks.
    """

    world: World
    group: dist.ProcessGroup
    device: torch.device
    folder: str

    @property
    def mesh(self) -> DeviceMesh:
        """Return all ranks in a row."""
        from torch.distributed.device_mesh import DeviceMesh

        return DeviceMesh.from_group(self.group, self.device.type, mesh_dim_names=("ranks",))

    @contextmanager
    def agree_replicated_mesh(self) -> Iterator[DeviceMesh]:
        """Yield a mesh of n replicas with one shard each, so that two ranks suffice."""
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import DeviceMesh

        size, backend = self.group.size(), dist.get_backend(self.group)
        with ExitStack() as stack:
            alone = [
                stack.enter_context(self.world.agree_group(backend, [rank], self.device))
                for rank in range(size)
            ]
            yield DeviceMesh.from_group(
                [self.group, alone[self.group.rank()]],
                self.device.type,
                mesh=torch.arange(size).view(-1, 1),
                mesh_dim_names=("dp_replicate", "dp_shard"),
            )


def list_combinations(ranks: int) -> list[Combination]:
    """Return a combination for each way; none for one rank, which sends nothing."""
    return [Combination(name, PARALLEL, None, None) for name in WAYS] if ranks > 1 else []


def attempt(name: str, ranks: Ranks) -> Verdict:
    """Train one step in this way; return whether the parameters are those of one process.

    Raises what the way raises.
    """
    import torch

    alone = _step(_make_model(ranks.device), _make_batch(ranks))
    expected = dict(alone.named_parameters())
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


# --- the model and its batch ----------------------------------------------------------------------


def _make_model(device: torch.device) -> nn.Module:
    """Return two layers with numbers that are the same in every process, without a random one."""
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).to(device)
    with torch.no_grad():
        for parameter in model.parameters():
            count = torch.arange(parameter.numel(), device=device, dtype=parameter.dtype)
            parameter.copy_(torch.sin(count).view_as(parameter) / 2)
    return model


def _make_batch(ranks: Ranks) -> torch.Tensor:
    """Return the whole batch: ROWS for each rank."""
    import torch

    count = torch.arange(ROWS * ranks.group.size() * WIDTH, device=ranks.device)
    return torch.cos(count.float()).view(-1, WIDTH)


def _step(
    model: nn.Module, batch: torch.Tensor, optimizer: torch.optim.Optimizer | None = None
) -> nn.Module:
    import torch

    optimizer = optimizer or torch.optim.SGD(model.parameters(), LEARNING_RATE)
    model(batch).square().mean().backward()
    optimizer.step()
    return model


def _own_rows(ranks: Ranks) -> torch.Tensor:
    return _make_batch(ranks).chunk(ranks.group.size())[ranks.group.rank()]


def _gather_whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters by name, each joined from its shards. All ranks call it."""
    return {
        name: getattr(parameter, "full_tensor", lambda own=parameter: own)().detach()
        for name, parameter in model.named_parameters()
    }


# --- the ways -------------------------------------------------------------------------------------


def _train_ddp(ranks: Ranks, shards_optimizer: bool = False) -> dict[str, torch.Tensor]:
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model, optimizer = _make_model(ranks.device), None
    if shards_optimizer:
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, process_group=ranks.group, lr=LEARNING_RATE
        )
    _step(DistributedDataParallel(model, process_group=ranks.group), _own_rows(ranks), optimizer)
    return _gather_whole(model)


def _shard(ranks: Ranks, mesh: DeviceMesh) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = _make_model(ranks.device)
    fully_shard(model, mesh=mesh)
    return model


def _train_hsdp(ranks: Ranks) -> dict[str, torch.Tensor]:
    with ranks.agree_replicated_mesh() as mesh:
        return _gather_whole(_step(_shard(ranks, mesh), _own_rows(ranks)))


def _train_tensor_parallel(ranks: Ranks) -> dict[str, torch.Tensor]:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    model = parallelize_module(_make_model(ranks.device), ranks.mesh, plan)
    return _gather_whole(_step(model, _make_batch(ranks)))


def _save_and_load(ranks: Ranks) -> dict[str, torch.Tensor]:
    from torch.distributed import checkpoint

    model = _step(_shard(ranks, ranks.mesh), _own_rows(ranks))
    loaded = _shard(ranks, ranks.mesh)
    state = loaded.state_dict()
    try:
        checkpoint.save(model.state_dict(), checkpoint_id=ranks.folder, process_group=ranks.group)
        checkpoint.load(state, checkpoint_id=ranks.folder, process_group=ranks.group)
    except checkpoint.CheckpointException as error:  # no Exception, and its text is a traceback
        first, *_ = error.failures.values()
        raise RuntimeError(str(first[0])) from error
    loaded.load_state_dict(state)
    return _gather_whole(loaded)


WAYS: dict[str, Callable[[Ranks], dict[str, torch.Tensor]]] = {
    "DDP": _train_ddp,
    "ZeroRedundancyOptimizer": partial(_train_ddp, shards_optimizer=True),
    "fully_shard": lambda ranks: _gather_whole(_step(_shard(ranks, ranks.mesh), _own_rows(ranks))),
    "HSDP": _train_hsdp,
    "tensor parallel": _train_tensor_parallel,
    "sharded checkpoint": _save_and_load,
}
