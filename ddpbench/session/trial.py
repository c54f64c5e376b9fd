"""One workload on one backend, in one rank: build it, train it, measure it, verify it."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ddpbench.analysis import sharded_steps, steps
from ddpbench.catalog import faults, workloads
from ddpbench.catalog.task import OPTIMIZERS, RankSetup, Task, Workload
from ddpbench.launch.placement import Refused
from ddpbench.measure import ddp_step, memory
from ddpbench.measure.rounds import Measured, Rounds, step_columns
from ddpbench.measure.step import Replica, advise_smaller
from ddpbench.records.schema import Figure, Replicas, StepCase, StepResult
from ddpbench.replicas import Report, Verifier
from ddpbench.runtime import control, cpu, devices

if TYPE_CHECKING:
    from ddpbench.measure.sharded_step import Meshes
    from ddpbench.present.progress import Progress
    from ddpbench.session.launches import LaunchContext
    from ddpbench.session.step_options import Options

COPIES = 2  # memory of gradients and buckets, in multiples of the parameters'


@dataclass
class Ledger:
    """The verifications of one case so far."""

    verifier: Verifier | None = None
    verified: int = 0
    equal_until: int | None = None
    report: Report | None = None  # the latest

    def check(self, step: int) -> bool:
        """Verify after this step, in all ranks. Return whether to continue."""
        assert self.verifier is not None
        self.report = self.verifier.check(step)
        self.verified += 1
        if not self.report.failed:
            self.equal_until = step
        return not self.report.failed

    def summarise(self, cost: Figure | None, share: float | None) -> Replicas | None:
        """Return the record of the verifications; None if there were none."""
        if (report := self.report) is None:
            return None
        return Replicas(
            verified=self.verified,
            differing=int(report.failed),
            buffers=sum(each.kind == "buffer" for each in report.differences),
            last_step=report.step or 0,
            equal=not report.differs,
            ok=report.ok,
            compared=report.compared,
            nbytes=report.nbytes,
            cost=cost,
            share=share,
            equal_until=self.equal_until,
            first_bad=report.step if report.failed else None,
            tensors=report.faults,
            not_compared=tuple(f"{each.kind} {each.name}" for each in report.not_compared),
            held_once=report.held_once,
            ranks=report.minority,
            findings=report.findings,
            text=str(report),
        )


class Trial:
    """The measurement of workloads in one launch, as one rank sees it.

    meshes: over which the models are divided; None: each rank holds a whole one, in DDP.
    """

    def __init__(self, context: LaunchContext[Any], threads: int, meshes: Meshes | None) -> None:
        self.world, self.tested, self.backend = context.world, context.tested, context.backend
        self.options: Options = context.options
        self.plan, self.device = context.plan, context.device
        self.index = context.index
        self.threads, self.meshes = threads, meshes
        self.planted = tuple(faults.parse(text) for text in self.options.inject)

    def measure(
        self, workload: Workload, progress: Progress
    ) -> tuple[StepResult, dict[str, Any] | None]:
        """Measure one workload. Return its result and, in rank 0, the columns of its samples."""
        began, meter = time.monotonic(), cpu.CpuMeter()
        case, main, reason = self.build(workload)
        if main is None:
            return StepResult(case=case, launch=self.index, reason=reason), None
        arms: tuple[str, ...] = ("ddp",)
        notes: list[str] = []
        if not self.options.no_breakdown:
            arms, notes = main.arms, list(main.notes)
        probe = None
        if len(arms) > 1:
            _, probe, reason = self.build(workload, switchable=True)
            if probe is None:
                arms, notes = ("ddp",), [*notes, f"no breakdown and no buckets: {reason}"]
        ledger = Ledger()
        measured = self._measure_rounds(main, probe, arms, ledger, progress)
        summary, columns = None, None
        cost: tuple[Figure | None, float | None] = None, None
        if measured.samples is not None:
            total = case.batch * case.accumulate * case.data_ranks
            summarise = sharded_steps.summarise if case.mesh else steps.summarise
            summary = summarise(measured.samples, total, measured.warm_up)
            cost = steps.compute_cost(measured.samples, summary.step.value)
            columns = step_columns(case.key, self.index, measured.samples)
        assert main.loss is not None
        loss = float(main.loss)
        losses = control.gather_values(self.world, loss if math.isfinite(loss) else None)
        result = StepResult(
            case=case,
            launch=self.index,
            cold_seconds=measured.cold_seconds,
            stop_reason=measured.stop_reason,
            summary=summary,
            replicas=ledger.summarise(*cost) if self.options.verify else None,
            losses=() if None in losses else tuple(losses),
            notes=tuple(notes),
            others_share=self.world.agree_others_share(meter),
        )
        return replace(result, wall_seconds=time.monotonic() - began), columns

    def _measure_rounds(
        self,
        main: Replica,
        probe: Replica | None,
        arms: tuple[str, ...],
        ledger: Ledger,
        progress: Progress,
    ) -> Measured:
        options = self.options
        if options.verify:
            # Over control groups: the measured backend cannot spoil its own proof.
            group = self.meshes.control if self.meshes else dist.group.WORLD
            ledger.verifier = Verifier(main.wrapped, main.optimizer, group)
        rounds = Rounds(
            world=self.world,
            main=main,
            probe=probe,
            arms=arms,
            seconds=self.plan.slice_seconds,
            rounds=options.rounds,
            in_a_row=options.steps_per_round,
            seed=self.plan.seed,
            verify=ledger.check if options.verify else None,
            every=options.verify,
            faults=self.planted,
            progress=progress.show_part,
        )
        try:
            return rounds.run()
        except torch.OutOfMemoryError as error:  # say what helps: the others wait in a collective
            error.args = (_describe_shortage(error, main.case),)
            raise

    def rank_setup(self, batch: int) -> RankSetup:
        """Return the setup of this rank; ranks that share a batch have the same."""
        sharing = self.meshes.ranks_per_batch if self.meshes else 1
        return RankSetup(
            self.world.rank // sharing,
            self.world.world_size // sharing,
            batch,
            self.device,
            self.plan.seed,
            self.tested,
            whole=self.meshes is None,
        )

    def build(
        self, workload: Workload, switchable: bool = False
    ) -> tuple[StepCase, Replica | None, str | None]:
        """Return the case and its replica; or, in all ranks, why there is none.

        switchable: whether a hook of a model in DDP can switch off its communication.
        """
        case, task, sentence = self._build_task(workload, replicas=1 + switchable)
        if task is None:
            return case, None, sentence
        replica, objection = None, None
        try:
            replica = self._divide(workload, task, case, switchable)
            objections = (each.objection(replica, case.world_size) for each in self.planted)
            objection = next((each for each in objections if each is not None), None)
        except (RuntimeError, ValueError, TypeError) as error:
            way = self.meshes.way.name if self.meshes else "DDP"
            refusal = f"{way} refuses it: {control.first_line(error, 300)}"
            objection = _describe_shortage(error, case) or refusal
        sentence = control.agree_objection(self.world, objection)
        self.world.watchdog.rearm()  # building may take long, and so may the first step
        return case, replica if sentence is None else None, sentence

    def _divide(self, workload: Workload, task: Task, case: StepCase, switchable: bool) -> Replica:
        rate = workload.learning_rate
        if self.meshes is None:
            slow_link = any(planted.fault.name == "slow-link" for planted in self.planted)
            switchable = switchable or slow_link
            return ddp_step.build_replica(
                task, case, rate, self.tested, device=self.device, switchable=switchable
            )
        from ddpbench.measure import sharded_step

        assert workload.plan is not None
        mesh, device = self.meshes.tested, self.device
        return sharded_step.build_sharded(
            task, case, workload.plan, rate, mesh=mesh, device=device, group=self.tested
        )

    def _build_task(
        self, workload: Workload, replicas: int
    ) -> tuple[StepCase, Task | None, str | None]:
        """Return the case and its task; or, in all ranks, why this number of them cannot be held.

        All replicas but this one are in DDP already, and have not stepped yet.
        """
        options, batch = self.options, self.options.batch_of(workload)
        task, objection = None, None
        memory.release_memory(self.device)
        with control.agree_refusal(self.world):
            try:
                task = workload.build(options.settings_of(workload), self.rank_setup(batch))
                batch = batch or workloads.count_samples(task.batch(0))
            except Exception as error:  # whatever a user's function raises: a shortage is a skip
                objection = _describe_shortage(error, self._case(workload, None, batch))
                if objection is None:
                    raise
        difference = control.agree_objection(self.world, self._gather_difference(task))
        if difference is not None:
            raise Refused(difference)
        case = self._case(workload, task, batch)
        objection = objection or self._too_large(workload, task, case, replicas)
        sentence = control.agree_objection(self.world, objection)
        return case, task if sentence is None else None, sentence

    def _case(self, workload: Workload, task: Task | None, batch: int) -> StepCase:
        parameters = list(task.model.parameters()) if task else []
        return StepCase(
            **self.options.case_values(workload),
            mesh=self.meshes.shape if self.meshes else (),
            parameters=sum(parameter.numel() for parameter in parameters),
            parameter_nbytes=sum(parameter.nbytes for parameter in parameters),
            backend=self.backend.name,
            provider=self.backend.provider(self.options.device),
            batch=batch,
            threads=self.threads,
            world_size=self.world.world_size,
            ranks_per_host=tuple(len(host) for host in self.world.hosts.values()),
            clock=devices.of(self.device).clock,
        )

    def _gather_difference(self, task: Task | None) -> str | None:
        """Describe how this rank's model differs from rank 0's, with which DDP would hang."""
        own = [
            [name, list(each.shape), str(each.dtype), each.requires_grad]
            for name, each in (task.model.named_parameters() if task else ())
        ]
        models = control.gather_values(self.world, own)
        if [] in models or own == models[0]:
            return None
        pairs = itertools.zip_longest(own, models[0])
        own_parameter, first = next((a, b) for a, b in pairs if a != b)
        return f"the model differs from rank 0's: parameter {own_parameter} is {first} in rank 0"

    def _too_large(
        self, workload: Workload, task: Task | None, case: StepCase, replicas: int
    ) -> str | None:
        """Return why this rank cannot hold this number of replicas that have not stepped yet."""
        memory.release_memory(self.device)
        copies = COPIES + OPTIMIZERS[case.optimizer].copies
        own = case.parameter_nbytes
        if self.meshes is not None and task is not None and workload.plan is not None:
            from ddpbench.measure import sharded_step

            own = sharded_step.count_own_nbytes(task.model, workload.plan, case)
        purpose = " for gradients, buckets and optimizer"
        needed = replicas * copies * own
        objection = memory.explain_too_large(self.world, self.device, needed, purpose)
        return objection and f"{objection}; {advise_smaller(case)}"


def _describe_shortage(error: BaseException, case: StepCase) -> str | None:
    return memory.describe_shortage(error, case.device, advise_smaller(case))
