"""Measure what a watch costs rank 0 as ranks grow: messages, joins and memory.

    ./run_bench.sh python tests/perf/watch_scale.py [WORLD_SIZE …]

Eight ranks per host send windows of as many steps and calls as fit in a round, from a process of
their own, to the inbox of rank 0, which joins and judges them. Each world runs in a fresh process.
join s, receive s: CPU time of rank 0's process, once per round. memory MB: the most, above what the
imports take.
"""

from __future__ import annotations

import multiprocessing
import resource
import socket
import time

import numpy as np
from scale import print_worlds

from ddpbench.watch.judging.history import History
from ddpbench.watch.judging.judge import judge
from ddpbench.watch.transport import TOKEN_NBYTES, Inbox, connect, send
from ddpbench.watch.window import (
    CALLS,
    COLUMNS,
    LINES,
    MOST_CALLS,
    ROWS,
    STEPS,
    JoinedCall,
    Link,
    Window,
    encode,
    join,
)

WORLDS = (8, 1024, 16384)
A_HOST, EPOCH, MS = 8, 1_700_000_000 * 10**9, 10**6
FACTS = [f"fact_{number}_seconds" for number in range(16)]
TOKEN = b"t" * TOKEN_NBYTES
ROW = np.array([1, 10, 20, 3, 1, 5]) * 1e-3


def make_window(rank: int, first: int, noise: np.random.Generator, world: int) -> Window:
    """Return what a rank sends; it makes four calls in each step."""
    steps, most = max(1, min(STEPS, ROWS // world)), max(1, min(CALLS, MOST_CALLS // world))
    rows = (ROW * noise.normal(1, 0.02, (steps, COLUMNS))).astype(np.float32)
    calls = []
    for number in range(4 * (first + steps) - most, 4 * (first + steps)):
        ns = EPOCH + number * 10 * MS + rank
        calls.append(
            JoinedCall("world", number, "all_reduce", 25 * MS, number // 4, ns, 0, ns, rank)
        )
    host = rank // A_HOST
    return Window(
        number=7,
        hosts={f"host{host}": [rank]},
        ended_ns=EPOCH + first * 40 * MS,
        first_step=first,
        rows={rank: rows},
        calls=calls,
        facts={rank: dict.fromkeys(FACTS, 0.125)},
        links=[Link(f"host{host}", f"10.0.0.{n}", "eth0", 10**8, 1.5, 1e-4, 0) for n in range(2)],
        addresses=[f"10.{host >> 8}.{host & 255}.1"],
        lines={rank: {f"train.py:{n} a_function_of_the_model": 0.01 for n in range(LINES)}},
    )


def send_windows(target: tuple[str, int], world: int) -> None:
    """Send the windows of all ranks but rank 0."""
    noise = np.random.default_rng(1)
    for rank in range(1, world):
        with connect(target, TOKEN, time.time_ns) as (connection, _):
            send(connection, make_window(rank, 1_000_000, noise, world))


def measure(world: int) -> dict[str, float]:
    """One round of a world, as rank 0 sees it."""
    own = make_window(0, 1_000_000, np.random.default_rng(1), world)
    server = socket.create_server(("127.0.0.1", 0), backlog=1024)
    target, inbox = server.getsockname(), Inbox(server, TOKEN, time.time_ns)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sender = multiprocessing.get_context("fork").Process(target=send_windows, args=(target, world))
    sender.start()
    times = [time.process_time()]
    others = inbox.collect(7, world - 1, 600.0)
    times.append(time.process_time())
    sender.join()
    history = History()
    round_ = join([own, *others])
    times.append(time.process_time())
    history.add(round_)
    times.append(time.process_time())
    judge(history, world)
    times.append(time.process_time())
    assert len(round_.ranks) == world
    assert round_.calls[-1].ranks == world
    inbox.close()
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    parts = ("receive s", "join s", "history s", "judge s")
    return {
        "rank kB": len(encode(own)) / 1e3,
        "MB per round": len(encode(own)) * world / 1e6,
        **dict(zip(parts, np.diff(times).tolist(), strict=True)),
        "memory MB": (after - before) * 1024 / 1e6,
    }


if __name__ == "__main__":
    print_worlds(measure, WORLDS)
