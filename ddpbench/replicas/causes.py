"""Likely causes of patterns of differences: one entry of CAUSES each, the most specific first.

The patterns are read from a report and from what all ranks have alike, so every rank finds the same
cause without asking the others.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, compress
from typing import Any

import torch

from ddpbench.records.wording import list_all
from ddpbench.replicas.report import Difference, Report
from ddpbench.replicas.state import State, is_option, wrapper


class Facts:
    """The pattern of a report in which tensors differ."""

    def __init__(self, report: Report, state: State, module: torch.nn.Module) -> None:
        self.report = report
        self.mesh = bool(report.coordinates)  # the tensors are on a mesh
        self.earlier = report.equal_until is not None  # a verification found all parameters equal
        self.parameters = self._select("parameter")
        self.gradients = self._select("gradient")
        self.options = [d for d in self._select("optimizer") if is_option(d.name)]  # such as lr
        # Buffers are left out: they differ whenever something else does.
        main = [d for d in report.differences if d.kind != "buffer"]
        self.kinds = {d.kind for d in main}
        alone = main or report.differences
        self.only_difference = alone[0] if len(alone) == 1 else None
        # Most elements differ in each differing parameter, as after a new random draw.
        details = [detail for d in self.parameters for detail in d.details]
        self.redrawn = bool(details) and all(2 * d.differing > d.elements for d in details)
        self.compared_gradients = report.compared.get("gradient", 0)
        self.stepped = any(not is_option(entry.name) for entry in state.entries["optimizer"])
        ddp: Any = wrapper(module)
        self.resends_buffers = bool(getattr(ddp, "broadcast_buffers", False))
        # A loss does not use a parameter, and DDP waits for its gradient.
        unmatched = {mismatch.kind for mismatch in report.mismatches}
        trained = sum(not entry.frozen for entry in state.entries["parameter"])
        absent = not unmatched and len(state.entries["gradient"]) < trained
        looks = any(getattr(ddp, name, True) for name in ("find_unused_parameters", "static_graph"))
        self.unused = not looks and (absent or "gradient" in unmatched)
        self._find_dimensions(state)

    def _select(self, kind: str) -> list[Difference]:
        return [d for d in self.report.differences if d.kind == kind]

    def _find_dimensions(self, state: State) -> None:
        """Find the dimensions of the mesh along which parameters or gradients differ."""
        layouts = {e.name: e.layout for e in state.entries["parameter"] if e.layout is not None}
        grids = [compress(each.grid.names, each.sharded) for each in layouts.values()]
        sharded = {*chain.from_iterable(grids)}
        differing = [layouts[d.name] for d in self.gradients if d.name in layouts]
        spanned = {name for layout in differing for name in layout.grid.names}
        coordinates = self.report.coordinates
        self.along = [
            name
            for name in next(iter(coordinates.values()), {})
            if any(
                len({frozenset(coordinates[rank][name] for rank in side) for side in d.sides}) > 1
                for d in self.parameters + self.gradients or self.report.differences
            )
        ]
        # Those of them that replicate the whole model: they shard no parameter.
        self.unsharded = [name for name in self.along if name not in sharded]
        # fully_shard reduces gradients along them: the meshes of the parameters have them.
        self.is_reduced_there = bool(spanned & {*self.unsharded})


@dataclass(frozen=True)
class Cause:
    """A pattern, its explanation and the next step."""

    code: str
    applies: Callable[[Facts], bool]
    sentence: str
    next_step: str
    evidence: str = "parameter"  # kind whose first difference, if there is one, is the example


# --- patterns


def _is_one_bit(difference: Difference | None) -> bool:
    if not difference or "float" not in difference.dtype or len(difference.details) != 1:
        return False
    # A tensor of one element, such as a step count, always differs in one element: no evidence.
    return difference.details[0].elements > 1 and difference.details[0].bit is not None


def _one_bit_of_a_gradient(facts: Facts) -> bool:
    gradients = facts.gradients
    stepped = {parameter.name for parameter in facts.parameters}
    return len(gradients) == 1 and _is_one_bit(gradients[0]) and stepped == {gradients[0].name}


def _permuted(facts: Facts) -> bool:
    details = facts.only_difference.details if facts.only_difference else ()
    return bool(details) and all(detail.permuted for detail in details)


def _nonfinite_in_some(facts: Facts) -> bool:
    differing = {d.name for d in facts.parameters}
    ranks = {rank for d in facts.report.differences for side in d.sides for rank in side}
    nonfinite = [n for n in facts.report.nonfinite if n.kind == "parameter"]
    some = {n.name for n in nonfinite if {rank for rank, _ in n.counts} < ranks}
    return bool(differing) and differing <= some


def _initialised(facts: Facts) -> bool:
    if facts.earlier or facts.kinds != {"parameter"} or not facts.redrawn:
        return False
    # The optimizer's state, or a parameter that is equal, shows that the ranks took equal steps.
    differing = {d.name for d in facts.parameters}
    is_partial = len(differing) < facts.report.compared["parameter"]
    return facts.stepped or is_partial or not facts.compared_gradients


def _unplanned(facts: Facts) -> bool:
    return bool(facts.gradients and facts.along and not facts.unsharded)


def _rounded(facts: Facts) -> bool:
    details = [detail for gradient in facts.gradients for detail in gradient.details]
    close = [_is_close(detail.value, detail.reference_value) for detail in details]
    return 2 * sum(close) > len(close)


def _is_close(value: str, reference: str) -> bool:
    with suppress(ValueError):  # a NaN with its bits
        return abs(complex(value) - complex(reference)) <= 1e-3 * abs(complex(reference))
    return False


# To add a cause, add an entry. {along}, {unsharded} and {first} are replaced by dimensions of the
# mesh, in entries that apply to meshes. The report shows the first entry that applies.
CAUSES = (
    Cause(
        "unused-parameters",
        lambda facts: facts.unused and bool(facts.gradients),
        "DDP did not reduce the gradients: a parameter that the loss of a rank does not use (an "
        "expert without tokens) blocks the bucket it is in",
        "give DDP find_unused_parameters=True (--find-unused-parameters here), or add 0 * the sum "
        "of the unused outputs to the loss of every rank",
    ),
    Cause(
        "different-options",
        lambda facts: bool(facts.options),
        "the ranks' optimizers have different options, such as learning rates or weight decay",
        "compute the options from values that all ranks share; look for a scheduler that steps in "
        "one rank only",
        "optimizer",
    ),
    Cause(
        "bit-flip",
        lambda facts: _is_one_bit(facts.only_difference),
        "one bit of one element differs: most likely memory or a link is faulty. Multiplying the "
        "element by -1 or a power of two, or rounding it differently, has the same effect",
        "restore from a checkpoint; if it happens again on this host, count memory errors with "
        "`nvidia-smi -q -d ECC` (GPU) or `edac-util -v` (host), and replace the faulty part",
    ),
    Cause(
        "corrupted-result",
        _one_bit_of_a_gradient,
        "one bit of one reduced gradient differs: the network or memory corrupted the result of a "
        "collective, or code edited the gradient after backward",
        "restore from a checkpoint; if it happens again on this host, read the error counters with "
        "`ip -s link` (network) and `nvidia-smi -q -d ECC` (GPU), and replace the faulty part",
        "gradient",
    ),
    Cause(
        "permuted",
        _permuted,
        "the elements are the same in another order: some ranks permuted the tensor",
        "look for code that transposes, sorts or shuffles this tensor in some ranks only, or loads "
        "it from a checkpoint of another layout",
    ),
    Cause(
        "non-finite-in-some",
        _nonfinite_in_some,
        "the NaN or infinity is in some ranks only: it appeared after the gradients were reduced, "
        "or they were not reduced",
        "look for code that runs only in these ranks between backward and step: clipping, scaling, "
        "edits of .grad; if there is none, suspect the device",
    ),
    Cause(
        "replicas-initialised-apart",
        _initialised,
        "the ranks started from different weights: each initialised its own, or only some ranks "
        "loaded a checkpoint",
        "set the same seed in every rank before you build the model, or load one checkpoint in "
        "every rank. Sharding a module sends no weights from one replica to another",
    ),
    Cause(
        "sharded-without-replicas",
        lambda facts: bool(facts.gradients and facts.unsharded) and not facts.is_reduced_there,
        "gradients differ along {unsharded}, where nobody reduces them: the mesh of these "
        "parameters lacks this dimension",
        'give fully_shard the mesh with both dimensions: `mesh["{first}", …]`, first the one that '
        "replicates, then the one that shards. Then load the same weights in every rank",
    ),
    Cause(
        "gradients-changed-apart",
        lambda facts: bool(facts.gradients and facts.unsharded),
        "gradients differ along {unsharded}, although fully_shard reduces them there: this "
        "reduction was skipped, or some ranks changed gradients after backward",
        "call set_requires_all_reduce(True) before the backward of the last micro-batch; do not "
        "change .grad by rank after backward (clip with torch.nn.utils.clip_grad_norm_)",
        "gradient",
    ),
    Cause(
        "rounded-apart",
        lambda facts: _unplanned(facts) and _rounded(facts),
        "gradients of parameters that are replicated along {along} differ by rounding, and nobody "
        "reduces them there: the copies drift apart",
        "average these gradients before each optimizer step: "
        '`dist.all_reduce(grad, group=mesh.get_group("{first}"))`, then divide by its size; use '
        "torch.use_deterministic_algorithms(True) to find the operation",
        "gradient",
    ),
    Cause(
        "computed-apart",
        _unplanned,
        "gradients of parameters that are replicated along {along} differ, and nobody reduces them "
        "there: the ranks read different batches, draw other dropout, or backward is partial",
        "give the ranks along {along} the same batch and the same seed for dropout; if they are "
        'meant to differ, all_reduce the gradients over `mesh.get_group("{first}")` before a step',
        "gradient",
    ),
    Cause(
        "never-synchronised",
        lambda facts: len(facts.gradients) > 1 and not (facts.earlier or facts.mesh),
        "gradients differ since the first verification: the forward bypassed DDP "
        "(`ddp.module(...)` or the bare module) or ran under no_sync, or the replicas were never "
        "synchronised",
        "call the DDP object itself in the training step, and wrap the module before the first "
        "step, with the same weights in every rank",
    ),
    Cause(
        "not-reduced",
        lambda facts: bool(facts.gradients) and not facts.mesh,
        "gradients differ: the last micro-batch ran under no_sync, its forward bypassed DDP with "
        "`ddp.module(...)`, or some ranks changed gradients after backward",
        "call the DDP object itself, leave no_sync before the last micro-batch's forward (not "
        "only its backward), and do not change .grad by rank after backward",
    ),
    Cause(
        "one-tensor",
        lambda facts: facts.only_difference is not None and not facts.kinds <= {"optimizer"},
        "only one tensor differs: some ranks changed it in place, outside the optimizer",
        "look for code that changes it under `if rank` or with the rank's own random numbers "
        "(re-initialising, clamping, weight tying, loading); if only one element differs, memory "
        "may have failed some steps ago",
    ),
    Cause(
        "different-updates",
        lambda facts: bool(facts.parameters) and not facts.gradients,
        "parameters differ, but the gradients of this step do not: some ranks skipped a step, "
        "loaded or changed weights, or the replicas differed before this step",
        "create a Verifier with the module and every optimizer; check once before the first step "
        "and after every step, before zero_grad()",
    ),
    Cause(
        "optimizer-state",
        lambda facts: facts.kinds == {"optimizer"},
        "only the optimizer's state differs: some ranks edited or loaded it, or parameters were "
        "averaged without it (Join, local SGD). The parameters will differ after the next step",
        "load the optimizer's checkpoint in every rank; after Join or an average of parameters, "
        "broadcast the state as well",
        "optimizer",
    ),
    Cause(
        "rebroadcast-buffers",
        lambda facts: not facts.kinds and facts.resends_buffers,
        "only buffers differ, such as BatchNorm's running statistics: each rank updates them from "
        "its own data, and DDP sends those of rank 0 to all ranks at the next forward",
        "use SyncBatchNorm if the statistics should cover the data of all ranks",
    ),
    Cause(
        "buffers-of-a-mesh",
        lambda facts: not facts.kinds and facts.mesh,
        "only buffers differ along {along}, and nothing sends them from rank to rank",
        "use SyncBatchNorm, or broadcast the buffers before you evaluate and save",
    ),
    Cause(
        "buffers",
        lambda facts: not facts.kinds,
        "only buffers differ, and no DDP was found that broadcasts them",
        "pass the DDP object, not the bare module; with broadcast_buffers=False use SyncBatchNorm, "
        "or broadcast the buffers before you evaluate and save",
    ),
)


def find_cause(facts: Facts) -> tuple[Cause | None, Difference | None]:
    """Return the first cause whose pattern applies, and a difference that shows it."""
    cause = next((cause for cause in CAUSES if cause.applies(facts)), None)
    # A mismatch explains itself, and may be the cause of the differences.
    if cause is None or (facts.report.mismatches and not facts.unused):
        return None, None
    differences = facts.report.differences
    example = next((d for d in differences if d.kind == cause.evidence), differences[0])
    names = {
        "along": list_all(facts.along or ["the mesh"]),
        "unsharded": list_all(facts.unsharded or ["the mesh"]),
        "first": next(iter(facts.unsharded or facts.along), ""),
    }
    sentence, next_step = (text.format(**names) for text in (cause.sentence, cause.next_step))
    return replace(cause, sentence=sentence, next_step=next_step), example
