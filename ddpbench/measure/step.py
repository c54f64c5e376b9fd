"""One replica that trains, and the stamps of its steps: the DDP step in one rank.

A step is: zero_grad, forward, backward, optimizer, each micro-batch of it in turn. Stamps are taken
between them and nowhere else. How often which arm steps is decided in rounds.py.
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

if TYPE_CHECKING:
    from ddpbench.catalog.task import Task
    from ddpbench.records.schema import StepCase


class Marks:
    """Stamps in one rank, in ns since the first: of the host's clock, or events on the stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._marks: list[Any] = []

    def mark(self) -> Any:
        """Stamp now; the mark, for `since`."""
        mark = stamp(self._stream)
        self._marks.append(mark)
        return mark

    def ns(self) -> list[int]:
        """All marks; on a GPU once the stream has been waited for."""
        return [since(self._marks[0], mark) for mark in self._marks]


def stamp(stream: Any) -> Any:
    """The host's ns, or an event that this stream has recorded."""
    if stream is None:
        return clock.now_ns()
    event: Any = torch.cuda.Event
    made = event(enable_timing=True)
    made.record(stream)
    return made


def since(first: Any, mark: Any) -> int:
    """ns from one mark to another."""
    if isinstance(first, int):
        return int(mark) - first
    return int(first.elapsed_time(mark) * 1e6)


class Hook:
    """DDP's communication hook of an arm's replica, which does one thing or another.

    mode  "noop": communicates nothing; "timed": reduces as the replica's own reduction would, and
          stamps each bucket; "plain": reduces only
    """

    def __init__(self, name: str, group: dist.ProcessGroup, module: torch.nn.Module) -> None:
        make = hooks.HOOKS[name].make
        chosen: Any = make(group) if make else (group, allreduce_hook)
        self._state, self._reduce = chosen
        self._names = {parameter: each for each, parameter in module.named_parameters()}
        self.mode = "plain"
        self.least_seconds = 0.0  # of the last bucket, from hand-over on: a planted slow link
        self.infos: dict[int, BucketInfo] = {}
        self.handed: dict[int, Any] = {}
        self.reduced: dict[int, Any] = {}

    # Without annotations, which DDP would read and not understand.
    def reduce(self, state, bucket):  # type: ignore[no-untyped-def]
        """What DDP calls with each bucket as it is full: the future of its reduced buffer."""
        if self.mode == "noop":
            return hooks.noop(None, bucket)  # type: ignore[no-untyped-call]
        if self.mode == "plain":
            return self._reduced(bucket)
        index = bucket.index()
        if index not in self.infos:
            self.infos[index] = self._info(bucket)
        cuda = bucket.buffer().is_cuda
        self.handed[index] = stamp(torch.cuda.current_stream() if cuda else None)

        def reduced(done: torch.futures.Future[Any]) -> Any:
            self.reduced[index] = stamp(torch.cuda.current_stream() if cuda else None)
            return done.value()

        return self._reduced(bucket).then(reduced)

    def _reduced(self, bucket: Any) -> torch.futures.Future[Any]:
        """The future of the bucket's reduced buffer. Where a slow link is planted, the last bucket
        takes at least its time, and backward waits here."""
        began = clock.now_ns()
        future: torch.futures.Future[Any] = self._reduce(self._state, bucket)
        if self.least_seconds and bucket.is_last():
            value = future.wait()
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
    """A task's model in DDP, its optimizer, and how it steps. Faults may change it."""

    task: Task
    case: StepCase
    ddp: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    device: torch.device
    hook: Hook | None  # None: DDP's built-in reduction
    steps: int = 0  # taken
    through: torch.nn.Module = field(init=False)  # what the forward goes through
    sync_last: bool = True  # whether the last micro-batch's backward reduces
    delay_seconds: float = 0.0  # planted in the forward
    loss: torch.Tensor | None = None  # the last
    backward_mark: Any = None  # where the last backward began

    def __post_init__(self) -> None:
        self.through = self.ddp

    @property
    def module(self) -> torch.nn.Module:
        """The bare model."""
        inner: torch.nn.Module = self.ddp.module
        return inner

    @property
    def link_seconds(self) -> float:
        """What the last bucket takes at least, planted; the replica then needs a hook."""
        return self.hook.least_seconds if self.hook else 0.0

    @link_seconds.setter
    def link_seconds(self, seconds: float) -> None:
        if self.hook is not None:
            self.hook.least_seconds = seconds

    def batches(self, ahead: int = 0) -> list[Any]:
        """The micro-batches of the next step, or of one `ahead` steps further on."""
        first = (self.steps + ahead) * self.case.accumulate
        return [self.task.batch(first + i) for i in range(self.case.accumulate)]

    def step(self, batches: Sequence[Any], mark: Callable[[], Any], sync: bool = True) -> None:
        """One step, 2 + 2 marks a micro-batch: begin, (end of forward, of backward)…, end."""
        self.steps += 1
        last = len(batches) - 1
        mark()
        self.optimizer.zero_grad()
        for i, batch in enumerate(batches):
            reduces = sync and i == last and self.sync_last
            with contextlib.nullcontext() if reduces else self.ddp.no_sync():
                with self._autocast():
                    if self.delay_seconds:
                        time.sleep(self.delay_seconds)
                    loss = self.task.loss(self.through, batch)
                self.backward_mark = mark()
                (loss / len(batches) if last else loss).backward()
            mark()
        self.optimizer.step()
        mark()
        self.loss = loss.detach()

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.case.amp is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)


def phases(ns: list[int], steps: int) -> list[list[int]]:
    """The marks of some steps as [begin, end of forward, of backward, of optimizer] each.

    With several micro-batches the forwards are added up, and so are the backwards.
    """
    each = len(ns) // steps
    out = []
    for k in range(steps):
        begin, *inner, end = ns[k * each : (k + 1) * each]
        spans = [b - a for a, b in itertools.pairwise([begin, *inner])]
        forward, backward = sum(spans[0::2]), sum(spans[1::2])
        out.append([begin, begin + forward, begin + forward + backward, end])
    return out


def replica(
    task: Task, case: StepCase, learning_rate: float, group: dist.ProcessGroup,
    device: torch.device, hooked: bool,
) -> Replica:  # fmt: skip
    """The task's model in DDP over the group, as the case says; all ranks together.

    hooked: whether its reduction can be switched (Hook); else it is what the case says.
    Raises what DDP raises.
    """
    more: dict[str, Any] = {}
    if case.bucket_cap_mb is not None:
        more["bucket_cap_mb"] = case.bucket_cap_mb
    ddp = DistributedDataParallel(
        task.model,
        device_ids=[device] if device.type == "cuda" else None,
        process_group=group,
        gradient_as_bucket_view=case.gradient_as_bucket_view,
        static_graph=case.static_graph,
        find_unused_parameters=case.find_unused_parameters,
        **more,
    )
    hook = None
    if hooked:
        hook = Hook(case.comm_hook, group, task.model)
        ddp.register_comm_hook(None, hook.reduce)
    elif case.comm_hook != "none":
        make = hooks.HOOKS[case.comm_hook].make
        assert make is not None
        ddp.register_comm_hook(*make(group))
    # DDP's own timers, of every step; not documented, so where a torch lacks them there are none.
    with contextlib.suppress(AttributeError, RuntimeError):
        ddp._set_ddp_runtime_logging_sample_rate(1)
    optimizer = OPTIMIZERS[case.optimizer].make(ddp.parameters(), learning_rate)
    return Replica(task, case, ddp, optimizer, device, hook)


TIMERS = {
    "forward_compute_time": "forward",
    "backward_compute_time": "backward",
    "backward_comm_time": "communication",
    "backward_compute_comm_overlap_time": "overlap",
}


def own_timers(ddp: DistributedDataParallel) -> dict[str, float]:
    """DDP's own timers of the step before the last, in seconds; empty where torch has none.

    Communication is a span with its gaps, from the first bucket's start to the last one's end.
    """
    try:
        data = ddp._get_ddp_logging_data()
    except (AttributeError, RuntimeError):
        return {}
    found = {name: data.get(key, 0) for key, name in TIMERS.items()}
    return {name: ns * 1e-9 for name, ns in found.items() if isinstance(ns, int) and ns > 0}
