"""One workload on one backend, in one rank: made, measured in rounds, verified, trained."""

from __future__ import annotations

import itertools
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ddpbench.analysis import steps
from ddpbench.catalog import faults, user_workload
from ddpbench.catalog.backends import Backend
from ddpbench.catalog.optimizers import OPTIMIZERS
from ddpbench.catalog.task import Place, Task, Workload
from ddpbench.hang.places import find_error_place
from ddpbench.measure import step, training
from ddpbench.measure.rounds import ARMS, Measured, Pace, Rounds
from ddpbench.measure.step import Replica
from ddpbench.records.schema import Epoch, Figure, Plan, Replicas, StepCase, StepResult
from ddpbench.replicas import Report, Verifier
from ddpbench.runtime import control, cpu, environment
from ddpbench.runtime.world import World
from ddpbench.session import launch_facts
from ddpbench.session.progress import Progress
from ddpbench.session.summary import step_columns

if TYPE_CHECKING:
    from ddpbench.session.step_options import Options

EPOCHS = 20  # of a training to its end
COPIES = 2  # of the parameters beside themselves: gradients and buckets


@dataclass
class Trial:
    """Where and how a workload is measured: one backend in one rank."""

    world: World
    tested: dist.ProcessGroup
    backend: Backend
    asked: Options
    plan: Plan
    device: torch.device
    threads: int
    index: int

    @property
    def planted(self) -> tuple[faults.Planted, ...]:
        """The faults that were asked for."""
        return tuple(faults.parse(text) for text in self.asked.inject)

    def measure(
        self, workload: Workload, progress: Progress
    ) -> tuple[StepResult, dict[str, Any] | None]:
        """One workload: its result, and in rank 0 its samples' columns."""
        began, meter = time.monotonic(), cpu.CpuMeter()
        case, main, reason = self._replica(workload)
        if reason is not None or main is None:
            return StepResult(case=case, launch=self.index, reason=reason), None
        epochs = self._train(workload, case)  # first: a checkpoint that cannot be is told at once
        arms, notes = self._arms(case)
        probe = None
        if len(arms) > 1:
            _, probe, reason = self._replica(workload, hooked=True)
            if probe is None:
                arms, notes = ("ddp",), [f"no budget and no buckets: {reason}"]
        ledger = Ledger(self.asked.on_mismatch == "continue")
        measured = self._rounds(case, main, probe, arms, ledger, progress)
        summary, columns = None, None
        cost: tuple[Figure | None, float | None] = None, None
        if measured.samples is not None:
            total = case.batch * case.accumulate * case.world_size
            summary = steps.summarise(measured.samples, total, measured.warm_up)
            cost = steps.cost(measured.samples, summary.step.value)
            columns = step_columns(case.key, self.index, measured.samples)
        assert main.loss is not None
        loss = float(main.loss)
        losses = control.gather_values(self.world, loss if abs(loss) < float("inf") else None)
        result = StepResult(
            case=case,
            launch=self.index,
            cold_seconds=measured.cold_seconds,
            stop_reason=measured.stop_reason,
            summary=summary,
            replicas=ledger.told(*cost) if self.asked.verify else None,
            losses=tuple(losses) if None not in losses else (),
            epochs=epochs,
            notes=tuple(notes),
            others_share=launch_facts.gather_others_share(self.world, meter),
        )
        return replace(result, wall_seconds=time.monotonic() - began), columns

    def _place(self, batch: int) -> Place:
        return Place(
            self.world.rank, self.world.world_size, batch, self.device, self.plan.seed, self.tested
        )

    def _replica(
        self, workload: Workload, hooked: bool = False
    ) -> tuple[StepCase, Replica | None, str | None]:
        """The workload's case, and its model in DDP; or, in all ranks, why there is none."""
        asked = self.asked
        batch = asked.batch or workload.batch[asked.device]
        settings = self.asked.settings_of(workload)
        task, objection = None, None
        try:
            task = workload.build(settings, self._place(batch))
            batch = batch or user_workload.samples(task.batch(0))
        except Exception as error:  # whatever a user's function raises
            objection = _told(error)
        parameters = list(task.model.parameters()) if task else []
        case = StepCase(
            workload=workload.name,
            settings=tuple(f"{name}={value}" for name, value in settings.items()),
            parameters=sum(each.numel() for each in parameters),
            parameter_nbytes=sum(each.nbytes for each in parameters),
            backend=self.backend.name,
            provider=self.backend.provider(asked.device),
            device=asked.device,
            batch=batch,
            accumulate=asked.accumulate,
            optimizer=asked.optimizer or workload.optimizer,
            amp=asked.amp,
            comm_hook=asked.comm_hook,
            threads=self.threads,
            world_size=self.world.world_size,
            ranks_per_host=tuple(len(host) for host in self.world.hosts.values()),
            clock="device" if asked.device == "cuda" else "host",
            **asked.ddp_options(),
        )
        objection = objection or self._too_large(case, replicas=1 + hooked)
        objection = self._unlike(task) or objection
        if (sentence := control.agree_objection(self.world, objection)) is not None:
            return case, None, sentence
        assert task is not None
        made = None
        slow_link = any(each.fault.name == "slow-link" for each in self.planted)
        try:
            made = step.replica(
                task, case, asked.learning_rate or workload.learning_rate, self.tested,
                self.device, hooked or slow_link,
            )  # fmt: skip
            wants = [each.objection(made, case.world_size) for each in self.planted]
            objection = next((want for want in wants if want is not None), None)
        except (RuntimeError, ValueError, TypeError) as error:
            objection = f"DDP refuses it: {control.first_line(error, 300)}"
        sentence = control.agree_objection(self.world, objection)
        self.world.watchdog.rearm()  # building may take long, and so may the first step
        return case, made if sentence is None else None, sentence

    def _unlike(self, task: Task | None) -> str | None:
        """What of this rank's model is not as in rank 0, where DDP would wait or fail."""
        mine = None
        if task is not None:
            mine = [
                [name, list(each.shape), str(each.dtype), each.requires_grad]
                for name, each in task.model.named_parameters()
            ]
        everyones = control.gather_values(self.world, mine)
        if mine is None or None in everyones or mine == everyones[0]:
            return None
        pairs = itertools.zip_longest(mine, everyones[0])
        own, first = next((a, b) for a, b in pairs if a != b)
        return f"the model is another than in rank 0: parameter {own} there is {first}"

    def _too_large(self, case: StepCase, replicas: int) -> str | None:
        """Why this rank cannot hold so many replicas, none of which has stepped yet."""
        free, sharers, where = environment.free_memory_nbytes(), self.world.neighbours, "host"
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            free, sharers = torch.cuda.mem_get_info(self.device)[0], self.world.gpu_mates
            where = "GPU"
        copies = COPIES + OPTIMIZERS[case.optimizer].copies
        needed = replicas * copies * case.parameter_nbytes * len(sharers)
        if free is None or needed <= 0.9 * free:
            return None
        return (
            f"the {len(sharers)} ranks on this {where} would need {needed / 1e9:.1f} GB of memory "
            f"for gradients, buckets and optimizer, {free / 1e9:.1f} GB is free"
        )

    def _arms(self, case: StepCase) -> tuple[tuple[str, ...], list[str]]:
        """The arms that can be measured, and why others cannot."""
        if self.asked.no_budget:
            return ("ddp",), []
        if case.static_graph:
            return tuple(arm for arm in ARMS if arm != "no_sync"), [
                "bucket copying and compute are not told apart: torch's reducer fails under "
                "no_sync with a static graph"
            ]
        return ARMS, []

    def _rounds(
        self, case: StepCase, main: Replica, probe: Replica | None, arms: tuple[str, ...],
        ledger: Ledger, progress: Progress,
    ) -> Measured:  # fmt: skip
        asked, done = self.asked, 0.0

        def advance(share: float) -> None:
            nonlocal done
            progress.advance(share - done)
            done = share

        verify = None
        if asked.verify:
            # Over the control group: what is measured cannot spoil its own proof.
            ledger.verifier = Verifier(main.ddp, main.optimizer, dist.group.WORLD)
            verify = ledger.check
        measured = Rounds(
            self.world, main, probe, arms, Pace(asked.seconds, asked.rounds, asked.in_a_row),
            self.plan.seed, verify, asked.verify,
            self.planted, advance,
        ).run()  # fmt: skip
        progress.advance(-done)  # the launch loop counts the case as a whole
        return measured

    def _train(self, workload: Workload, case: StepCase) -> tuple[Epoch, ...]:
        """The epochs of a training to its end, with a replica of its own; most workloads: none."""
        asked = self.asked
        epochs = EPOCHS if asked.epochs is None else asked.epochs
        if not (workload.trains and epochs):
            return ()
        rate = asked.learning_rate or workload.learning_rate

        def verify(ddp: Any, optimizer: Any) -> Any:
            verifier = Verifier(ddp, optimizer, dist.group.WORLD)
            return lambda number: not verifier.check(number).failed

        return training.train(
            self.world,
            self.tested,
            workload.build(self.asked.settings_of(workload), self._place(case.batch)),
            lambda model: OPTIMIZERS[case.optimizer].make(model.parameters(), rate),
            epochs,
            Path(asked.checkpoint) if asked.checkpoint else None,
            asked.resume,
            verify if asked.verify else None,
            lambda epoch: self._tell(case, epoch),
        )

    def _tell(self, case: StepCase, epoch: Epoch) -> None:
        """An epoch on stderr, as it ends, where somebody watches."""
        if self.world.rank == 0 and not self.asked.quiet and sys.stderr.isatty():
            sys.stderr.write(
                f"ddpbench: {case.workload} on {case.backend}, epoch {epoch.number}: "
                f"train {epoch.train_loss:.4g}, validation {epoch.validation_loss:.4g}\n"
            )


@dataclass
class Ledger:
    """What the verifications of one case have found so far."""

    goes_on: bool
    verifier: Verifier | None = None
    verified: int = 0
    differing: int = 0  # of them
    last_step: int = 0
    equal_until: int | None = None
    bad: Report | None = None  # the first
    last: Report | None = None

    def check(self, step: int) -> bool:
        """Verify after this step, in all ranks; whether to go on."""
        assert self.verifier is not None
        report = self.verifier.check(step)
        self.verified, self.last_step, self.last = self.verified + 1, step, report
        self.differing += report.failed
        if report.failed and self.bad is None:
            self.bad = report
        if self.bad is None:
            self.equal_until = step
        return self.goes_on or not report.failed

    def told(self, cost: Figure | None, share: float | None) -> Replicas | None:
        """For the record; None where nothing was verified."""
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
            ranks=report.minority,
            findings=report.findings,
            text=str(report),
        )


def _told(error: Exception) -> str:
    """A sentence; of what nobody here has raised on purpose also its kind and place."""
    if isinstance(error, (ValueError, MemoryError)):
        return control.first_line(error, 300)
    return f"{type(error).__name__}: {control.first_line(error, 300)}, at {find_error_place(error)}"
