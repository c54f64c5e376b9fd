"""Checks of the arguments of verify_replicas and Verifier."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import GroupMember, ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
_NONE = type(None)
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "module": ((torch.nn.Module,), "a torch.nn.Module"),
    "optimizer": (
        (torch.optim.Optimizer, _NONE),
        "a torch.optim.Optimizer, a list of them or None",
    ),
    "group": ((ProcessGroup, _NONE), "a process group or None"),
    "mesh": ((DeviceMesh, _NONE), "a DeviceMesh or None"),
    "gradients": ((bool, _NONE), "True, False or None"),
    "finite": ((bool,), "True or False"),
    "locate": ((int,), "a whole number"),
    "trace_nonfinite": ((bool,), "True or False"),
}


def check_types(**arguments: object) -> None:
    """Raise TypeError for the first argument of a wrong type, ValueError for a group and a mesh."""
    for name, value in arguments.items():
        types, allowed = _TYPES[name]
        if name == "group" and value is GroupMember.NON_GROUP_MEMBER:
            continue  # Channel refuses it: this rank is not in the group
        if name == "optimizer" and isinstance(value, (list, tuple)):
            wrong = [type(item) for item in value if not isinstance(item, torch.optim.Optimizer)]
            if wrong:
                raise TypeError(f"{name} must be {allowed}, not a list with a {wrong[0].__name__}")
        elif not isinstance(value, types):
            raise TypeError(f"{name} must be {allowed}, not of type {type(value).__name__}")
    if arguments.get("group") is not None and arguments.get("mesh") is not None:
        raise ValueError("group and mesh both name the ranks to compare: pass one of them")


def as_step_number(step: Any) -> int:
    """Convert a step to int; numpy's integers and integer tensors are allowed, too."""
    try:
        return operator.index(step)
    except TypeError:
        raise TypeError(f"step must be a whole number, not {step!r}") from None


def as_tuple(optimizer: Optimizers) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers of one, several or none."""
    if optimizer is None:
        return ()
    return (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer)
