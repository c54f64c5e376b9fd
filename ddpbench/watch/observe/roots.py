"""Root modules of a training job: the outermost modules that own an optimizer's parameters."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CALL = "_compiled_call_impl"  # what a module calls in place of its usual call, if it is set


def find_roots(is_owner: Callable[[nn.Module], bool]) -> list[nn.Module]:
    """Return the outermost modules alive that are owners or have owners among their submodules.

    Wrappers such as DDP and torch.compile's are the outermost. Walks through all objects that
    Python's garbage collector knows: 30 to 100 ms for each million of them.
    """
    modules = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]
    # A module that is being made, or was unpickled in part, has no such attributes yet.
    modules = [
        one for one in modules if "_parameters" in one.__dict__ and "_modules" in one.__dict__
    ]
    parents: dict[int, list[nn.Module]] = {}
    for module in modules:
        for child in module._modules.values():
            parents.setdefault(id(child), []).append(module)
    return list(_climb(list(filter(is_owner, modules)), parents))


def is_distributed(module: nn.Module) -> bool:
    """Return whether a module is DDP's, or has a DTensor among its own parameters."""
    parameters = module._parameters.values()
    is_ddp = isinstance(module, DistributedDataParallel)
    return is_ddp or any(hasattr(one, "device_mesh") for one in parameters)


def _climb(modules: list[nn.Module], parents: dict[int, list[nn.Module]]) -> Iterator[nn.Module]:
    """Return the modules without parents above these."""
    seen = set()
    while modules:
        module = modules.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        above = parents.get(id(module), [])
        modules.extend(above)
        if not above:
            yield module


def list_parameters(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """Return an optimizer's parameters."""
    for group in optimizer.param_groups:
        yield from group["params"]


def wrap_call(
    module: nn.Module, begin: Callable[[], int], end: Callable[[int], None]
) -> Call | None:
    """Call `begin` before a module, and `end` with its result after it, even after an exception.

    Returns None if the module was compiled in place (Module.compile), which uses the same place.
    It is not a hook, because a hook would be pickled with the module, forbids torch.jit.script, and
    makes each call slower. This place is neither pickled nor copied, nor part of the state.
    """
    if getattr(module, CALL, None) is not None or not hasattr(nn.Module, CALL):
        return None
    return Call(module, begin, end)


class Call:
    """The wrapped call of a module."""

    def __init__(
        self, module: nn.Module, begin: Callable[[], int], end: Callable[[int], None]
    ) -> None:
        self.module = reference = weakref.ref(module)  # so that a dropped module is freed at once
        self.calls = 0

        def call(*args: Any, **kwargs: Any) -> Any:
            module: Any = reference()
            # Code that torch.compile traces must look as it would without this wrapper.
            if torch.compiler.is_compiling():
                return module._call_impl(*args, **kwargs)
            self.calls += 1
            mark = begin()
            try:
                return module._call_impl(*args, **kwargs)
            finally:
                end(mark)

        self._call = call
        module.__dict__[CALL] = call  # past __setattr__: torch.compile's wrapper passes it on

    def remove(self) -> None:
        """Restore the module, unless it was compiled in place since."""
        module = self.module()
        if module is not None and module.__dict__.get(CALL) is self._call:
            del module.__dict__[CALL]
