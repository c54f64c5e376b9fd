"""One workload on one backend, in one rank: build it, train it, measure it, verify it."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ddpbench.analysis import sharded_steps, steps
from ddpbench.catalog import user_workload
from ddpbench.catalog.optimizers import OPTIMIZERS
from ddpbench.catalog.task import Workload
from ddpbench.measure import rehearsal, training
from ddpbench.measure.rounds import Measured, Pace, Rounds
from ddpbench.measure.step import Replica
from ddpbench.records.schema import Epoch, Figure, Replicas, StepCase, StepResult
from ddpbench.render import column
from ddpbench.replicas import Report, Verifier
from ddpbench.runtime import control, cpu
from ddpbench.session import launch_facts
from ddpbench.session.build_replicas import Builder
from ddpbench.session.progress import Progress
from ddpbench.session.summary import step_columns

if TYPE_CHECKING:
    from ddpbench.measure.parallel.meshes import Meshes
    from ddpbench.session.launch_loop import LaunchContext
    from ddpbench.session.step_options import Options

EPOCHS = 20  # default of --epochs


class Trial:
    """The measurement of workloads in one launch, as one rank sees it."""

    def __init__(
        self, context: LaunchContext[Options], threads: int, meshes: Meshes | None
    ) -> None:
        self.world, self.tested, self.meshes = context.world, context.tested, meshes
        self.turns = context.turns
        self.options, self.plan, self.device = context.options, context.plan, context.device
        self.index, self.builder = context.index, Builder(context, threads, meshes)

    def measure(
        self, workload: Workload, progress: Progress
    ) -> tuple[StepResult, dict[str, Any] | None]:
        """Measure one workload. Return its result and, in rank 0, the columns of its samples."""
        began, meter = time.monotonic(), cpu.CpuMeter()
        case, main, reason = self.builder.build(workload)
        if reason is not None or main is None:
            return StepResult(case=case, launch=self.index, reason=reason), None
        epochs = self._train(workload, case)  # first: an impossible checkpoint is refused at once
        arms, notes = self._arms(main)
        probe = None
        if len(arms) > 1:
            _, probe, reason = self.builder.build(workload, switchable=True)
            if probe is None:
                arms, notes = ("ddp",), [*notes, f"no budget and no buckets: {reason}"]
        ledger = Ledger(self.options.on_mismatch == "continue")
        measured = self._measure_rounds(main, probe, arms, ledger, progress)
        summary, columns = None, None
        cost: tuple[Figure | None, float | None] = None, None
        if measured.samples is not None:
            total = case.batch * case.accumulate * case.data_ranks
            summarise = sharded_steps.summarise if case.mesh else steps.summarise
            summary = summarise(measured.samples, total, measured.warm_up)
            cost = steps.cost(measured.samples, summary.step.value)
            columns = step_columns(case.key, self.index, measured.samples)
        result = StepResult(
            case=case,
            launch=self.index,
            cold_seconds=measured.cold_seconds,
            stop_reason=measured.stop_reason,
            summary=summary,
            replicas=ledger.summarise(*cost) if self.options.verify else None,
            losses=self._gather_losses(main),
            epochs=epochs,
            notes=tuple(notes),
            others_share=launch_facts.gather_others_share(self.world, meter),
        )
        return replace(result, wall_seconds=time.monotonic() - began), columns

    def _gather_losses(self, main: Replica) -> tuple[float, ...]:
        assert main.loss is not None
        loss = float(main.loss)
        losses = control.gather_values(self.world, loss if abs(loss) < float("inf") else None)
        return tuple(losses) if None not in losses else ()

    def _arms(self, main: Replica) -> tuple[tuple[str, ...], list[str]]:
        notes = _note_copies(main.task.batch(0), self.device)
        if self.options.no_budget:
            return ("ddp",), notes
        return main.arms, [*notes, *main.notes]

    def _measure_rounds(
        self,
        main: Replica,
        probe: Replica | None,
        arms: tuple[str, ...],
        ledger: Ledger,
        progress: Progress,
    ) -> Measured:
        """Measure in rounds until the end; `progress` counts the rounds as part of one case."""
        options, done = self.options, 0.0

        def advance(share: float) -> None:
            nonlocal done
            progress.advance(share - done)
            done = share

        verify = None
        if options.verify:
            # Over control groups: the measured backend cannot spoil its own proof.
            mesh = self.meshes.control if self.meshes else None
            group = None if mesh else dist.group.WORLD
            ledger.verifier = Verifier(main.wrapped, main.optimizer, group, mesh=mesh)
            verify = ledger.check
        rounds = Rounds(
            world=self.world,
            main=main,
            probe=probe,
            arms=arms,
            pace=Pace(self.plan.slice_seconds, options.rounds, options.in_a_row),
            seed=self.plan.seed,
            verify=verify,
            every=options.verify,
            turns=self.turns,
            faults=self.builder.planted,
            progress=advance,
        )
        measured = _run(rounds, main.case)
        progress.advance(-done)  # the launch loop counts the whole case
        return measured

    def _train(self, workload: Workload, case: StepCase) -> tuple[Epoch, ...]:
        options = self.options
        epochs = EPOCHS if options.epochs is None else options.epochs
        if not (workload.trains and epochs):
            return ()
        rate = self.builder.learning_rate(workload)

        def verify(ddp: Any, optimizer: Any) -> Any:
            verifier = Verifier(ddp, optimizer, dist.group.WORLD)
            return lambda number: not verifier.check(number).failed

        return training.train(
            self.world,
            self.tested,
            workload.build(options.settings_of(workload), self.builder.rank_setup(case.batch)),
            lambda model: OPTIMIZERS[case.optimizer].make(model.parameters(), rate),
            epochs,
            checkpoint=Path(options.checkpoint) if options.checkpoint else None,
            resume=options.resume,
            verify=verify if options.verify else None,
            report=lambda epoch: self._report_epoch(case, epoch),
        )

    def _report_epoch(self, case: StepCase, epoch: Epoch) -> None:
        if self.world.rank == 0 and not self.options.quiet and sys.stderr.isatty():
            train, validation = map(column.digits, (epoch.train_loss, epoch.validation_loss))
            sys.stderr.write(
                f"ddpbench: {case.workload} on {case.backend}, epoch {epoch.number}: "
                f"train {train}, validation {validation}\n"
            )


@dataclass
class Ledger:
    """The verifications of one case so far."""

    goes_on: bool
    verifier: Verifier | None = None
    verified: int = 0
    differing: int = 0
    last_step: int = 0
    equal_until: int | None = None
    bad: Report | None = None  # first report that failed
    last: Report | None = None

    def check(self, step: int) -> bool:
        """Verify after this step, in all ranks. Return whether to continue."""
        assert self.verifier is not None
        report = self.verifier.check(step)
        self.verified, self.last_step, self.last = self.verified + 1, step, report
        self.differing += report.failed
        if report.failed and self.bad is None:
            self.bad = report
        if self.bad is None:
            self.equal_until = step
        return self.goes_on or not report.failed

    def summarise(self, cost: Figure | None, share: float | None) -> Replicas | None:
        """Return the record of the verifications; None if there were none."""
        report = self.bad or self.last
        if report is None:
            return None
        return Replicas(
            verified=self.verified,
            differing=self.differing,
            buffers=sum(each.kind == "buffer" for each in report.differences),
            last_step=self.last_step,
            equal=not report.differs,
            ok=report.ok,
            compared=report.compared,
            nbytes=report.nbytes,
            cost=cost,
            share=share,
            equal_until=self.equal_until,
            first_bad=None if self.bad is None else self.bad.step,
            tensors=report.faults,
            not_compared=tuple(f"{each.kind} {each.name}" for each in report.not_compared),
            held_once=report.held_once,
            ranks=report.minority,
            findings=report.findings,
            text=str(report),
        )


def _note_copies(batch: Any, device: torch.device) -> list[str]:
    elsewhere = user_workload.find_other_device(batch, device)
    if elsewhere is None:
        return []
    return [
        f"batch(step) returns a tensor on {elsewhere}, not on {device}: the time of the step "
        "includes copying it; let batch(step) return it on the device"
    ]


def _run(rounds: Rounds, case: StepCase) -> Measured:
    """Run the rounds. If memory runs out, name what helps: the others wait in a collective."""
    try:
        return rounds.run()
    except torch.OutOfMemoryError as error:
        error.args = (rehearsal.describe_shortage(error, case),)
        raise
