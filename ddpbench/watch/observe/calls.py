"""Calls that a watch observes by replacing the function, and counts of calls."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


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


class ExitStatus:
    """Remembers in `value` what the main thread passes to sys.exit: Python does not keep it."""

    def __init__(self) -> None:
        self.value: object = None
        self.close = replace(sys, "exit", self._wrap)

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def leave(status: object = None, /) -> None:
            if threading.current_thread() is threading.main_thread():
                self.value = status
            original(status)

        return leave


def count_collectives() -> Counter[tuple[int, ...]]:
    """Return how many collectives this rank has called on groups, by the ranks of the group."""
    counts: Counter[tuple[int, ...]] = Counter()
    if dist.is_available() and dist.is_initialized():
        for group in list(distributed_c10d._world.pg_map):
            with contextlib.suppress(RuntimeError):  # of a backend that does not count
                number: int = getattr(group, "_get_sequence_number_for_group")()  # noqa: B009
                counts[tuple(dist.get_process_group_ranks(group))] += number
    return counts
