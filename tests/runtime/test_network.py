"""Where gloo would listen, why others could not reach it, and what to set: told before any wait."""

import socket
from dataclasses import replace

import pytest

from ddpbench.launch import sockets
from ddpbench.runtime import network
from ddpbench.runtime.network import Endpoint, find_objection, find_unreachable

HAS = {"lo": "127.0.0.1/8", "eth0": "10.0.0.1/24", "docker0": "172.17.0.1/16"}
ONE = Endpoint(0, "a", "net a", "has GLOO_SOCKET_IFNAME=eth0", {"10.0.0.1": 1}, HAS)
TWO = Endpoint(
    1, "b", "net b", "resolves its own name to 10.0.0.2", {"10.0.0.2": 1},
    {"lo": "127.0.0.1/8", "docker0": "172.17.0.1/16", "ens3": "10.0.0.2/24"},
)  # fmt: skip
LO = replace(TWO, reason="resolves its own name to 127.0.1.1", listening={"127.0.1.1": 1})


def test_places_that_reach_each_other_raise_no_objection() -> None:
    """Two hosts on one subnet; and one host, whatever its ranks listen on."""
    assert find_objection([ONE, TWO]) is None
    assert find_objection([replace(LO, rank=0), LO]) is None


def test_loopback_between_hosts_is_refused_with_what_to_set() -> None:
    """The sentence names host, rank, why gloo would listen there, who cannot reach it, and the
    interface on the subnet of both; docker0, the same address on both, is none."""
    assert find_objection([ONE, LO]) == (
        "b (rank 1) resolves its own name to 127.0.1.1, so gloo would listen on 127.0.1.1, which a "
        "cannot reach: on b export GLOO_SOCKET_IFNAME=ens3"
    )


def test_an_absent_interface_is_refused_even_on_one_host() -> None:
    """The sentence names the variable as it was set, and what there is."""
    lost = replace(ONE, reason="has GLOO_SOCKET_IFNAME=eth9", listening={}, missing="eth9")
    assert find_objection([lost]) == (
        "a (rank 0) has GLOO_SOCKET_IFNAME=eth9, and there is no interface eth9 with an address: "
        "it has lo 127.0.0.1/8, eth0 10.0.0.1/24, docker0 172.17.0.1/16; correct "
        "GLOO_SOCKET_IFNAME there"
    )


def test_one_address_on_two_hosts_is_refused() -> None:
    """Each would connect to itself, as on the bridges that Docker makes everywhere alike."""
    docker = {"172.17.0.1": 1}
    sentence = find_objection([replace(ONE, listening=docker), replace(TWO, listening=docker)])
    assert sentence == (
        "a (rank 0) and b (rank 1) have the same address 172.17.0.1 for gloo: "
        "on a export GLOO_SOCKET_IFNAME=eth0, on b export GLOO_SOCKET_IFNAME=ens3"
    )


def test_without_a_common_subnet_all_interfaces_are_offered() -> None:
    """Hosts on routed subnets: none is nearer; and a host without any needs an address first."""
    far = replace(
        ONE, interfaces={"lo": "127.0.0.1/8", "eth0": "10.9.0.1/24", "ib0": "10.8.0.1/24"}
    )
    assert (find_objection([far, LO]) or "").endswith("export GLOO_SOCKET_IFNAME=docker0 or ens3")
    bare = replace(LO, interfaces={"lo": "127.0.0.1/8"})
    assert (find_objection([far, bare]) or "").endswith("give b an address first")


def test_only_the_higher_address_connects_and_one_rank_for_its_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As gloo does: so a way that is closed in the other direction raises no false alarm. What
    fails is told with both hosts' interfaces and variables."""
    tried = []

    def all_fail(targets: list[tuple[str, int]], seconds: float) -> dict[tuple[str, int], str]:
        tried.append(targets)
        return dict.fromkeys(targets, "No route to host")

    monkeypatch.setattr(sockets, "try_connections", all_fail)
    places = [ONE, TWO, replace(TWO, rank=2)]
    assert [find_unreachable(rank, places, 1.0) for rank in (0, 2)] == [None, None]
    assert find_unreachable(1, places, 1.0) == (
        "b (rank 1) cannot connect to a (rank 0) at 10.0.0.1, where gloo would listen, because it "
        "has GLOO_SOCKET_IFNAME=eth0 (No route to host; b has lo 127.0.0.1/8, docker0 "
        "172.17.0.1/16, ens3 10.0.0.2/24): on a export GLOO_SOCKET_IFNAME=eth0, on b export "
        "GLOO_SOCKET_IFNAME=ens3"
    )
    assert tried == [[], [("10.0.0.1", 1)]]


def test_a_rank_listens_where_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told an interface, its address; told none, that of the host's own name, or loopback with the
    reason where the name has no address here. While the context lasts others can connect."""
    with network.open_endpoint(0, "net", "lo") as endpoint:
        assert (endpoint.reason, endpoint.missing) == ("has GLOO_SOCKET_IFNAME=lo", None)
        assert sockets.try_connections(list(endpoint.listening.items()), 5.0) == {}
    assert list(endpoint.listening) == ["127.0.0.1"]
    closed = ("127.0.0.1", endpoint.listening["127.0.0.1"])
    assert sockets.try_connections([closed], 5.0) == {closed: "Connection refused"}
    with network.open_endpoint(0, "net", "lo,none7") as endpoint:
        assert endpoint.missing == "none7"
    for named, why in {
        "127.0.1.1": ("127.0.1.1", "resolves its own name to 127.0.1.1"),
        "192.0.2.1": ("127.0.0.1", "resolves its own name to 192.0.2.1, which is not its own"),
        "no.name.invalid": ("127.0.0.1", "cannot resolve its own name"),
    }.items():
        monkeypatch.setattr(socket, "gethostname", lambda named=named: named)
        with network.open_endpoint(0, "net", None) as endpoint:
            assert (next(iter(endpoint.listening)), endpoint.reason) == why


def test_nccl_s_variable_is_read_as_nccl_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beginnings of names, whole names after =, exclusions after ^; loopback alone does not do
    between hosts; and the sentence says what there is."""
    monkeypatch.setattr(sockets, "list_interfaces", lambda: HAS)

    def fits(said: str, several_hosts: bool = True) -> bool:
        return (
            network.check_nccl_interface(
                "NCCL_SOCKET_IFNAME", several_hosts, {"NCCL_SOCKET_IFNAME": said}
            )
            is None
        )

    assert all(map(fits, ("", "eth", "=eth0", "ib,eth", "^docker", "^=lo")))
    assert not any(map(fits, ("ib", "=eth", "lo", "^eth,docker")))
    assert fits("lo", several_hosts=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "a")
    assert network.check_nccl_interface(
        "NCCL_SOCKET_IFNAME", True, {"NCCL_SOCKET_IFNAME": "ib"}
    ) == (
        "NCCL_SOCKET_IFNAME=ib fits no interface that other hosts can reach on a, which has "
        "lo 127.0.0.1/8, eth0 10.0.0.1/24, docker0 172.17.0.1/16"
    )


def test_connections_are_read_from_this_process() -> None:
    """One that is open appears with its ends, and is gone when it is closed."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        before = sockets.list_connections()
        with socket.create_connection(server.getsockname()) as client, server.accept()[0]:
            new = sockets.list_connections() - before
            assert client.getsockname() in {(one.local, one.local_port) for one in new}
            assert sockets.local_addresses(new, frozenset({"127.0.0.1"})) == ["127.0.0.1"]
            assert sockets.local_addresses(new, frozenset({"10.0.0.2"})) == []
        assert not new & sockets.list_connections()


def test_a_name_that_resolves_is_known() -> None:
    """localhost is; a name of the reserved domain is not, and the sentence names it."""
    assert network.check_name("localhost") is None
    assert "cannot resolve no.name.invalid, where" in (network.check_name("no.name.invalid") or "")
