"""The most that ranks can move over their GPUs' links, as driver and kernel report these links.

The facts are those of runtime/gpu_facts.py (`gpu_links`) and runtime/link_facts.py. Rates are of
one direction, so an operation that only sends has the same limit. Headers of packets are not
deducted. A network that reduces may exceed a limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddpbench.analysis.rank_setup import Facts, settings
from ddpbench.records.schema import Limit
from ddpbench.runtime.network import matches_names
from ddpbench.runtime.subgroups import Hosts, Partition

KERNEL = "as /sys reports"


def derive_limit(ranks: Sequence[Facts], hosts: Hosts, partition: Partition) -> Limit | None:
    """Return the lowest limit of a rank's rate in this partition; None if it is not known.

    Ranks that share a GPU use no link, so for them it is not known.
    """
    buses = [(host[0], ranks[rank].get("gpu_bus")) for host in hosts for rank in host]
    if len(set(buses)) < len(buses):
        return None
    limits: list[Limit | None] = []
    for members in partition.subgroups:
        fabrics = {ranks[rank].get("gpu_fabric") for rank in members}
        joined = len(fabrics) == 1 and None not in fabrics  # by NVLinks, across hosts as well
        for host in [members] if joined else hosts:
            local = [rank for rank in host if rank in members]
            if len(local) > 1:
                limits += _between_gpus([ranks[rank] for rank in local])
            if local and len(local) < len(members):
                network = _to_network(ranks[local[0]], _count_groups(host, partition, len(local)))
                if network is None:
                    return None
                limits += [network, _through_slots([ranks[rank] for rank in local])]
    known = (limit for limit in limits if limit is not None)
    return min(known, key=lambda limit: limit.bytes_per_second, default=None)


def _count_groups(host: Sequence[int], partition: Partition, local: int) -> int:
    """Return how many subgroups, each with so many ranks on this host, share its network."""
    working = {rank for members in partition.subgroups for rank in members}
    return len(working.intersection(host)) // local


def _between_gpus(local: Sequence[Facts]) -> list[Limit | None]:
    """Return for each of these GPUs the limit of its links to the others."""
    buses = {facts.get("gpu_bus") for facts in local}
    return [_between_gpu_and(own, buses) for own in local]


def _between_gpu_and(own: Facts, buses: set[Any]) -> Limit | None:
    """Return the limit of a GPU's NVLinks to these GPUs, or of PCIe if none leads there."""
    links = own.get("gpu_nvlinks")
    if links is None:
        return None  # GPUs of AMD, and without NVML: there may be other links than PCIe
    variables = settings(own)
    if variables.get("NCCL_P2P_DISABLE") == "1" or variables.get("NCCL_P2P_LEVEL") in ("LOC", "0"):
        links = []
    links = [link for link in links if link["to"] == "switch" or link["to"] in buses]
    if not links:
        return _through_slots([own])
    rates = {link["bytes_per_second"] for link in links}
    if None in rates:
        return None
    count = sum(link["count"] for link in links)
    total = sum(link["count"] * link["bytes_per_second"] for link in links)
    source = f"{count} NVLink{'s' if count > 1 else ''} of {total / count / 1e9:.1f} GB/s"
    return Limit(total, f"{source}, as NVML reports")


def _through_slots(local: Sequence[Facts]) -> Limit | None:
    """Return the limit of these GPUs' PCIe links together."""
    links = [facts.get("gpu_pcie") for facts in local]
    known = [link for link in links if link is not None]
    if len(known) < len(links):
        return None
    slots = {f"x{link['width']:g} at {link['transfers_per_second'] / 1e9:g} GT/s" for link in known}
    several = f"{len(known)} PCIe links, " if len(known) > 1 else "PCIe "
    source = f"{several}{' and '.join(sorted(slots))}, {KERNEL}"
    return Limit(sum(link["bytes_per_second"] for link in known), source)


def _to_network(own: Facts, sharing: int) -> Limit | None:
    """Return the limit of a host's RDMA ports for one of the subgroups that share them."""
    variables = settings(own)
    if variables.get("NCCL_IB_DISABLE") == "1" or variables.get("NCCL_NET") == "Socket":
        return None
    chosen = variables.get("NCCL_IB_HCA", "")
    rates = [
        rate
        for port, rate in (own.get("rdma_ports") or {}).items()
        if matches_names(chosen, port if ":" in chosen else port.partition(":")[0])
    ]
    if not rates:
        return None
    each = " and ".join(f"{rate / 1e9:.1f}" for rate in sorted(set(rates)))
    source = f"{len(rates)} RDMA port{'s' if len(rates) > 1 else ''} of a host, {each} GB/s each"
    shared = f", shared by {sharing} groups" if sharing > 1 else ""
    return Limit(sum(rates) / sharing, f"{source}{shared}, {KERNEL}")
