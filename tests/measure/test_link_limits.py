"""The limits that follow from the links which driver and kernel report, and their sources."""

from __future__ import annotations

from typing import Any

import pytest
from frozen import Frozen

from ddpbench.catalog.operations import OPERATIONS
from ddpbench.measure.link_limits import derive_limit
from ddpbench.records.schema import Limit
from ddpbench.runtime.subgroups import divide_ranks

GB = 1e9
PCIE = {
    "width": 16, "width_allowed": 16, "transfers_per_second": 16e9, "bytes_per_second": 31.5 * GB,
}  # fmt: skip
SWITCH = [{"to": "switch", "count": 18, "bytes_per_second": 26.5625 * GB}]


def a_rank(number: int, **other: Any) -> dict[str, Any]:
    """Return what a rank with a GPU of its own reports of its links."""
    own = {"gpu_bus": f"0000:{number:02x}:00.0", "gpu_pcie": PCIE, "gpu_nvlinks": [],
           "gpu_fabric": None, "rdma_ports": {}, "variables": {}}  # fmt: skip
    return {**own, **other}


def on_one_host(*ranks: dict[str, Any], operation: str = "all_reduce") -> Limit | None:
    hosts = [list(range(len(ranks)))]
    return derive_limit(ranks, hosts, divide_ranks("world", hosts), OPERATIONS[operation])


def on_two_hosts(
    ranks: list[dict[str, Any]], name: str = "world", operation: str = "all_reduce"
) -> Limit | None:
    half = len(ranks) // 2
    hosts = [list(range(half)), list(range(half, len(ranks)))]
    return derive_limit(ranks, hosts, divide_ranks(name, hosts), OPERATIONS[operation])


def freeze(frozen: Frozen, *limits: Limit | None) -> None:
    """Freeze rates as facts, and the sources of these rates as text."""
    known = [limit for limit in limits if limit is not None]
    assert len(known) == len(limits)
    frozen.facts([limit.bytes_per_second for limit in known])
    frozen.text("\n".join(limit.source for limit in known))


NARROW = {**PCIE, "width": 8, "bytes_per_second": 15.75 * GB}
FOUR_TO_1 = {"to": "0000:01:00.0", "count": 4, "bytes_per_second": 25 * GB}
EIGHT_TO_7 = {"to": "0000:07:00.0", "count": 8, "bytes_per_second": 25 * GB}
BACK = {"to": "0000:00:00.0", "count": 4, "bytes_per_second": 25 * GB}
BRIDGED = a_rank(0, gpu_nvlinks=[FOUR_TO_1, EIGHT_TO_7])


def test_nvlinks_to_gpus_of_the_ranks_count(frozen: Frozen) -> None:
    """A GPU's links to a switch serve any other GPU, and their rates add up. Links to a GPU that no
    rank uses carry nothing; without any other link PCIe is the limit, and a narrow slot limits all
    ranks."""
    switched = on_one_host(*(a_rank(n, gpu_nvlinks=SWITCH) for n in range(8)))
    bridged = on_one_host(BRIDGED, a_rank(1, gpu_nvlinks=[BACK]))
    narrow = on_one_host(a_rank(0), a_rank(1, gpu_pcie=NARROW), a_rank(2))
    freeze(frozen, switched, bridged, on_one_host(BRIDGED, a_rank(2)), narrow)


@pytest.mark.parametrize(
    "ranks",
    [
        [a_rank(0, gpu_nvlinks=None), a_rank(1, gpu_nvlinks=None)],
        [a_rank(0), a_rank(0)],
        [a_rank(n, gpu_nvlinks=[{"to": "switch", "count": 4, "bytes_per_second": None}])
         for n in (0, 1)],
        [{}, {}],
    ],
    ids=["no NVML", "one GPU", "no speed", "no GPU"],
)  # fmt: skip
def test_what_is_not_known_is_no_limit(ranks: list[dict[str, Any]]) -> None:
    """Without the links' rates, or on one GPU, there is no limit rather than a wrong one."""
    assert on_one_host(*ranks) is None


@pytest.mark.parametrize(
    "facts",
    [
        {"variables": {"NCCL_P2P_DISABLE": "1"}},
        {"variables": {"NCCL_P2P_LEVEL": "LOC"}},
        {"nccl_conf": {"/etc/nccl.conf": {"NCCL_P2P_DISABLE": "1"}}},
    ],
)
def test_a_setting_that_forbids_nvlink_leaves_pcie(facts: dict[str, Any]) -> None:
    """Without P2P, by a variable or a file of NCCL, data cross the host's memory."""
    limit = on_one_host(*(a_rank(n, gpu_nvlinks=SWITCH, **facts) for n in range(2)))
    assert limit is not None
    assert limit.source.startswith("PCIe x16")


PORTS = {f"mlx5_{n}:1": 50 * GB for n in range(4)}


@pytest.mark.parametrize(
    ("ports", "variables"),
    [
        (PORTS, {}),
        (PORTS, {"NCCL_IB_HCA": "mlx5_1,mlx5_2"}),
        (PORTS, {"NCCL_IB_HCA": "^=mlx5_1"}),
        ({"a:1": 100 * GB, "b:1": 200 * GB}, {}),
    ],
    ids=["all", "beginnings", "all others", "above the GPUs"],
)
def test_between_hosts_the_ports_or_the_slots_limit(
    ports: dict[str, float], variables: dict[str, str], frozen: Frozen
) -> None:
    """What leaves a host passes the ports that NCCL may use, and the slots of the ranks' GPUs."""
    ranks = [
        a_rank(n % 8, gpu_nvlinks=SWITCH, rdma_ports=ports, variables=variables) for n in range(16)
    ]
    freeze(frozen, on_two_hosts(ranks))


def test_groups_between_hosts_share_the_ports(frozen: Frozen) -> None:
    """Eight groups that work at once each get an eighth of a host's ports."""
    ranks = [a_rank(n % 8, gpu_nvlinks=SWITCH, rdma_ports=PORTS) for n in range(16)]
    freeze(frozen, on_two_hosts(ranks, "cross"), on_two_hosts(ranks, "host"))


@pytest.mark.parametrize("operation", ["send_recv", "bidirectional"])
def test_a_pair_uses_only_the_links_between_its_ranks(operation: str, frozen: Frozen) -> None:
    """Ranks 0-1, 2-3, … send to each other: inside a host they need no network, and of four GPUs
    with four NVLinks to each other one, a pair has four. Between hosts pairs share the ports."""

    def mesh(number: int, first: int) -> dict[str, Any]:
        others = [f"0000:{n:02x}:00.0" for n in range(first, first + 4) if n != number]
        links = [{"to": bus, "count": 4, "bytes_per_second": 25 * GB} for bus in others]
        return a_rank(number, gpu_nvlinks=links, rdma_ports={"mlx5_0:1": 50 * GB})

    four = [mesh(number, 0) for number in range(4)]
    pair = on_one_host(*four, operation=operation)
    eight = [*four, *four]
    assert on_two_hosts(eight, operation=operation) == pair
    assert on_two_hosts([{**rank, "rdma_ports": {}} for rank in eight], operation=operation) == pair
    across = [[0, 2, 4, 6], [1, 3, 5, 7]]
    world = divide_ranks("world", across)
    between = [four[rank // 2] for rank in range(8)]
    limit = derive_limit(between, across, world, OPERATIONS[operation])
    freeze(frozen, pair, on_one_host(*four), limit)
