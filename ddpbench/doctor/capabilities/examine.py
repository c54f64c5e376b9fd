"""Capabilities: try every operation, reduce op and dtype on the backend, and check every result.

Separate processes on the host of rank 0 try them while the ranks wait: trials.py. They also try the
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
from collections.abc import Generator, Sequence

from ddpbench.doctor.capabilities import probe
from ddpbench.doctor.capabilities.probe import Request
from ddpbench.doctor.capabilities.table import build_tables
from ddpbench.doctor.capabilities.trials import Trials, trying
from ddpbench.doctor.capabilities.verdicts import (
    CRASH,
    HANG,
    OK,
    PARALLEL,
    UNSUPPORTED,
    WRONG,
    Verdict,
    counts,
    findings,
    rows,
)
from ddpbench.doctor.context import Context, Outcome
from ddpbench.records.wording import counted
from ddpbench.runtime import control

# Times the seconds of an examination: a hang is tried twice, and fresh ranks need time to start.
TIME_FACTOR = 3
OUTCOMES = {
    OK: "work",
    UNSUPPORTED: "are not supported",
    WRONG: "give a wrong result",
    CRASH: "crash",
    HANG: "hang",
}


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
        while control.agree_objection(world, world.interrupted or _next_step(steps)) is None:
            world.watchdog.rearm()
    return _outcome(context, request, trials) if world.rank == 0 else Outcome()


def _next_step(steps: Generator[None, None, None] | None) -> str | None:
    """Continue the trials of rank 0 for a moment; return a reason to stop once they are over."""
    return None if steps is None else next(steps, "over")


def _count_outcomes(verdicts: Sequence[Verdict]) -> str:
    by_outcome = counts(verdicts)
    return ", ".join(f"{n} {OUTCOMES[name]}" for name, n in by_outcome.items() if n or name == OK)


def _describe_tries(context: Context, request: Request, trials: Trials) -> list[str]:
    """Return lines on what was tried, and where."""
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
        "verdicts": rows(trials.tried),
    }
    return Outcome(
        lines=tuple(_describe_tries(context, request, trials)),
        unchecked=tuple(unchecked),
        findings=findings(context.backend.name, trials.tried),
        figures=figures,
        tables=build_tables(figures, context.backend.name),
    )
