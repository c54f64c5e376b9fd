"""Limits of rates over the links of GPUs, as the driver and the kernel report these links.

The facts come from runtime/gpu_facts.py. Rates are of one direction, so an operation that only
sends has the same limit. Headers of packets are not deducted. A network that reduces may exceed a
limit, and so may a tree between few hosts, which sends less than the ring that defines busbw.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddpbench.analysis.rank_setup import Facts, merge_settings
from ddpbench.catalog.operations import Operation
from ddpbench.records.schema import Limit
from ddpbench.runtime.network import matches_names
from ddpbench.runtime.subgroups import Hosts, Partition

KERNEL = "as /sys reports"


def derive_limit(
    ranks: Sequence[Facts], hosts: Hosts, partition: Partition, operation: Operation
) -> Limit | None:
    """Return the lowest limit of an operation's busbw in this partition; None if it is unknown.

    It is unknown for ranks that share a GPU, because they use no link, and for an operation across
    hosts that sends different data to each rank, because busbw counts data that stays in a host.
    """
    buses = [(host[0], ranks[rank].get("gpu_bus")) for host in hosts for rank in host]
    if len(set(buses)) < len(buses):
        return None
    limits: list[Limit | None] = []
    subgroups = partition.subgroups
    if operation.paired:
        subgroups = tuple(m[i : i + 2] for m in subgroups for i in range(0, len(m) - 1, 2))
    for members in map(set, subgroups):
        fabrics = {ranks[rank].get("gpu_fabric") for rank in members}
        joined = len(fabrics) == 1 and None not in fabrics  # by NVLinks, across hosts as well
        for host in [sorted(members)] if joined else hosts:
            local = [rank for rank in host if rank in members]
            if len(local) > 1:
                limits += _between_gpus([ranks[rank] for rank in local])
            if local and len(local) < len(members):
                working = {rank for ranks_at_work in subgroups for rank in ranks_at_work}
                sharing = len(working.intersection(host)) // len(local)  # groups, its network
                network = _to_network(ranks[local[0]], sharing)
                if network is None or operation.personal:
                    return None
                limits += [network, _through_slots([ranks[rank] for rank in local])]
    known = (limit for limit in limits if limit is not None)
    return min(known, key=lambda limit: limit.bytes_per_second, default=None)


def _between_gpus(local: Sequence[Facts]) -> list[Limit | None]:
    """Return for each of these GPUs the limit of its links to the others.

    Unknown if NVLinks join only some of them, as bridges between pairs of GPUs do.
    """
    buses = {facts.get("gpu_bus") for facts in local}
    nvlinks = [_usable_nvlinks(own, buses) for own in local]
    if None in nvlinks:  # a GPU of AMD, or without NVML, may have other links than PCIe
        return []
    if not any(nvlinks):
        return [_through_slots([own]) for own in local]
    for own, links in zip(local, nvlinks, strict=True):
        ends = {own.get("gpu_bus"), *(link["to"] for link in links or ())}
        if "switch" not in ends and not buses <= ends:
            return []
    return [_sum_nvlinks(links) for links in nvlinks if links]


def _usable_nvlinks(own: Facts, buses: set[Any]) -> list[Any] | None:
    """Return a GPU's NVLinks that lead to these GPUs and that NCCL may use; None: unknown."""
    links = own.get("gpu_nvlinks")
    if links is None:
        return None
    variables = merge_settings(own)
    if variables.get("NCCL_P2P_DISABLE") == "1" or variables.get("NCCL_P2P_LEVEL") in ("LOC", "0"):
        return []
    return [link for link in links if link["to"] == "switch" or link["to"] in buses]


def _sum_nvlinks(links: Sequence[Any]) -> Limit | None:
    rates = {link["bytes_per_second"] for link in links}
    if None in rates:
        return None
    count = sum(link["count"] for link in links)
    total = sum(link["count"] * link["bytes_per_second"] for link in links)
    source = f"{count} NVLink{'s' if count > 1 else ''} of {total / count / 1e9:.1f} GB/s"
    return Limit(total, f"{source}, NVML's raw rate, about 6 % above the usable one")


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
    variables = merge_settings(own)
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
    shown = " and ".join(f"{rate / 1e9:.1f}" for rate in sorted(set(rates)))
    source = f"{len(rates)} RDMA port{'s' if len(rates) > 1 else ''} of a host, {shown} GB/s each"
    shared = f", shared by {sharing} groups" if sharing > 1 else ""
    return Limit(sum(rates) / sharing, f"{source}{shared}, {KERNEL}")
