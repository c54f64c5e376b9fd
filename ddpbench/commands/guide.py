"""Read the manual: list its chapters, or show one.

ddpbench guide                    list the chapters
ddpbench guide hangs              show a chapter; in a pager, if stdout is a terminal
ddpbench guide hangs > hangs.md   write the chapter as Markdown
"""

from __future__ import annotations

import argparse
import pydoc
import sys
from collections.abc import Sequence

from ddpbench import guide
from ddpbench.launch.placement import Refused
from ddpbench.records.wording import explain_unknown

GROUP = "manual"
HELP = "read the manual"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = "chapter to show (default: list all chapters)"
    parser.add_argument("chapter", nargs="?", metavar="CHAPTER", help=about)


def run(namespace: argparse.Namespace, words: Sequence[str]) -> int:
    """List the chapters or show one; return the exit code. Raises Refused for an unknown one."""
    chapters = guide.read_chapters()
    if namespace.chapter is None:
        sys.stdout.write(guide.format_list(chapters))
        return 0
    text = chapters.get(namespace.chapter)
    if text is None:
        raise Refused(explain_unknown("chapter", namespace.chapter, chapters))
    if sys.stdout.isatty():
        pydoc.pager(text)
    else:
        sys.stdout.write(text)
    return 0
