"""The workloads: weights, data and losses, alone and in a DDP step of real ranks.

One job plays every workload in all its ranks and leaves what it saw in files. A rank runs this very
file: `python test_workloads.py FOLDER RANK SIZE`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mesh_training
import pytest
import torch
import torch.distributed as dist
from frozen import Frozen
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from warm_python import warm_python

from ddpbench.catalog.task import BATCHES, EPOCHS, RankSetup, Task
from ddpbench.catalog.workloads import WORKLOADS, get
from ddpbench.launch.placement import Refused

CPU = torch.device("cpu")
# Shapes of each workload that take a moment.
SMALL: dict[str, dict[str, int]] = {
    "linear": {},
    "mlp": {"width": 16, "depth": 3},
    "convnet": {"width": 4, "depth": 2},
    "transformer": {"layers": 2, "width": 128, "sequence": 8, "vocabulary": 50},
    "embedding": {"rows": 500, "width": 8},
    "contrastive": {"width": 16},
}


def built(name: str, setup: RankSetup, **settings: Any) -> Task:
    """A small task."""
    return WORKLOADS[name].build({**SMALL[name], **settings}, setup)


def alone(rank: int = 0, world_size: int = 1, seed: int = 3) -> RankSetup:
    """A setup without a process group."""
    return RankSetup(rank, world_size, 4, CPU, seed, None)


def flat(task: Task) -> Tensor:
    """All weights and buffers as one."""
    return torch.cat([t.detach().double().view(-1) for t in task.model.state_dict().values()])


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_seed_alone_decides(name: str) -> None:
    """Weights and data are the same whenever they are made with one seed, and others with another;
    the global random state is neither used nor left changed."""
    torch.manual_seed(1)
    before = torch.get_rng_state()
    task = built(name, alone())
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again, other = built(name, alone()), built(name, alone(seed=4))
    assert torch.equal(flat(task), flat(again))
    assert not torch.equal(flat(task), flat(other))
    for step in (0, 5):
        assert all(map(torch.equal, task.batch(step), again.batch(step)))
        assert not all(map(torch.equal, task.batch(step), other.batch(step)))


@pytest.mark.parametrize("name", WORKLOADS)
def test_ranks_share_one_data_set(name: str) -> None:
    """In each epoch each sample is dealt to one rank, every batch is full, and the next epoch deals
    in another order; behind the last epoch the batches come again."""
    tasks = [built(name, alone(rank, 3)) for rank in range(3)]
    steps = BATCHES
    epochs: list[list[str]] = []
    for epoch in range(EPOCHS):
        epochs.append([])
        for step in range(epoch * steps, (epoch + 1) * steps):
            for task in tasks:
                first, *_ = task.batch(step)
                assert len(first) == 4
                epochs[-1] += [str(sample.tolist()) for sample in first]
    assert set(epochs[0]) == set(epochs[1])
    assert epochs[0] != epochs[1]
    assert len(set(epochs[0])) == len(epochs[0]) == 3 * 4 * steps
    assert tasks[0].batch(EPOCHS * steps) is tasks[0].batch(0)


# --- names


OWN = """
import torch
def build(rank, world_size, device):
    return torch.nn.Linear(3, rank + 1), lambda step: step, lambda model, batch: batch
def pair(rank, world_size, device):
    return torch.nn.Linear(3, 3), lambda step: step
def swapped(rank, world_size, device):
    return lambda step: step, torch.nn.Linear(3, 3), None
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of the user's in the current folder, another that does not run."""
    monkeypatch.setattr(sys, "path", [*sys.path, ""])
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "workload_of_mine", raising=False)
    (tmp_path / "workload_of_mine.py").write_text(OWN)
    (tmp_path / "workload_broken.py").write_text("1 / 0\n")


@pytest.mark.usefixtures("own")
def test_the_users_function_is_called_in_its_rank() -> None:
    """As function(rank, world_size, device); what it returns is the task."""
    workload = get("workload_of_mine:build")
    assert workload.name == "workload_of_mine:build"
    assert (dict(workload.settings), workload.batch["cpu"]) == ({}, 0)
    task = workload.build({}, alone(rank=1, world_size=2))
    assert task.model.weight.shape == (2, 3)
    assert (task.batch(7), task.loss(task.model, "x")) == (7, "x")


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    "name",
    [
        "transfromer",
        "nowhere.at:all",
        "workload_broken:build",
        "workload_of_mine:nothing",
        "workload_of_mine:pair",
        "workload_of_mine:swapped",
    ],
)
def test_a_wrong_name_or_function_is_one_sentence(name: str, frozen: Frozen) -> None:
    """What was given and what is wanted, whatever is wrong with it."""
    with pytest.raises((ValueError, Refused), match=name) as raised:
        get(name).build({}, alone())
    frozen.text(str(raised.value))
    assert "\n" not in str(raised.value)


# --- in real ranks: each play runs in every rank of a group, and returns what its test looks at


def in_ddp(name: str, setup: RankSetup) -> dict[str, Any]:
    """Two DDP steps of a small task, bit by bit the same in all ranks but for the data."""
    task = built(name, setup)
    seen: dict[str, Any] = {"weights": flat(task).sum().item()}
    seen["batches"] = [str(task.batch(step)) for step in range(2)]
    replica = DistributedDataParallel(task.model, process_group=setup.group)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
    losses = []
    for step in range(2):
        optimizer.zero_grad()
        loss = task.loss(replica, task.batch(step))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    gradients = [p.grad for p in task.model.parameters()]
    finite = all(g is not None and g.isfinite().all() for g in gradients)
    return {**seen, "losses": losses, "finite": finite, "after": parameters(task)}


def parameters(task: Task) -> str:
    """The bits of all parameters."""
    values = torch.cat([p.detach().view(-1) for p in task.model.parameters()])
    return bytes(values.view(torch.uint8).tolist()).hex()


def list_plays(rank: int, size: int) -> dict[str, Callable[[], Any]]:
    setup = RankSetup(rank, size, 4, CPU, 3, dist.group.WORLD)
    return {name: partial(in_ddp, name, setup) for name in WORKLOADS}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("gloo")
    results = mesh_training.run_ranks([*warm_python(), __file__], 4, folder)
    for name, result in results[0].items():
        assert "error" not in result, f"{name}: {result}"
    return results


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_ddp_step(outcomes: list[Any], name: str) -> None:
    """Each rank builds the same weights and batches of its own; after two DDP steps losses and
    gradients are finite, and the parameters have the same bits in all ranks."""
    seen = [one[name] for one in outcomes]
    assert len({one["weights"] for one in seen}) == 1
    batches = [batch for one in seen for batch in one["batches"]]
    assert len(set(batches)) == 2 * len(seen)
    assert all(math.isfinite(loss) for one in seen for loss in one["losses"])
    assert all(one["finite"] for one in seen)
    assert len({one["after"] for one in seen}) == 1


if __name__ == "__main__":
    mesh_training.play_in_rank(list_plays)
