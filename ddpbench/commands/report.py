"""Write stored runs as a page with charts: one HTML file that opens from disk.

python -m ddpbench report last
python -m ddpbench report before after --output compared.html
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ddpbench.doctor import stored
from ddpbench.interchange import sources
from ddpbench.interchange.log import Hints
from ddpbench.launch.placement import Refused
from ddpbench.records import store
from ddpbench.report import file
from ddpbench.session import options

GROUP = "results"
HELP = "write stored runs as a page with charts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command; imports no torch."""
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        help="a folder, a name in results/, a baseline, `last`, or a log of nccl-tests, rccl-tests "
        "or OSU",
    )
    options.add_logs(parser)
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="file of the page (default: report.html in the folder of the first run)",
    )


def run(namespace: argparse.Namespace, words: Sequence[str]) -> int:
    """Write the page and print its path; return the exit code. Raises Refused and InvalidRun."""
    if sentence := file.explain_missing("a page"):
        raise Refused(sentence)
    from ddpbench.report.chart import ReportRun

    hints = Hints(namespace.op, namespace.ranks)
    paths = [sources.find(name) for name in namespace.runs]
    output = namespace.output or (paths[0] if paths[0].is_dir() else Path()) / file.NAME
    if sentence := file.explain_unusable(output):
        raise Refused(sentence)
    runs = [sources.read(path, hints) for path in paths]
    with store.refuse_impossible_values(" or ".join(namespace.runs)):
        runs = [stored.add_tables(one) for one in runs]
    file.write(
        output,
        [
            ReportRun(one.id, one, path if path.is_dir() else None)
            for path, one in zip(paths, runs, strict=True)
        ],
    )
    sys.stdout.write(f"{output}\n")
    return 0
