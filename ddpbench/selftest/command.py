"""The self-test: plant faults one by one in real ranks, and judge whether ddpbench finds them."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ddpbench.analysis import selftest
from ddpbench.analysis.selftest import Tried
from ddpbench.launch import placement
from ddpbench.launch.placement import Refused
from ddpbench.records import store
from ddpbench.records.schema import Examination, Plan, Run
from ddpbench.records.terminal_text import tell
from ddpbench.render.selftest import FORMATS, build_table, verdict
from ddpbench.selftest import ranks, trials
from ddpbench.selftest.hosts import PORT, Hosts
from ddpbench.selftest.ranks import Done
from ddpbench.selftest.trials import Trial
from ddpbench.session import run_folder
from ddpbench.session.progress import open_progress

ALLOWED = ("--selftest", "--healthy", "--format", "--output")
RANKS = 2  # of a healthy run
HEALTHY = Trial(
    "healthy",
    "nothing",
    ("doctor", "-n", str(RANKS), "--backend", "gloo", "--device", "cpu", "--seconds", "5"),
    selftest.Expected((0,), "", ""),
    seconds=300.0,
)


def run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run the trials and print the table; return 0 if all outcomes are as expected, else 1.

    With --output the rows are stored as a run, after every trial: figures {"trials": [a `Tried`,
    …]}. Raises Refused if an argument is unknown to the self-test or a launcher has started it.
    """
    _check(options.format, arguments)
    folder = _create(options.output, arguments) if options.output else None
    chosen = [trial for trial in trials.TRIALS if trial.fault in options.selftest]
    chosen += [HEALTHY] * (1 if options.healthy is None else options.healthy)
    rows: list[Tried] = []
    with (
        tempfile.TemporaryDirectory(prefix="ddpbench-") as scratch,
        open_progress("selftest", len(chosen)) as progress,
    ):
        for number, trial in enumerate(chosen, 1):
            progress.describe(f"{trial.fault}, {trial.planted}")
            rows.append(run_trial(trial, Path(scratch, str(number))))
            if folder is not None:
                _store(folder, rows)
            progress.advance(1)
    code = int(any(row.right is False for row in rows))
    if folder is not None:
        _store(folder, rows, state="complete", exit_code=code, ended=store.format_now())
        tell(f"stored in {folder}")
    sys.stdout.write(FORMATS[options.format](rows))
    return code


def run_trial(trial: Trial, folder: Path) -> Tried:
    """Run one trial and judge its outcome. The folder must not exist yet."""
    began = time.monotonic()
    if (reason := trial.find_obstacle()) is not None:
        return Tried(trial.fault, trial.planted, None, None, None, reason, None)
    folder.mkdir()
    output = folder / "run"
    command = [sys.executable, "-m", "ddpbench", *trial.arguments, "--output", str(output)]
    try:
        done = _run_on_hosts(trial, command) if trial.rates else _run_here(trial, command, folder)
    except TimeoutError as late:
        done = Done(5, "", f"{selftest.PREFIX}{str(late)[:200]}")
    lines = selftest.collect_messages(_read_run(output), done.stderr)
    seconds = time.monotonic() - began
    if trial is HEALTHY:
        # With fewer cores than ranks, this warning is correct.
        oversubscribed = (os.cpu_count() or 1) < RANKS
        allowed = ("^warning oversubscribed:",) if oversubscribed else ()
        return selftest.judge_healthy(done.returncode, lines, seconds, allowed)
    return selftest.judge_fault(
        trial.fault,
        trial.planted,
        trial.expected,
        code=done.returncode,
        lines=lines,
        seconds=seconds,
    )


def _run_here(trial: Trial, command: list[str], folder: Path) -> Done:
    """Run the command on this host, where it starts its ranks itself."""
    if trial.tiny_disk:
        command = trials.on_tiny_disk(str(folder), command)
    return ranks.call(command, trial.seconds)


def _run_on_hosts(trial: Trial, command: list[str]) -> Done:
    """Run the command on simulated hosts, with one rank on each."""
    count = len(trial.rates)
    with Hosts(count, trial.rates, trial.pairs) as bench:
        variables = {
            "WORLD_SIZE": str(count),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": bench[0].address,
            "MASTER_PORT": str(PORT),
            "OMP_NUM_THREADS": "1",
        }
        commands = {rank: ["env", f"RANK={rank}", *command] for rank in range(count)}
        outcomes = bench.run(commands, None, trial.seconds, **variables)
    stderr = "".join(done.stderr for done in outcomes)
    return Done(max(done.returncode for done in outcomes), "", stderr)


def _create(output: str, arguments: Sequence[str]) -> Path:
    """Create the folder of the run. Raises Refused if it cannot be written."""
    record = Run(
        id="",
        command=selftest.COMMAND,
        command_line=("ddpbench", "doctor", *arguments),
        plan=Plan(),
        started=store.format_now(),
    )
    try:
        return store.create(Path(output), record, selftest.COMMAND)
    except OSError as error:
        raise Refused(run_folder.explain_unwritable(error)) from None


def _store(folder: Path, rows: Sequence[Tried], **end: Any) -> None:
    """Store the trials so far. end: fields of the run that tell how it ended."""
    examination = Examination(
        name=selftest.COMMAND,
        launch=0,
        backend="gloo",
        seconds=sum(row.seconds or 0.0 for row in rows),
        told=(verdict(rows),),
        findings=selftest.list_findings(rows),
        figures={"trials": [asdict(row) for row in rows]},
        tables=(build_table(rows),),
    )
    run = replace(store.read(folder), examinations=(examination,), findings=examination.findings)
    store.write(folder, replace(run, **end))


def _read_run(folder: Path) -> Run | None:
    """Read the run in a folder, finished or not; None if there is none that can be read."""
    try:
        return store.read(folder)
    except store.InvalidRun:
        return None


def _check(output_format: str, arguments: Sequence[str]) -> None:
    for argument in arguments:
        if argument.startswith("-") and argument.split("=")[0] not in ALLOWED:
            raise Refused(
                f"--selftest does not accept {argument}: leave it out. --selftest accepts only "
                f"{', '.join(ALLOWED)}"
            )
    if output_format not in FORMATS:
        raise Refused(f"unknown --format {output_format}: choose {', '.join(FORMATS)}")
    if (launched := placement.read_placement()) is not None:
        raise Refused(
            "--selftest starts its ranks itself: leave out the launcher "
            f"({launched.launcher}) and type python -m ddpbench doctor --selftest"
        )
