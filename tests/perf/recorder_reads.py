"""How long a read of torch's Flight Recorder holds up the job, with its own function and as watch.

    ./run_bench.sh python tests/perf/recorder_reads.py [READS]

The recorder is full: 2000 entries. One thread does nothing but look at the clock, and so sees for
how long the interpreter was not available to it; another makes calls of torch, and so sees for how
long the recorder was locked. The aim is less than 5 ms. The last columns
are the time of a small call over gloo beside a thread that reads again and again. The last line is
what stamps add to the smallest call over MPI: only while a watch is on, because without one the
group runs the same code as ever.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate

from ddpbench.watch.observe.arrivals import Arrivals
from ddpbench.watch.observe.recorder_dump import RecorderDump

PAUSE_SECONDS = 2e-4


def longest_gap(work: Callable[[], Any]) -> tuple[float, float]:
    """The longest pause of another thread during `work`, and its CPU seconds."""
    gaps, ended = [0.0], threading.Event()

    def look() -> None:
        last = time.perf_counter()
        while not ended.is_set():
            time.sleep(PAUSE_SECONDS)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    thread = threading.Thread(target=look)
    thread.start()
    time.sleep(0.02)
    gaps.clear()
    began = time.thread_time()
    work()
    took = time.thread_time() - began
    time.sleep(0.01)
    ended.set()
    thread.join()
    return max(gaps), took


def time_calls(count: int = 2000) -> list[float]:
    """Seconds of each of some small calls."""
    tensor, seconds = torch.zeros(1), []
    for _ in range(count):
        began = time.perf_counter()
        dist.all_reduce(tensor)
        seconds.append(time.perf_counter() - began)
    return seconds


def beside(work: Callable[[], Any]) -> list[float]:
    """Seconds of small calls while another thread does `work` again and again."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.is_set():
            work()
            time.sleep(0.01)

    thread = threading.Thread(target=repeat)
    thread.start()
    seconds = time_calls()
    ended.set()
    thread.join()
    return seconds


def print_stamps(blocks: int) -> None:
    """Print the time of a small call over MPI with and without stamps, block by block."""
    from ddpbench.mpi_backend import group, stamps

    group.register()
    store = dist.HashStore()
    dist.init_process_group(group.NAME, store=store, rank=0, world_size=1)
    without, stamped = [], []
    for _ in range(blocks):
        stamps.end()
        without.append(statistics.median(time_calls()))
        stamps.take()
        stamped.append(statistics.median(time_calls()))
    added = statistics.median(b - a for a, b in zip(without, stamped, strict=True))
    print(f"stamps over MPI: {added * 1e9:.0f} ns on {statistics.median(without) * 1e9:.0f} ns")
    dist.destroy_process_group()


def main(reads: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    time_calls(2200)
    dump = torch._C._distributed_c10d._dump_fr_trace_json  # type: ignore[attr-defined]

    def read_entries() -> None:
        RecorderDump().read_new(["gloo"], time.time_ns(), 512)

    def read_calls() -> None:
        watched = Arrivals()
        watched._since_ns = 0
        assert watched.read([], final=True)

    works: dict[str, Callable[[], Any]] = {
        "nothing": lambda: time.sleep(0.03),
        "torch's function": dump,
        "watch, entries": read_entries,
        "watch, calls": read_calls,
    }
    rows = []
    for name, work in works.items():
        gaps, took = zip(*(longest_gap(work) for _ in range(reads)), strict=True)
        calls = sorted(beside(work))
        late = calls[len(calls) * 99 // 100]
        values = (statistics.median(gaps), max(gaps), statistics.median(took))
        more = (statistics.median(calls), late, calls[-1])
        rows.append([name, *(value * 1e3 for value in (*values, *more))])
    heads = ["gap, median", "gap, most", "CPU", "call, median", "call, 99 %", "call, most"]
    print(f"torch {torch.__version__}, {reads} reads of 2000 entries; ms")
    print(tabulate(rows, ["", *heads], floatfmt=".3f"))
    dist.destroy_process_group()
    print_stamps(reads)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
