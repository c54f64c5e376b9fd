"""What the backend can do here: every operation, reduce op and dtype really tried and checked.

By ranks to throw away, of rank 0's host, while the others wait: trials.py.

figures: {
    "ranks": of the group that tried, "elements": [of a block, each combination with all of them],
    "wanted": how many combinations there are,
    "verdicts": [{"operation", "form", "reduce_op" (null: none), "dtype" (null: no data),
                  "outcome": "ok", "unsupported", "wrong", "crash" or "hang", "why": ""}, …]
}
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from ddpbench.doctor.capabilities import probe
from ddpbench.doctor.capabilities.probe import Request
from ddpbench.doctor.capabilities.trials import Trials, trying
from ddpbench.doctor.capabilities.verdicts import (
    CRASH,
    HANG,
    OK,
    UNSUPPORTED,
    WRONG,
    counts,
    findings,
    rows,
)
from ddpbench.doctor.context import Context, Outcome
from ddpbench.runtime import control

MOST = 3  # times the seconds of an examination: what hangs, twice, and fresh ranks take their time
WORDS = {
    OK: "work", UNSUPPORTED: "are not supported", WRONG: "give a wrong result", CRASH: "crash",
    HANG: "hang",
}  # fmt: skip


def examine(context: Context) -> Outcome:
    """All ranks call it; what rank 0 returns counts."""
    ranks = context.ranks
    asked = probe.request(context.backend.name, context.device.type, context.modules)
    trials = Trials(asked.wanted)
    with contextlib.ExitStack() as stack:
        going: Generator[None, None, None] | None = None
        if ranks.rank == 0:
            going = trying(asked, trials, MOST * context.seconds)
            stack.callback(going.close)
        while control.agree_objection(ranks, ranks.interrupted or _over(going)) is None:
            ranks.watchdog.rearm()
    return _outcome(context, asked, trials) if ranks.rank == 0 else Outcome()


def _over(going: Generator[None, None, None] | None) -> str | None:
    """A moment of rank 0's trials; a reason to stop once they are over."""
    return None if going is None else next(going, "over")


def _outcome(context: Context, asked: Request, trials: Trials) -> Outcome:
    tried = trials.tried
    by_outcome = counts(verdict for _, verdict in tried)
    outcomes = ", ".join(f"{n} {WORDS[name]}" for name, n in by_outcome.items() if n or name == OK)
    told = [
        f"{len(tried)} combinations of operation, reduce op and dtype tried, each with "
        f"{' and '.join(map(str, probe.ELEMENTS))} elements a block, in throw-away "
        f"groups of {asked.ranks} rank{'s' if asked.ranks > 1 else ''}: {outcomes}"
    ]
    if asked.ranks == 1:
        told.append("one GPU is visible to rank 0: nothing was sent between ranks")
    if len(context.ranks.hosts) > 1:
        told.append(f"tried on {context.launch.ranks[0]['hostname']} only, rank 0's host")
    unchecked = []
    left = len(asked.wanted) - len(tried)
    if left:
        why = trials.given_up or "it was interrupted"
        unchecked.append(f"{left} of {len(asked.wanted)} combinations were not tried: {why}")
    return Outcome(
        tuple(told),
        tuple(unchecked),
        findings(context.backend.name, tried),
        {
            "ranks": asked.ranks,
            "elements": list(probe.ELEMENTS),
            "wanted": len(asked.wanted),
            "verdicts": rows(tried),
        },
    )
