"""Which slow link or host the doctor finds among hosts of which some are slow, and at what rate.

    sudo ./run_bench.sh python tests/perf/slow_links.py [TIMES [HOSTS]]

Hosts (simulated_hosts.py) as PLANTED has them, or only those of the name HOSTS, a rank each, under
torchrun. OFF marks a rate that is off the planted one by more than 5 %, WRONG what was found and is
not there, or the other way round; both exit with 1. All hosts share the cores of this machine: what
else runs on it makes links slower.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' own modules

from simulated_hosts import Hosts, missing, payload
from tabulate import tabulate

from ddpbench.records import store
from ddpbench.records.schema import Examination

OFF = 0.05
# name → (hosts, what must be found: code and hosts → its rate in bits a second)
PLANTED = {
    "alike": (Hosts(4, rate=1e9), {}),
    "not shaped": (Hosts(4), {}),
    "a slow link": (
        Hosts(4, rate=1e9, pairs={(0, 1): 1e8}),
        {("slow-link", "host1", "host2"): 1e8},
    ),
    "half a link": (
        Hosts(4, rate=1e9, pairs={(1, 2): 5e8}),
        {("slow-link", "host2", "host3"): 5e8},
    ),
    "a slow host": (Hosts(4, rate=[1e9, 1e9, 1e9, 1e8]), {("slow-host", "host4"): 1e8}),
    "both": (
        Hosts(4, rate=[1e9, 1e9, 1e9, 1e8], pairs={(0, 1): 1e8}),
        {("slow-link", "host1", "host2"): 1e8, ("slow-host", "host4"): 1e8},
    ),
    "one of three": (Hosts(3, rate=[1e9, 1e9, 2.5e8]), {("slow-host", "host3"): 2.5e8}),
}


def examined(bench: Hosts) -> Examination:
    """The doctor's examination of the links between these hosts."""
    with tempfile.TemporaryDirectory() as name:
        done = bench.torchrun(
            "-m", "ddpbench.doctor", "--only", "links", "--backend", "gloo", "--quiet",
            "--output", f"{name}/run", ranks=[1] * len(bench), cwd=Path(name), seconds=300,
        )  # fmt: skip
        if any(each.returncode for each in done):
            sys.exit("\n".join(each.stdout + each.stderr for each in done))
        return store.read(Path(name) / "run").examinations[0]


def found(examination: Examination) -> dict[tuple[str, ...], float]:
    """The warnings, as PLANTED has what must be found, each with its rate."""
    names = dict(examination.figures["ends"])
    rates = {
        tuple(names[rank] for rank in (*own["one"], *own["other"])): own["bytes_per_second"]
        for own in examination.figures["again"]
    }
    return {
        (each.code, *each.place["hosts"]): rates[tuple(each.place["hosts"])] / payload(1)
        for each in examination.findings
        if each.severity == "warning"
    }


def main(times: int, kinds: Sequence[str]) -> int:
    """Print the table; 1 where anything is off or wrong."""
    if (why := missing()) is not None:
        sys.exit(f"no hosts to measure between: {why}")
    rows, bad = [], 0
    for name in kinds or PLANTED:
        hosts, planted = PLANTED[name]
        for _ in range(times):
            with hosts as bench:
                examination = examined(bench)
            rates = found(examination)
            for key in {**planted, **rates} or {("nothing",): 0.0}:
                truth, read = planted.get(key), rates.get(key)
                mark = "" if (truth is None) == (read is None) else "WRONG"
                if truth and read and abs(read / truth - 1) > OFF:
                    mark = "OFF"
                bad += bool(mark)
                rows.append((
                    name, " ".join(key), truth and truth / 1e6, read and read / 1e6, mark,
                    examination.seconds,
                ))  # fmt: skip
    heads = ("hosts", "found", "planted Mbit/s", "read", "", "seconds")
    print(tabulate(rows, heads, floatfmt=".1f"))
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(int((sys.argv[1:] or [1])[0]), sys.argv[2:]))
