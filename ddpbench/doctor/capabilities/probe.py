"""One rank's part of the trials: try every operation, reduce op and dtype, with exact checks.

It runs in a separate process, which trials.py starts. The ranks try one combination after the other
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
from typing import TYPE_CHECKING

from ddpbench.catalog import backends
from ddpbench.catalog.dtypes import DTYPES, REDUCE_OPS
from ddpbench.catalog.operations import OPERATIONS
from ddpbench.doctor.capabilities import verdicts
from ddpbench.doctor.capabilities.verdicts import OK, UNSUPPORTED, WRONG, Combination, Verdict
from ddpbench.measure import throwaway
from ddpbench.measure.throwaway import Tell
from ddpbench.records.schema import Case, Plan
from ddpbench.runtime import control, subgroups
from ddpbench.runtime.subgroups import Subgroup
from ddpbench.runtime.world import World

if TYPE_CHECKING:
    import torch

MODULE = "ddpbench.doctor.capabilities.probe"
ELEMENTS = (64, 13)  # of one block: each combination is tried with both
WAIT_SECONDS = 60.0  # of the ranks for each other; trials.py judges long before
PLAN = Plan(start="none")


@dataclass(frozen=True)
class Request(throwaway.Request):
    """What the ranks must try: all that is wanted, from `first` on."""

    wanted: Sequence[Combination]
    first: int = 0
    known: Combination | None = None  # one that works


def request(
    backend: str, device: str, modules: Sequence[str], wanted: Sequence[Combination] | None = None
) -> Request:
    """Return a request for these combinations, or for all, on this backend."""
    ranks = throwaway.ranks_for(backend)
    return Request(
        backend, device, WAIT_SECONDS, list(modules), backends.get(backend).launcher, ranks,
        combinations(ranks) if wanted is None else wanted,
    )  # fmt: skip


def combinations(ranks: int) -> list[Combination]:
    """Return all that so many ranks can try, the most important first.

    Sums come before other reduce ops. One-byte floats, which few backends support, come last.
    """
    found = [
        Combination(name, form, reduce_op, dtype)
        for name, operation in OPERATIONS.items()
        if ranks > 1 or not operation.paired
        for form in operation.forms
        for reduce_op in (REDUCE_OPS if operation.reduces else (None,))
        for dtype in (DTYPES if operation.sized else (None,))
    ]
    order = {dtype: place for place, dtype in enumerate(DTYPES)}

    def urgency(each: Combination) -> tuple[bool, bool, int]:
        kind = DTYPES.get(each.dtype or "")
        tiny = kind is not None and kind.floating and kind.nbytes == 1
        return tiny, each.reduce_op not in (None, "sum"), order.get(each.dtype or "", 0)

    return sorted(found, key=urgency)


def main(folder: Path) -> int:
    """Start the ranks; in one of them, try the combinations."""
    given = json.loads((folder / "request").read_text())
    known = given["known"] and Combination(**given["known"])
    wanted = [Combination(**each) for each in given["wanted"]]
    request = Request(**{**given, "wanted": wanted, "known": known})
    verdicts = folder / "verdicts"

    def attempt(ranks: World, tell: Tell) -> None:
        tell("doing", "the set-up of the group")
        import torch.distributed as dist

        import_module("ddpbench.measure.loop")  # slow: not in the time of a combination
        with throwaway.tested(request, ranks) as (tested, device), verdicts.open("a", 1) as file:

            def note(number: int, verdict: Verdict) -> None:
                if ranks.rank == 0:
                    file.write(json.dumps([number, asdict(verdict)]) + "\n")

            everyone = subgroups.divide_ranks("world", list(ranks.hosts.values()))
            team = Subgroup(everyone, tested, tested, rank=ranks.rank)
            dist.barrier(group=tested)  # nor are connections made in it
            walk(request, ranks, team, device, tell, note)

    return throwaway.run(MODULE, folder, request, attempt)


def walk(
    request: Request, ranks: World, team: Subgroup, device: torch.device, tell: Tell,
    note: Callable[[int, Verdict], None],
) -> None:  # fmt: skip
    """Try one combination after the other, until the ranks or their group are out of step.

    note: stores the verdict of a combination, by its number.
    """
    known = request.known
    for number in range(request.first, len(request.wanted)):
        each = request.wanted[number]
        ranks.watchdog.rearm()
        tell("doing", str(number))
        mine = attempted(request, each, ranks, team, device)
        if mine.outcome == UNSUPPORTED:
            tell("refused", f"{number} {mine.why}")  # while others may wait for ever
        else:
            tell("tried", str(number))
        verdict, apart = verdicts.agreed(_everyones(ranks, mine))
        note(number, verdict)
        if verdict.outcome == OK:
            known = known or each
        elif known is not None and not apart:
            tell("checking", str(number))
            again, _ = verdicts.agreed(
                _everyones(ranks, attempted(request, known, ranks, team, device))
            )
            if again.outcome != OK:
                apart = True
                note(number, verdicts.breaking(verdict))
        if apart:
            return
    tell("works", str(len(request.wanted)))


def _everyones(ranks: World, mine: Verdict) -> list[Verdict]:
    return [Verdict(**each) for each in control.gather_values(ranks, asdict(mine))]


def attempted(
    request: Request, each: Combination, ranks: World, team: Subgroup, device: torch.device
) -> Verdict:
    """Return this rank's own verdict: the result is right or wrong, or the call was refused."""
    from ddpbench.measure.loop import Bench

    operation = OPERATIONS[each.operation]
    found = Verdict(OK)
    for elements in ELEMENTS:  # always all of them, so that the ranks stay in step
        try:
            case = _case(request, each, elements, team)
            bench = Bench(case, PLAN, ranks, team, device)
            bench.repeat(1)
            wrong = bench.wrong(-1) if operation.sized else None
        except Exception as error:  # any error is a backend's way to refuse
            return Verdict(UNSUPPORTED, throwaway.sentence(error))
        if wrong is not None and found.outcome == OK:
            found = Verdict(
                WRONG,
                f"rank {wrong.rank} got {wrong.got} at index {wrong.index}, {elements} elements a "
                f"block, expected {wrong.expected}",
                {
                    "rank": wrong.rank, "index": wrong.index, "elements": elements,
                    "expected": wrong.expected, "got": wrong.got,
                },
            )  # fmt: skip
    return found


def _case(request: Request, each: Combination, elements: int, team: Subgroup) -> Case:
    operation, size = OPERATIONS[each.operation], team.partition.size
    dtype = each.dtype or "uint8"
    count = elements if operation.sized else 0
    return Case(
        operation=each.operation,
        form=each.form,
        backend=request.backend,
        provider="",
        device=request.device,
        dtype=dtype,
        reduce_op=each.reduce_op,
        root=0 if operation.rooted else None,
        nbytes=count * DTYPES[dtype].nbytes * (size if operation.blocks else 1),
        count=count,
        in_place=operation.places[0] == "in",
        async_op=False,
        issue="isolated",
        start=PLAN.start,
        depth=1,
        world_size=size,
        ranks_per_host=team.partition.ranks_per_host,
    )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
