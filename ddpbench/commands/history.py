"""Show one case over all stored runs: its trend, and between which runs its level changed.

python -m ddpbench history all_reduce 1 MiB gloo
python -m ddpbench history mlp mpi --folder nightly --format csv

All words must be in the case's name as `compare` prints it, in any order. The runs are those in
results/ and results/baselines/, oldest first. Each case is a series of its own. From 6 runs on,
ruptures (pip install ruptures) finds the change points.

Exit codes: 0 printed; 2 the request is wrong, or no run has such a case.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from ddpbench.launch.placement import Refused
from ddpbench.records import store
from ddpbench.records.schema import Run
from ddpbench.records.store import InvalidRun
from ddpbench.records.terminal_text import tell
from ddpbench.records.wording import did_you_mean

GROUP = "compare"
HELP = "show one case over the stored runs: its trend, and where it changed"
FORMATS = ("table", "csv", "json")  # of render.history, which loads numpy
# A number and its unit are one word.
WORD = re.compile(r"(\d+)\s*(?:([KMG])(?:i?B)?|(B)|(rank)s?)(?![^\s,])|[^\s,]+", re.IGNORECASE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command; imports no torch."""
    parser.add_argument(
        "case",
        nargs="+",
        metavar="CASE",
        help="words that are all in the case's name: all_reduce 1 MiB gloo",
    )
    parser.add_argument("--folder", default="results", help="folder of runs (default: results)")
    parser.add_argument(
        "--format", choices=FORMATS, default="table", help="format on stdout (default: table)"
    )


def run(namespace: argparse.Namespace, words: Sequence[str]) -> int:
    """Print the series; return the exit code. Raises Refused."""
    wanted = split_words(" ".join(namespace.case))
    if not wanted:
        raise Refused("CASE is empty: write words of a case's name, such as all_reduce 1 MiB gloo")
    runs = _stored(Path(namespace.folder))

    from ddpbench.render import history as render
    from ddpbench.render.labels import label
    from ddpbench.verdicts import trend  # loads numpy: after what may be refused

    with store.refuse_impossible_values(namespace.folder):
        series = trend.find_series(runs, lambda case: wanted <= split_words(label(case)))
    if not series:
        names = {label(outcome.case): None for run in runs for outcome in run.outcomes}
        known = {word: None for name in names for word in split_words(name)}
        strange = [word for word in wanted if word not in known]
        hint = did_you_mean(strange[0], known) if strange else ""
        raise Refused(
            f"no measured case in {namespace.folder} has the words "
            f"{', '.join(sorted(wanted))} in its name, as in {next(iter(names))!r}{hint}"
        )
    with store.refuse_impossible_values(namespace.folder):
        text = render.FORMATS[namespace.format](series)
    sys.stdout.write(text)
    return 0


def split_words(text: str) -> set[str]:
    """Return the words of a case's name, or of a request: "1M", "1MiB", "1 MiB" are one word."""
    words = set()
    for match in WORD.finditer(text.lower()):
        number, prefix, byte, rank = match.groups()
        unit = f"{prefix}ib" if prefix else byte or (rank and "ranks")
        words.add(f"{number} {unit}" if unit else match[0])
    return words


def _stored(folder: Path) -> list[Run]:
    """Return the runs in a folder and in its baselines, each once; report what cannot be read.

    Raises Refused if there is none.
    """
    baselines = folder / store.BASELINES.name
    pools = [pool for pool in sorted(baselines.glob("*")) if not (pool / "run.json").exists()]
    runs: dict[tuple[str, str], Run] = {}
    for place in (folder, baselines, *pools):
        for each in store.list_runs(place):
            try:
                run = store.read(each)
            except InvalidRun as error:
                tell(str(error))
                continue
            if run.outcomes:
                runs.setdefault((run.id, run.started), run)
    if not runs:
        raise Refused(f"{folder} holds no run with results: choose a folder of runs with --folder")
    return list(runs.values())
