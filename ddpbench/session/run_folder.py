"""The folder of a run: created once, marked or finished at its end, with tables."""

from __future__ import annotations

import contextlib
import random
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ddpbench.launch.placement import Refused
from ddpbench.present.formats import FORMATS
from ddpbench.records import store
from ddpbench.records.schema import Plan, Run
from ddpbench.records.store import End
from ddpbench.records.terminal_text import silence_stdout, tell
from ddpbench.session.options import RunOptions


def create(options: RunOptions, arguments: Sequence[str]) -> tuple[Path, Plan]:
    """Choose a seed and create the folder of a new run. Raises Refused if it cannot be written."""
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    record = Run(
        id="",
        command=options.command,
        command_line=("ddpbench", options.command, *arguments),
        plan=options.plan(seed),
        started=store.format_now(),
        operations=options.subjects,
        backends=options.backend,
    )
    label = f"{options.command}-{'+'.join(options.backend)}-w{options.ranks}"
    try:
        folder = store.create(Path(options.output) if options.output else None, record, label)
    except OSError as error:
        raise Refused(store.explain_unwritable(error)) from None
    return folder, record.plan


def interrupted(signal: str) -> End:
    """Return the end of a run that a signal interrupted, such as "SIGUSR1"."""
    return End("interrupted", f"interrupted by {signal}", 130)


def mark(folder: Path, end: End) -> None:
    """Mark a run as interrupted or failed. Any rank that is still alive may do this."""
    with contextlib.suppress(OSError, store.InvalidRun):  # another host, or a full disk
        store.close(folder, *end)


def finish(folder: Path, options: RunOptions, end: End | None = None) -> int:
    """Close a run with findings and with tables on disk and stdout. Return its exit code.

    options: what is printed. end: None if the run is complete, or if a rank has already marked how
    it ended. Removes a run in which nothing was measured because it was refused, or because no
    launch began.
    """
    run = store.read(folder)
    if not run.everything and (not run.launches or (end is not None and end.code == 2)):
        shutil.rmtree(folder, ignore_errors=True)
        return 2 if end is None else end.code
    run = _conclude(run, end)
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
    return 5 if run.exit_code is None else run.exit_code


def _conclude(run: Run, end: End | None) -> Run:
    """Return the run with its findings and, unless it is marked already, its end."""
    from ddpbench.analysis import findings  # loads numpy
    from ddpbench.verdicts import tuning

    run = replace(run, findings=findings.findings(run, tuning.list_findings(run)))
    if run.state != "running":
        return run
    measured = any(outcome.summary is not None for outcome in run.outcomes)
    code = findings.exit_code(run)
    nothing = not measured and not run.examinations and code < 4
    end = end or End("complete", None, 2 if nothing else code)
    return replace(
        run,
        state=end.state,
        state_reason=end.reason,
        exit_code=end.code,
        ended=store.format_now(),
    )


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
