"""The self-test: faults are planted one by one in real ranks of this machine, and must be found."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ddpbench.analysis import selftest
from ddpbench.analysis.selftest import Tried
from ddpbench.launch import placement
from ddpbench.launch.placement import Refused
from ddpbench.records import store
from ddpbench.records.schema import Run
from ddpbench.render.selftest import FORMATS
from ddpbench.selftest import ranks, trials
from ddpbench.selftest.hosts import PORT, Hosts
from ddpbench.selftest.ranks import Done
from ddpbench.selftest.trials import Trial
from ddpbench.session.progress import open_progress

TAKEN = ("--selftest", "--healthy", "--format")
RANKS = 2  # of a healthy run
HEALTHY = Trial(
    "healthy", "nothing",
    ("doctor", "-n", str(RANKS), "--backend", "gloo", "--device", "cpu", "--seconds", "5"),
    selftest.Expected((0,), "", ""), seconds=300.0,
)  # fmt: skip


def run(asked: argparse.Namespace, words: Sequence[str]) -> int:
    """Try, and print the table: 0 where all came out as it must, else 1.

    Raises Refused for what does not go together.
    """
    _check(asked.format, words)
    chosen = [trial for trial in trials.TRIALS if trial.fault in asked.selftest]
    chosen += [HEALTHY] * (1 if asked.healthy is None else asked.healthy)
    rows: list[Tried] = []
    with (
        tempfile.TemporaryDirectory(prefix="ddpbench-") as folder,
        open_progress("selftest", len(chosen)) as progress,
    ):
        for number, trial in enumerate(chosen, 1):
            progress.describe(f"{trial.fault}, {trial.planted}")
            rows.append(tried(trial, Path(folder, str(number))))
            progress.advance(1)
    sys.stdout.write(FORMATS[asked.format](rows))
    return int(any(row.right is False for row in rows))


def tried(trial: Trial, folder: Path) -> Tried:
    """One trial, made in a folder of its own, which does not exist yet."""
    began = time.monotonic()
    if (why := trial.needs()) is not None:
        return Tried(trial.fault, trial.planted, None, None, None, why, None)
    folder.mkdir()
    output = folder / "run"
    words = [sys.executable, "-m", "ddpbench", *trial.words, "--output", str(output)]
    try:
        done = _between_hosts(trial, words) if trial.rates else _here(trial, words, folder)
    except TimeoutError as late:
        done = Done(5, "", f"{selftest.PREFIX}{str(late)[:200]}")
    lines = selftest.collect_messages(_stored(output), done.stderr)
    seconds = time.monotonic() - began
    if trial is HEALTHY:
        few = (os.cpu_count() or 1) < RANKS  # what is then told is true
        return selftest.judge_healthy(
            done.returncode, lines, seconds, ("^warning oversubscribed:",) if few else ()
        )
    return selftest.judge_fault(
        trial.fault,
        trial.planted,
        trial.expected,
        code=done.returncode,
        lines=lines,
        seconds=seconds,
    )


def _here(trial: Trial, words: list[str], folder: Path) -> Done:
    """The command on this host, which starts its ranks itself."""
    if trial.tiny:
        words = trials.on_tiny_disk(str(folder), words)
    return ranks.call(words, trial.seconds)


def _between_hosts(trial: Trial, words: list[str]) -> Done:
    """The command as the one rank of each of some hosts."""
    count = len(trial.rates)
    with Hosts(count, trial.rates, trial.pairs) as bench:
        meeting = {
            "WORLD_SIZE": str(count), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": bench[0].address, "MASTER_PORT": str(PORT), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        each = {rank: ["env", f"RANK={rank}", *words] for rank in range(count)}
        ended = bench.run(each, None, trial.seconds, **meeting)
    stderr = "".join(done.stderr for done in ended)
    return Done(max(done.returncode for done in ended), "", stderr)


def _stored(folder: Path) -> Run | None:
    """The run there, finished or not; None where there is none, or none that can be read."""
    try:
        return store.read(folder)
    except store.InvalidRun:
        return None


def _check(form: str, words: Sequence[str]) -> None:
    for word in words:
        if word.startswith("-") and word.split("=")[0] not in TAKEN:
            raise Refused(f"{word} means nothing to --selftest, which takes {', '.join(TAKEN)}")
    if form not in FORMATS:
        raise Refused(f"--selftest has no --format {form}: choose of {', '.join(FORMATS)}")
    if (place := placement.read_placement()) is not None:
        raise Refused(
            f"--selftest starts its ranks itself: leave out the launcher ({place.launcher}) and "
            "type python -m ddpbench doctor --selftest"
        )
