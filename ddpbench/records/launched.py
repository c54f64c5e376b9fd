"""The stored record of a launch: frozen dataclasses, like those of schema.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Offset:
    """How far another clock was ahead of rank 0's in this launch, within ± the bound."""

    host: str
    ranks: tuple[int, ...]  # that read it
    seconds: float
    bound_seconds: float


@dataclass(frozen=True)
class Launch:
    """One set of fresh processes on one backend."""

    index: int
    backend: str
    provider: str
    library: str
    launcher: str
    world_size: int
    facts: dict[str, Any] = field(default_factory=dict)
    ranks: tuple[dict[str, Any], ...] = ()
    clock: dict[str, float] = field(default_factory=dict)
    offsets: tuple[Offset, ...] = ()  # one per clock; empty: one clock, or not compared
    started: str = ""
    ended: str | None = None
    cases: int = 0  # that it was to measure
