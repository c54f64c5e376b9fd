"""Several hosts: the bench itself, which interface the ranks use, and what is refused before it can
hang."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from command_lines import write_warm_python
from frozen import Frozen
from rank_pool import Done, RankPool
from simulated_hosts import PORT, Hosts
from warm_python import warm_python

from ddpbench.records import store
from ddpbench.records.schema import Run

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def bench(hosts: Callable[..., Hosts]) -> Hosts:
    """Two hosts without shaped links."""
    return hosts(2)


@pytest.fixture(scope="module")
def ranks(bench: Hosts) -> Iterator[RankPool]:
    """Two ranks in each host."""
    pool = bench.pool((2, 2))
    yield pool
    pool.close()


def measure(bench: Hosts, ranks: RankPool, cwd: Path, *of_host: str) -> Done:
    """A small all_reduce over three of the ranks; GLOO_SOCKET_IFNAME in each host, "" is unset."""
    told = of_host or ("", "")
    environs = [{"GLOO_SOCKET_IFNAME": name} for name in (told[0], *told)]
    words = ("--op", "all_reduce", "--case-time", "0.1", "--backend", "gloo")
    return sweep(bench, ranks, cwd, environs, *words)


def sweep(
    bench: Hosts, ranks: RankPool, cwd: Path, environs: list[dict[str, str]], *words: str
) -> Done:  # fmt: skip
    """4 KiB in as many ranks as there are environments, which fill the first host first."""
    ranks.calls += 1
    places = [
        {"RANK": str(rank), "LOCAL_RANK": str(rank % 2), "MASTER_ADDR": bench[0].address, **its}
        for rank, its in enumerate(environs)
    ]
    return ranks.ask(
        cwd, places, "collectives", "--sizes", "4K", *words,
        "--output", str(cwd / str(ranks.calls)),
    )  # fmt: skip


def only_run(cwd: Path) -> Run:
    """What was stored in one of the folders there."""
    (run,) = (store.read(path) for path in cwd.iterdir() if path.is_dir())
    return run


def refused(done: Done) -> str:
    """The one sentence with which a command was refused."""
    told = [line for line in done.stderr.splitlines() if line.startswith("ddpbench: ")]
    assert (done.returncode, len(told), done.stdout) == (2, 1, ""), done
    return told[0].removeprefix("ddpbench: ")


def test_ranks_of_two_hosts_measure_and_tell_their_addresses(
    frozen: Frozen, bench: Hosts, ranks: RankPool, tmp_path: Path
) -> None:
    """2 ranks on one host and 1 on the other, without any variable: the header and the record have
    the hosts, and the addresses that the backend's sockets have."""
    done = measure(bench, ranks, tmp_path)
    assert done.returncode == 0, done
    assert "host1 10.77.0.1, host2 10.77.0.2\n" in done.stdout
    assert "eth0, mtu 1500" in done.stdout
    run = only_run(tmp_path)
    assert [rank["addresses"] for rank in run.launches[0].ranks] == [
        ["10.77.0.1"], ["10.77.0.1"], ["10.77.0.2"],
    ]  # fmt: skip
    assert run.results[0].case.ranks_per_host == (2, 1)
    assert run.results[0].limit is not None
    frozen.text(run.results[0].limit.source)


@pytest.mark.nightly
def test_torchrun_starts_different_numbers_of_ranks(bench: Hosts, tmp_path: Path) -> None:
    """1 rank on one host and 3 on the other are one world, with a rendezvous over c10d."""
    meet = ("--rdzv-backend=c10d", f"--rdzv-endpoint=10.77.0.1:{PORT}", "--rdzv-id=1")
    sweep = ("--op", "all_reduce", "--sizes", "4K", "--case-time", "0.1", "--output", "run")
    lines = {
        host: [
            *(*warm_python(), "-m", "torch.distributed.run", "--nnodes=2", *meet),
            *(f"--nproc-per-node={count}", "-m", "ddpbench.collectives", *sweep),
        ]
        for host, count in enumerate((1, 3))
    }
    done = bench.run(lines, tmp_path, PYTHON_EXEC=write_warm_python(tmp_path))
    assert [each.returncode for each in done] == [0, 0], done
    run = store.read(tmp_path / "run")
    (launch,) = run.launches
    assert (run.exit_code, launch.launcher, launch.world_size) == (0, "torchrun", 4)
    assert [rank["hostname"] for rank in launch.ranks] == ["host1", *["host2"] * 3]
    (result,) = run.results
    assert result.case.ranks_per_host == (1, 3)
    assert result.checks > 0
    assert not result.wrong


def listened_on(pid: int) -> set[str]:
    """The addresses on which anything listens in the host of this process; IPv6 as the kernel
    writes it."""
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address = bytes.fromhex(local.partition(":")[0])
            if state == "0A":
                found.add(socket.inet_ntoa(address[::-1]) if name == "tcp" else address.hex())
    return found


def test_between_hosts_sockets_listen_on_the_address_in_use(
    bench: Hosts, ranks: RankPool, tmp_path: Path
) -> None:
    """The store, gloo and the streams listen on the host's one address in the ranks' network while
    they measure, and nowhere else."""
    seen: set[str] = set()
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.02):
            seen.update(*(listened_on(each.pid) for each in ranks.processes))

    looks = threading.Thread(target=look)
    looks.start()
    try:
        done = measure(bench, ranks, tmp_path)
    finally:
        over.set()
        looks.join()
    assert done.returncode == 0, done
    assert seen == {"10.77.0.1", "10.77.0.2"}


def test_the_groups_of_two_hosts_measure_and_check(
    frozen: Frozen, bench: Hosts, ranks: RankPool, tmp_path: Path
) -> None:
    """Inside each host, between them and over all, with pairs: measured and right
    in both groups at once. A backend whose results are wrong in rank 3, where that is the second of
    a group, is found out in its groups inside and between hosts, by its number among all ranks."""
    environs = [{"FAULT": "element:1:4096" if rank == 3 else "none"} for rank in range(4)]
    done = sweep(
        bench, ranks, tmp_path, environs, "--op", "all_reduce,broadcast,all_gather,send_recv",
        "--groups", "host,cross,world", "--case-time", "0.01",
        "--peak-bandwidth", "1000",
        "--import", "faulty_backend", "--backend", "gloo,faulty",
    )  # fmt: skip
    run = only_run(tmp_path)
    gloo = [each for each in run.results if each.case.backend == "gloo"]
    assert sorted((r.case.operation, r.case.group, bool(r.checks)) for r in gloo) == [
        (operation, group, True)
        for operation in ("all_gather", "all_reduce", "broadcast", "send_recv")
        for group in ("cross", "host", "world")
    ]
    sizes = {r.case.group: (r.case.world_size, r.case.ranks_per_host, r.case.groups) for r in gloo}
    assert sizes == {"host": (2, (2,), 2), "cross": (2, (1, 1), 2), "world": (4, (2, 2), 1)}
    wrong = {
        (r.case.backend, r.case.operation, r.case.group, w.rank)
        for r in run.results
        for w in r.wrong
    }
    frozen.facts({"exit": done.returncode, "wrong": sorted(wrong)})
    assert "rank 3 got" in done.stdout


def test_a_rank_in_no_group_waits_and_does_not_count(
    frozen: Frozen, bench: Hosts, ranks: RankPool, tmp_path: Path
) -> None:
    """Of hosts with 2 and 1 ranks, the first of each work between hosts, and the samples are
    theirs; groups inside hosts would be unequal, so these are skipped, with the reason."""
    done = sweep(
        bench, ranks, tmp_path, [{}, {}, {}], "--op", "all_reduce", "--groups", "host,cross",
        "--case-time", "0.01", "--backend", "gloo", "--sync", "p2p_barrier",
    )  # fmt: skip
    assert done.returncode == 0, done
    run = only_run(tmp_path)
    (skipped,) = (each for each in run.results if each.reason)
    assert (skipped.case.group, skipped.case.operation) == ("host", "all_reduce")
    frozen.text(skipped.reason or "")
    (cross,) = (each for each in run.results if each.summary)
    assert (cross.case.world_size, cross.case.groups) == (2, 1)
    assert cross.limit is not None
    frozen.text(cross.limit.source)
    samples = store.read_samples(next(path for path in tmp_path.iterdir() if path.is_dir()))
    assert set(samples["rank"]) == {0, 2}


def test_an_interface_that_does_not_do_is_refused(
    frozen: Frozen, bench: Hosts, ranks: RankPool, tmp_path: Path
) -> None:
    """GLOO_SOCKET_IFNAME names loopback on one host: exit code 2, and one sentence with the host
    and what to set."""
    frozen.text(refused(measure(bench, ranks, tmp_path, "eth0", "lo")))


def test_a_name_that_stands_for_loopback_is_refused(
    frozen: Frozen, bench: Hosts, ranks: RankPool, tmp_path: Path
) -> None:
    """As Debian writes /etc/hosts: the host's own name is 127.0.1.1 there."""
    names = bench[1].etc / "hosts"
    before = names.read_text()
    try:
        names.write_text(before.replace(bench[1].address, "127.0.1.1"))
        sentence = refused(measure(bench, ranks, tmp_path))
    finally:
        names.write_text(before)
    frozen.text(sentence)


def test_the_bound_of_the_clocks_holds_between_hosts(
    bench: Hosts, ranks: RankPool, tmp_path: Path
) -> None:
    """All hosts here read one clock: told that host2 has another, the ranks find over its link that
    it is ahead by 0, within their bound; so before the sweep as after its case."""
    done = sweep(
        bench, ranks, tmp_path, [{}, {}, {"AHEAD_NS": "0"}], "--import", "shifted_clock",
        "--op", "all_reduce", "--sizes", "4M", "--case-time", "0.1", "--backend", "gloo",
        "--peak-bandwidth", "100",
    )  # fmt: skip
    assert done.returncode == 0, done
    run = only_run(tmp_path)
    (found,) = run.launches[0].offsets
    assert (found.host, found.ranks) == ("host2", (2,))
    assert abs(found.seconds) <= found.bound_seconds
    assert run.results[0].clock_off_seconds
