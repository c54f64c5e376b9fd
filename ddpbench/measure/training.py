"""Train a task epoch by epoch, with validation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpbench.measure import clock
from ddpbench.records.load import Load, join_loads
from ddpbench.records.schema import Epoch
from ddpbench.runtime import control, devices
from ddpbench.runtime.load import LoadMeter

if TYPE_CHECKING:
    from ddpbench.catalog.task import Task
    from ddpbench.runtime.world import World

MOST_LOSSES = 200  # of the training, stored in one run beside those of whole epochs

# Called with the number of the step, counted from 1. Returns whether the replicas are equal.
Check = Callable[[int], bool]
Verify = Callable[[nn.Module, torch.optim.Optimizer], Check]


@dataclass
class _State:
    """What trains, and how far it is."""

    optimizer: torch.optim.Optimizer
    epoch: int = 0  # completed
    step: int = 0  # counted over all epochs
    meter: LoadMeter = field(default_factory=LoadMeter)


def train(
    world: World,
    tested: dist.ProcessGroup,
    task: Task,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    epochs: int,
    *,
    verify: Verify | None = None,
    report: Callable[[Epoch], None] = lambda epoch: None,
) -> tuple[Epoch, ...]:
    """Train to the end of epoch number `epochs`, all ranks together. Return the trained epochs.

    verify: called once; the check that it returns follows each optimizer step.
    report: called in every rank after each epoch.

    If a rank is interrupted, all ranks stop after the epoch.
    """
    if task.training is None:
        raise ValueError("this task cannot be trained: only its steps can be measured")
    world.watchdog.begin_phase("the start of the training")
    device = next(task.model.parameters()).device
    device_ids = devices.of(device).ddp_device_ids(device)
    ddp = DistributedDataParallel(task.model, device_ids, process_group=tested)
    state = _State(make_optimizer(ddp))
    check = verify(ddp, state.optimizer) if verify else None
    trained: list[Epoch] = []
    while state.epoch < epochs:
        parts = max(1, MOST_LOSSES // epochs)
        trained.append(_train_epoch(world, task, ddp, state, parts=parts, check=check))
        report(trained[-1])
        if control.agree_objection(world, world.interrupted) is not None:
            break
    return tuple(trained)


def _train_epoch(
    world: World,
    task: Task,
    ddp: DistributedDataParallel,
    state: _State,
    *,
    parts: int,
    check: Check | None,
) -> Epoch:
    """Train and validate once through the data. Return the same record in all ranks.

    parts: number of parts of the epoch, each with its own training loss; at most one per step.
    """
    world.watchdog.begin_phase(f"epoch {state.epoch + 1} of the training")
    state.meter.read()  # the load of the epoch begins here
    began = clock.now_ns()
    trained, equal = _take_steps(world, ddp, task, state, check)
    sums = torch.stack([trained.sum(0), _validate(world, task, ddp.module)])
    dist.all_reduce(sums, group=ddp.process_group)
    train_loss, validation_loss = map(_mean_loss, sums.tolist())
    chunks = trained.tensor_split(min(parts, len(trained)))
    seconds, load = (clock.now_ns() - began) * 1e-9, asdict(state.meter.read())
    own = [seconds, load, torch.stack([chunk.sum(0) for chunk in chunks]).tolist()]
    all_seconds, loads, chunk_sums = zip(*control.gather_values(world, own), strict=True)
    losses = tuple(map(_mean_loss, torch.tensor(chunk_sums, dtype=torch.float64).sum(0).tolist()))
    return Epoch(
        number=state.epoch,
        train_loss=train_loss,
        validation_loss=validation_loss,
        seconds=max(all_seconds),
        replicas_equal=None if check is None else equal,
        train_losses=losses if len(losses) > 1 else (),
        load=join_loads([Load(**load) for load in loads]),
    )


def _take_steps(
    world: World, ddp: DistributedDataParallel, task: Task, state: _State, check: Check | None
) -> tuple[Tensor, bool]:
    """Take the steps of the next epoch; return float64[step, 2] of `_weigh`, and their verdict."""
    assert task.training is not None
    equal, steps = True, []
    state.epoch += 1
    for batch, samples in task.training.batches(state.epoch):
        state.optimizer.zero_grad()
        loss: Any = task.loss(ddp, batch)
        loss.backward()
        state.optimizer.step()
        state.step += 1
        steps.append(_weigh(loss, samples))
        if check is not None:
            equal = check(state.step) and equal
        world.watchdog.rearm()
    return torch.stack(steps), equal


def _weigh(loss: Tensor, samples: int) -> Tensor:
    """Return float64[2]: the sum of a batch's losses, and its samples. Does not wait for a GPU."""
    total = loss.detach().double() * samples
    return torch.stack([total, torch.full_like(total, samples)])


def _mean_loss(sums: Sequence[float]) -> float | None:
    """Return the sum of losses / the samples; None if it is not finite."""
    losses, samples = sums
    return losses / samples if math.isfinite(losses) else None


@torch.no_grad()
def _validate(world: World, task: Task, module: nn.Module) -> Tensor:
    """Return float64[2]: this rank's share of the validation, the sum of losses, and samples.

    The forward uses the bare module. DDP's forward may communicate (it broadcasts buffers), but the
    ranks may have different numbers of batches here.
    """
    assert task.training is not None
    sums = torch.zeros(2, dtype=torch.float64, device=next(module.parameters()).device)
    module.eval()
    for batch, samples in task.training.validation:
        sums += _weigh(task.loss(module, batch), samples)
        world.watchdog.rearm()
    module.train()
    return sums
