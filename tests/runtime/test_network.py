"""Where gloo would listen, why others could not reach it, and what to set: told before any wait."""

import socket
from dataclasses import replace

import pytest
from frozen import Frozen

from ddpbench.runtime import network
from ddpbench.runtime.network import Endpoint, find_objection

HAS = {"lo": "127.0.0.1/8", "eth0": "10.0.0.1/24", "docker0": "172.17.0.1/16"}
ONE = Endpoint(0, "a", "net a", "has GLOO_SOCKET_IFNAME=eth0", ("10.0.0.1",), HAS)
TWO = Endpoint(
    1, "b", "net b", "resolves its own name to 10.0.0.2", ("10.0.0.2",),
    {"lo": "127.0.0.1/8", "docker0": "172.17.0.1/16", "ens3": "10.0.0.2/24"},
)  # fmt: skip
LO = replace(TWO, reason="resolves its own name to 127.0.1.1", listening=("127.0.1.1",))


def test_places_that_reach_each_other_raise_no_objection() -> None:
    """Two hosts on one subnet; and one host, whatever its ranks listen on."""
    assert find_objection([ONE, TWO]) is None
    assert find_objection([replace(LO, rank=0), LO]) is None


DOCKER = ("172.17.0.1",)
FAR = replace(ONE, interfaces={"lo": "127.0.0.1/8", "eth0": "10.9.0.1/24", "ib0": "10.8.0.1/24"})


@pytest.mark.parametrize(
    "endpoints",
    [
        pytest.param([ONE, LO], id="loopback"),
        pytest.param([FAR, LO], id="loopback without a common subnet"),
        pytest.param([replace(ONE, listening=DOCKER), TWO], id="an address of both hosts"),
    ],
)
def test_an_address_that_others_cannot_reach_is_refused(
    endpoints: list[Endpoint], frozen: Frozen
) -> None:
    """The sentence names host, rank, why gloo would listen there, who cannot reach it, and the
    interfaces that both can use, those on a common subnet first."""
    frozen.text(find_objection(endpoints) or "")


def test_gloo_listens_where_the_endpoint_says(
    frozen: Frozen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the address of a requested interface, else on that of the host's own name, or on loopback
    with the reason where the name has no address here."""
    endpoint = network.find_endpoint(0, "net", "lo,none7")
    assert endpoint.listening == ("127.0.0.1",)
    frozen.text(endpoint.reason)
    for named, address in {
        "127.0.1.1": "127.0.1.1",
        "192.0.2.1": "127.0.0.1",
        "no.name.invalid": "127.0.0.1",
    }.items():
        monkeypatch.setattr(socket, "gethostname", lambda named=named: named)
        endpoint = network.find_endpoint(0, "net", None)
        assert endpoint.listening == (address,)
        frozen.text(endpoint.reason)


def test_nccl_s_variable_is_read_as_nccl_reads_it() -> None:
    """Beginnings of names, whole names after =, exclusions after ^."""
    names = ("lo", "eth0")
    for value, matching in (
        ("eth", ["eth0"]), ("=eth0", ["eth0"]), ("ib,eth", ["eth0"]), ("^docker", [*names]),
        ("^=lo", ["eth0"]), ("ib", []), ("=eth", []), ("^eth,lo", []),
    ):  # fmt: skip
        assert [name for name in names if network.matches_names(value, name)] == matching
