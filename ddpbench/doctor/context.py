"""The input and the result of an examination. Importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ddpbench.catalog.backends import Backend
from ddpbench.records.launched import Launch
from ddpbench.records.schema import Finding
from ddpbench.records.table import Table
from ddpbench.runtime.world import World

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


@dataclass(frozen=True)
class Context:
    """One launch on one backend, as one rank sees it."""

    world: World
    backend: Backend
    process_group: dist.ProcessGroup  # all ranks, on that backend
    device: torch.device
    launch: Launch  # its record; `launch.ranks` has the facts of every rank
    seed: int
    seconds: float  # approximate time for the examination
    by: str  # "rank" or "host": the ends between which links are measured
    max_pairs: int  # most links that are measured one by one
    modules: tuple[str, ...]  # imported with --import
    report_progress: Callable[[str], None]  # takes a few words for the progress bar


@dataclass(frozen=True)
class Outcome:
    """The result of an examination. Only that of rank 0 is stored, as an `Examination`."""

    lines: tuple[str, ...] = ()  # results in a line each
    unchecked: tuple[str, ...] = ()  # questions without an answer, and the reason, a sentence each
    findings: tuple[Finding, ...] = ()
    figures: dict[str, Any] = field(default_factory=dict)  # all numbers, as JSON
    tables: tuple[Table, ...] = ()
