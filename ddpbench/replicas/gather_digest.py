"""The digests of a training state over all ranks that hold it: `ddpbench.digest_state`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ddpbench.replicas.arguments import Optimizers, as_tuple, check_types
from ddpbench.replicas.channel import Channel
from ddpbench.replicas.digest import of_bytes
from ddpbench.replicas.global_digest import digest_shard
from ddpbench.replicas.scopes import Base, Layout, find_offsets, find_scope
from ddpbench.replicas.sharding import (
    choose_target,
    describe_partial,
    is_dtensor,
    list_parameters,
    make_base,
    read_layout,
    read_local,
)
from ddpbench.replicas.state import explain_unreadable, shards_state, unwrap, wrapper
from ddpbench.replicas.state_digest import (
    StateDigest,
    TensorDigest,
    format_sums,
    format_value,
    name_dtype,
)

Form = list[Any] | str  # [dtype, shape] of a whole tensor, or the text of another value
_WRAPPERS = re.compile(r"(?<![^.])(_orig_mod|_checkpoint_wrapped_module)\.")


class _Shard(NamedTuple):
    """What this rank holds of a tensor."""

    tensor: Tensor
    shape: Sequence[int]  # of the whole tensor
    offsets: Sequence[int]  # of the first element
    layout: Layout | None


class _State:
    """The state in this rank: shards and forms by name, and why a tensor cannot be digested."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.shards: dict[str, _Shard] = {}
        self.forms: dict[str, Form] = {}
        self.meshes: list[DeviceMesh] = []
        self.objection = ""

    def add(self, name: str, value: Any) -> None:
        """Add a tensor, a value, or all items of a dict or of a list with tensors."""
        if isinstance(value, Tensor):
            self._add_tensor(name, value)
        elif isinstance(value, dict):
            for key, item in value.items():
                self.add(f"{name}.{key}", item)
        elif isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value):
            for number, item in enumerate(value):
                self.add(f"{name}.{number}", item)
        else:
            self.forms[name] = format_value(value)

    def _add_tensor(self, name: str, tensor: Any) -> None:
        layout, local = None, tensor
        if is_dtensor(tensor):
            layout, local = read_layout(tensor), read_local(tensor)
            self.meshes.append(tensor.device_mesh)
        shape = tuple(tensor.shape)
        self.forms[name] = [name_dtype(tensor), list(shape)]
        if layout and self.rank not in layout.grid.coordinates:
            return
        place = find_offsets(layout, self.rank, shape) if layout else (shape, [0] * len(shape))
        reason = (describe_partial(layout) if layout else "") or explain_unreadable(local)
        if not reason and (place is None or place[0] != tuple(local.shape)):
            reason = f"its shard does not follow from its placements {layout and layout.text}"
        if reason or place is None:
            self.objection = self.objection or f"{name} cannot be digested: {reason}"
        else:
            self.shards[name] = _Shard(local, shape, place[1], layout)


def digest_state(
    module: torch.nn.Module,
    optimizer: Optimizers = None,
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
) -> StateDigest:
    """Digest parameters, persistent buffers and the optimizer's state as whole tensors.

    The digests are equal for DistributedDataParallel, fully_shard, HSDP, tensor parallel and one
    process if they hold the same state. Call it in all ranks of `group` or `mesh` (default: as
    verify_replicas), which together must hold the whole state; all get the same result. It
    changes nothing, but fully_shard's modules are resharded, as by state_dict().

    One replica of each shard is read: replicas that differ are the business of verify_replicas.
    Tied weights count under each of their names, as in state_dict().

    Ranks exchange two numbers, and then three per tensor, in one all_reduce each. Beyond that the
    memory needed is 3 MiB on a CPU and 96 MiB on another device, and a copy of the shard if it is
    not contiguous.

    Raises TypeError for a wrong argument. Raises ValueError with one sentence, in all ranks, for a
    state that cannot be digested.
    """
    check_types(module=module, optimizer=optimizer, group=group, mesh=mesh)
    running = dist.is_available() and dist.is_initialized()
    state = _State(dist.get_rank() if running else 0)
    for name, value in _collect(module, as_tuple(optimizer)):
        state.add(name, value)
    target, root = choose_target(group or mesh, wrapper(module), state.meshes)
    channel = Channel(target, module)
    base = make_base(channel.ranks, channel.rank, target, root)
    forms, holders = _gather_forms(channel, state)
    values = {name: form for name, form in forms.items() if isinstance(form, str)}
    whole = {name: form for name, form in forms.items() if not isinstance(form, str)}
    sums = _gather_sums(channel, state, list(whole), base, holders)
    return StateDigest(_digest_tensors(whole, sums), values)


def _digest_tensors(
    forms: dict[str, list[Any]], sums: Sequence[Sequence[int]]
) -> dict[str, TensorDigest]:
    """Return the digests of whole tensors. Raises ValueError if the ranks do not hold all of one.

    sums: of each tensor, both sums and how many elements they are of.
    """
    tensors = {}
    for (name, (dtype, shape)), (*both, elements) in zip(forms.items(), sums, strict=True):
        if elements != prod(shape):
            raise ValueError(
                f"the ranks hold {elements} of the {prod(shape)} elements of {name}: "
                "call digest_state in all ranks of its mesh"
            )
        tensors[name] = TensorDigest(dtype, tuple(shape), format_sums(both))
    return tensors


def _collect(
    module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> Iterator[tuple[str, Any]]:
    """Yield names and values of the state, as torch.distributed.checkpoint names them."""
    inner = unwrap(module)
    if any(type(part).__name__ == "FullyShardedDataParallel" for part in inner.modules()):
        raise ValueError("FullyShardedDataParallel cannot be digested: use fully_shard")
    for name, value in inner.state_dict().items():
        yield f"model.{_clean(name)}", value
    names = {parameter: _clean(name) for name, parameter, _ in list_parameters(inner)}
    number = 0
    for optimizer in optimizers:
        inside: Any = optimizer
        states = (inside.optim if shards_state(optimizer) else optimizer).state
        for group in optimizer.param_groups:
            prefix = f"optim.param_groups.{number}"
            for place, parameter in enumerate(group["params"]):
                name = names.get(parameter, f"{prefix}.params.{place}")
                yield f"optim.group_of.{name}", number
                yield f"optim.state.{name}", states.get(parameter, {})
            yield prefix, {k: v for k, v in group.items() if k not in ("params", "param_names")}
            number += 1


def _clean(name: str) -> str:
    """Return a name without the parts that torch.compile and checkpointing add."""
    return _WRAPPERS.sub("", name)


def _gather_forms(
    channel: Channel, state: _State
) -> tuple[dict[str, Form], dict[str, list[int]] | None]:
    """Return the forms of all ranks' states, and which ranks hold a name; None: all.

    Ranks hold other names with pipeline stages and ZeroRedundancyOptimizer. Of a value that
    differs between ranks, that of the first one counts.
    """
    own = of_bytes(json.dumps(list(state.forms.items())).encode()) >> 1
    flags = np.array([own, bool(state.objection)], np.int64)
    least, most = channel.gather_extremes(flags)
    if least[0] == most[0] and not most[1]:
        return state.forms, None
    forms: dict[str, Form] = {}
    holders: dict[str, list[int]] = {}
    everyone = channel.gather_objects([state.forms, state.objection])
    for rank, (held, objection) in zip(channel.ranks, everyone, strict=True):
        if objection:
            raise ValueError(objection)
        for name, form in held.items():
            if forms.setdefault(name, form) != form and not isinstance(form, str):
                raise ValueError(
                    f"{name} is {_name_form(forms[name])} in rank {holders[name][0]} and "
                    f"{_name_form(form)} in rank {rank}: build the same module in all ranks"
                )
            holders.setdefault(name, []).append(rank)
    return forms, holders


def _name_form(form: Form) -> str:
    return form if isinstance(form, str) else f"{form[0]} {tuple(form[1])}"


def _gather_sums(
    channel: Channel,
    state: _State,
    names: Sequence[str],
    base: Base,
    holders: dict[str, list[int]] | None,
) -> list[list[int]]:
    """Return both sums of each tensor, and how many elements they are of."""
    parts = {}
    for number, name in enumerate(names):
        shard = state.shards.get(name)
        if shard is None:
            continue
        scope = find_scope(base, shard.layout).ranks
        copies = [rank for rank in scope if holders is None or rank in holders[name]]
        if copies[0] == base.rank:
            parts[number] = shard
    sums = [digest_shard(each.tensor, each.shape, each.offsets) for each in parts.values()]
    rows = np.zeros((len(names), 3), np.int64)
    for number, shard, part in zip(parts, parts.values(), sums, strict=True):
        rows[number] = *part.tolist(), shard.tensor.numel()
    return channel.gather_sums(rows.ravel()).reshape(-1, 3).tolist()
