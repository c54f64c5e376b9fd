"""Capabilities: try every operation, reduce op and dtype on the backend, and check every result.

Separate ranks on the host of rank 0 try them while the ranks wait, one combination after another,
and agree on each verdict over the control group. Fresh ranks go on after a combination that
crashes, hangs or breaks the group.

figures: {"verdicts": [{"operation", "form", "reduce_op" (null: none), "dtype" (null: no data),
"outcome": "ok", "unsupported", "wrong", "crash" or "hang", "why": "", "wrong": place and values of
a wrong result}, …]}
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import msgspec
import psutil

from ddpbench.catalog import backends
from ddpbench.catalog.dtypes import DTYPES, REDUCE_OPS
from ddpbench.catalog.operations import OPERATIONS
from ddpbench.doctor.capabilities import judge, ranks
from ddpbench.doctor.capabilities.judge import CRASH, HANG, Combination, Verdict
from ddpbench.doctor.capabilities.ranks import Request
from ddpbench.doctor.context import Context, Outcome
from ddpbench.launch.supervise import Clock
from ddpbench.records.wording import counted
from ddpbench.runtime import control

# For one combination, which takes some ms; a first call may make a communicator and load code.
HANG_SECONDS = 15.0
TIME_FACTOR = 3  # times the seconds of an examination: fresh ranks need time to start
POLL_SECONDS = 0.1
GRACE_SECONDS = 3.0  # for the ranks to end and MPI to remove its files
# Variables that launchers set in their ranks. The user's settings for Open MPI are kept.
LAUNCHERS = re.compile(
    r"(DDPBENCH_|GROUP_|ROLE_)?(LOCAL_)?(RANK|WORLD_SIZE)|ROLE_NAME|(MASTER_|TORCHELASTIC_|PMIX?_|"
    r"PMI2_|PRTE_|SLURM_|HYDRA_|HYDI_|MPI_LOCAL|OMPI_(?!MCA_)|OMPI_MCA_(ess|orte|pmix|prte)).*"
)
ERROR = re.compile(r"what\(\)|Fatal Python error: |^[\w.]+(Error|Refused): ")


@dataclass
class Trials:
    """The verdicts so far."""

    request: Request
    verdicts: list[Verdict] = field(default_factory=list)  # of the first wanted ones, in order
    given_up: str | None = None  # why the rest was not tried, a clause


def list_combinations() -> list[Combination]:
    """Return all combinations, the most important first: sums before other reduce ops."""
    found = [
        Combination(name, form, reduce_op, dtype)
        for name, operation in OPERATIONS.items()
        for form in operation.forms
        for reduce_op in (REDUCE_OPS if operation.reduces else (None,))
        for dtype in (DTYPES if operation.sized else (None,))
    ]
    order = [*DTYPES, None]
    return sorted(found, key=lambda c: (c.reduce_op not in (None, "sum"), order.index(c.dtype)))


def examine(context: Context) -> Outcome:
    """Try all combinations. All ranks call it; the outcome is that of rank 0."""
    world, backend, device = context.world, context.backend.name, context.device.type
    launcher = backends.get(backend).launcher
    trials = Trials(Request(backend, device, launcher, context.modules, list_combinations()))
    with contextlib.ExitStack() as stack:
        steps: Generator[None, None, None] | None = None
        if world.rank == 0:
            steps = try_all(trials, TIME_FACTOR * context.seconds)
            stack.callback(steps.close)
        over = False
        while not control.agree_any(over or world.interrupted is not None):
            world.watchdog.rearm()
            over = steps is not None and next(steps, "over") == "over"
    return _outcome(context, trials) if world.rank == 0 else Outcome()


def _outcome(context: Context, trials: Trials) -> Outcome:
    wanted, unchecked = len(trials.request.wanted), []
    if untried := wanted - len(trials.verdicts):
        reason = trials.given_up or "it was interrupted"
        unchecked.append(f"{untried} of {wanted} combinations were not tried: {reason}")
    pairs = zip(trials.request.wanted, trials.verdicts, strict=False)
    rows = [{**asdict(combination), **asdict(verdict)} for combination, verdict in pairs]
    lines = [
        f"tried {len(rows)} combinations of operation, reduce op and dtype, each with "
        f"{' and '.join(map(str, ranks.ELEMENTS))} elements per block, in separate processes "
        f"({counted(ranks.RANKS, 'rank')}): {judge.count_outcomes(rows)}"
    ]
    if len(context.world.hosts) > 1:
        hostname = context.launch.ranks[0]["hostname"]
        lines.append(f"tried only on {hostname}, the host of rank 0")
    backend = context.backend.name
    return Outcome(
        lines=tuple(lines),
        unchecked=tuple(unchecked),
        findings=judge.find_bad(backend, rows),
        figures={"verdicts": rows},
        tables=(judge.build_table(rows, f"what {backend} can do"),) if rows else (),
    )


# --- one set of ranks after the other -------------------------------------------------------------


def try_all(trials: Trials, seconds: float, clock: Clock = time) -> Generator[None, None, None]:
    """Try all combinations in about so many seconds at most, and add the verdicts.

    Yields about every POLL_SECONDS until the end. Closed earlier, it leaves nothing running. A
    combination that seems to crash is tried a second time, in fresh ranks.
    """
    until, suspect = clock.monotonic() + seconds, -1
    while len(trials.verdicts) < len(trials.request.wanted) and trials.given_up is None:
        first = len(trials.verdicts)
        with start_ranks(replace(trials.request, first=first)) as (folder, process):
            hung = yield from _wait(folder, process, until, clock)
            code = end_ranks(process)
            trials.verdicts += _read_verdicts(folder)
            number = len(trials.verdicts)
            verdict = _judge_end(folder, number, hung, code)
            if clock.monotonic() >= until:  # what was running then was not tried
                trials.given_up = f"the {seconds:g} s for them were over; increase --case-time"
            elif verdict is None and number == first:
                trials.given_up = (
                    f"the ranks could not start (exit code {code}): {read_error(folder)}"
                )
            elif verdict is not None:
                if verdict.outcome != CRASH or suspect == number:
                    trials.verdicts.append(verdict)
                suspect = number


@contextlib.contextmanager
def start_ranks(request: Request) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """Start the ranks of a request in a folder of their own. At the end, remove both."""
    with tempfile.TemporaryDirectory(prefix="ddpbench-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "request").write_bytes(msgspec.json.encode(request))
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", ranks.MODULE, name],
                env=rank_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield folder, process
        finally:
            end_ranks(process)


def rank_environment() -> dict[str, str]:
    """Return this environment without launcher variables, with the same modules for Python."""
    kept = {name: text for name, text in os.environ.items() if not LAUNCHERS.fullmatch(name)}
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "PYTHONFAULTHANDLER": "1",  # reports the signal that ended a rank
        "OMP_NUM_THREADS": "1",
    }


def end_ranks(process: subprocess.Popen[bytes]) -> int:
    """End the process and its descendants if they still run. Return its exit code."""
    if process.poll() is None:
        started = psutil.Process(process.pid).children(recursive=True)
        process.terminate()  # launchers pass the signal on to their ranks
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
        for each in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.kill()
    return process.wait()


def _wait(
    folder: Path, process: subprocess.Popen[bytes], until: float, clock: Clock
) -> Generator[None, None, bool]:
    """Wait until the ranks or the time have ended. Return whether the ranks hang."""
    reports = folder / "reports"
    while process.poll() is None and clock.monotonic() < until:
        # A rank that is through waits for the others, so the last report of any rank counts.
        if reports.exists() and clock.time() - reports.stat().st_mtime > HANG_SECONDS:
            return True
        yield
        clock.sleep(POLL_SECONDS)
    return False


def _read_verdicts(folder: Path) -> list[Verdict]:
    """Read the verdicts that rank 0 has stored, except a line that is cut off."""
    path = folder / "verdicts"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [msgspec.json.decode(line, type=Verdict) for line in lines if line.endswith(b"\n")]


def _judge_end(folder: Path, number: int, hung: bool, code: int) -> Verdict | None:
    """Return what a combination without a verdict did to its ranks; None: no rank tried it."""
    path = folder / "reports"
    lines = path.read_text().splitlines() if path.exists() else []
    own_lines = (line.split(" ", 2) for line in lines)
    reports = {int(rank): text for of, rank, text in own_lines if int(of) == number}
    if not reports:
        return None
    if not hung:
        return Verdict(CRASH, f"its ranks ended with exit code {code}: {read_error(folder)}")
    if refused := sorted(rank for rank, text in reports.items() if text.startswith("refused ")):
        return judge.refused_by(refused, reports[refused[0]].removeprefix("refused "))
    busy = [str(rank) for rank, text in sorted(reports.items()) if text == "trying"]
    return Verdict(HANG, f"rank {', '.join(busy)} did not return within {HANG_SECONDS:g} s")


def read_error(folder: Path) -> str:
    """Return the last errors, or the last line, that the ranks or their launcher have printed."""
    lines = (folder / "output").read_text(errors="replace").splitlines()
    lines = [line.strip() for line in lines if re.search(r"\w", line)]
    errors = [*dict.fromkeys(filter(ERROR.search, lines))] or lines[-1:]
    return ranks.shorten(": ".join(errors[-2:]) or "no message")
