"""Compare two stored runs, case by case: SLOWER, FASTER, SAME or INCONCLUSIVE.

python -m ddpbench compare results/before results/after
python -m ddpbench compare before last --margin 5 --only all_reduce,gloo --strict
python -m ddpbench compare runs/base runs/new --format markdown    folders OF runs: all are pooled
python -m ddpbench compare old.log new.log                         logs of nccl-tests or OSU

Measure both with --launches 6 or more. The verdicts compare medians of launches; with fewer than 5
launches a side there is no verdict.

Exit codes, the first that applies: 2 the request is wrong; 3 a run cannot be read, or holds
nothing; 1 a case is SLOWER, whatever the others are; 3 a case is INVALID (a wrong result, a broken
limit) or INCOMPARABLE (not the same case), or none can be compared; 2 with --strict, if a case is
INCONCLUSIVE or in BASE only; else 0.
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
NEWEST_RUNS = 20  # stored runs from which the drift of a machine is learnt
WHERE = "a folder, a name in results/, a baseline, `last`, or a folder of runs, which are pooled"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command; imports no torch."""
    parser.add_argument(
        "base", metavar="BASE", help=f"{WHERE}; or a log of nccl-tests, rccl-tests or OSU"
    )
    parser.add_argument("new", metavar="NEW", help="the same, for the run to judge")
    options.add_logs(parser)
    add_judging(parser)


def add_judging(parser: argparse.ArgumentParser) -> None:
    """Add the options of every command that judges two sides."""
    add = parser.add_argument_group("how it is judged").add_argument
    add(
        "--margin",
        type=options.positive,
        default=MARGIN_PERCENT,
        metavar="PERCENT",
        help="smallest change to report (default: "
        f"{MARGIN_PERCENT:g}, or this machine's noise if `calibrate` has measured a larger one)",
    )
    add(
        "--strict",
        action="store_true",
        help="exit with 2 if a case is INCONCLUSIVE or missing in NEW",
    )
    shown = parser.add_argument_group("what is shown").add_argument
    shown(
        "--only",
        type=options.listed,
        metavar="TEXT,…",
        help="compare only cases with one of these texts in their name (default: all)",
    )
    shown("--format", choices=FORMATS, default="table", help="format on stdout (default: table)")


def run(namespace: argparse.Namespace, words: Sequence[str]) -> int:
    """Compare, print, and return the exit code. Raises Refused and InvalidRun."""
    names = [namespace.base.rstrip("/"), namespace.new.rstrip("/")]
    hints = Hints(namespace.op, namespace.ranks)
    return judge(names, [read(sources.find_all(name), hints) for name in names], namespace)


def judge(
    names: Sequence[str],
    runs: Sequence[tuple[Run, ...]],
    namespace: argparse.Namespace,
    notes: tuple[str, ...] = (),
) -> int:
    """Compare BASE and NEW, print, and return the exit code.

    names, runs: of BASE and of NEW. namespace: the options of add_judging. notes: printed with the
    comparison. Raises Refused and InvalidRun.
    """
    if any(one == other for one in runs[0] for other in runs[1]):
        raise Refused(f"BASE {names[0]} and NEW {names[1]} have a run in common")

    from ddpbench.verdicts.comparison import Rule  # loads numpy: after what may be refused
    from ddpbench.verdicts.matching import Source

    base, new = (
        Source(side[0].id if len(side) == 1 else redact.text(name), side)
        for name, side in zip(names, runs, strict=True)
    )
    rule = Rule(namespace.margin / 100, calibrated(new.runs), drifted(base, new))
    with store.refuse_impossible_values(f"{names[0]} or {names[1]}"):
        comparison = compared(base, new, rule, namespace.only)
        return show(replace(comparison, notes=(*notes, *comparison.notes)), namespace)


def compared(base: Source, new: Source, rule: Rule, only: Sequence[str] | None) -> Comparison:
    """Return the comparison of the cases that have one of the texts in their name.

    Raises Refused if there is no such case, InvalidRun if there is nothing to compare.
    """
    from ddpbench.render.labels import label
    from ddpbench.verdicts import comparison

    texts = [text.lower() for text in only or ("",)]
    try:
        result = comparison.compare(
            base, new, rule, lambda case: any(text in label(case).lower() for text in texts)
        )
    except ValueError as error:
        raise InvalidRun(str(error)) from None
    if not result.rows:
        if only:
            raise Refused(
                f"--only {','.join(only)}: no measured case has that in its name, as in "
                f"{label(base.runs[0].outcomes[0].case)!r}"
            )
        raise InvalidRun(f"{base.name} and {new.name} hold no case that was measured")
    return result


def show(result: Comparison, namespace: argparse.Namespace) -> int:
    """Print a comparison in the requested format; return the exit code."""
    from ddpbench.render import comparison as render
    from ddpbench.verdicts import comparison

    sys.stdout.write(render.FORMATS[namespace.format](result))
    return comparison.exit_code(result, namespace.strict)


def calibrated(runs: Sequence[Run]) -> Noise | None:
    """Return the noise of this machine from the newest calibration that serves these runs."""
    from ddpbench.verdicts import noise

    for folder in reversed(store.list_calibrations()):
        sides = [store.read(folder / side) for side in ("a", "b")]
        if all(noise.serves(side, run) for side in sides for run in runs):
            return noise.pool_launches(folder.name, sides)
    return None


def drifted(base: Source, new: Source) -> Drift | None:
    """Return by how much two sides measured at different times may differ."""
    from ddpbench.verdicts import drift

    return drift.estimate_drift(base, new, _newest())


def _newest() -> Iterator[Run]:
    """Yield the newest stored runs that can be read."""
    for folder in store.list_runs()[-NEWEST_RUNS:]:
        with contextlib.suppress(InvalidRun):
            yield store.read(folder)


def read(folders: Sequence[Path], hints: Hints = NO_HINTS) -> tuple[Run, ...]:
    """Return the runs in these folders or logs. Raises InvalidRun if one is empty or unreadable."""
    runs = tuple(sources.read(folder, hints) for folder in folders)
    for folder, run in zip(folders, runs, strict=True):
        if not run.outcomes:
            if run.examinations:
                raise InvalidRun(f"{folder} is a run of the doctor: it has no times to compare")
            raise InvalidRun(f"{folder} holds no result: nothing was measured")
    return runs
