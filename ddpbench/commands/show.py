"""Print a stored run, or a log of nccl-tests, rccl-tests or OSU, as a table or in another format.

ddpbench show last
ddpbench show results/before --format markdown --columns op,size,time,busbw
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ddpbench.interchange import sources
from ddpbench.interchange.log import Hints
from ddpbench.launch.placement import Refused
from ddpbench.present import formats
from ddpbench.present.collectives.columns import COLUMNS
from ddpbench.present.columns import UnknownColumn
from ddpbench.present.examinations import FINDING_COLUMNS
from ddpbench.present.steps.columns import STEP_COLUMNS
from ddpbench.present.writers import make_frame
from ddpbench.records import store
from ddpbench.session import options

if TYPE_CHECKING:
    import pandas as pd

GROUP = "results"
HELP = "print a stored run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    known = "a folder, a name in results/, a baseline, `last`"
    where = f"{known}, or a log of nccl-tests, rccl-tests or OSU"
    parser.add_argument("run", metavar="RUN", help=where)
    options.add_logs(parser)
    options.add_shown(parser, COLUMNS, STEP_COLUMNS, FINDING_COLUMNS, check=False)


def run(namespace: argparse.Namespace, words: Sequence[str]) -> int:
    """Print the run, or what `ab` stored; return the exit code. Raises Refused and InvalidRun."""
    for folder in (Path(namespace.run), Path("results", namespace.run)):
        if namespace.format == "table" and os.path.lexists(folder / "comparison.txt"):  # of `ab`
            sys.stdout.write((folder / "comparison.txt").read_text())
            return 0
    run = sources.read(sources.find(namespace.run), Hints(namespace.op, namespace.ranks))
    try:
        with store.refuse_impossible_values(namespace.run):
            text = formats.show(namespace.format, run, namespace.columns, namespace.quiet)
    except UnknownColumn as error:
        raise Refused(str(error)) from None
    sys.stdout.write(text)
    return 0


def load(run: str | Path) -> pd.DataFrame:
    """Return a stored run, named as for `ddpbench show`, with one row per case and backend.

    The columns are those of table.csv, in the units that `--columns help` lists: times of
    collectives in µs, of steps in ms, rates in GB/s (10⁹ bytes). `size` is in bytes; `interval` and
    `limit` are fractions; None is unknown. A run of the doctor has one row per finding. Raises
    InvalidRun.
    """
    values = formats.list_values(sources.read(sources.find(str(run))))
    frame: pd.DataFrame = make_frame(values).infer_objects()
    return frame
