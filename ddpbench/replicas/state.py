"""What a replica consists of: names and tensors, read where they lie, nothing touched."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddpbench.replicas.digest import Digests, number_type, of_bytes
from ddpbench.replicas.report import NotCompared

KINDS = ("parameter", "gradient", "optimizer", "buffer")
IGNORED = "DDP was told to ignore it"
SHARDED = "sharded: each rank holds a part of its own"
DTENSOR = "a DTensor: its placements say which ranks hold what"


class Entry(NamedTuple):
    """One named thing of a replica."""

    name: str
    value: Any  # a tensor or a number; None where `dtype` is a text that says all there is
    dtype: Any
    shape: tuple[int, ...]
    device: str  # "cpu", "cuda", … ; "" of a number


@dataclass
class State:
    """The entries by kind, and what is not among them."""

    entries: dict[str, list[Entry]]
    not_compared: list[NotCompared]


@dataclass(frozen=True)
class Structure:
    """What must be equal before contents can be compared."""

    digest: int  # int64, of all names, dtypes, shapes and devices, in order
    salts: Digests  # uint64[n], one for each entry


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """The user's own module: without DistributedDataParallel and torch.compile around it."""
    while True:
        inner = getattr(module, "_orig_mod", None)
        if isinstance(module, DistributedDataParallel):
            inner = module.module
        if not isinstance(inner, torch.nn.Module):
            return module
        module = inner


def wrapper(module: torch.nn.Module) -> DistributedDataParallel | None:
    """The DistributedDataParallel around a module, or inside torch.compile's wrapper."""
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
    """All that can be compared of this rank's replica."""
    state = State({kind: [] for kind in KINDS}, [])
    outer, inner = wrapper(module), unwrap(module)
    ignored: set[str] = getattr(outer, "parameters_to_ignore", set())
    sharded = _sharded(inner)
    names: dict[Tensor, str] = {}
    for name, parameter in inner.named_parameters():
        names[parameter] = name
        reason = IGNORED if name in ignored else SHARDED if parameter in sharded else ""
        _add(state, "parameter", name, parameter, reason)
        if gradients and parameter.grad is not None:
            _add(state, "gradient", name, parameter.grad, reason)
    for name, buffer in inner.named_buffers():
        _add(state, "buffer", name, buffer, IGNORED if name in ignored else "")
    for number, optimizer in enumerate(optimizers):
        prefix = f"optimizers[{number}]." if len(optimizers) > 1 else ""
        for name, value in _options(optimizer):
            _add(state, "optimizer", prefix + name, value)
        if shards_state(optimizer):
            state.not_compared.append(NotCompared("optimizer", f"{prefix}state", SHARDED))
            continue
        for owner, name, value in _states(optimizer, names):
            _add(state, "optimizer", prefix + name, value, SHARDED if owner in sharded else "")
    return state


def _sharded(module: torch.nn.Module) -> set[Tensor]:
    """The parameters of which FullyShardedDataParallel leaves each rank a part, as plain tensors.

    fully_shard's are DTensors, which show it themselves.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # not imported: no module is one
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
    """Whether each rank holds the state of a part of the parameters only."""
    optim: Any = sys.modules.get("torch.distributed.optim")
    kind = getattr(optim, "ZeroRedundancyOptimizer", ())
    return isinstance(optimizer, kind)


def is_option(name: str) -> bool:
    """Whether a name of kind "optimizer" is of an option, such as lr, rather than of a state."""
    return re.match(r"(optimizers\[\d+\]\.)?param_groups\[\d+\]\.(?!params\[)", name) is not None


def _options(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """The options of the groups, such as lr."""
    for g, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key not in ("params", "param_names"):
                yield from _within(f"param_groups[{g}].{key}", value)


def _states(
    optimizer: torch.optim.Optimizer, names: dict[Tensor, str]
) -> Iterator[tuple[Tensor, str, Any]]:
    """The state of each parameter, by the parameter's name."""
    for g, group in enumerate(optimizer.param_groups):
        for p, parameter in enumerate(group["params"]):
            # `optimizer.state[parameter]` would make an empty entry.
            values = optimizer.state.get(parameter, None)
            if values:
                name = names.get(parameter, f"param_groups[{g}].params[{p}]")
                for each, value in _within(name, values):
                    yield parameter, each, value


def _within(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Tensors and numbers in nested dicts and lists."""
    if isinstance(value, dict):
        for i, (key, item) in enumerate(value.items()):
            # A key that is an object has no name that is the same in another process.
            yield from _within(f"{name}.{key if isinstance(key, (str, int)) else i}", item)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _within(f"{name}[{i}]", item)
    else:
        yield name, value


_NUMBERS = (bool, int, float, complex)


def _add(state: State, kind: str, name: str, value: Any, reason: str = "") -> None:
    """Add an entry; with a reason, or where there is nothing to read, as not compared."""
    if isinstance(value, Tensor):
        reason = reason or _unreadable(value)
    elif not (value is None or isinstance(value, (str, *_NUMBERS))):
        reason = reason or f"a {type(value).__name__} is no tensor and no number"
    if reason:
        state.not_compared.append(NotCompared(kind, name, reason))
    elif isinstance(value, Tensor):
        entry = Entry(name, value, value.dtype, value.shape, value.device.type)
        state.entries[kind].append(entry)
    elif isinstance(value, _NUMBERS):
        state.entries[kind].append(Entry(name, value, number_type(value), (), ""))
    else:
        state.entries[kind].append(Entry(name, None, repr(value), (), ""))


def _unreadable(tensor: Tensor) -> str:
    """Why a tensor's elements cannot be read or are not meant to be equal; "" if they can."""
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        if hasattr(tensor, "to_local"):
            return DTENSOR
        if torch.nn.parameter.is_lazy(tensor):
            return "not initialised yet"
        if hasattr(type(tensor), "__tensor_flatten__"):
            return f"a {type(tensor).__name__} has no elements in memory of its own"
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}"
    if tensor.is_meta or (tensor.numel() and tensor.data_ptr() == 0):
        return "it has no memory"
    return "" if not tensor.is_quantized else "quantized"


def row(entry: Entry) -> str:
    """What an entry is, in words: "float32 (3, 2) cpu"."""
    if entry.value is None:
        return str(entry.dtype)
    words = [str(entry.dtype).removeprefix("torch."), str(tuple(entry.shape)), entry.device]
    return " ".join(word for word in words if word)


def structure(kind: str, entries: Sequence[Entry]) -> Structure:
    """The structure of the entries of a kind."""
    return _structure(kind, tuple((e.name, e.dtype, e.shape, e.device) for e in entries))


@lru_cache(maxsize=32)  # the same in every step: looking it up is ten times cheaper
def _structure(kind: str, rows: tuple[tuple[str, Any, tuple[int, ...], str], ...]) -> Structure:
    texts = [
        json.dumps([kind, name, str(dtype), list(shape), device])
        for name, dtype, shape, device in rows
    ]
    salts = np.array([of_bytes(text.encode()) for text in texts], np.uint64)
    whole = of_bytes("\n".join(texts).encode())
    return Structure(int(np.uint64(whole).astype(np.int64)), salts)
