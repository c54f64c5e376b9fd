"""Train a task epoch by epoch, with validation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpbench.measure import clock
from ddpbench.records.schema import Epoch
from ddpbench.runtime import control, devices

if TYPE_CHECKING:
    from ddpbench.catalog.task import Task
    from ddpbench.runtime.world import World

# Called with the number of the step, counted from 1. Returns whether the replicas are equal.
Check = Callable[[int], bool]
Verify = Callable[[nn.Module, torch.optim.Optimizer], Check]


def train(
    world: World,
    tested: dist.ProcessGroup,
    task: Task,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    epochs: int,
    *,
    verify: Verify | None = None,
) -> tuple[Epoch, ...]:
    """Train to the end of epoch number `epochs`, all ranks together. Return the trained epochs.

    verify: called once; the check that it returns follows each optimizer step.

    If a rank is interrupted, all ranks stop after the epoch.
    """
    if task.training is None:
        raise ValueError("this task cannot be trained: only its steps can be measured")
    world.watchdog.begin_phase("the start of the training")
    device = next(task.model.parameters()).device
    device_ids = devices.of(device).ddp_device_ids(device)
    ddp = DistributedDataParallel(task.model, device_ids, process_group=tested)
    optimizer = make_optimizer(ddp)
    check = verify(ddp, optimizer) if verify else None
    trained: list[Epoch] = []
    steps = 0  # over all epochs
    for number in range(1, epochs + 1):
        world.watchdog.begin_phase(f"epoch {number} of the training")
        began = clock.now_ns()
        losses, equal = [], True
        for loss in _take_steps(ddp, optimizer, task, task.training.batches(number)):
            losses.append(loss)
            steps += 1
            equal = (check is None or check(steps)) and equal
            world.watchdog.rearm()
        sums = torch.stack([torch.stack(losses).sum(0), _validate(world, task, ddp.module)])
        dist.all_reduce(sums, group=ddp.process_group)
        train_loss, validation_loss = map(_mean_loss, sums.tolist())
        seconds = control.gather_values(world, (clock.now_ns() - began) * 1e-9)
        epoch = Epoch(
            number=number,
            train_loss=train_loss,
            validation_loss=validation_loss,
            seconds=max(seconds),
            replicas_equal=None if check is None else equal,
        )
        trained.append(epoch)
        if control.agree_objection(world, world.interrupted) is not None:
            break
    return tuple(trained)


def _take_steps(
    ddp: nn.Module,
    optimizer: torch.optim.Optimizer,
    task: Task,
    batches: Iterable[tuple[Any, int]],
) -> Iterator[Tensor]:
    """Take a step with each batch; yield what `_weigh` returns."""
    for batch, samples in batches:
        optimizer.zero_grad()
        loss: Any = task.loss(ddp, batch)
        loss.backward()
        optimizer.step()
        yield _weigh(loss, samples)


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
