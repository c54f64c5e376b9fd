"""Planted faults: how they are named, what they change and that they leave nothing behind."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from command_lines import run_command
from frozen import Frozen
from patience import wait_until
from warm_python import warm_python

from ddpbench.catalog import faults
from ddpbench.catalog.planting import IN_SET_UP
from ddpbench.launch.placement import Placement, Refused
from ddpbench.runtime.environment import rank_facts


def test_a_fault_is_known_by_its_name_and_kind() -> None:
    """One name may be planted in a step and in a set-up; the settings are those of each, and the
    step is one of those in a step alone."""
    step, set_up = faults.parse("slow-rank:rank=0"), faults.parse("slow-rank:rank=0", IN_SET_UP)
    assert dict(step.settings) == {"step": 5.0, "rank": 0.0, "ms": 30.0}
    assert dict(set_up.settings) == {"rank": 0.0, "busy": 3.0}


def place(rank: int, world_size: int = 2) -> Placement:
    """Of a rank that ddpbench has started."""
    return Placement("fork", rank, world_size, rank, world_size)


def test_a_fault_of_a_set_up_is_in_its_rank_and_ends_with_it(frozen: Frozen) -> None:
    """The last rank by default, all ranks where it has none; afterwards all is as before. A rank
    that is not there is refused."""
    interface = faults.parse("wrong-interface", IN_SET_UP)
    before = dict(os.environ)
    with interface.around(place(0)):
        assert dict(os.environ) == before
    with interface.around(place(1)), faults.parse("oversubscribed", IN_SET_UP).around(place(0)):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "nonesuch0"
        assert int(os.environ["OMP_NUM_THREADS"]) == 2 * len(os.sched_getaffinity(0))
    assert dict(os.environ) == before
    with faults.parse("mixed-versions:rank=0", IN_SET_UP).around(place(0)):
        assert rank_facts()["torch"] == "1.0.0"
    assert rank_facts()["torch"] == str(torch.__version__)
    with pytest.raises(Refused) as caught:
        faults.parse("wrong-interface:rank=2", IN_SET_UP).around(place(1))
    frozen.text(str(caught.value))


def list_affinities(process: psutil.Process) -> list[set[int]]:
    """Return the cores of each thread."""
    found = []
    for thread in process.threads():
        with contextlib.suppress(ProcessLookupError):  # another test's, which ended meanwhile
            found.append(os.sched_getaffinity(thread.id))
    return found


def test_a_slow_rank_really_shares_its_core() -> None:
    """All its threads are on one core, and so is a busy process, which ends with the context."""
    before, me = os.sched_getaffinity(0), psutil.Process()
    others = me.children()  # of other tests, possibly ended and not yet waited for
    with faults.slow_rank(None, {"busy": 1.0}):
        (core,) = os.sched_getaffinity(0)
        threads = list_affinities(me)
        (busy,) = set(me.children()).difference(others)
        assert threads == [{core}] * len(threads)
        assert busy.cpu_affinity() == [core]
    assert os.sched_getaffinity(0) == before
    assert not busy.is_running()


def test_busy_processes_end_with_a_rank_that_is_killed(tmp_path: Path) -> None:
    """However the rank ends: here it leaves without undoing anything."""
    program = (
        "import os, psutil\nfrom ddpbench.catalog import faults\n"
        "context = faults.slow_rank(None, {'busy': 2.0})\ncontext.__enter__()\n"
        "print(*[child.pid for child in psutil.Process().children()], flush=True)\nos._exit(9)\n"
    )
    done = run_command([*warm_python(), "-c", program], tmp_path)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), "the end of both")


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("missed-sync", None),
        ("flipped-shard", ("dp_shard",)),
        ("other-seed", ("dp_shard", "tp")),
        ("one-rank-update", ("dp_replicate", "dp_shard")),
    ],
    ids=["no mesh", "shards", "fsdp+tp", "hsdp"],
)
def test_a_fault_that_the_mesh_has_no_place_for_is_refused(
    name: str, mesh: tuple[str, ...] | None, frozen: Frozen
) -> None:
    """One sentence says what to use."""
    found = mesh and SimpleNamespace(mesh_dim_names=mesh, size=lambda dimension: 2)
    objection = faults.parse(name).objection(SimpleNamespace(mesh=found), 4)
    assert objection is not None
    frozen.text(objection)


@pytest.mark.parametrize("name", ["bypass", "no-sync", "slow-link"])
def test_a_fault_of_ddp_is_refused_on_a_mesh(name: str) -> None:
    """There is no DDP that a forward could bypass, and no no_sync."""
    replica = SimpleNamespace(case=SimpleNamespace(parallel="tp"))
    assert "use --parallel ddp" in (faults.parse(name).objection(replica, 4) or "")
