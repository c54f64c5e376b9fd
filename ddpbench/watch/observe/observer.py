"""Marks of a training job's phases, taken without a change to its code.

Optimizers are seen through torch's global hooks, backward, data loaders and waits by wrapping
torch.autograd.backward, the iterators of DataLoader and what `calls.find_waits` finds, and forwards
by wrapping the calls of the root modules alone. Waits and root modules are looked for when an
optimizer steps for the first time, or when a group of ranks first meets in a backward. Hooks on all
modules would slow each submodule and make torch.compile warn.

On GPUs a wait delays the current stream. Marks of input and waits are added only where that is the
stream of the steps: fully_shard, for example, waits in streams of its own.

All marks come from one thread: the first one that steps an optimizer or meets other ranks in a
backward. Only the end of a rank's own backward is marked where autograd ends it, which for GPUs may
be a thread of autograd's own while the training thread waits for it. In other threads and in forked
children, all this does nothing, and so it does in code that torch.compile traces. A job whose
optimizer's steps cannot be seen, such as one that compiles them or updates by hand, has steps that
end with its synchronised backwards instead.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter as Batches

from ddpbench.watch.observe import calls
from ddpbench.watch.observe.calls import ModuleCall
from ddpbench.watch.observe.steps import BACKWARD, END, FORWARD, INPUT, OPTIMIZER, OTHER, Marks
from ddpbench.watch.window import BLOCKED

PATIENCE = 32  # steps of one other optimizer after which it becomes the anchor
UNSTEPPED = 8  # synchronised backwards before an optimizer's first step after which they are steps
SEARCHES = 16  # for root modules
NOBODY = -1  # in place of a thread

T = TypeVar("T")
Meetings = frozenset[tuple[int, ...]]  # the ranks of each group

_observers: weakref.WeakSet[Observer] = weakref.WeakSet()


def _leave_child() -> None:
    for observer in _observers:
        observer.stop()


os.register_at_fork(after_in_child=_leave_child)


class Observer:
    """Adds marks to `marks` from its creation until `close`.

    anchor: the optimizer whose steps divide the job into steps, the first one that steps; another
    one, or synchronised backwards, take over after PATIENCE steps without a step of the anchor.
    after_step: called in the training thread after each step of the anchor, with its number, from
    0; after_backward: after each synchronised backward, one in which process groups had
    collectives, with the ranks of each of these groups. counts: of "messages", sends and receives
    since the first step. thread: of the training, None before its first mark, NOBODY once this has
    stopped. on_error: called once, with an error in the observer or in after_step, which ends the
    observation and not the job.
    """

    def __init__(self, marks: Marks, on_error: Callable[[Exception], object] | None = None) -> None:
        self.after_step: list[Callable[[int], object]] = []
        self.after_backward: list[Callable[[Meetings], object]] = []
        self.counts = {"messages": 0}
        self._marks, self._on_error = marks, on_error
        self._owner = get_ident()  # the thread that uses the hooks
        self.thread: int | None = None
        self._optimizers: dict[int, weakref.ref[Optimizer]] = {}
        self._anchor: weakref.ref[Optimizer] | None = None
        self._others: Counter[int] = Counter()  # steps since the anchor's last
        self._met: Meetings = frozenset()  # in any backward
        self._backwards = 0  # synchronised ones since the anchor's last step
        self._roots: list[weakref.ref[nn.Module]] = []
        self._calls: list[ModuleCall] = []
        self._searches = 0
        self._in_backward = self._own_ended = False
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        ]
        self._restore = [
            calls.replace(torch.autograd, "backward", self._wrap_backward),
            calls.replace(Batches, "__next__", partial(self._mark_calls, INPUT)),
            calls.replace(DataLoader, "__iter__", partial(self._mark_calls, INPUT)),
            *(
                calls.replace(dist.ProcessGroup, name, self._count_messages)
                for name in ("send", "recv", "recv_anysource")
            ),
        ]
        self._waits: dict[tuple[Any, str], Callable[[], None]] = {}  # how to restore each
        self._wrap_waits()
        _observers.add(self)

    @property
    def modules(self) -> list[nn.Module]:
        """Return the root modules found that are still alive."""
        return [module for root in self._roots if (module := root()) is not None]

    @property
    def optimizers(self) -> list[Optimizer]:
        """Return the optimizers that have stepped and are still alive, the anchor first."""
        references = self._optimizers.values()
        alive = [optimizer for one in references if (optimizer := one()) is not None]
        return sorted(alive, key=lambda optimizer: not self._is_anchor(optimizer))

    @property
    def steps_by_backward(self) -> bool:
        """Whether synchronised backwards end the steps, because no optimizer was seen to step."""
        return self._backwards > (UNSTEPPED if self._anchor is None else PATIENCE)

    def stop(self) -> None:
        """Add no more marks. What is installed stays and does nothing. For any thread."""
        self.thread = NOBODY

    def close(self) -> None:
        """Stop, and remove what is installed. Safe to call again, but not in a callback.

        What the training thread may be using right now (its hooks and the calls of modules) is
        removed only if that thread calls this.
        """
        self.stop()
        for restore in (*self._restore, *self._waits.values()):
            restore()
        if get_ident() == self._owner:
            for hook in self._hooks:
                hook.remove()
            for call in self._calls:
                call.remove()

    def __enter__(self) -> None:
        """Begin a part of the observer's own, an error of which ends the observation."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, Exception) and self.thread != NOBODY:
            self.stop()
            if self._on_error is not None:
                self._on_error(error)
        return isinstance(error, Exception)

    # Optimizers

    def _before_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self.thread is None:
            self.thread = self._owner = get_ident()
        elif get_ident() != self.thread:
            return
        with self:
            known = self._optimizers.get(id(optimizer))
            if known is None or known() is not optimizer:
                self._meet(optimizer)
            self._marks.add(OPTIMIZER)

    def _after_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or get_ident() != self.thread:
            return
        with self:
            self._others[id(optimizer)] += 1
            # By counting alone, so that all ranks decide alike: they free objects at other times.
            if self._is_anchor(optimizer) or self._others[id(optimizer)] >= PATIENCE:
                self._anchor = weakref.ref(optimizer)
                self._backwards = 0
                self._end_step()
            else:
                self._marks.add(OPTIMIZER + END)

    def _is_anchor(self, optimizer: Optimizer) -> bool:
        return self._anchor is not None and self._anchor() is optimizer

    def _end_step(self) -> None:
        self._others.clear()
        number = self._marks.add_step()
        self._call(self.after_step, number)

    def _call(self, callbacks: Sequence[Callable[[T], object]], argument: T) -> None:
        if callbacks:
            self._marks.add(OTHER)
            for callback in callbacks:
                callback(argument)
            self._marks.add(OTHER + END)

    # Root modules

    def _meet(self, optimizer: Optimizer) -> None:
        """Look at an optimizer that steps for the first time."""
        self._optimizers = {id(alive): weakref.ref(alive) for alive in self.optimizers}
        self._optimizers[id(optimizer)] = weakref.ref(optimizer)
        self._others.pop(id(optimizer), None)  # of another one that was there before
        self._wrap_waits()
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        if self._anchor is None:
            self._anchor = weakref.ref(optimizer)
            self._marks.use_device(parameters[0].device)
        wanted = {id(parameter) for parameter in parameters}
        if not wanted <= {id(one) for module in self.modules for one in module.parameters()}:
            self._add_roots(lambda one: any(id(p) in wanted for p in one._parameters.values()))

    def _add_roots(self, is_owner: Callable[[nn.Module], bool]) -> None:
        if self._searches >= SEARCHES:
            return
        self._searches += 1
        known = {id(one) for one in self.modules}
        new = [one for one in calls.find_roots(is_owner) if id(one) not in known]
        self._roots.extend(weakref.ref(one) for one in new)
        self._calls += [ModuleCall(one, self._begin_forward, self._end_forward) for one in new]

    def _begin_forward(self) -> int:
        if get_ident() != self.thread:
            return NOBODY
        phase = FORWARD if torch.is_grad_enabled() else OTHER
        self._add(phase)
        return phase

    def _end_forward(self, phase: int) -> None:
        if phase != NOBODY:
            self._add(phase + END)

    # Backward, input and waits

    def _wrap_backward(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            elsewhere = self.thread not in (None, get_ident())
            if torch.compiler.is_compiling() or self._in_backward or elsewhere:
                return original(tensors, *args, **kwargs)
            before = calls.count_collectives()
            self._in_backward, self._own_ended = True, False
            try:
                if self.thread is not None:
                    self._add(BACKWARD)
                    with (
                        self,
                        torch._C.DisableTorchFunction(),
                    ):  # subclasses may count what they see
                        self._watch_begin(tensors)
                original(tensors, *args, **kwargs)
            finally:
                self._in_backward = False
                if self.thread is not None:
                    self._add(BACKWARD + END)
            return self._end_backward(before)

        return backward

    def _end_backward(self, before: Counter[tuple[int, ...]]) -> None:
        """Call who waits for the end of a synchronised backward, if this was one.

        The ranks of a process group call the same collectives. So such a backward is the n-th of
        its group in all of them, however many optimizer steps or other backwards a rank takes.
        """
        if self.thread == NOBODY:
            return
        with self:
            after = calls.count_collectives()
            met = frozenset(ranks for ranks, count in after.items() if count > before[ranks])
            if not met:
                return
            if self.thread is None:
                self.thread = self._owner = get_ident()
            if not met <= self._met:
                self._met |= met
                self._wrap_waits()
                self._add_roots(calls.is_distributed)
                if self._anchor is None and (modules := self.modules):
                    self._marks.use_device(next(modules[0].parameters()).device)
            self._call(self.after_backward, met)
            self._backwards += 1
            if self.steps_by_backward:
                self._end_step()

    def _watch_begin(self, tensors: Any) -> None:
        """Have the engine call `_queue_stamp` where this backward begins."""
        for tensor in tensors if isinstance(tensors, (tuple, list)) else (tensors,):
            node = tensor.grad_fn if isinstance(tensor, Tensor) else None
            if node is not None:
                node.register_prehook(self._queue_stamp)

    def _queue_stamp(self, gradients: tuple[Tensor, ...]) -> None:
        """Have the engine mark the own end before it calls anybody else.

        The engine calls what was queued during a backward at its end, in the order in which it was
        queued. DDP queues its wait for the reductions, and FSDP its own, while backward runs.
        """
        if self._in_backward and not self._own_ended and not torch.compiler.is_compiling():
            self._own_ended = True
            with self:
                engine: Any = torch.autograd.Variable._execution_engine
                engine.queue_callback(partial(self._add, BLOCKED))

    def _mark_calls(self, phase: int, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            # torch.compile traces this up to here.
            if torch.compiler.is_compiling() or get_ident() != self.thread:
                return original(*args, **kwargs)
            if not self._marks.is_in_order():
                return original(*args, **kwargs)
            self._add(phase)
            try:
                return original(*args, **kwargs)
            finally:
                self._add(phase + END)

        return call

    def _wrap_waits(self) -> None:
        """Wrap the waits of what has been imported since the last time."""
        for owner, name in calls.find_waits():
            if (owner, name) not in self._waits:
                wrap = partial(self._mark_calls, BLOCKED)
                self._waits[owner, name] = calls.replace(owner, name, wrap)

    def _count_messages(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def post(*args: Any, **kwargs: Any) -> Any:
            if get_ident() == self.thread:
                self.counts["messages"] += 1
            return original(*args, **kwargs)

        return post

    def _add(self, kind: int) -> None:
        with self:
            if self.thread != NOBODY:
                self._marks.add(kind)
