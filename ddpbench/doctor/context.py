"""What an examination is given, and what it answers. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ddpbench.catalog.backends import Backend
from ddpbench.records.schema import Finding, Launch
from ddpbench.runtime.world import World

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


@dataclass(frozen=True)
class Context:
    """All ranks of a launch on one backend, as one of them sees it."""

    ranks: World
    backend: Backend
    tested: dist.ProcessGroup  # all ranks, on that backend
    device: torch.device
    launch: Launch  # what every rank told of itself; in rank 0 of the run too
    seed: int
    seconds: float  # that one examination may take, about
    by: str  # "rank" or "host": between whom links are measured
    max_pairs: int  # of them that are measured one by one
    modules: tuple[str, ...]  # that the user has imported
    timeout_seconds: float
    tell: Callable[[str], None]  # progress: what is done now, in a few words; for people


@dataclass(frozen=True)
class Outcome:
    """What came out; rank 0's is stored. As `Examination` has it."""

    told: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    figures: dict[str, Any] = field(default_factory=dict)
