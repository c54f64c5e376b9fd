"""The end of a run: marked where it ends before its time, else closed with findings and tables."""

from __future__ import annotations

import contextlib
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from ddpbench.analysis import findings
from ddpbench.records import store
from ddpbench.records.visible import silence_stdout, tell
from ddpbench.render.formats import FORMATS


@dataclass(frozen=True)
class End:
    """How a run ended: "complete", "interrupted" or "failed", why, and its exit code."""

    state: str
    reason: str | None
    code: int


def interrupted(by: str) -> End:
    """The end of a run that was told to stop, and by what: "SIGUSR1"."""
    return End("interrupted", f"interrupted by {by}", 130)


def mark(folder: Path, state: str, reason: str, code: int) -> None:
    """Mark a run that ends before its time; whichever rank lives may do it."""
    with contextlib.suppress(OSError, store.InvalidRun):  # another host, or a full disk
        store.close(folder, state, reason, code)


def discard(folder: Path) -> bool:
    """Remove a run in which nothing was measured or skipped; whether it was such a one."""
    with contextlib.suppress(OSError, store.InvalidRun):
        if not store.read(folder).everything:
            shutil.rmtree(folder)
            return True
    return False


def finish(
    folder: Path, form: str, columns: tuple[str, ...] | None, quiet: bool, end: End | None = None
) -> int:
    """Close a run: findings, tables on disk and on stdout; its exit code.

    end: how it ended before its time, unless a rank has marked that already.
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
    try:
        store.write(folder, run)
        (folder / store.GROWING).unlink(missing_ok=True)
        store.replace_file(folder / "table.csv", FORMATS["csv"](run, None, False).encode())
        store.replace_file(folder / "table.txt", FORMATS["table"](run, None, False).encode())
        store.join_samples(folder)
        stored = f"stored in {folder}"
    except OSError as error:
        stored = f"{folder} holds only a part, the rest cannot be written ({error.strerror})"
    try:
        sys.stdout.write(FORMATS[form](run, columns, quiet))
        sys.stdout.flush()
    except OSError as error:  # the exit code still tells what was measured
        silence_stdout()
        if not isinstance(error, BrokenPipeError):
            tell(f"stdout cannot be written ({error.strerror}); {stored}")
            quiet = True
    if not quiet or run.state != "complete":
        tell(stored)
    return 5 if run.exit_code is None else run.exit_code
