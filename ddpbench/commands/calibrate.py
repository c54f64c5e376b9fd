"""Measure this machine's noise, identical code against itself: the smallest change to report.

python -m ddpbench calibrate                                      gloo, 2 ranks: about 1 minute
python -m ddpbench calibrate --launches 24 collectives -n 4 --op all_reduce --sizes 4K,1M
python -m ddpbench calibrate ddp --workload mlp --width 256

The result is stored in results/calibrations/. `compare`, `ab` and `baseline check` find it there.
They report no change of a case that is smaller than identical code shows on a machine like this
one. A calibration serves runs whose cases are measured as long (--slice) or longer.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ddpbench.commands import compare
from ddpbench.nested_runs import turns
from ddpbench.nested_runs.turns import Variant
from ddpbench.records import store
from ddpbench.records.store import InvalidRun
from ddpbench.session import options
from ddpbench.session.progress import open_progress

GROUP = "compare"
HELP = "measure this machine's noise: the smallest change that compare can report"
LAUNCHES = 12  # a side
FORMATS = ("table", "csv", "json")  # of render.calibration, which loads numpy
USUAL = (
    "collectives", "--device", "cpu", "--backend", "gloo", "-n", "2",
    "--op", "all_reduce,all_gather,broadcast", "--sizes", "4K,1M",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command; imports no torch."""
    parser.add_argument(
        "--launches",
        type=options.whole(6),
        default=LAUNCHES,
        metavar="R",
        help=f"launches of each of the two identical sides (default: {LAUNCHES})",
    )
    parser.add_argument(
        "--margin",
        type=options.positive,
        default=compare.MARGIN_PERCENT,
        metavar="PERCENT",
        help="smallest change to detect; shows how many launches that requires (default: "
        f"{compare.MARGIN_PERCENT:g})",
    )
    parser.add_argument(
        "--format", choices=FORMATS, default="table", help="format on stdout (default: table)"
    )
    turns.add_measured(parser, "results/calibrations/", shlex.join(USUAL))


def run(namespace: argparse.Namespace, words: Sequence[str]) -> int:
    """Measure identical code in turns, store and print its noise; return the exit code.

    If a launch fails, what was measured is printed all the same. Raises Refused and InvalidRun.
    """
    variants = [Variant(name, sys.executable, {}, ()) for name in ("a", "b")]
    results = Path("results/calibrations")
    folder = turns.prepare(namespace, variants, results, "calibration", USUAL)

    def measure_blocks(measure_block: Callable[[], None]) -> None:
        with open_progress("calibrate", namespace.launches) as progress:
            for number in range(namespace.launches):
                progress.describe(f"block {number + 1} of {namespace.launches}")
                measure_block()
                progress.advance(1)

    end = turns.measure(namespace, variants, folder, namespace.launches, measure_blocks)
    return turns.conclude(folder, end, lambda: _show(namespace, folder))


def _show(namespace: argparse.Namespace, folder: Path) -> int:
    """Print the noise of what was measured. Raises InvalidRun if nothing was."""
    from ddpbench.render import calibration as render
    from ddpbench.verdicts import noise

    runs = [store.read(folder / name) for name in ("a", "b")]
    measured = noise.pool_launches(folder.name, runs)
    if not measured.medians:
        raise InvalidRun(f"{folder} holds no case that was measured")
    sys.stdout.write(render.FORMATS[namespace.format](measured, runs, namespace.margin / 100))
    return 0
