"""List the stored runs, oldest first: what each measured, and how it ended.

ddpbench list
ddpbench list nightly/results
ddpbench list --case all_reduce,1M,gloo      one case over all runs that measured it

--case takes words of a case's name, in any order. All of them must be in the name. To see such
names, type `list --case all_reduce`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ddpbench.launch.placement import Refused
from ddpbench.present.document import make_table
from ddpbench.present.writers.text import lay_out
from ddpbench.records import store
from ddpbench.records.schema import Run
from ddpbench.records.store import InvalidRun
from ddpbench.records.terminal_text import tell

GROUP = "results"
HELP = "list the stored runs"
UNIT = re.compile(r"(\d)\s*([kmg]|b|rank)(?:i?b|s)?(?![^\s,])")  # after a number; any spelling


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = "folder of runs (default: results)"
    parser.add_argument("folder", nargs="?", default="results", metavar="FOLDER", help=about)
    about = (
        "list the times of the cases with all these words in their name, such as all_reduce,1M "
        "(default: list the runs)"
    )
    parser.add_argument("--case", metavar="WORD,…", help=about)


def run(namespace: argparse.Namespace, words: Sequence[str]) -> int:
    """Print one line per run, or per case of a run; return the exit code. Raises Refused."""
    folder, case = Path(namespace.folder), namespace.case
    rows: list[tuple[Any, ...]]
    heads: tuple[str, ...]
    left: tuple[str, ...]
    if case is None:
        rows = [_describe(path, run) for path, run in _read_runs(folder)]
        heads = ("run", "command", "of", "backends", "ranks", "cases", "state", "exit")
        left = ("run", "command", "of", "backends", "state")
        missing = f"no runs in {folder}/"
    else:
        rows = [*_list_cases(folder, case)]
        heads = ("run", "case", "backend", "median", "95 %", "flags", "state")
        left = ("run", "case", "backend", "flags", "state")
        missing = f"no run in {folder}/ has a case whose name contains {case}"
    if rows:
        sys.stdout.write(lay_out(make_table("", heads, rows, left)) + "\n")
    else:
        tell(missing)
    return 0


def _describe(folder: Path, run: Run) -> tuple[Any, ...]:
    backends = ",".join(dict.fromkeys(launch.backend for launch in run.launches))
    ranks = run.launches[0].world_size if run.launches else None
    measured = len({each.case for each in run.outcomes if each.summary is not None})
    end = (run.state, run.exit_code)
    return (folder.name, run.command, list_subjects(run), backends, ranks, measured, *end)


def list_subjects(run: Run) -> str:
    """Return the first operations or workloads of a run: "all_reduce,broadcast"."""
    return ",".join(run.operations[:3]) + (",…" if len(run.operations) > 3 else "")


def split_words(text: str) -> set[str]:
    """Return the words of a case's name: "1M", "1MiB" and "1 MiB" are one word."""
    return set(re.findall(r"[^\s,]+", UNIT.sub(r"\1\2", text.lower())))


def _read_runs(results: Path) -> Iterator[tuple[Path, Run]]:
    """Yield the runs that can be read, oldest first; report the others."""
    for folder in store.list_runs(results):
        try:
            yield folder, store.read(folder)
        except InvalidRun as error:
            tell(str(error))


def _list_cases(results: Path, text: str) -> Iterator[tuple[str, ...]]:
    """Yield a row per measured case with these words. Raises Refused without any word."""
    wanted = split_words(text)
    if not wanted:
        raise Refused(
            f"--case {text!r} is empty: write words of a case's name, such as all_reduce,1M"
        )
    for folder, run in _read_runs(results):
        try:
            with store.refuse_impossible_values(str(folder)):
                cases = list(_describe_cases(run, wanted))
        except InvalidRun as error:
            tell(str(error))
            continue
        yield from ((folder.name, *cells, run.state) for cells in cases)


def _describe_cases(run: Run, wanted: set[str]) -> Iterator[tuple[str, ...]]:
    """Yield name, backend, time, interval and flags of each measured case with these words."""
    from ddpbench.analysis import lines, step_lines
    from ddpbench.present.case_labels import format_time, label_parts, name_case
    from ddpbench.present.columns import format_half_width

    for line in (*lines.lines(run), *step_lines.lines(run)):
        case = line.case
        if line.seconds is not None and wanted <= split_words(name_case(case)):
            name = " ".join(part for part in label_parts(case) if part not in ("", case.backend))
            time = format_time(case, line.seconds)
            yield name, case.backend, time, format_half_width(line), " ".join(line.flags)
