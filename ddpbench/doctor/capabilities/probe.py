"""One rank's part of the trials: try every operation, reduce op and dtype, with exact checks.

It runs in a separate process, which examine.py starts. The ranks try one combination after another
and agree on each verdict over the control group. After each refusal they repeat a combination that
works. So if one combination breaks the group, the next one is not blamed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ddpbench.catalog import backends
from ddpbench.catalog.dtypes import DTYPES, REDUCE_OPS
from ddpbench.catalog.operations import OPERATIONS
from ddpbench.doctor.capabilities import parallel, verdicts
from ddpbench.doctor.capabilities.verdicts import (
    OK,
    PARALLEL,
    UNSUPPORTED,
    WRONG,
    Combination,
    Verdict,
)
from ddpbench.measure import memory, start, throwaway_ranks
from ddpbench.measure.throwaway_ranks import Report
from ddpbench.records.schema import Case, Plan
from ddpbench.runtime import control, devices, subgroups
from ddpbench.runtime.subgroups import Subgroup
from ddpbench.runtime.world import World

if TYPE_CHECKING:
    import torch

MODULE = "ddpbench.doctor.capabilities.probe"
ELEMENTS = (64, 13)  # of one block: each combination is tried with both
WAIT_SECONDS = 60.0  # of the ranks for each other; examine.py judges long before
PLAN = Plan(start="none")


@dataclass(frozen=True)
class Request(throwaway_ranks.Request):
    """What the ranks must try: all that is wanted, from `first` on."""

    wanted: Sequence[Combination]
    first: int = 0
    known: Combination | None = None  # one that works
    folder: str = ""  # of their files


class Place(NamedTuple):
    """Where one rank tries combinations."""

    request: Request
    world: World
    subgroup: Subgroup
    device: torch.device


def request(
    backend: str, device: str, modules: Sequence[str], wanted: Sequence[Combination] | None = None
) -> Request:
    """Return a request for these combinations, or for all, on this backend."""
    ranks = throwaway_ranks.RANKS
    launcher = backends.get(backend).launcher
    wanted = combinations(ranks) if wanted is None else wanted
    return Request(backend, device, WAIT_SECONDS, list(modules), launcher, ranks, wanted)


def combinations(ranks: int) -> list[Combination]:
    """Return all that so many ranks can try, the most important first.

    Sums come before other reduce ops, those of the first dtype with the ways of parallel training
    behind them. One-byte floats, which few backends support, come last.
    """
    combinations = [
        Combination(name, form, reduce_op, dtype)
        for name, operation in OPERATIONS.items()
        if ranks > 1 or not operation.paired
        for form in operation.forms
        for reduce_op in (REDUCE_OPS if operation.reduces else (None,))
        for dtype in (DTYPES if operation.sized else (None,))
    ]
    order = {dtype: number for number, dtype in enumerate(DTYPES)}

    def urgency(combination: Combination) -> tuple[bool, bool, int]:
        name = combination.dtype or ""
        dtype = DTYPES.get(name)
        tiny = dtype is not None and dtype.floating and dtype.nbytes == 1
        return tiny, combination.reduce_op not in (None, "sum"), order.get(name, 0)

    combinations.sort(key=urgency)
    common = sum(urgency(combination) <= (False, False, 0) for combination in combinations)
    return combinations[:common] + parallel.list_combinations(ranks) + combinations[common:]


def main(folder: Path) -> int:
    """Start the ranks; in one of them, try the combinations."""
    values = json.loads((folder / "request").read_text())
    known = values["known"] and Combination(**values["known"])
    wanted = [Combination(**combination) for combination in values["wanted"]]
    request = Request(**{**values, "wanted": wanted, "known": known, "folder": str(folder)})
    verdicts = folder / "verdicts"
    preloaded = parallel.MODULES if any(c.form == PARALLEL for c in wanted) else ()

    def attempt(world: World, report: Report) -> None:
        report("doing", "the set-up of the group")
        for module in ("ddpbench.measure.loop", *preloaded):
            import_module(module)  # slow: not in the time of a combination
        with (
            throwaway_ranks.tested(request, world) as (tested, device),
            verdicts.open("a", 1) as file,
        ):

            def note(number: int, verdict: Verdict) -> None:
                if world.rank == 0:
                    file.write(json.dumps([number, asdict(verdict)]) + "\n")

            partition = subgroups.divide_ranks("world", list(world.hosts.values()))
            subgroup = Subgroup(partition, tested, tested, rank=world.rank)
            start.barrier(tested, device)()  # nor are connections made in it
            place = Place(request, world, subgroup, device)
            if request.known is not None:
                attempted(place, request.known)
            walk(place, report=report, note=note)

    return throwaway_ranks.run(MODULE, folder, request, attempt, preloaded)


def walk(place: Place, *, report: Report, note: Callable[[int, Verdict], None]) -> None:
    """Try one combination after the other, until the ranks or their group are out of step.

    note: stores the verdict of a combination, by its number.
    """
    request, world = place.request, place.world
    known, called = request.known, set()
    for number in range(request.first, len(request.wanted)):
        combination = request.wanted[number]
        world.watchdog.rearm()
        if combination.form == PARALLEL:
            report("training", str(number))
        else:  # the first call of an operation may connect the ranks once more, and load code
            report("doing" if combination.operation in called else "first", str(number))
        called.add(combination.operation)
        own = attempted(place, combination)
        if own.outcome == UNSUPPORTED:
            report("refused", f"{number} {own.why}")  # while others may wait for ever
        else:
            report("tried", str(number))
        verdict, apart = _agree_verdict(world, own)
        broken = control.gather_values(world, _has_failed(place.device))
        if any(broken):  # whatever these processes try from now on fails, too
            verdict, apart = verdicts.breaking(verdict), True
        note(number, verdict)
        if verdict.outcome == OK:
            known = known or combination
        elif known is not None and not apart:
            report("checking", str(number))
            own = attempted(place, known)
            again, _ = _agree_verdict(world, own)
            if again.outcome != OK:
                apart = True
                note(number, verdicts.breaking(verdict))
        if apart:
            report("left", str(number))
            return
    report("works", str(len(request.wanted)))


def _has_failed(device: torch.device) -> bool:
    """Whether an error, such as a bad access on a GPU, has made the device useless here."""
    try:
        event = devices.of(device).event(device)
        event.record()
        event.query()  # unlike a synchronisation, it does not wait for a call that hangs
    except RuntimeError:
        return True
    return False


def _agree_verdict(world: World, own: Verdict) -> tuple[Verdict, bool]:
    """Combine the verdicts of all ranks; return whether only some of them refused."""
    return verdicts.agreed(
        [Verdict(**values) for values in control.gather_values(world, asdict(own))]
    )


def attempted(place: Place, combination: Combination) -> Verdict:
    """Return this rank's own verdict: the result is right or wrong, or the call was refused.

    Raises an error that says that memory is short: that is no refusal of the backend.
    """
    try:
        if combination.form == PARALLEL:
            group, folder = place.subgroup.world_group, place.request.folder
            ranks = parallel.Ranks(place.world, group, place.device, folder)
            return parallel.attempt(combination.operation, ranks)
        return _call(place, combination)
    except Exception as error:  # any other error is a backend's way to refuse
        if memory.OUT_OF_MEMORY.search(str(error)):
            raise
        return Verdict(UNSUPPORTED, throwaway_ranks.sentence(error))


def _call(place: Place, combination: Combination) -> Verdict:
    """Call an operation with all sizes, and check its results."""
    from ddpbench.measure.loop import Bench

    verdict = Verdict(OK)
    for elements in ELEMENTS:  # always all of them, so that the ranks stay in step
        case = _case(place, combination, elements)
        bench = Bench(case, PLAN, place.world, place.subgroup, place.device)
        bench.repeat(1)
        wrong = bench.wrong(-1) if OPERATIONS[combination.operation].sized else None
        if wrong is not None and verdict.outcome == OK:
            verdict = Verdict(
                WRONG,
                f"rank {wrong.rank} got {wrong.got} at index {wrong.index}, {elements} elements a "
                f"block, expected {wrong.expected}",
                {
                    "rank": wrong.rank,
                    "index": wrong.index,
                    "elements": elements,
                    "expected": wrong.expected,
                    "got": wrong.got,
                },
            )
    return verdict


def _case(place: Place, combination: Combination, elements: int) -> Case:
    operation, partition = OPERATIONS[combination.operation], place.subgroup.partition
    dtype = combination.dtype or "uint8"
    count = elements if operation.sized else 0
    return Case(
        operation=combination.operation,
        form=combination.form,
        backend=place.request.backend,
        provider="",
        device=place.request.device,
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
