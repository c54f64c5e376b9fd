"""Simulated hosts on this machine: network namespaces on a switch, with links of a known rate.

    with Hosts(2, rate=1e9) as bench:                                 # bits per second
        outcomes = bench.run({0: ["ip", "addr"], 1: ["false"]})       # one command per host
        outcomes = bench.torchrun("-m", "ddpbench.collectives", ranks=(2, 1))
        pool = bench.pool((2, 1))                                     # ranks of the tests

Tests use the fixture `hosts`: it takes the arguments of `Hosts`. Where this machine cannot have
such hosts it skips the test with the reason; in CI the test fails.

`missing` returns why such hosts cannot exist here. A host has a name (`bench[0].name`, "host1")
that the other hosts can resolve, an address and one interface, eth0. It shares files and CPUs with
this machine.

A rate is that of an Ethernet link and includes preamble, checksum and gap. So TCP over full frames
of 1500 bytes carries 94.15 % of it (`payload`). `rate` applies to both directions, either for all
hosts or one per host. `pairs` lowers it between two hosts: {(0, 1): 1e8}; `sends` lowers what a
host sends, not what it receives: {2: 7e7}. Leaving the `with` block removes everything. If a
process was killed, the next bench removes what it left behind.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil
from command_lines import clean_environment
from patience import PATIENCE_SECONDS
from rank_pool import Done, RankPool, start_rank

PREFIX = "ddpbench-"  # of namespaces; the pid of their owner follows
ETC = Path("/etc/netns")
FRAME, COUNTED, DATA = 1538, 1514, 1448  # bytes of a full frame: on the wire, for tc, for TCP
UNSHAPED = 40e9
# A link sends one burst at full speed after a pause. A larger burst would let short messages pass
# too fast and hide pauses that a real link cannot make up for. A smaller one would lose the time by
# which the kernel's timers are late. It must hold two frames.
BURST_SECONDS, BURST_NBYTES = 50e-6, 3100
QUEUE_SECONDS = 0.02
PORT = 29_500
# The rate must show the link, not TCP's search for its limit: bbr keeps probing for more.
STEADY_TCP = (
    "cd /proc/sys/net/ipv4; echo reno >tcp_congestion_control; echo 0 >tcp_slow_start_after_idle"
)
# Run it in a namespace of host names (`unshare --uts`), or it renames this machine.
RENAMED = 'hostname "$0" && exec "$@"'
_numbers = itertools.count()


def payload(rate: float) -> float:
    """Return the bytes per second that TCP can carry over Ethernet of `rate` bits per second."""
    return rate / 8 * DATA / FRAME


def missing() -> str | None:
    """Return the reason why hosts cannot be simulated here; None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc", "unshare", "hostname"):
        if shutil.which(tool) is None:
            return f"{tool} is not in PATH (Debian: iproute2, util-linux, hostname)"
    try:
        with Hosts(1, rate=1e9):
            return None
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"


@dataclass(frozen=True)
class Host:
    """A simulated host."""

    name: str
    namespace: str
    address: str

    @property
    def etc(self) -> Path:
        """The folder whose files (hosts, resolv.conf) replace those in /etc on this host."""
        return ETC / self.namespace


class Hosts:
    """Simulated hosts on one switch; a context manager."""

    def __init__(
        self,
        count: int,
        rate: float | Sequence[float] | None = None,
        pairs: Mapping[tuple[int, int], float] | None = None,
        sends: Mapping[int, float] | None = None,
    ) -> None:
        """rate, pairs, sends: in bits per second; None: no limit."""
        prefix = f"{PREFIX}{os.getpid()}-{next(_numbers)}-"
        self.switch = f"{prefix}switch"
        self.hosts = tuple(
            Host(f"host{n}", f"{prefix}{n}", f"10.77.0.{n}") for n in range(1, count + 1)
        )
        rates = rate if isinstance(rate, Sequence) else [rate] * count
        self.rates: list[float] = [rate or UNSHAPED for rate in rates]
        self.sends = sends or {}
        self.pairs = {frozenset(pair): rate for pair, rate in (pairs or {}).items()}
        self._started: list[subprocess.Popen[bytes]] = []

    def __getitem__(self, index: int) -> Host:
        return self.hosts[index]

    def __len__(self) -> int:
        return len(self.hosts)

    def __enter__(self) -> Hosts:
        try:
            self._create()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(
        self,
        host: int,
        command: Sequence[str],
        cwd: Path | None = None,
        out: IO[bytes] | int = subprocess.DEVNULL,
        err: IO[bytes] | int = subprocess.DEVNULL,
        **environ: str,
    ) -> subprocess.Popen[bytes]:
        """Start a process that runs on a host until `close`."""
        process = subprocess.Popen(
            [*self.into(host), *command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            cwd=cwd,
            env=clean_environment(**environ),
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def run(
        self,
        command: Sequence[str] | Mapping[int, Sequence[str]],
        cwd: Path | None = None,
        seconds: float = PATIENCE_SECONDS,
        **environ: str,
    ) -> list[Done]:
        """Run a command on all hosts at once, or one per host; return the outcomes in this order.

        Raises TimeoutError with their output if one runs longer than `seconds`. No process stays.
        """
        if not isinstance(command, Mapping):
            command = dict.fromkeys(range(len(self)), command)
        deadline = time.monotonic() + seconds
        with contextlib.ExitStack() as files:
            running = []
            for host, arguments in command.items():
                out, err = (files.enter_context(tempfile.TemporaryFile()) for _ in range(2))
                process = self.start(host, arguments, cwd, out, err, **environ)
                running.append((process, out, err))
            try:
                for process, *_ in running:
                    process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired as late:
                outcomes = [_read_outcome(*row) for row in running]
                raise TimeoutError(f"{late.cmd} not done in {seconds:g} s: {outcomes}") from None
            finally:
                for process, *_ in running:
                    _kill_tree(process)
            return [_read_outcome(*row) for row in running]

    def torchrun(
        self,
        *arguments: str,
        ranks: Sequence[int],
        cwd: Path | None = None,
        seconds: float = PATIENCE_SECONDS,
        **environ: str,
    ) -> list[Done]:
        """Run torchrun on the first hosts, with ranks[i] ranks on host i; host 0 is the master."""
        shared = ["--nnodes", str(len(ranks)), "--master-addr", self[0].address]
        shared += ["--master-port", str(PORT)]
        torchrun = [sys.executable, "-m", "torch.distributed.run", *shared]
        commands = {
            host: [*torchrun, f"--node-rank={host}", f"--nproc-per-node={count}", *arguments]
            for host, count in enumerate(ranks)
        }
        return self.run(commands, cwd, seconds, **environ)

    def pool(self, ranks: Sequence[int]) -> RankPool:
        """Return a pool of rank processes, `ranks[i]` of them on host i; use `ask`, not `call`."""
        placed = [host for host, count in enumerate(ranks) for _ in range(count)]
        return RankPool([start_rank(self.into(host)) for host in placed])

    def close(self) -> None:
        """End all processes on the hosts, and remove the hosts."""
        for process in self._started:
            _kill_tree(process)
        for namespace in (*(host.namespace for host in self.hosts), self.switch):
            _remove(namespace)

    def into(self, host: int) -> list[str]:
        """Return the start of a command line; it runs the command that follows on a host."""
        simulated = self[host]
        enter = ["ip", "netns", "exec", simulated.namespace, "unshare", "--uts"]
        return [*enter, "sh", "-c", RENAMED, simulated.name]

    def _create(self) -> None:
        """Create namespaces, cables, addresses and names; then set the rates."""
        _remove_left_behind()
        _sh("ip", "netns", "add", self.switch)
        _sh("ip", "-n", self.switch, "link", "add", "switch", "type", "bridge")
        _sh("ip", "-n", self.switch, "link", "set", "switch", "up")
        addresses = "".join(f"{host.address} {host.name}\n" for host in self.hosts)
        for index, host in enumerate(self.hosts):
            port, inside = f"port{index}", ("ip", "-n", host.namespace)
            _make_folder(host.etc)
            (host.etc / "hosts").write_text(f"127.0.0.1 localhost\n{addresses}")
            (host.etc / "resolv.conf").write_text("")  # no name server is asked
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
        """Limit the rate of a host at both ends of its cable, and of a pair at its senders."""
        host, rate = self[index], self.rates[index]
        sends = min(rate, self.sends.get(index, rate))
        lower_rates = {
            self[other].address: self.pairs[pair]
            for other in range(len(self))
            if (pair := frozenset((index, other))) in self.pairs
        }
        if rate != UNSHAPED:
            _shape(self.switch, f"port{index}", rate, {})
        if sends != UNSHAPED or lower_rates:
            _shape(host.namespace, "eth0", sends, lower_rates)


def _shape(namespace: str, interface: str, rate: float, lower_rates: Mapping[str, float]) -> None:
    """Limit the rate of an interface in bits per second, and lower it to some addresses.

    tc counts a frame without preamble, checksum and gap. It could add them, but only once for
    several frames that the kernel handles as one. So the rate is scaled for full frames instead.
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
    for number, (address, lower) in enumerate(lower_rates.items(), 3):
        add("1:1", number, min(lower, rate))
        tc(
            f"filter add dev {interface} parent 1: protocol ip u32 match ip dst {address}/32 "
            f"flowid 1:{number}"
        )


def _read_outcome(process: subprocess.Popen[bytes], *outputs: IO[bytes]) -> Done:
    texts = []
    for output in outputs:
        output.seek(0)
        texts.append(output.read().decode(errors="replace"))
    return Done(process.poll() or 0, *texts)


def _kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its descendants, in whatever process groups and sessions they are."""
    if process.poll() is None:
        with contextlib.suppress(psutil.Error):
            descendants = psutil.Process(process.pid).children(recursive=True)
            for descendant in descendants:
                with contextlib.suppress(psutil.Error):
                    descendant.kill()
            psutil.wait_procs(descendants, PATIENCE_SECONDS)
        process.kill()
        process.wait()


def _sh(*command: str) -> str:
    """Run a short command and return its stdout. Raises CalledProcessError if it fails."""
    done = subprocess.run(
        command, timeout=PATIENCE_SECONDS, check=True, capture_output=True, text=True
    )
    return done.stdout


def _make_folder(folder: Path) -> None:
    """Create a folder in ETC, which another process may remove meanwhile while it is empty."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            return folder.mkdir(parents=True)


def _remove(namespace: str) -> None:
    """Remove a namespace, and end the processes in it."""
    with contextlib.suppress(subprocess.CalledProcessError):
        for pid in _sh("ip", "netns", "pids", namespace).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _sh("ip", "netns", "del", namespace)
    shutil.rmtree(ETC / namespace, ignore_errors=True)
    with contextlib.suppress(OSError):
        ETC.rmdir()  # unless it holds files of others


def _remove_left_behind() -> None:
    """Remove the namespaces of processes that no longer exist."""
    names = {line.split()[0] for line in _sh("ip", "netns", "list").splitlines() if line}
    names |= {folder.name for folder in ETC.glob(f"{PREFIX}*")}
    for name in names:
        match = re.match(rf"{PREFIX}(\d+)-", name)
        if match and not Path(f"/proc/{match[1]}").exists():
            _remove(name)
