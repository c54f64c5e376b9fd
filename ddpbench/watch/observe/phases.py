"""Marks of a training job's phases, taken without a change to its code.

Optimizers are seen through torch's global hooks, backward, data loaders and waits by wrapping
torch.autograd.backward, the iterators of DataLoader and what `find_waits` finds, and forwards by
wrapping the calls of the root modules alone. Waits are looked for before the first mark, root
modules when an optimizer steps for the first time, or when a group of ranks first meets in a
backward. Hooks on all modules would slow each submodule and make torch.compile warn.

On GPUs a wait delays the current stream. Marks of input and waits are added only where that is the
stream of the steps: fully_shard, for example, waits in streams of its own.

All marks come from one thread: the first one that steps an optimizer or meets other ranks in a
backward. Only the end of a rank's own backward is marked where autograd ends it, which for GPUs may
be a thread of autograd's own while the training thread waits for it. In other threads and in forked
children, all this does nothing, and so it does in code that torch.compile traces.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from threading import get_ident
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter as Batches

from ddpbench.watch.observe.steps import BACKWARD, END, FORWARD, INPUT, OPTIMIZER, OTHER, Marks
from ddpbench.watch.window import BLOCKED

PATIENCE = 32  # steps of one other optimizer after which it becomes the anchor
SEARCHES = 16  # for root modules
NOBODY = -1  # in place of a thread
CALL = "_compiled_call_impl"  # what a module calls in place of its usual call, if it is set

T = TypeVar("T")
Meetings = frozenset[tuple[int, ...]]  # the ranks of each group
Undo = Callable[[], None]


class Observer:
    """Adds marks to `marks` from its creation until `close`.

    anchor: the optimizer whose steps divide the job into steps, the first one that steps; another
    one takes over after PATIENCE steps without a step of the anchor. after_step: if set, called in
    the training thread after each step of the anchor, with its number, from 0; after_backward:
    after each synchronised backward, one in which process groups had collectives, with the ranks of
    each of these groups. messages: sends and receives so far. thread: of the training, None before
    its first mark, NOBODY once this has stopped. on_error: called once, with an error in the
    observer or in after_step, which ends the observation and not the job.
    """

    def __init__(self, marks: Marks, on_error: Callable[[Exception], object] | None = None) -> None:
        self.after_step: Callable[[int], object] | None = None
        self.after_backward: Callable[[Meetings], object] | None = None
        self.messages = 0
        self._marks, self._on_error = marks, on_error
        self._owner = get_ident()  # the thread that uses the hooks
        self.thread: int | None = None
        # Each optimizer that has stepped, with its steps since the anchor's last.
        self._steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._anchor: weakref.ref[Optimizer] | None = None
        self._met: Meetings = frozenset()  # in any backward
        self._roots: list[weakref.ref[nn.Module]] = []
        self._searches = 0
        self._in_backward = self._own_ended = False
        self._owned: list[Undo] = [
            register_optimizer_step_pre_hook(self._before_optimizer).remove,
            register_optimizer_step_post_hook(self._after_optimizer).remove,
        ]
        self._restore = [
            replace(torch.autograd, "backward", self._wrap_backward),
            replace(Batches, "__next__", partial(self._mark_calls, INPUT)),
            replace(DataLoader, "__iter__", partial(self._mark_calls, INPUT)),
            *(
                replace(dist.ProcessGroup, name, self._count_messages)
                for name in ("send", "recv", "recv_anysource")
            ),
        ]
        os.register_at_fork(after_in_child=self.stop)

    @property
    def modules(self) -> list[nn.Module]:
        """Return the root modules found that are still alive."""
        return [module for root in self._roots if (module := root()) is not None]

    @property
    def optimizers(self) -> list[Optimizer]:
        """Return the optimizers that have stepped and are still alive."""
        return list(self._steps)

    def stop(self) -> None:
        """Add no more marks. What is installed stays and does nothing. For any thread."""
        self.thread = NOBODY

    def close(self) -> None:
        """Stop, and remove what is installed. Safe to call again, but not in a callback.

        What the training thread may be using right now (its hooks and the calls of modules) is
        removed only if that thread calls this.
        """
        self.stop()
        owned = self._owned if get_ident() == self._owner else []
        for undo in (*self._restore, *owned):
            undo()

    def __enter__(self) -> None:
        """Begin a part of the observer's own, an error of which ends the observation."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, Exception) and self.thread != NOBODY:
            self.stop()
            if self._on_error is not None:
                self._on_error(error)
        return isinstance(error, Exception)

    def _begin(self) -> None:
        """Add marks in this thread from now on, also in the waits of what is imported by now."""
        self.thread = self._owner = get_ident()
        wrap = partial(self._mark_calls, BLOCKED)
        self._restore += [replace(owner, name, wrap) for owner, name in find_waits()]

    # Optimizers

    def _before_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        with self:
            if self.thread is None:
                self._begin()
            if get_ident() != self.thread:
                return
            if optimizer not in self._steps:
                self._meet(optimizer)
            self._marks.add(OPTIMIZER)

    def _after_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or get_ident() != self.thread:
            return
        with self:
            self._steps[optimizer] += 1
            # By counting alone, so that all ranks decide alike: they free objects at other times.
            is_anchor = self._anchor is not None and self._anchor() is optimizer
            if is_anchor or self._steps[optimizer] >= PATIENCE:
                self._anchor = weakref.ref(optimizer)
                self._steps.update(dict.fromkeys(self._steps, 0))
                self._call(self.after_step, self._marks.add_step())
            else:
                self._marks.add(OPTIMIZER + END)

    def _call(self, callback: Callable[[T], object] | None, argument: T) -> None:
        if callback is not None:
            self._marks.add(OTHER)
            callback(argument)
            self._marks.add(OTHER + END)

    # Root modules

    def _meet(self, optimizer: Optimizer) -> None:
        """Look at an optimizer that steps for the first time."""
        self._steps[optimizer] = 0
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        if self._anchor is None:
            self._anchor = weakref.ref(optimizer)
            self._marks.use_device(parameters[0].device)
        wanted = {id(parameter) for parameter in parameters}
        if not wanted <= {id(one) for module in self.modules for one in module.parameters()}:
            self._add_roots(lambda one: any(id(p) in wanted for p in one._parameters.values()))

    def _add_roots(self, is_owner: Callable[[nn.Module], bool]) -> None:
        """Find the outermost modules alive that are owners or contain some; mark their calls.

        Wrappers such as DDP and torch.compile's are the outermost. Walks through all objects that
        Python's garbage collector has: 30 to 100 ms for each million of them.
        """
        if self._searches == SEARCHES:
            return
        self._searches += 1
        modules = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]
        # A module that is being made, or was unpickled in part, has no such attribute yet.
        modules = [one for one in modules if "_modules" in one.__dict__]
        inner = {id(child) for module in modules for child in module._modules.values()}
        inner |= {id(root) for root in self.modules}
        for module in modules:
            if id(module) not in inner and any(map(is_owner, module.modules())):
                self._roots.append(weakref.ref(module))
                self._owned.append(self._mark_forwards(module))

    def _mark_forwards(self, root: nn.Module) -> Undo:
        """Mark each call of a root module. Return how to undo that.

        Does nothing for a module that was compiled in place (Module.compile), which uses the same
        place. It is not a hook, because a hook would be pickled with the module, forbids
        torch.jit.script, and makes each call slower. This place is neither pickled nor copied, nor
        part of the state.
        """
        reference = weakref.ref(root)  # so that a dropped module is freed at once

        def call(*args: Any, **kwargs: Any) -> Any:
            module: Any = reference()
            # Code that torch.compile traces must look as it would without this wrapper.
            if torch.compiler.is_compiling() or get_ident() != self.thread:
                return module._call_impl(*args, **kwargs)
            phase = FORWARD if torch.is_grad_enabled() else OTHER
            self._add(phase)
            try:
                return module._call_impl(*args, **kwargs)
            finally:
                self._add(phase + END)

        def restore() -> None:
            module = reference()
            if module is not None and module.__dict__.get(CALL) is call:  # not compiled since
                del module.__dict__[CALL]

        if getattr(root, CALL, None) is None:
            root.__dict__[CALL] = call  # past __setattr__: torch.compile's wrapper passes it on
        return restore

    # Backward, input and waits

    def _wrap_backward(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if torch.compiler.is_compiling() or self._in_backward:
                return original(tensors, *args, **kwargs)
            if self.thread not in (None, get_ident()):
                return original(tensors, *args, **kwargs)
            before = count_collectives()
            self._in_backward, self._own_ended = True, False
            try:
                if self.thread is not None:
                    self._add(BACKWARD)
                    # Subclasses of Tensor may count what they see.
                    with self, torch._C.DisableTorchFunction():
                        for tensor in tensors if isinstance(tensors, (tuple, list)) else [tensors]:
                            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                                tensor.grad_fn.register_prehook(self._queue_stamp)
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
        with self:
            met = frozenset(count_collectives() - before)
            if not met or self.thread == NOBODY:
                return
            if self.thread is None:
                self._begin()
            if not met <= self._met:
                self._met |= met
                self._add_roots(is_distributed)
            self._call(self.after_backward, met)

    def _queue_stamp(self, gradients: tuple[Tensor, ...]) -> None:
        """Have the engine mark the own end of this backward, which has begun, first of all.

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
            is_here = not torch.compiler.is_compiling() and get_ident() == self.thread
            if not (is_here and self._marks.is_in_order()):
                return original(*args, **kwargs)
            self._add(phase)
            try:
                return original(*args, **kwargs)
            finally:
                self._add(phase + END)

        return call

    def _count_messages(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def post(*args: Any, **kwargs: Any) -> Any:
            self.messages += get_ident() == self.thread
            return original(*args, **kwargs)

        return post

    def _add(self, kind: int) -> None:
        with self:
            if self.thread != NOBODY:
                self._marks.add(kind)


def replace(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Undo:
    """Replace an attribute by a wrapper of it. Return how to undo that.

    Undoing it leaves the attribute alone if somebody else has replaced it since.
    """
    original = vars(owner)[name]  # a method of C++ as it was, and not bound to the class
    wrapper = wrap(original)
    setattr(owner, name, wrapper)

    def restore() -> None:
        if getattr(owner, name) is wrapper:
            setattr(owner, name, original)

    return restore


def find_waits() -> Iterator[tuple[Any, str]]:
    """Yield the functions in which a thread waits for collectives: an owner and a name.

    Only of what is imported already. Over MPI, a synchronous call itself waits.
    """
    yield dist, "_broadcast_coalesced"  # DDP's of its buffers
    yield torch._C.Future, "wait"
    if functional := sys.modules.get("torch.distributed._functional_collectives"):
        yield functional, "wait_tensor"
    if over_mpi := sys.modules.get("ddpbench.mpi_backend.calls"):
        for name in vars(over_mpi.Collectives).keys() & vars(dist.ProcessGroup).keys():
            if callable(getattr(dist.ProcessGroup, name)):
                yield over_mpi.Collectives, name
    works = [dist.Work]
    for work in works:
        works += work.__subclasses__()
        if "wait" in vars(work):
            yield work, "wait"


def count_collectives() -> Counter[tuple[int, ...]]:
    """Return how many collectives this rank has called on groups, by the ranks of the group."""
    counts: Counter[tuple[int, ...]] = Counter()
    if dist.is_available() and dist.is_initialized():
        for group in list(distributed_c10d._world.pg_map):
            with contextlib.suppress(RuntimeError):  # of a backend that does not count
                number: int = getattr(group, "_get_sequence_number_for_group")()  # noqa: B009
                counts[tuple(dist.get_process_group_ranks(group))] += number
    return counts


def is_distributed(module: nn.Module) -> bool:
    """Return whether a module is DDP's, or has a DTensor among its own parameters."""
    parameters = module._parameters.values()
    is_ddp = isinstance(module, DistributedDataParallel)
    return is_ddp or any(hasattr(one, "device_mesh") for one in parameters)
