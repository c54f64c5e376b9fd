"""The stored run of a watch: complete after every round, so that it survives the end of the job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ddpbench.analysis import steps
from ddpbench.records import codec, redact, store
from ddpbench.records.schema import Figure, Finding, Part, Plan, Run, StepResult, StepSummary
from ddpbench.watch.judging.summary import Summary
from ddpbench.watch.output.job import Job

if TYPE_CHECKING:
    from ddpbench.session.run_end import End


def build_run(
    job: Job, summary: Summary | None, findings: tuple[Finding, ...], end: End | None
) -> Run:
    """Return the run of a job, without a folder. end: None while the job goes on."""
    if summary is not None:
        job = job.placed(summary.watched.hosts)
    case = job.case
    return Run(
        id="",
        command="watch",
        command_line=("ddpbench", "watch", case.workload, *case.settings),
        plan=Plan(verify=job.verify),
        started=job.launch.started,
        operations=(case.workload,),
        backends=(case.backend,),
        launches=(job.launch,),
        steps=(_result(job, summary),),
        findings=findings,
        state=end.state if end else "running",
        state_reason=end.reason if end else None,
        exit_code=end.code if end else None,
        ended=store.format_now() if end else None,
    )


def _result(job: Job, summary: Summary | None) -> StepResult:
    if summary is None or summary.step is None:
        watched = summary.watched if summary is not None else None
        return StepResult(
            job.case, 0, reason="no optimizer step was seen on all ranks", watched=watched
        )
    watched = summary.watched
    share = watched.exposed_seconds / summary.step.value
    exposed = Part(steps.EXPOSED, Figure(watched.exposed_seconds, None), share, resolved=True)
    return StepResult(
        job.case,
        0,
        summary=StepSummary(
            rounds=watched.steps,
            in_a_row=1,
            warm_up=max(0, watched.last_step + 1 - watched.steps),
            step=summary.step,
            samples_per_second=0.0,
            phases=summary.phases,
            budget=(exposed,),
        ),
        watched=watched,
    )


class StoredRun:
    """A new run in a folder of runs. Raises OSError if it cannot be written."""

    def __init__(self, results: Path, job: Job) -> None:
        label = f"watch-{job.case.backend}-w{job.case.world_size}"
        self.folder = store.new_folder(label, results)

    def update(self, run: Run) -> None:
        """Replace the record, and store the table of a job that has ended.

        While the job goes on, the record is encoded fast: a watch must not hold the interpreter.
        """
        if run.state == "running":
            owner = redact.owner()
            (launch,) = run.launches
            owner = replace(owner, hosts=(*owner.hosts, *{r["hostname"] for r in launch.ranks}))
            findings = redact.record({"findings": msgspec.to_builtins(run.findings)}, owner)
            data = codec.encode({**msgspec.to_builtins(run), **findings}, indent=None)
            store.replace_file(self.folder / "run.json", data)
        else:
            from ddpbench.render.formats import FORMATS

            store.write(self.folder, run)
            table = FORMATS["table"](run, None, False)
            store.replace_file(self.folder / "table.txt", table.encode())
