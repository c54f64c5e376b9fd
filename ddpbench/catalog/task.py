"""A workload built in one rank: its model, its batches and its loss, and what makes them.

A rank's batches are made before the first step, from its share of one data set as
DistributedSampler deals it out in each epoch. Weights and data depend on the seed alone, and no
global random state is used or left changed. Importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import Tensor, nn

    Sample = Callable[[torch.Generator], tuple[Tensor, ...]]

EPOCHS, BATCHES = 2, 4  # made ahead of the steps, which cycle over them: epochs, batches in each


@dataclass(frozen=True)
class Place:
    """Where a task is built: one rank."""

    rank: int
    world_size: int
    batch: int  # samples of this rank in one batch
    device: torch.device
    seed: int
    group: dist.ProcessGroup | None  # of all ranks, for what a loss itself communicates


@dataclass(frozen=True)
class Training:
    """What a training needs that goes on epoch by epoch.

    batches     epoch, from 1 → this rank's batches and their numbers of samples: as many batches,
                of the same sizes, in every rank
    validation  this rank's share, likewise; each sample is in one rank's share, and ranks may
                have unequal numbers of batches, or none
    settings    all that decides the losses, but for the optimizer
    """

    batches: Callable[[int], Iterator[tuple[Any, int]]]
    validation: tuple[tuple[Any, int], ...]
    settings: Mapping[str, int]


@dataclass
class Task:
    """A workload built in one rank.

    model  on the device, with the same weights in every rank
    batch  step, from 0 → this rank's batch of it, on the device
    loss   (the model, bare or in DDP, batch) → the mean loss, a scalar; calls the model it is given
    """

    model: nn.Module
    batch: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    training: Training | None = None


@dataclass(frozen=True)
class Workload:
    """A model with its data, loss and optimizer.

    batch     samples of one rank, by kind of device
    settings  name → default by kind of device
    build     (all settings, decided; place) → the task. Raises ValueError with one sentence for
              settings that do not go together. No communication.
    trains    whether its tasks have a `training`
    """

    name: str
    help: str
    batch: Mapping[str, int]
    build: Callable[[Mapping[str, int], Place], Task]
    settings: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    optimizer: str = "sgd"
    learning_rate: float = 0.01
    trains: bool = False


def seeded_model(make: Callable[[], nn.Module], place: Place) -> nn.Module:
    """The model with the weights of this seed, made on the CPU: the same for every device."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(place.seed)
        return make().to(place.device)


def generator(seed: int, number: int) -> torch.Generator:
    """Random numbers of their own for each (seed, number)."""
    import torch

    # torch's generator takes 32 bits; without the factor neighbouring seeds would share samples.
    return torch.Generator().manual_seed((seed * 0x9E3779B1 + number) % 2**32)


def share_of_epoch(samples: int, place: Place, epoch: int) -> list[int]:
    """The numbers of this rank's samples in an epoch, shuffled."""
    from torch.utils.data import DistributedSampler

    whole: Any = range(samples)  # only its length is looked at
    sampler: DistributedSampler[int] = DistributedSampler(
        whole, place.world_size, place.rank, seed=place.seed
    )
    sampler.set_epoch(epoch)
    return list(sampler)


def generated_batches(place: Place, sample: Sample) -> Callable[[int], tuple[Tensor, ...]]:
    """Task.batch over generated samples, each made from its number alone: a rank makes its own."""
    import torch

    whole = BATCHES * place.batch * place.world_size
    made = []
    for epoch in range(EPOCHS):
        mine = share_of_epoch(whole, place, epoch)
        for start in range(0, len(mine), place.batch):
            rows = [sample(generator(place.seed, i)) for i in mine[start : start + place.batch]]
            made.append(tuple(torch.stack(c).to(place.device) for c in zip(*rows, strict=True)))
    return lambda step: made[step % len(made)]
