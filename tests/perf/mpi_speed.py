"""What the process group over mpi4py costs above the MPI call that it makes, and beside gloo.

    ./run_bench.sh python tests/perf/mpi_speed.py [RANKS [LAUNCHES [SIZE,… [BLOCKS]]]]

The floor is torch's own dispatch to a group that does nothing (its "fake" backend) plus the bare
mpi4py call on the same memory. "least" is a Python group that does nothing but that bare call: what
is left for a better group to gain. A time is the median of the slowest rank's, in µs.

The arms of a launch take turns in blocks, in an order that is drawn anew for each block: a call
that always comes after the same neighbour inherits its caches. For the same reason the call that
does nothing comes each time after a bare call that is not timed. A ratio is the median over blocks
of the ratios of their medians; every figure is the median over launches, with its 95 % interval
over launches. "again" is the bare call once more, as an arm of its own: its ratio to "bare" shows
what bias is left. gloo sleeps where MPI polls, so it has launches of its own without any MPI.
Without arguments: 2 ranks, 8 launches, three sizes, 60 blocks.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from scipy.stats import quantile_test
from tabulate import tabulate

from ddpbench.launch import placement, starters, supervise
from ddpbench.mpi_backend.group import NAME, register
from ddpbench.mpi_backend.library import library, mpi, world

SIZES = {"4 B": 1, "1 MiB": 1 << 18, "16 MiB": 1 << 22}
OPERATIONS = ("all_reduce", "broadcast", "all_gather")
ARMS = ("bare", "again", "fake", "least", "mpi", "async", "gloo")
RATIOS: dict[str, tuple[str, tuple[str, ...]]] = {  # one arm over the sum of some
    "mpi / (bare + fake)": ("mpi", ("bare", "fake")),
    "mpi / least": ("mpi", ("least",)),
    "again / bare": ("again", ("bare",)),
    "async / mpi": ("async", ("mpi",)),
}
LAUNCHERS = {"mpi": "mpirun", "gloo": ""}
Calls = dict[str, Callable[[], Any]]


class Least(dist.ProcessGroup):  # type: ignore[misc]
    """A group that makes one prepared MPI call, whatever it is asked."""

    bare: Callable[[], Any]

    def allreduce(self, *_: Any) -> None:
        self.bare()

    broadcast = all_gather_single = _allgather_base = allreduce


def torch_calls(count: int, size: int) -> tuple[dict[str, Callable[..., Any]], Any, Any]:
    """Operation → call (group, later), and the two tensors on which all calls of a size work."""
    one, whole = torch.zeros(count), torch.zeros(count * size)  # zeros: summed again and again
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    calls: dict[str, Callable[..., Any]] = {
        "all_reduce": lambda group, later: dist.all_reduce(one, group=group, async_op=later),
        "broadcast": lambda group, later: dist.broadcast(one, 0, group=group, async_op=later),
        "all_gather": lambda group, later: gather(whole, one, group=group, async_op=later),
    }
    return calls, one, whole


def mpi_arms(op: str, count: int, groups: dict[str, Any]) -> Calls:
    """Arm → call, all on the same tensors."""
    comm, (_, size) = groups["comm"], world()
    calls, one, whole = torch_calls(count, size)
    small, large = one.numpy(), whole.numpy()
    bare: Calls = {
        "all_reduce": lambda: comm.Allreduce(mpi().IN_PLACE, small),
        "broadcast": lambda: comm.Bcast(small, 0),
        "all_gather": lambda: comm.Allgather(small, large),
    }
    groups["least"].bare = bare[op]
    found = {"bare": bare[op], "again": bare[op]}
    found |= {name: partial(calls[op], groups[name], False) for name in ("fake", "least", "mpi")}
    return found | {"async": lambda: calls[op](groups["mpi"], True).wait()}


def measured(
    calls: Calls, count: int, barrier: Callable[[], Any], seed: str, blocks: int
) -> dict[str, list[list[float]]]:
    """Arm → block → this rank's times in ns; each block has the arms in an order of its own."""
    many = max(2, min(100, 2_600_000 // count))
    taken: dict[str, list[list[float]]] = {arm: [] for arm in calls}
    order = random.Random(seed)  # the same in every rank
    for _ in range(blocks + 1):
        for arm in order.sample(list(calls), len(calls)):
            call, before = calls[arm], calls["bare"] if arm == "fake" else None
            taken[arm].append([])
            for _ in range(many):
                if before is not None:
                    before()
                barrier()
                began = time.perf_counter_ns()
                call()
                taken[arm][-1].append(time.perf_counter_ns() - began)
    return {arm: blocks[1:] for arm, blocks in taken.items()}  # the first one warms up


def medians(
    taken: dict[str, list[list[float]]], gather: Callable[[Any, Any], Any]
) -> dict[str, list[float]]:
    """Arm → block → median over repetitions of the slowest rank's time, in µs."""
    found = {}
    for arm, blocks in taken.items():
        mine = torch.tensor(blocks, dtype=torch.float64)
        every = torch.empty(dist.get_world_size(), *mine.shape, dtype=torch.float64)
        gather(every, mine)
        found[arm] = [statistics.median(block) / 1e3 for block in every.max(0).values.tolist()]
    return found


def rank_of_mpi(out: Path, sizes: list[str], blocks: int) -> None:
    """One launch of all arms but gloo; rank 0 writes the medians."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers "fake"

    rank, size = world()
    register()
    dist.Backend.register_backend("least", least, extended_api=True, devices=["cpu"])
    store = dist.FileStore(str(out.with_suffix(".store")), size)
    limit = timedelta(seconds=60)
    dist.init_process_group("fake", store=store, rank=rank, world_size=size, timeout=limit)
    groups: dict[str, Any] = {"comm": mpi().COMM_WORLD.Dup(), "fake": dist.group.WORLD}
    groups |= {key: dist.new_group(backend=name) for key, name in (("mpi", NAME), ("least",) * 2)}
    comm = groups["comm"]

    def gather(every: Any, mine: Any) -> None:
        comm.Allgather(mine.numpy(), every.numpy())

    found = {}
    for op in OPERATIONS:
        for label in sizes:
            calls = mpi_arms(op, SIZES[label], groups)
            seed = f"{out.name}/{op}/{label}"
            taken = measured(calls, SIZES[label], comm.Barrier, seed, blocks)
            found[f"{op} {label}"] = medians(taken, gather)
    if rank == 0:
        out.write_text(json.dumps({"library": library(), "medians": found}))
    dist.destroy_process_group()


def rank_of_gloo(out: Path, sizes: list[str], blocks: int) -> None:
    """One launch of gloo alone; rank 0 writes the medians."""
    place = placement.read_placement()
    assert place is not None
    store = dist.FileStore(str(out.with_suffix(".store")), place.world_size)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world_size)
    found = {}
    for op in OPERATIONS:
        for label in sizes:
            calls, *_ = torch_calls(SIZES[label], place.world_size)
            arms: Calls = {"gloo": partial(calls[op], dist.group.WORLD, False)}
            seed = f"{out.name}/{op}/{label}"
            taken = measured(arms, SIZES[label], dist.barrier, seed, blocks)
            found[f"{op} {label}"] = medians(
                taken, lambda every, mine: dist.all_gather(list(every), mine)
            )
    if place.rank == 0:
        out.write_text(json.dumps({"medians": found}))
    dist.destroy_process_group()


def least(given: Any, _: Any) -> dist.ProcessGroup:
    """The creator of a Least group."""
    return Least(given.group_rank, given.group_size)


def ratio(blocks: dict[str, list[float]], above: str, below: tuple[str, ...]) -> float:
    """One arm over the sum of others, in one launch."""
    floors = (sum(each) for each in zip(*(blocks[arm] for arm in below), strict=True))
    return statistics.median(a / b for a, b in zip(blocks[above], floors, strict=True))


def measure_by_turns(ranks: int, launches: int, *words: str) -> dict[str, list[dict[str, Any]]]:
    """Return what each launch of each kind has found; which comes first is drawn for each pair."""
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in LAUNCHERS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(launches):
            for kind in random.sample(list(LAUNCHERS), len(LAUNCHERS)):
                out = Path(folder) / f"{kind}-{number}"
                line = [__file__, "--rank", kind, str(out), *words]
                deadline = supervise.Deadline()
                if code := starters.start(LAUNCHERS[kind], line, None, ranks, deadline):
                    raise SystemExit(code)
                found[kind].append(json.loads(out.read_text()))
    return found


def describe(values: Sequence[float]) -> str:
    """Return the median over launches and its 95 % interval, which six launches or more have."""
    text = f"{statistics.median(values):.3f}"
    if len(values) < 6:
        return text
    interval = quantile_test(values).confidence_interval()
    return f"{text} [{interval.low:.3f}, {interval.high:.3f}]"


def main(ranks: int, launches: int, sizes: str, blocks: str) -> None:
    """Start the launches, print the table."""
    found = measure_by_turns(ranks, launches, sizes, blocks)
    print(
        f"{found['mpi'][0]['library']}, torch {torch.__version__}, {ranks} ranks, {launches} "
        "launches of mpi and as many of gloo; µs: medians over launches"
    )
    rows = []
    for key in found["mpi"][0]["medians"]:
        of = [
            left["medians"][key] | right["medians"][key]
            for left, right in zip(found["mpi"], found["gloo"], strict=True)
        ]
        rows.append([
            key,
            *(f"{statistics.median(map(statistics.median, (each[arm] for each in of))):.2f}"
              for arm in ARMS),
            *(describe([ratio(each, *arms) for each in of]) for arms in RATIOS.values()),
        ])  # fmt: skip
    print(tabulate(rows, ["", *ARMS, *RATIOS], disable_numparse=True))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        torch.set_num_threads(1)
        kind, name, labels, count = sys.argv[2:]
        of_kind = {"mpi": rank_of_mpi, "gloo": rank_of_gloo}[kind]
        of_kind(Path(name), labels.split(","), int(count))
    else:
        defaults = ("2", "8", ",".join(SIZES), "60")
        ranks, launches, chosen, blocks = (*sys.argv[1:], *defaults[len(sys.argv) - 1 :])
        main(int(ranks), int(launches), chosen, blocks)
