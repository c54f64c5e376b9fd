"""What ddpbench reads on links of a known rate, beside what TCP can carry there.

    sudo ./run_bench.sh python tests/perf/links.py [SECONDS [LINK]]

Hosts (simulated_hosts.py) with links of 100 Mbit/s, 1 and 2.5 Gbit/s, or of LINK alone, a rank
each, under torchrun, with SECONDS (2) for a case. `carries` is the truth: the share of the nominal
rate that is left to TCP in full Ethernet frames; `true` is that less the time of the operation at
4 KiB, which is no link's. `limit` is what the same launch measured with plain sockets.
OFF marks what is off the true one by more than 2 %, and exits with 1: broadcast is one stream and
must not be; the others' algorithms wait between their pieces, the longer the fewer cores are free,
for all hosts share those of this machine.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' own modules

from simulated_hosts import Hosts, missing, payload
from tabulate import tabulate

from ddpbench.analysis import lines
from ddpbench.catalog.sizes import readable
from ddpbench.records import store
from ddpbench.records.schema import Result, Run

RATES = {"100 Mbit/s": 1e8, "1 Gbit/s": 1e9, "2.5 Gbit/s": 2.5e9}
# gloo's all_gather posts the send of each half before its receive. Of two ranks both use the one
# connection, where the word that a receive is posted waits behind the half of whichever was first:
# then one begins when the other has sent a half, and it takes three halves' time instead of two's.
LEAST = {("all_gather", 2): 2 / 3}
SMALL = 4096
OFF = 0.02


def measured(bench: Hosts, *words: str, command: str = "collectives") -> Run:
    """What a command measures with one rank in each host."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        done = bench.torchrun(
            "-m", f"ddpbench.{command}", "--output", str(folder), "--quiet", *words,
            ranks=[1] * len(bench), cwd=Path(name), seconds=600,
        )  # fmt: skip
        if any(each.returncode for each in done):
            sys.exit("\n".join(each.stdout + each.stderr for each in done))
        return store.read(folder)


def readings(run: Run) -> Iterator[tuple[Result, float, float]]:
    """Each case with its time in seconds and its bus bandwidth in bytes a second."""
    order = {name: number for number, name in enumerate(run.operations)}
    for result in sorted(run.results, key=lambda r: (order[r.case.operation], r.case.nbytes)):
        assert result.summary is not None
        seconds = result.summary.median_seconds
        yield result, seconds, lines.busbw(result.case.nbytes, seconds, result.bus_factor)


def main(slice_seconds: str, *links: str) -> int:
    """Print the table for two and three hosts; 1 if any row is off."""
    if (why := missing()) is not None:
        sys.exit(f"no hosts to measure between: {why}")
    rows, sources, off = [], set(), 0
    for name, rate in ((link, RATES[link]) for link in links or RATES):
        for count, operations in ((2, "all_reduce,all_gather,broadcast"), (3, "all_gather")):
            with Hosts(count, rate=rate) as bench:
                words = ("--sizes", "4K,1M,16M", "--op", operations, "--case-time", slice_seconds)
                run = measured(bench, *words)
            carries, latency = payload(rate), 0.0
            for result, seconds, busbw in readings(run):
                case, wire = result.case, result.case.nbytes * result.bus_factor / carries
                if result.requested_nbytes == SMALL:  # the first of each operation
                    latency = max(0.0, seconds - wire)
                    continue
                assert result.limit is not None
                true = carries * wire / (wire + latency)
                least = LEAST.get((case.operation, count), 1.0)
                fine = least - OFF <= busbw / true <= 1 + OFF
                off += not fine
                sources.add(result.limit.source)
                rows.append((
                    name, count, case.operation, readable(result.requested_nbytes), carries / 1e9,
                    latency * 1e6, true / 1e9, busbw / 1e9, f"{busbw / true:.1%}",
                    "" if fine else "OFF", result.limit.bytes_per_second / 1e9,
                    f"{lines.fraction(result, seconds):.1%}",
                ))  # fmt: skip
    heads = (
        "link", "hosts", "operation", "size", "carries GB/s", "at 4 KiB µs", "true GB/s",
        "busbw GB/s", "read/true", "", "limit GB/s", "% limit",
    )  # fmt: skip
    formats = ("", "", "", "", ".4f", ".0f", ".4f", ".4f", "", "", ".4f", "")
    print(tabulate(rows, heads, floatfmt=formats))
    print(f"limit: {', '.join(sorted(sources))}")
    print(f"{off} of {len(rows)} readings off by more than {OFF:.0%}")
    return int(off > 0)


if __name__ == "__main__":
    sys.exit(main(*(sys.argv[1:] or ["2"])))
