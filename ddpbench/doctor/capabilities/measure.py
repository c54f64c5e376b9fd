"""Capabilities: try every operation, reduce op and dtype on the backend, and check every result.

Separate ranks on the host of rank 0 try them while the ranks wait, one combination after another,
and agree on each verdict over the control group. They also try the ways of parallel training:
ways.py. After each refusal they repeat a combination that works, so that if a refusal breaks the
group, the next combination is not blamed. Fresh ranks replace those that crash, hang or leave.

figures: {
    "ranks": number of ranks that tried,
    "elements": [elements of a block; each combination is tried with all of them],
    "wanted": number of combinations,
    "verdicts": [{"operation", "form", "reduce_op" (null: none), "dtype" (null: no data),
                  "outcome": "ok", "unsupported", "wrong", "crash" or "hang", "why": ""}, …]
                 form "parallel": the operation is a way of parallel training
}
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path

from ddpbench.catalog import backends
from ddpbench.catalog.dtypes import DTYPES, REDUCE_OPS
from ddpbench.catalog.operations import OPERATIONS
from ddpbench.doctor.capabilities import judge, ways
from ddpbench.doctor.capabilities.judge import (
    CRASH,
    HANG,
    OK,
    PARALLEL,
    UNSUPPORTED,
    WRONG,
    Combination,
    Verdict,
)
from ddpbench.doctor.capabilities.ways import Ranks
from ddpbench.doctor.context import Context, Outcome
from ddpbench.launch.clock import Clock
from ddpbench.measure import memory, start, throwaway_ranks
from ddpbench.measure.throwaway_ranks import Report, Trial
from ddpbench.records.schema import Case, Plan
from ddpbench.records.wording import counted
from ddpbench.runtime import control, devices, subgroups
from ddpbench.runtime.subgroups import Partition, Subgroup
from ddpbench.runtime.world import World

MODULE = "ddpbench.doctor.capabilities.measure"
ELEMENTS = (64, 13)  # of one block: each combination is tried with both
WAIT_SECONDS = 60.0  # of the ranks for each other; `_wait` judges long before
HANG_SECONDS = 5.0  # for one combination: a few ms of work
# For the first call of an operation on a device, which may make a communicator and load code, and
# for a way of parallel training, which is many calls.
FIRST_SECONDS = 30.0
PLAN = Plan(start="none")
# Times the seconds of an examination: a hang is tried twice, and fresh ranks need time to start.
TIME_FACTOR = 3
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Request(throwaway_ranks.Request):
    """What the ranks must try: all that is wanted, from `first` on."""

    wanted: Sequence[Combination]
    first: int = 0
    known: Combination | None = None  # one that works


def make_request(backend: str, device: str, modules: Sequence[str]) -> Request:
    """Return a request for all combinations on this backend. modules: imported first."""
    ranks, launcher = throwaway_ranks.RANKS, backends.get(backend).launcher
    wanted = list_combinations(ranks)
    return Request(backend, device, WAIT_SECONDS, list(modules), launcher, ranks, wanted)


def list_combinations(ranks: int) -> list[Combination]:
    """Return all that so many ranks can try, the most important first.

    Sums come before other reduce ops, those of the first dtype with the ways of parallel training
    behind them.
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

    def urgency(each: Combination) -> tuple[bool, int, bool]:
        number = order.index(each.dtype) if each.dtype else 0
        return each.reduce_op not in (None, "sum"), number, each.form == PARALLEL

    return sorted(found, key=urgency)


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

    @property
    def tried(self) -> list[tuple[Combination, Verdict]]:
        return list(zip(self.request.wanted, self.verdicts, strict=False))


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
    rows = judge.list_rows(trials.tried)
    figures = {
        "ranks": trials.request.ranks,
        "elements": list(ELEMENTS),
        "wanted": wanted,
        "verdicts": rows,
    }
    return Outcome(
        lines=tuple(_describe_tries(context, rows)),
        unchecked=tuple(unchecked),
        findings=judge.find_bad(context.backend.name, trials.tried),
        figures=figures,
        tables=judge.build_tables(figures, context.backend.name),
    )


def _describe_tries(context: Context, rows: Sequence[judge.Row]) -> list[str]:
    training = [row for row in rows if row["form"] == PARALLEL]
    calls = [row for row in rows if row["form"] != PARALLEL]
    lines = [
        f"tried {len(calls)} combinations of operation, reduce op and dtype, each with "
        f"{' and '.join(map(str, ELEMENTS))} elements a block, in separate processes "
        f"({counted(throwaway_ranks.RANKS, 'rank')}): {judge.count_outcomes(calls)}"
    ]
    if training:
        lines.append(
            f"tried {counted(len(training), 'way')} of parallel training with one step each, which "
            f"must give what one process gets: {judge.count_outcomes(training)}"
        )
    if len(context.world.hosts) > 1:
        hostname = context.launch.ranks[0]["hostname"]
        lines.append(f"tried only on {hostname}, the host of rank 0")
    return lines


# --- one set of ranks after the other -------------------------------------------------------------


def try_all(trials: Trials, seconds: float, clock: Clock = time) -> Generator[None, None, None]:
    """Try all combinations in about so many seconds at most, and add the verdicts.

    Yields about every POLL_SECONDS until the end. Closed earlier, it leaves nothing running. What
    seems to end its ranks is tried a second time before it is blamed.
    """
    until, suspect = clock.monotonic() + seconds, -1
    try:
        while trials.untried and trials.given_up is None:
            if clock.monotonic() >= until:
                trials.given_up = (
                    f"the {seconds:g} s for it were over; give it more with --case-time"
                )
                return
            first = len(trials.verdicts)
            works = next((each for each, verdict in trials.tried if verdict.outcome == OK), None)
            this = replace(trials.request, first=first, known=works)
            with throwaway_ranks.started(MODULE, this) as trial:
                hung = yield from _wait(trial, until, clock)
                code = trial.end()
                trials.verdicts += _read_verdicts(trial, first)
                number = len(trials.verdicts)
                if clock.monotonic() >= until:
                    continue
                blamed = _blame(trial, number, hung, code)
                idle = blamed is None and number == first
                trials.given_up = _explain_failure(trial, code, idle)
            if blamed is not None and trials.given_up is None:
                if suspect == number or blamed.outcome == UNSUPPORTED or hung > HANG_SECONDS:
                    trials.verdicts.append(blamed)
                suspect = number
    except OSError as error:
        trials.given_up = f"no ranks could be started ({error.strerror or error})"


def _wait(trial: Trial, until: float, clock: Clock) -> Generator[None, None, float]:
    """Wait until the ranks or the time have ended.

    Returns the seconds that the ranks had for what they do if they hang, else 0.
    """
    while trial.process.poll() is None and clock.monotonic() < until:
        states = [one for one in trial.states() if one.kind in ("trying", "tried", "checking")]
        given = [float(state.text.split()[1]) for state in states if state.kind == "trying"]
        allowed = max(given, default=HANG_SECONDS)
        # A rank that is through waits for the others, so the last one counts.
        if states and clock.time() - max(state.since for state in states) > allowed:
            return allowed
        yield
        clock.sleep(POLL_SECONDS)
    return 0.0


def _read_verdicts(trial: Trial, first: int) -> list[Verdict]:
    """Read what rank 0 has noted, from combination `first` on; a later note replaces an earlier."""
    path = trial.folder / "verdicts"
    text = path.read_text() if path.exists() else ""
    lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
    found = {number: Verdict(**verdict) for number, verdict in map(json.loads, lines)}
    verdicts = [found[number] for number in range(first, first + len(found))]
    last = first + len(found) - 1
    if any((state.kind, state.text) == ("checking", str(last)) for state in trial.states()):
        verdicts[-1] = verdicts[-1].breaking()
    return verdicts


def _blame(trial: Trial, number: int, hung: float, code: int) -> Verdict | None:
    """Return what a combination without a verdict did to its ranks; None: no rank came to it."""
    here = [state for state in trial.states() if state.text.split(" ")[0] == str(number)]
    died = throwaway_ranks.death(throwaway_ranks.output(trial.folder))
    refused = [state for state in here if state.kind == "refused"]
    if not here:
        return None
    if died is not None:
        return Verdict(CRASH, f"a rank {died}")
    if not hung:
        return Verdict(CRASH, f"its ranks ended with exit code {code}: {_last_words(trial)}")
    if refused:
        why = refused[0].text.partition(" ")[2]
        return judge.refused_by([state.rank for state in refused], why)
    busy = [str(state.rank) for state in here if state.kind == "trying"]
    return Verdict(HANG, f"rank {', '.join(busy)} did not return within {hung:g} s")


def _explain_failure(trial: Trial, code: int, idle: bool) -> str | None:
    """Return why further ranks would fail, too; None if they may go on.

    idle: whether no rank has tried anything.
    """
    failed = (state.text for state in trial.states() if state.kind == "failed")
    if short := next(filter(memory.OUT_OF_MEMORY.search, failed), ""):
        return f"a rank had no memory left ({short})"
    if not idle:
        return None
    death = throwaway_ranks.death(throwaway_ranks.output(trial.folder))
    return f"its ranks could not start (exit code {code}): {death or _last_words(trial)}"


def _last_words(trial: Trial) -> str:
    failed = [state.text for state in trial.states() if state.kind == "failed"]
    said = failed[:1] or throwaway_ranks.last_words(throwaway_ranks.output(trial.folder))
    return throwaway_ranks.short(": ".join(said) or "without a word")


# --- in the throwaway ranks -----------------------------------------------------------------------

# Each reports "trying NUMBER SECONDS", then "tried NUMBER" or "refused NUMBER REASON". Between
# "checking NUMBER" and "checked NUMBER" it repeats a combination that works.


def main(folder: Path) -> int:
    """Start the ranks; in one of them, try the combinations."""
    values = json.loads((folder / "request").read_text())
    known = values["known"] and Combination(**values["known"])
    wanted = [Combination(**combination) for combination in values["wanted"]]
    request = Request(**{**values, "wanted": wanted, "known": known})
    preloaded = ways.MODULES if any(c.form == PARALLEL for c in wanted) else ()
    in_rank = partial(_try_in_rank, request, folder, ("ddpbench.measure.loop", *preloaded))
    return throwaway_ranks.run(MODULE, folder, request, in_rank, preloaded)


def _try_in_rank(
    request: Request, folder: Path, modules: Sequence[str], world: World, report: Report
) -> None:
    report("doing", "the set-up of the group")
    for module in modules:
        import_module(module)  # slow: not in the time of a combination
    with throwaway_ranks.tested(request, world) as (tested, device):
        start.barrier(tested, device)()  # nor are connections made in it
        ranks = Ranks(world, tested, device, folder)
        if request.known is not None:
            attempt(request, ranks, request.known)
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
        own = attempt(request, ranks, combination)
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
            again, _ = _agree_verdict(world, attempt(request, ranks, known))
            report("checked", str(number))
            if again.outcome != OK:  # whatever these processes try from now on fails, too
                note(number, verdict.breaking())
                return
        if apart:
            return


def _agree_verdict(world: World, own: Verdict) -> tuple[Verdict, bool]:
    """Combine the verdicts of all ranks; return whether only some of them refused."""
    return judge.combine_verdicts(
        [Verdict(**one) for one in control.gather_values(world, asdict(own))]
    )


def attempt(request: Request, ranks: Ranks, combination: Combination) -> Verdict:
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
