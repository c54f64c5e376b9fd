"""A DDP step on links of a known rate, beside what an all_reduce of its gradients takes there.

    sudo ./run_bench.sh python tests/perf/step_links.py [ROUNDS [LINK]]

Two hosts (simulated_hosts.py), a rank each, under torchrun, with links of 1 Gbit/s, 300 and 100
Mbit/s; the step is that of an mlp with 4.2 MB of gradients, which DDP reduces in two buckets, the
last layer's 1.05 MB first. `wire` is what these bytes take on the link; `at once` what
`ddpbench.collectives` reads for an all_reduce of them all, `buckets` for one bucket after the
other. Exposed communication must be the buckets' all_reduces less what backward hides of them:
`exposed + hidden` over `buckets`. OFF marks what is off by more than 10 %, or an exposed time that
does not grow as the link shrinks, and exits with 1.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from links import measured
from tabulate import tabulate

from ddpbench.analysis import step_lines, steps
from ddpbench.analysis.step_lines import StepLine
from ddpbench.catalog.sizes import readable
from ddpbench.records.schema import Part

from simulated_hosts import Hosts, missing, payload  # isort: skip  (links has put their folder on the path)

RATES = {"1 Gbit/s": 1e9, "300 Mbit/s": 3e8, "100 Mbit/s": 1e8}
MLP = ("--workload", "mlp", "--width", "512", "--depth", "4", "--batch", "64")
OFF = 0.10


@dataclass(frozen=True)
class Read:
    """What ddpbench read on one link: the step, and its buckets' all_reduces in seconds."""

    step: StepLine
    at_once: float
    buckets: float
    nbytes: int

    @property
    def both(self) -> float:
        """Exposed and hidden communication, seconds."""
        return part(self.step, steps.EXPOSED) + part(self.step, steps.HIDDEN)


def step_on(bench: Hosts, rounds: int, *words: str) -> StepLine:
    """The step with one rank in each host."""
    run = measured(
        bench, *MLP, "--rounds", str(rounds), "--steps-per-round", "2", "--verify", "off", *words,
        command="ddp",
    )  # fmt: skip
    (line,) = step_lines.lines(run)
    return line


def read(rate: float, rounds: int) -> Read:
    """The step and the all_reduces of its gradients between two hosts."""
    with Hosts(2, rate=rate) as bench:
        step = step_on(bench, rounds)
        assert step.summary is not None
        sizes = [bucket.nbytes for bucket in step.summary.buckets]
        run = measured(
            bench, "--op", "all_reduce", "--sizes", ",".join(map(str, [*sizes, sum(sizes)])),
            "--case-time", str(rounds / 4),
        )  # fmt: skip
    took = {r.case.nbytes: r.summary.median_seconds for r in run.results if r.summary}
    return Read(step, took[sum(sizes)], sum(took[nbytes] for nbytes in sizes), sum(sizes))


def part(line: StepLine, name: str) -> float:
    """Seconds of a part of the budget."""
    found = line.part(name)
    assert found is not None
    return found.figure.value


def share(figure: Part | None) -> str:
    """Half-width of a part's interval."""
    interval = figure.figure.interval if figure else None
    return f"±{(interval.high - interval.low) / 2 * 1e3:.1f}" if interval else "-"


def main(rounds: int, links: Sequence[str]) -> int:
    """Print the table; 1 where the step and the collective differ by more than they may."""
    if (why := missing()) is not None:
        sys.exit(f"no hosts to measure between: {why}")
    rows, off, before, sizes = [], 0, 0.0, ""
    for name, rate in ((link, RATES[link]) for link in links or RATES):
        found = read(rate, rounds)
        exposed, step = part(found.step, steps.EXPOSED), found.step
        assert step.summary is not None
        fine = abs(found.both / found.buckets - 1) <= OFF and exposed > before
        off, before = off + (not fine), exposed
        sizes = " + ".join(readable(bucket.nbytes) for bucket in step.summary.buckets)
        times = (
            step.seconds, part(step, steps.COMPUTE), part(step, steps.COPIES), exposed,
            share(step.part(steps.EXPOSED)), part(step, steps.HIDDEN), found.buckets,
            found.at_once, found.nbytes / payload(rate),
        )  # fmt: skip
        told = [f"{t * 1e3:.1f}" if isinstance(t, float) else t for t in times]
        rows.append((name, *told, f"{found.both / found.buckets:.1%}", "" if fine else "OFF"))
    heads = (
        "link, ms:", "step", "compute", "copies", "exposed", "95 %", "hidden", "buckets", "at once",
        "wire", "(exposed + hidden) / buckets", "",
    )  # fmt: skip
    print(tabulate(rows, heads, disable_numparse=True, stralign="right"))
    print(f"buckets of {sizes}; {off} of {len(rows)} off")
    return int(off > 0)


if __name__ == "__main__":
    sys.exit(main(int((sys.argv[1:] or [12])[0]), sys.argv[2:]))
