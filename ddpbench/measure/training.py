"""Train a task epoch by epoch, with validation, checkpoints and resumption."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpbench.launch.placement import Refused
from ddpbench.measure import clock
from ddpbench.records import store
from ddpbench.records.load import Load, join_loads
from ddpbench.records.schema import Epoch
from ddpbench.runtime import control, devices
from ddpbench.runtime.load import LoadMeter

if TYPE_CHECKING:
    from ddpbench.catalog.task import Task, Training
    from ddpbench.runtime.world import World

MOST_LOSSES = 200  # of the training, stored in one run beside those of whole epochs

# Called with the number of the step, counted from 1. Returns whether the replicas are equal.
Check = Callable[[int], bool]
Verify = Callable[[nn.Module, torch.optim.Optimizer], Check]


@dataclass
class _State:
    """The content of a checkpoint, and what trains."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    settings: dict[str, Any]  # a checkpoint with other settings is refused
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
    checkpoint: Path | None = None,
    resume: bool = False,
    verify: Verify | None = None,
    report: Callable[[Epoch], None] = lambda epoch: None,
) -> tuple[Epoch, ...]:
    """Train to the end of epoch number `epochs`, all ranks together. Return the trained epochs.

    checkpoint: rank 0 replaces this file atomically after each epoch.
    resume: continue after its epoch, to bit-identical losses. Only rank 0 must see the file.
    verify: called once; the check that it returns follows each optimizer step.
    report: called in every rank after each epoch, once its checkpoint is stored.

    If a rank is interrupted, all ranks stop after the epoch. Raises Refused, in all ranks, for a
    checkpoint that cannot be read, written or continued.
    """
    if task.training is None:
        raise ValueError("this task cannot be trained: only its steps can be measured")
    _require_folder(world, checkpoint)
    device = next(task.model.parameters()).device
    device_ids = devices.of(device).ddp_device_ids(device)
    ddp = DistributedDataParallel(task.model, device_ids, process_group=tested)
    _build_buckets(ddp, task, task.training)
    optimizer = make_optimizer(ddp)
    state = _State(ddp.module, optimizer, _settings(task.training, optimizer))
    if resume:
        _resume(world, checkpoint, state, epochs)
    check = verify(ddp, optimizer) if verify else None
    trained: list[Epoch] = []
    while state.epoch < epochs:
        parts = max(1, MOST_LOSSES // epochs)
        trained.append(_train_epoch(world, task, ddp, state, parts=parts, check=check))
        _save(world, checkpoint, state)
        report(trained[-1])
        if control.agree_objection(world, world.interrupted) is not None:
            break
    return tuple(trained)


def _require_folder(world: World, checkpoint: Path | None) -> None:
    world.watchdog.begin_phase("the start of the training")
    folder = checkpoint.parent if checkpoint and world.rank == 0 else Path()
    absent = None if folder.is_dir() else f"--checkpoint {checkpoint}: create folder {folder} first"
    if (sentence := control.agree_objection(world, absent)) is not None:
        raise Refused(sentence)


def _build_buckets(ddp: DistributedDataParallel, task: Task, training: Training) -> None:
    """Run one backward without a step, so that DDP rebuilds its buckets.

    With more than two ranks, a gradient's position in its bucket determines the order of its sum.
    Without this, the first step of each process would sum in another order, and a resumed training
    would deviate from an uninterrupted one. Weights, buffers and random state do not change.
    """
    batch, _ = next(iter(training.batches(1)))
    before = [buffer.clone() for buffer in ddp.module.buffers()]
    device = next(ddp.module.parameters()).device
    with torch.random.fork_rng(devices.of(device).seeded_devices(device), device_type=device.type):
        loss: Any = task.loss(ddp, batch)
        loss.backward()
    for buffer, saved in zip(ddp.module.buffers(), before, strict=True):
        buffer.copy_(saved)
    ddp.zero_grad(set_to_none=True)


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
    # Do not add these to the all_reduce of the whole epoch: their number depends on the number of
    # epochs, and would change the order of its sums. A resumed training must not differ.
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


# --- checkpoints ----------------------------------------------------------------------------------


def _settings(training: Training, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    rate = optimizer.param_groups[0]["lr"]
    return {**training.settings, "optimizer": type(optimizer).__name__, "learning rate": rate}


def _save(world: World, path: Path | None, state: _State) -> None:
    """Write the checkpoint, if requested, in rank 0. Raises Refused in all ranks on failure."""
    if path is None:
        return
    world.watchdog.begin_phase("the saving of the checkpoint")
    objection = None
    if world.rank == 0:
        content = io.BytesIO()
        torch.save(_stored(state), content)
        try:
            store.replace_file(path, content.getvalue())
        except OSError as error:
            objection = (
                f"cannot write the checkpoint {path} after epoch {state.epoch} "
                f"({error.strerror}): choose a writable file"
            )
    if (sentence := control.agree_objection(world, objection)) is not None:
        raise Refused(sentence)


def _stored(state: _State) -> dict[str, Any]:
    """Return the content of a checkpoint: only tensors, numbers and text."""
    return {
        "settings": state.settings,
        "epoch": state.epoch,
        "step": state.step,
        "model": state.model.state_dict(),
        "optimizer": state.optimizer.state_dict(),
    }


def _resume(world: World, path: Path | None, state: _State, epochs: int) -> None:
    """Load the checkpoint into the state. Raises Refused, in all ranks, if that fails.

    Rank 0 reads the bytes and sends them to all ranks: other hosts may have no such file, or
    another file with that name.
    """
    if path is None:
        raise ValueError("resume needs a checkpoint")
    world.watchdog.begin_phase("the reading of the checkpoint")
    content, objection = b"", None
    if world.rank == 0:
        try:
            content = path.read_bytes()
        except OSError as error:
            objection = f"cannot read the checkpoint {path} ({error.strerror}): leave out --resume"
    if (objection := control.broadcast_value(world, objection)) is None:
        content = control.broadcast_bytes(world, content)
        objection = control.agree_objection(world, _load(content, path, state, epochs))
    if objection is not None:
        raise Refused(objection)


def _load(content: bytes, path: Path, state: _State, epochs: int) -> str | None:
    """Load the checkpoint into the state. Return one sentence if it does not fit, else None."""
    try:
        # Read to the CPU; load_state_dict then copies each tensor to its device. Adam's count of
        # steps would otherwise be on the GPU, and every step would wait for it.
        stored = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes may raise anything
        return f"the checkpoint {path} is damaged ({control.first_line(error)}): leave out --resume"
    if not isinstance(stored, dict) or stored.keys() != _stored(state).keys():
        return f"{path} is not a checkpoint of ddpbench: leave out --resume"
    settings = stored["settings"]
    for name in dict.fromkeys([*state.settings, *settings]):
        here, there = state.settings.get(name), settings.get(name)
        if here != there:
            return (
                f"the checkpoint {path} is from another training: its {name} is {there}, but this "
                f"training has {here}; use the same options, or leave out --resume"
            )
    if stored["epoch"] >= epochs:
        return (
            f"the checkpoint {path} was stored after epoch {stored['epoch']}, but --epochs is "
            f"{epochs}: choose more epochs"
        )
    try:
        state.model.load_state_dict(stored["model"])
        state.optimizer.load_state_dict(stored["optimizer"])
    except (RuntimeError, ValueError, KeyError) as error:
        return f"the checkpoint {path} is from another model: {control.first_line(error)}"
    state.epoch, state.step = stored["epoch"], stored["step"]
    return None
