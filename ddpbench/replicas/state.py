"""The state of a replica: names, tensors and numbers, without copies. Nothing is changed.

DTensors are recognised by their attributes, because torch.distributed.tensor is slow to import and
a module without DTensors does not need it.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ddpbench.replicas.channel import read_grid
from ddpbench.replicas.digest import Digests, as_tensor, of_bytes
from ddpbench.replicas.scopes import Layout

IGNORED = "DDP is set to ignore it"
SHARDED = "sharded: each rank holds its own part"
# fully_shard keeps these gradients unsharded, or not yet reduced over all replicas.
WAITING = "not synchronised yet: fully_shard reduces it after the last micro-batch"
_NUMBERS = (bool, int, float, complex)


class Held(NamedTuple):
    """A parameter of a module as the optimizer knows it."""

    name: str
    parameter: torch.nn.Parameter
    waiting: bool  # its gradient is not synchronised yet


class Kind(NamedTuple):
    """The severity of a tensor that differs between ranks, and of one that is not finite."""

    if_differs: str = "error"
    if_nonfinite: str = "error"


# To check another kind of tensor, add an entry here, and yield its tensors in `_list_items`.
KINDS = {
    "parameter": Kind(),
    "gradient": Kind(if_nonfinite="warning"),  # a loss scaler skips the step of infinite gradients
    "optimizer": Kind(),
    "buffer": Kind("warning", "note"),  # it may be a mask of -inf
}


def _list_items(
    module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> Iterator[tuple[str, str, Any, str]]:
    """Yield kind, name, value and, if it cannot be compared, the reason, of all that is compared.

    A value is a tensor, a number, a text or None. Its name is the same in all ranks.
    """
    inner = unwrap(module)
    ignored: set[str] = getattr(wrapper(module), "parameters_to_ignore", set())
    sharded = _find_sharded(inner)
    names: dict[Tensor, str] = {}
    for name, parameter, waiting in list_parameters(inner):
        names[parameter] = name
        reason = IGNORED if name in ignored else SHARDED if parameter in sharded else ""
        yield "parameter", name, parameter, reason
        if waiting or parameter.grad is not None:
            yield "gradient", name, parameter.grad, WAITING if waiting else reason
    for name, buffer in inner.named_buffers():
        yield "buffer", name, buffer, IGNORED if name in ignored else ""
    for number, optimizer in enumerate(optimizers):
        prefix = f"optimizers[{number}]." if len(optimizers) > 1 else ""
        for g, group in enumerate(optimizer.param_groups):
            options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
            for name, value in _flatten(f"param_groups[{g}]", options):
                yield "optimizer", prefix + name, value, ""
        for owner, name, value in [] if shards_state(optimizer) else _list_state(optimizer, names):
            # Other numbers may be a rank's own, such as LBFGS's loss. Those that reach a parameter
            # make that differ.
            if not isinstance(value, _NUMBERS) or name.endswith(".step"):
                yield "optimizer", prefix + name, value, SHARDED if owner in sharded else ""


def _list_state(
    optimizer: torch.optim.Optimizer, names: dict[Any, str]
) -> Iterator[tuple[Tensor | None, str, Any]]:
    """Yield the parameter of each value of the state, its name, and the value."""
    others = dict(optimizer.state)
    for g, group in enumerate(optimizer.param_groups):
        for p, parameter in enumerate(group["params"]):
            name = names.get(parameter, f"param_groups[{g}].params[{p}]")
            for path, value in _flatten(name, others.pop(parameter, {})):
                yield parameter, path, value
    for path, value in _flatten("state", others):
        yield None, path, value


def _flatten(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values within dictionaries and lists, with their paths as names."""
    if isinstance(value, dict):
        for i, (key, item) in enumerate(value.items()):
            # The text of an object differs between processes; its position does not.
            yield from _flatten(f"{name}.{key if isinstance(key, (str, int)) else i}", item)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _flatten(f"{name}[{i}]", item)
    else:
        yield name, value


# --- the state


@dataclass(slots=True)
class Entry:
    """One named tensor or value of a replica, and what was read of it."""

    name: str
    tensor: Tensor | None  # None if `dtype` is the text of another value
    dtype: Any
    shape: tuple[int, ...] = ()
    device: str = ""  # "cpu", "cuda", …; "" for a number
    layout: Layout | None = None  # of a DTensor: `shape` is that of the whole, `tensor` this shard
    whole: Any = None  # the DTensor
    frozen: bool = False  # a parameter with requires_grad=False
    digest: int = 0
    nonfinite: int = 0  # number of elements; 0 if this rank has not looked

    @property
    def nbytes(self) -> int:
        """The size of this rank's part; 8 for a number or a text."""
        return self.tensor.nbytes if self.tensor is not None and self.device else 8

    def describe(self) -> str:
        """Return dtype, shape, device and what else must be alike: "float32 (3, 2) cpu"."""
        if self.tensor is None:
            return str(self.dtype)
        parts = [str(self.dtype).removeprefix("torch."), str(tuple(self.shape)), self.device]
        parts += [self.layout.text if self.layout else "", "frozen" if self.frozen else ""]
        return " ".join(filter(None, parts))


@dataclass(frozen=True)
class NotCompared:
    """A tensor or value that could not be compared."""

    kind: str
    name: str
    reason: str  # "sharded: each rank holds its own part"


@dataclass
class State:
    """The entries by kind, and the tensors and values that cannot be compared."""

    entries: dict[str, list[Entry]]
    held_once: Counter[str]  # number of tensors by kind, outside the entries
    not_compared: list[NotCompared] = field(default_factory=list)
    meshes: list[DeviceMesh] = field(default_factory=list)  # of DTensors; the same one many times


def read_state(module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> State:
    """Read the state of this rank's replica."""
    sharded = [group for o in optimizers if shards_state(o) for group in o.param_groups]
    held_once = Counter(optimizer=sum(len(group["params"]) for group in sharded))
    state = State({kind: [] for kind in KINDS}, held_once)
    for kind, name, value, reason in _list_items(module, optimizers):
        local, layout = value, None
        if is_dtensor(value):
            local, layout = _read_local(value), make_layout(value.device_mesh, value.placements)
            state.meshes.append(value.device_mesh)
        reason = reason or _explain_unreadable(local, layout)
        if reason:
            state.not_compared.append(NotCompared(kind, name, reason))
        elif isinstance(value, Tensor):
            frozen = kind == "parameter" and not value.requires_grad
            device = local.device.type
            shape, whole = value.shape, None if layout is None else value
            entry = Entry(name, local, local.dtype, shape, device, layout, whole, frozen)
            state.entries[kind].append(entry)
        elif isinstance(value, _NUMBERS):
            number = as_tensor(value)
            state.entries[kind].append(Entry(name, number, number.dtype))
        else:
            state.entries[kind].append(Entry(name, None, repr(value)))
    return state


def _explain_unreadable(tensor: Any, layout: Layout | None) -> str:
    """Return why a value cannot be compared; "" if it can."""
    if not isinstance(tensor, Tensor):
        known = tensor is None or isinstance(tensor, (str, *_NUMBERS))
        return "" if known else f"a {type(tensor).__name__} is neither a tensor nor a number"
    if layout is not None and layout.partial:
        return f"not reduced: its placement is Partial along {' and '.join(layout.partial)}"
    if torch.nn.parameter.is_lazy(tensor):
        return "not initialised yet"
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return f"its layout is {tensor.layout}, its dtype {tensor.dtype}"
    wraps = type(tensor) is not Tensor and hasattr(type(tensor), "__tensor_flatten__")
    if wraps or tensor.is_meta or (tensor.numel() and tensor.data_ptr() == 0):
        return "it has no memory"
    return ""


def digest_structure(kind: str, entries: Sequence[Entry]) -> tuple[int, Digests]:
    """Return digests of what entries are like: of all entries of a kind, and of each.

    Contents can be compared only if these are equal.
    """
    rows = (
        (e.name, e.dtype, e.shape, e.device, e.layout and e.layout.text, e.frozen) for e in entries
    )
    return _digest_rows(kind, tuple(rows))


@lru_cache(maxsize=32)  # it is the same in every step, and a lookup is ten times cheaper
def _digest_rows(kind: str, rows: tuple[tuple[Any, ...], ...]) -> tuple[int, Digests]:
    texts = [repr((kind, *row)).encode() for row in rows]
    return of_bytes(b"\n".join(texts)), np.array([*map(of_bytes, texts)], np.uint64)


# --- wrappers, DTensors and fully_shard


def _peel(module: Any) -> Iterator[torch.nn.Module]:
    """Yield a module and what DistributedDataParallel and torch.compile wrap, the inmost last."""
    while isinstance(module, torch.nn.Module):
        yield module
        is_ddp = isinstance(module, DistributedDataParallel)
        module = module.module if is_ddp else getattr(module, "_orig_mod", None)


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside DistributedDataParallel and torch.compile."""
    *_, inner = _peel(module)
    return inner


def wrapper(module: torch.nn.Module) -> DistributedDataParallel | None:
    """Return the DistributedDataParallel, which torch.compile may wrap; None if there is none."""
    return next((m for m in _peel(module) if isinstance(m, DistributedDataParallel)), None)


def _find_sharded(module: torch.nn.Module) -> set[Tensor]:
    """Return the parameters that FullyShardedDataParallel shards as plain tensors."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # if not imported, no module uses it
    if fsdp is None:
        return set()
    kept = fsdp.ShardingStrategy.NO_SHARD
    return {
        parameter
        for part in module.modules()
        if isinstance(part, fsdp.FullyShardedDataParallel) and part.sharding_strategy != kept
        for parameter in part.parameters()
    }


def shards_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether each rank holds only a part of the optimizer's state."""
    optim: Any = sys.modules.get("torch.distributed.optim")
    return isinstance(optimizer, getattr(optim, "ZeroRedundancyOptimizer", ()))


def is_option(name: str) -> bool:
    """Return whether a name of kind "optimizer" belongs to an option, such as lr, not to state."""
    return re.match(r"(optimizers\[\d+\]\.)?param_groups\[\d+\]\.(?!params\[)", name) is not None


def is_dtensor(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor."""
    kind = type(tensor)
    return kind is not Tensor and hasattr(kind, "device_mesh") and hasattr(kind, "placements")


def _read_local(tensor: Any) -> Tensor:
    local: Tensor = tensor._local_tensor  # to_local() wraps it anew in each call
    wait = getattr(local, "wait", None)  # a collective may still run
    return local if wait is None else cast(Tensor, wait())


@lru_cache(maxsize=256)
def make_layout(mesh: DeviceMesh, placements: tuple[Any, ...]) -> Layout:
    """Return the layout of a DTensor; the same object for the same mesh and placements."""
    grid = read_grid(mesh)
    named = list(zip(grid.names, grid.shape, placements, strict=True))
    return Layout(
        grid,
        # Of a _StridedShard, is_shard() differs by version.
        tuple(each.is_shard() or hasattr(each, "split_factor") for each in placements),
        tuple(name for name, _, placement in named if placement.is_partial()),
        ", ".join(f"{placement!r} on {name}={size}" for name, size, placement in named),
    )


def find_offsets(entry: Entry) -> list[int] | None:
    """Return where this rank's shard begins in a DTensor; None if it is not contiguous there."""
    from torch.distributed.tensor import _utils  # slow to import

    mesh, placements = entry.whole.device_mesh, entry.whole.placements
    shape, offsets = _utils.compute_local_shape_and_global_offset(entry.shape, mesh, placements)
    known = entry.tensor is not None and tuple(shape) == tuple(entry.tensor.shape)
    return list(offsets) if known else None


def list_parameters(module: torch.nn.Module) -> Iterator[Held]:
    """Yield the parameters of an unwrapped module.

    After a forward without resharding, fully_shard leaves gathered copies in the module. The
    shards, which the optimizer updates, are yielded in their place.
    """
    shards = _find_shards(module)
    for name, parameter in module.named_parameters():
        shard, waiting = shards.get(id(parameter), (parameter, False))
        yield Held(name, shard, waiting)


def _find_shards(module: torch.nn.Module) -> dict[int, tuple[torch.nn.Parameter, bool]]:
    """Return fully_shard's shards, and whether a gradient waits, by id of shard and copy."""
    shards: dict[int, tuple[torch.nn.Parameter, bool]] = {}
    if "torch.distributed.fsdp" not in sys.modules:
        return shards
    for part in module.modules():
        get_state: Any = getattr(part, "_get_fsdp_state", None)
        if get_state is None:
            continue
        state = get_state()
        groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.7 has one
        for group in [state._fsdp_param_group] if groups is None else groups:
            unreduced = getattr(group, "_partial_reduce_output", None) is not None
            for each in getattr(group, "fsdp_params", ()):
                copy: Any = getattr(each, "_unsharded_param", each.sharded_param)
                summed = getattr(each, "unsharded_accumulated_grad", None)
                if copy is not each.sharded_param:
                    summed = copy.grad if summed is None else summed
                held = each.sharded_param, unreduced or summed is not None
                shards[id(each.sharded_param)] = shards[id(copy)] = held
    return shards
