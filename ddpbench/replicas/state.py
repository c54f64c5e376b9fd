"""The state of a replica: names and tensors, without copies. Nothing is changed."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ddpbench.replicas.digest import Digests, number_type, of_bytes
from ddpbench.replicas.report import NotCompared
from ddpbench.replicas.scopes import Layout
from ddpbench.replicas.sharding import (
    WAITING,
    Held,
    describe_partial,
    is_dtensor,
    list_parameters,
    read_layout,
    read_local,
)

KINDS = ("parameter", "gradient", "optimizer", "buffer")
IGNORED = "DDP is set to ignore it"
SHARDED = "sharded: each rank holds its own part"


class Entry(NamedTuple):
    """One named tensor or value of a replica."""

    name: str
    value: Any  # a tensor or a number; None if `dtype` is the text of another value
    dtype: Any
    shape: tuple[int, ...]
    device: str  # "cpu", "cuda", …; "" for a number
    layout: Layout | None = None  # of a DTensor: `shape` is that of the whole, `value` this shard


@dataclass
class State:
    """The entries by kind, and the tensors and values that cannot be compared."""

    entries: dict[str, list[Entry]]
    not_compared: list[NotCompared]
    parameters: list[Held] = field(default_factory=list)
    meshes: list[DeviceMesh] = field(default_factory=list)  # of DTensors; the same one many times
    held_once: Counter[str] = field(default_factory=Counter)  # by kind, outside the entries


@dataclass(frozen=True)
class Structure:
    """Digests of the structure, which must be equal before contents can be compared."""

    digest: int  # int64, of all names, dtypes, shapes and devices in order
    salts: Digests  # uint64[n], one per entry


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside DistributedDataParallel and torch.compile."""
    while True:
        inner = getattr(module, "_orig_mod", None)
        if isinstance(module, DistributedDataParallel):
            inner = module.module
        if not isinstance(inner, torch.nn.Module):
            return module
        module = inner


def wrapper(module: torch.nn.Module) -> DistributedDataParallel | None:
    """Return the DistributedDataParallel, which torch.compile may wrap; None if there is none."""
    while not isinstance(module, DistributedDataParallel):
        inner = getattr(module, "_orig_mod", None)
        if not isinstance(inner, torch.nn.Module):
            return None
        module = inner
    return module


def collect(
    module: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    gradients: bool,
) -> State:
    """Collect the state of this rank's replica."""
    state = State({kind: [] for kind in KINDS}, [])
    outer, inner = wrapper(module), unwrap(module)
    ignored: set[str] = getattr(outer, "parameters_to_ignore", set())
    sharded = _sharded(inner)
    names: dict[Tensor, str] = {}
    state.parameters += list_parameters(inner)
    for name, parameter, waiting in state.parameters:
        names[parameter] = name
        reason = IGNORED if name in ignored else SHARDED if parameter in sharded else ""
        _add(state, "parameter", name, parameter, reason)
        if gradients and (waiting or parameter.grad is not None):
            _add(state, "gradient", name, parameter.grad, WAITING if waiting else reason)
    for name, buffer in inner.named_buffers():
        _add(state, "buffer", name, buffer, IGNORED if name in ignored else "")
    for number, optimizer in enumerate(optimizers):
        prefix = f"optimizers[{number}]." if len(optimizers) > 1 else ""
        for name, value in _options(optimizer):
            _add(state, "optimizer", prefix + name, value)
        if shards_state(optimizer):
            state.held_once["optimizer"] += sum(len(g["params"]) for g in optimizer.param_groups)
            continue
        for owner, name, value in _states(optimizer, names):
            _add(state, "optimizer", prefix + name, value, SHARDED if owner in sharded else "")
    return state


def _sharded(module: torch.nn.Module) -> set[Tensor]:
    """Return the parameters that FullyShardedDataParallel shards as plain tensors.

    The parameters of fully_shard are DTensors; `_explain_unreadable` recognises those.
    """
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
    kind = getattr(optim, "ZeroRedundancyOptimizer", ())
    return isinstance(optimizer, kind)


def is_option(name: str) -> bool:
    """Return whether a name of kind "optimizer" belongs to an option, such as lr, not to state."""
    return re.match(r"(optimizers\[\d+\]\.)?param_groups\[\d+\]\.(?!params\[)", name) is not None


def _options(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    for g, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key not in ("params", "param_names"):
                yield from _within(f"param_groups[{g}].{key}", value)


def _states(
    optimizer: torch.optim.Optimizer, names: dict[Tensor, str]
) -> Iterator[tuple[Tensor | None, str, Any]]:
    others = dict(optimizer.state)
    for g, group in enumerate(optimizer.param_groups):
        for p, parameter in enumerate(group["params"]):
            name = names.get(parameter, f"param_groups[{g}].params[{p}]")
            for path, value in _within(name, others.pop(parameter, {})):
                yield parameter, path, value
    for path, value in _within("state", others):
        yield None, path, value


def _within(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for i, (key, item) in enumerate(value.items()):
            # The text of an object differs between processes; its position does not.
            yield from _within(f"{name}.{key if isinstance(key, (str, int)) else i}", item)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _within(f"{name}[{i}]", item)
    else:
        yield name, value


_NUMBERS = (bool, int, float, complex)
_OPAQUE = re.compile(r"torch\.(bits|float4|u?int[1-7]$)")  # dtypes torch cannot copy or show


def _add(state: State, kind: str, name: str, value: Any, reason: str = "") -> None:
    if isinstance(value, Tensor):
        whole: Any = value
        layout = None
        if not reason and is_dtensor(value):
            layout, value = read_layout(value), read_local(value)
            reason = describe_partial(layout)
            state.meshes.append(whole.device_mesh)
        reason = reason or _explain_unreadable(value)
    elif not (value is None or isinstance(value, (str, *_NUMBERS))):
        reason = reason or f"a {type(value).__name__} is neither a tensor nor a number"
    if reason:
        state.not_compared.append(NotCompared(kind, name, reason))
    elif isinstance(value, Tensor):
        entry = Entry(name, value, value.dtype, whole.shape, value.device.type, layout)
        state.entries[kind].append(entry)
    elif isinstance(value, _NUMBERS):
        state.entries[kind].append(Entry(name, value, number_type(value), (), ""))
    else:
        state.entries[kind].append(Entry(name, None, repr(value), (), ""))


def _explain_unreadable(tensor: Tensor) -> str:
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        if torch.nn.parameter.is_lazy(tensor):
            return "not initialised yet"
        if hasattr(type(tensor), "__tensor_flatten__"):
            return f"a {type(tensor).__name__} has no memory for its elements"
    if tensor.layout is not torch.strided or tensor.is_nested:
        return "a nested tensor" if tensor.is_nested else f"its layout is {tensor.layout}"
    if tensor.is_meta or (tensor.numel() and tensor.data_ptr() == 0):
        return "it has no memory"
    if tensor.is_quantized:
        return "quantized"
    no_copy = tensor.dtype is torch.complex32 and not tensor.is_contiguous()
    opaque = no_copy or _OPAQUE.match(str(tensor.dtype))
    return f"torch cannot read its dtype, {tensor.dtype}" if opaque else ""


def row(entry: Entry) -> str:
    """Return dtype, shape and device of an entry: "float32 (3, 2) cpu"."""
    if entry.value is None:
        return str(entry.dtype)
    parts = [str(entry.dtype).removeprefix("torch."), str(tuple(entry.shape)), entry.device]
    parts.append(entry.layout.text if entry.layout else "")
    return " ".join(filter(None, parts))


def structure(kind: str, entries: Sequence[Entry]) -> Structure:
    """Return the structure of the entries of a kind."""
    return _structure(
        kind,
        tuple(
            (e.name, e.dtype, e.shape, e.device, e.layout.text if e.layout else "") for e in entries
        ),
    )


@lru_cache(maxsize=32)  # it is the same in every step, and a lookup is ten times cheaper
def _structure(
    kind: str, rows: tuple[tuple[str, Any, tuple[int, ...], str, str], ...]
) -> Structure:
    texts = [
        json.dumps([kind, name, str(dtype), list(shape), device, *filter(None, [layout])])
        for name, dtype, shape, device, layout in rows
    ]
    salts = np.array([of_bytes(text.encode()) for text in texts], np.uint64)
    whole = of_bytes("\n".join(texts).encode())
    return Structure(int(np.uint64(whole).astype(np.int64)), salts)
