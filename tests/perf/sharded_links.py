"""The collectives of a sharded step on a link of a known rate, beside what their bytes take there.

    sudo ./run_bench.sh python tests/perf/sharded_links.py [ROUNDS [WIDTH]]

Hosts (tests/simulated_hosts.py) with links of 1 Gbit/s, a rank each, train an mlp of
WIDTH (1024) with `ddp --parallel fsdp` for ROUNDS (12): first without prefetch, then with it.

- `sent`: bytes that one rank hands to TCP in a step, from the counters of its interface while
  torchrun carries out the same collectives alone. The interface counts a burst of frames as one
  frame with one header of 66 bytes, so the headers are 66 bytes a frame there. gloo's
  reduce_scatter sends as much as an all_reduce of the whole buffer.
- `link ms`: what these bytes require on the link: TCP carries 1448 of the 1538 bytes of a full
  frame. Of two hosts, gloo's all_gather needs up to 3/2 of that (links.py says why): so three.
- `alone ms`: the median time of the same collectives alone, on the rank that waits least.
- `exposed ms`: what ddpbench reads, from spans.

OFF marks an exposed time that is off `link ms` by more than 5 %, or an all_gather of which
prefetch does not expose less, and exits with 1. The last line compares the bytes that the whole
training sent, from the counters of two runs of different length, with the sum of the column `sent`.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from links import measured
from tabulate import tabulate

from ddpbench.analysis import spans, step_lines
from ddpbench.records.schema import Collective, Run

from simulated_hosts import Hosts, missing, payload  # isort: skip  (links has put their folder on the path)

RATE = 1e9
HOSTS = 3
MLP = ("--workload", "mlp", "--depth", "4", "--batch", "256", "--threads", "1")
STEPS_OF_A_ROUND = 3  # those that communicate: prefetch on, prefetch off, timed
REPEATS = 9
HEADER = 66  # Ethernet 14, IP 20, TCP 20 and its time stamps 12
OFF = 0.05


@dataclass(frozen=True)
class Alone:
    """One collective alone: payload bytes that a rank sends, and its median seconds."""

    sent: float
    seconds: float


def sent_nbytes(text: str) -> int:
    """Return the bytes that TCP has sent over eth0, from the text of /proc/net/dev."""
    fields = text.partition("eth0:")[2].split()
    return int(fields[8]) - HEADER * int(fields[9])


def settled(counters: Path) -> int:
    """Return the bytes sent once nothing is on its way any more."""
    time.sleep(0.3)
    return sent_nbytes(counters.read_text())


def repeat_collectives(kinds: list[list[str | int]], file: Path) -> None:
    """Carry out each kind of collective several times; rank 0 writes bytes and times."""
    import torch
    import torch.distributed as dist

    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results, counters = [], Path("/proc/net/dev")
    for operation, nbytes in kinds:
        full = torch.ones(int(nbytes) // 4)
        part = torch.ones(len(full) // dist.get_world_size())
        call, arguments = (
            (gather, (full, part)) if operation == "all_gather" else (scatter, (part, full))
        )
        call(*arguments)
        before, times = settled(counters), []
        for _ in range(REPEATS):
            dist.barrier()
            began = time.perf_counter()
            call(*arguments)
            times.append(time.perf_counter() - began)
        sent = (settled(counters) - before) / REPEATS
        least = torch.tensor(times)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        results.append([sent, statistics.median(least.tolist())])
    if dist.get_rank() == 0:
        file.write_text(json.dumps(results))
    dist.destroy_process_group()


def collectives_of(run: Run) -> tuple[Collective, ...]:
    """Return the collectives of the step, each of a layer group and a phase."""
    (line,) = step_lines.lines(run)
    assert line.summary is not None, line.reason
    return line.summary.collectives


def alone(bench: Hosts, kinds: list[tuple[str, int]], folder: Path) -> dict[tuple[str, int], Alone]:
    """Return what each kind of collective sends and takes alone."""
    file = folder / "alone.json"
    done = bench.torchrun(
        str(Path(__file__)), json.dumps(kinds), str(file), ranks=[1] * len(bench), seconds=600,
        GLOO_SOCKET_IFNAME="eth0",
    )  # fmt: skip
    if any(each.returncode for each in done):
        sys.exit("\n".join(each.stdout + each.stderr for each in done))
    rows = json.loads(file.read_text())
    return {kind: Alone(*row) for kind, row in zip(kinds, rows, strict=True)}


def step_on(bench: Hosts, rounds: int, *words: str) -> Run:
    """Return the sharded step with one rank on each host."""
    return measured(
        bench, *MLP, "--parallel", "fsdp", "--rounds", str(rounds), "--steps-per-round", "1",
        "--verify", "off", *words, command="ddp",
    )  # fmt: skip


def exposed_ms(collectives: tuple[Collective, ...]) -> dict[str, float]:
    """Return the exposed time of each operation in a step."""
    total: dict[str, float] = defaultdict(float)
    for each in collectives:
        total[each.operation] += each.exposed.value * 1e3
    return total


def compare(
    off: tuple[Collective, ...], on: tuple[Collective, ...], single: dict[tuple[str, int], Alone]
) -> tuple[int, float]:
    """Print the table; return how many rows are off, and the bytes that a step sends."""
    rows, wrong, all_sent = [], 0, 0.0
    without, with_prefetch = exposed_ms(off), exposed_ms(on)
    for operation in spans.OPERATIONS:
        same = [each for each in off if each.operation == operation]
        if not same:
            continue
        calls = [(single[operation, each.nbytes // each.calls], each.calls) for each in same]
        sent = sum(one.sent * count for one, count in calls)
        took = sum(one.seconds * count for one, count in calls) * 1e3
        link = sent / payload(RATE) * 1e3
        fine = abs(without[operation] / link - 1) <= OFF
        fine &= operation != "all_gather" or with_prefetch[operation] < without[operation]
        wrong, all_sent = wrong + (not fine), all_sent + sent
        rows.append((
            operation, sum(each.calls for each in same), sum(each.nbytes for each in same) / 1e6,
            sent / 1e6, link, took, without[operation], f"{without[operation] / link:.1%}",
            f"{without[operation] / took:.1%}", with_prefetch[operation], "" if fine else "OFF",
        ))  # fmt: skip
    heads = (
        "operation", "calls", "buffers MB", "sent MB", "link ms", "alone ms", "exposed ms",
        "exposed / link", "exposed / alone", "prefetch on ms", "",
    )  # fmt: skip
    print(tabulate(rows, heads, floatfmt=".2f"))
    return wrong, all_sent


def main(rounds: int, width: int) -> int:
    """Print the table; 1 if exposed times are off."""
    if (why := missing()) is not None:
        sys.exit(f"no hosts to measure between: {why}")
    import tempfile

    with Hosts(HOSTS, rate=RATE) as bench, tempfile.TemporaryDirectory() as name:

        def counted() -> int:
            return sent_nbytes(bench.inside(0, "cat", "/proc/net/dev"))

        before, shape = counted(), ("--width", str(width))
        run = step_on(bench, rounds, *shape, "--no-prefetch")
        middle = counted()
        step_on(bench, 2 * rounds, *shape, "--no-prefetch")
        a_step = ((counted() - middle) - (middle - before)) / rounds / STEPS_OF_A_ROUND
        off, on = collectives_of(run), collectives_of(step_on(bench, rounds, *shape))
        kinds = list(dict.fromkeys((each.operation, each.nbytes // each.calls) for each in off))
        single = alone(bench, kinds, Path(name))
    wrong, sent = compare(off, on, single)
    print(
        f"a step of the whole training sent {a_step / 1e6:.2f} MB, "
        f"these collectives {sent / 1e6:.2f} MB"
    )
    print(f"{wrong} of {len(exposed_ms(off))} off")
    return int(wrong > 0)


if __name__ == "__main__":
    if "RANK" in os.environ:
        repeat_collectives(json.loads(sys.argv[1]), Path(sys.argv[2]))
    else:
        numbers = (*map(int, sys.argv[1:]), *(12, 1024)[len(sys.argv) - 1 :])
        sys.exit(main(*numbers))
