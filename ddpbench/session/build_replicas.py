"""Build the replicas of a workload in one rank, or agree on why there are none."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from ddpbench.catalog import faults, user_workload
from ddpbench.catalog.optimizers import OPTIMIZERS
from ddpbench.catalog.task import RankSetup, Task, Workload
from ddpbench.launch.placement import Refused
from ddpbench.measure import ddp_step, rehearsal
from ddpbench.measure.step import Replica
from ddpbench.records.schema import StepCase
from ddpbench.runtime import control, devices

if TYPE_CHECKING:
    from ddpbench.measure.parallel.meshes import Meshes
    from ddpbench.session.launch_loop import LaunchContext
    from ddpbench.session.step_options import Options

COPIES = 2  # memory of gradients and buckets, in multiples of the parameters'


class Builder:
    """The replicas of workloads in one launch, as one rank builds them.

    meshes: over which the models are divided; None: each rank holds a whole one, in DDP.
    """

    def __init__(
        self, context: LaunchContext[Options], threads: int, meshes: Meshes | None
    ) -> None:
        self.world, self.tested, self.backend = context.world, context.tested, context.backend
        self.options, self.plan, self.device = context.options, context.plan, context.device
        self.threads, self.meshes = threads, meshes
        self.planted = tuple(faults.parse(text) for text in self.options.inject)

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
            objections = [each.objection(replica, case.world_size) for each in self.planted]
            objection = next((each for each in objections if each is not None), None)
        except (RuntimeError, ValueError, TypeError) as error:
            objection = rehearsal.describe_shortage(error, case)
            way = self.meshes.way.name if self.meshes else "DDP"
            objection = objection or f"{way} refuses it: {control.first_line(error, 300)}"
        sentence = control.agree_objection(self.world, objection)
        self.world.watchdog.rearm()  # building may take long, and so may the first step
        return case, replica if sentence is None else None, sentence

    def _divide(self, workload: Workload, task: Task, case: StepCase, switchable: bool) -> Replica:
        rate = self.learning_rate(workload)
        if self.meshes is not None:
            from ddpbench.measure.parallel import build

            assert workload.plan is not None
            mesh = self.meshes.tested
            return build.build_sharded(
                task, case, workload.plan, rate, mesh=mesh, device=self.device, group=self.tested
            )
        slow_link = any(planted.fault.name == "slow-link" for planted in self.planted)
        return ddp_step.build_replica(
            task, case, rate, self.tested, device=self.device, switchable=switchable or slow_link
        )

    def _build_task(
        self, workload: Workload, replicas: int
    ) -> tuple[StepCase, Task | None, str | None]:
        """Return the case and its task; or, in all ranks, why this number of them cannot be held.

        All replicas but this one are in DDP already, and have not stepped yet.
        """
        options, batch = self.options, self.options.batch_of(workload)
        task, objection, refusal = None, None, None
        rehearsal.release_memory(self.device)
        try:
            task = workload.build(options.settings_of(workload), self.rank_setup(batch))
            batch = batch or user_workload.count_samples(task.batch(0))
        except Refused as error:
            refusal = str(error)
        except Exception as error:  # whatever a user's function raises: only a shortage is a skip
            objection = rehearsal.describe_shortage(error, self._case(workload, None, batch))
            if objection is None:
                raise
        refusal = control.agree_objection(self.world, self._gather_difference(task) or refusal)
        if refusal is not None:
            raise Refused(refusal)
        case = self._case(workload, task, batch)
        objection = objection or self._too_large(workload, task, case, replicas)
        sentence = control.agree_objection(self.world, objection)
        tries = self.meshes is None and devices.of(self.device).refuses
        if sentence is None and task is not None and tries:
            shortage = rehearsal.find_shortage(task, case, self.device, replicas)
            sentence = control.agree_objection(self.world, shortage)
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

    def learning_rate(self, workload: Workload) -> float:
        """Return the user's learning rate, else the workload's own."""
        return self.options.learning_rate or workload.learning_rate

    def _gather_difference(self, task: Task | None) -> str | None:
        """Describe how this rank's model differs from rank 0's, with which DDP would hang."""
        own = None
        if task is not None:
            own = [
                [name, list(each.shape), str(each.dtype), each.requires_grad]
                for name, each in task.model.named_parameters()
            ]
        models = control.gather_values(self.world, own)
        if own is None or None in models or own == models[0]:
            return None
        pairs = itertools.zip_longest(own, models[0])
        own_parameter, first = next((a, b) for a, b in pairs if a != b)
        return f"the model differs from rank 0's: parameter {own_parameter} there is {first}"

    def _too_large(
        self, workload: Workload, task: Task | None, case: StepCase, replicas: int
    ) -> str | None:
        """Return why this rank cannot hold this number of replicas that have not stepped yet."""
        rehearsal.release_memory(self.device)
        kind = devices.of(self.device)
        free = kind.free_nbytes(self.device)
        sharers = self.world.memory_mates(self.device)
        copies = COPIES + OPTIMIZERS[case.optimizer].copies
        own = case.parameter_nbytes
        if self.meshes is not None and task is not None and workload.plan is not None:
            from ddpbench.measure.parallel import build

            own = build.count_own_nbytes(task.model, workload.plan, case)
        needed = replicas * copies * own * len(sharers)
        if free is None or needed <= 0.9 * free:
            return None
        return (
            f"the {len(sharers)} ranks on this {kind.memory} would need {needed / 1e9:.1f} GB of "
            f"memory for gradients, buckets and optimizer, but {free / 1e9:.1f} GB is free; "
            f"{rehearsal.advise(case)}"
        )
