"""What a replica consists of: names and tensors, read where they lie, nothing touched."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddpbench.replicas.digest import Digests, number_type, of_bytes

KINDS = ("parameter", "gradient", "optimizer", "buffer")
IGNORED = "DDP was told to ignore it"


class Entry(NamedTuple):
    """One named thing of a replica."""

    name: str
    value: Any  # a tensor or a number; None where `dtype` is a text that says all there is
    dtype: Any
    shape: tuple[int, ...]
    device: str  # "cpu", "cuda", … ; "" of a number


@dataclass
class State:
    """The entries by kind, and why something is not among them."""

    entries: dict[str, list[Entry]]
    skipped: dict[str, str]  # "kind name" → why


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
    optimizer: torch.optim.Optimizer | None,
    gradients: bool,
) -> State:
    """All that can be compared of this rank's replica."""
    state = State({kind: [] for kind in KINDS}, {})
    outer, inner = wrapper(module), unwrap(module)
    ignored: set[str] = getattr(outer, "parameters_to_ignore", set())
    names: dict[Tensor, str] = {}
    for name, parameter in inner.named_parameters():
        names[parameter] = name
        if name in ignored:
            state.skipped[f"parameter {name}"] = IGNORED
            continue
        _add(state, "parameter", name, parameter)
        if gradients and parameter.grad is not None:
            _add(state, "gradient", name, parameter.grad)
    for name, buffer in inner.named_buffers():
        if name in ignored:
            state.skipped[f"buffer {name}"] = IGNORED
        else:
            _add(state, "buffer", name, buffer)
    if optimizer is not None:
        for name, value in _optimizer(optimizer, names):
            _add(state, "optimizer", name, value)
    return state


def _optimizer(
    optimizer: torch.optim.Optimizer, names: dict[Tensor, str]
) -> Iterator[tuple[str, Any]]:
    """Options of the groups, then the state of each parameter, by the parameter's name."""
    for g, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key not in ("params", "param_names"):
                yield from _within(f"param_groups[{g}].{key}", value)
        for p, parameter in enumerate(group["params"]):
            # `optimizer.state[parameter]` would make an empty entry.
            values = optimizer.state.get(parameter, None)
            if values:
                name = names.get(parameter, f"param_groups[{g}].params[{p}]")
                yield from _within(name, values)


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


def _add(state: State, kind: str, name: str, value: Any) -> None:
    if isinstance(value, Tensor):
        reason = _unreadable(value)
        if reason:
            state.skipped[f"{kind} {name}"] = reason
        else:
            entry = Entry(name, value, value.dtype, value.shape, value.device.type)
            state.entries[kind].append(entry)
    elif isinstance(value, _NUMBERS):
        state.entries[kind].append(Entry(name, value, number_type(value), (), ""))
    elif value is None or isinstance(value, str):
        state.entries[kind].append(Entry(name, None, repr(value), (), ""))
    else:
        state.skipped[f"{kind} {name}"] = f"a {type(value).__name__} is no tensor and no number"


def _unreadable(tensor: Tensor) -> str:
    """Why a tensor's elements cannot be read or are not meant to be equal; "" if they can."""
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        if hasattr(tensor, "to_local"):
            return "sharded: each rank holds a part of its own"
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
