"""The fit on links of a known rate: 1/β beside what TCP can carry there, α beside a ping-pong.

    sudo ./run_bench.sh python tests/perf/fit_links.py [LAUNCHES]

Two hosts (tests/simulated_hosts.py) with links of 100 Mbit/s and 1 Gbit/s, a rank each, under
torchrun. `carries` is the truth for 1/β: the share of the nominal rate that is left to TCP in full
Ethernet frames of 1500 bytes, 94.15 %. The truth for α is half the round trip of 1 byte, which the
same two hosts exchange by torch.distributed on gloo without ddpbench, before, between and after the
launches. Like each repetition of ddpbench, each round trip follows a barrier, and the slower rank
counts; `awake` is what it takes without barriers, when neither rank has to be woken.

send_recv is such a ping-pong, and its α must be within 20 % of it; broadcast and all_reduce also
wait for one another, so their α is shown only. 1/β of send_recv and broadcast, which are one
stream, must be within 3 % of the link; all_reduce sends both ways, with pauses. OFF marks what is
beyond these bounds, and exits with 1. Keep the machine quiet: all hosts share its cores.

There are no sizes between 64 B and 256 KiB: after each pause, tc lets the first frames pass at
once, up to 64 KiB in one piece, where a link would take its time for them.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' own modules

from simulated_hosts import Hosts, missing, payload
from tabulate import tabulate

from ddpbench.analysis import fit, lines
from ddpbench.records import store
from ddpbench.records.schema import Plan, Result, Run
from ddpbench.render.collective_tables import format_estimate, format_sizes

RATES = {"100 Mbit/s": 1e8, "1 Gbit/s": 1e9}
OPERATIONS = ("send_recv", "broadcast", "all_reduce")
BOUND_BY_LINK, BOUND_BY_PING = ("send_recv", "broadcast"), ("send_recv",)
RATE_OFF, LATENCY_OFF = 0.03, 0.20
PINGS = 2000


def ping() -> None:
    """Print half the median round trip of 1 byte in seconds, after barriers and without: a rank."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, byte = dist.get_rank(), torch.zeros(1, dtype=torch.uint8)
    for barriers in (True, False):
        times = torch.zeros(PINGS, dtype=torch.float64)
        for i in range(PINGS):
            if barriers:
                dist.barrier()
            start = time.perf_counter()
            for sends in (rank == 0, rank == 1):
                (dist.send if sends else dist.recv)(byte, 1 - rank)
            times[i] = time.perf_counter() - start
        dist.all_reduce(times, dist.ReduceOp.MAX)
        if rank == 0:
            sys.stdout.write(f"{times[PINGS // 10 :].median().item() / 2} ")
    dist.destroy_process_group()


def measure_ping(bench: Hosts) -> tuple[float, float]:
    """Return half the round trip of 1 byte in seconds, after barriers and without."""
    done = bench.torchrun(__file__, "--ping", ranks=[1, 1], seconds=120)
    isolated, awake = map(float, done[0].stdout.split())
    return isolated, awake


def measure_launch(bench: Hosts, number: int) -> list[Result]:
    """Return what one launch measures with a rank on each host."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        done = bench.torchrun(
            "-m", "ddpbench.collectives", "--output", str(folder), "--quiet", "--slice", "0.5",
            "--op", ",".join(OPERATIONS), "--sizes", "4:64:x2,256K:4M:x4",
            ranks=[1, 1], cwd=Path(name), seconds=600,
        )  # fmt: skip
        if any(each.returncode for each in done):
            sys.exit("\n".join(each.stdout + each.stderr for each in done))
        return [replace(one, launch=number) for one in store.read(folder).results]


def main(launches: int) -> int:
    """Print the table; 1 where a bound is broken."""
    if (why := missing()) is not None:
        sys.exit(f"no hosts to measure between: {why}")
    rows, off = [], 0
    for name, rate in RATES.items():
        results, pings = [], []
        with Hosts(2, rate=rate) as bench:
            for number in range(launches):
                pings.append(measure_ping(bench))
                results += measure_launch(bench, number)
            pings.append(measure_ping(bench))
        carries = payload(rate)
        half_trip, awake = map(statistics.median, zip(*pings, strict=True))
        run = Run("", "collectives", (), Plan(), "", results=tuple(results))
        fits = fit.fits(lines.lines(run))
        off += len(OPERATIONS) - len(fits)
        for one in fits:
            operation = one.case.operation
            for segment in one.segments:
                latency, bandwidth, marks = segment.latency, segment.rate, []
                if operation in BOUND_BY_LINK and segment is one.segments[-1]:
                    fine = bandwidth and abs(bandwidth.value / carries - 1) <= RATE_OFF
                    marks += [] if fine else ["OFF: 1/β"]
                if operation in BOUND_BY_PING and segment is one.segments[0]:
                    fine = latency and abs(latency.value / half_trip - 1) <= LATENCY_OFF
                    marks += [] if fine else ["OFF: α"]
                off += len(marks)
                rows.append((
                    name, operation, format_sizes(segment), carries / 1e6,
                    bandwidth and format_estimate(bandwidth, 1e-6),
                    bandwidth and f"{bandwidth.value / carries - 1:+.1%}", awake * 1e6,
                    half_trip * 1e6,
                    latency and format_estimate(latency, 1e6),
                    latency and f"{latency.value / half_trip - 1:+.1%}",
                    ", ".join(marks),
                ))  # fmt: skip
        spread = ", ".join(f"{ping * 1e6:.1f}" for ping, _ in pings)
        print(f"{name}: ping-pongs of {spread} µs; intervals over {one.of}")
    heads = (
        "link", "operation", "sizes", "carries MB/s", "1/β MB/s", "off", "awake µs",
        "ping-pong µs", "α µs", "off", "",
    )  # fmt: skip
    print(tabulate(rows, heads, floatfmt=".2f"))
    return int(off > 0)


if __name__ == "__main__":
    if sys.argv[1:] == ["--ping"]:
        ping()
    else:
        sys.exit(main(int(sys.argv[1]) if sys.argv[1:] else 3))
