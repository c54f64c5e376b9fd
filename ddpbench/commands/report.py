"""Write stored runs as a page with charts, as pictures, or as Markdown.

python -m ddpbench report last
python -m ddpbench report before after --output compared.html
python -m ddpbench report last --svg pictures --markdown report.md
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ddpbench.doctor import stored
from ddpbench.interchange import sources
from ddpbench.interchange.log import Hints
from ddpbench.launch.placement import Refused
from ddpbench.records import store
from ddpbench.report import file
from ddpbench.session import options

if TYPE_CHECKING:
    from ddpbench.report.chart import ReportRun

GROUP = "results"
HELP = "write stored runs as a page with charts"
STDOUT = Path("-")
FILES = """
--output    file of the page: HTML that opens from disk (default: report.html in the folder of the
            first run; no page if --svg, --png or --markdown is given)
--svg       folder for each chart as NAME.svg (default: none)
--png       folder for each chart as NAME.png, for programs that show no SVG (default: none)
--markdown  file for sentences, findings and tables in GitHub's Markdown, with links to the pictures
            of --svg or --png; - is stdout (default: none)
--chart     names of the charts that --svg, --png and --markdown write (default: all)
"""


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
    add = options.add_group(parser, "what is written", FILES)
    add("--output", kind=Path, metavar="FILE")
    add("--svg", kind=Path, metavar="FOLDER")
    add("--png", kind=Path, metavar="FOLDER")
    add("--markdown", kind=Path, metavar="FILE")
    add("--chart", kind=options.listed, default=(), metavar="NAME,…")


def run(namespace: argparse.Namespace, words: Sequence[str]) -> int:
    """Write the files and print their paths; return the exit code. Raises Refused, InvalidRun."""
    if sentence := file.explain_missing("a report"):
        raise Refused(sentence)
    from ddpbench.report.chart import ReportRun  # needs the packages of the extra

    parts = bool(namespace.svg or namespace.png or namespace.markdown)
    if namespace.chart and not parts:
        raise Refused("--chart chooses pictures: add --svg FOLDER, --png FOLDER or --markdown FILE")
    for option in ("svg", "png"):
        if (folder := getattr(namespace, option)) and folder.exists() and not folder.is_dir():
            raise Refused(f"{folder} is a file: --{option} needs a folder")
    hints = Hints(namespace.op, namespace.ranks)
    paths = [sources.find(name) for name in namespace.runs]
    page = namespace.output
    if page is None and not parts:
        page = (paths[0] if paths[0].is_dir() else Path()) / file.NAME
    if page and (sentence := file.explain_unusable(page)):
        raise Refused(sentence)
    runs = [sources.read(path, hints) for path in paths]
    with store.refuse_impossible_values(" or ".join(namespace.runs)):
        runs = [stored.add_tables(one) for one in runs]
    labelled = [
        ReportRun(one.id, one, path if path.is_dir() else None)
        for path, one in zip(paths, runs, strict=True)
    ]
    written = _write_parts(namespace, labelled) if parts else []
    if page:
        file.write(page, labelled)
        written.append(page)
    if namespace.markdown != STDOUT:
        sys.stdout.write("".join(f"{path}\n" for path in written))
    return 0


def _write_parts(namespace: argparse.Namespace, runs: Sequence[ReportRun]) -> list[Path]:
    """Write the pictures and the Markdown; return their paths."""
    from ddpbench.report import markdown, pictures
    from ddpbench.report.page import make_sections

    with store.refuse_impossible_values(" or ".join(namespace.runs)):
        sections = make_sections(runs)
    try:
        sections = pictures.choose(sections, namespace.chart)
    except ValueError as error:
        raise Refused(str(error)) from None
    charts, target = pictures.list_charts(sections), namespace.markdown
    drawn = {
        form: dict(pictures.write(charts, folder, form))
        for form, folder in (("png", namespace.png), ("svg", namespace.svg))
        if folder
    }
    written = [path for files in drawn.values() for path in files.values()]
    if target:
        start = Path() if target == STDOUT else target.parent
        linked = {
            name: Path(os.path.relpath(path, start))
            for files in drawn.values()
            for name, path in files.items()
        }
        title = " and ".join(run.label for run in runs)
        text = markdown.make_markdown(sections, title, linked)
        if target == STDOUT:
            sys.stdout.write(text)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            store.replace_file(target, text.encode())
            written.append(target)
    return written
