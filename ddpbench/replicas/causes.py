"""Likely causes of patterns of differences: one entry of CAUSES each, the most specific first."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from ddpbench.records.wording import list_all
from ddpbench.replicas.report import Difference
from ddpbench.replicas.state import is_option
from ddpbench.replicas.training import FROZEN, Facts


@dataclass(frozen=True)
class Cause:
    """A pattern, its explanation and the next step."""

    code: str
    applies: Callable[[Facts], bool]
    sentence: str
    next_step: str
    evidence: str = "parameter"  # kind whose first difference, if there is one, is the example
    unlike: tuple[str, ...] = ()  # kinds whose mismatch, if there is one, is the example


# --- patterns


def _one_bit_of_a_gradient(facts: Facts) -> bool:
    gradients = facts.select("gradient")
    stepped = {parameter.name for parameter in facts.select("parameter")}
    return len(gradients) == 1 and _is_one_bit(gradients[0]) and stepped == {gradients[0].name}


def _is_one_bit(difference: Difference | None) -> bool:
    if not difference or "float" not in difference.dtype or len(difference.details) != 1:
        return False
    detail = difference.details[0]
    # A tensor of one element, such as a step count, always differs in one element: no evidence.
    # The sign of a zero comes from arithmetic.
    is_zero = {detail.value, detail.reference_value} == {"0.0", "-0.0"}
    return detail.elements > 1 and detail.bit is not None and not is_zero


def _permuted(facts: Facts) -> bool:
    details = facts.only_difference.details if facts.only_difference else ()
    return bool(details) and all(detail.permuted for detail in details)


def _nonfinite_in_some(facts: Facts) -> bool:
    differing = {d.name for d in facts.select("parameter")}
    ranks = {rank for d in facts.report.differences for side in d.sides for rank in side}
    nonfinite = [n for n in facts.report.nonfinite if n.kind == "parameter"]
    some = {n.name for n in nonfinite if {rank for rank, _ in n.counts} < ranks}
    return bool(differing) and differing <= some


def _unused(facts: Facts) -> bool:
    # Under no_sync DDP reduces nothing; with find_unused_parameters no bucket waits.
    excused = facts.totals["unsynced"] or facts.totals["finds_unused"] or facts.mesh
    return bool(facts.report.without_gradient) and facts.unreduced and not excused


def _structure(facts: Facts) -> bool:
    mismatches = facts.report.mismatches
    return any(m.kind in ("parameter", "buffer") or is_option(m.name) for m in mismatches)


def _uneven_steps(facts: Facts) -> bool:
    steps = sum(d.name.endswith(".step") for d in facts.select("optimizer"))
    differing = steps * len(facts.report.ranks)
    return "optimizer" not in facts.unlike and 0 < facts.totals["steps"] == differing


def _unmanaged(facts: Facts) -> bool:
    gradients = len({d.name for d in facts.select("gradient")}) * len(facts.report.ranks)
    return 0 < gradients <= facts.totals["unmanaged"] and "parameter" in facts.kinds


def _averaged(facts: Facts) -> bool:
    whole = facts.all_parameters or facts.kinds == {"optimizer"}
    excluded = facts.mesh or facts.options or facts.report.mismatches
    return facts.totals["averages"] > 0 and whole and not excluded


def _initialised(facts: Facts) -> bool:
    if facts.earlier or facts.kinds != {"parameter"} or not facts.redrawn:
        return False
    if facts.reduced:  # the gradients are the same, and as far as is known, so are the steps
        return facts.totals["trained"] > 0 or facts.same_steps
    if facts.gradients or facts.totals["stepped"]:
        return False
    unstepped = facts.totals["optimizers"] and not facts.totals["stateless"]
    return bool(unstepped) or facts.totals["trainable"] > 0


def _untrained(facts: Facts) -> bool:
    untrained = all(d.name in facts.frozen for d in facts.select("parameter"))
    return facts.kinds == {"parameter"} and untrained and facts.redrawn


def _bypassed(facts: Facts) -> bool:
    # Adam's first step depends on the signs of the gradients: a parameter can stay equal by chance.
    gradients = facts.select("gradient")
    local = len(gradients) > 1 and not facts.totals["gradients"] and "parameter" in facts.kinds
    return local and not (facts.earlier or facts.totals["unsynced"] or facts.mesh)


def _changed_outside(facts: Facts) -> bool:
    whole = facts.kinds == {"parameter"} and facts.all_parameters
    return whole and facts.reduced and facts.same_steps


def _unreduced(facts: Facts, *, spanned: bool) -> bool:
    """Return whether gradients differ along a dimension that replicates the whole model.

    spanned: whether the mesh of a parameter that differs has this dimension.
    """
    known = spanned == bool(facts.spanned & {*facts.unsharded})
    return bool(facts.select("gradient") and facts.unsharded) and known


def _unplanned(facts: Facts) -> bool:
    return bool(facts.select("gradient") and facts.along and not facts.unsharded)


def _rounded(facts: Facts) -> bool:
    details = [detail for g in facts.select("gradient") for detail in g.details]
    close = [_is_close(detail.value, detail.reference_value) for detail in details]
    return 2 * sum(close) > len(close)


def _is_close(value: str, reference: str) -> bool:
    try:
        return math.isclose(float(value), float(reference), rel_tol=1e-3)
    except ValueError:  # a complex number, or a NaN with its bits
        return False


# To add a cause, add an entry. {along}, {unsharded} and {first} are replaced by dimensions of the
# mesh.
# The report shows the first entry that applies.
CAUSES = (
    Cause(
        "frozen-in-some",
        lambda facts: any(FROZEN in m.forms for m in facts.report.mismatches),
        "some ranks freeze parameters that other ranks train",
        "set requires_grad the same way in every rank, before the module is wrapped or sharded",
        unlike=("parameter",),
    ),
    Cause(
        "different-structure",
        _structure,
        "the ranks have built different models or optimizers",
        "build both from the same arguments in every rank; look for `if rank == 0` around "
        "layers, param_groups or load_state_dict",
        unlike=("parameter", "buffer", "optimizer"),
    ),
    Cause(
        "not-managed",
        _unmanaged,
        "DDP does not reduce the gradients of these parameters: they were added or unfrozen after "
        "the module was wrapped",
        "wrap the module in DDP after the last change of its layers or of requires_grad",
        "gradient",
    ),
    Cause(
        "averaged-now-and-then",
        _averaged,
        "the ranks train apart and average their parameters from time to time (local SGD, "
        "PeriodicModelAverager). In between, replicas differ by design",
        "verify right after the averager has averaged, and without the optimizer: Verifier(model)",
    ),
    Cause(
        "unused-parameters",
        _unused,
        "DDP did not reduce the gradients: a parameter that the loss of a rank does not use (an "
        "expert without tokens) blocks the bucket it is in",
        "give DDP find_unused_parameters=True (--find-unused-parameters here), or add 0 * the sum "
        "of the unused outputs to the loss of every rank",
        unlike=("gradient",),
    ),
    Cause(
        "missing-state",
        # Gradients that were not reduced also explain missing state.
        lambda facts: "optimizer" in facts.unlike and not facts.unreduced,
        "only some ranks loaded a checkpoint of the optimizer or took a step",
        "load the optimizer's checkpoint in every rank, and let every rank take every step",
        unlike=("optimizer",),
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
        "uneven-steps",
        _uneven_steps,
        "the optimizers have not taken the same number of steps",
        "let every rank take every step; look for a step that some ranks skip: after a NaN check "
        "or an exception, in a GradScaler of its own, or under Join",
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
        "untrained-parameters",
        _untrained,
        "only frozen parameters differ: each rank initialised or loaded its own, or only some "
        "ranks update them (averaged weights, a teacher)",
        "load and update these parameters in every rank",
    ),
    Cause(
        "replicas-initialised-apart",
        lambda facts: facts.mesh and _initialised(facts),
        "the ranks along {along} started from different weights. Sharding a module sends no "
        "weights from one replica to another",
        "set the same seed along {along} before the weights are initialised, or load one "
        "checkpoint in every rank; until then, copy the first replica's parameters: "
        '`dist.broadcast(p.to_local(), group=mesh.get_group("{first}"), group_src=0)`',
    ),
    Cause(
        "different-initialisation",
        _initialised,
        "the ranks started from different weights: each initialised its own, or only some ranks "
        "loaded a checkpoint",
        "set the same seed in every rank before you build the model, or wrap it in DDP after the "
        "last initialisation and load: DDP sends rank 0's weights to all",
    ),
    Cause(
        "sharded-without-replicas",
        lambda facts: _unreduced(facts, spanned=False),
        "gradients differ along {unsharded}, where nobody reduces them: the mesh of these "
        "parameters lacks this dimension",
        'give fully_shard the mesh with both dimensions: `mesh["{first}", …]`, first the one that '
        "replicates, then the one that shards. Then load the same weights in every rank",
    ),
    Cause(
        "gradients-changed-apart",
        lambda facts: _unreduced(facts, spanned=True),
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
        _bypassed,
        "gradients and parameters differ since the first verification: the forward bypassed DDP "
        "(`ddp.module(...)` or the bare module), or the replicas were never synchronised",
        "call the DDP object itself in the training step, and wrap the module before the first "
        "step, with the same weights in every rank",
    ),
    Cause(
        "not-reduced",
        lambda facts: not facts.mesh and "gradient" in facts.kinds | facts.unlike,
        "gradients differ: the last micro-batch ran under no_sync, its forward bypassed DDP with "
        "`ddp.module(...)`, or some ranks changed gradients after backward",
        "call the DDP object itself, leave no_sync before the last micro-batch's forward (not "
        "only its backward), and do not change .grad by rank after backward",
    ),
    Cause(
        "changed-outside",
        _changed_outside,
        "parameters differ, but the gradients and the optimizer's options and state are equal: "
        "some ranks changed the parameters outside the optimizer",
        "look for code that only some ranks run: load_state_dict, averaging or clamping weights, "
        "initialising again",
    ),
    Cause(
        "different-updates",
        lambda facts: facts.all_parameters and facts.gradients > 0,
        "parameters differ, but the gradients of this step are equal: the replicas differed before "
        "it, their optimizers differ, or some ranks skipped the step",
        "create a Verifier with the module and every optimizer; check once before the first step "
        "and after every step",
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
        "optimizer-state",
        lambda facts: facts.kinds == {"optimizer"},
        "only the optimizer's state differs: some ranks edited or loaded it, or parameters were "
        "averaged without it (Join, local SGD). The parameters will differ after the next step",
        "load the optimizer's checkpoint in every rank; after Join or an average of parameters, "
        "broadcast the state as well",
    ),
    Cause(
        "rebroadcast-buffers",
        lambda facts: not facts.kinds and not facts.totals["keeps_buffers"],
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
    Cause(
        "no-gradients-seen",
        lambda facts: facts.all_parameters,
        "all parameters differ, and there are no gradients to find the reason",
        "pass the optimizer; verify once before the first step, then after each optimizer.step() "
        "and before zero_grad()",
    ),
)


def find_cause(facts: Facts) -> Cause | None:
    """Return the first cause whose pattern applies; None if none does."""
    cause = next((cause for cause in CAUSES if cause.applies(facts)), None)
    if cause is None or not facts.mesh:
        return cause
    names = {
        "along": list_all(facts.along or ["the mesh"]),
        "unsharded": list_all(facts.unsharded or ["the mesh"]),
        "first": next(iter(facts.unsharded or facts.along), ""),
    }
    sentence, next_step = (text.format(**names) for text in (cause.sentence, cause.next_step))
    return replace(cause, sentence=sentence, next_step=next_step)
