"""This machine's own noise: identical code against itself, and what can be claimed beside it.

python -m ddpbench calibrate                                      gloo, 2 ranks: about 1 minute
python -m ddpbench calibrate --launches 24 collectives -n 4 --op all_reduce --sizes 4K,1M
python -m ddpbench calibrate ddp --workload mlp --width 256

Stored in results/calibrations/; `compare`, `ab` and `baseline check` find it there, and claim no
change of a case below what identical code shows on a machine like this one. It serves what is
measured as long (--slice) or longer.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from ddpbench.commands import compare
from ddpbench.nested import turns
from ddpbench.nested.turns import End, Failed, Variant
from ddpbench.records import store
from ddpbench.records.store import InvalidRun
from ddpbench.records.visible import tell
from ddpbench.session import options

GROUP = "compare"
HELP = "measure this machine's noise: the smallest change that compare can report"
LAUNCHES = 12  # a side
FORMATS = ("table", "csv", "json")  # of render.calibration, which loads numpy
USUAL = (
    "collectives", "--device", "cpu", "--backend", "gloo", "-n", "2",
    "--op", "all_reduce,all_gather,broadcast", "--sizes", "4K,1M",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command; imports no torch."""
    parser.add_argument(
        "--launches",
        type=options.whole(6),
        default=LAUNCHES,
        metavar="R",
        help=f"of each of the two sides, which are alike; default {LAUNCHES}",
    )
    parser.add_argument(
        "--margin",
        type=options.positive,
        default=compare.MARGIN_PERCENT,
        metavar="PERCENT",
        help="a change that you want to be told, for which the launches are shown that it needs; "
        f"default {compare.MARGIN_PERCENT:g}",
    )
    parser.add_argument("--format", choices=FORMATS, default="table", help="default table")
    turns.add_measured(parser, "results/calibrations/")


def run(namespace: argparse.Namespace, words: Sequence[str]) -> int:
    """Measure, store, print.

    Where a launch fails: print what was measured, then why it failed, and answer with 5, or with
    the launch's own 2, 4 or 130. Raises Refused for a request that is wrong.
    """
    namespace.words = turns.measured_words(namespace, USUAL)
    alike = [Variant(name, sys.executable, {}, ()) for name in ("a", "b")]
    folder = turns.prepared(namespace, alike, Path("results/calibrations"), "calibration")
    end = _measure(namespace, alike, folder)
    try:
        _show(namespace, alike, folder)
    except InvalidRun:
        if end is None:
            raise  # else a launch that failed left nothing to show
    if end is not None and end.sentence:
        tell(end.sentence)
    tell(f"stored in {folder}")
    return 0 if end is None else end.code


def _measure(namespace: argparse.Namespace, alike: Sequence[Variant], folder: Path) -> End | None:
    """All blocks of launches; how it ended if something went wrong."""
    order = random.Random(namespace.seed)
    try:
        with turns.sides(alike, namespace, folder, namespace.launches) as sides:
            for number in range(namespace.launches):
                turns.show_progress(f"block {number + 1} of {namespace.launches}")
                turns.block(sides, order)
    except KeyboardInterrupt:
        return End(130)
    except Failed as error:
        return End(error.code, str(error))
    return turns.wrong(sides)


def _show(namespace: argparse.Namespace, alike: Sequence[Variant], folder: Path) -> None:
    """Print the noise of what was measured. Raises InvalidRun where nothing was."""
    from ddpbench.render import calibration as render
    from ddpbench.verdicts import noise

    runs = [store.read(folder / each.name) for each in alike]
    found = noise.noise(folder.name, runs)
    if not found.medians:
        raise InvalidRun(f"{folder} holds no case that was measured")
    sys.stdout.write(render.FORMATS[namespace.format](found, runs, namespace.margin / 100))
