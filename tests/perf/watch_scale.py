"""What a watch costs as ranks and steps grow: messages, joins and memory.

    ./run_bench.sh python tests/perf/watch_scale.py [WORLD_SIZE …]
    ./run_bench.sh python tests/perf/watch_scale.py growth [STEPS]

Eight ranks a host, in windows of STEPS steps and CALLS calls. One host is simulated rank by rank,
through the real encoding. The other hosts send the same under their own names from a process of
their own to the inbox of rank 0, which joins them. Each world runs in a fresh process. join s,
receive s: CPU time of rank 0's process, once a round. hold: the longest CPU time in
ms in which another thread of rank 0 did not run meanwhile; the switch interval is 0.5 ms, so that
only calls in C hold the interpreter longer. memory MB: the most, above what the imports take.

growth: MB by which rank 0 grows from a tenth of STEPS (100,000) to all of them. It takes minutes.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
from tabulate import tabulate

from ddpbench.measure.offsets import ask_ahead
from ddpbench.watch.gather import joining
from ddpbench.watch.gather.transport import (
    QUESTIONS,
    TOKEN_NBYTES,
    Inbox,
    open_connection,
    send,
)
from ddpbench.watch.judging.history import History
from ddpbench.watch.judging.judge import judge
from ddpbench.watch.window import (
    CALLS,
    COLUMNS,
    LINES,
    ROWS,
    STEPS,
    JoinedCall,
    Link,
    Window,
    decode,
    encode,
)

WORLDS = (8, 1024, 16384)
A_HOST, EPOCH, MS = 8, 1_700_000_000 * 10**9, 10**6
FACTS = [f"fact_{number}_seconds" for number in range(16)]
TOKEN = b"t" * TOKEN_NBYTES
ROW = np.array([1, 10, 20, 3, 1, 5]) * 1e-3


def a_window(rank: int, first: int, noise: np.random.Generator, steps: int = STEPS) -> Window:
    """What a rank sends; it makes four calls in each step."""
    rows = (ROW * noise.normal(1, 0.02, (steps, COLUMNS))).astype(np.float32)
    numbers = range(4 * (first + steps) - CALLS, 4 * (first + steps))
    calls = []
    for number in numbers:
        ns = EPOCH + number * 10 * MS + rank
        calls.append(
            JoinedCall("world", number, "all_reduce", 25 * MS, number // 4, ns, 0, ns, rank)
        )
    facts = dict.fromkeys(FACTS, 0.125)
    links = [Link("host0", f"10.0.0.{n}", "eth0", 10**8, 1.5, 1e-4, 0) for n in range(2)]
    ended_ns = EPOCH + first * 40 * MS
    lines = {f"train.py:{n} a_function_of_the_model": 0.01 for n in range(LINES)}
    return Window(
        number=7,
        hosts={"host0": [rank]},
        ended_ns=ended_ns,
        first_step=first,
        rows={rank: rows},
        calls=calls,
        facts={rank: facts},
        links=links,
        lines={rank: lines},
    )


def as_other(host: Window, number: int) -> Window:
    """The same window as another host would send it."""
    name = f"host{number}"
    calls = [
        msgspec.structs.replace(
            call, last_rank=call.last_rank + A_HOST * number, last_ns=call.last_ns + number
        )
        for call in host.calls
    ]
    return msgspec.structs.replace(
        host,
        hosts={name: [rank + A_HOST * number for rank in host.ranks]},
        rows={rank + A_HOST * number: row for rank, row in host.rows.items()},
        facts={rank + A_HOST * number: fact for rank, fact in host.facts.items()},
        lines={rank + A_HOST * number: lines for rank, lines in host.lines.items()},
        calls=calls,
        addresses={name: [f"10.{number >> 8}.{number & 255}.1"]},
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


def send_hosts(target: tuple[str, int], host: Window, hosts: int) -> None:
    """Send the windows of all hosts but the first, as their leaders do."""
    for number in range(1, hosts):
        window = as_other(host, number)
        with open_connection(target) as connection:
            ask_ahead(connection, TOKEN, QUESTIONS, time.time_ns)
            send(connection, window)


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """What a function returns, and the CPU seconds of this process that it took."""
    began = time.process_time()
    value = function()
    return value, time.process_time() - began


def measure_growth(steps: int) -> float:
    """MB by which rank 0's history grows over nine tenths of the steps."""
    noise = np.random.default_rng(2)
    history, sizes = History(), []
    for number, first in enumerate(range(0, steps + STEPS, STEPS)):
        windows = [decode(encode(a_window(rank, first, noise))) for rank in range(2)]
        history.add(joining.join_hosts([joining.join_ranks(windows, [], 0)]))
        if number in (steps // 10 // STEPS, steps // STEPS):
            sizes.append(psutil.Process().memory_info().rss)
    return (sizes[1] - sizes[0]) / 1e6


def measure(world: int) -> dict[str, float]:
    """One round of a world, as rank 0 sees it."""
    noise = np.random.default_rng(1)
    steps = max(1, min(STEPS, ROWS // world))
    windows = [a_window(rank, 1_000_000, noise, steps) for rank in range(A_HOST)]
    messages = [encode(window) for window in windows]
    decoded = [decode(message) for message in messages]
    host, host_seconds = timed(lambda: joining.join_ranks(decoded, ["10.0.0.1"], 50_000))
    message, hosts = encode(host), world // A_HOST
    server = socket.create_server(("127.0.0.1", 0), backlog=1024)
    target, inbox = server.getsockname(), Inbox(server, TOKEN, time.time_ns)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with Holds() as receiving:
        sender = multiprocessing.get_context("fork").Process(
            target=send_hosts, args=(target, host, hosts)
        )
        sender.start()
        began = time.perf_counter()
        others, receive_seconds = timed(lambda: inbox.collect(7, world - A_HOST, 600.0))
        wall = time.perf_counter() - began
        sender.join()
    with Holds() as holds:
        round_, join_seconds = timed(lambda: joining.join_hosts([host, *others]))
    with Holds() as adding:
        history = History()
        _, add_seconds = timed(lambda: history.add(round_))
    _, judge_seconds = timed(lambda: judge(history, world))
    assert sum(map(len, round_.hosts.values())) == world
    assert round_.calls[-1].ranks == world
    inbox.close()
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "rank kB": len(messages[0]) / 1e3,
        "host kB": len(message) / 1e3,
        "host join s": host_seconds,
        "MB a round": len(message) * (hosts - 1) / 1e6,
        "receive s": receive_seconds,
        "receive wall s": wall,
        "receive hold": receiving.longest,
        "join s": join_seconds,
        "join hold": holds.longest,
        "history s": add_seconds,
        "history hold": adding.longest,
        "judge s": judge_seconds,
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
