"""The record of a run on disk: created once, each case stored at once, finished with tables."""

from __future__ import annotations

import contextlib
import random
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ddpbench.launch.placement import Refused
from ddpbench.present.formats import show
from ddpbench.present.progress import Progress
from ddpbench.records import codec, redact, store
from ddpbench.records.launched import Launch
from ddpbench.records.schema import Examination, Plan, Result, Run, StepResult
from ddpbench.records.store import End
from ddpbench.records.terminal_text import silence_stdout, tell
from ddpbench.runtime import control
from ddpbench.runtime.world import World
from ddpbench.session.options import RunOptions

if TYPE_CHECKING:
    from ddpbench.measure.offsets import Clocks

C = TypeVar("C")  # a command's case
Outcome = Result | StepResult | Examination
# The part of a run that holds each kind of outcome.
PARTS = {Result: "results", StepResult: "steps", Examination: "examinations"}


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


class Recorder:
    """The record of a launch. Rank 0 stores it after every case; other ranks store nothing."""

    def __init__(self, world: World, folder: Path, launch: Launch, quiet: bool) -> None:
        self.launch, self._world = launch, world
        self.failure: str | None = None  # why nothing more can be stored
        self._folder = folder if world.rank == 0 else None
        shown = world.rank == 0 and not quiet and sys.stderr.isatty()
        self.progress = Progress(launch.backend, launch.cases, shown)
        if self._folder is not None:
            grows = (self._folder / store.GROWING).exists()  # earlier launches have stored cases
            self._part = len(store.read(self._folder).everything) if grows else 0
            hosts = {str(rank.get("hostname") or "") for rank in launch.ranks} - {""}
            owner = redact.owner()
            self._owner = replace(owner, hosts=(*owner.hosts, *sorted(hosts)))
            self._add_launch(launch)

    def agree_cases(self, cases: Iterable[C], describe: Callable[[C], str]) -> Iterator[C]:
        """Yield each case in all ranks, until a signal comes or results cannot be stored.

        describe: names what is measured, for the message if it hangs. Measure and `add` the case
        before the next one. At the end, stores when the launch ended.
        """
        for case in cases:
            if control.agree_objection(self._world, self._world.interrupted) is not None:
                break
            self._world.watchdog.begin_phase(describe(case))
            yield case
            self.progress.advance()
            self.failure = control.broadcast_value(self._world, self.failure)
            if self.failure is not None:
                break
        self.progress.close()
        if self._folder is not None and self.failure is None:
            self._add_launch(replace(self.launch, ended=store.format_now()))

    def add(self, outcome: Outcome, columns: dict[str, Any] | None = None) -> None:
        """Store one case, and its raw samples if there are any."""
        if self._folder is None:
            return
        try:
            if columns is not None:
                store.add_samples(self._folder, self._part, columns)
            self._append(PARTS[type(outcome)], outcome, number=self._part)
        except OSError as error:
            self.failure = (
                f"cannot write more results to {self._folder} ({error.strerror}): "
                f"{self._part} cases are kept"
            )
        self._part += 1

    def add_clocks(self, clocks: Clocks) -> None:
        """Store the latest comparison of the clocks."""
        objection = {"clocks": clocks.objection} if clocks.objection else {}
        facts = {**self.launch.facts, **objection}
        launch = replace(self.launch, offsets=clocks.offsets, facts=facts)
        if self._folder is not None and launch != self.launch:
            self._add_launch(launch)

    def _add_launch(self, launch: Launch) -> None:
        self.launch = launch
        with contextlib.suppress(OSError):  # a full disk is reported with the next outcome
            self._append("launches", launch)

    def _append(self, part: str, record: Any, **more: int) -> None:
        assert self._folder is not None
        line = {**more, part: codec.to_plain(record)}
        store.append(self._folder, redact.record(line, self._owner))


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
        sys.stdout.write(show(options.format, run, options.columns, quiet))
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
        store.replace_file(folder / "table.csv", show("csv", run).encode())
        store.replace_file(folder / "table.txt", show("table", run).encode())
        store.join_samples(folder)
    except OSError as error:
        return f"only a part is stored in {folder}: the rest cannot be written ({error.strerror})"
    return f"stored in {folder}"
