"""A bench of hosts on this machine: network namespaces on a switch, with links of a known rate.

    with Hosts(2, rate=1e9) as bench:                                 # bits a second
        done = bench.run(["hostname"])                                # the same in all hosts
        done = bench.run({0: ["ip", "addr"], 1: ["false"]})           # or each its own words
        assert [each.returncode for each in done] == [0, 1]
        done = bench.torchrun("-m", "ddpbench.collectives", ranks=(2, 1))
        daemon = bench.start(1, ["slurmd", "-D"])                     # stays until the end

`missing` says why there can be no such hosts here. A host has a name (`bench[0].name`, "host1"), by
which the others find it, an address, the one interface eth0, files and CPUs of this machine.

A rate is that of an Ethernet link: preamble, checksum and gap count, so that TCP over full frames
of 1500 bytes carries 94.15 % of it (`payload`). `rate` is one for all hosts or one each, of both
directions; `pairs` makes it less between two: {(0, 1): 1e8}. All ends with the `with`, whatever
happened in it; what a killed process left behind, the next bench removes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from ddpbench.launch import processes
from ddpbench.selftest.ranks import Done, environment

MINE = "ddpbench-"  # followed by the pid: whose namespace it is
ETC = Path("/etc/netns")
FRAME, COUNTED, DATA = 1538, 1514, 1448  # of a full frame: on the wire, as tc sees it, TCP's share
UNSHAPED = 40e9
# At once after a pause. More would hide pauses that a real link cannot make good, and let a short
# message pass too fast; less loses what the kernel's timers are late by. Two frames at least.
BURST_SECONDS, BURST_NBYTES = 50e-6, 3100
QUEUE_SECONDS = 0.02
PORT = 29_500
# What the link carries is to be seen, not how TCP finds it out: bbr probes for more all the time.
STEADY_TCP = (
    "cd /proc/sys/net/ipv4; echo reno >tcp_congestion_control; echo 0 >tcp_slow_start_after_idle"
)
NAMED = 'hostname "$0" && exec "$@"'  # in a namespace of host names, else this machine is renamed
_numbers = itertools.count()


def payload(rate: float) -> float:
    """Bytes a second that TCP can carry over Ethernet of this rate, in bits a second."""
    return rate / 8 * DATA / FRAME


def missing() -> str | None:
    """Why there can be no bench here; None where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc", "unshare", "hostname"):
        if shutil.which(tool) is None:
            return f"there is no {tool} in PATH (Debian: iproute2, util-linux, hostname)"
    try:
        with Hosts(1, rate=1e9):
            return None
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"


@dataclass(frozen=True)
class Host:
    """One host of a bench."""

    name: str
    namespace: str
    address: str

    @property
    def etc(self) -> Path:
        """The folder whose files stand in place of /etc's in this host: hosts, resolv.conf."""
        return ETC / self.namespace


class Hosts:
    """Some hosts on one switch; a context manager."""

    environment = staticmethod(environment)  # of what runs in a host, by what is added to it

    def __init__(
        self,
        count: int,
        rate: float | Sequence[float] | None = None,
        pairs: Mapping[tuple[int, int], float] | None = None,
    ) -> None:
        """rate, pairs: in bits a second; None: nothing is shaped."""
        own = f"{MINE}{os.getpid()}-{next(_numbers)}-"
        self.switch = f"{own}switch"
        self.hosts = tuple(
            Host(f"host{n}", f"{own}{n}", f"10.77.0.{n}") for n in range(1, count + 1)
        )
        rates = rate if isinstance(rate, Sequence) else [rate] * count
        self.rates: list[float] = [each or UNSHAPED for each in rates]
        self.pairs = {frozenset(pair): less for pair, less in (pairs or {}).items()}
        self._started: list[subprocess.Popen[bytes]] = []

    def __getitem__(self, index: int) -> Host:
        return self.hosts[index]

    def __len__(self) -> int:
        return len(self.hosts)

    def __enter__(self) -> Hosts:
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def start(
        self, host: int, words: Sequence[str], cwd: Path | None = None, **environ: str
    ) -> subprocess.Popen[bytes]:
        """A process that stays in a host; what it prints is lost, so let it write a log."""
        return self._popen(host, words, cwd=cwd, environ=environ, out=None, err=None)

    def run(
        self,
        words: Sequence[str] | Mapping[int, Sequence[str]],
        cwd: Path | None = None,
        seconds: float = 60.0,
        **environ: str,
    ) -> list[Done]:
        """Run words in all hosts at once, or in some each its own; how each ended, in their order.

        Raises TimeoutError, with what was printed, when one has not ended in time; none stays.
        """
        each = words if isinstance(words, Mapping) else dict.fromkeys(range(len(self)), words)
        until = time.monotonic() + seconds
        with contextlib.ExitStack() as files:
            running = []
            for host, its in each.items():
                out, err = (files.enter_context(tempfile.TemporaryFile()) for _ in range(2))
                process = self._popen(host, its, cwd=cwd, environ=environ, out=out, err=err)
                running.append((process, out, err))

            def ended() -> list[Done]:
                done = []
                for process, *outputs in running:
                    for output in outputs:
                        output.seek(0)
                    texts = [output.read().decode(errors="replace") for output in outputs]
                    done.append(Done(process.poll() or 0, *texts))
                return done

            try:
                for process, *_ in running:
                    process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired as late:
                raise TimeoutError(f"{late.cmd} not done in {seconds:g} s: {ended()}") from None
            finally:
                for process, *_ in running:
                    processes.kill_tree(process)
            return ended()

    def torchrun(
        self,
        *words: str,
        ranks: Sequence[int],
        cwd: Path | None = None,
        seconds: float = 60.0,
        **environ: str,
    ) -> list[Done]:
        """torchrun in the first hosts, with as many ranks as `ranks` says, the first the master."""
        each = {
            host: [
                sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(ranks)),
                "--node-rank", str(host), "--nproc-per-node", str(count),
                "--master-addr", self[0].address, "--master-port", str(PORT), *words,
            ]
            for host, count in enumerate(ranks)
        }  # fmt: skip
        return self.run(each, cwd, seconds, **environ)

    def inside(self, host: int, *words: str) -> str:
        """What a short command prints in a host: `inside(0, "ip", "addr", "add", …)`."""
        return _sh("ip", "netns", "exec", self[host].namespace, *words)

    def pids(self, host: int) -> list[int]:
        """What runs in a host."""
        return _pids(self[host].namespace)

    def close(self) -> None:
        """End all processes in the hosts, and the hosts."""
        for process in self._started:
            processes.kill_tree(process)
        for namespace in (*(host.namespace for host in self.hosts), self.switch):
            _remove(namespace)

    def _popen(
        self,
        host: int,
        words: Sequence[str],
        *,
        cwd: Path | None,
        environ: Mapping[str, str],
        out: IO[bytes] | None,
        err: IO[bytes] | None,
    ) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [*self.into(host), *words],
            stdin=subprocess.DEVNULL,
            stdout=out or subprocess.DEVNULL,
            stderr=err or subprocess.DEVNULL,
            cwd=cwd,
            env=self.environment(**environ),
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def into(self, host: int) -> list[str]:
        """What runs the words behind it in a host."""
        its = self[host]
        enter = ["ip", "netns", "exec", its.namespace, "unshare", "--uts"]
        return [*enter, "sh", "-c", NAMED, its.name]

    def _make(self) -> None:
        """Namespaces, cables, addresses, names; then the rates."""
        _remove_left_behind()
        _sh("ip", "netns", "add", self.switch)
        _sh("ip", "-n", self.switch, "link", "add", "switch", "type", "bridge")
        _sh("ip", "-n", self.switch, "link", "set", "switch", "up")
        known = "".join(f"{host.address} {host.name}\n" for host in self.hosts)
        for index, host in enumerate(self.hosts):
            port, inside = f"port{index}", ("ip", "-n", host.namespace)
            host.etc.mkdir(parents=True)
            (host.etc / "hosts").write_text(f"127.0.0.1 localhost\n{known}")
            (host.etc / "resolv.conf").write_text("")  # a name that is not there is not asked for
            _sh("ip", "netns", "add", host.namespace)
            _sh(*inside, "link", "add", "eth0", "type", "veth", "peer", port, "netns", self.switch)
            _sh("ip", "-n", self.switch, "link", "set", port, "master", "switch", "up")
            _sh(*inside, "addr", "add", f"{host.address}/24", "dev", "eth0")
            for name in ("lo", "eth0"):
                _sh(*inside, "link", "set", name, "up")
            _sh("ip", "netns", "exec", host.namespace, "sh", "-c", STEADY_TCP)
        for index in range(len(self)):
            self._shape(index)

    def _shape(self, index: int) -> None:
        """The rate of a host at both ends of its cable; that of a pair where each of it sends."""
        host, rate = self[index], self.rates[index]
        less = {
            other: self.pairs[pair]
            for other in range(len(self))
            if (pair := frozenset((index, other))) in self.pairs
        }
        if rate != UNSHAPED or less:
            _shape(self.switch, f"port{index}", rate, {})
            _shape(host.namespace, "eth0", rate, {self[to].address: r for to, r in less.items()})


def _shape(namespace: str, interface: str, rate: float, less: Mapping[str, float]) -> None:
    """Limit the rate of an interface, and further that to some addresses; in bits per second.

    tc counts a frame without preamble, checksum and gap, and adding them counts once for many
    frames that the kernel handles as one: so the rate is what full frames leave of it.
    """

    def tc(command: str) -> None:
        _sh("tc", "-n", namespace, *command.split())

    def add(parent: str, number: int, bits: float) -> None:
        burst = max(BURST_NBYTES, round(bits / 8 * BURST_SECONDS))
        limit = max(128_000, round(bits / 8 * QUEUE_SECONDS))
        bits = round(bits * COUNTED / FRAME)
        tc(
            f"class add dev {interface} parent {parent} classid 1:{number} htb rate {bits}bit "
            f"ceil {bits}bit burst {burst} cburst {burst} quantum 60000"
        )
        if number > 1:
            tc(f"qdisc add dev {interface} parent 1:{number} bfifo limit {limit}")

    tc(f"qdisc add dev {interface} root handle 1: htb default 2")
    add("1:", 1, rate)
    add("1:1", 2, rate)
    for number, (address, lower) in enumerate(less.items(), 3):
        add("1:1", number, min(lower, rate))
        tc(
            f"filter add dev {interface} parent 1: protocol ip u32 match ip dst {address}/32 "
            f"flowid 1:{number}"
        )


def _sh(*words: str) -> str:
    """What a short command prints. Raises CalledProcessError, with its words, where it fails."""
    done = subprocess.run(words, timeout=20, check=True, capture_output=True, text=True)
    return done.stdout


def _pids(namespace: str) -> list[int]:
    return [int(pid) for pid in _sh("ip", "netns", "pids", namespace).split()]


def _remove(namespace: str) -> None:
    """A namespace with all that runs in it."""
    with contextlib.suppress(subprocess.CalledProcessError):
        for pid in _pids(namespace):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _sh("ip", "netns", "del", namespace)
    shutil.rmtree(ETC / namespace, ignore_errors=True)
    with contextlib.suppress(OSError):
        ETC.rmdir()  # where nobody else has files there


def _remove_left_behind() -> None:
    """The namespaces of processes that no longer live."""
    for name in _left_behind():
        _remove(name)


def _left_behind() -> Iterator[str]:
    names = {line.split()[0] for line in _sh("ip", "netns", "list").splitlines() if line}
    names |= {folder.name for folder in ETC.glob(f"{MINE}*")}
    for name in names:
        match = re.match(rf"{MINE}(\d+)-", name)
        if match and not Path(f"/proc/{match[1]}").exists():
            yield name
