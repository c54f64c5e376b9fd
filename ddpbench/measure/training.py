"""A task trained epoch by epoch on real ranks, with validation, checkpoints and resumption."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpbench.launch.placement import Refused
from ddpbench.measure import clock
from ddpbench.records import store
from ddpbench.records.schema import Epoch
from ddpbench.runtime import control

if TYPE_CHECKING:
    from ddpbench.catalog.task import Task, Training
    from ddpbench.runtime.world import World

Check = Callable[[int], bool]
Verify = Callable[[nn.Module, torch.optim.Optimizer], Check]


@dataclass
class _State:
    """What trains, and what a checkpoint keeps of it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    settings: dict[str, Any]  # a checkpoint made with others is refused
    epoch: int = 0  # done
    step: int = 0  # of all epochs


def train(
    world: World, tested: dist.ProcessGroup, task: Task,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer], epochs: int,
    checkpoint: Path | None, resume: bool, verify: Verify | None, seen: Callable[[Epoch], None],
) -> tuple[Epoch, ...]:  # fmt: skip
    """Train to the end of epoch number `epochs`, all ranks together; the epochs trained here.

    checkpoint: rank 0 replaces this file after each epoch, in one step.
    resume: go on behind the epoch that the checkpoint was made after, to the same losses, bit for
        bit, as if nothing had come between. Rank 0 alone must see the file.
    verify: (DDP, optimizer) → check(step), which is called after each optimizer step, counted from
        1 over all epochs, and says whether the replicas are equal.
    seen: called with each epoch in every rank, once its checkpoint is there.

    An interrupted rank ends the training, in all ranks, after the epoch. Raises Refused, in all
    ranks, for a checkpoint that cannot be read, written or gone on from.
    """
    training = task.training
    if training is None:
        raise ValueError("this task has no training: only its steps can be measured")
    world.watchdog.begin_phase("the start of the training")
    folder = checkpoint.parent if checkpoint and world.rank == 0 else Path()
    absent = None if folder.is_dir() else f"--checkpoint {checkpoint}: there is no folder {folder}"
    if (sentence := control.agree_objection(world, absent)) is not None:
        raise Refused(sentence)
    ddp = DistributedDataParallel(task.model, process_group=tested)
    _build_buckets(ddp, task, training)
    optimizer = make_optimizer(ddp)
    state = _State(ddp.module, optimizer, _settings(training, optimizer))
    if resume:
        _resume(world, checkpoint, state, epochs)
    check = verify(ddp, optimizer) if verify else None
    trained: list[Epoch] = []
    while state.epoch < epochs:
        world.watchdog.begin_phase(f"epoch {state.epoch + 1} of the training")
        trained.append(_epoch(world, tested, task, training, ddp, state, check))
        if checkpoint is not None:
            _save(world, checkpoint, state)
        seen(trained[-1])
        if control.agree_objection(world, world.interrupted) is not None:
            break
    return tuple(trained)


def _build_buckets(ddp: DistributedDataParallel, task: Task, training: Training) -> None:
    """One backward for nothing, after which DDP sorts its buckets anew.

    With more than two ranks the place in a bucket decides in which order a gradient is summed:
    without this, the first step of a process would sum as no later one does, and a resumed training
    would part from an uninterrupted one. Weights, buffers and random state stay as they are.
    """
    batch, _ = next(iter(training.batches(1)))
    before = [buffer.clone() for buffer in ddp.module.buffers()]
    device = next(ddp.module.parameters()).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        loss: Any = task.loss(ddp, batch)
        loss.backward()
    for buffer, kept in zip(ddp.module.buffers(), before, strict=True):
        buffer.copy_(kept)
    ddp.zero_grad(set_to_none=True)


def _epoch(
    world: World, tested: dist.ProcessGroup, task: Task, training: Training,
    ddp: DistributedDataParallel, state: _State, check: Check | None,
) -> Epoch:  # fmt: skip
    """Train and validate once through the data; the same record in all ranks."""
    began, equal = clock.now_ns(), True
    device = next(ddp.module.parameters()).device
    sums = torch.zeros(4, dtype=torch.float64, device=device)  # loss and samples; of validation
    state.epoch += 1
    for batch, samples in training.batches(state.epoch):
        state.optimizer.zero_grad()
        loss: Any = task.loss(ddp, batch)
        loss.backward()
        state.optimizer.step()
        state.step += 1
        _add(sums[:2], loss, samples)
        if check is not None:
            equal = check(state.step) and equal
        world.watchdog.rearm()
    _validate(world, task, training, ddp.module, sums[2:])
    dist.all_reduce(sums, group=tested)
    train_loss, trained, validation_loss, validated = sums.tolist()
    seconds = (clock.now_ns() - began) * 1e-9
    return Epoch(
        number=state.epoch,
        train_loss=train_loss / trained,
        validation_loss=validation_loss / validated,
        seconds=max(control.gather_values(world, seconds)),
        replicas_equal=None if check is None else equal,
    )


@torch.no_grad()
def _validate(
    world: World, task: Task, training: Training, module: nn.Module, sums: Tensor
) -> None:
    """Add this rank's share of the validation to float64[2]: losses and samples.

    Through the bare module: DDP's forward may communicate (it broadcasts buffers), and here ranks
    may have unequal numbers of batches.
    """
    module.eval()
    for batch, samples in training.validation:
        _add(sums, task.loss(module, batch), samples)
        world.watchdog.rearm()
    module.train()


def _add(sums: Tensor, loss: Tensor, samples: int) -> None:
    """A batch's mean loss and its samples, without waiting for a GPU."""
    sums[0] += loss.detach().double() * samples
    sums[1] += samples


# --- checkpoints ----------------------------------------------------------------------------------


def _settings(training: Training, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All that decides the losses, by name."""
    rate = optimizer.param_groups[0]["lr"]
    return {**training.settings, "optimizer": type(optimizer).__name__, "learning rate": rate}


def _save(world: World, path: Path, state: _State) -> None:
    """Rank 0 writes the checkpoint. Raises Refused, in all ranks, when it cannot."""
    world.watchdog.begin_phase("the saving of the checkpoint")
    objection = None
    if world.rank == 0:
        content = io.BytesIO()
        torch.save(_stored(state), content)
        try:
            store.replace_file(path, content.getvalue())
        except OSError as error:
            objection = (
                f"the checkpoint {path} cannot be written after epoch {state.epoch} "
                f"({error.strerror}): name a file that can"
            )
    if (sentence := control.agree_objection(world, objection)) is not None:
        raise Refused(sentence)


def _stored(state: _State) -> dict[str, Any]:
    """What a checkpoint holds: nothing but tensors, numbers and text."""
    return {
        "settings": state.settings,
        "epoch": state.epoch,
        "step": state.step,
        "model": state.model.state_dict(),
        "optimizer": state.optimizer.state_dict(),
    }


def _resume(world: World, path: Path | None, state: _State, epochs: int) -> None:
    """Put the checkpoint's content into the state; Refused, in all ranks, when that cannot be.

    Rank 0 reads the bytes and sends them to all: ranks on other hosts may not see its file, or see
    another of that name.
    """
    if path is None:
        raise ValueError("nothing to resume from: name the checkpoint")
    world.watchdog.begin_phase("the reading of the checkpoint")
    content, objection = b"", None
    if world.rank == 0:
        try:
            content = path.read_bytes()
        except OSError as error:
            objection = f"the checkpoint {path} cannot be read ({error.strerror}): start without it"
    if (objection := control.broadcast_value(world, objection)) is None:
        content = control.broadcast_bytes(world, content)
        objection = control.agree_objection(world, _taken(content, path, state, epochs))
    if objection is not None:
        raise Refused(objection)


def _taken(content: bytes, path: Path, state: _State, epochs: int) -> str | None:
    """None when the state now is as this checkpoint has it; else one sentence: why not."""
    try:
        # On the CPU, from where both load_state_dict copy to where each tensor belongs: Adam's
        # count of steps would otherwise stay on a GPU, and each step wait for it.
        read = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever damaged bytes lead the reader to
        return f"the checkpoint {path} is damaged ({control.first_line(error)}): start without it"
    if not isinstance(read, dict) or read.keys() != _stored(state).keys():
        return f"{path} is no checkpoint of ddpbench's: start without it"
    theirs = read["settings"]
    for name in dict.fromkeys([*state.settings, *theirs]):
        here, there = state.settings.get(name), theirs.get(name)
        if here != there:
            return (
                f"the checkpoint {path} is of another training: {name} is {there} there and "
                f"{here} here; go on with the same, or start without it"
            )
    if read["epoch"] >= epochs:
        return (
            f"the checkpoint {path} was made after epoch {read['epoch']}, and {epochs} are asked "
            "for: ask for more"
        )
    try:
        state.model.load_state_dict(read["model"])
        state.optimizer.load_state_dict(read["optimizer"])
    except (RuntimeError, ValueError, KeyError) as error:
        return f"the checkpoint {path} is of another model: {control.first_line(error)}"
    state.epoch, state.step = read["epoch"], read["step"]
    return None
