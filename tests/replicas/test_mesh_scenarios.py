"""Faults of training on meshes, among them those of public threads, and what is reported of them.

    allenai/OLMo-core #319: HSDP replicas initialised with different seeds
    NVIDIA-NeMo/Automodel #3135: HSDP gradients that nobody reduces over dp_replicate
    pytorch/pytorch #160169: parameters without a tensor-parallel plan diverge across tp
    pytorch/pytorch #79620: whether the parameters of FSDP are the same in all ranks

One job of 4 ranks plays all of them, another of 8 ranks the threads; as in test_replicas.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import mesh_training
import pytest
import torch
import torch.distributed as dist
from mesh_training import Setting, Training
from replica_reports import report_as_json
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from warm_python import warm_python

import ddpbench

FAULTY, LAST = 3, 5  # the first bad step, and the last that is taken
Edit = Callable[[Training], None]


def nothing(training: Training) -> None:
    """Leave the training as it is."""


def watch(
    training: Training,
    *,
    before: Edit = nothing,
    between: Edit = nothing,
    after: Edit = nothing,
    first: int = 0,
    every: int = 1,
) -> Any:
    """Train until a report has failed. From step FAULTY on, plant faults in each step.

    The faults come before backward, between backward and the optimizer's step, or after it. Steps
    are verified from `first` on; step 0 is the state before training.
    """
    verifier = ddpbench.Verifier(training.model, training.optimizer)
    report = None
    for number in range(LAST + 1):
        faults = (before, between, after) if number >= FAULTY else (nothing,) * 3
        faults[0](training)
        if number:
            training.backward(number)
            faults[1](training)
            training.update()
            faults[2](training)
        if number >= first and (number - first) % every == 0:
            report = verifier.check(number)
            if report.failed:
                break
    assert report is not None
    return {**report_as_json(report), "summary": verifier.summary()}


def local(tensor: Any) -> Tensor:
    """Return the memory of this rank's part of a tensor."""
    part: Tensor = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
    return part


# --- the threads


def seeds_of_hsdp(sizes: tuple[int, ...], first: int = 0) -> Any:
    """Each replica of HSDP is initialised from its own seed: fully_shard broadcasts nothing."""
    training = Training(
        Setting("hsdp", sizes), seed=lambda mesh: mesh.get_local_rank("dp_replicate")
    )
    return watch(training, first=first)


def submesh_of_hsdp(sizes: tuple[int, ...]) -> Any:
    """fully_shard gets the mesh of the shards alone: no gradient crosses dp_replicate."""
    return watch(Training(Setting("hsdp", sizes), shard_over=("dp_shard",)))


def all_reduce_left_off(sizes: tuple[int, ...]) -> Any:
    """From a step on, nobody switches the all_reduce of HSDP on again after accumulation."""

    def switch_off(training: Training) -> None:
        training.model.set_requires_all_reduce(False)

    return watch(Training(Setting("hsdp", sizes)), before=switch_off)


def rounding_over_tp(sizes: tuple[int, ...], every: int = 1) -> Any:
    """The gradient behind the encoder is rounded differently along tp, as a kernel may do."""
    training = Training(Setting("fsdp+tp", sizes))
    error = 0.0

    def round_gradient(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * (1 + error))

    def begin(training: Training) -> None:
        nonlocal error
        error = 2**-22 * training.at["tp"]

    training.model.encoder.register_forward_hook(round_gradient)
    return watch(training, before=begin, first=int(every > 1), every=every)


# --- other faults


def tensor_parallel_bias() -> Any:
    """A bias that tensor parallelism replicates is updated in one rank only."""

    def update(training: Training) -> None:
        if training.at["tp"] == 2:
            local(training.model.layers[1].attention.wo.bias).sub_(0.01)

    return watch(Training(Setting("tp", (4,))), after=update)


def bit_of_a_shard(way: str, sizes: tuple[int, ...], rank: int) -> Any:
    """One bit of a shard flips in one rank."""

    def flip(training: Training) -> None:
        if dist.get_rank() == rank:
            local(training.model.layers[1].attention.wq.weight).view(torch.int32)[1, 5] ^= 1 << 20

    return watch(Training(Setting(way, sizes)), after=flip)


def plain_bias_over_tp() -> Any:
    """A bias that is no DTensor is edited in one tensor-parallel rank."""

    def edit(training: Training) -> None:
        if training.at["tp"] == 1:
            training.model.encoder.bias.data[7] += 0.5

    return watch(Training(Setting("tp", (4,))), after=edit)


def bias_of_its_own() -> Any:
    """Each rank fills a DTensor that is declared as replicated with its own values."""

    def fill(model: Any, mesh: DeviceMesh) -> None:
        local(model.layers[0].down.bias).fill_(mesh.get_local_rank("tp"))

    return watch(Training(Setting("tp", (4,)), edit=fill))


def learning_rate_in_a_row() -> Any:
    """One replica of HSDP has another learning rate from a step on."""

    def schedule(training: Training) -> None:
        if training.at["dp_replicate"] == 1:
            training.optimizer.param_groups[0]["lr"] = 0.02

    return watch(Training(Setting("hsdp", (2, 2))), between=schedule)


def partial_parameter() -> Any:
    """A parameter is a sum that nobody has taken yet."""

    def register(model: Any, mesh: DeviceMesh) -> None:
        part = DTensor.from_local(torch.ones(4), mesh["tp"], [Partial()], run_check=False)
        model.register_parameter("offset", nn.Parameter(part))

    return watch(Training(Setting("tp", (4,)), edit=register))


# --- answers


def fsdp_alone() -> Any:
    """Under fully_shard each element is in one rank only."""
    return watch(Training(Setting("fsdp", (4,))))


def healthy(way: str, sizes: tuple[int, ...]) -> Any:
    """Training to the end."""
    return watch(Training(Setting(way, sizes)))


Plays = Mapping[str, Callable[[], Any]]
PLAYS: dict[int, Plays] = {
    4: {
        "seeds_of_hsdp": partial(seeds_of_hsdp, (2, 2)),
        "seeds_of_hsdp, seen after a step": partial(seeds_of_hsdp, (2, 2), first=1),
        "submesh_of_hsdp": partial(submesh_of_hsdp, (2, 2)),
        "all_reduce_left_off": partial(all_reduce_left_off, (2, 2)),
        "rounding_over_tp": partial(rounding_over_tp, (2, 2)),
        "rounding_over_tp, seen late": partial(rounding_over_tp, (2, 2), every=4),
        "tensor_parallel_bias": tensor_parallel_bias,
        "bit_of_a_shard": partial(bit_of_a_shard, "hsdp", (2, 2), rank=3),
        "plain_bias_over_tp": plain_bias_over_tp,
        "bias_of_its_own": bias_of_its_own,
        "learning_rate_in_a_row": learning_rate_in_a_row,
        "partial_parameter": partial_parameter,
        "fsdp_alone": fsdp_alone,
        "healthy hsdp": partial(healthy, "hsdp", (2, 2)),
        "healthy fsdp+tp": partial(healthy, "fsdp+tp", (2, 2)),
    },
    8: {
        "seeds_of_hsdp": partial(seeds_of_hsdp, (4, 2)),
        "submesh_of_hsdp": partial(submesh_of_hsdp, (2, 4)),
        "all_reduce_left_off": partial(all_reduce_left_off, (2, 4)),
        "rounding_over_tp": partial(rounding_over_tp, (2, 4)),
        "bit_of_a_shard": partial(bit_of_a_shard, "hsdp+tp", (2, 2, 2), rank=5),
    },
}


def job(folder: Path, rank: int, size: int) -> None:
    """Play everything for this number of ranks."""
    mesh_training.start_group(folder, rank, size)
    mesh_training.play_all(folder, rank, PLAYS[size])
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], Any]:
    """The report of a play in so many ranks, which all of them have alike."""

    @cache
    def run(size: int) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp(f"mesh-{size}")
        return mesh_training.run_ranks([*warm_python(), __file__], size, folder)

    def find(size: int, name: str) -> Any:
        alike = [each.get(name, {"error": "did not run"}) for each in run(size)]
        for report in alike:
            assert "error" not in report, report["error"]
        assert all(report == alike[0] for report in alike)
        return alike[0]

    return find


if __name__ == "__main__":
    job(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
