"""Capabilities: try every operation, reduce op and dtype on the backend, and check every result.

Separate processes on the host of rank 0 try them while the ranks wait: probe.py. They also try the
ways of parallel training: parallel.py.

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
import time
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ddpbench.doctor.capabilities import probe, verdicts
from ddpbench.doctor.capabilities.probe import Request
from ddpbench.doctor.capabilities.verdicts import (
    CRASH,
    HANG,
    OK,
    PARALLEL,
    UNSUPPORTED,
    WRONG,
    Combination,
    Verdict,
)
from ddpbench.doctor.context import Context, Outcome
from ddpbench.launch.clock import Clock
from ddpbench.measure import memory, throwaway_ranks
from ddpbench.measure.throwaway_ranks import Trial
from ddpbench.records.wording import counted
from ddpbench.runtime import control, devices

# Times the seconds of an examination: a hang is tried twice, and fresh ranks need time to start.
TIME_FACTOR = 3
OUTCOMES = {
    OK: "work",
    UNSUPPORTED: "are not supported",
    WRONG: "give a wrong result",
    CRASH: "crash",
    HANG: "hang",
}
HANG_SECONDS = 5.0  # for one combination: a few ms of work
# For the first call of an operation on a device, which may make a communicator and load code, and
# for a way of parallel training, which is many calls.
FIRST_SECONDS = 30.0
POLL_SECONDS = 0.1


def examine(context: Context) -> Outcome:
    """Try all combinations. All ranks call it; the outcome is that of rank 0."""
    world = context.world
    request = probe.request(context.backend.name, context.device.type, context.modules)
    trials = Trials(request.wanted)
    with contextlib.ExitStack() as stack:
        steps: Generator[None, None, None] | None = None
        if world.rank == 0:
            steps = trying(request, trials, TIME_FACTOR * context.seconds)
            stack.callback(steps.close)
        over = False
        while not control.agree_any(over or world.interrupted is not None):
            world.watchdog.rearm()
            over = steps is not None and next(steps, "over") == "over"
    return _outcome(context, request, trials) if world.rank == 0 else Outcome()


def _count_outcomes(verdicts: Sequence[Verdict]) -> str:
    by_outcome = Counter(verdict.outcome for verdict in verdicts)
    listed = (name for name in OUTCOMES if by_outcome[name] or name == OK)
    return ", ".join(f"{by_outcome[name]} {OUTCOMES[name]}" for name in listed)


def _describe_tries(context: Context, request: Request, trials: Trials) -> list[str]:
    calls = [verdict for each, verdict in trials.tried if each.form != PARALLEL]
    ways = [verdict for each, verdict in trials.tried if each.form == PARALLEL]
    lines = [
        f"tried {len(calls)} combinations of operation, reduce op and dtype, each with "
        f"{' and '.join(map(str, probe.ELEMENTS))} elements a block, in separate processes "
        f"({counted(request.ranks, 'rank')}): {_count_outcomes(calls)}"
    ]
    if ways:
        lines.append(
            f"tried {counted(len(ways), 'way')} of parallel training with one step each, which "
            f"must give what one process gets: {_count_outcomes(ways)}"
        )
    if request.ranks == 1:
        lines.append(
            "rank 0 sees one GPU, so nothing was sent between ranks, and parallel training was "
            "not tried"
        )
    if len(context.world.hosts) > 1:
        hostname = context.launch.ranks[0]["hostname"]
        lines.append(f"tried only on {hostname}, the host of rank 0")
    return lines


def _outcome(context: Context, request: Request, trials: Trials) -> Outcome:
    unchecked = []
    untried = len(request.wanted) - len(trials.tried)
    if untried:
        reason = trials.given_up or "it was interrupted"
        unchecked.append(
            f"{untried} of {len(request.wanted)} combinations were not tried: {reason}"
        )
    figures = {
        "ranks": request.ranks,
        "elements": list(probe.ELEMENTS),
        "wanted": len(request.wanted),
        "verdicts": verdicts.rows(trials.tried),
    }
    return Outcome(
        lines=tuple(_describe_tries(context, request, trials)),
        unchecked=tuple(unchecked),
        findings=verdicts.findings(context.backend.name, trials.tried),
        figures=figures,
        tables=verdicts.build_tables(figures, context.backend.name),
    )


@dataclass
class Trials:
    """The verdicts so far."""

    wanted: Sequence[Combination]
    verdicts: list[Verdict] = field(default_factory=list)  # of the first wanted ones, in order
    given_up: str | None = None  # why the rest was not tried, a clause

    @property
    def tried(self) -> list[tuple[Combination, Verdict]]:
        return list(zip(self.wanted, self.verdicts, strict=False))


def trying(
    request: Request, trials: Trials, seconds: float, clock: Clock = time
) -> Generator[None, None, None]:
    """Try all combinations in about so many seconds at most, and add the verdicts to `trials`.

    Yields about every POLL_SECONDS until the end. Closed earlier, it leaves nothing running.
    """
    try:
        yield from _sets(request, trials, clock.monotonic() + seconds, clock)
    except OSError as error:
        trials.given_up = f"no ranks could be started ({error.strerror or error})"
    else:
        if len(trials.verdicts) < len(trials.wanted) and trials.given_up is None:
            trials.given_up = f"the {seconds:g} s for it were over; give it more with --case-time"


def _sets(
    request: Request, trials: Trials, until: float, clock: Clock
) -> Generator[None, None, None]:
    """Start one set of ranks after the other, until all is tried or the time is over."""
    suspect = -1
    while len(trials.verdicts) < len(trials.wanted) and clock.monotonic() < until:
        first = len(trials.verdicts)
        known = next((each for each, verdict in trials.tried if verdict.outcome == OK), None)
        this = replace(request, first=first, known=known)
        with throwaway_ranks.started(probe.MODULE, this) as trial:
            hung = yield from _watched(trial, until, request.device, clock)
            code = trial.end()
            trials.verdicts += _heard(trial.folder, first)
            at = len(trials.verdicts)
            if any(state[1:3] == ("checking", str(at - 1)) for state in trial.states()):
                trials.verdicts[-1] = verdicts.breaking(trials.verdicts[-1])
            blamed = _blamed(trial, at, hung, code)
            if clock.monotonic() >= until or at == len(trials.wanted):
                return
            failed = (state.text for state in trial.states() if state.kind == "failed")
            if short := next(filter(memory.OUT_OF_MEMORY.search, failed), ""):
                trials.given_up = f"a rank had no memory left ({short})"
                return
            if blamed is None and at == first:
                said = throwaway_ranks.death(throwaway_ranks.output(trial.folder)) or _last_words(
                    trial
                )
                trials.given_up = f"its ranks could not start (exit code {code}): {said}"
                return
        if blamed is not None:
            if suspect == at or blamed.outcome == UNSUPPORTED or hung > HANG_SECONDS:
                trials.verdicts.append(blamed)
            suspect = at


def _watched(trial: Trial, until: float, device: str, clock: Clock) -> Generator[None, None, float]:
    """Wait until the ranks or the time have ended.

    Returns the seconds that the ranks had for what they do if they hang, else 0.
    """
    slow = {"training", "first"} if devices.get(device).clock == "device" else {"training"}
    while trial.process.poll() is None and clock.monotonic() < until:
        states = [state for state in trial.states() if state.text.isdecimal()]
        is_slow = any(state.kind in slow for state in states)
        allowed = FIRST_SECONDS if is_slow else HANG_SECONDS
        # A rank that is through waits for the others, so the last one counts.
        if states and clock.time() - max(state.since for state in states) > allowed:
            return allowed
        yield
        clock.sleep(POLL_SECONDS)
    return 0.0


def _heard(folder: Path, first: int) -> list[Verdict]:
    """Read what rank 0 has noted, from combination `first` on; a later note replaces an earlier."""
    path = folder / "verdicts"
    if not path.exists():
        return []
    lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    found = {number: Verdict(**verdict) for number, verdict in map(json.loads, lines)}
    return [found[number] for number in range(first, first + len(found))]


def _blamed(trial: Trial, number: int, hung: float, code: int) -> Verdict | None:
    """Return what a combination without a verdict did to its ranks; None: no rank came to it."""
    here = [state for state in trial.states() if state.text.split(" ")[0] == str(number)]
    if not here:
        return None
    died = throwaway_ranks.death(throwaway_ranks.output(trial.folder))
    if died is not None:
        return Verdict(CRASH, f"a rank {died}")
    if not hung:
        return Verdict(CRASH, f"its ranks ended with exit code {code}: {_last_words(trial)}")
    refused = [state for state in here if state.kind == "refused"]
    if refused:
        why = refused[0].text.partition(" ")[2]
        by = [state.rank for state in refused]
        return Verdict(UNSUPPORTED, verdicts.refused_by(by, why))
    busy = [str(state.rank) for state in here if state.kind in ("first", "doing", "training")]
    return Verdict(HANG, f"rank {', '.join(busy)} did not return within {hung:g} s")


def _last_words(trial: Trial) -> str:
    failed = [state.text for state in trial.states() if state.kind == "failed"]
    said = failed[:1] or throwaway_ranks.last_words(throwaway_ranks.output(trial.folder))
    return throwaway_ranks.short(": ".join(said) or "without a word")
