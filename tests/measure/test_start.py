"""Starts of a repetition: NCCL's barriers get the rank's own GPU, wherever the ranks run."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from command_lines import run_command
from frozen import Frozen
from recording_backend import NAME
from stored_runs import a_case
from torch._subclasses.fake_tensor import FakeTensorMode
from warm_python import warm_python

from ddpbench.catalog import backends
from ddpbench.catalog.operations import OPERATIONS, Buffers
from ddpbench.launch import forks
from ddpbench.launch.placement import Refused, read_placement
from ddpbench.measure import start
from ddpbench.runtime import devices
from ddpbench.runtime.meeting import Rendezvous
from ddpbench.runtime.world import World, join_world
from ddpbench.session import launch_loop

GPUS = 4  # of each host
# The hosts of ranks 0 to 3 → the GPU of each. NCCL would guess GPU 0, 1, 2, 3 in both.
PLACES = {"cyclic": ("ABAB", [0, 0, 1, 1]), "uneven": ("AAAB", [0, 1, 2, 0])}


@contextlib.contextmanager
def pretended_gpus(host: str) -> Iterator[list[int]]:
    """Answer torch's questions about GPUs as a host with GPUs would; yield the selected ones."""
    selected: list[int] = []
    stream = SimpleNamespace(synchronize=lambda: None)
    answers = {
        "device_count": lambda: GPUS,
        "get_device_properties": lambda index: SimpleNamespace(name="GPU", uuid=f"{host}-{index}"),
        "set_device": selected.append,
        "current_stream": lambda device=None: stream,
    }
    with mock.patch.multiple(torch.cuda, **answers):
        yield selected


def call_barriers(world: World, hosts: str) -> list[int]:
    """Call every barrier of a measured group in this rank; return the devices that they named."""
    members = tuple(replace(m, boot_id=hosts[m.rank]) for m in world.members)
    world = replace(world, members=members)
    with pretended_gpus(hosts[world.rank]):
        device = world.agree_device("cuda")
        with world.agree_group(NAME, device=device) as group:
            launch_loop.barrier_to_connect(world, backends.get(NAME), group, device)
            start.STARTS["barrier"](group, device)()
            with FakeTensorMode():
                empty = torch.empty(0, device=device)
            case = a_case(operation="barrier", device="cuda")
            OPERATIONS["barrier"].bind(case, Buffers(empty, empty), group, world.rank)()
            named: list[list[int]] = group.named  # type: ignore[attr-defined]
    assert len(named) == 3
    return sorted({index for each in named for index in each})


def bind(world: World) -> dict[str, str]:
    """Make groups as with torch 2.15: of a backend that works, and of one that cannot connect."""
    device = torch.device("cuda", world.rank)
    version, error = type(torch.__version__)("2.15.0"), RuntimeError("Duplicate GPU\nthe rest")
    with mock.patch.object(torch, "__version__", version):
        with mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group:  # noqa: SIM117
            with world.agree_group(NAME, device=device):
                bound = str(new_group.call_args.kwargs["device_id"])
        # One rank alone has an error.
        fails = {"side_effect": error} if world.rank == 2 else {"return_value": None}
        with mock.patch.object(dist, "new_group", **fails):
            try:
                with world.agree_group(NAME, device=device):
                    return {"bound": bound, "refused": ""}
            except Refused as refused:
                return {"bound": bound, "refused": str(refused)}


def job(folder: Path) -> int:
    """Call the barriers in one rank, wherever it may run."""
    placement = read_placement()
    assert placement is not None
    with join_world(placement, Rendezvous(timeout_seconds=60)) as world:
        found = {name: call_barriers(world, hosts) for name, (hosts, _) in PLACES.items()}
        seen = {"barriers": found, **bind(world)}
        (folder / f"{world.rank}.json").write_text(json.dumps(seen))
    return 0


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """What each of four ranks saw."""
    folder = tmp_path_factory.mktemp("barriers")
    words = [*warm_python(), __file__, str(folder)]
    done = run_command(words, folder)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.parametrize("place", PLACES)
def test_barriers_of_nccl_name_the_gpu_of_their_rank(
    seen: list[dict[str, dict[str, list[int]]]], place: str
) -> None:
    """The first barrier of a group, each common start and the measured barrier name the rank's own
    GPU: with cyclic ranks, with fewer ranks than GPUs, and on hosts with unequal numbers of ranks,
    NCCL's own guess is another one."""
    assert [each["barriers"][place] for each in seen] == [[gpu] for gpu in PLACES[place][1]]


def test_a_group_that_connects_at_once_gets_the_gpu_or_is_refused_by_all_ranks(
    seen: list[dict[str, str]], frozen: Frozen
) -> None:
    """Where NCCL connects while its group is made, torch is told the GPU of each rank, and an error
    of one rank is the same sentence in all of them."""
    assert [each["bound"] for each in seen] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    (refused,) = {each["refused"] for each in seen}
    assert "(rank 2)" in refused
    frozen.text(refused)


def test_nccl_is_bound_where_it_would_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    """From torch 2.15 on, new_group gets the device. Before, a bound group would change NCCL's
    mode. Other backends and the CPU are never bound. NVIDIA's containers call theirs an alpha."""
    version = type(torch.__version__)
    device = torch.device("cuda", 3)
    bound = {}
    for number in ("2.7.0", "2.14.1+cu130", "2.15.0a0+1a2b3c4", "2.15.0"):
        monkeypatch.setattr(torch, "__version__", version(number))
        bound[number] = devices.of(device).group_options(device, "nccl")
        assert devices.of(device).group_options(device, "gloo") == {}
        assert devices.get("cpu").group_options(torch.device("cpu"), "nccl") == {}
    new = {name for name, options in bound.items() if options == {"device_id": device}}
    assert new == {"2.15.0a0+1a2b3c4", "2.15.0"}
    assert bound["2.7.0"] == bound["2.14.1+cu130"] == {}


def test_a_start_on_a_device_holds_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """From torch 2.15 on, nccl's barrier returns once it is issued: the start waits for it."""
    waited = []
    monkeypatch.setattr(dist, "barrier", lambda **options: waited.append(options))
    monkeypatch.setattr(devices.KINDS["cpu"], "clock", "device", raising=False)
    synchronize = waited.append
    monkeypatch.setattr(devices.KINDS["cpu"], "synchronize_stream", synchronize, raising=False)
    group: Any = "group"
    start.barrier(group, torch.device("cpu"))()
    assert waited == [{"group": "group"}, torch.device("cpu")]


if __name__ == "__main__":
    sys.exit(forks.run(lambda: job(Path(sys.argv[1])), 4))
