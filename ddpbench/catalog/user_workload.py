"""The user's own workload, package.module:function. Importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from ddpbench.catalog.task import RankSetup, Task
from ddpbench.launch.placement import Refused

if TYPE_CHECKING:
    import torch

RETURNS = "(model, batch, loss): a torch.nn.Module, batch(step) and loss(model, batch)"


def count_samples(batch: Any) -> int:
    """Return the first dimension of the first tensor in a batch; 1 if there is none."""
    import torch

    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.dim() else 1
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    return count_samples(batch[0]) if isinstance(batch, (list, tuple)) and batch else 1


def find_other_device(batch: Any, device: torch.device) -> torch.device | None:
    """Return the device of the first tensor in a batch that is not on this device; None without."""
    import torch

    if isinstance(batch, torch.Tensor):
        return None if batch.device == device else batch.device
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    parts = batch if isinstance(batch, (list, tuple)) else ()
    others = (find_other_device(part, device) for part in parts)
    return next((other for other in others if other is not None), None)


def import_function(name: str) -> Callable[..., Any]:
    """Import package.module:function. Raises ValueError with one sentence."""
    module, _, attribute = name.partition(":")
    try:
        function = getattr(import_module(module), attribute)
    except Exception as error:  # whatever the user's module raises
        lines = str(error).strip().splitlines() or ["no text"]
        raise ValueError(
            f"workload {name!r} cannot be imported ({type(error).__name__}: {lines[0]}): "
            "write package.module:function, with a module that Python can import from here"
        ) from error
    if not callable(function):
        raise ValueError(
            f"workload {name!r} is a {type(function).__name__}, not a function(rank, world_size, "
            f"device) that returns {RETURNS}"
        )
    return cast("Callable[..., Any]", function)


def build_task(name: str, function: Callable[..., Any], setup: RankSetup) -> Task:
    """Call the user's function in this rank. Raises Refused if it returns something else."""
    from torch import nn

    result = function(setup.rank, setup.world_size, setup.device)
    match result:
        case (nn.Module() as model, batch, loss) if callable(batch) and callable(loss):
            return Task(model.to(setup.device), batch, loss)
    parts = result if isinstance(result, tuple) else (result,)
    kinds = ", ".join(type(part).__name__ for part in parts)
    kinds = f"({kinds})" if isinstance(result, tuple) else kinds
    raise Refused(f"workload {name!r} must return {RETURNS}; it returned {kinds}")
