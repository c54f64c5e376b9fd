"""A workload of the user's own: package.module:function. Importing this imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from ddpbench.catalog.task import Place, Task

WANTED = "(model, batch, loss): a torch.nn.Module, batch(step) and loss(model, batch)"


def samples(batch: Any) -> int:
    """The first dimension of the first tensor in a batch; 1 where there is none."""
    import torch

    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.dim() else 1
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    return samples(batch[0]) if isinstance(batch, (list, tuple)) and batch else 1


def imported(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    if "" not in sys.path:  # python -m looks in the current folder, the ddpbench script does not
        sys.path.append("")
    try:
        function = getattr(import_module(module), attribute)
    except Exception as error:  # whatever the user's module raises
        lines = str(error).strip().splitlines() or ["no text"]
        raise ValueError(
            f"workload {name!r} cannot be imported ({type(error).__name__}: {lines[0]}): "
            "give package.module:function of a module that Python finds from here"
        ) from error
    if not callable(function):
        raise ValueError(
            f"workload {name!r} is a {type(function).__name__}, not a function(rank, world_size, "
            f"device) that returns {WANTED}"
        )
    wanted: Callable[..., Any] = function
    return wanted


def built(name: str, function: Callable[..., Any], place: Place) -> Task:
    from torch import nn

    made = function(place.rank, place.world_size, place.device)
    match made:
        case (nn.Module() as model, batch, loss) if callable(batch) and callable(loss):
            return Task(model.to(place.device), batch, loss)
    parts = made if isinstance(made, tuple) else (made,)
    got = ", ".join(type(part).__name__ for part in parts)
    got = f"({got})" if isinstance(made, tuple) else got
    raise ValueError(f"workload {name!r} must return {WANTED}; it returned {got}")
