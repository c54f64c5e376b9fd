"""Capabilities: try every operation, reduce op and dtype on the backend, and check every result.

Separate processes on the host of rank 0 try them while the ranks wait: probe.py. They also try the
ways of parallel training: ways.py. Fresh processes replace those that crash, hang or leave.

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
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace

from ddpbench.doctor.capabilities import judge, probe
from ddpbench.doctor.capabilities.judge import (
    CRASH,
    HANG,
    OK,
    PARALLEL,
    UNSUPPORTED,
    Combination,
    Verdict,
)
from ddpbench.doctor.capabilities.probe import HANG_SECONDS, Request
from ddpbench.doctor.context import Context, Outcome
from ddpbench.launch.clock import Clock
from ddpbench.measure import memory, throwaway_ranks
from ddpbench.measure.throwaway_ranks import Trial
from ddpbench.records.wording import counted
from ddpbench.runtime import control

# Times the seconds of an examination: a hang is tried twice, and fresh ranks need time to start.
TIME_FACTOR = 3
POLL_SECONDS = 0.1


@dataclass
class Trials:
    """The verdicts so far."""

    wanted: Sequence[Combination]
    verdicts: list[Verdict] = field(default_factory=list)  # of the first wanted ones, in order
    given_up: str | None = None  # why the rest was not tried, a clause

    @property
    def tried(self) -> list[tuple[Combination, Verdict]]:
        return list(zip(self.wanted, self.verdicts, strict=False))


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


def _outcome(context: Context, request: Request, trials: Trials) -> Outcome:
    untried, unchecked = len(trials.wanted) - len(trials.verdicts), []
    if untried:
        reason = trials.given_up or "it was interrupted"
        unchecked.append(f"{untried} of {len(trials.wanted)} combinations were not tried: {reason}")
    rows = judge.rows(trials.tried)
    figures = {
        "ranks": request.ranks,
        "elements": list(probe.ELEMENTS),
        "wanted": len(request.wanted),
        "verdicts": rows,
    }
    return Outcome(
        lines=tuple(_describe_tries(context, request, rows)),
        unchecked=tuple(unchecked),
        findings=judge.findings(context.backend.name, trials.tried),
        figures=figures,
        tables=judge.build_tables(figures, context.backend.name),
    )


def _describe_tries(context: Context, request: Request, rows: Sequence[judge.Row]) -> list[str]:
    ways = [row for row in rows if row["form"] == PARALLEL]
    calls = [row for row in rows if row["form"] != PARALLEL]
    lines = [
        f"tried {len(calls)} combinations of operation, reduce op and dtype, each with "
        f"{' and '.join(map(str, probe.ELEMENTS))} elements a block, in separate processes "
        f"({counted(request.ranks, 'rank')}): {judge.count_outcomes(calls)}"
    ]
    if ways:
        lines.append(
            f"tried {counted(len(ways), 'way')} of parallel training with one step each, which "
            f"must give what one process gets: {judge.count_outcomes(ways)}"
        )
    if len(context.world.hosts) > 1:
        hostname = context.launch.ranks[0]["hostname"]
        lines.append(f"tried only on {hostname}, the host of rank 0")
    return lines


# --- one set of ranks after the other -------------------------------------------------------------


def trying(
    request: Request, trials: Trials, seconds: float, clock: Clock = time
) -> Generator[None, None, None]:
    """Try all combinations in about so many seconds at most, and add the verdicts to `trials`.

    Yields about every POLL_SECONDS until the end. Closed earlier, it leaves nothing running. What
    seems to end its ranks is tried a second time before it is blamed.
    """
    until, suspect = clock.monotonic() + seconds, -1
    try:
        while len(trials.verdicts) < len(trials.wanted) and trials.given_up is None:
            if clock.monotonic() >= until:
                trials.given_up = f"the {seconds:g} s for it were over; give it more with --seconds"
                return
            first = len(trials.verdicts)
            works = next((each for each, verdict in trials.tried if verdict.outcome == OK), None)
            this = replace(request, first=first, known=works)
            with throwaway_ranks.started(probe.MODULE, this) as trial:
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
        states = [
            state for state in trial.states() if state.kind in ("trying", "tried", "checking")
        ]
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
