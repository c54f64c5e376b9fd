"""How the ranks train: facts from which the likely cause of a difference is told."""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpbench.replicas.compare import Comparison, Forms
from ddpbench.replicas.digest import constant
from ddpbench.replicas.report import Difference, Report, WithoutGradient, read_coordinates
from ddpbench.replicas.scopes import find_scope
from ddpbench.replicas.state import IGNORED, State, is_option, shards_state, wrapper

FROZEN, TRAINED = "requires_grad=False", "requires_grad=True"
NO_GRADIENT, ZERO = "no gradient", "a gradient of zeros"
Usage = dict[str, str]  # name of a parameter → FROZEN, NO_GRADIENT or TRAINED


@dataclass(frozen=True)
class Flags:
    """Facts of each rank, 0 or 1, or sums of them over all ranks."""

    unsynced: int  # DDP's last forward ran under no_sync or no_grad
    finds_unused: int  # DDP looks for unused parameters itself
    keeps_buffers: int  # no DDP sends rank 0's buffers before each forward
    optimizers: int  # the caller passed an optimizer
    stateless: int  # an optimizer keeps no state, so its steps leave no trace
    stepped: int  # an optimizer has state
    trains: int  # a parameter has a gradient
    unmanaged: int  # number of trained parameters that DDP does not manage


@dataclass(frozen=True)
class Counts:
    """Numbers in each rank, or their sums over all ranks, known if tensors differ."""

    averages: int = 0  # 1 if the process has an object that averages parameters
    steps: int = 0  # step counts that the optimizers keep
    # Tensors that are equal in all ranks, while other tensors differ:
    parameters: int = 0  # without constants, such as LayerNorm's ones and zeros before training
    gradients: int = 0  # without gradients of zeros
    trainable: int = 0  # parameters with requires_grad, constant or not
    trained: int = 0  # parameters with a gradient that is not all zeros


@dataclass(frozen=True)
class Training:
    """How the ranks train."""

    usage: Usage  # of this rank
    usages: dict[str, Forms]  # ranks by the usage of each parameter
    flags: Flags  # sums over all ranks

    @property
    def frozen(self) -> set[str]:
        """Parameters with requires_grad=False in some rank."""
        return {name for name, forms in self.usages.items() if FROZEN in forms}


class Facts:
    """The pattern of a report in which something differs, the same in every rank.

    splits: for each dimension of the mesh of each parameter, whether it is sharded along it.
    """

    def __init__(
        self,
        report: Report,
        training: Training,
        counts: Counts,
        splits: Mapping[str, Mapping[str, bool]],
    ) -> None:
        self.report, self.flags, self.counts = report, training.flags, counts
        self.frozen, self.splits = training.frozen, splits
        self.mesh = bool(report.coordinates)  # the tensors lie on a mesh
        # An earlier verification found all parameters equal.
        self.earlier = report.equal_until is not None
        # Buffers are left out: they differ whenever something else does.
        main = [d for d in report.differences if d.kind != "buffer"]
        self.kinds = {d.kind for d in main}
        self.unlike = {m.kind for m in report.mismatches}
        # The only tensor that differs, buffers aside; else the only buffer.
        alone = main or list(report.differences)
        self.only_difference = alone[0] if len(alone) == 1 else None
        self.options = [d for d in self.select("optimizer") if is_option(d.name)]  # such as lr
        # All parameters differ, except constants, and there are several.
        parameters = self.select("parameter")
        self.all_parameters = len(parameters) > 1 and not counts.parameters
        # Most elements differ in each differing parameter, as after a new random draw.
        details = [detail for d in parameters for detail in d.details]
        self.redrawn = bool(details) and all(2 * d.differing > d.elements for d in details)
        # The number of compared gradients, and whether they are equal in all ranks or not.
        self.gradients = report.compared.get("gradient", 0)
        local = "gradient" in self.kinds | self.unlike
        self.reduced, self.unreduced = (
            self.gradients > 0 and not local,
            self.gradients > 0 and local,
        )
        # The state of the optimizers shows that they took the same steps.
        self.same_steps = self.flags.stepped > 0 and not self.flags.stateless
        self.along = self._find_dimensions()
        # Dimensions that replicate the whole model: they shard no parameter.
        used = {name for each in splits.values() for name, sharded in each.items() if sharded}
        self.unsharded = tuple(name for name in self.along if name not in used)

    def select(self, kind: str) -> list[Difference]:
        """Return the differences of a kind."""
        return [d for d in self.report.differences if d.kind == kind]

    def _find_dimensions(self) -> tuple[str, ...]:
        """Return the dimensions of the mesh along which parameters or gradients differ.

        A dimension counts if two ranks hold different values and differ in this coordinate alone.
        If no parameter or gradient differs, all differences count.
        """
        where = read_coordinates(self.report.coordinates)
        main = self.select("parameter") + self.select("gradient") or self.report.differences
        patterns = {d.values for d in main}
        names = next(iter(where.values()), {})
        return tuple(n for n in names if any(_differs_along(n, sides, where) for sides in patterns))


def _differs_along(
    name: str, sides: Sequence[Sequence[int]], where: Mapping[int, Mapping[str, int]]
) -> bool:
    seen: dict[tuple[int, ...], int] = {}
    for number, ranks in enumerate(sides):
        for rank in ranks:
            others = tuple(value for axis, value in where[rank].items() if axis != name)
            if seen.setdefault(others, number) != number:
                return True
    return False


# --- parameters that some ranks do not train


def read_usage(state: State, gradients: bool) -> Usage:
    """Return how this rank trains each compared parameter now.

    NO_GRADIENT is reported only with `gradients`.
    """
    usage = {}
    skipped = {entry.name for entry in state.not_compared if entry.kind == "parameter"}
    for name, parameter, waiting in state.parameters:
        if name not in skipped:
            missing = gradients and not waiting and parameter.grad is None
            trained = NO_GRADIENT if missing else TRAINED
            usage[name] = trained if parameter.requires_grad else FROZEN
    return usage


def gather_training(comparison: Comparison, usage: Usage, flags: Flags, same: bool) -> Training:
    """Return how the ranks train.

    usage: of this rank. flags: sums over all ranks. same: all ranks leave the same parameters
    untrained.
    """
    ranks = comparison.channel.ranks
    usages = {name: {form: ranks} for name, form in usage.items()}
    return Training(usage, usages if same else comparison.gather_forms(usage), flags)


def add_frozen_in_some(comparison: Comparison, training: Training) -> None:
    """Add the parameters that some ranks freeze and others train as mismatches."""
    unlike = {m.name for m in comparison.mismatches if m.kind == "parameter"}
    for name, forms in training.usages.items():
        others = sorted(rank for form, ranks in forms.items() if form != FROZEN for rank in ranks)
        if FROZEN in forms and others and name not in unlike:
            comparison.add_mismatch("parameter", name, {FROZEN: forms[FROZEN], TRAINED: others})


def gather_without_gradient(
    comparison: Comparison, training: Training, module: torch.nn.Module
) -> tuple[WithoutGradient, ...]:
    """Return the parameters whose gradient is None in some ranks, or in all.

    Returns none if no parameter has a gradient, because zero_grad has dropped them all. If DDP has
    not reduced the gradients, a gradient of zeros in some ranks counts, too: an unused parameter
    has it after zero_grad(set_to_none=False).
    """
    if not training.flags.trains:
        return ()
    absent = _list_missing(comparison, training.usages, NO_GRADIENT)
    differing = {d.name for d in comparison.differences if d.kind == "gradient"}
    if wrapper(module) is not None and differing:
        entries = (e for e in comparison.state.entries["gradient"] if e.name in differing)
        zeros = {entry.name: TRAINED if entry.value.any() else ZERO for entry in entries}
        absent += _list_missing(comparison, comparison.gather_forms(zeros), ZERO)
    return tuple(absent)


def _list_missing(
    comparison: Comparison, usages: dict[str, Forms], form: str
) -> list[WithoutGradient]:
    unlike = {m.name for m in comparison.mismatches if m.kind == "parameter"}
    # What all ranks of a pipeline stage lack is missing everywhere.
    missing = {
        name: tuple(forms[form] if len(forms) > 1 else comparison.channel.ranks)
        for name, forms in usages.items()
        if form in forms and name not in unlike
    }
    ordered = sorted(missing.items(), key=lambda pair: pair[1][0])
    return [WithoutGradient(name, ranks, form == ZERO) for name, ranks in ordered]


# --- flags and counts


def read_flags(
    module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], state: State
) -> Flags:
    """Return the facts of this rank."""
    ddp: Any = wrapper(module)
    wrapped = [m for m in module.modules() if isinstance(m, DistributedDataParallel)]
    # Only optimizers that keep no state without momentum have the option momentum=0.
    plain = any(group.get("momentum", 1) == 0 for o in optimizers for group in o.param_groups)
    return Flags(
        # The attribute is not documented. Without it, one cause is reported less precisely.
        unsynced=int(not getattr(ddp, "require_forward_param_sync", True)),
        finds_unused=int(
            any(getattr(ddp, name, False) for name in ("find_unused_parameters", "static_graph"))
        ),
        keeps_buffers=int(not any(getattr(m, "broadcast_buffers", True) for m in wrapped)),
        optimizers=int(bool(optimizers)),
        stateless=int(plain or any(map(shards_state, optimizers))),
        stepped=int(any(not is_option(entry.name) for entry in state.entries["optimizer"])),
        trains=int(any(held.parameter.grad is not None for held in state.parameters)),
        unmanaged=_count_unmanaged(ddp, state),
    )


def _count_unmanaged(ddp: Any, state: State) -> int:
    """Count the trained parameters that were added or unfrozen since DDP wrapped the module."""
    if ddp is None:
        return 0
    trained = {h.parameter for h in state.parameters if h.parameter.requires_grad}
    ignored = {n for n in state.not_compared if n.kind == "parameter" and n.reason == IGNORED}
    count = len(trained) - len(ignored)
    return max(0, count - int(ddp._get_ddp_logging_data().get("num_parameter_tensors", count)))


def gather_facts(comparison: Comparison, report: Report, training: Training) -> Facts:
    """Return the pattern of a report in which something differs."""
    own = astuple(_count(comparison, training.usage))
    counts = Counts(*comparison.channel.gather_sums([], own)[1])
    layouts = {entry.name: entry.layout for entry in comparison.state.entries["parameter"]}
    splits = {
        name: dict(zip(layout.grid.names, map(bool, layout.splits), strict=True))
        for name, layout in layouts.items()
        if layout is not None
    }
    if comparison.base.stages:
        for others in comparison.channel.gather_objects(splits):
            splits |= others
    return Facts(report, training, counts, splits)


def _count(comparison: Comparison, usage: Usage) -> Counts:
    unlike = {(each.kind, each.name) for each in comparison.differences}
    unlike |= {(each.kind, each.name) for each in comparison.mismatches}
    state = comparison.state

    def list_equal(kind: str) -> dict[str, Any]:
        entries = [e for e in state.entries[kind] if (kind, e.name) not in unlike]
        shared = (e for e in entries if len(find_scope(comparison.base, e.layout).ranks) > 1)
        return {entry.name: entry.value for entry in shared}

    parameters, gradients = list_equal("parameter"), list_equal("gradient")
    moving = {name for name, value in gradients.items() if not constant(value, 0)}
    return Counts(
        averages=_find_averager(),
        steps=sum(e.name.endswith(".step") for e in state.entries["optimizer"]),
        parameters=sum(not constant(value) for value in parameters.values()),
        gradients=len(moving),
        trainable=sum(usage.get(name) != FROZEN for name in parameters),
        trained=len(moving & parameters.keys()),
    )


def _find_averager() -> int:
    """Return 1 if this process has an object that averages parameters, else 0. It is slow."""
    averagers: Any = sys.modules.get("torch.distributed.algorithms.model_averaging.averagers")
    kind = getattr(averagers, "ModelAverager", None)
    return int(kind is not None and any(issubclass(type(each), kind) for each in gc.get_objects()))
