"""The collectives of a sharded training step: left as they are, switched off, or timed.

fully_shard calls functions of torch.distributed, DTensor calls the operators of
torch.ops._c10d_functional. Both look them up by name at each call, in every thread, so replacing
the names during a step reaches every call and costs nothing in other steps.

fully_shard's hooks name the layer group of a collective. A collective of DTensor belongs to the
module whose forward is running; in backward, to the module whose forward created the running
autograd node, identified by its sequence number.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ddpbench.analysis.steps import Span
from ddpbench.measure.step import stamp
from ddpbench.runtime import devices
from ddpbench.runtime.devices import Event, elapsed_ns

ROOT = "root"
# The names by which torch calls the operations: since torch 2.13, and before.
GATHERS = ("all_gather_single", "all_gather_into_tensor")
SCATTERS = ("reduce_scatter_single", "reduce_scatter_tensor")


@dataclass
class _Record:
    span: Span  # without times
    begin: Event
    end: Event | None = None
    waits: list[tuple[Event, Event]] = field(default_factory=list)

    def read(self, origin: Event, last: Event) -> Span:
        begin, end = (elapsed_ns(origin, each) for each in (self.begin, self.end or last))
        exposed = sum(elapsed_ns(first, then) for first, then in self.waits)
        return replace(self.span, begin_ns=begin, exposed_ns=exposed, end_ns=max(end, begin))


class Communication:
    """The collectives of one model during its steps.

    mode  "plain": nothing is changed
          "noop":  no byte moves. An all_gather copies the rank's shard into every slot, a
                   reduce_scatter takes the rank's slice, an all_reduce leaves its input. Shapes,
                   dtypes and the compute stay the same; the replicas diverge.
          "timed": each collective is carried out and leaves a Span. The result of the step does
                   not change.

    model: after fully_shard or parallelize_module. layers: more modules that are groups of layers,
    for what DTensor communicates; those of fully_shard need not be named.

    This covers all_gather, reduce_scatter and all_reduce. Any other collective is carried out in
    every mode, and has no span. The end of a collective of DTensor is the end of its wait, so its
    hidden time is an upper bound.

    On a GPU, stamps are events on the current stream. A collective on one of fully_shard's own
    streams is exposed while the stream of the step waits for an event recorded there after it. This
    was tested with simulated streams, never on a GPU.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, layers: Sequence[nn.Module] = ()
    ) -> None:
        self.mode = "plain"
        self._stamp = partial(stamp, device)
        names = {module: name or ROOT for name, module in model.named_modules()}
        sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._param_groups = [
            (group, names[module]) for module in sharded for group in _read_param_groups(module)
        ]
        groups = dict.fromkeys([*(module for module in sharded if module is not model), *layers])
        self._layers = {names[module]: module for module in groups}
        self._label: str | None = None  # the group that fully_shard works on
        self._open: list[tuple[str, int]] = []  # modules whose forward runs; first sequence numbers
        self._made: list[tuple[int, int, str]] = []  # sequence numbers of each module's nodes
        self._records: list[_Record] = []
        self._pending: dict[int, _Record] = {}  # by the memory of the result of an operator
        self._within = False  # an operator may call itself, for autograd
        self._ranks: dict[dist.ProcessGroup, tuple[int, ...]] = {}
        self._streams: Any = None  # torch's module with the streams of the device
        if devices.of(device).clock == "device":
            self._streams = torch.get_device_module(device)
        self._own: Any = None  # the stream of the step; None: the device has no streams
        self._elsewhere: dict[Any, _Record] = {}  # the latest collective on each other stream
        self._events: dict[int, tuple[Any, _Record]] = {}  # recorded behind a collective, by id
        self._origin = self._last = self._stamp()

    @property
    def spans(self) -> list[Span]:
        """Return the spans of the latest step in mode "timed", in the order of the calls.

        On a GPU, synchronise the device first.
        """
        return [record.read(self._origin, self._last) for record in self._records]

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Apply the mode to what runs inside: one step, or a stretch of steps without spans."""
        if self.mode == "plain":
            yield
            return
        with contextlib.ExitStack() as stack:
            for owner, name, new in self._replacements():
                stack.enter_context(mock.patch.object(owner, name, new))
            if self.mode == "timed":
                self._begin_step(stack)
            yield
            self._last = self._stamp()

    def _begin_step(self, stack: contextlib.ExitStack) -> None:
        for each in (self._records, self._pending, self._open, self._made):
            each.clear()
        self._elsewhere.clear()
        self._events.clear()
        self._own = self._current_stream()
        for name, module in self._layers.items():
            enter, leave = self._module_hooks(name)
            stack.enter_context(module.register_forward_pre_hook(enter, prepend=True))
            stack.enter_context(module.register_forward_hook(leave))
        self._origin = self._stamp()

    # --- what is replaced ---------------------------------------------------------------------

    def _replacements(self) -> Iterator[tuple[Any, str, Any]]:
        """Yield (object, name of an attribute, what replaces it)."""
        space, is_noop = torch.ops._c10d_functional, self.mode == "noop"
        for names, operation, counted, leave in FUNCTIONS:
            for name in names:
                if real := getattr(dist, name, None):
                    yield (
                        dist,
                        name,
                        leave if is_noop else self._time_function(operation, counted, real),
                    )
        for name, operation, leave in OPERATORS:
            packet = getattr(space, name)
            call = leave if is_noop else self._time_operator(operation, packet)
            yield space, name, _Operator(packet, call)
        if is_noop:
            return
        yield space, "wait_tensor", _Operator(space.wait_tensor, self._time_wait(space.wait_tensor))
        if self._streams is not None:
            stream = self._streams.Stream
            yield stream, "record_event", self._note_event(stream.record_event)
            yield stream, "wait_event", self._time_event(stream.wait_event)
        for group, name in self._param_groups:
            for method in ("unshard", "post_backward"):
                yield group, method, self._labelled(name, getattr(group, method))

    # --- timed --------------------------------------------------------------------------------

    def _time_function(self, operation: str, counted: str, real: Any) -> Any:
        """Return a function that times a call; counted: the argument with all of its bytes."""
        signature = inspect.signature(real)

        def timed(*args: Any, **keywords: Any) -> Any:
            given = signature.bind(*args, **keywords).arguments
            call = partial(real, *args, **keywords)
            return self._time(operation, given[counted].nbytes, given.get("group"), call)

        return timed

    def _time(self, operation: str, nbytes: int, group: Any, call: Callable[[], Any]) -> Any:
        record = self._begin(operation, nbytes, group)
        work = call()
        returned = self._stamp()
        if (stream := self._current_stream()) == self._own:
            record.waits.append((record.begin, returned))
        else:
            self._elsewhere[stream] = record
        if not isinstance(work, dist.Work):
            record.end = returned
            return work
        return _TimedWork(work, record, self._stamp)

    def _current_stream(self) -> Any:
        return None if self._streams is None else self._streams.current_stream()

    def _note_event(self, real: Any) -> Any:
        def record_event(stream: Any, event: Any = None) -> Any:
            event = real(stream, event)
            if stream in self._elsewhere:
                self._events[id(event)] = event, self._elsewhere[stream]
            return event

        return record_event

    def _time_event(self, real: Any) -> Any:
        def wait_event(stream: Any, event: Any) -> None:
            _, record = self._events.get(id(event), (None, None))
            if record is None or stream != self._own:
                real(stream, event)
                return
            began = self._stamp()
            real(stream, event)
            record.waits.append((began, self._stamp()))

        return wait_event

    def _time_operator(self, operation: str, packet: Any) -> Any:
        def call(tensor: Tensor, *args: Any) -> Any:
            if self._within:
                return packet(tensor, *args)
            group = _resolve_group(args[-1])
            slots = group.size() if operation == "all_gather" else 1
            record = self._begin(operation, tensor.nbytes * slots, group)
            self._within = True
            try:
                result = packet(tensor, *args)
            finally:
                self._within = False
            record.waits.append((record.begin, self._stamp()))
            self._pending[result.untyped_storage().data_ptr()] = record
            return result

        return call

    def _time_wait(self, packet: Any) -> Any:
        def wait_tensor(tensor: Tensor) -> Any:
            record = self._pending.pop(tensor.untyped_storage().data_ptr(), None)
            began = self._stamp()
            result = packet(tensor)
            if record is not None:
                record.end = self._stamp()
                record.waits.append((began, record.end))
            return result

        return wait_tensor

    def _begin(self, operation: str, nbytes: int, group: Any) -> _Record:
        layers, phase = self._place()
        group = group or dist.group.WORLD
        if group not in self._ranks:
            self._ranks[group] = tuple(dist.get_process_group_ranks(group))
        span = Span(operation, layers, phase, nbytes, 0, 0, 0, self._ranks[group])
        record = _Record(span, self._stamp())
        self._records.append(record)
        return record

    # --- whose collective it is ---------------------------------------------------------------

    def _labelled(self, name: str, real: Any) -> Any:
        def call(*args: Any, **keywords: Any) -> Any:
            before, self._label = self._label, name
            try:
                return real(*args, **keywords)
            finally:
                self._label = before

        return call

    def _module_hooks(self, name: str) -> tuple[Any, Any]:
        def enter(module: nn.Module, args: Any) -> None:
            self._open.append((name, torch.autograd._get_sequence_nr()))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            own, first = self._open.pop()
            self._made.append((first, torch.autograd._get_sequence_nr(), own))

        return enter, leave

    def _place(self) -> tuple[str, str]:
        backward = torch._C._current_graph_task_id() != -1
        phase = "backward" if backward else "forward"
        if self._label is not None:
            return self._label, phase
        if not backward:
            return self._open[-1][0] if self._open else ROOT, phase
        node = torch._C._current_autograd_node()
        number = node._sequence_nr() if node is not None else -1
        made = [(end - first, name) for first, end, name in self._made if first <= number < end]
        return min(made)[1] if made else ROOT, phase


class _TimedWork(dist.Work):
    """A running collective that records when it ends, and how long the compute waits for it."""

    def __init__(self, work: Any, record: _Record, stamp: Callable[[], Event]) -> None:
        super().__init__()
        self._work, self._record, self._stamp = work, record, stamp

        def note_end(_: Any) -> None:
            record.end = stamp()

        work.get_future().add_done_callback(note_end)

    def wait(self, *args: Any, **keywords: Any) -> bool:
        began = self._stamp()
        done: bool = self._work.wait(*args, **keywords)
        self._record.waits.append((began, self._stamp()))
        return done


class _Operator:
    """An operator of torch that calls another function and keeps all other attributes."""

    def __init__(self, packet: Any, call: Any) -> None:
        self._packet, self._call = packet, call

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self._call(*args, **keywords)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._packet, name)


def _read_param_groups(module: FSDPModule) -> list[Any]:
    """Return fully_shard's groups of a module's parameters; torch 2.7 has one at most."""
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return list(groups)


# --- collectives that move no byte: the mode "noop" calls them in place of torch's own ----------


def _resolve_group(group: Any) -> Any:
    """Return the process group of an operator's argument: its name, or the group itself."""
    resolve: Any = dist.distributed_c10d._resolve_process_group
    return resolve(group) if isinstance(group, str) else group


class _Done(dist.Work):
    def wait(self, timeout: Any = None) -> bool:
        return True


def _leave_gather(
    output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
) -> Any:
    flat = input_tensor.reshape(-1)
    for slot in output_tensor.view(-1).split(flat.numel()):
        if slot.data_ptr() != flat.data_ptr():  # the input may be its own slot
            slot.copy_(flat)
    return _Done() if async_op else None


def _leave_scatter(
    output: Tensor,
    input: Tensor,  # noqa: A002
    op: Any = None,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    output.view(-1).copy_(input.view(-1).split(output.numel())[dist.get_rank(group)])
    return _Done() if async_op else None


def _leave_reduce(tensor: Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> Any:
    return _Done() if async_op else None


# functions of torch.distributed, operation, the argument with all of its bytes, replacement
FUNCTIONS: tuple[tuple[tuple[str, ...], str, str, Any], ...] = (
    (GATHERS, "all_gather", "output_tensor", _leave_gather),
    (SCATTERS, "reduce_scatter", "input", _leave_scatter),
    (("all_reduce",), "all_reduce", "tensor", _leave_reduce),
)
# torch's operator, operation, replacement
OPERATORS: tuple[tuple[str, str, Any], ...] = (
    ("all_reduce", "all_reduce", lambda tensor, op, group: tensor.clone()),
    (
        "all_gather_into_tensor",
        "all_gather",
        lambda tensor, size, group: torch.cat([tensor] * size),
    ),
    (
        "reduce_scatter_tensor",
        "reduce_scatter",
        lambda tensor, op, size, group: tensor.chunk(size)[_resolve_group(group).rank()].clone(),
    ),
)
