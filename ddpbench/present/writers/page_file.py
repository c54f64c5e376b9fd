"""A page as a file. This module imports none of the packages of the extra `report` at its top."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ddpbench.records import store
from ddpbench.records.wording import install_extra

if TYPE_CHECKING:
    from ddpbench.present.document import ReportRun, Section

NAME = "report.html"  # in the folder of a run
PACKAGES = ("altair", "jinja2", "vl_convert")  # what a page needs of the extra `report`


def explain_missing(wanted: str) -> str | None:
    """Return the sentence on a missing package; None if there is none. Imports no package.

    wanted: the option or command that needs the package, such as "--report-file".
    """
    missing = next((name for name in PACKAGES if find_spec(name) is None), None)
    return missing and f"{wanted} needs {missing}: {install_extra('report')}"


def explain_unusable(output: Path, what: str = "page", name: str = NAME) -> str | None:
    """Return the sentence on a path that cannot become a file; None if it can.

    what: the content of the file, in words. name: an example of its name.
    """
    if output.is_dir():
        return f"{output} is a folder: name a file for the {what}, such as {output / name}"
    if output.exists() and not output.is_file():
        return f"{output} is not a regular file: choose another file for the {what}"
    if output.parent.exists() and not output.parent.is_dir():
        return f"{output.parent} is not a folder: choose another file for the {what}"
    return None


def make(runs: Sequence[ReportRun], verdicts: Sequence[Section] = (), title: str = "") -> str:
    """Return a page, as `build_page`. Raises InvalidRun for values that cannot be shown."""
    from ddpbench.present.formats import build_page
    from ddpbench.present.writers.page import write

    with store.refuse_impossible_values(" or ".join(run.label for run in runs) or title):
        return write(build_page(runs, verdicts, title))


def save(
    output: Path, runs: Sequence[ReportRun], verdicts: Sequence[Section] = (), title: str = ""
) -> None:
    """Write a page atomically, and the folders above it. Raises OSError, and as `make`."""
    page = make(runs, verdicts, title)
    output.parent.mkdir(parents=True, exist_ok=True)
    store.replace_file(output, page.encode())
