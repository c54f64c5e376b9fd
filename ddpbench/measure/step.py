"""The DDP step in one rank: a replica that trains, and the stamps of its steps.

A step is: zero_grad, forward and backward of each micro-batch, optimizer. Stamps lie between these
phases and nowhere else. rounds.py decides how often each arm steps.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from ddpbench.analysis.steps import BucketInfo
from ddpbench.catalog import hooks
from ddpbench.catalog.optimizers import OPTIMIZERS
from ddpbench.measure import clock
from ddpbench.runtime import devices
from ddpbench.runtime.devices import Event, elapsed_ns

if TYPE_CHECKING:
    from ddpbench.catalog.task import Task
    from ddpbench.records.schema import StepCase


class Marks:
    """Stamps in one rank: events of its kind of device."""

    def __init__(self, device: torch.device) -> None:
        self._kind, self._device = devices.of(device), device
        self._marks: list[Event] = []

    def mark(self) -> Event:
        """Stamp now, on the stream that is current. Return the mark."""
        mark = self._kind.event(self._device)
        mark.record()
        self._marks.append(mark)
        return mark

    def ns(self) -> list[int]:
        """Return all marks in ns since the first, once the device has been synchronised."""
        return [elapsed_ns(self._marks[0], mark) for mark in self._marks]


def stamp(device: torch.device) -> Event:
    """Record an event on the device's stream that is current now, in any thread.

    Some backends end a reduction in a thread of their own, where another device may be current.
    """
    kind = devices.of(device)
    event = kind.event(device)
    with kind.current(device):
        event.record()
    return event


class Hook:
    """A communication hook for DDP that can be switched.

    mode  "noop": communicate nothing; "timed": reduce as the case does, and stamp each bucket;
          "plain": reduce only
    """

    def __init__(self, name: str, group: dist.ProcessGroup, module: torch.nn.Module) -> None:
        make = hooks.HOOKS[name].make
        reduction: Any = make(group) if make else (group, allreduce_hook)
        self._state, self._reduce = reduction
        self._names = {tensor: parameter for parameter, tensor in module.named_parameters()}
        self.mode = "plain"
        self.least_seconds = (
            0.0  # from hand-over to reduction of the last bucket: a planted slow link
        )
        self.infos: dict[int, BucketInfo] = {}
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
            self.infos[index] = self._info(bucket)
        device = bucket.buffer().device
        self.handed[index] = stamp(device)

        def reduced(done: torch.futures.Future[Any]) -> Any:
            # On a GPU, torch calls this while a stream is current that waits for the reduction.
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
            devices.of(device).synchronize_stream(device)  # on a GPU, wait() waits for nothing
            time.sleep(max(0.0, self.least_seconds - (clock.now_ns() - began) * 1e-9))
            future = torch.futures.Future()
            future.set_result(value)
        return future

    def _info(self, bucket: Any) -> BucketInfo:
        names = [self._names[parameter] for parameter in bucket.parameters()]
        nbytes = bucket.buffer().nbytes
        return BucketInfo(bucket.index(), nbytes, len(names), names[0], names[-1])


@dataclass
class Replica:
    """A task's model in DDP with its optimizer. Faults may change the attributes."""

    task: Task
    case: StepCase
    ddp: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    device: torch.device
    hook: Hook | None  # None: DDP's built-in reduction
    own_timers: OwnTimers
    steps: int = 0  # taken so far
    through: torch.nn.Module = field(init=False)  # the forward calls this module
    sync_last: bool = True  # whether the last micro-batch's backward reduces
    delay_seconds: float = 0.0  # a planted delay of the forward
    loss: torch.Tensor | None = None  # of the latest step
    backward_mark: Event | None = None  # begin of the latest backward

    def __post_init__(self) -> None:
        self.through = self.ddp

    @property
    def module(self) -> torch.nn.Module:
        """Return the bare model."""
        inner: torch.nn.Module = self.ddp.module
        return inner

    @property
    def link_seconds(self) -> float:
        """Return the least time of the last bucket, a planted fault that needs a hook."""
        return self.hook.least_seconds if self.hook else 0.0

    @link_seconds.setter
    def link_seconds(self, seconds: float) -> None:
        if self.hook is not None:
            self.hook.least_seconds = seconds

    def batches(self, ahead: int = 0) -> list[Any]:
        """Return the micro-batches of the next step, or of the step `ahead` steps after it."""
        first = (self.steps + ahead) * self.case.accumulate
        return [self.task.batch(first + i) for i in range(self.case.accumulate)]

    def step(self, batches: Sequence[Any], mark: Callable[[], Event], sync: bool = True) -> None:
        """Take one step with 2 + 2 marks per micro-batch: begin, (forward, backward ends)…, end."""
        self.steps += 1
        last = len(batches) - 1
        mark()
        self.optimizer.zero_grad()
        for i, batch in enumerate(batches):
            reduces = sync and i == last and self.sync_last
            with contextlib.nullcontext() if reduces else self.ddp.no_sync():
                with autocast(self.case, self.device):
                    if self.delay_seconds:
                        devices.of(self.device).sleep(self.device, self.delay_seconds)
                    loss = self.task.loss(self.through, batch)
                self.backward_mark = mark()
                (loss / len(batches) if last else loss).backward()
            mark()
        self.optimizer.step()
        mark()
        self.loss = loss.detach()


def autocast(case: StepCase, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return the context of a forward, as the case defines."""
    if case.amp is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def phases(ns: list[int], steps: int) -> list[list[int]]:
    """Convert the marks of some steps to [begin, ends of forward, backward and optimizer] each.

    With several micro-batches, their forwards are added up, and their backwards, too.
    """
    marks_per_step = len(ns) // steps
    ends = []
    for first in range(0, steps * marks_per_step, marks_per_step):
        begin, *inner, end = ns[first : first + marks_per_step]
        spans = [b - a for a, b in itertools.pairwise([begin, *inner])]
        forward, backward = sum(spans[0::2]), sum(spans[1::2])
        ends.append([begin, begin + forward, begin + forward + backward, end])
    return ends


def build_replica(
    task: Task,
    case: StepCase,
    learning_rate: float,
    group: dist.ProcessGroup,
    *,
    device: torch.device,
    switchable: bool,
) -> Replica:
    """Put the task's model into DDP over the group, as the case defines; all ranks together.

    switchable: reduce through a `Hook` that can be switched. Raises what DDP raises.
    """
    bucket_cap: dict[str, Any] = (
        {} if case.bucket_cap_mb is None else {"bucket_cap_mb": case.bucket_cap_mb}
    )
    ddp = DistributedDataParallel(
        task.model,
        device_ids=devices.of(device).ddp_device_ids(device),
        process_group=group,
        gradient_as_bucket_view=case.gradient_as_bucket_view,
        static_graph=case.static_graph,
        find_unused_parameters=case.find_unused_parameters,
        **bucket_cap,
    )
    hook = None
    if switchable:
        hook = Hook(case.comm_hook, group, task.model)
        ddp.register_comm_hook(None, hook.reduce)
    elif case.comm_hook != "none":
        make = hooks.HOOKS[case.comm_hook].make
        assert make is not None
        ddp.register_comm_hook(*make(group))
    optimizer = OPTIMIZERS[case.optimizer].make(ddp.parameters(), learning_rate)
    return Replica(task, case, ddp, optimizer, device, hook, OwnTimers(ddp))


TIMERS = {
    "forward_compute_time": "forward",
    "backward_compute_time": "backward",
    "backward_comm_time": "communication",
    "backward_compute_comm_overlap_time": "overlap",
}
NEVER = 2**31 - 1  # steps between two that DDP's own timers measure


class OwnTimers:
    """DDP's own timers, of chosen steps. They are undocumented, and a torch may lack them.

    They record five events in a step. Reading them waits for these events. DDP does both in its
    first ten steps and in one of a hundred later ones, and reads at the begin of the next forward:
    on a GPU, the host then waits there for the backward before. Instead, `start` has the next step
    record, and `read` reads when it is called.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        self._logger: Any = ddp.logger
        ddp.logger = _WithoutReading(self._logger)  # type: ignore[assignment]
        self._record_every(NEVER)

    def start(self) -> None:
        """Let the next step record."""
        self._record_every(1)

    def read(self) -> dict[str, float]:
        """Return the seconds of the step that recorded, if torch has timers; stop recording.

        Communication spans from the first bucket's start to the last bucket's end, with its gaps.
        """
        data: dict[str, Any] = {}
        with contextlib.suppress(AttributeError, RuntimeError):
            self._logger.set_runtime_stats_and_log()
            data = self._ddp._get_ddp_logging_data()
        self._record_every(NEVER)
        timers = {name: data.get(key, 0) for key, name in TIMERS.items()}
        return {name: ns * 1e-9 for name, ns in timers.items() if isinstance(ns, int) and ns > 0}

    def _record_every(self, steps: int) -> None:
        with contextlib.suppress(AttributeError, RuntimeError):
            self._ddp._set_ddp_runtime_logging_sample_rate(steps)


class _WithoutReading:
    """DDP's logger, except that a forward does not read the timers."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name)

    def set_runtime_stats_and_log(self) -> None:
        """Do nothing. DDP calls this at the begin of each forward whose backward reduces."""
