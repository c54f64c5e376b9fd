"""Which parameters the ranks train, and what the tensors that are equal tell of the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ddpbench.replicas.channel import Channel
from ddpbench.replicas.compare import Found
from ddpbench.replicas.digest import constant
from ddpbench.replicas.report import Mismatch, WithoutGradient
from ddpbench.replicas.state import State, unwrap

FROZEN, NO_GRADIENT, ZERO = "requires_grad=False", "no gradient", "a gradient of zeros"
Usage = dict[str, str]  # parameter → FROZEN or NO_GRADIENT, where it is


@dataclass(frozen=True)
class Agreeing:
    """How many of what differs nowhere tells something, while other tensors of its kind differ."""

    parameters: int = 0  # not constants, as LayerNorm's ones and zeros are before training
    gradients: int = 0  # not zero throughout
    trainable: int = 0  # parameters with requires_grad, constant or not
    trained: int = 0  # parameters whose gradient is there and not zero throughout


def usage(module: torch.nn.Module, state: State, gradients: bool) -> Usage:
    """Of each compared parameter that this rank does not train now: FROZEN, or (looked at with
    `gradients`) NO_GRADIENT."""
    status = {}
    skipped = {each.name for each in state.not_compared if each.kind == "parameter"}
    for name, parameter in unwrap(module).named_parameters():
        if name in skipped:
            continue
        if not parameter.requires_grad:
            status[name] = FROZEN
        elif gradients and parameter.grad is None:
            status[name] = NO_GRADIENT
    return status


def _ranks_by_name(
    channel: Channel, tables: list[Usage], status: str, found: Found
) -> dict[str, tuple[int, ...]]:
    """Name → the ranks in which it has this status, of parameters that all ranks have alike."""
    unlike = {each.name for each in found.mismatches if each.kind == "parameter"}
    names = dict.fromkeys(n for table in tables for n in table if table[n] == status)
    return {
        name: tuple(r for r, t in zip(channel.ranks, tables, strict=True) if t.get(name) == status)
        for name in names
        if name not in unlike
    }


def frozen_in_some(channel: Channel, tables: list[Usage], found: Found) -> list[Mismatch]:
    frozen = []
    for name, ranks in _ranks_by_name(channel, tables, FROZEN, found).items():
        others = tuple(rank for rank in channel.ranks if rank not in ranks)
        if others:
            those = ((FROZEN, ranks), ("requires_grad=True", others))
            frozen.append(Mismatch("parameter", name, those))
    return frozen


def gather_without_gradient(
    channel: Channel, state: State, found: Found, tables: list[Usage], outer: Any
) -> tuple[WithoutGradient, ...]:
    """Parameters whose gradient is None in some ranks, or in all. To be called where some others
    have one: else all gradients were dropped, by zero_grad.

    Where DDP has not reduced gradients, a gradient of zeros in some ranks counts, too: it is that
    of a parameter that was not used there, after zero_grad(set_to_none=False).
    """
    missing = _ranks_by_name(channel, tables, NO_GRADIENT, found)
    zero: dict[str, tuple[int, ...]] = {}
    differing = {d.name for d in found.differences if d.kind == "gradient"}
    if outer is not None and differing:
        zeros = {
            e.name: ZERO
            for e in state.entries["gradient"]
            if e.name in differing and not e.value.any()
        }
        zero = _ranks_by_name(channel, channel.gather_objects(zeros), ZERO, found)
    absent = [WithoutGradient(name, ranks) for name, ranks in missing.items()]
    absent += [WithoutGradient(name, ranks, zeros=True) for name, ranks in zero.items()]
    return tuple(absent)


def agreeing(state: State, found: Found, used: Usage) -> Agreeing:
    """What the tensors that are equal tell of those that are not."""
    if not found.differences:
        return Agreeing()
    unlike = {(each.kind, each.name) for each in found.differences}
    unlike |= {(each.kind, each.name) for each in found.mismatches}
    parameters = {
        e.name: e.value for e in state.entries["parameter"] if ("parameter", e.name) not in unlike
    }
    moving = {
        e.name
        for e in state.entries["gradient"]
        if ("gradient", e.name) not in unlike and not constant(e.value, 0)
    }
    return Agreeing(
        sum(not constant(value) for value in parameters.values()),
        len(moving),
        sum(used.get(name) != FROZEN for name in parameters),
        len(moving & parameters.keys()),
    )
