"""The settings that `ddpbench tune` tries. To add a kind, add an entry to KINDS.

A setting is a set of changes: field of `step_options.Options`, or "threads" → value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ddpbench.catalog.hooks import HOOKS
from ddpbench.session.step_options import Options

FACTOR = 4  # from one size of buckets to the next
MEGABYTE = 2**20  # of DDP's bucket_cap_mb
Changes = dict[str, Any]


@dataclass(frozen=True)
class Base:
    """The default that settings are compared with."""

    options: Options
    parameter_nbytes: int
    has_buffers: bool
    threads: int  # of compute, in one rank
    cores: int  # of the host with the fewest


@dataclass(frozen=True)
class Kind:
    """A kind of settings: its help, and its changes of the default."""

    help: str
    list_changes: Callable[[Base], Iterator[Changes]]


def _list_buckets(base: Base) -> Iterator[Changes]:
    """Yield sizes from 1 MB by a factor to that of the model, and DDP's own."""
    whole = base.parameter_nbytes / MEGABYTE
    size = 1.0
    while size < whole:
        yield {"bucket_cap_mb": size}
        size *= FACTOR
    yield {"bucket_cap_mb": float(max(1, -(-base.parameter_nbytes // MEGABYTE)))}
    yield {"bucket_cap_mb": None}


def _list_options(base: Base) -> Iterator[Changes]:
    yield {"gradient_as_bucket_view": not base.options.gradient_as_bucket_view}
    if base.options.accumulate == 1:  # torch refuses a static graph with no_sync
        yield {"static_graph": not base.options.static_graph}
    if base.has_buffers:
        yield {"broadcast_buffers": not base.options.broadcast_buffers}


def _list_hooks(base: Base) -> Iterator[Changes]:
    for name in HOOKS:
        yield {"comm_hook": name}


def _list_accumulation(base: Base) -> Iterator[Changes]:
    for count in (1, 2, 4, 8):
        yield {"accumulate": count}


def _list_threads(base: Base) -> Iterator[Changes]:
    count = 1
    while count <= base.cores:
        yield {"threads": count}
        count *= 2


KINDS = {
    "buckets": Kind("bucket_cap_mb, from 1 to the size of the model", _list_buckets),
    "options": Kind(
        "gradient_as_bucket_view, static_graph, and broadcast_buffers if the model has buffers",
        _list_options,
    ),
    "hooks": Kind("communication hooks, which change the numbers", _list_hooks),
    "accumulate": Kind("1, 2, 4 and 8 micro-batches per step, per micro-batch", _list_accumulation),
    "threads": Kind("compute threads of a rank", _list_threads),
}


def list_settings(kinds: tuple[str, ...], base: Base) -> list[Changes]:
    """Return the default, {}, and each change of these kinds that differs from it, once."""
    settings: list[Changes] = [{}]
    for kind in kinds:
        for changes in KINDS[kind].list_changes(base):
            current = {**vars(base.options), "threads": base.threads}
            differs = any(current[name] != value for name, value in changes.items())
            if differs and changes not in settings:
                settings.append(changes)
    return settings
