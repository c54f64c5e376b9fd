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
import sys
from collections.abc import Sequence
from pathlib import Path

from ddpbench import options
from ddpbench.interchange import sources
from ddpbench.records.schema import Run
from ddpbench.records.store import InvalidRun
from ddpbench.runtime.launch import Refused

HELP = "two stored runs: what is slower, faster or the same, with an exit code for a CI"
FORMATS = ("table", "csv", "json", "markdown")  # of render.comparison, which loads numpy
MARGIN_PERCENT = 3.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command; imports no torch."""
    where = (
        "a folder, a name in results/, `last`, a log of nccl-tests or OSU, or a folder of runs, or "
        "of logs, which are pooled"
    )
    parser.add_argument("base", metavar="BASE", help=where)
    parser.add_argument("new", metavar="NEW", help="likewise")
    add = parser.add_argument_group("how it is judged").add_argument
    add(
        "--margin",
        type=options.positive,
        default=MARGIN_PERCENT,
        metavar="PERCENT",
        help=f"a smaller change is none; default {MARGIN_PERCENT:g}",
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
    base, new = sources.find_all(namespace.base), sources.find_all(namespace.new)
    if {folder.resolve() for folder in base} & {folder.resolve() for folder in new}:
        raise Refused(f"BASE {namespace.base} and NEW {namespace.new} have a run in common")
    runs = [_read(folders) for folders in (base, new)]

    from ddpbench.analysis import comparison, matching  # loads numpy: after what may be refused
    from ddpbench.render import comparison as render

    names = [namespace.base.rstrip("/"), namespace.new.rstrip("/")]
    left, right = (
        matching.Source(side[0].id if len(side) == 1 else name, side)
        for name, side in zip(names, runs, strict=True)
    )
    texts = [text.lower() for text in namespace.only or ("",)]
    try:
        found = comparison.compare(
            left,
            right,
            namespace.margin / 100,
            lambda case: any(text in render.label(case).lower() for text in texts),
        )
    except ValueError as error:
        raise InvalidRun(str(error)) from None
    if not found.rows:
        if namespace.only:
            raise Refused(
                f"--only {','.join(namespace.only)}: no measured case has that in its name, as in "
                f"{render.label(runs[0][0].outcomes[0].case)!r}"
            )
        raise InvalidRun(f"{names[0]} and {names[1]} hold no case that was measured")
    sys.stdout.write(render.FORMATS[namespace.format](found))
    return comparison.exit_code(found, namespace.strict)


def _read(folders: Sequence[Path]) -> tuple[Run, ...]:
    """The runs in these folders or logs. Raises InvalidRun where one cannot be read or is empty."""
    runs = tuple(sources.read(folder) for folder in folders)
    for folder, each in zip(folders, runs, strict=True):
        if not each.outcomes:
            raise InvalidRun(f"{folder} holds no result: nothing was measured")
    return runs
