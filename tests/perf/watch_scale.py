"""What a watch costs as ranks and steps grow: messages, joins, memory and the store's bytes.

    ./run_bench.sh python tests/perf/watch_scale.py [WORLD_SIZE …]
    ./run_bench.sh python tests/perf/watch_scale.py growth [STEPS]

Eight ranks a host, in windows of STEPS steps and CALLS calls. One host is simulated rank by rank,
through the real encoding. The other hosts report the same under their own names to a real TCPStore
in a process of its own, from which rank 0 reads them and joins them. Each world runs in a fresh
process. join s, read s: CPU time of rank 0's process, once a round. hold: the longest CPU time in
ms in which another thread of rank 0 did not run meanwhile; the switch interval is 0.5 ms, so that
only calls in C hold the interpreter longer. memory MB: the most, above what the imports take.

growth: MB by which a host's leader and rank 0 together grow from a tenth of STEPS (100,000) to all
of them. It takes minutes.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import torch.distributed as dist
from ddpbench.watch.gather.host_reports import HostReports, Job
from ddpbench.watch.gather.mailbox import Mailbox
from ddpbench.watch.gather.matching import list_calls
from ddpbench.watch.gather.offsets import Line
from tabulate import tabulate

from ddpbench.watch.gather import host_reports, joining
from ddpbench.watch.judging.history import History
from ddpbench.watch.window import (
    CALLS,
    COLUMNS,
    STEPS,
    Call,
    Link,
    Window,
    decode,
    encode,
    make_window,
)

WORLDS = (8, 1024, 16384)
A_HOST, EPOCH, MS = 8, 1_700_000_000 * 10**9, 10**6
FACTS = [f"fact_{number}_seconds" for number in range(16)]
ROW = np.array([1, 10, 20, 3, 1, 5]) * 1e-3


def a_window(rank: int, first: int, noise: np.random.Generator) -> Window:
    """What a rank sends; it makes four calls in each step."""
    rows = (ROW * noise.normal(1, 0.02, (STEPS, COLUMNS))).astype(np.float32)
    numbers = range(4 * (first + STEPS) - CALLS, 4 * (first + STEPS))
    calls = [
        Call(
            "world", number, "all_reduce", 25 * MS, EPOCH + number * 10 * MS + rank, number // 4
        )
        for number in numbers
    ]  # fmt: skip
    facts = dict.fromkeys(FACTS, 0.125)
    links = [Link("host", f"10.0.0.{n}", "eth0", 10**8, 1.5, 1e-4, 0) for n in range(2)]
    ended_ns = EPOCH + first * 40 * MS
    return make_window(rank, first, rows, ended_ns, calls, facts=facts, links=links)


def as_other(host: Window, number: int) -> Window:
    """The same window as another host would send it."""
    calls, name = host.calls.copy(), f"host{number}"
    calls["last_rank"] += A_HOST * number
    calls["last_ns"] += number
    return msgspec.structs.replace(
        host,
        hosts={name: [rank + A_HOST * number for rank in host.ranks]},
        medians={name: host.medians["host0"]},
        host_facts={name: host.host_facts["host0"]},
        rows={rank + A_HOST * number: row for rank, row in host.rows.items()},
        facts={rank + A_HOST * number: fact for rank, fact in host.facts.items()},
        calls=calls,
        addresses=[f"10.{number >> 8}.{number & 255}.1"],
    )


class Holds:
    """The longest time that the process ran without another thread getting its turn, in ms.

    In CPU time of the process: what other processes take does not count.
    """

    def __enter__(self) -> Holds:
        self.longest, self._stop = 0.0, threading.Event()
        sys.setswitchinterval(0.0005)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        latest = time.process_time()
        while not self._stop.is_set():
            time.sleep(0.0002)
            now = time.process_time()
            self.longest = max(self.longest, (now - latest) * 1e3)
            latest = now


@contextlib.contextmanager
def a_store() -> Iterator[tuple[dist.Store, psutil.Process]]:
    """A TCPStore in a process of its own, and that process."""
    code = (
        "import torch.distributed as dist, sys\n"
        "store = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\n"
        "print(store.port, flush=True); sys.stdin.read()"
    )
    server = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    port = int(server.stdout.readline())
    yield dist.TCPStore("127.0.0.1", port, is_master=False), psutil.Process(server.pid)
    server.kill()
    server.wait()


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """What a function returns, and the CPU seconds of this process that it took."""
    began = time.process_time()
    value = function()
    return value, time.process_time() - began


def measure_growth(steps: int) -> float:
    """MB by which the mailboxes and rank 0's history grow over nine tenths of the steps."""
    noise = np.random.default_rng(2)
    leader, member = Mailbox(os.urandom(16), 2), None
    leader.lead()
    member, history = Mailbox(leader.token, 2), History()
    sizes = []
    for number, first in enumerate(range(0, steps + STEPS, STEPS)):
        member.send(number, a_window(1, first, noise))
        windows = leader.collect(number, a_window(0, first, noise), 0)
        assert len(windows) == 2
        host = joining.join_ranks(windows, "host0")
        assert host is not None
        round_ = joining.join_hosts([host])
        assert round_ is not None
        history.add(round_)
        if number in (steps // 10 // STEPS, steps // STEPS):
            sizes.append(psutil.Process().memory_info().rss)
    return (sizes[1] - sizes[0]) / 1e6


def measure(world: int) -> dict[str, float]:
    """One round of a world, as rank 0 sees it."""
    noise = np.random.default_rng(1)
    windows = [a_window(rank, 1_000_000, noise) for rank in range(A_HOST)]
    messages = [encode(window) for window in windows]
    decoded = [decode(message) for message in messages]
    clock = Line(0.0, 50_000.0)
    host, host_seconds = timed(lambda: joining.join_ranks(decoded, "host0", ["10.0.0.1"], clock))
    message = encode(host)
    hosts = world // A_HOST
    with a_store() as (store, server):
        reports = HostReports(store, "watch")
        reports.publish_job(Job(b"t" * 16))
        for number in range(1, hosts):
            reports.slot = -1
            reports.publish(f"host{number}", 7, as_other(host, number), A_HOST)
            assert reports.slot >= 0
        keys = store.num_keys()
        if hosts > 1:
            reports.slot = -1
            reports.publish("host1", 7, as_other(host, 1), A_HOST)
        assert store.num_keys() == keys
        server_bytes = server.memory_info().rss
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with Holds() as reading:
            began = time.perf_counter()
            others, read_seconds = timed(lambda: reports.read(7, 60.0))
            wall = time.perf_counter() - began
        with Holds() as holds:
            round_, join_seconds = timed(lambda: joining.join_hosts([host, *others]))
        with Holds() as adding:
            history = History()
            _, add_seconds = timed(lambda: history.add(round_, list_calls(round_)))
        assert sum(map(len, round_.hosts.values())) == world
        assert round_.calls["ranks"][-1] == world
        reports.close()
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "rank kB": len(messages[0]) / 1e3,
        "host kB": len(message) / 1e3,
        "host join s": host_seconds,
        "store MB a round": len(message) * (hosts - 1) / 1e6,
        "store's rss MB": server_bytes / 1e6,
        "every": -(-hosts // host_reports.HOSTS),
        "read s": read_seconds,
        "read wall s": wall,
        "read hold": reading.longest,
        "join s": join_seconds,
        "join hold": holds.longest,
        "history s": add_seconds,
        "history hold": adding.longest,
        "memory MB": (after - before) * 1024 / 1e6,
    }


def main(words: list[str]) -> int:
    """Print a row per world."""
    if words[:1] == ["--one"]:
        print(json.dumps(measure(int(words[1]))))
        return 0
    if words[:1] == ["growth"]:
        steps = int((*words, "100000")[1])
        print(f"growth to {steps} steps: {measure_growth(steps):.1f} MB")
        return 0
    rows = []
    for world in map(int, words or map(str, WORLDS)):
        command = [sys.executable, str(Path(__file__)), "--one", str(world)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        rows.append({"ranks": world, **json.loads(done.stdout)})
    columns = [[name, *(row[name] for row in rows)] for name in rows[0]]
    print(tabulate(columns, floatfmt=".4g"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
