"""A workload built in one rank: its model, its batches and its loss.

A rank's batches are made before the first step, from its share of one data set, as
DistributedSampler distributes it in each epoch. Weights and data depend on the seed alone. Global
random state is neither used nor changed. To add an optimizer, add an entry to OPTIMIZERS. Importing
this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import Tensor, nn

    from ddpbench.catalog.parallel import Plan

    Sample = Callable[[torch.Generator], tuple[Tensor, ...]]

EPOCHS, BATCHES = 2, 4  # epochs generated before the first step, batches in each; steps reuse them


@dataclass(frozen=True)
class RankSetup:
    """The rank in which a task is built."""

    rank: int
    world_size: int
    batch: int  # samples of this rank in one batch
    device: torch.device
    seed: int
    group: dist.ProcessGroup | None  # of all ranks, for a loss that communicates
    whole: bool = True  # build the whole model on the device; False: on the CPU, to be divided


@dataclass
class Task:
    """A workload built in one rank.

    model  on the device, with the same weights in every rank; on the CPU if it is to be divided
    batch  step, from 0 → this rank's batch for the step, on the device
    loss   (the model, bare or in DDP, batch) → the mean loss, a scalar; must call this model
    """

    model: nn.Module
    batch: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class Workload:
    """A model with its data, loss and optimizer.

    batch     samples of one rank, by kind of device
    build     (values of all settings, rank setup) → the task. Raises Refused with one sentence
              for settings that exclude each other. Does not communicate.
    settings  name → default by kind of device
    plan      how its model is divided among ranks; None: it can only be in DDP
    """

    name: str
    help: str
    batch: Mapping[str, int]
    build: Callable[[Mapping[str, int], RankSetup], Task]
    settings: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    optimizer: str = "sgd"
    learning_rate: float = 0.01
    plan: Plan | None = None


@dataclass(frozen=True)
class Optimizer:
    """An optimizer of torch.optim.

    kind    name of its class
    copies  memory of its state, in multiples of the parameters' memory
    """

    kind: str
    copies: int

    def make(self, parameters: Iterable[Any], learning_rate: float) -> torch.optim.Optimizer:
        """Make the optimizer with this learning rate and torch's other defaults."""
        import torch

        made: torch.optim.Optimizer = getattr(torch.optim, self.kind)(parameters, lr=learning_rate)
        return made


OPTIMIZERS = {
    "sgd": Optimizer("SGD", copies=0),
    "adam": Optimizer("Adam", copies=2),
    "adamw": Optimizer("AdamW", copies=2),
}


def build_model(make: Callable[[], nn.Module], setup: RankSetup) -> nn.Module:
    """Make the model with the seed's weights, on the CPU first: every device has the same."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(setup.seed)
        return make().to(setup.device if setup.whole else "cpu")


def make_generator(seed: int, number: int) -> torch.Generator:
    """Make a generator with a random sequence of its own for each (seed, number)."""
    import torch

    # torch's generator takes 32 bits; without the factor neighbouring seeds would share samples.
    return torch.Generator().manual_seed((seed * 0x9E3779B1 + number) % 2**32)


def shard_epoch(samples: int, setup: RankSetup, epoch: int) -> list[int]:
    """Return the shuffled indices of this rank's samples in an epoch."""
    from torch.utils.data import DistributedSampler

    dataset: Any = range(samples)  # the sampler uses only its length
    sampler: DistributedSampler[int] = DistributedSampler(
        dataset, setup.world_size, setup.rank, seed=setup.seed
    )
    sampler.set_epoch(epoch)
    return list(sampler)


def generate_batches(setup: RankSetup, sample: Sample) -> Callable[[int], tuple[Tensor, ...]]:
    """Return Task.batch over this rank's samples, each generated from its index alone."""
    import torch

    samples = BATCHES * setup.batch * setup.world_size
    batches = []
    for epoch in range(EPOCHS):
        indices = shard_epoch(samples, setup, epoch)
        for start in range(0, len(indices), setup.batch):
            rows = [
                sample(make_generator(setup.seed, i)) for i in indices[start : start + setup.batch]
            ]
            columns = zip(*rows, strict=True)
            batches.append(tuple(torch.stack(column).to(setup.device) for column in columns))
    return lambda step: batches[step % len(batches)]
