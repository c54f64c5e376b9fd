"""Digests of whole states: a checkpoint saved on one mesh and loaded on others, in real ranks.

One job of four ranks plays everything and leaves what it saw in files. Run as a program, this file
is that job: `python test_state_digest.py FOLDER`.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import traceback
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import mpi_jobs
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from warm_python import warm_python

import ddpbench
from ddpbench import StateDigest, cli, digest_state
from ddpbench.replicas import global_digest
from ddpbench.replicas.global_digest import digest_shard

RANKS = 4
# torch 2.7 cuts nothing unevenly that tensor parallelism has cut before.
HIDDEN = 12 if torch.__version__.startswith("2.7.") else 13
WAYS = ("ddp", "zero", "fsdp", "fsdp offloaded", "tp", "fsdp+tp", "2 ranks")


class Net(nn.Module):
    """Layers that no number of ranks divides, a tied weight, and buffers of many types."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 6)
        self.up, self.down = nn.Linear(6, HIDDEN), nn.Linear(HIDDEN, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 10, bias=False)
        self.short = nn.Parameter(torch.ones(2))  # two of four ranks hold nothing of it
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mask", torch.arange(5) > 2)
        self.register_buffer("bf16", torch.linspace(-1, 1, 5, dtype=torch.bfloat16))
        self.register_buffer("fp8", torch.linspace(-1, 1, 5).to(torch.float8_e4m3fn))
        self.register_buffer("phase", torch.polar(torch.ones(3), torch.arange(3.0)))
        self.register_buffer("scratch", torch.rand(3), persistent=False)

    def tie(self) -> Net:
        """Let the head use the table's weight."""
        self.head.weight = self.table.weight
        return self


def optimize(model: nn.Module) -> torch.optim.Optimizer:
    """Adam with two groups; torch cannot join tensors of several meshes into one kernel."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "lr": 0.02}]
    return torch.optim.Adam(groups, lr=0.01, foreach=False)


def shard(way: str) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Build the model in a way of parallel training; the group holds all of it."""
    model, group = Net(), None
    if way in ("tp", "fsdp+tp"):
        shape, names = ((2, 2), ("dp", "tp")) if way == "fsdp+tp" else ((4,), ("tp",))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
    model.tie()
    if way == "2 ranks":
        group = dist.new_group([0, 1])
        if dist.get_rank() < 2:
            fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",)))
    elif way == "hsdp":
        names = ("dp_replicate", "dp_shard")
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=names))
    elif way == "fsdp+tp":
        fully_shard(model, mesh=mesh["dp"])
    elif way.startswith("fsdp"):
        offload = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if "off" in way else {}
        fully_shard(model.down, mesh=init_device_mesh("cpu", (4,)), **offload)
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)), **offload)
    optimizer = optimize(model)
    return model, optimizer, group


def divide(whole: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The same optimizer, of which each rank holds the state of some parameters."""
    groups = [{**group} for group in whole.param_groups]
    divided = ZeroRedundancyOptimizer(groups, torch.optim.Adam, lr=0.01, foreach=False)
    for group in divided.optim.param_groups:
        for parameter in group["params"]:
            divided.optim.state[parameter] = whole.state[parameter]
    return divided


def step_twice(optimizer: torch.optim.Optimizer) -> None:
    """Take two steps with gradients that follow from the weights, so that replicas stay equal."""
    for _ in range(2):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.detach().sin()
        optimizer.step()
        optimizer.zero_grad()


def load(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, group: Any = None
) -> None:
    """Load a checkpoint as torch's documentation does."""
    names = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process is alone
        dcp.load(names, checkpoint_id=folder, process_group=group)
    set_state_dict(
        model, optimizer, model_state_dict=names["model"], optim_state_dict=names["optim"]
    )


def of_full_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Digests of full_tensor() of each DTensor, without this package's arithmetic of shards."""
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, values in optimizer.state.items():
        state |= {f"optim.state.{names[parameter]}.{key}": v for key, v in values.items()}
    return {name: of_whole(value) for name, value in state.items() if isinstance(value, DTensor)}


def of_whole(value: Any) -> str:
    """The digest of one tensor in one piece."""
    value = value.full_tensor() if isinstance(value, DTensor) else value
    sums = digest_shard(value, value.shape, [0] * value.dim()).tolist()
    return "".join(f"{each % 2**64:016x}" for each in sums)


def play_errors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """What digest_state refuses, in the words of this rank."""
    said = {}

    def refused(name: str, **arguments: Any) -> None:
        try:
            digest_state(**{"module": model, **arguments})
        except ValueError as error:
            said[name] = str(error)

    half = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    refused("half", group=half)
    other = nn.Linear(3, 3 + dist.get_rank() % 2)
    refused("shape", module=other)
    refused("meta", module=nn.Linear(3, 3, device="meta" if dist.get_rank() == 2 else "cpu"))
    return said


def play_stages(rank: int) -> dict[str, Any]:
    """Ranks that hold other layers, and one process that holds all of them."""
    torch.manual_seed(5)
    whole = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    stage = nn.Sequential()
    stage.add_module(str(rank // 2), whole[rank // 2])
    return {"stages": asdict(digest_state(stage)), "whole": asdict(digest_state(whole))}


def play(folder: Path, rank: int) -> dict[str, Any]:
    """Save on HSDP, load everywhere, and change single things."""
    torch.manual_seed(11)
    model, optimizer, _ = shard("hsdp")
    step_twice(optimizer)
    saved = digest_state(model, optimizer)
    seen: dict[str, Any] = {"saved": asdict(saved), "full": of_full_tensors(model, optimizer)}
    names = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    dcp.save(names, checkpoint_id=folder / "checkpoint")
    for way in WAYS:
        torch.manual_seed(12)
        model, optimizer, group = shard("ddp" if way == "zero" else way)
        if way == "2 ranks" and rank > 1:
            continue
        load(folder / "checkpoint", model, optimizer, group)
        if way == "zero":
            optimizer = divide(optimizer)
        # gloo cannot broadcast float8.
        wrapped = DistributedDataParallel(model, init_sync=False) if way == "ddp" else model
        seen[way] = digest_state(wrapped, optimizer, group).differences(saved)
        seen[f"{way}, full"] = of_full_tensors(model, optimizer)
        if way == "fsdp+tp":
            seen["changed"] = play_changes(model, optimizer, rank)
        if way == "fsdp":
            seen["errors"] = play_errors(model, optimizer)
    return seen | play_stages(rank)


def play_changes(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int
) -> dict[str, list[str]]:
    """The sentences on a state in which one thing after another was changed and restored."""
    before = digest_state(model, optimizer)
    changed = {}
    weight: Any = model.get_parameter("up.weight")

    def differ(name: str) -> None:
        changed[name] = digest_state(model, optimizer).differences(before)

    with torch.no_grad():
        bits = weight.to_local().view(torch.int32)
        if rank == 3:
            bits.view(-1)[-1] ^= 1
        differ("bit")
        if rank == 3:
            bits.view(-1)[-1] ^= 1
        kept = bits.clone()
        bits.copy_(kept.flip(0))  # in all ranks
        differ("permuted")
        bits.copy_(kept)
        optimizer.param_groups[1]["lr"] = 0.5
        differ("lr")
        optimizer.param_groups[1]["lr"] = 0.02
        state = optimizer.state.pop(weight)
        differ("lost")
        optimizer.state[weight] = {**state, "exp_avg": state["exp_avg"].bfloat16()}
        differ("bf16")
        optimizer.state[weight] = state
        differ("restored")
    return changed


def over_gloo(folder: Path, rank: int) -> None:
    store = dist.FileStore(str(folder / "store"), RANKS)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=limit)
    torch.set_num_threads(1)
    try:
        seen = play(folder, rank)
    except Exception:
        seen = {"error": traceback.format_exc()}
    (folder / f"{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


def job(folder: Path) -> None:
    """All ranks, forked from one process."""
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=over_gloo, args=(folder, rank)) for rank in range(RANKS)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the job has played."""
    folder = tmp_path_factory.mktemp("job")
    words = [*warm_python(), __file__, str(folder)]
    started = subprocess.Popen(
        words, env=mpi_jobs.ENVIRONMENT, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        said = started.communicate(timeout=150)[1]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
    assert all((folder / f"{rank}.json").exists() for rank in range(RANKS)), said
    return folder


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> list[dict[str, Any]]:
    """What each rank saw."""
    seen = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]
    assert not any("error" in one for one in seen), seen
    return seen


def test_all_ranks_have_the_same_digests(outcomes: list[dict[str, Any]]) -> None:
    """The digest of an HSDP state is the same in all ranks, and has all parts of the state."""
    first, *others = [one["saved"] for one in outcomes]
    assert all(other == first for other in others)
    names = set(first["tensors"])
    assert {"model.head.weight", "model.table.weight", "model.fp8", "model.count"} <= names
    assert {"optim.state.up.weight.exp_avg", "optim.state.short.step"} <= names
    assert "model.scratch" not in names  # a checkpoint does not have it either
    assert first["tensors"]["model.head.weight"] == first["tensors"]["model.table.weight"]
    assert first["values"]["optim.param_groups.1.lr"] == "0.02"
    assert first["values"]["optim.group_of.short"] == "1"


@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_of_another_mesh_is_proved_equal(
    outcomes: list[dict[str, Any]], way: str
) -> None:
    """A checkpoint saved on HSDP 2 x 2 and loaded in this way has the digests of the saved state:
    every parameter, buffer, state and option."""
    for one in outcomes[: 2 if way == "2 ranks" else RANKS]:
        assert one[way] == []


@pytest.mark.parametrize("way", ["hsdp", "fsdp", "tp", "fsdp+tp", "2 ranks"])
def test_digests_of_shards_are_those_of_full_tensors(
    outcomes: list[dict[str, Any]], way: str
) -> None:
    """Uneven, empty and strided shards add up to the digest of full_tensor()."""
    full = outcomes[0]["full" if way == "hsdp" else f"{way}, full"]
    saved = outcomes[0]["saved"]["tensors"]
    assert len(full) >= 9
    assert {name: saved[name]["digest"] for name in full} == full


def test_a_checkpoint_loaded_in_one_process_is_proved_equal(
    folder: Path, outcomes: list[dict[str, Any]]
) -> None:
    """Without a process group, the loaded state has the digests that four ranks saved."""
    torch.manual_seed(13)
    model = Net().tie()
    optimizer = optimize(model)
    assert digest_state(model, optimizer).differences(read(outcomes[0]["saved"]))
    load(folder / "checkpoint", model, optimizer)
    assert digest_state(model, optimizer) == read(outcomes[0]["saved"])


def read(raw: dict[str, Any]) -> StateDigest:
    """A digest as a rank has written it."""
    from ddpbench.records import codec

    return codec.decode(StateDigest, raw)


def test_each_change_is_named(outcomes: list[dict[str, Any]]) -> None:
    """A flipped bit in one shard, a permuted tensor, an option, a lost state and a bf16 copy: one
    sentence each, on the tensor or value and on nothing else, in every rank."""
    for one in outcomes:
        assert one["changed"] == {
            "bit": ["model.up.weight has other bits here than in the other state"],
            "permuted": ["model.up.weight has other bits here than in the other state"],
            "lr": ["optim.param_groups.1.lr is 0.5 here and 0.02 in the other state"],
            "lost": [
                f"optim.state.up.weight.{key} is missing here"
                for key in ("step", "exp_avg", "exp_avg_sq")
            ],
            "bf16": [
                "optim.state.up.weight.exp_avg has dtype bfloat16 here and float32 in the other "
                "state"
            ],
            "restored": [],
        }


def test_what_cannot_be_digested_is_one_sentence_in_all_ranks(
    outcomes: list[dict[str, Any]],
) -> None:
    """A group without all shards, ranks that built other shapes, and a tensor without memory in one
    rank alone."""
    for one in outcomes:
        said = one["errors"]
        assert said["half"].startswith("the ranks hold ")
        assert said["half"].endswith(": call digest_state in all ranks of its mesh")
        assert said["shape"] == (
            "model.weight is float32 (3, 3) in rank 0 and float32 (4, 3) in rank 1: build the same "
            "module in all ranks"
        )
        assert said["meta"] == "model.weight cannot be digested: it has no memory"
        assert not any("\n" in sentence for sentence in said.values())


def test_pipeline_stages_add_up(outcomes: list[dict[str, Any]]) -> None:
    """Ranks that hold other layers have together the digest of the whole model."""
    for one in outcomes:
        assert one["stages"] == one["whole"] == outcomes[0]["whole"]


# --- the arithmetic, in one process ---------------------------------------------------------------

DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64,
    torch.complex128,
]  # fmt: skip


def make(dtype: torch.dtype, *shape: int) -> Tensor:
    """A tensor of random bits; of zeros and ones for bool."""
    generator = torch.Generator().manual_seed(1)
    if dtype == torch.bool:
        return torch.randint(2, shape, generator=generator).bool()
    raw = torch.randint(256, (prod(shape) * dtype.itemsize,), generator=generator)
    return raw.to(torch.uint8).view(dtype).reshape(shape)


def cut(whole: Tensor, generator: np.random.Generator) -> Iterator[tuple[Tensor, list[int]]]:
    """Cut a tensor into boxes at random places, empty ones too; yield each with its offsets."""
    boxes: list[tuple[Tensor, list[int]]] = [(whole, [0] * whole.dim())]
    for dim in range(whole.dim()):
        for box, offsets in list(boxes):
            place = int(generator.integers(0, box.shape[dim] + 1))
            boxes.pop(0)
            rest = [*offsets[:dim], offsets[dim] + place, *offsets[dim + 1 :]]
            boxes.append((box.narrow(dim, 0, place), offsets))
            boxes.append((box.narrow(dim, place, box.shape[dim] - place), rest))
    yield from boxes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", [5, 1 << 17])
def test_parts_add_up_to_the_whole(
    dtype: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However a tensor is cut, and whatever the size of the blocks, in memory of its own or not."""
    monkeypatch.setattr(global_digest, "BLOCK_CPU", 1 << 17)
    generator = np.random.default_rng(2)
    for shape in ((), (7,), (5, 6), (3, 1, 4), (2, 3, 2, 3), (0, 3)):
        whole = make(dtype, *shape)
        wanted = digest_shard(whole, shape, [0] * len(shape))
        monkeypatch.setattr(global_digest, "BLOCK_CPU", block)
        parts = [digest_shard(part, shape, offsets) for part, offsets in cut(whole, generator)]
        copies = [
            digest_shard(part.clone(), shape, offsets) for part, offsets in cut(whole, generator)
        ]
        assert torch.equal(torch.stack(parts).sum(0), wanted)
        assert torch.equal(torch.stack(copies).sum(0), wanted)
        transposed = whole.mT.contiguous().mT if whole.dim() > 1 else whole
        assert torch.equal(digest_shard(transposed, shape, [0] * len(shape)), wanted)


def by_hand(whole: Tensor) -> list[int]:
    """The digest of a tensor of int64 by the formula, in whole numbers of any size."""
    sums, wrap = [0, 0], 2**64
    for index, value in enumerate(whole.flatten().tolist()):
        word = (value + index * 0x9E3779B97F4A7C15) % wrap
        for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
            word = word * factor % wrap
            word ^= word >> 32
        sums[0] += word
        word = word * 0xFF51AFD7ED558CCD % wrap
        sums[1] += word ^ word >> 32
    return [each % wrap for each in sums]


def test_the_digest_is_that_of_the_formula() -> None:
    """Files of digests stay comparable: the digest of known bits never changes."""
    whole = make(torch.int64, 3, 50)
    digest = digest_shard(whole, whole.shape, (0, 0))
    assert [each % 2**64 for each in digest.tolist()] == by_hand(whole)
    assert of_whole(torch.arange(6.0).reshape(2, 3)) == "01f6f6b9c5dac5f7edc28151bfe6b350"


def test_bits_and_places_count() -> None:
    """Every single bit, the sign of zero, the payload of a NaN, an exchange of two elements and
    another shape of the same elements change both sums."""
    whole = make(torch.float32, 4, 4)
    seen = {of_whole(whole)}
    for place in range(16):
        for bit in range(32):
            changed = whole.clone().view(torch.int32)
            changed.view(-1)[place] ^= torch.tensor(1 << bit).to(torch.int32)
            seen.add(of_whole(changed))
    assert len(seen) == 1 + 16 * 32
    assert len({digest[:16] for digest in seen}) == len({digest[16:] for digest in seen}) == 513
    assert of_whole(torch.tensor([0.0])) != of_whole(torch.tensor([-0.0]))
    assert of_whole(torch.tensor([1, 2])) != of_whole(torch.tensor([2, 1]))
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert of_whole(nans[:1]) != of_whole(nans[1:])


# --- the file -------------------------------------------------------------------------------------


def test_a_saved_digest_is_read_back(tmp_path: Path) -> None:
    """A file holds all of it; what is no such file is refused in one sentence that names it."""
    model = nn.BatchNorm1d(3)
    digest = digest_state(model, torch.optim.SGD(model.parameters()))
    digest.save(tmp_path / "digest.json")
    assert StateDigest.load(tmp_path / "digest.json") == digest
    replace(digest, format=2).save(tmp_path / "newer.json")
    (tmp_path / "damaged.json").write_text('{"tensors": {"a": 3}}')
    (tmp_path / "text.json").write_text("no JSON")
    for name, told in {
        "newer.json": "has digests of format 2, this ddpbench makes format 1",
        "damaged.json": "holds no digests of a state: Expected `object`, got `int`",
        "text.json": "holds no digests of a state",
    }.items():
        with pytest.raises(ValueError, match=told) as raised:
            StateDigest.load(tmp_path / name)
        assert str(tmp_path / name) in str(raised.value)
        assert "\n" not in str(raised.value)
    with pytest.raises(OSError, match="No such file"):
        StateDigest.load(tmp_path / "nowhere.json")


def test_differences_are_seen_from_both_sides() -> None:
    """A tensor of one side, another shape, and a value in place of a tensor."""
    small, large = nn.Linear(2, 3, bias=False), nn.Linear(2, 4)
    one, other = digest_state(small), digest_state(large)
    assert one.differences(other) == [
        "model.weight has shape (3, 2) here and (4, 2) in the other state",
        "model.bias is missing here",
    ]
    assert other.differences(one)[1] == "model.bias exists only here"
    fixed, tensor = (torch.optim.SGD(small.parameters(), lr=lr) for lr in (0.1, torch.tensor(0.1)))
    (sentence,) = digest_state(small, fixed).differences(digest_state(small, tensor))
    assert sentence == (
        "optim.param_groups.0.lr is 0.1 here and a tensor of float32 () in the other state"
    )


def test_names_are_those_of_the_checkpoint() -> None:
    """A compiled part and several optimizers change no name; optimizers that have not stepped stay
    without state."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    plain = digest_state(model, torch.optim.Adam(model.parameters()))
    compiled = nn.Sequential(OrderedDict(_orig_mod=model[0]))  # as torch.compile names its module
    optimizers = [torch.optim.Adam(part.parameters()) for part in model]
    assert digest_state(nn.Sequential(compiled, model[1])).tensors == plain.tensors
    both = digest_state(model, optimizers)
    assert both.tensors == plain.tensors
    assert both.values["optim.group_of.1.bias"] == "1"
    assert not any(optimizer.state for optimizer in optimizers)


def test_a_wrong_argument_is_refused() -> None:
    """Types are those of verify_replicas; FullyShardedDataParallel is refused by name."""
    module: Any = "model"
    with pytest.raises(TypeError, match=r"module must be a torch\.nn\.Module"):
        digest_state(module)

    class FullyShardedDataParallel(nn.Linear):
        """Named as the wrapper that needs ranks to be built."""

    with pytest.raises(ValueError, match="use fully_shard"):
        digest_state(FullyShardedDataParallel(2, 2))
    assert {"digest_state", "StateDigest"} <= {*ddpbench.__all__}


# --- the command ----------------------------------------------------------------------------------


def test_the_command_compares_checkpoints(
    folder: Path,
    outcomes: list[dict[str, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Four ranks' checkpoint is equal to the file of its digests and to the same state saved by one
    process, also under another name; a changed tensor is named, with exit code 4."""
    saved = folder / "checkpoint"
    read(outcomes[0]["saved"]).save(tmp_path / "digests.json")
    assert cli.main(["checkpoint", str(saved), str(tmp_path / "digests.json")]) == 0
    model = Net().tie()
    optimizer = optimize(model)
    load(saved, model, optimizer)
    names = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    save({"app": names, "step": 3}, tmp_path / "app")
    assert cli.main(["checkpoint", str(tmp_path / "app"), str(tmp_path / "digests.json")]) == 0
    save(names, tmp_path / "alone")
    words = [str(saved), str(tmp_path / "alone"), "--save", str(tmp_path / "own.json")]
    assert cli.main(["checkpoint", *words]) == 0
    assert StateDigest.load(tmp_path / "own.json") == read(outcomes[0]["saved"])
    assert "equal: 38 tensors and 30 values of" in capsys.readouterr().out
    with torch.no_grad():
        model.norm.bias[5] += 1
    save(names, tmp_path / "changed")
    assert cli.main(["checkpoint", str(saved), str(tmp_path / "changed")]) == 4
    assert capsys.readouterr().out.splitlines()[1:] == [
        "model.norm.bias has other bits here than in the other state"
    ]


def save(names: dict[str, Any], folder: Path) -> None:
    """Save a checkpoint in one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process is alone
        dcp.save(names, checkpoint_id=folder)


def test_a_missing_checkpoint_is_named_as_missing(tmp_path: Path) -> None:
    """A mistyped name is not taken for a folder without metadata."""
    from ddpbench.replicas.checkpoint_digest import digest_checkpoint

    with pytest.raises(ValueError, match="nowhere does not exist"):
        digest_checkpoint(tmp_path / "nowhere")


def test_the_command_refuses_what_it_cannot_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder without a checkpoint, one with a truncated, missing or damaged file, and a file of
    something else are one sentence that names them, with exit code 3."""
    save({"model": nn.Linear(64, 64).state_dict()}, tmp_path / "whole")
    (part,) = (tmp_path / "whole").glob("*.distcp")
    content = part.read_bytes()
    (tmp_path / "text.json").write_text("no JSON")
    part.write_bytes(content[:100])
    for words in ([tmp_path], [tmp_path / "whole"], [tmp_path / "text.json"], ["/nowhere"]):
        assert cli.main(["checkpoint", *map(str, words)]) == 3
        told = capsys.readouterr().err
        assert str(words[0]) in told
        assert told.count("\n") == 1
    part.unlink()
    assert cli.main(["checkpoint", str(tmp_path / "whole")]) == 3
    (tmp_path / "whole" / ".metadata").write_bytes(b"damaged")
    assert cli.main(["checkpoint", str(tmp_path / "whole")]) == 3
    assert capsys.readouterr().err.count("\n") == 2


if __name__ == "__main__":
    job(Path(sys.argv[1]))
