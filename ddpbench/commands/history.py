"""One case over all stored runs: its trend, and between which runs its level changed.

python -m ddpbench history all_reduce 1 MiB gloo
python -m ddpbench history mlp mpi --folder nightly --format csv

The words must all stand in the case's name as `compare` prints it, in any order. Runs are those in
results/ and results/baselines/, oldest first. Cases of another identity are another series. Change
points are looked for from 6 runs on, with ruptures (pip install ruptures).

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
from ddpbench.records.choices import did_you_mean
from ddpbench.records.schema import Run
from ddpbench.records.store import InvalidRun
from ddpbench.records.visible import tell

GROUP = "compare"
HELP = "show one case over the stored runs: its trend, and where it changed"
FORMATS = ("table", "csv", "json")  # of render.history, which loads numpy
# A number and its unit are one word.
WORD = re.compile(r"(\d+)\s*(?:([KMG])(?:i?B)?|(B)|(rank)s?)(?![^\s,])|[^\s,]+", re.IGNORECASE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command; imports no torch."""
    parser.add_argument(
        "case",
        nargs="+",
        metavar="CASE",
        help="words that must all stand in the case's name: all_reduce 1 MiB gloo",
    )
    parser.add_argument("--folder", default="results", help="of runs; default results")
    parser.add_argument("--format", choices=FORMATS, default="table", help="default table")


def run(namespace: argparse.Namespace, words: Sequence[str]) -> int:
    """Print the series. Raises Refused for a request that is wrong."""
    wanted = sought(" ".join(namespace.case))
    if not wanted:
        raise Refused("CASE is empty: write words of a case's name, as in all_reduce 1 MiB gloo")
    runs = _stored(Path(namespace.folder))

    from ddpbench.render import history as render
    from ddpbench.render.labels import label
    from ddpbench.verdicts import trend  # loads numpy: after what may be refused

    with store.refuse_impossible_values(namespace.folder):
        found = trend.trends(runs, lambda case: wanted <= sought(label(case)))
    if not found:
        names = {label(outcome.case): None for run in runs for outcome in run.outcomes}
        known = {word: None for name in names for word in sought(name)}
        strange = [word for word in wanted if word not in known]
        hint = did_you_mean(strange[0], known) if strange else ""
        raise Refused(
            f"no measured case in {namespace.folder} has the words "
            f"{', '.join(sorted(wanted))} in its name, as in {next(iter(names))!r}{hint}"
        )
    with store.refuse_impossible_values(namespace.folder):
        text = render.FORMATS[namespace.format](found)
    sys.stdout.write(text)
    return 0


def sought(text: str) -> set[str]:
    """The words of a case's name, or of what is looked for in it: "1M", "1MiB", "1 MiB" are one."""
    found = set()
    for match in WORD.finditer(text.lower()):
        number, prefix, byte, rank = match.groups()
        unit = f"{prefix}ib" if prefix else byte or (rank and "ranks")
        found.add(f"{number} {unit}" if unit else match[0])
    return found


def _stored(folder: Path) -> list[Run]:
    """The runs in a folder and in the baselines in it, each once; those that cannot be read are
    told. Raises Refused where there is none."""
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
        raise Refused(f"{folder} holds no run with results: name a folder of runs with --folder")
    return list(runs.values())
