"""Two stored runs, case by case: SLOWER, FASTER, SAME or INCONCLUSIVE, on medians of launches.

python -m ddpbench compare results/before results/after
python -m ddpbench compare before last --margin 5 --only all_reduce,gloo --strict
python -m ddpbench compare runs/base runs/new --format markdown    folders OF runs: all are pooled
python -m ddpbench compare old.log new.log                      of nccl-tests, or of OSU; or folders

Measure both with --launches 6 or more; below 5 launches a side there is no verdict.

Exit codes, the first that applies: 2 the request is wrong; 3 a run cannot be read, or holds
nothing; 1 a case is SLOWER, whatever the others are; 3 one is INVALID (a wrong result, a limit
broken) or INCOMPARABLE (another identity), or none can be compared; with --strict 2 one is
INCONCLUSIVE, or was measured in BASE only; else 0.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ddpbench.interchange import sources
from ddpbench.interchange.log import NO_HINTS, Hints
from ddpbench.launch.placement import Refused
from ddpbench.records import redact, store
from ddpbench.records.schema import Run
from ddpbench.records.store import InvalidRun
from ddpbench.session import options

if TYPE_CHECKING:
    from ddpbench.verdicts.comparison import Comparison, Rule
    from ddpbench.verdicts.drift import Drift
    from ddpbench.verdicts.matching import Source
    from ddpbench.verdicts.noise import Noise

GROUP = "compare"
HELP = "compare two stored runs: faster, slower or the same"
FORMATS = ("table", "csv", "json", "markdown")  # of render.comparison, which loads numpy
MARGIN_PERCENT = 3.0
LEARNT_FROM = 20  # stored runs, the newest, that tell how a machine drifts
WHERE = "a folder, a name in results/, a baseline's, `last`, or a folder of runs, which are pooled"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command; imports no torch."""
    parser.add_argument(
        "base", metavar="BASE", help=f"{WHERE}; or a log of nccl-tests, rccl-tests or OSU"
    )
    parser.add_argument("new", metavar="NEW", help="likewise")
    options.add_logs(parser)
    add_judging(parser)


def add_judging(parser: argparse.ArgumentParser) -> None:
    """How two sides are judged, and what is shown of it, in every command that does so."""
    add = parser.add_argument_group("how it is judged").add_argument
    add(
        "--margin",
        type=options.positive,
        default=MARGIN_PERCENT,
        metavar="PERCENT",
        help=f"a smaller change is none; default {MARGIN_PERCENT:g}, and at least this machine's "
        "noise where `calibrate` has measured it",
    )
    add("--strict", action="store_true", help="exit with 2 when a case is left open")
    shown = parser.add_argument_group("what is shown").add_argument
    shown(
        "--only",
        type=options.listed,
        metavar="TEXT,…",
        help="cases that have one of these texts in their name; the others are left out of the "
        "exit code too",
    )
    shown("--format", choices=FORMATS, default="table", help="on stdout; default table")


def run(namespace: argparse.Namespace, words: Sequence[str]) -> int:
    """Compare, print, and answer with the exit code.

    Raises Refused for a request that is wrong, InvalidRun for stored data that are.
    """
    names = [namespace.base.rstrip("/"), namespace.new.rstrip("/")]
    hints = Hints(namespace.op, namespace.ranks)
    return judge(names, [read(sources.find_all(name), hints) for name in names], namespace)


def judge(
    names: Sequence[str],
    runs: Sequence[tuple[Run, ...]],
    namespace: argparse.Namespace,
    notes: tuple[str, ...] = (),
) -> int:
    """Compare BASE and NEW, print, and answer with the exit code.

    names, runs: of BASE and of NEW. namespace: the options of add_judging. notes: what the reader
    must know besides. Raises Refused and InvalidRun.
    """
    if any(base == new for base in runs[0] for new in runs[1]):
        raise Refused(f"BASE {names[0]} and NEW {names[1]} have a run in common")

    from ddpbench.verdicts.comparison import Rule  # loads numpy: after what may be refused
    from ddpbench.verdicts.matching import Source

    left, right = (
        Source(side[0].id if len(side) == 1 else redact.text(name), side)
        for name, side in zip(names, runs, strict=True)
    )
    rule = Rule(namespace.margin / 100, calibrated(right.runs), drifted(left, right))
    with store.refuse_impossible_values(f"{names[0]} or {names[1]}"):
        found = compared(left, right, rule, namespace.only)
        return show(replace(found, notes=(*notes, *found.notes)), namespace)


def compared(left: Source, right: Source, rule: Rule, only: Sequence[str] | None) -> Comparison:
    """The comparison of the cases that have one of the texts in their name.

    Raises Refused where there is no such case, InvalidRun where there is nothing to compare.
    """
    from ddpbench.render.labels import label
    from ddpbench.verdicts import comparison

    texts = [text.lower() for text in only or ("",)]
    try:
        found = comparison.compare(
            left, right, rule, lambda case: any(text in label(case).lower() for text in texts)
        )
    except ValueError as error:
        raise InvalidRun(str(error)) from None
    if not found.rows:
        if only:
            raise Refused(
                f"--only {','.join(only)}: no measured case has that in its name, as in "
                f"{label(left.runs[0].outcomes[0].case)!r}"
            )
        raise InvalidRun(f"{left.name} and {right.name} hold no case that was measured")
    return found


def show(found: Comparison, namespace: argparse.Namespace) -> int:
    """Print it as asked; its exit code."""
    from ddpbench.render import comparison as render
    from ddpbench.verdicts import comparison

    sys.stdout.write(render.FORMATS[namespace.format](found))
    return comparison.exit_code(found, namespace.strict)


def calibrated(runs: Sequence[Run]) -> Noise | None:
    """The noise of this machine, as the newest calibration that serves these runs has it."""
    from ddpbench.verdicts import noise

    for folder in reversed(store.list_calibrations()):
        sides = [store.read(folder / side) for side in ("a", "b")]
        if all(noise.serves(side, run) for side in sides for run in runs):
            return noise.noise(folder.name, sides)
    return None


def drifted(left: Source, right: Source) -> Drift | None:
    """What two sides that are apart in time may differ by, as the newest stored runs have it."""
    from ddpbench.verdicts import drift

    return drift.drift(left, right, _newest())


def _newest() -> Iterator[Run]:
    """The newest stored runs that can be read."""
    for folder in store.list_runs()[-LEARNT_FROM:]:
        with contextlib.suppress(InvalidRun):
            yield store.read(folder)


def read(folders: Sequence[Path], hints: Hints = NO_HINTS) -> tuple[Run, ...]:
    """The runs in these folders or logs. Raises InvalidRun where one cannot be read or is empty."""
    runs = tuple(sources.read(folder, hints) for folder in folders)
    for folder, each in zip(folders, runs, strict=True):
        if not each.outcomes:
            raise InvalidRun(f"{folder} holds no result: nothing was measured")
    return runs
