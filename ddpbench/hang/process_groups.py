"""The process groups of this rank: their names, members, backends and counters."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ddpbench.hang.verdict import format_ranks

# Errors of a private function with another signature, or of a group that ends meanwhile.
UNKNOWN = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)


@dataclass(frozen=True)
class Group:
    """A process group of this rank.

    phrase: "of group 3"; members: global ranks; count: returns the number of requests to a backend
    of the group, -1 if that backend does not count them.
    """

    name: str
    phrase: str
    members: tuple[int, ...]
    backends: tuple[str, ...]
    count: Callable[[str], int]


def list_groups() -> list[Group]:
    """Return the groups of which this rank is a member."""
    from torch.distributed import distributed_c10d

    groups = []
    for live, ranks in list(distributed_c10d._world.pg_group_ranks.items()):
        with contextlib.suppress(*UNKNOWN):  # it may end, or begin, just now
            groups.append(_group(live, ranks))
    phrases = [group.phrase for group in groups]
    for index, group in enumerate(groups):
        if phrases.count(group.phrase) > 1:
            groups[index] = replace(group, phrase=f"{group.phrase} {group.name[:12]}")
    return groups


def _group(group: Any, ranks: Iterable[int]) -> Group:
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    pairs = [pair.rpartition(":") for pair in dist.get_backend_config(group).split(",")]
    devices = {backend: torch.device(device) for device, _, backend in pairs}
    name = str(distributed_c10d._world.pg_names.get(group, ""))
    title = getattr(group, "group_desc", "")
    phrase = f"of group {name[:12]}"
    if group is dist.group.WORLD:
        phrase = ""
    elif title not in ("", "undefined"):  # the rows of a mesh share a title
        phrase = f"of group {title!r} ({format_ranks(sorted(ranks))})"
    count = partial(_count, weakref.ref(group), devices)  # a group ends with its last owner
    return Group(name, phrase, tuple(sorted(ranks)), tuple(sorted(devices)), count)


def _count(group: weakref.ref[Any], devices: Mapping[str, Any], backend: str) -> int:
    """Ask the backend itself: a group on two backends has no number of its own.

    nccl counts no sends and receives.
    """
    live: Any = group()
    try:
        return int(live._get_backend(devices[backend])._get_sequence_number_for_group())
    except UNKNOWN:  # a group in Python has no backends
        with contextlib.suppress(*UNKNOWN):
            return int(live._get_sequence_number_for_group())
    return -1
