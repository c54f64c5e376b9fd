"""The run of a watched job, whose folder is complete after every round.

Any process of the job may store how it ended: rank 0 may be killed, or see only what followed.
"""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

from ddpbench.catalog import backends
from ddpbench.launch import placement
from ddpbench.mpi_backend.library import NAME
from ddpbench.present.formats import show
from ddpbench.records import redact, store
from ddpbench.records.launched import Launch
from ddpbench.records.schema import Finding, Plan, Run, StepCase, StepResult
from ddpbench.records.store import End
from ddpbench.records.terminal_text import tell
from ddpbench.runtime import devices, environment
from ddpbench.watch.command import NOTE
from ddpbench.watch.judging.summary import Summary

TIME = "from the end of an optimizer step to the end of the next"  # other than that of `ddp`
NO_STEP = "no optimizer step was seen on all ranks"


def identify_job(verify: int, name: str, world_size: int) -> Run:
    """Return the run of this job before its first report. Runs in rank 0.

    verify: of --verify; name: of its default process group's backend, in torch; world_size: the
    number of its ranks.
    """
    kind = devices.get("cuda")
    device = "cpu" if kind.in_use() is None else kind.name
    backend = backends.get("mpi" if name == NAME else name)
    launch = Launch(
        index=0,
        backend=backend.name,
        provider=backend.provider(device),
        library=backend.library(),
        launcher=placement.name_launcher(),
        world_size=world_size,
        facts=environment.run_facts(),
        started=store.format_now(),
        cases=1,
    )
    case = StepCase(
        workload=Path(sys.argv[0]).name,
        settings=tuple(redact.arguments(sys.argv[1:])),
        backend=launch.backend,
        provider=launch.provider,
        device=device,
        threads=torch.get_num_threads(),
        world_size=world_size,
        ranks_per_host=(),
        time_definition=TIME,
        rank_reduction="median",
    )
    return Run(
        id="",
        command="watch",
        command_line=("ddpbench", "watch", case.workload, *case.settings),
        plan=Plan(verify=verify),
        started=launch.started,
        operations=(case.workload,),
        backends=(case.backend,),
        launches=(launch,),
        steps=(StepResult(case, 0, NO_STEP),),
    )


def update_run(
    run: Run, summary: Summary | None, findings: tuple[Finding, ...], end: End | None
) -> Run:
    """Return the run with what is known now. end: None while the job goes on."""
    run = replace(run, findings=findings)
    if summary is not None:
        (result,), (launch,), hosts = run.steps, run.launches, summary.watched.hosts
        case = replace(result.case, ranks_per_host=tuple(hosts.values()))
        reason = None if summary.steps else NO_STEP
        result = StepResult(case, 0, reason, summary=summary.steps, watched=summary.watched)
        ranks = tuple({"hostname": host} for host, count in hosts.items() for _ in range(count))
        run = replace(run, steps=(result,), launches=(replace(launch, ranks=ranks),))
    if end is not None:  # a rank cannot know that its process will end with 0
        run = _end_run(run, end, end.code or None)
    return run


def _end_run(run: Run, end: End, code: int | None) -> Run:
    reason, now = end.reason, store.format_now()
    return replace(run, state=end.state, state_reason=reason, exit_code=code, ended=now)


def create_run(results: Path, run: Run) -> Path:
    """Create the folder of a run and store its first record. Raises OSError."""
    (launch,) = run.launches
    folder = store.new_folder(f"watch-{launch.backend}-w{launch.world_size}", results)
    if note := os.environ.get(NOTE):
        Path(note).write_text(str(folder))
    store.write(folder, replace(run, id=folder.name))
    return folder


def store_run(folder: Path, run: Run) -> None:
    """Replace the record, unless another process has stored the end; at the end, add the table."""
    if run.state != "running":
        store.write(folder, run)
        table = show("table", run)
        store.replace_file(folder / "table.txt", table.encode())
    elif store.read(folder).state == "running":
        store.write(folder, run)


def store_end(folder: Path, end: End) -> Run:
    """Store how a job ended, with the table of what is known."""
    run = _end_run(store.read(folder), end, end.code)
    store_run(folder, run)
    return run


def correct_end(folder: Path, end: End) -> None:
    """Store how a job ended, where rank 0 could not, or saw only what followed.

    The table is printed if rank 0 could not print it.
    """
    with contextlib.suppress(OSError, store.InvalidRun):
        before = store.read(folder)
        if before.exit_code == end.code and (before.state != "failed" or end.code == 5):
            return  # more is known of it
        if before.state == end.state == "failed":
            end = end._replace(reason=f"{end.reason}; {before.state_reason}")
        run = store_end(folder, end)
        if before.state == "running":
            print_table(run, folder)


def print_table(run: Run, folder: Path | None) -> None:
    """Print the table of a job that has ended to stderr."""
    sys.stderr.write(show("table", run))
    if folder is not None:
        tell(f"stored in {folder}")
