"""Write a stored run as a page with charts, as pictures, or as Markdown.

ddpbench report                                           the newest run
ddpbench report before --report-file page.html
ddpbench report last --svg pictures --markdown report.md
ddpbench report old.log                                   a log of nccl-tests or OSU

For a page on two runs with verdicts: ddpbench compare BASE NEW --report-file page.html.
The command needs the extra `report`, and prints the path of each file.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ddpbench.interchange import sources
from ddpbench.interchange.log import Hints
from ddpbench.launch.placement import Refused
from ddpbench.present.document import ReportRun
from ddpbench.present.writers import page_file
from ddpbench.records import store
from ddpbench.session import options

GROUP = "results"
HELP = "write a stored run as a page with charts"
STDOUT = Path("-")
FILES = """
--report-file  file of the page: HTML that opens from disk (default: report.html in the
            folder of the run, or in the current folder if that is a log; no page if --svg,
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
    parser.add_argument("run", metavar="RUN", nargs="?", default="last", help=where)
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
    page, target = namespace.report_file, namespace.markdown
    folders = {form: folder for form in ("png", "svg") if (folder := getattr(namespace, form))}
    parts = bool(folders or target)
    if namespace.chart and not parts:
        raise Refused("--chart chooses pictures: add --svg FOLDER, --png FOLDER or --markdown FILE")
    source = sources.find(namespace.run)
    is_run = source.is_dir()
    if page is None and not parts:
        page = (source if is_run else Path()) / page_file.NAME
    for path, what, name in ((page, "page", page_file.NAME), (target, "Markdown", "report.md")):
        if path and (sentence := page_file.explain_unusable(path, what, name)):
            raise Refused(sentence)
    for form, folder in folders.items():
        if folder.exists() and not folder.is_dir():
            raise Refused(f"{folder} is a file: --{form} needs a folder")
    with store.refuse_impossible_values(str(source)):
        run = sources.read(source, Hints(namespace.op, namespace.ranks))
    runs = [ReportRun(run.id, run, source if is_run else None)]
    written = _write_parts(namespace, folders, runs) if parts else []
    if page:
        page_file.save(page, runs)
        written.append(page)
    if target != STDOUT:
        sys.stdout.write("".join(f"{path}\n" for path in written))
    return 0


def _write_parts(
    namespace: argparse.Namespace, folders: Mapping[str, Path], runs: Sequence[ReportRun]
) -> list[Path]:
    """Write the pictures and the Markdown; return their paths. folders: of pictures, by format."""
    from ddpbench.present.formats import build_page
    from ddpbench.present.writers import markdown, pictures

    target = namespace.markdown
    with store.refuse_impossible_values(namespace.run):
        document = build_page(runs)
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
