"""List the stored runs, oldest first: what each measured, and how it ended.

python -m ddpbench list
python -m ddpbench list nightly/results
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ddpbench.records import store
from ddpbench.records.store import InvalidRun
from ddpbench.records.terminal_text import escape, tell

GROUP = "results"
HELP = "list the stored runs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument(
        "folder",
        nargs="?",
        default="results",
        metavar="FOLDER",
        help="folder of runs (default: results)",
    )


def run(namespace: argparse.Namespace, words: Sequence[str]) -> int:
    """Print one line per run; return the exit code."""
    from tabulate import tabulate

    rows = []
    for folder in store.list_runs(Path(namespace.folder)):
        try:
            run = store.read(folder)
        except InvalidRun as error:
            tell(str(error))
            continue
        backends = ",".join(dict.fromkeys(launch.backend for launch in run.launches))
        world_size = run.launches[0].world_size if run.launches else None
        measured = len({each.case for each in run.outcomes if each.summary is not None})
        subjects = ",".join(run.operations[:3]) + (",…" if len(run.operations) > 3 else "")
        texts = map(escape, (folder.name, run.command, subjects, backends))
        rows.append([*texts, world_size, measured, escape(run.state), run.exit_code])
    if not rows:
        tell(f"no runs in {namespace.folder}/")
        return 0
    heads = ["run", "command", "of", "backends", "ranks", "cases", "state", "exit"]
    sys.stdout.write(tabulate(rows, heads) + "\n")
    return 0
