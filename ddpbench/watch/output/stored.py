"""The job that is watched, and its stored run, which is complete after every round.

Any process of the job may store how it ended: rank 0 may be killed, or see only what followed.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch

from ddpbench.catalog import backends
from ddpbench.launch import placement
from ddpbench.mpi_backend.library import NAME
from ddpbench.present.formats import FORMATS
from ddpbench.records import codec, redact, store
from ddpbench.records.launched import Launch
from ddpbench.records.schema import (
    Finding,
    Plan,
    Run,
    StepCase,
    StepResult,
)
from ddpbench.records.store import End
from ddpbench.records.terminal_text import tell
from ddpbench.runtime import devices, environment
from ddpbench.watch.judging.summary import Summary
from ddpbench.watch.settings import NOTE

TIME = "from the end of an optimizer step to the end of the next"  # other than that of `ddp`


@dataclass(frozen=True)
class Job:
    """What is known of a job before its first report."""

    case: StepCase
    launch: Launch
    verify: int = 0

    def placed(self, hosts: Mapping[str, int]) -> Job:
        """Return the job with its hosts: name → number of ranks there."""
        case = replace(self.case, ranks_per_host=tuple(hosts.values()))
        ranks = [{"hostname": host} for host, count in hosts.items() for _ in range(count)]
        return replace(self, case=case, launch=replace(self.launch, ranks=tuple(ranks)))


def identify_job(script: str, verify: int, name: str, world_size: int) -> Job:
    """Return the job of this process. Runs in rank 0.

    script: its name for titles, or "" for that of the running program. name: of its default
    process group's backend, in torch; world_size: the number of its ranks.
    """
    kind = devices.preferred()
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
    return Job(_make_case(script, launch, device), launch, verify)


def _make_case(script: str, launch: Launch, device: str) -> StepCase:
    return StepCase(
        workload=Path(script or sys.argv[0]).name,
        settings=tuple(redact.arguments(sys.argv[1:])),
        parameters=0,
        parameter_nbytes=0,
        backend=launch.backend,
        provider=launch.provider,
        device=device,
        batch=0,
        accumulate=0,
        optimizer="",
        amp=None,
        bucket_cap_mb=None,
        gradient_as_bucket_view=False,
        static_graph=False,
        find_unused_parameters=False,
        comm_hook="",
        threads=torch.get_num_threads(),
        world_size=launch.world_size,
        ranks_per_host=(),
        time_definition=TIME,
        rank_reduction="median",
    )


def build_run(
    job: Job, summary: Summary | None, findings: tuple[Finding, ...], end: End | None
) -> Run:
    """Return the run of a job, without a folder. end: None while the job goes on."""
    reason, steps, watched = "no optimizer step was seen on all ranks", None, None
    if summary is not None:
        steps, watched = summary.steps, summary.watched
        job = job.placed(watched.hosts)
    case = job.case
    result = StepResult(case, 0, None if steps else reason, summary=steps, watched=watched)
    return Run(
        id="",
        command="watch",
        command_line=("ddpbench", "watch", case.workload, *case.settings),
        plan=Plan(verify=job.verify),
        started=job.launch.started,
        operations=(case.workload,),
        backends=(case.backend,),
        launches=(job.launch,),
        steps=(result,),
        findings=findings,
        state=end.state if end else "running",
        state_reason=end.reason if end else None,
        exit_code=(end.code or None) if end else None,  # Python does not tell of a 0
        ended=store.format_now() if end else None,
    )


class StoredRun:
    """A new run in a folder of runs. Raises OSError if it cannot be written."""

    def __init__(self, results: Path, job: Job) -> None:
        label = f"watch-{job.case.backend}-w{job.case.world_size}"
        self.folder = store.new_folder(label, results)
        self._inode = 0  # of the record as this process wrote it
        if note := os.environ.get(NOTE):
            Path(note).write_text(str(self.folder))
        self.update(replace(build_run(job, None, (), None), id=self.folder.name))

    def update(self, run: Run) -> None:
        """Replace the record, and store the table of a job that has ended.

        While the job goes on, the record is encoded fast: a watch must not hold the interpreter.
        """
        path = self.folder / "run.json"
        if run.state != "running":
            _write(self.folder, run)
        elif not self._inode or path.stat().st_ino == self._inode:  # else another stored the end
            owner = redact.owner()
            (launch,) = run.launches
            owner = replace(owner, hosts=(*owner.hosts, *{r["hostname"] for r in launch.ranks}))
            findings = redact.record({"findings": msgspec.to_builtins(run.findings)}, owner)
            data = codec.encode({**msgspec.to_builtins(run), **findings}, indent=None)
            store.replace_file(path, data)
            self._inode = path.stat().st_ino


def store_end(folder: Path, end: End) -> Run:
    """Store how a job ended, with the table of what is known."""
    run = replace(store.read(folder), state=end.state, state_reason=end.reason, exit_code=end.code)
    run = replace(run, ended=store.format_now())
    _write(folder, run)
    return run


def correct_end(folder: Path, end: End, form: str) -> None:
    """Store how a job ended, where rank 0 could not, or saw only what followed.

    form: of the table, which is printed if rank 0 could not print it.
    """
    with contextlib.suppress(OSError, store.InvalidRun):
        before = store.read(folder)
        if before.exit_code == end.code and (before.state != "failed" or end.code == 5):
            return  # more is known of it
        if before.state == end.state == "failed":
            end = end._replace(reason=f"{end.reason}; {before.state_reason}")
        run = store_end(folder, end)
        if before.state == "running":
            sys.stderr.write(FORMATS[form](run, None, False))
            tell(f"stored in {folder}")


def _write(folder: Path, run: Run) -> None:
    store.write(folder, run)
    store.replace_file(folder / "table.txt", FORMATS["table"](run, None, False).encode())
