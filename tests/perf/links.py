"""Compare what ddpbench measures on links of a known rate with what TCP can carry there.

    sudo ./run_bench.sh python tests/perf/links.py collectives [SECONDS [LINK]]
    sudo ./run_bench.sh python tests/perf/links.py step [ROUNDS [LINK]]
    sudo ./run_bench.sh python tests/perf/links.py doctor [TIMES [HOSTS]]

Hosts (simulated_hosts.py) with a rank each, under torchrun. All hosts share the cores of this
machine, so other programs make the links slower. OFF marks a bad row, and the exit code is then 1.

collectives: a case has SECONDS (2). `carries` is the share of the nominal rate that is left to TCP
in full Ethernet frames; `true` subtracts the time of the operation at 4 KiB; `limit` is what the
same launch measured with plain sockets. OFF: more than 2 % off.
step: an mlp with 4.2 MB of gradients, which DDP reduces in two buckets. Exposed and hidden
communication together must take as long as an all_reduce of each bucket. OFF: more than 10 % off,
or the exposed time does not grow as the link shrinks.
doctor: which slow link or host it finds. OFF: more than 5 % off, missing, or not planted.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' own modules

from simulated_hosts import Hosts, missing, payload
from tabulate import tabulate

from ddpbench.analysis import step_lines, steps
from ddpbench.catalog.sizes import readable
from ddpbench.records import store
from ddpbench.records.schema import Examination, Run

RATES = {"2.5 Gbit/s": 2.5e9, "1 Gbit/s": 1e9, "300 Mbit/s": 3e8, "100 Mbit/s": 1e8}
# gloo's all_gather posts the send of each half before its receive. Two ranks share one connection,
# where the notice of a posted receive waits behind the other rank's half. So one rank begins when
# the other has sent a half, and it takes the time of three halves instead of two.
LEAST = {("all_gather", 2): 2 / 3}
SMALL = 4096
MLP = ("--workload", "mlp", "--width", "512", "--depth", "4", "--batch", "64")
GBIT = 1e9
# name → (hosts, what must be found: code and hosts → its rate in bits per second)
PLANTED: dict[str, tuple[Hosts, dict[tuple[str, ...], float]]] = {
    "alike": (Hosts(4, rate=GBIT), {}),
    "not shaped": (Hosts(4), {}),
    "a slow link": (
        Hosts(4, rate=GBIT, pairs={(0, 1): 1e8}),
        {("slow-link", "host1", "host2"): 1e8},
    ),
    "half a link": (
        Hosts(4, rate=GBIT, pairs={(1, 2): 5e8}),
        {("slow-link", "host2", "host3"): 5e8},
    ),
    "both": (
        Hosts(4, rate=[GBIT, GBIT, GBIT, 1e8], pairs={(0, 1): 1e8}),
        {("slow-link", "host1", "host2"): 1e8, ("slow-host", "host4"): 1e8},
    ),
    "one of three": (Hosts(3, rate=[GBIT, GBIT, 2.5e8]), {("slow-host", "host3"): 2.5e8}),
}


def measure(bench: Hosts, command: str, *words: str) -> Run:
    """Run a command with one rank on each host; return its run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        words = ("-m", f"ddpbench.{command}", "--output", str(folder), "--quiet", *words)
        done = bench.torchrun(*words, ranks=[1] * len(bench), cwd=Path(name), seconds=600)
        if any(each.returncode for each in done):
            sys.exit("\n".join(each.stdout + each.stderr for each in done))
        return store.read(folder)


def compare_collectives(seconds: str, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row per link, number of hosts, operation and size."""
    rows = []
    for name in names or RATES:
        for count, operations in ((2, "all_reduce,all_gather,broadcast"), (3, "all_gather")):
            words = ("--sizes", "4K,1M,16M", "--op", operations, "--case-time", seconds)
            with Hosts(count, rate=RATES[name]) as bench:
                run = measure(bench, "collectives", *words)
            carries, latency = payload(RATES[name]), 0.0
            for result in sorted(run.results, key=lambda r: (r.case.operation, r.case.nbytes)):
                assert result.summary is not None
                case, seconds_taken = result.case, result.summary.median_seconds
                wire = case.nbytes * result.bus_factor / carries
                if result.requested_nbytes == SMALL:  # the first of each operation
                    latency = max(0.0, seconds_taken - wire)
                    continue
                assert result.limit is not None
                true = carries * wire / (wire + latency)
                busbw = case.nbytes / seconds_taken * result.bus_factor
                least = LEAST.get((case.operation, count), 1.0)
                rows.append({
                    "link": name, "hosts": count, "operation": case.operation,
                    "size": readable(result.requested_nbytes), "carries GB/s": carries / 1e9,
                    "at 4 KiB µs": latency * 1e6, "true GB/s": true / 1e9,
                    "busbw GB/s": busbw / 1e9, "limit GB/s": result.limit.bytes_per_second / 1e9,
                    "busbw/true": busbw / true, "off": not least - 0.02 <= busbw / true <= 1.02,
                })  # fmt: skip
    return rows


def compare_steps(rounds: str, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row per link: a step between two hosts, and all_reduces of its gradients."""
    rows, before = [], 0.0
    for name in names or [*RATES][1:]:
        with Hosts(2, rate=RATES[name]) as bench:
            words = ("--rounds", rounds, "--steps-per-round", "2", "--verify", "off")
            (step,) = step_lines.lines(measure(bench, "ddp", *MLP, *words))
            assert step.summary is not None
            sizes = [bucket.nbytes for bucket in step.summary.buckets]
            asked = ("--op", "all_reduce", "--sizes", ",".join(map(str, [*sizes, sum(sizes)])))
            run = measure(bench, "collectives", *asked, "--case-time", str(int(rounds) / 4))
        seconds = {r.case.nbytes: r.summary.median_seconds for r in run.results if r.summary}
        budget = {part.name: part.figure.value for part in step.summary.budget}
        parts = {name: budget[name] for name in (steps.EXPOSED, steps.HIDDEN)}
        buckets = sum(seconds[nbytes] for nbytes in sizes)
        ratio = sum(parts.values()) / buckets
        exposed = parts[steps.EXPOSED]
        times = {
            "step": step.seconds or 0.0, **parts, "each bucket": buckets,
            "at once": seconds[sum(sizes)], "wire": sum(sizes) / payload(RATES[name]),
        }  # fmt: skip
        rows.append({
            "link": name, **{f"{each}, ms": value * 1e3 for each, value in times.items()},
            "(exposed + hidden) / buckets": ratio, "off": abs(ratio - 1) > 0.1 or exposed <= before,
        })  # fmt: skip
        before = exposed
    return rows


def find_slow(examination: Examination) -> dict[tuple[str, ...], float]:
    """Return the warnings as PLANTED lists them, each with its rate."""
    names = dict(examination.figures["ends"])
    rates = {
        tuple(names[rank] for rank in (*pair["one"], *pair["other"])): pair["bytes_per_second"]
        for pair in examination.figures["again"]
    }
    return {
        (each.code, *each.place["hosts"]): rates[tuple(each.place["hosts"])] / payload(1)
        for each in examination.findings
        if each.severity == "warning"
    }


def compare_findings(times: str, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row per finding and per planted fault."""
    rows = []
    for name in names or PLANTED:
        hosts, planted = PLANTED[name]
        for _ in range(int(times)):
            with hosts as bench:
                run = measure(bench, "doctor", "--only", "links", "--backend", "gloo")
            (examination,) = run.examinations
            rates = find_slow(examination)
            for key in {**planted, **rates} or {("nothing",): 0.0}:
                true, rate = planted.get(key), rates.get(key)
                off = abs(rate / true - 1) > 0.05 if rate and true else rate is not true
                rows.append({
                    "hosts": name, "found": " ".join(key), "planted Mbit/s": true and true / 1e6,
                    "measured": rate and rate / 1e6, "seconds": examination.seconds, "off": off,
                })  # fmt: skip
    return rows


KINDS = {
    "collectives": (compare_collectives, "2"),
    "step": (compare_steps, "12"),
    "doctor": (compare_findings, "1"),
}


def main(kind: str, *words: str) -> int:
    """Print the table; return 1 if a row is off."""
    if (why := missing()) is not None:
        sys.exit(f"no hosts to measure between: {why}")
    compare, default = KINDS[kind]
    rows = compare((*words, default)[0], words[1:])
    off = sum(row["off"] for row in rows)
    shown = [{**row, "off": "OFF" if row["off"] else ""} for row in rows]
    print(tabulate(shown, headers="keys", floatfmt=".4g"))
    print(f"{off} of {len(rows)} rows off")
    return int(off > 0)


if __name__ == "__main__":
    sys.exit(main(*(sys.argv[1:] or ["collectives"])))
