"""Several hosts: the bench itself, which interface the ranks use, and what is refused before it can
hang."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
from hosts import Hosts
from ranks import environment


@pytest.fixture(scope="module")
def bench(hosts: Callable[..., Hosts]) -> Hosts:
    """Two hosts without shaped links."""
    return hosts(2)


def test_each_host_has_its_name_and_knows_the_others(bench: Hosts) -> None:
    """A process in a host sees that host's name, and both names stand for the hosts' addresses;
    each host's own words run there, and end with their own exit codes."""
    find = (
        "import socket; print(socket.gethostname(), *map(socket.gethostbyname, ('host1', 'host2')))"
    )
    done = bench.run([sys.executable, "-c", find])
    assert [each.stdout.split() for each in done] == [
        ["host1", "10.77.0.1", "10.77.0.2"],
        ["host2", "10.77.0.1", "10.77.0.2"],
    ]
    done = bench.run({0: ["sh", "-c", "echo a >&2; exit 3"], 1: ["true"]})
    assert [(each.returncode, each.stderr) for each in done] == [(3, "a\n"), (0, "")]


def test_a_late_command_is_ended_and_told(bench: Hosts) -> None:
    """A command that misses its deadline raises with what it had printed, and does not live on."""
    with pytest.raises(TimeoutError, match=r"not done in 0\.3 s.*at work"):
        bench.run({1: ["sh", "-c", "echo at work; sleep 99"]}, seconds=0.3)
    assert bench.pids(1) == []


def test_nothing_stays_of_a_bench(hosts: Callable[..., Hosts]) -> None:
    """The end of a bench kills what runs in its hosts, in whatever session, and removes the hosts;
    a bench that a killed process left behind is removed by the next."""
    with Hosts(1) as bench:
        daemon = bench.start(0, ["setsid", "sleep", "99"])
        assert bench[0].namespace in _namespaces()
    assert daemon.poll() is not None
    assert bench[0].namespace not in _namespaces()
    assert not bench[0].etc.exists()
    leave = "import os; from hosts import Hosts; b = Hosts(1); b.__enter__(); print(b.switch); "
    left = subprocess.run(
        [sys.executable, "-c", leave + "os.sys.stdout.flush(); os._exit(9)"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    ).stdout.strip()
    assert left in _namespaces()
    with Hosts(1):
        assert left not in _namespaces()


def _namespaces() -> str:
    return subprocess.check_output(["ip", "netns"], text=True, timeout=10)
