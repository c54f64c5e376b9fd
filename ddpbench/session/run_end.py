"""The end of a run: closed with findings and tables, or marked as interrupted or failed."""

from __future__ import annotations

import contextlib
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ddpbench.analysis import findings
from ddpbench.present.formats import FORMATS
from ddpbench.records import store
from ddpbench.records.schema import Run
from ddpbench.records.store import End
from ddpbench.records.terminal_text import silence_stdout, tell
from ddpbench.session import page

if TYPE_CHECKING:
    from ddpbench.session.run_options import RunOptions


def interrupted(signal: str) -> End:
    """Return the end of a run that a signal interrupted, such as "SIGUSR1"."""
    return End("interrupted", f"interrupted by {signal}", 130)


def mark(folder: Path, state: str, reason: str, code: int) -> None:
    """Mark a run as interrupted or failed. Any rank that is still alive may do this."""
    with contextlib.suppress(OSError, store.InvalidRun):  # another host, or a full disk
        store.close(folder, state, reason, code)


def discard(folder: Path) -> bool:
    """Remove a run without any measured or skipped case. Return whether it was removed."""
    with contextlib.suppress(OSError, store.InvalidRun):
        if not store.read(folder).everything:
            shutil.rmtree(folder)
            return True
    return False


def finish(folder: Path, options: RunOptions, end: End | None = None) -> int:
    """Close a run with findings and with tables on disk and stdout. Return its exit code.

    options: what is printed, and whether there is a page.
    end: None if the run is complete, or if a rank has already marked how it ended.
    """
    run = store.read(folder)
    run = replace(run, findings=findings.findings(run))
    if run.state == "running":
        measured = any(outcome.summary is not None for outcome in run.outcomes)
        nothing = not measured and not run.examinations
        code = findings.exit_code(run)
        end = end or End("complete", None, 2 if nothing and code < 4 else code)
        run = replace(
            run,
            state=end.state,
            state_reason=end.reason,
            exit_code=end.code,
            ended=store.format_now(),
        )
    stored, quiet = _store(folder, run), options.quiet
    try:
        sys.stdout.write(FORMATS[options.format](run, options.columns, quiet))
        sys.stdout.flush()
    except OSError as error:  # the exit code still reports the result
        silence_stdout()
        if not isinstance(error, BrokenPipeError):
            tell(f"cannot write to stdout ({error.strerror}); {stored}")
            quiet = True
    if not quiet or run.state != "complete":
        tell(stored)
    reasons = dict.fromkeys(outcome.reason for outcome in run.outcomes if outcome.reason)
    if reasons and not any(outcome.summary for outcome in run.outcomes):
        tell(f"nothing was measured: {'; '.join(reasons)}")
    if options.report:
        page.write(folder, quiet)
    return 5 if run.exit_code is None else run.exit_code


def _store(folder: Path, run: Run) -> str:
    try:
        store.write(folder, run)
        (folder / store.GROWING).unlink(missing_ok=True)
        store.replace_file(folder / "table.csv", FORMATS["csv"](run, None, False).encode())
        store.replace_file(folder / "table.txt", FORMATS["table"](run, None, False).encode())
        store.join_samples(folder)
    except OSError as error:
        return f"only a part is stored in {folder}: the rest cannot be written ({error.strerror})"
    return f"stored in {folder}"
