"""One rank's part of the trials: try every operation, reduce op and dtype, with exact checks.

It runs in a separate process, which measure.py starts. The ranks try one combination after another
and agree on each verdict over the control group. After each refusal they repeat a combination that
works. So if one combination breaks the group, the next one is not blamed.

Each rank reports "trying NUMBER SECONDS", then "tried NUMBER" or "refused NUMBER REASON". Between
"checking NUMBER" and "checked NUMBER" it repeats one that works.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path

from ddpbench.catalog import backends
from ddpbench.catalog.dtypes import DTYPES, REDUCE_OPS
from ddpbench.catalog.operations import OPERATIONS
from ddpbench.doctor.capabilities import judge, ways
from ddpbench.doctor.capabilities.judge import (
    OK,
    PARALLEL,
    UNSUPPORTED,
    WRONG,
    Combination,
    Verdict,
)
from ddpbench.doctor.capabilities.ways import Ranks
from ddpbench.measure import memory, start, throwaway_ranks
from ddpbench.measure.throwaway_ranks import Report
from ddpbench.records.schema import Case, Plan
from ddpbench.runtime import control, devices, subgroups
from ddpbench.runtime.subgroups import Partition, Subgroup
from ddpbench.runtime.world import World

MODULE = "ddpbench.doctor.capabilities.probe"
ELEMENTS = (64, 13)  # of one block: each combination is tried with both
WAIT_SECONDS = 60.0  # of the ranks for each other; measure.py judges long before
HANG_SECONDS = 5.0  # for one combination: a few ms of work
# For the first call of an operation on a device, which may make a communicator and load code, and
# for a way of parallel training, which is many calls.
FIRST_SECONDS = 30.0
PLAN = Plan(start="none")


@dataclass(frozen=True)
class Request(throwaway_ranks.Request):
    """What the ranks must try: all that is wanted, from `first` on."""

    wanted: Sequence[Combination]
    first: int = 0
    known: Combination | None = None  # one that works


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
    found = [
        Combination(name, form, reduce_op, dtype)
        for name, operation in OPERATIONS.items()
        if ranks > 1 or not operation.paired
        for form in operation.forms
        for reduce_op in (REDUCE_OPS if operation.reduces else (None,))
        for dtype in (DTYPES if operation.sized else (None,))
    ]
    if ranks > 1:  # one rank sends nothing
        found += [Combination(name, PARALLEL, None, None) for name in ways.WAYS]
    order = list(DTYPES)

    def urgency(each: Combination) -> tuple[bool, bool, int, bool]:
        dtype = DTYPES[each.dtype or order[0]]
        tiny = dtype.floating and dtype.nbytes == 1
        number = order.index(each.dtype or order[0])
        return tiny, each.reduce_op not in (None, "sum"), number, each.form == PARALLEL

    return sorted(found, key=urgency)


def main(folder: Path) -> int:
    """Start the ranks; in one of them, try the combinations."""
    values = json.loads((folder / "request").read_text())
    known = values["known"] and Combination(**values["known"])
    wanted = [Combination(**combination) for combination in values["wanted"]]
    request = Request(**{**values, "wanted": wanted, "known": known})
    preloaded = ways.MODULES if any(c.form == PARALLEL for c in wanted) else ()
    attempt = partial(_try_all, request, folder, ("ddpbench.measure.loop", *preloaded))
    return throwaway_ranks.run(MODULE, folder, request, attempt, preloaded)


def _try_all(
    request: Request, folder: Path, modules: Sequence[str], world: World, report: Report
) -> None:
    report("doing", "the set-up of the group")
    for module in modules:
        import_module(module)  # slow: not in the time of a combination
    with throwaway_ranks.tested(request, world) as (tested, device):
        start.barrier(tested, device)()  # nor are connections made in it
        ranks = Ranks(world, tested, device, folder)
        if request.known is not None:
            attempted(request, ranks, request.known)
        with (folder / "verdicts").open("a", 1) as file:

            def note(number: int, verdict: Verdict) -> None:
                if world.rank == 0:
                    print(json.dumps([number, asdict(verdict)]), file=file)

            walk(request, ranks, report, note)


def walk(
    request: Request, ranks: Ranks, report: Report, note: Callable[[int, Verdict], None]
) -> None:
    """Try one combination after the other, until the ranks or their group are out of step.

    note: stores the verdict of a combination, by its number.
    """
    world, known, called = ranks.world, request.known, set[str]()
    for number, combination in list(enumerate(request.wanted))[request.first :]:
        world.watchdog.rearm()
        slow = combination.operation not in called and devices.of(ranks.device).clock == "device"
        seconds = FIRST_SECONDS if slow or combination.form == PARALLEL else HANG_SECONDS
        called.add(combination.operation)
        report("trying", f"{number} {seconds:g}")
        own = attempted(request, ranks, combination)
        if own.outcome == UNSUPPORTED:
            report("refused", f"{number} {own.why}")  # while others may wait for ever
        else:
            report("tried", str(number))
        verdict, apart = _agree_verdict(world, own)
        note(number, verdict)
        if verdict.outcome == OK:
            known = known or combination
        elif known is not None and not apart:
            report("checking", str(number))
            again, _ = _agree_verdict(world, attempted(request, ranks, known))
            report("checked", str(number))
            if again.outcome != OK:  # whatever these processes try from now on fails, too
                note(number, verdict.breaking())
                return
        if apart:
            return


def _agree_verdict(world: World, own: Verdict) -> tuple[Verdict, bool]:
    """Combine the verdicts of all ranks; return whether only some of them refused."""
    return judge.agreed([Verdict(**one) for one in control.gather_values(world, asdict(own))])


def attempted(request: Request, ranks: Ranks, combination: Combination) -> Verdict:
    """Return this rank's own verdict: the result is right or wrong, or the call was refused.

    Raises an error that says that memory is short: that is no refusal of the backend.
    """
    try:
        if combination.form == PARALLEL:
            return ways.attempt(combination.operation, ranks)
        return _call(request, ranks, combination)
    except Exception as error:  # any other error is a backend's way to refuse
        if memory.OUT_OF_MEMORY.search(str(error)):
            raise
        return Verdict(UNSUPPORTED, throwaway_ranks.sentence(error))


def _call(request: Request, ranks: Ranks, combination: Combination) -> Verdict:
    """Call an operation with all sizes, and check its results."""
    from ddpbench.measure.loop import Bench

    partition = subgroups.divide_ranks("world", list(ranks.world.hosts.values()))
    subgroup = Subgroup(partition, ranks.group, ranks.group, rank=ranks.world.rank)
    verdict = Verdict(OK)
    for elements in ELEMENTS:  # always all of them, so that the ranks stay in step
        case = _case(request, partition, combination, elements)
        bench = Bench(case, PLAN, ranks.world, subgroup, ranks.device)
        bench.repeat(1)
        wrong = bench.wrong(-1) if OPERATIONS[combination.operation].sized else None
        if wrong is not None and verdict.outcome == OK:
            facts = {"rank": wrong.rank, "index": wrong.index, "elements": elements}
            why = (
                f"rank {wrong.rank} got {wrong.got} at index {wrong.index}, {elements} elements a "
                f"block, expected {wrong.expected}"
            )
            verdict = Verdict(WRONG, why, {**facts, "expected": wrong.expected, "got": wrong.got})
    return verdict


def _case(request: Request, partition: Partition, combination: Combination, elements: int) -> Case:
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
