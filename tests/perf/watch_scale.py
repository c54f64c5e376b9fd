"""Measure what a watch costs rank 0 as ranks grow: messages, joins and memory.

    ./run_bench.sh python tests/perf/watch_scale.py [WORLD_SIZE …]

Eight ranks per host, in windows of STEPS steps and CALLS calls. One host is simulated rank by rank,
through the real encoding. The other hosts send the same under their own names from another process
to the inbox of rank 0, which joins them. Each world runs in a fresh process. join s, receive s: CPU
time of rank 0's process, once per round. memory MB: the most, above what the imports take.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
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


def make_window(rank: int, first: int, noise: np.random.Generator, steps: int = STEPS) -> Window:
    """Return what a rank sends; it makes four calls in each step."""
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


def rename_host(host: Window, number: int) -> Window:
    """Return the same window as another host would send it."""
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


def send_hosts(target: tuple[str, int], host: Window, hosts: int) -> None:
    """Send the windows of all hosts but the first, as their leaders do."""
    for number in range(1, hosts):
        window = rename_host(host, number)
        with open_connection(target) as connection:
            ask_ahead(connection, TOKEN, QUESTIONS, time.time_ns)
            send(connection, window)


def measure_cpu(function: Callable[[], Any]) -> tuple[Any, float]:
    """Return a function's result and the CPU seconds of this process."""
    began = time.process_time()
    value = function()
    return value, time.process_time() - began


def measure(world: int) -> dict[str, float]:
    """Return the costs of one round of a world in rank 0."""
    noise = np.random.default_rng(1)
    steps = max(1, min(STEPS, ROWS // world))
    windows = [make_window(rank, 1_000_000, noise, steps) for rank in range(A_HOST)]
    messages = [encode(window) for window in windows]
    decoded = [decode(message) for message in messages]
    host, host_seconds = measure_cpu(lambda: joining.join_ranks(decoded, ["10.0.0.1"], 50_000))
    message, hosts = encode(host), world // A_HOST
    server = socket.create_server(("127.0.0.1", 0), backlog=1024)
    target, inbox = server.getsockname(), Inbox(server, TOKEN, time.time_ns)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sender = multiprocessing.get_context("fork").Process(
        target=send_hosts, args=(target, host, hosts)
    )
    sender.start()
    began = time.perf_counter()
    others, receive_seconds = measure_cpu(lambda: inbox.collect(7, world - A_HOST, 600.0))
    wall = time.perf_counter() - began
    sender.join()
    round_, join_seconds = measure_cpu(lambda: joining.join_hosts([host, *others]))
    history = History()
    _, add_seconds = measure_cpu(lambda: history.add(round_))
    _, judge_seconds = measure_cpu(lambda: judge(history, world))
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
        "join s": join_seconds,
        "history s": add_seconds,
        "judge s": judge_seconds,
        "memory MB": (after - before) * 1024 / 1e6,
    }


def main(words: list[str]) -> int:
    """Print a row per world."""
    if words[:1] == ["--one"]:
        print(json.dumps(measure(int(words[1]))))
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
