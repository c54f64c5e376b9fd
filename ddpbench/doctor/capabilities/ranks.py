"""The ranks that try the combinations: separate processes, because a call may abort or hang.

Files in the folder of a trial:
request   the `Request`
output    the output of the ranks and their launcher
verdicts  a line of JSON for each combination, by rank 0
reports   "NUMBER RANK trying", then "NUMBER RANK tried" or "NUMBER RANK refused REASON"
"""

from __future__ import annotations

import ctypes
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ddpbench.catalog import backends
from ddpbench.catalog.dtypes import DTYPES
from ddpbench.catalog.operations import OPERATIONS
from ddpbench.doctor.capabilities import judge
from ddpbench.doctor.capabilities.judge import OK, UNSUPPORTED, WRONG, Combination, Verdict
from ddpbench.launch import placement, starters
from ddpbench.launch.placement import Placement
from ddpbench.launch.supervise import Deadline
from ddpbench.measure import start
from ddpbench.records.schema import Case, Plan
from ddpbench.runtime import control, devices, subgroups
from ddpbench.runtime.subgroups import Partition, Subgroup
from ddpbench.runtime.world import World, join_world

if TYPE_CHECKING:
    import torch

MODULE = "ddpbench.doctor.capabilities.ranks"
RANKS = 2  # they may share a GPU
ELEMENTS = (64, 13)  # of one block: each combination is tried with both
WAIT_SECONDS = 60.0  # of the ranks for each other; the parent ends a hang long before
REFERENCE = Combination("all_reduce", "tensor", "sum", "float32")  # shows that a group still works
PLAN = Plan(start="none")
Report = Callable[[int, str], object]  # (number of the combination, what this rank does)


@dataclass(frozen=True)
class Request:
    """The combinations to try: all that are wanted, from `first` on."""

    backend: str
    device: str
    launcher: str  # as in starters.start
    modules: Sequence[str]  # imported first
    wanted: Sequence[Combination]
    first: int = 0


def shorten(text: str) -> str:
    """Shorten a text to 400 characters."""
    return text if len(text) <= 400 else f"{text[:399]}…"


def main(folder: Path) -> int:
    """Start the ranks; in a rank, try the combinations."""
    request = msgspec.json.decode((folder / "request").read_bytes(), type=Request)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if placement.read_placement() is not None:
        return _try_in_rank(request, folder)
    # The parent may be killed while it waits. Then end this process, too.
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    return starters.start(
        request.launcher,
        ["-m", MODULE, str(folder)],
        partial(_try_in_rank, request, folder) if devices.get(request.device).forks else None,
        RANKS,
        Deadline(WAIT_SECONDS),
        ["ddpbench.measure.loop"],
    )


def _try_in_rank(request: Request, folder: Path) -> int:
    own = placement.read_placement()
    assert isinstance(own, Placement)
    for module in (*request.modules, "ddpbench.measure.loop"):  # not in the time of a combination
        import_module(module)
    backend = backends.get(request.backend)
    name = backend.register() if backend.register else backend.name
    with join_world(own, WAIT_SECONDS, share_gpu=True) as world:
        device = world.agree_device(request.device)
        with world.agree_group(name, device=device) as group:
            start.barrier(group, device)()  # nor are connections made in it
            partition = subgroups.divide_ranks("world", list(world.hosts.values()))
            subgroup = Subgroup(partition, group, group, rank=world.rank)
            attempt = partial(try_call, request, world, subgroup, device)
            with (
                (folder / "verdicts").open("ab", 0) as verdicts,
                (folder / "reports").open("a", buffering=1) as reports,
            ):

                def report(number: int, text: str) -> None:
                    reports.write(f"{number} {world.rank} {text}\n")

                for verdict in walk(request, world, attempt, report):
                    if world.rank == 0:
                        verdicts.write(msgspec.json.encode(verdict) + b"\n")
    return 0


def walk(
    request: Request,
    world: World,
    attempt: Callable[[Combination], Verdict],
    report: Report,
) -> Iterator[Verdict]:
    """Try one combination after the other; yield the verdict of each.

    Ends early if only some ranks refuse, because they are then out of step, or if REFERENCE does
    not work after a refusal, because the group is then broken.
    """
    for number, combination in list(enumerate(request.wanted))[request.first :]:
        world.watchdog.rearm()
        report(number, "trying")
        own = attempt(combination)
        # Others may wait forever for a rank that refuses.
        report(number, f"refused {own.why}" if own.outcome == UNSUPPORTED else "tried")
        verdicts = control.gather_values(world, asdict(own))
        verdict, apart = judge.combine_verdicts([Verdict(**each) for each in verdicts])
        yield verdict
        if apart:
            return
        if verdict.outcome == UNSUPPORTED:
            again = attempt(REFERENCE)
            if control.agree_any(again.outcome != OK):
                return


def try_call(
    request: Request,
    world: World,
    subgroup: Subgroup,
    device: torch.device,
    combination: Combination,
) -> Verdict:
    """Call an operation with all sizes, and check its results. Return this rank's own verdict."""
    from ddpbench.measure.loop import Bench

    verdict = Verdict(OK)
    try:
        for elements in ELEMENTS:  # always all of them, so that the ranks stay in step
            case = _make_case(request, subgroup.partition, combination, elements)
            bench = Bench(case, PLAN, world, subgroup, device)
            bench.repeat(1)
            wrong = bench.find_wrong(-1) if bench.operation.sized else None
            if wrong is not None and verdict.outcome == OK:
                why = (
                    f"rank {wrong.rank} got {wrong.got} at index {wrong.index}, {elements} "
                    f"elements per block, expected {wrong.expected}"
                )
                place = {"rank": wrong.rank, "index": wrong.index, "elements": elements}
                values = {"expected": wrong.expected, "got": wrong.got}
                verdict = Verdict(WRONG, why, {**place, **values})
    except Exception as error:  # any error is a backend's way to refuse
        first = (str(error).strip() or "no text").splitlines()[0]
        _, in_callback, text = first.rpartition("running the callback: ")  # of a torch future
        why = text if in_callback else f"{type(error).__name__}: {text}"
        return Verdict(UNSUPPORTED, shorten(why))
    return verdict


def _make_case(
    request: Request, partition: Partition, combination: Combination, elements: int
) -> Case:
    operation, dtype = OPERATIONS[combination.operation], combination.dtype or "uint8"
    count = elements if operation.sized else 0
    return Case(
        operation=operation.name,
        form=combination.form,
        backend=request.backend,
        provider="",
        device=request.device,
        dtype=dtype,
        reduce_op=combination.reduce_op,
        root=0 if operation.rooted else None,
        nbytes=count * DTYPES[dtype].nbytes * (partition.size if operation.blocks else 1),
        count=count,
        in_place=operation.places[0] == "in",
        async_op=False,
        issue="isolated",
        start=PLAN.start,
        depth=1,
        world_size=partition.size,
        ranks_per_host=partition.ranks_per_host,
    )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
