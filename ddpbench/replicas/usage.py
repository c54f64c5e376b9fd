"""Parameters that some ranks do not train, and counts of equal tensors that hint at a cause."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from ddpbench.replicas.channel import Channel
from ddpbench.replicas.compare import Comparison
from ddpbench.replicas.digest import constant
from ddpbench.replicas.report import Mismatch, WithoutGradient
from ddpbench.replicas.state import State

FROZEN, NO_GRADIENT, ZERO = "requires_grad=False", "no gradient", "a gradient of zeros"
Usage = dict[str, str]  # name of a parameter that is not trained → FROZEN or NO_GRADIENT


@dataclass(frozen=True)
class EqualCounts:
    """Numbers of tensors that are equal in all ranks, while other tensors differ."""

    parameters: int = 0  # without constants, such as LayerNorm's ones and zeros before training
    gradients: int = 0  # without gradients of zeros
    trainable: int = 0  # parameters with requires_grad, constant or not
    trained: int = 0  # parameters with a gradient that is not all zeros


def read_usage(state: State, gradients: bool) -> Usage:
    """Return the compared parameters that this rank does not train now, as FROZEN or NO_GRADIENT.

    NO_GRADIENT is reported only with `gradients`.
    """
    status = {}
    skipped = {entry.name for entry in state.not_compared if entry.kind == "parameter"}
    for name, parameter, waiting in state.parameters:
        if name in skipped:
            continue
        if not parameter.requires_grad:
            status[name] = FROZEN
        elif gradients and not waiting and parameter.grad is None:
            status[name] = NO_GRADIENT
    return status


def fill_stages(tables: list[Usage], stages: Sequence[Hashable]) -> None:
    """Give the ranks of other pipeline stages the status of the ranks that hold a parameter."""
    for table in list(map(dict, tables)):
        for name, status in table.items():
            holders = {stage for stage, each in zip(stages, tables, strict=True) if name in each}
            for stage, each in zip(stages, tables, strict=True):
                if stage not in holders:
                    each[name] = status


def _ranks_by_name(
    channel: Channel, tables: list[Usage], status: str, comparison: Comparison
) -> dict[str, tuple[int, ...]]:
    """Return the ranks in which a parameter has this status, by its name.

    Parameters that do not exist in all ranks alike are left out.
    """
    unlike = {m.name for m in comparison.mismatches if m.kind == "parameter"}
    names = dict.fromkeys(n for table in tables for n in table if table[n] == status)
    return {
        name: tuple(r for r, t in zip(channel.ranks, tables, strict=True) if t.get(name) == status)
        for name in names
        if name not in unlike
    }


def find_frozen_in_some(
    channel: Channel, tables: list[Usage], comparison: Comparison
) -> list[Mismatch]:
    """Return the parameters that some ranks freeze and others train."""
    frozen = []
    for name, ranks in _ranks_by_name(channel, tables, FROZEN, comparison).items():
        others = tuple(rank for rank in channel.ranks if rank not in ranks)
        if others:
            forms = ((FROZEN, ranks), ("requires_grad=True", others))
            frozen.append(Mismatch("parameter", name, forms))
    return frozen


def gather_without_gradient(
    channel: Channel, state: State, comparison: Comparison, tables: list[Usage], ddp: Any
) -> tuple[WithoutGradient, ...]:
    """Return the parameters whose gradient is None in some ranks, or in all.

    Call it only if some parameter has a gradient: otherwise zero_grad has dropped them all. If DDP
    has not reduced the gradients, a gradient of zeros in some ranks counts, too: an unused
    parameter has it after zero_grad(set_to_none=False).
    """
    missing = _ranks_by_name(channel, tables, NO_GRADIENT, comparison)
    zero: dict[str, tuple[int, ...]] = {}
    differing = {d.name for d in comparison.differences if d.kind == "gradient"}
    if ddp is not None and differing:
        zeros = {
            e.name: ZERO
            for e in state.entries["gradient"]
            if e.name in differing and not e.value.any()
        }
        zero = _ranks_by_name(channel, channel.gather_objects(zeros), ZERO, comparison)
    absent = [WithoutGradient(name, ranks) for name, ranks in missing.items()]
    absent += [WithoutGradient(name, ranks, zeros=True) for name, ranks in zero.items()]
    return tuple(absent)


def count_equal(state: State, comparison: Comparison, usage: Usage) -> EqualCounts:
    """Count the tensors that are equal in all ranks, where others differ."""
    unlike = {(d.kind, d.name) for d in comparison.differences}
    unlike |= {(m.kind, m.name) for m in comparison.mismatches}
    parameters = {
        e.name: e.value for e in state.entries["parameter"] if ("parameter", e.name) not in unlike
    }
    moving = {
        e.name
        for e in state.entries["gradient"]
        if ("gradient", e.name) not in unlike and not constant(e.value, 0)
    }
    return EqualCounts(
        sum(not constant(value) for value in parameters.values()),
        len(moving),
        sum(usage.get(name) != FROZEN for name in parameters),
        len(moving & parameters.keys()),
    )
