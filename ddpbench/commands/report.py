"""Write stored runs as a page with charts, as pictures, or as Markdown.

ddpbench report                                      the newest run
ddpbench report before after --report-file compared.html
ddpbench report last --svg pictures --markdown report.md
ddpbench report old.log new.log                      logs of nccl-tests or OSU

Of several runs, the first is the base: the report has the verdicts of `compare` on each of the
others. The command needs the extra `report`, and prints the path of each file.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ddpbench.commands import compare
from ddpbench.interchange import sources
from ddpbench.interchange.log import Hints
from ddpbench.launch.placement import Refused
from ddpbench.present.document import ReportRun, Section
from ddpbench.present.writers import page_file
from ddpbench.records import store
from ddpbench.records.store import InvalidRun
from ddpbench.session import options

GROUP = "results"
HELP = "write stored runs as a page with charts"
STDOUT = Path("-")
FILES = """
--report-file  file of the page: HTML that opens from disk; - is stdout (default: report.html in the
            folder of the first run, or in the current folder if that is a log; no page if --svg,
            --png or --markdown is given)
--svg       folder for each chart as NAME.svg (default: none)
--png       folder for each chart as NAME.png, for programs that show no SVG (default: none)
--markdown  file for sentences, findings and tables in GitHub's Markdown, with links to the pictures
            of --svg or --png; - is stdout (default: none)
--chart     names of the charts that --svg, --png and --markdown write (default: all)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = (
        "a folder, a name in results/, a baseline, `last`, or a log of nccl-tests, rccl-tests or "
        "OSU (default: last)"
    )
    parser.add_argument("runs", metavar="RUN", nargs="*", default=["last"], help=where)
    options.add_logs(parser)
    add = options.add_group(parser, "output", FILES)
    add("--report-file", kind=Path, metavar="FILE")
    add("--svg", kind=Path, metavar="FOLDER")
    add("--png", kind=Path, metavar="FOLDER")
    add("--markdown", kind=Path, metavar="FILE")
    add("--chart", kind=options.listed, default=(), metavar="NAME,…")


def run(namespace: argparse.Namespace, words: Sequence[str]) -> int:
    """Write the files and print their paths; return the exit code. Raises Refused, InvalidRun."""
    if sentence := page_file.explain_missing("a report"):
        raise Refused(sentence)
    page, target, folders = namespace.report_file, namespace.markdown, _list_folders(namespace)
    parts = bool(folders or target)
    if namespace.chart and not parts:
        raise Refused("--chart chooses pictures: add --svg FOLDER, --png FOLDER or --markdown FILE")
    if page == target == STDOUT:
        raise Refused("--report-file and --markdown cannot both be stdout: name a file for one")
    paths = list(dict.fromkeys(map(sources.find, namespace.runs)))
    if page is None and not parts:
        page = (paths[0] if paths[0].is_dir() else Path()) / page_file.NAME
    for path, what, name in ((page, "page", page_file.NAME), (target, "Markdown", "report.md")):
        if path and (sentence := page_file.explain_unusable(path, what, name)):
            raise Refused(sentence)
    runs = _read(paths, Hints(namespace.op, namespace.ranks))
    verdicts = [_judge(runs[0], other, number) for number, other in enumerate(runs[1:], 1)]
    written = _write_parts(namespace, folders, runs, verdicts) if parts else []
    if page == STDOUT:
        sys.stdout.write(page_file.make(runs, verdicts))
    elif page:
        page_file.save(page, runs, verdicts)
        written.append(page)
    if STDOUT not in (page, target):
        sys.stdout.write("".join(f"{path}\n" for path in written))
    return 0


def _list_folders(namespace: argparse.Namespace) -> dict[str, Path]:
    """Return the folders of pictures by their format. Raises Refused for a file."""
    folders = {form: folder for form in ("png", "svg") if (folder := getattr(namespace, form))}
    for form, folder in folders.items():
        if folder.exists() and not folder.is_dir():
            raise Refused(f"{folder} is a file: --{form} needs a folder")
    return folders


def _read(paths: Sequence[Path], hints: Hints) -> list[ReportRun]:
    """Read runs and logs, each under a name of its own. Raises InvalidRun."""
    runs = []
    for path in paths:
        with store.refuse_impossible_values(str(path)):
            runs.append(sources.read(path, hints))
    ids = [run.id for run in runs]
    return [
        ReportRun(
            run.id if ids.count(run.id) == 1 else str(path), run, path if path.is_dir() else None
        )
        for path, run in zip(paths, runs, strict=True)
    ]


def _judge(base: ReportRun, new: ReportRun, number: int) -> Section:
    """Return the section on the verdicts, or one that states why there are none."""
    from ddpbench.present import compared_runs
    from ddpbench.verdicts.comparison import Rule
    from ddpbench.verdicts.matching import Source

    try:
        for side in (base, new):
            compare.require_times(side.label, side.run)
        first, second = (Source(side.label, (side.run,)) for side in (base, new))
        with store.refuse_impossible_values(f"{base.label} or {new.label}"):
            result = compare.compare_stored(first, second, Rule(compare.MARGIN_PERCENT / 100))
            return compared_runs.build_section(result, number)
    except (InvalidRun, Refused) as error:
        return compared_runs.explain_missing(base.label, new.label, str(error), number)


def _write_parts(
    namespace: argparse.Namespace,
    folders: Mapping[str, Path],
    runs: Sequence[ReportRun],
    verdicts: Sequence[Section],
) -> list[Path]:
    """Write the pictures and the Markdown; return their paths. folders: of pictures, by format."""
    from ddpbench.present.formats import build_page
    from ddpbench.present.writers import markdown, pictures

    target = namespace.markdown
    with store.refuse_impossible_values(" or ".join(namespace.runs)):
        document = build_page(runs, verdicts)
        try:
            sections = pictures.choose(document.sections, namespace.chart)
        except ValueError as error:
            raise Refused(str(error)) from None
    charts = [chart for section in sections for chart in section.charts]
    start = target.parent if target and target != STDOUT else Path()
    written, links = [], {}
    for form, folder in folders.items():
        for name, path in pictures.write(charts, folder, form):
            written.append(path)
            links[name] = Path(os.path.relpath(path, start))
    if target:
        text = markdown.write(replace(document, sections=tuple(sections)), links)
    if target == STDOUT:
        sys.stdout.write(text)
    elif target:
        target.parent.mkdir(parents=True, exist_ok=True)
        store.replace_file(target, text.encode())
        written.append(target)
    return written
