"""The page that `--report` adds to the folder of a run."""

from __future__ import annotations

from pathlib import Path

from ddpbench.launch.placement import Refused
from ddpbench.present.writers import page_file
from ddpbench.records import store
from ddpbench.records.terminal_text import tell


def require() -> None:
    """Raise Refused if this Python lacks a package that makes a page."""
    if sentence := page_file.explain_missing("--report"):
        raise Refused(sentence)


def write(folder: Path, quiet: bool = False) -> None:
    """Write the page of a stored run into its folder, and report the path on stderr.

    The run is stored and its exit code known: an error is reported too, and nothing is raised.
    quiet: report only an error.
    """
    try:
        from ddpbench.present.document import ReportRun

        run = store.read(folder)
        if not run.everything:
            return
        page_file.save(folder / page_file.NAME, [ReportRun(run.id, run, folder)])
    except Exception as error:
        what = str(error) if isinstance(error, (OSError, store.InvalidRun)) else repr(error)
        tell(
            f"no page was written: {what}. The exit code is that of the run. "
            f"Next: ddpbench report {folder}"
        )
    else:
        if not quiet:
            tell(f"page written to {folder / page_file.NAME}")
