"""Capabilities: try every operation, reduce op and dtype on the backend, and check every result.

Separate ranks on the host of rank 0 try them while the ranks wait, one combination after another,
and agree on each verdict over the control group. Fresh ranks go on after a combination that
crashes, hangs or breaks the group.

figures: {"verdicts": [{"operation", "form", "reduce_op" (null: none), "dtype" (null: no data),
"outcome": "ok", "unsupported", "wrong", "crash" or "hang", "why": "", "wrong": place and values of
a wrong result}, …]}
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ddpbench.catalog import backends
from ddpbench.catalog.dtypes import DTYPES, REDUCE_OPS
from ddpbench.catalog.operations import OPERATIONS
from ddpbench.doctor.capabilities import judge, throwaway_ranks
from ddpbench.doctor.capabilities.judge import (
    CRASH,
    HANG,
    OK,
    UNSUPPORTED,
    WRONG,
    Combination,
    Verdict,
)
from ddpbench.doctor.capabilities.throwaway_ranks import Report, Trial
from ddpbench.doctor.context import Context, Outcome
from ddpbench.launch.supervise import Clock
from ddpbench.measure import start
from ddpbench.records.schema import Case, Plan
from ddpbench.records.wording import counted
from ddpbench.runtime import control, subgroups
from ddpbench.runtime.subgroups import Partition, Subgroup
from ddpbench.runtime.world import World

if TYPE_CHECKING:
    import torch

MODULE = "ddpbench.doctor.capabilities.measure"
ELEMENTS = (64, 13)  # of one block: each combination is tried with both
WAIT_SECONDS = 60.0  # of the ranks for each other; `_wait` ends a hang long before
# For one combination, which takes some ms; a first call may make a communicator and load code.
HANG_SECONDS = 15.0
REFERENCE = Combination("all_reduce", "tensor", "sum", "float32")  # shows that a group still works
PLAN = Plan(start="none")
TIME_FACTOR = 3  # times the seconds of an examination: fresh ranks need time to start
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Request(throwaway_ranks.Request):
    """What the ranks must try: all that is wanted, from `first` on."""

    wanted: Sequence[Combination]
    first: int = 0


@dataclass
class Trials:
    """The verdicts so far."""

    request: Request
    verdicts: list[Verdict] = field(default_factory=list)  # of the first wanted ones, in order
    given_up: str | None = None  # why the rest was not tried, a clause

    @property
    def untried(self) -> int:
        """Return the number of combinations that are left."""
        return len(self.request.wanted) - len(self.verdicts)


def make_request(backend: str, device: str, modules: Sequence[str]) -> Request:
    """Return a request for all combinations on this backend. modules: imported first."""
    ranks, launcher = throwaway_ranks.RANKS, backends.get(backend).launcher
    wanted = list_combinations()
    return Request(backend, device, WAIT_SECONDS, list(modules), launcher, ranks, wanted)


def list_combinations() -> list[Combination]:
    """Return all combinations, the most important first: sums before other reduce ops."""
    found = [
        Combination(name, form, reduce_op, dtype)
        for name, operation in OPERATIONS.items()
        for form in operation.forms
        for reduce_op in (REDUCE_OPS if operation.reduces else (None,))
        for dtype in (DTYPES if operation.sized else (None,))
    ]
    order: dict[str | None, int] = {
        None: 0,
        **{dtype: number for number, dtype in enumerate(DTYPES)},
    }
    return sorted(found, key=lambda c: (c.reduce_op not in (None, "sum"), order[c.dtype]))


def examine(context: Context) -> Outcome:
    """Try all combinations. All ranks call it; the outcome is that of rank 0."""
    world, backend, device = context.world, context.backend.name, context.device.type
    trials = Trials(make_request(backend, device, context.modules))
    with contextlib.ExitStack() as stack:
        steps: Generator[None, None, None] | None = None
        if world.rank == 0:
            steps = try_all(trials, TIME_FACTOR * context.seconds)
            stack.callback(steps.close)
        over = False
        while not control.agree_any(over or world.interrupted is not None):
            world.watchdog.rearm()
            over = steps is not None and next(steps, "over") == "over"
    return _outcome(context, trials) if world.rank == 0 else Outcome()


def _outcome(context: Context, trials: Trials) -> Outcome:
    wanted, unchecked = len(trials.request.wanted), []
    if trials.untried:
        reason = trials.given_up or "it was interrupted"
        unchecked.append(f"{trials.untried} of {wanted} combinations were not tried: {reason}")
    pairs = zip(trials.request.wanted, trials.verdicts, strict=False)
    rows = [{**asdict(combination), **asdict(verdict)} for combination, verdict in pairs]
    lines = [
        f"tried {len(rows)} combinations of operation, reduce op and dtype, each with "
        f"{' and '.join(map(str, ELEMENTS))} elements per block, in separate processes "
        f"({counted(trials.request.ranks, 'rank')}): {judge.count_outcomes(rows)}"
    ]
    if len(context.world.hosts) > 1:
        hostname = context.launch.ranks[0]["hostname"]
        lines.append(f"tried only on {hostname}, the host of rank 0")
    backend = context.backend.name
    return Outcome(
        lines=tuple(lines),
        unchecked=tuple(unchecked),
        findings=judge.find_bad(backend, rows),
        figures={"verdicts": rows},
        tables=(judge.build_table(rows, f"what {backend} can do"),) if rows else (),
    )


# --- one set of ranks after the other -------------------------------------------------------------


def try_all(trials: Trials, seconds: float, clock: Clock = time) -> Generator[None, None, None]:
    """Try all combinations in about so many seconds at most, and add the verdicts.

    Yields about every POLL_SECONDS until the end. Closed earlier, it leaves nothing running. A
    combination that seems to crash is tried a second time, in fresh ranks.
    """
    until, suspect = clock.monotonic() + seconds, -1
    while trials.untried and trials.given_up is None:
        first = len(trials.verdicts)
        with throwaway_ranks.started(MODULE, replace(trials.request, first=first)) as trial:
            hung = yield from _wait(trial, until, clock)
            code = trial.end()
            trials.verdicts += _read_verdicts(trial)
            number = len(trials.verdicts)
            verdict = _judge_end(trial, number, hung, code)
            if clock.monotonic() >= until:  # what was running then was not tried
                trials.given_up = f"the {seconds:g} s for them were over; increase --case-time"
            elif verdict is None and number == first:
                trials.given_up = (
                    f"the ranks could not start (exit code {code}): {_last_words(trial)}"
                )
            elif verdict is not None:
                if verdict.outcome != CRASH or suspect == number:
                    trials.verdicts.append(verdict)
                suspect = number


def _wait(trial: Trial, until: float, clock: Clock) -> Generator[None, None, bool]:
    """Wait until the ranks or the time have ended. Return whether the ranks hang."""
    while trial.process.poll() is None and clock.monotonic() < until:
        # A rank that is through waits for the others, so the last report counts.
        reports = [state.since for state in trial.states() if state.kind != "doing"]
        if reports and clock.time() - max(reports) > HANG_SECONDS:
            return True
        yield
        clock.sleep(POLL_SECONDS)
    return False


def _read_verdicts(trial: Trial) -> list[Verdict]:
    """Read the verdicts that rank 0 has stored, except a line that is cut off."""
    path = trial.folder / "verdicts"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [msgspec.json.decode(line, type=Verdict) for line in lines if line.endswith(b"\n")]


def _judge_end(trial: Trial, number: int, hung: bool, code: int) -> Verdict | None:
    """Return what a combination without a verdict did to its ranks; None: no rank tried it."""
    here = [state for state in trial.states() if state.text.split(" ")[0] == str(number)]
    if not here:
        return None
    if (died := throwaway_ranks.death(throwaway_ranks.output(trial.folder))) is not None:
        return Verdict(CRASH, f"a rank {died}")
    if not hung:
        return Verdict(CRASH, f"its ranks ended with exit code {code}: {_last_words(trial)}")
    if refused := [state for state in here if state.kind == "refused"]:
        why = refused[0].text.partition(" ")[2]
        return judge.refused_by([state.rank for state in refused], why)
    busy = [str(state.rank) for state in here if state.kind == "trying"]
    return Verdict(HANG, f"rank {', '.join(busy)} did not return within {HANG_SECONDS:g} s")


def _last_words(trial: Trial) -> str:
    failed = [state.text for state in trial.states() if state.kind == "failed"]
    output = throwaway_ranks.output(trial.folder)
    words = failed[:1] or throwaway_ranks.last_words(output) or ["no message"]
    return throwaway_ranks.short(": ".join(words))


# --- in the throwaway ranks -----------------------------------------------------------------------

# Each reports "trying NUMBER", then "tried NUMBER" or "refused NUMBER REASON".


def main(folder: Path) -> int:
    """Start the ranks; in one of them, try the combinations."""
    request = msgspec.json.decode((folder / "request").read_bytes(), type=Request)
    in_rank = partial(_try_in_rank, request, folder)
    return throwaway_ranks.run(MODULE, folder, request, in_rank, ["ddpbench.measure.loop"])


def _try_in_rank(request: Request, folder: Path, world: World, report: Report) -> None:
    report("doing", "the set-up of the group")
    import_module("ddpbench.measure.loop")  # slow: not in the time of a combination
    with throwaway_ranks.tested(request, world) as (tested, device):
        start.barrier(tested, device)()  # nor are connections made in it
        partition = subgroups.divide_ranks("world", list(world.hosts.values()))
        subgroup = Subgroup(partition, tested, tested, rank=world.rank)
        attempt = partial(try_call, request, world, subgroup, device)
        with (folder / "verdicts").open("ab", 0) as file:
            for verdict in walk(request, world, attempt, report):
                if world.rank == 0:
                    file.write(msgspec.json.encode(verdict) + b"\n")


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
        report("trying", str(number))
        own = attempt(combination)
        if own.outcome == UNSUPPORTED:
            report("refused", f"{number} {own.why}")  # while others may wait forever
        else:
            report("tried", str(number))
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
        return Verdict(UNSUPPORTED, throwaway_ranks.sentence(error))
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
