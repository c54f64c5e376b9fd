"""How the ranks train: facts that make a cause of a difference likely."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpbench.replicas.compare import Comparison, Forms
from ddpbench.replicas.digest import is_constant
from ddpbench.replicas.report import Difference, Report, Sides, WithoutGradient
from ddpbench.replicas.scopes import find_scope
from ddpbench.replicas.state import IGNORED, State, is_option, shards_state, wrapper

FROZEN, TRAINED = "requires_grad=False", "requires_grad=True"
NO_GRADIENT, ZERO = "no gradient", "a gradient of zeros"
Usage = dict[str, str]  # name of a parameter → FROZEN, NO_GRADIENT or TRAINED


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


def gather_usages(comparison: Comparison, usage: Usage, same: bool) -> dict[str, Forms]:
    """Return the ranks by the usage of each parameter.

    usage: of this rank. same: all ranks leave the same parameters untrained. Parameters that some
    ranks freeze and others train are added to the comparison as mismatches.
    """
    ranks = comparison.channel.ranks
    usages: dict[str, Forms] = {name: {form: ranks} for name, form in usage.items()}
    if not same:
        usages = comparison.gather_forms(usage)
    unlike = {m.name for m in comparison.report.mismatches if m.kind == "parameter"}
    for name, forms in usages.items():
        others = sorted(rank for form, ranks in forms.items() if form != FROZEN for rank in ranks)
        if FROZEN in forms and others and name not in unlike:
            comparison.add_mismatch("parameter", name, {FROZEN: forms[FROZEN], TRAINED: others})
    return usages


def gather_without_gradient(
    comparison: Comparison, usages: Mapping[str, Forms], module: torch.nn.Module
) -> tuple[WithoutGradient, ...]:
    """Return the parameters whose gradient is None in some ranks, or in all.

    Returns none if no parameter has a gradient, because zero_grad has dropped them all. If DDP has
    not reduced the gradients, a gradient of zeros in some ranks counts, too: an unused parameter
    has it after zero_grad(set_to_none=False).
    """
    if not any(TRAINED in forms for forms in usages.values()):
        return ()
    absent = _list_missing(comparison, usages, NO_GRADIENT)
    differing = {d.name for d in comparison.report.differences if d.kind == "gradient"}
    if wrapper(module) is not None and differing:
        entries = (e for e in comparison.state.entries["gradient"] if e.name in differing)
        gradients: dict[str, Any] = {entry.name: entry.tensor for entry in entries}
        zeros = {name: TRAINED if value.any() else ZERO for name, value in gradients.items()}
        absent += _list_missing(comparison, comparison.gather_forms(zeros), ZERO)
    return tuple(absent)


def _list_missing(
    comparison: Comparison, usages: Mapping[str, Forms], form: str
) -> list[WithoutGradient]:
    unlike = {m.name for m in comparison.report.mismatches if m.kind == "parameter"}
    # What all ranks of a pipeline stage lack is missing everywhere.
    missing = [
        (tuple(forms[form] if len(forms) > 1 else comparison.channel.ranks), name)
        for name, forms in usages.items()
        if form in forms and name not in unlike
    ]
    ordered = sorted(missing, key=lambda pair: pair[0][0])
    return [WithoutGradient(name=n, ranks=ranks, zeros=form == ZERO) for ranks, n in ordered]


# --- the pattern of what differs


class Facts:
    """The pattern of a report in which something differs, the same in every rank.

    frozen: parameters with requires_grad=False in some rank. totals: sums over the ranks of what
    each counts. sharding: dimensions of the mesh along which a
    parameter is sharded. spanned: dimensions of the meshes of the gradients that differ.
    """

    def __init__(
        self,
        report: Report,
        frozen: set[str],
        totals: Counter[str],
        sharding: set[str],
        spanned: set[str],
    ) -> None:
        self.report, self.frozen, self.totals, self.spanned = report, frozen, totals, spanned
        self.earlier = report.equal_until is not None  # a verification found all parameters equal
        self.mesh = bool(report.coordinates)  # the tensors are on a mesh
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
        self.all_parameters = len(parameters) > 1 and not totals["parameters"]
        # Most elements differ in each differing parameter, as after a new random draw.
        details = [detail for d in parameters for detail in d.details]
        self.redrawn = bool(details) and all(2 * d.differing > d.elements for d in details)
        # The number of compared gradients, and whether they are equal in all ranks or not.
        self.gradients = report.compared.get("gradient", 0)
        self.unreduced = self.gradients > 0 and "gradient" in self.kinds | self.unlike
        self.reduced = self.gradients > 0 and not self.unreduced
        # The state of the optimizers shows that they took the same steps.
        self.same_steps = totals["stepped"] > 0 and not totals["stateless"]
        # Dimensions of the mesh along which parameters or gradients differ, else anything.
        patterns = {d.sides for d in parameters + self.select("gradient") or report.differences}
        names = next(iter(report.coordinates.values()), {})
        self.along = [name for name in names if any(_differs(name, p, report) for p in patterns)]
        # Those of them that replicate the whole model: they shard no parameter.
        self.unsharded = [name for name in self.along if name not in sharding]

    def select(self, kind: str) -> list[Difference]:
        """Return the differences of a kind."""
        return [d for d in self.report.differences if d.kind == kind]


def _differs(name: str, sides: Sides, report: Report) -> bool:
    """Return whether two ranks hold different values and differ in this coordinate alone."""
    seen = dict[tuple[int, ...], int]()
    for number, ranks in enumerate(sides):
        for rank in ranks:
            others = tuple(
                value for axis, value in report.coordinates[rank].items() if axis != name
            )
            if seen.setdefault(others, number) != number:
                return True
    return False


def gather_facts(
    comparison: Comparison,
    frozen: set[str],
    module: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
) -> Facts:
    """Return the pattern of a report in which something differs. frozen: as in Facts."""
    report = comparison.report
    differing = {d.name for d in report.differences if d.kind == "gradient"}
    sharding, spanned = set[str](), set[str]()
    for entry in comparison.state.entries["parameter"]:
        if entry.layout is not None:
            names, sharded = entry.layout.grid.names, entry.layout.sharded
            sharding |= {name for name, cut in zip(names, sharded, strict=True) if cut}
            spanned |= {*names} if entry.name in differing else set()
    counts = _count_training(comparison.state, module, optimizers)
    if report.differs:
        counts |= _count_equal(comparison, frozen)
    rows = comparison.channel.gather_objects([counts, sorted(sharding), sorted(spanned)])
    totals: Counter[str] = Counter()
    for count, *sets in rows:
        totals.update(count)
        sharding |= {*sets[0]}
        spanned |= {*sets[1]}
    return Facts(report, frozen, totals, sharding, spanned)


def _count_training(
    state: State, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, int]:
    """Count facts of this rank, most of them 0 or 1."""
    ddp: Any = wrapper(module)
    wrapped = [m for m in module.modules() if isinstance(m, DistributedDataParallel)]
    finds_unused = ("find_unused_parameters", "static_graph")
    # Only optimizers that keep no state without momentum have the option momentum=0.
    plain = any(group.get("momentum", 1) == 0 for o in optimizers for group in o.param_groups)
    return {
        # DDP's last forward ran under no_sync or no_grad. The attribute is not documented. Without
        # it, one cause is reported less precisely.
        "unsynced": not getattr(ddp, "require_forward_param_sync", True),
        # DDP looks for unused parameters itself.
        "finds_unused": any(getattr(ddp, name, False) for name in finds_unused),
        # No DDP sends rank 0's buffers before each forward.
        "keeps_buffers": not any(getattr(m, "broadcast_buffers", True) for m in wrapped),
        "optimizers": len(optimizers),
        # An optimizer keeps no state, so its steps leave no trace.
        "stateless": plain or any(map(shards_state, optimizers)),
        "stepped": any(not is_option(entry.name) for entry in state.entries["optimizer"]),
        "steps": sum(entry.name.endswith(".step") for entry in state.entries["optimizer"]),
        "unmanaged": _count_unmanaged(ddp, state),
    }


def _count_unmanaged(ddp: Any, state: State) -> int:
    """Count the trained parameters that were added or unfrozen since DDP wrapped the module."""
    if ddp is None:
        return 0
    trained = {h.parameter for h in state.parameters if h.parameter.requires_grad}
    ignored = {n for n in state.not_compared if n.kind == "parameter" and n.reason == IGNORED}
    count = len(trained) - len(ignored)
    return max(0, count - int(ddp._get_ddp_logging_data().get("num_parameter_tensors", count)))


def _count_equal(comparison: Comparison, frozen: set[str]) -> dict[str, int]:
    """Count the tensors that are equal in all ranks while others differ. It reads them all."""
    wrong = [*comparison.report.differences, *comparison.report.mismatches]
    unlike = {(tensor.kind, tensor.name) for tensor in wrong}

    def list_equal(kind: str) -> dict[str, Any]:
        entries = [e for e in comparison.state.entries[kind] if (kind, e.name) not in unlike]
        shared = (e for e in entries if len(find_scope(comparison.base, e.layout)) > 1)
        return {entry.name: entry.tensor for entry in shared}

    parameters = list_equal("parameter")
    moving = {name for name, value in list_equal("gradient").items() if value.any()}
    return {
        # Without constants, such as LayerNorm's ones and zeros before training.
        "parameters": sum(not is_constant(value) for value in parameters.values()),
        "trainable": len(parameters.keys() - frozen),
        "gradients": len(moving),  # without gradients of zeros
        "trained": len(moving & parameters.keys()),
        "averages": _find_averager(),
    }


def _find_averager() -> bool:
    """Return whether this process has an object that averages parameters. It is slow."""
    averagers: Any = sys.modules.get("torch.distributed.algorithms.model_averaging.averagers")
    kind = getattr(averagers, "ModelAverager", None)
    return kind is not None and any(issubclass(type(each), kind) for each in gc.get_objects())
