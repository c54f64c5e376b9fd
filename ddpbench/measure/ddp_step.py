"""A model in DDP, in one rank, and its switchable communication hook."""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from ddpbench.analysis.steps import BucketInfo
from ddpbench.catalog import hooks
from ddpbench.catalog.task import OPTIMIZERS, Task
from ddpbench.measure import clock
from ddpbench.measure.step import Replica, stamp
from ddpbench.runtime import control, devices
from ddpbench.runtime.devices import Event, elapsed_ns

if TYPE_CHECKING:
    from ddpbench.records.schema import StepCase
    from ddpbench.runtime.world import World


# Reductions of each bucket alone: as many as fit into these seconds.
ALONE_SECONDS, ALONE_FEWEST, ALONE_MOST = 1.0, 6, 40
ARMS = ("ddp", "noop", "no_sync", "timed")


class Hook:
    """A communication hook for DDP that can be switched.

    mode  "noop": communicate nothing; "timed": reduce as the case defines, and stamp each bucket;
          "plain": reduce only
    """

    def __init__(self, name: str, group: dist.ProcessGroup, module: torch.nn.Module) -> None:
        make = hooks.HOOKS[name].make
        reduction: Any = make(group) if make else (group, allreduce_hook)
        self._state, self._reduce = reduction
        self._names = {tensor: parameter for parameter, tensor in module.named_parameters()}
        self.mode = "plain"
        self.least_seconds = 0.0  # least time from hand-over to reduction of the last bucket
        self.infos: dict[int, BucketInfo] = {}
        self.dtypes: dict[int, torch.dtype] = {}
        self.handed: dict[int, Event] = {}
        self.reduced: dict[int, Event] = {}

    # No annotations: DDP reads those of a hook, and here they would be strings, which it rejects.
    def reduce(self, state, bucket):  # type: ignore[no-untyped-def]
        """Return the future of a bucket's reduced buffer. DDP calls this with each full bucket."""
        if self.mode == "noop":
            return hooks.noop(None, bucket)  # type: ignore[no-untyped-call]
        if self.mode == "plain":
            return self._reduced(bucket)
        index = bucket.index()
        if index not in self.infos:
            names = [self._names[parameter] for parameter in bucket.parameters()]
            nbytes = bucket.buffer().nbytes
            self.infos[index] = BucketInfo(index, nbytes, len(names), names[0], names[-1])
            self.dtypes[index] = bucket.buffer().dtype
        device = bucket.buffer().device
        self.handed[index] = stamp(device)

        def reduced(done: torch.futures.Future[Any]) -> Any:
            # On a GPU, torch calls this on a stream that waits for the reduction.
            self.reduced[index] = stamp(device)
            return done.value()

        return self._reduced(bucket).then(reduced)

    def _reduced(self, bucket: Any) -> torch.futures.Future[Any]:
        """Start the reduction. With a planted slow link, wait here for the last bucket."""
        began = clock.now_ns()
        future: torch.futures.Future[Any] = self._reduce(self._state, bucket)
        if self.least_seconds and bucket.is_last():
            value = future.wait()
            device = bucket.buffer().device
            devices.of(device).synchronize_stream(device)  # on a GPU, wait() does not block
            time.sleep(max(0.0, self.least_seconds - (clock.now_ns() - began) * 1e-9))
            future = torch.futures.Future()
            future.set_result(value)
        return future


class _LoneBucket:
    """A bucket of zeros that a hook takes for one of DDP's."""

    def __init__(self, hook: Hook, index: int, device: torch.device) -> None:
        self._index, self._is_last = index, index == max(hook.infos)
        zeros = torch.zeros(hook.infos[index].nbytes, dtype=torch.uint8, device=device)
        self._buffer = zeros.view(hook.dtypes[index])

    def index(self) -> int:
        return self._index

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def is_last(self) -> bool:
        return self._is_last


@dataclass(kw_only=True, eq=False)
class DdpReplica(Replica):
    """A model in DDP."""

    wrapped: DistributedDataParallel
    hook: Hook | None  # reduces the buckets, and can be switched; None: DDP's built-in reduction
    _reduces: bool = True  # the last micro-batch's backward, in the chosen arm

    def choose_arm(self, arm: str) -> None:
        self._reduces = arm != "no_sync"
        if self.hook is not None:
            self.hook.mode = arm if arm in ("noop", "timed") else "plain"

    def without_sync(self) -> AbstractContextManager[Any]:
        return self.wrapped.no_sync()

    def communicating(self) -> AbstractContextManager[Any]:
        """Return DDP's no_sync around the whole step in the arm without any reduction."""
        if self.hook is not None:
            self.hook.least_seconds = self.link_seconds
        return contextlib.nullcontext() if self._reduces else self.wrapped.no_sync()

    def read_timed_step(self) -> list[tuple[int, int]]:
        """Return ns from backward's begin to hand-over and reduction of each bucket."""
        hook, begin = self.hook, self.backward_mark
        assert hook is not None
        assert begin is not None
        return [
            (elapsed_ns(begin, hook.handed[index]), elapsed_ns(begin, hook.reduced[index]))
            for index in sorted(hook.handed)
        ]

    def gather_timed_steps(self, world: World, steps: Sequence[Any]) -> dict[str, Any]:
        stamps = None
        if steps:
            stamps = control.gather_to_rank_0(world, np.array(steps, np.int64))
        infos = self.hook.infos if self.hook else {}
        alone = self._gather_alone(world) if steps else None
        buckets = [infos[i] for i in sorted(infos)]
        return {"buckets": buckets, "bucket_stamps": stamps, "alone": alone}

    def _gather_alone(self, world: World) -> npt.NDArray[np.int64] | None:
        """Reduce buckets of the same sizes one by one, while nothing else runs.

        Returns ns[world, repetition, bucket] in rank 0, else None; None in all ranks for a hook
        that needs more than the bucket's buffer.
        """
        if self.hook is None or hooks.HOOKS[self.case.comm_hook].share is None:
            return None
        self.hook.mode = "timed"
        count, began = ALONE_MOST, clock.now_ns()
        spent: list[list[int]] = []
        while len(spent) < count:
            spent.append([self._reduce_alone(index) for index in sorted(self.hook.infos)])
            world.watchdog.rearm()
            if len(spent) == 1:
                fit = ALONE_SECONDS // max((clock.now_ns() - began) * 1e-9, 1e-6)
                fit = min(max(fit, ALONE_FEWEST), ALONE_MOST)
                count = control.broadcast_decision(world, 1 + int(fit))
        return control.gather_to_rank_0(world, np.array(spent[1:], np.int64))

    def _reduce_alone(self, index: int) -> int:
        """Return the ns of one reduction, from a common start."""
        assert self.hook is not None
        control.barrier_all()
        bucket = _LoneBucket(self.hook, index, self.device)
        self.hook.reduce(None, bucket).wait()  # type: ignore[no-untyped-call]
        devices.of(self.device).synchronize(self.device)
        return elapsed_ns(self.hook.handed[index], self.hook.reduced[index])


def _buffer_options(case: StepCase) -> dict[str, Any]:
    """Return the option that stops DDP's broadcast of buffers, by its name in this torch."""
    if case.broadcast_buffers:
        return {}
    known = inspect.signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return {name: False}


def build_replica(
    task: Task,
    case: StepCase,
    learning_rate: float,
    group: dist.ProcessGroup,
    *,
    device: torch.device,
    switchable: bool,
) -> DdpReplica:
    """Put the task's model into DDP over the group, as the case defines; all ranks together.

    switchable: reduce through a `Hook` that can be switched. Raises what DDP raises.
    """
    ddp = DistributedDataParallel(
        task.model,
        device_ids=devices.of(device).ddp_device_ids(device),
        process_group=group,
        bucket_cap_mb=case.bucket_cap_mb,  # None: DDP's own sizes
        gradient_as_bucket_view=case.gradient_as_bucket_view,
        static_graph=case.static_graph,
        find_unused_parameters=case.find_unused_parameters,
        **_buffer_options(case),
    )
    hook = None
    if switchable:
        hook = Hook(case.comm_hook, group, task.model)
        ddp.register_comm_hook(None, hook.reduce)
    elif (make := hooks.HOOKS[case.comm_hook].make) is not None:
        ddp.register_comm_hook(*make(group))
    # On a GPU, DDP's logger lets each of the first ten forwards wait for the backward before.
    assert ddp.logger is not None
    silent: Any = SimpleNamespace(
        set_runtime_stats_and_log=lambda: None,
        _get_ddp_logging_data=ddp.logger._get_ddp_logging_data,
    )
    ddp.logger = silent
    optimizer = OPTIMIZERS[case.optimizer].make(ddp.parameters(), learning_rate)
    replica = DdpReplica(
        task=task,
        case=case,
        wrapped=ddp,
        optimizer=optimizer,
        device=device,
        group=group,
        arms=ARMS,
        hook=hook,
    )
    if case.static_graph:
        replica.arms = tuple(arm for arm in ARMS if arm != "no_sync")
        replica.notes = (
            "bucket copies and compute are measured together: torch's reducer fails under no_sync "
            "with a static graph",
        )
    return replica
