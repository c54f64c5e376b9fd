"""Functions and modules whose calls a watch observes by replacing them, and counts of calls."""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

CALL = "_compiled_call_impl"  # what a module calls in place of its usual call, if it is set


def replace(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Callable[[], None]:
    """Replace an attribute by a wrapper of it. Return how to undo that.

    Undoing it leaves the attribute alone if somebody else has replaced it since.
    """
    original = vars(owner)[name]  # a method of C++ as it was, and not bound to the class
    wrapper = wrap(original)
    setattr(owner, name, wrapper)

    def restore() -> None:
        if getattr(owner, name) is wrapper:
            setattr(owner, name, original)

    return restore


def find_waits() -> Iterator[tuple[Any, str]]:
    """Yield the functions in which a thread waits for collectives: an owner and a name.

    Only of what is imported already. Over MPI, a synchronous call itself waits.
    """
    yield dist, "_broadcast_coalesced"  # DDP's of its buffers
    yield torch._C.Future, "wait"
    if functional := sys.modules.get("torch.distributed._functional_collectives"):
        yield functional, "wait_tensor"
    if over_mpi := sys.modules.get("ddpbench.mpi_backend.collectives"):
        for name in vars(over_mpi.Collectives).keys() & vars(dist.ProcessGroup).keys():
            if callable(getattr(dist.ProcessGroup, name)):
                yield over_mpi.Collectives, name
    works = [dist.Work]
    for work in works:
        works += work.__subclasses__()
        if "wait" in vars(work):
            yield work, "wait"


def count_collectives() -> Counter[tuple[int, ...]]:
    """Return how many collectives this rank has called on groups, by the ranks of the group."""
    counts: Counter[tuple[int, ...]] = Counter()
    if dist.is_available() and dist.is_initialized():
        for group in list(distributed_c10d._world.pg_map):
            with contextlib.suppress(RuntimeError):  # of a backend that does not count
                number: int = getattr(group, "_get_sequence_number_for_group")()  # noqa: B009
                counts[tuple(dist.get_process_group_ranks(group))] += number
    return counts


def find_roots(is_owner: Callable[[nn.Module], bool]) -> Iterator[nn.Module]:
    """Yield the outermost modules alive that are owners or have owners among their submodules.

    Wrappers such as DDP and torch.compile's are the outermost. Walks through all objects that
    Python's garbage collector has: 30 to 100 ms for each million of them.
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
    seen = set()
    waiting = list(filter(is_owner, modules))
    while waiting:
        module = waiting.pop()
        if id(module) not in seen:
            seen.add(id(module))
            above = parents.get(id(module), [])
            waiting.extend(above)
            if not above:
                yield module


def is_distributed(module: nn.Module) -> bool:
    """Return whether a module is DDP's, or has a DTensor among its own parameters."""
    parameters = module._parameters.values()
    is_ddp = isinstance(module, DistributedDataParallel)
    return is_ddp or any(hasattr(one, "device_mesh") for one in parameters)


class ModuleCall:
    """The wrapped call of a module: `begin` before it, `end` after it, even after an exception.

    Does nothing for a module that was compiled in place (Module.compile), which uses the same
    place. It is not a hook, because a hook would be pickled with the module, forbids
    torch.jit.script, and makes each call slower. This place is neither pickled nor copied, nor part
    of the state. end: gets what `begin` returned.
    """

    def __init__(
        self, module: nn.Module, begin: Callable[[], int], end: Callable[[int], None]
    ) -> None:
        self._module = reference = weakref.ref(module)  # so that a dropped module is freed at once

        def call(*args: Any, **kwargs: Any) -> Any:
            module: Any = reference()
            # Code that torch.compile traces must look as it would without this wrapper.
            if torch.compiler.is_compiling():
                return module._call_impl(*args, **kwargs)
            mark = begin()
            try:
                return module._call_impl(*args, **kwargs)
            finally:
                end(mark)

        self._call = call
        if getattr(module, CALL, None) is None:
            module.__dict__[CALL] = call  # past __setattr__: torch.compile's wrapper passes it on

    def remove(self) -> None:
        """Restore the module, unless it was compiled in place since."""
        module = self._module()
        if module is not None and module.__dict__.get(CALL) is self._call:
            del module.__dict__[CALL]
