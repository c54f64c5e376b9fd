"""List the stored runs, oldest first: what each measured, and how it ended.

ddpbench list
ddpbench list nightly/results
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddpbench.present.document import make_table
from ddpbench.present.writers.text import lay_out
from ddpbench.records import store
from ddpbench.records.schema import Run
from ddpbench.records.store import InvalidRun
from ddpbench.records.terminal_text import tell

GROUP = "results"
HELP = "list the stored runs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = "folder of runs (default: results)"
    parser.add_argument("folder", nargs="?", default="results", metavar="FOLDER", help=about)


def run(namespace: argparse.Namespace, words: Sequence[str]) -> int:
    """Print one line per run, and why others cannot be read; return the exit code."""
    rows = []
    for folder in store.list_runs(Path(namespace.folder)):
        try:
            rows.append(_describe(folder, store.read(folder)))
        except InvalidRun as error:
            tell(str(error))
    heads = ("run", "command", "of", "backends", "ranks", "cases", "state", "exit")
    left = ("run", "command", "of", "backends", "state")
    if rows:
        sys.stdout.write(lay_out(make_table("", heads, rows, left)) + "\n")
    else:
        tell(f"no runs in {namespace.folder}/")
    return 0


def _describe(folder: Path, run: Run) -> tuple[Any, ...]:
    backends = ",".join(dict.fromkeys(launch.backend for launch in run.launches))
    ranks = run.launches[0].world_size if run.launches else None
    subjects = ",".join(run.operations[:3]) + (",…" if len(run.operations) > 3 else "")
    measured = len({each.case for each in run.outcomes if each.summary is not None})
    end = (run.state, run.exit_code)
    return (folder.name, run.command, subjects, backends, ranks, measured, *end)
