"""Facts of ranks and hosts as preflight gathers them, all healthy unless a test changes them."""

from __future__ import annotations

from typing import Any

from ddpbench.analysis.setup import Setup

GIB = 2**30


def a_rank(name: str = "a", **other: Any) -> dict[str, Any]:
    """One that has all it needs, on a host with eight cores."""
    known: dict[str, Any] = {
        "hostname": name, "ddpbench": "0.1.0", "torch": "2.13.0", "python": "3.11.9",
        "library": "gloo of torch 2.13.0", "cpuset": "0-7", "allowed_cpus": "0-7",
        "numa_nodes": "0", "threads": 1, "variables": {}, "free_memory_nbytes": 64 * GIB,
        "shm_nbytes": 32 * GIB, "shm_free_nbytes": 32 * GIB, "ulimit_memlock_nbytes": 65536,
        "ulimit_open_files": 1024, "rdma_devices": [], "resolved": "10.0.0.1", "addresses": [],
        "interface": {"name": "lo", "mtu_nbytes": 65536, "nominal_bytes_per_second": None},
        "clock_ahead_seconds": 0.0, "gpu_uuid": None, "debug_builds": [], "host": None,
    }  # fmt: skip
    return {**known, **other}


def a_host(**other: Any) -> dict[str, Any]:
    """The facts that its first rank tells of it."""
    return {"kernel": "6.1.0", "cpu_model": "CPU X", "cores_logical": 8, "driver": None, **other}


def a_setup(*ranks: dict[str, Any], backend: str = "gloo", device: str = "cpu") -> Setup:
    """These ranks, those of a name on one host."""
    hosts: dict[str, list[int]] = {}
    for rank, its in enumerate(ranks):
        hosts.setdefault(its["hostname"], []).append(rank)
    for those in hosts.values():
        ranks[those[0]]["host"] = ranks[those[0]]["host"] or a_host()
    return Setup(ranks, list(hosts.values()), backend, device)
