"""Rank 0's record of a launch while it runs, and the end of a run: what commands share."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ddpbench.analysis import clocks, findings, stats, steps
from ddpbench.analysis.kept import Kept
from ddpbench.records import redact, store
from ddpbench.records.schema import Examination, Launch, Result, StepResult
from ddpbench.records.visible import silence_stdout, tell
from ddpbench.render.formats import FORMATS
from ddpbench.runtime.group import Group

if TYPE_CHECKING:
    from ddpbench.measure.offsets import Clocks
    from ddpbench.measure.pace import Samples


# Where a run keeps each kind of outcome.
PARTS = {Result: "results", StepResult: "steps", Examination: "examinations"}


class Book:
    """The record of one launch: everything measured is on disk after each case. Idle elsewhere
    than in rank 0."""

    def __init__(self, ranks: Group, folder: Path, launch: Launch) -> None:
        self.writes = ranks.rank == 0
        self.folder, self.launch = folder, launch
        self.failure: str | None = None  # why nothing more can be stored
        self._bar: Any = None
        if self.writes:
            self.part = len(store.read(folder).everything)
            self.measuring_seconds = 0.0
            hosts = {str(rank.get("hostname") or "") for rank in launch.ranks} - {""}
            whose = redact.owner()
            self._whose = replace(whose, hosts=(*whose.hosts, *sorted(hosts)))
            with contextlib.suppress(OSError):  # a full disk is told with the first outcome
                self._append("launches", self.launch)

    def expect(self, cases: int) -> None:
        """Show progress and time left on stderr."""
        if not self.writes:
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeRemainingColumn

        # No thread that refreshes it: that would run inside timed spans.
        self._bar = Progress(
            "{task.description}",
            BarColumn(),
            TaskProgressColumn(),
            "left",
            TimeRemainingColumn(),
            console=Console(stderr=True, force_terminal=True),
            auto_refresh=False,
            transient=True,
        )
        self._bar.add_task(self.launch.backend, total=cases)
        self._bar.start()

    def compared(self, found: Clocks) -> None:
        """Store what is known of the clocks now."""
        why = {"clocks": found.objection} if found.objection else {}
        facts = {**self.launch.facts, **why}
        now = replace(self.launch, offsets=found.offsets, facts=facts)
        if self.writes and now != self.launch:
            self.launch = now
            with contextlib.suppress(OSError):  # told with the next outcome
                self._append("launches", now)

    def add(
        self, outcome: Result | StepResult | Examination, columns: dict[str, Any] | None = None
    ) -> None:
        """Store one case, with its raw samples (store.SAMPLE_COLUMNS) where there are any."""
        if not self.writes:
            return
        try:
            if columns is not None:
                store.add_samples(self.folder, self.part, columns)
            self._append(PARTS[type(outcome)], outcome, number=self.part)
        except OSError as error:
            self.failure = (
                f"results cannot be written to {self.folder} any more ({error.strerror}): "
                f"{self.part} cases are kept"
            )
        self.part += 1
        if isinstance(outcome, Result):
            self.measuring_seconds += outcome.measuring_seconds
        self.advance(1)

    def say(self, what: str) -> None:
        """Show beside the bar what is done now."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], description=f"{self.launch.backend}: {what}")
            self._bar.refresh()

    def advance(self, cases: float) -> None:
        """Move the bar."""
        if self._bar is not None:
            self._bar.advance(self._bar.task_ids[0], cases)
            self._bar.refresh()

    def close(self, seconds: float, used: list[dict[str, Any]]) -> None:
        """Store how long the sweep took, how much of it was measuring, what each rank used."""
        if not self.writes:
            return
        if self._bar is not None:
            self._bar.stop()
        if self.failure is not None:
            return
        self.launch = replace(
            self.launch,
            ended=store.now(),
            sweep_seconds=seconds,
            measuring_seconds=self.measuring_seconds,
            ranks=tuple(
                {**facts, **mine} for facts, mine in zip(self.launch.ranks, used, strict=True)
            ),
        )
        with contextlib.suppress(OSError):  # a full disk is told when the run is finished
            self._append("launches", self.launch)

    def _append(self, part: str, record: Any, **more: int) -> None:
        """As a line of the run. Raises OSError."""
        line = {**more, part: asdict(record)}
        store.append(self.folder, redact.record(line, self._whose))


def summed(
    result: Result, samples: Samples, clock_off_seconds: float | None
) -> tuple[Result, dict[str, Any] | None]:
    """The result with what its samples say, and their columns; as it is where there are none.

    clock_off_seconds: what stamps of different ranks may be off, as `Result` has it.
    """
    if not samples.timed.repetitions:
        return result, None
    assert samples.cold is not None
    single = result.case.issue == "isolated" and samples.calls == samples.cold_calls
    over = stats.joined(samples.timed.over)
    common_clock = clocks.comparable(clock_off_seconds, float(np.median(over.times(1))))
    result = replace(
        result,
        calls=samples.calls,
        batch=samples.calls // samples.cold_calls,
        cold_seconds=float(stats.t_max(samples.cold, samples.cold_calls)[0]),
        warm_up=samples.warm_up.repetitions,
        stop_reason=samples.stop_reason,
        checks=samples.checks,
        measuring_seconds=samples.measuring_seconds,
        summary=stats.summary(over, samples.calls, common_clock, single),
        clock_off_seconds=clock_off_seconds,
    )
    return result, _columns(result, samples)


def _columns(result: Result, samples: Samples) -> dict[str, Any]:
    """SAMPLE_COLUMNS of one case: warm-ups (the cold call first) have repetitions below 0."""
    import pyarrow as pa

    cold = Kept(samples.timed.teams)
    assert samples.cold is not None
    cold.add(samples.cold)
    parts = [cold.rows(), samples.warm_up.rows(), samples.timed.rows()]
    parts[0][:, 0] -= 1 + samples.warm_up.repetitions
    parts[1][:, 0] -= samples.warm_up.repetitions
    repetition, rank, entry, exits, device = np.concatenate(parts).T
    return {
        "case": pa.DictionaryArray.from_arrays(np.zeros(len(rank), np.int32), [result.case.key]),
        "launch": np.full(len(rank), result.launch, dtype=np.int32),
        "repetition": repetition.astype(np.int32),
        "rank": rank.astype(np.int32),
        "entry_ns": entry,
        "exit_ns": exits,
        "device_ns": device,
        "warm_up": repetition < 0,
    }


def step_columns(case: str, launch: int, samples: steps.Samples) -> dict[str, Any]:
    """SAMPLE_COLUMNS of a DDP step: "CASE/ARM/PHASE", entry and exit in ns since the first step of
    the round; "CASE/verify" and "CASE/bucket/INDEX" likewise (since the begin of backward)."""
    spans: dict[str, npt.NDArray[np.int64]] = {}  # name → [world, repetition, (entry, exit)]
    for arm, stamps in samples.stamps.items():
        flat = stamps.reshape(stamps.shape[0], -1, 4)
        for i, phase in enumerate(("forward", "backward", "optimizer")):
            spans[f"{case}/{arm}/{phase}"] = flat[:, :, i : i + 2]
    if samples.bucket_stamps is not None:
        for i in range(samples.bucket_stamps.shape[2]):
            spans[f"{case}/bucket/{i}"] = samples.bucket_stamps[:, :, i]
    if samples.verify.size:
        spans[f"{case}/verify"] = np.stack([np.zeros_like(samples.verify), samples.verify], axis=2)
    return {
        name: np.concatenate([_span_column(name, key, each, launch) for key, each in spans.items()])
        for name in store.SAMPLE_COLUMNS
    }


def _span_column(
    name: str, key: str, spans: npt.NDArray[np.int64], launch: int
) -> npt.NDArray[Any]:
    world, count, _ = spans.shape
    columns: dict[str, Callable[[], npt.NDArray[Any]]] = {
        "case": lambda: np.full(world * count, key, dtype=object),
        "launch": lambda: np.full(world * count, launch, dtype=np.int32),
        "repetition": lambda: np.tile(np.arange(count, dtype=np.int32), world),
        "rank": lambda: np.repeat(np.arange(world, dtype=np.int32), count),
        "entry_ns": lambda: spans[:, :, 0].ravel(),
        "exit_ns": lambda: spans[:, :, 1].ravel(),
        "device_ns": lambda: np.full(world * count, -1, dtype=np.int64),
        "warm_up": lambda: np.zeros(world * count, dtype=bool),
    }
    return columns[name]()


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
            run, state=end.state, state_reason=end.reason, exit_code=end.code, ended=store.now()
        )
    try:
        store.write(folder, run)
        (folder / store.GROWING).unlink(missing_ok=True)
        store.put(folder / "table.csv", FORMATS["csv"](run, None, False).encode())
        store.put(folder / "table.txt", FORMATS["table"](run, None, False).encode())
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
