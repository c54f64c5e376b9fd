"""Compare two stored runs, case by case: SLOWER, FASTER, SAME or INCONCLUSIVE.

ddpbench compare results/before results/after
ddpbench compare before last --margin 5 --only all_reduce,gloo --strict
ddpbench compare runs/base runs/new --format markdown    folders OF runs: all are pooled
ddpbench compare old.log new.log                         logs of nccl-tests or OSU

Measure both with --launches 6 or more. The verdicts compare the medians of the launches.

Exit codes, the first that applies: 2 the request is wrong; 3 a run cannot be read, or is
empty; 1 any case is SLOWER; 3 a case is INVALID (a wrong result, a broken
limit), INCOMPARABLE (not the same case) or, without --allow-missing, measured by one side only; 2
with --strict, if a case is INCONCLUSIVE; else 0.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ddpbench.interchange import sources
from ddpbench.interchange.log import NO_HINTS, Hints
from ddpbench.launch.placement import Refused
from ddpbench.present.writers import WRITERS, page_file
from ddpbench.records import store
from ddpbench.records.store import InvalidRun
from ddpbench.records.terminal_text import tell
from ddpbench.session import options

if TYPE_CHECKING:
    from ddpbench.verdicts.comparison import Comparison, Rule
    from ddpbench.verdicts.matching import AnyCase, Source

GROUP = "compare"
HELP = "compare two stored runs: faster, slower or the same"
MARGIN_PERCENT = 10.0  # for two stored runs
NEWEST_RUNS = 20  # stored runs from which the drift of a machine is learned
WHERE = "a folder, a name in results/, a baseline, `last`, or a folder of runs, which are pooled"


JUDGED = """
--margin         smallest change to report
--strict         exit with 2 if a case is INCONCLUSIVE
--allow-missing  accept cases that only one side measured (default: exit with 3)
"""
SHOWN = """
--only         compare only cases with one of these texts in their name (default: all)
--format       format on stdout
--report-file  also write a page with charts of the changes and of both runs (default: none)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = f"{WHERE}; or a log of nccl-tests, rccl-tests or OSU"
    parser.add_argument("base", metavar="BASE", help=where)
    parser.add_argument("new", metavar="NEW", help="the same, for the run to judge")
    options.add_logs(parser)
    add_judging(parser)


def add_judging(parser: argparse.ArgumentParser, margin_percent: float = MARGIN_PERCENT) -> None:
    """Add the options of every command that judges two sides."""
    add = options.add_group(parser, "verdicts", JUDGED)
    add("--margin", kind=options.positive, default=margin_percent, metavar="PERCENT")
    add("--strict", action="store_true")
    add("--allow-missing", action="store_true")
    add = options.add_group(parser, "output", SHOWN)
    add("--only", kind=options.listed, metavar="TEXT,…")
    add("--format", choices=tuple(WRITERS), default="table")
    add("--report-file", kind=options.page, metavar="FILE.html")


def run(namespace: argparse.Namespace, words: Sequence[str]) -> int:
    """Compare, print, and return the exit code. Raises Refused and InvalidRun."""
    hints = Hints(namespace.op, namespace.ranks)
    names = [namespace.base.rstrip("/"), namespace.new.rstrip("/")]
    base, new = (read_side(name, sources.find_all(name), hints) for name in names)
    return show(compare_stored(base, new, namespace), namespace)


def compare_stored(base: Source, new: Source, namespace: argparse.Namespace) -> Comparison:
    """Return the comparison of two stored sides, by the options of `add_judging`.

    The newest runs show the drift. Raises Refused and InvalidRun, as `compare_cases`.
    """
    if common := [one.id for one in base.runs if one in new.runs]:
        raise Refused(f"BASE and NEW both contain the run {common[0]}: choose different runs")
    from ddpbench.verdicts.comparison import Rule, estimate_drift  # loads numpy

    newest = []
    for folder in store.list_runs()[-NEWEST_RUNS:]:
        with contextlib.suppress(InvalidRun):
            newest.append(store.read(folder))
    with store.refuse_impossible_values(f"{base.name} or {new.name}"):
        drift = estimate_drift(base, new, newest)
        rule = Rule(namespace.margin / 100, drift, allow_missing=namespace.allow_missing)
        return compare_cases(base, new, rule, namespace.only)


def compare_cases(base: Source, new: Source, rule: Rule, only: Sequence[str] | None) -> Comparison:
    """Return the comparison of the cases that have one of the texts in their name.

    Raises Refused if there is no such case, InvalidRun if there is nothing to compare.
    """
    from ddpbench.present.case_labels import name_case
    from ddpbench.verdicts import comparison

    texts = [text.lower() for text in only or ("",)]

    def is_wanted(case: AnyCase) -> bool:
        return any(text in name_case(case).lower() for text in texts)

    try:
        result = comparison.compare(base, new, rule, is_wanted)
    except ValueError as error:
        raise InvalidRun(str(error)) from None
    if not result.rows and only:
        example = name_case(base.runs[0].outcomes[0].case)
        raise Refused(
            f"--only {','.join(only)}: no measured case has this text in its name, as in "
            f"{example!r}"
        )
    if not result.rows:
        raise InvalidRun(f"{base.name} and {new.name} have no measured case")
    return result


def show(result: Comparison, namespace: argparse.Namespace) -> int:
    """Print a comparison, then which cases were not compared; return the exit code."""
    from ddpbench.present import changes  # loads numpy
    from ddpbench.verdicts import comparison

    with store.refuse_impossible_values(f"{result.base.name} or {result.new.name}"):
        sys.stdout.write(WRITERS[namespace.format](changes.build_document(result)))
    if namespace.report_file is not None:
        _write_page(result, namespace.report_file)
    if shortfall := comparison.explain_shortfall(result):
        tell(shortfall)
    return comparison.exit_code(result, namespace.strict)


def _write_page(result: Comparison, output: Path) -> None:
    from ddpbench.present import changes
    from ddpbench.present.document import ReportRun

    runs = []
    for name, side in (("BASE", result.base), ("NEW", result.new)):
        pairs = zip(side.runs, side.folders, strict=True)
        run, path = max(pairs, key=lambda pair: pair[0].started)
        runs.append(ReportRun(f"{name} {run.id}", run, path if path.is_dir() else None))
    page_file.save(output, runs, [changes.build_section(result)])
    tell(f"page written to {output}")


def read_side(name: str, folders: Sequence[Path], hints: Hints = NO_HINTS) -> Source:
    """Return a side of a comparison: the runs in these folders or logs.

    Raises InvalidRun if one is unreadable or has no times.
    """
    runs = tuple(sources.read(folder, hints) for folder in folders)
    for folder, run in zip(folders, runs, strict=True):
        if not run.outcomes:
            raise InvalidRun(f"{folder} has no times to compare")
    from ddpbench.verdicts.matching import Source  # loads numpy: after what cannot be read

    return Source(runs[0].id if len(runs) == 1 else name, runs, tuple(folders))
