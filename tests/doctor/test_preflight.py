"""Preflight: each difference and danger is found and named, and a healthy set-up has no finding."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from frozen import Frozen
from rank_pool import RankPool
from rank_setups import GIB, a_host, a_rank, a_setup

from ddpbench.analysis.rank_setup import merge_settings
from ddpbench.doctor.preflight import checks
from ddpbench.records import store
from ddpbench.runtime import environment


def net(speed: float | None = 1.25e9, mtu: int = 1500) -> dict[str, Any]:
    """An interface over which a rank reaches other hosts."""
    used = {"name": "eth0", "mtu_nbytes": mtu, "nominal_bytes_per_second": speed}
    return {"interface": used, "addresses": ["10.0.0.1"]}


def a_gpu_rank(n: int) -> dict[str, Any]:
    """A rank with a device, a core and a log file of its own."""
    own = {
        "CUDA_VISIBLE_DEVICES": f"{n}",
        "NCCL_IB_HCA": f"mlx5_{n}",
        "NCCL_DEBUG_FILE": f"{n}.log",
    }
    memory = {"gpu_nbytes": 80 * GIB, "gpu_free_nbytes": 79 * GIB}
    return a_rank(cpuset=f"{n}", gpu_uuid=f"G{n}", gpu_numa_node=0, variables=own, **memory)


HEALTHY = {
    "one rank": [a_rank()],
    "one host": [a_rank() for _ in range(8)],
    "two hosts": [a_rank(host, **net(), variables={"NCCL_ALGO": "Ring"}) for host in "aabb"],
    "GPUs": [a_gpu_rank(n) for n in range(4)],
    "unknown speed": [a_rank("a", **net(None)), a_rank("b", **net())],
    # analysis/findings.py reports these:
    "mixed torch": [a_rank(), a_rank(torch="2.7.0", library="gloo of torch 2.7.0")],
    "crowded": [a_rank(cpuset="0", threads=2)],
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_set_up_has_no_finding(name: str) -> None:
    assert checks.find_all(a_setup(*HEALTHY[name], backend="nccl", device="cuda")) == ()


# What is wrong → the ranks, on nccl
WRONG: dict[str, list[dict[str, Any]]] = {
    "library": [a_rank(library="NCCL 2.27.3"), a_rank(), a_rank()],
    "driver": [
        a_rank(h, host=a_host(driver=d)) for h, d in (("a", "550"), ("b", "550"), ("c", "535"))
    ],
    "kernel": [a_rank("a"), a_rank("b", host=a_host(kernel="5.4"))],
    "smt": [a_rank("a", host=a_host(smt=True)), a_rank("b", host=a_host(smt=False))],
    "variable": [a_rank(), a_rank(), a_rank(variables={"OMP_NUM_THREADS": "4"})],
    "algorithm": [a_rank(variables={"NCCL_ALGO": each}) for each in ("Ring", "Ring", "Tree")],
    "debugging": [a_rank(variables={"PYTHONDEVMODE": "1"})] * 2,
    "narrow": [a_rank(cpuset="0-3"), a_rank(cpuset="4", threads=2)],
    "far GPU": [a_rank(), a_rank(gpu_numa_node=1, gpu_index=5)],
    "narrow slot": [
        a_rank(),
        a_rank(gpu_pcie={"width": 8.0, "width_allowed": 16.0}, gpu_bus="0000:65:00.0"),
    ],
    "lost data": [a_rank(gpu_memory_errors=0), a_rank(gpu_memory_errors=2)],
    "NVLink down": [a_rank(gpu_nvlinks_active=n) for n in (18, 18, 17)],
    "plug-in": [a_rank("a", nccl_plugins="libnccl-net.so"), a_rank("b", nccl_plugins="none")],
    "TF32": [a_rank(), a_rank(), a_rank(variables={"NVIDIA_TF32_OVERRIDE": "0"})],
    "file of a host": [
        a_rank("a", nccl_conf={"/etc/nccl.conf": {"NCCL_ALGO": "Ring"}}),
        a_rank("b"),
    ],
    "used GPU": [a_rank(gpu_uuid="x", gpu_nbytes=80 * GIB, gpu_free_nbytes=20 * GIB)],
    "locked memory": [a_rank(), a_rank(rdma_devices=["mlx5_0"])],
    "shm": [a_rank(shm_free_nbytes=64 * 2**20)],
    "memory": [a_rank("a"), a_rank("b", free_memory_nbytes=2**27)],
    "MTU": [a_rank("a", **net(mtu=9000)), a_rank("b", **net(mtu=9000)), a_rank("c", **net())],
    "speed": [a_rank("a", **net(1.25e9)), a_rank("b", **net(1.25e8))],
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found_and_named(name: str, frozen: Frozen) -> None:
    (found,) = checks.find_all(a_setup(*map(dict, WRONG[name]), backend="nccl"))
    assert found.next_step
    frozen.findings([found])


def test_a_variable_wins_over_a_file_of_nccl() -> None:
    """An earlier file wins over a later one."""
    files = {"mine": {"NCCL_ALGO": "Tree", "NCCL_PROTO": "LL"}, "/etc": {"NCCL_PROTO": "Simple"}}
    facts = a_rank(variables={"NCCL_ALGO": "Ring"}, nccl_conf=files)
    assert merge_settings(facts) == {"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL"}


def test_a_variable_that_the_launcher_sets_is_not_compared() -> None:
    """torchrun sets OMP_NUM_THREADS=1 on hosts with several ranks only. Empty means not set."""
    ranks = [a_rank("a", variables={"OMP_NUM_THREADS": "1", "NCCL_ALGO": ""}), a_rank("b")]
    setup = a_setup(*ranks)
    assert checks.find_all(setup) == ()
    assert [f.code for f in checks.find_all(replace(setup, launcher="srun"))] == [
        "variable-differs"
    ]


# --- real ranks -----------------------------------------------------------------------------------


def test_real_ranks_are_compared(pool: RankPool, tmp_path: Path, frozen: Frozen) -> None:
    """A planted difference is named with its rank. Nothing else is worse than a note. The block
    describes this machine, without a rank's secret."""
    planted = [{"UCX_TLS": "tcp", "NCCL_API_KEY": "hunter2"}, {"UCX_TLS": "shm"}]
    environs = [
        {**its, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank, its in enumerate(planted)
    ]
    words = ("doctor", "--only", "preflight", "--output", "run")
    done = pool.ask(tmp_path, environs, *words)
    assert done.returncode == 0, done
    run = store.read(tmp_path / "run")
    (found,) = [f for f in run.findings if f.severity != "note"]
    frozen.facts([found.severity, found.code, found.place["rank"], found.place["variable"]])
    assert f"cpuset {environment.compact(os.sched_getaffinity(0))}" in done.stdout
    assert "UCX_TLS=tcp (rank 0); shm (rank 1)" in done.stdout
    assert "hunter2" not in done.stdout + (tmp_path / "run/run.json").read_text()
