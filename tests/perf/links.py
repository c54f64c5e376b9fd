"""What ddpbench reads on links of a known rate, beside what TCP can carry there.

    sudo ./run_bench.sh python tests/perf/links.py [SECONDS a case]

Hosts (tests/hosts.py) with links of 100 Mbit/s, 1 and 2.5 Gbit/s, a rank each, under torchrun; then
four hosts, alike, with a slow one, with a slow pair. `carries` is the truth: the share of the
nominal rate that is left to TCP in full Ethernet frames, and of that what gloo's algorithm can use.
`limit` is what the same launch measured with plain sockets. Exits with 1 when a reading on links
alike is off by more than 2 %.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' own modules

from hosts import Hosts, missing, payload
from tabulate import tabulate

from ddpbench.analysis import bandwidth, limits
from ddpbench.catalog.sizes import readable
from ddpbench.records import store
from ddpbench.records.schema import Result, Run

RATES = {"100 Mbit/s": 1e8, "1 Gbit/s": 1e9, "2.5 Gbit/s": 2.5e9}
FOUR = {
    "alike": Hosts(4, rate=1e9),
    "host4 at 100 Mbit/s": Hosts(4, rate=[1e9, 1e9, 1e9, 1e8]),
    "host1-host2 at 100 Mbit/s": Hosts(4, rate=1e9, pairs={(0, 1): 1e8}),
}
# gloo's all_gather posts the send of a half before its receive. Of two ranks both use the one
# connection, where the word that a receive is posted then waits behind the half: one rank begins
# when the other has sent its first half, and three halves' time goes by instead of two's.
USABLE = {("all_gather", 2): 2 / 3}
OFF = 0.02


def measured(bench: Hosts, *words: str) -> Run:
    """A sweep of collectives with one rank in each host."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        done = bench.torchrun(
            "-m", "ddpbench.collectives", "--output", str(folder), "--quiet", *words,
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
        yield result, seconds, bandwidth.busbw(result.case.nbytes, seconds, result.bus_factor)


def truth(words: tuple[str, ...]) -> int:
    """Print the table for two and three hosts; how many rows are off."""
    heads = "link", "hosts", "operation", "size", "carries GB/s", "busbw GB/s", "read/true"
    rows, sources, off = [], set(), 0
    for name, rate in RATES.items():
        for count, operations in ((2, "all_reduce,all_gather,broadcast"), (3, "all_gather")):
            with Hosts(count, rate=rate) as bench:
                run = measured(bench, "--sizes", "1M,16M", "--op", operations, *words)
            for result, seconds, busbw in readings(run):
                assert result.limit is not None
                of = result.case.operation
                carries = payload(rate) * USABLE.get((of, count), 1.0)
                off += abs(busbw / carries - 1) > OFF
                sources.add(result.limit.source)
                rows.append((
                    name, count, of, readable(result.requested_nbytes), carries / 1e9, busbw / 1e9,
                    f"{busbw / carries:.1%}", result.limit.bytes_per_second / 1e9,
                    f"{limits.fraction(result, seconds):.1%}",
                ))  # fmt: skip
    print(tabulate(rows, (*heads, "limit GB/s", "% limit"), floatfmt=".4f"))
    print(f"limit: {', '.join(sorted(sources))}")
    print(f"{off} of {len(rows)} readings off by more than {OFF:.0%}\n")
    return off


def unequal(words: tuple[str, ...]) -> None:
    """Print what four hosts read of which one link, or one pair's, is slow."""
    rows = []
    for name, hosts in FOUR.items():
        with hosts as bench:
            run = measured(bench, "--sizes", "1M", *words)
        for result, seconds, busbw in readings(run):
            share = f"{limits.fraction(result, seconds):.1%}"
            rows.append((name, result.case.operation, seconds * 1e3, busbw / 1e9, share))
    heads = "four hosts at 1 Gbit/s", "operation", "time ms", "busbw GB/s", "% limit"
    print(tabulate(rows, heads, floatfmt=".4f"))


def main(slice_seconds: float) -> int:
    """Print both tables; 1 where ddpbench and the truth differ by more than they may."""
    if (why := missing()) is not None:
        sys.exit(f"no hosts to measure between: {why}")
    words = ("--slice", str(slice_seconds))
    off = truth(words)
    unequal(words)
    return int(off > 0)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]) if sys.argv[1:] else 2.0))
