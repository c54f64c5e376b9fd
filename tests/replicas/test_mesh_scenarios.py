"""Faults of training on meshes, among them those of public threads, and what is reported of them.

    allenai/OLMo-core #319: HSDP replicas initialised with different seeds
    NVIDIA-NeMo/Automodel #3135: HSDP gradients that nobody reduces over dp_replicate
    pytorch/pytorch #160169: parameters without a tensor-parallel plan diverge across tp
    pytorch/pytorch #79620: whether the parameters of FSDP are the same in all ranks

One job of 4 ranks plays all of them, another of 8 ranks a mesh of three dimensions; as in
test_replicas.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import mesh_training
import pytest
import torch
import torch.distributed as dist
from frozen import Frozen
from mesh_training import Training, facts_of, local, without_figures
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from warm_python import warm_python

import ddpbench

pytestmark = pytest.mark.thorough

FAULTY, LAST = 3, 5  # the first bad step, and the last that is taken
Edit = Callable[[Training], None]


def watch(
    training: Training, *, first: int = 0, every: int = 1, last: int = LAST, **faults: Edit
) -> Any:
    """Train until a report has failed. From step FAULTY on, plant faults in each step.

    The faults come `before` backward, `between` backward and the optimizer's step, or `after` it.
    Steps are verified from `first` on; step 0 is the state before training.
    """
    verifier = ddpbench.Verifier(training.model, training.optimizer)
    report = None

    def plant(when: str) -> None:
        if number >= FAULTY and when in faults:
            faults[when](training)

    for number in range(last + 1):
        plant("before")
        if number:
            training.backward(number)
            plant("between")
            training.optimizer.step()
            plant("after")
        if number >= first and (number - first) % every == 0:
            report = verifier.check(number)
            if report.failed:
                break
    assert report is not None
    return report


# --- the threads


def seeds_of_hsdp(first: int = 0) -> Any:
    """Each replica of HSDP is initialised from its own seed: fully_shard broadcasts nothing."""
    training = Training("hsdp", (2, 2), seed=lambda mesh: mesh.get_local_rank("dp_replicate"))
    return watch(training, first=first)


def submesh_of_hsdp() -> Any:
    """fully_shard gets the mesh of the shards alone: no gradient crosses dp_replicate."""
    return watch(Training("hsdp", (2, 2), shard_over=("dp_shard",)))


def forgotten_all_reduce() -> Any:
    """A loop averages over dp_replicate itself, and from a step on it forgets to."""
    training = Training("hsdp", (2, 2), shard_over=("dp_shard",))
    group, forgets = training.mesh.get_group("dp_replicate"), False

    def forget(training: Training) -> None:
        nonlocal forgets
        forgets = True

    def average(optimizer: Any, *_: Any) -> None:
        for parameter in training.model.parameters() if not forgets else ():
            dist.all_reduce(local(parameter.grad), group=group)
            local(parameter.grad).div_(2)

    training.optimizer.register_step_pre_hook(average)
    return watch(training, before=forget)


def rounding_over_tp(every: int = 1) -> Any:
    """The gradient behind the encoder is rounded differently along tp, as a kernel may do."""
    training = Training("fsdp+tp", (2, 2))
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

    return watch(Training("tp", (4,)), after=update)


def bit_of_a_shard(way: str, sizes: tuple[int, ...], rank: int) -> Any:
    """One bit of a shard flips in one rank."""

    def flip(training: Training) -> None:
        if dist.get_rank() == rank:
            local(training.model.layers[1].attention.wq.weight).view(torch.int32)[1, 5] ^= 1 << 20

    return watch(Training(way, sizes), after=flip)


def plain_bias_over_tp() -> Any:
    """A bias that is no DTensor is edited in one tensor-parallel rank."""

    def edit(training: Training) -> None:
        if training.at["tp"] == 1:
            training.model.encoder.bias.data[7] += 0.5

    return watch(Training("tp", (4,)), after=edit)


def bias_of_its_own() -> Any:
    """Each rank fills a DTensor that is declared as replicated with its own values."""

    def fill(model: Any, mesh: DeviceMesh) -> None:
        local(model.layers[0].down.bias).fill_(mesh.get_local_rank("tp"))

    return watch(Training("tp", (4,), edit=fill))


def clipped_by_replica() -> Any:
    """One replica of HSDP scales its gradients by a norm of its own."""

    def clip(training: Training) -> None:
        for parameter in training.model.parameters():
            if training.at["dp_replicate"] == 1:
                local(parameter.grad).mul_(0.7)

    return watch(Training("hsdp", (2, 2)), between=clip)


def batch_over_tp() -> Any:
    """Ranks along tp, which must share their batch, read different ones from a step on."""
    training = Training("tp", (4,))
    share = training.words

    def read(training: Training) -> None:
        training.words = lambda step: share(step + 1000 * training.at["tp"])  # type: ignore[method-assign]

    return watch(training, before=read)


def buffer_of_a_rank() -> Any:
    """A buffer is edited in one rank, and nothing sends buffers."""

    def edit(training: Training) -> None:
        if dist.get_rank() == 3:
            training.model.scale.add_(1)

    return watch(Training("hsdp", (2, 2)), after=edit, last=FAULTY)


def learning_rate_in_a_row() -> Any:
    """One replica of HSDP has another learning rate from a step on."""

    def schedule(training: Training) -> None:
        if training.at["dp_replicate"] == 1:
            training.optimizer.param_groups[0]["lr"] = 0.02

    return watch(Training("hsdp", (2, 2)), between=schedule)


def partial_parameter() -> Any:
    """A parameter is a sum that nobody has taken yet."""

    def register(model: Any, mesh: DeviceMesh) -> None:
        part = DTensor.from_local(torch.ones(4), mesh["tp"], [Partial()], run_check=False)
        model.register_parameter("offset", nn.Parameter(part))

    return watch(Training("tp", (4,), edit=register), last=1)


# --- answers


def healthy(way: str, sizes: tuple[int, ...]) -> Any:
    """Training without a fault. Under fully_shard alone each element is in one rank only."""
    return watch(Training(way, sizes), last=2)


Plays = Mapping[str, Callable[[], Any]]
PLAYS: dict[int, Plays] = {
    4: {
        "seeds_of_hsdp": seeds_of_hsdp,
        "seeds_of_hsdp, seen late": partial(seeds_of_hsdp, first=1),
        "submesh_of_hsdp": submesh_of_hsdp,
        "forgotten_all_reduce": forgotten_all_reduce,
        "rounding_over_tp": rounding_over_tp,
        "rounding_over_tp, seen late": partial(rounding_over_tp, every=4),
        "tensor_parallel_bias": tensor_parallel_bias,
        "bit_of_a_shard": partial(bit_of_a_shard, "hsdp", (2, 2), rank=3),
        "plain_bias_over_tp": plain_bias_over_tp,
        "bias_of_its_own": bias_of_its_own,
        "clipped_by_replica": clipped_by_replica,
        "batch_over_tp": batch_over_tp,
        "learning_rate_in_a_row": learning_rate_in_a_row,
        "buffer_of_a_rank": buffer_of_a_rank,
        "partial_parameter": partial_parameter,
        "fsdp_alone": partial(healthy, "fsdp", (4,)),
        "healthy_hsdp": partial(healthy, "hsdp", (2, 2)),
        "healthy_fsdp+tp": partial(healthy, "fsdp+tp", (2, 2)),
    },
    8: {"bit_of_a_shard": partial(bit_of_a_shard, "hsdp+tp", (2, 2, 2), rank=5)},
}


def describe(report: Any) -> list[Any]:
    """Return coordinates and element at which the tensor of the first finding differs first."""
    place = report["findings"][0]["place"]
    same = (d for d in report["differences"] if d["name"] == place["tensor"])
    for detail in next(d["details"] for d in same if d["kind"] == place["kind"])[:1]:
        coordinates = report["coordinates"][str(detail["ranks"][0])]
        return [", ".join(f"{n}={at}" for n, at in coordinates.items()), detail["index"]]
    return []


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], Any]:
    """The report of a play in so many ranks, which all of them have alike."""

    @cache
    def run(size: int) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp(f"mesh-{size}")
        return mesh_training.run_ranks([*warm_python(), __file__], size, folder)

    return lambda size, name: mesh_training.agree(run(size), name)


HEALTHY = ("partial_parameter", "fsdp_alone", "healthy_hsdp", "healthy_fsdp+tp")
FAULTS = [
    pytest.param(size, name, marks=[pytest.mark.nightly] if size > 4 else [])
    for size in PLAYS
    for name in PLAYS[size]
    if name not in HEALTHY
]
Reports = Callable[[int, str], Any]


@pytest.mark.parametrize(("size", "name"), FAULTS)
def test_a_fault_on_a_mesh(reports: Reports, size: int, name: str, frozen: Frozen) -> None:
    """It is found at the first look after it, with coordinates, tensor, shard, global index, cause
    and a next step; nothing talks of DDP, which is not there."""
    report = reports(size, name)
    first = report["findings"][0]
    # Rounding decides which shards are findings of their own, and how many tensors differ.
    rest = [found for found in report["findings"][1:] if found["code"] != "replicas-differ"]
    facts = facts_of({"findings": [first, *rest]}, "tensors")
    frozen.facts([report["failed"], report["equal_until"], describe(report), *facts])
    frozen.text(without_figures(f"{first['sentence']}\n    Next: {first['next_step']}"))
    assert "DDP" not in report["text"]


@pytest.mark.parametrize("name", HEALTHY)
def test_no_fault_on_a_mesh(reports: Reports, name: str, frozen: Frozen) -> None:
    """Healthy training is equal. A Partial is neither compared nor right; under fully_shard alone
    there is nothing to compare: neither a proof nor a failure."""
    report = reports(4, name)
    held = report["held_once"].get("parameter", 0)
    frozen.facts([report["ok"], report["failed"], report["step"], held, *facts_of(report)])
    frozen.text(without_figures(report["text"]))


if __name__ == "__main__":
    mesh_training.play_in_rank(lambda rank, size: PLAYS[size])
