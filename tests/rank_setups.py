"""Facts of ranks and hosts as preflight gathers them, all healthy unless a test changes them."""

from __future__ import annotations

from typing import Any

from ddpbench.analysis.rank_setup import Setup

GIB = 2**30


def a_rank(name: str = "a", **other: Any) -> dict[str, Any]:
    """Return the facts of a rank that has all it needs, on a host with eight cores."""
    healthy: dict[str, Any] = {
        "hostname": name, "ddpbench": "0.1.0", "torch": "2.13.0", "python": "3.11.9",
        "library": "gloo of torch 2.13.0", "cpuset": "0-7",
        "numa_nodes": "0", "threads": 1, "variables": {}, "free_memory_nbytes": 64 * GIB,
        "shm_nbytes": 32 * GIB, "shm_free_nbytes": 32 * GIB, "ulimit_memlock_nbytes": 65536,
        "ulimit_open_files": 1024, "rdma_devices": [], "may_lock_memory": False, "addresses": [],
        "interface": {"name": "lo", "mtu_nbytes": 65536, "nominal_bytes_per_second": None},
        "gpu_uuid": None, "host": None,
    }  # fmt: skip
    return {**healthy, **other}


def a_host(**other: Any) -> dict[str, Any]:
    """Return the facts of a host, as its first rank reports them."""
    return {"kernel": "6.1.0", "cpu_model": "CPU X", "cores_logical": 8, "driver": None, **other}


def a_setup(*ranks: dict[str, Any], backend: str = "gloo", device: str = "cpu") -> Setup:
    """Return the set-up of these ranks; ranks with the same hostname share a host."""
    hosts: dict[str, list[int]] = {}
    for rank, facts in enumerate(ranks):
        hosts.setdefault(facts["hostname"], []).append(rank)
    for members in hosts.values():
        ranks[members[0]]["host"] = ranks[members[0]]["host"] or a_host()
    return Setup(ranks, list(hosts.values()), backend, device)
