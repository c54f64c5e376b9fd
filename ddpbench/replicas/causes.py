"""Likely causes of patterns of differences: one entry of CAUSES each, the most specific first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ddpbench.replicas.report import Difference, Mismatch, NonFinite, WithoutGradient
from ddpbench.replicas.state import is_option
from ddpbench.replicas.usage import FROZEN, EqualCounts


@dataclass(frozen=True)
class Facts:
    """The pattern of a verification, the same in every rank."""

    world_size: int
    differences: tuple[Difference, ...]
    mismatches: tuple[Mismatch, ...]
    nonfinite: tuple[NonFinite, ...]
    without_gradient: tuple[WithoutGradient, ...]
    parameters: int  # number of parameters
    gradients: int  # number of compared gradients; 0 if there are none or they were not wanted
    frozen: frozenset[str]  # parameters with requires_grad=False
    earlier: bool  # an earlier verification found all parameters equal
    unsynced: bool  # DDP's last forward ran under no_sync or no_grad in some rank
    finds_unused: bool  # DDP looks for unused parameters itself
    rebroadcast: bool  # DDP sends rank 0's buffers before each forward
    optimizers: bool  # the caller passed an optimizer
    stepped: bool  # an optimizer has state in some rank
    stateless: bool  # an optimizer in some rank keeps no state, so its steps leave no trace
    steps: int  # number of step counts that the optimizers keep
    equal: EqualCounts

    def select(self, kind: str) -> list[Difference]:
        """Return the differences of a kind."""
        return [d for d in self.differences if d.kind == kind]

    @property
    def options(self) -> list[Difference]:
        """Options of the optimizer's groups that differ, such as lr."""
        return [d for d in self.select("optimizer") if is_option(d.name)]

    @property
    def kinds(self) -> set[str]:
        """Kinds that differ, without buffers: these differ whenever something else does."""
        return {d.kind for d in self.differences} - {"buffer"}

    @property
    def only_difference(self) -> Difference | None:
        """The only tensor that differs, buffers aside; else the only buffer; None if several."""
        main = [d for d in self.differences if d.kind != "buffer"] or list(self.differences)
        return main[0] if len(main) == 1 else None

    @property
    def all_parameters(self) -> bool:
        """Whether all parameters differ, except constants, and there are several."""
        return len(self.select("parameter")) > 1 and not self.equal.parameters

    @property
    def all_gradients(self) -> bool:
        """Whether all gradients differ, except zeros, and there are several."""
        return len(self.select("gradient")) > 1 and not self.equal.gradients

    @property
    def reduced(self) -> bool:
        """Whether gradients were compared and are equal in all ranks."""
        mismatched = any(m.kind == "gradient" for m in self.mismatches)
        return self.gradients > 0 and not (mismatched or self.select("gradient"))

    @property
    def redrawn(self) -> bool:
        """Whether most elements differ in each differing parameter, as after a new random draw."""
        details = [detail for d in self.select("parameter") for detail in d.details]
        return bool(details) and all(2 * d.differing > d.elements for d in details)


@dataclass(frozen=True)
class Cause:
    """A pattern, its explanation and the next step."""

    code: str
    applies: Callable[[Facts], bool]
    sentence: str
    next_step: str
    # Differences to choose the example from (default: parameters); if empty, all differences.
    evidence: Callable[[Facts], list[Difference]] | None = None
    unlike: tuple[str, ...] = ()  # kinds whose mismatch, if there is one, is the example

    def choose_example(self, facts: Facts) -> Difference | None:
        """Return the difference to show as the example; None if nothing differs."""
        candidates = self.evidence(facts) if self.evidence else facts.select("parameter")
        return next(iter(candidates or facts.differences), None)


def _one_bit(facts: Facts) -> bool:
    return facts.only_difference is not None and _is_one_bit(facts.only_difference)


def _one_bit_of_a_gradient(facts: Facts) -> bool:
    """Return whether one bit of one gradient differs, and only the parameter it has changed."""
    gradients = facts.select("gradient")
    stepped = {parameter.name for parameter in facts.select("parameter")}
    return len(gradients) == 1 and _is_one_bit(gradients[0]) and stepped == {gradients[0].name}


def _is_one_bit(difference: Difference) -> bool:
    """Return whether one bit of one element of a floating-point tensor differs."""
    if "float" not in difference.dtype or len(difference.details) != 1:
        return False
    detail = difference.details[0]
    # A tensor of one element, such as a step count, always differs in one element: no evidence.
    # The sign of a zero comes from arithmetic.
    return (
        detail.elements > 1
        and detail.bit is not None
        and {detail.value, detail.reference_value} != {"0.0", "-0.0"}
    )


def _permuted(facts: Facts) -> bool:
    details = facts.only_difference.details if facts.only_difference else ()
    return bool(details) and all(detail.permuted for detail in details)


def _nonfinite_in_some(facts: Facts) -> bool:
    differing = {(d.kind, d.name) for d in facts.differences if d.kind == "parameter"}
    everywhere = {rank for d in facts.differences for ranks in d.values for rank in ranks}
    affected = {(n.kind, n.name): {rank for rank, _ in n.counts} for n in facts.nonfinite}
    return bool(differing) and all(
        key in affected and affected[key] < everywhere for key in differing
    )


def _unused(facts: Facts) -> bool:
    # Under no_sync DDP reduces nothing; with find_unused_parameters no bucket waits.
    excused = facts.unsynced or facts.finds_unused
    local = facts.gradients > 0 and not facts.reduced
    return bool(facts.without_gradient) and local and not excused


def _structure(facts: Facts) -> bool:
    return any(m.kind in ("parameter", "buffer") or is_option(m.name) for m in facts.mismatches)


def _frozen(facts: Facts) -> bool:
    return any(form == FROZEN for m in facts.mismatches for form, _ in m.forms)


def _missing_state(facts: Facts) -> bool:
    # Gradients that were not reduced also explain missing state.
    local = facts.gradients > 0 and not facts.reduced
    return any(m.kind == "optimizer" for m in facts.mismatches) and not local


def _step_counts(facts: Facts) -> list[Difference]:
    return [d for d in facts.select("optimizer") if d.name.endswith(".step")]


def _uneven_steps(facts: Facts) -> bool:
    if "parameter" not in facts.kinds or any(m.kind == "optimizer" for m in facts.mismatches):
        return False
    return 0 < facts.steps == len(_step_counts(facts))


def _initialised(facts: Facts) -> bool:
    """Return whether parameters differ as after a new random draw, and no step can be the cause."""
    if facts.earlier or facts.kinds != {"parameter"} or not facts.redrawn:
        return False
    if facts.reduced:  # the gradients are the same, and so, as far as is known, are the steps
        return facts.equal.trained > 0 or (facts.stepped and not facts.stateless)
    if facts.gradients:
        return False
    unstepped = facts.optimizers and not (facts.stepped or facts.stateless)
    return unstepped or (facts.equal.trainable > 0 and not facts.stepped)


def _untrained(facts: Facts) -> bool:
    untrained = all(d.name in facts.frozen for d in facts.select("parameter"))
    return facts.kinds == {"parameter"} and untrained and facts.redrawn


def _bypassed(facts: Facts) -> bool:
    # Adam's first step depends on the signs of the gradients: a parameter can stay equal by luck.
    local = facts.all_gradients and "parameter" in facts.kinds
    return local and not (facts.earlier or facts.unsynced)


def _changed_outside(facts: Facts) -> bool:
    same_step = facts.reduced and facts.stepped and not facts.stateless
    return facts.kinds == {"parameter"} and facts.all_parameters and same_step


# To add a cause, add an entry. The report shows the first entry that applies.
CAUSES = (
    Cause(
        "frozen-in-some",
        _frozen,
        "some ranks freeze parameters that other ranks train",
        "set requires_grad the same way in every rank, before DDP wraps the module",
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
        "unused-parameters",
        _unused,
        "DDP did not reduce the gradients, because some ranks have no gradient for some "
        "parameters. DDP reduces a bucket when all its parameters have a gradient, so a parameter "
        "that the loss of a rank does not use (an expert without tokens) blocks its bucket",
        "give DDP find_unused_parameters=True (--find-unused-parameters here), or let every "
        "rank's loss use every parameter, for example by adding 0 * the sum of the unused "
        "outputs",
        unlike=("gradient",),
    ),
    Cause(
        "missing-state",
        _missing_state,
        "the optimizers of some ranks hold state that others do not: only some ranks loaded a "
        "checkpoint or took a step",
        "load the optimizer's checkpoint in every rank, and let every rank take every step",
        unlike=("optimizer",),
    ),
    Cause(
        "different-options",
        lambda facts: bool(facts.options),
        "the ranks' optimizers have different options, such as learning rates or weight decay",
        "compute the options from values that all ranks share; look for a scheduler that steps in "
        "one rank only, or a learning rate computed from the rank or its loss",
        lambda facts: facts.options,
    ),
    Cause(
        "uneven-steps",
        _uneven_steps,
        "the optimizers have not taken the same number of steps",
        "let every rank take every step; look for a step that some ranks skip (after a NaN "
        "check or an exception, in a GradScaler of its own, behind `if rank`)",
        _step_counts,
    ),
    Cause(
        "bit-flip",
        _one_bit,
        "one bit of one element differs: most likely memory or a link is faulty. Multiplying the "
        "element by -1 or a power of two, or rounding it differently, has the same effect",
        "restore from a checkpoint; if it happens again on this host, count memory errors with "
        "`nvidia-smi -q -d ECC` (GPU) or `edac-util -v` (host), and replace the faulty part",
    ),
    Cause(
        "corrupted-result",
        _one_bit_of_a_gradient,
        "one bit of one reduced gradient and its parameter differ: the result of a collective was "
        "corrupted on the network or in memory, or code edited the gradient after backward",
        "restore from a checkpoint; if it happens again on this host, read the error counters with "
        "`ip -s link` (network) and `nvidia-smi -q -d ECC` (GPU), and replace the faulty part",
        lambda facts: facts.select("gradient"),
    ),
    Cause(
        "permuted",
        _permuted,
        "the elements are the same in another order: some ranks permuted the tensor, or loaded it "
        "in another layout",
        "look for code that reorders this tensor in some ranks only: transposing, sorting, "
        "shuffling, loading a checkpoint of another layout",
    ),
    Cause(
        "non-finite-in-some",
        _nonfinite_in_some,
        "all parameters that differ are finite in some ranks only: the NaN or infinity appeared "
        "after the gradients were reduced, or the gradients were not reduced",
        "look for code that runs only in the affected ranks between backward and step: clipping, "
        "scaling, edits of .grad; if there is none, suspect the device",
    ),
    Cause(
        "untrained-parameters",
        _untrained,
        "only frozen parameters differ (requires_grad=False), for one of two reasons: each rank "
        "initialised or loaded its own; some ranks alone update them (averaged weights, a teacher)",
        "load and update these parameters in every rank",
    ),
    Cause(
        "different-initialisation",
        _initialised,
        "the ranks started from different weights: each rank initialised them with its own random "
        "numbers, or some ranks alone loaded a checkpoint",
        "set the same seed in every rank before you build the model, or wrap it in DDP after "
        "the last initialisation and load (without init_sync=False): DDP then sends rank 0's "
        "weights to all",
    ),
    Cause(
        "never-synchronised",
        _bypassed,
        "gradients and parameters differ since the first verification, for one of two reasons: the "
        "forward bypassed DDP (it called `ddp.module(...)` or the bare module); the replicas were "
        "never synchronised",
        "call the DDP object itself in the training step, and wrap the module before the first "
        "step, with the same weights in every rank",
    ),
    Cause(
        "not-reduced",
        lambda facts: bool(
            facts.select("gradient") or any(m.kind == "gradient" for m in facts.mismatches)
        ),
        "gradients differ, for one of three reasons: the last micro-batch ran under no_sync; its "
        "forward bypassed DDP with `ddp.module(...)`; some ranks changed gradients after backward",
        "call the DDP object itself, leave no_sync before the last micro-batch's forward (not "
        "only its backward), and do not change .grad by rank after backward",
    ),
    Cause(
        "changed-outside",
        _changed_outside,
        "parameters differ, and the gradients, the optimizer's options and its state are "
        "equal: some ranks changed the parameters outside the optimizer",
        "look for code that only some ranks run: load_state_dict, averaging or clamping weights, "
        "initialising again",
    ),
    Cause(
        "different-updates",
        lambda facts: facts.all_parameters and facts.gradients > 0,
        "parameters differ, and the gradients of this step are equal, for one of three reasons: "
        "the replicas differed before this step; their learning rates or optimizers differ; some "
        "ranks skipped the step",
        "create `Verifier(ddp, optimizer)` with every optimizer; check once before the first step "
        "and after every step",
    ),
    Cause(
        "one-tensor",
        lambda facts: (
            facts.only_difference is not None
            and facts.only_difference.kind in ("parameter", "gradient")
        ),
        "only one tensor differs: some ranks changed it in place, outside the optimizer",
        "look for code that changes it under `if rank` or with the rank's own random numbers "
        "(re-initialising, clamping, weight tying, loading); if only one element differs, memory "
        "may have failed some steps ago",
    ),
    Cause(
        "optimizer-state",
        lambda facts: facts.kinds == {"optimizer"},
        "only the optimizer's state differs: it was edited, or loaded in some ranks only. The "
        "parameters will differ after the next step",
        "load the optimizer's checkpoint in every rank",
    ),
    Cause(
        "rebroadcast-buffers",
        lambda facts: not facts.kinds and facts.rebroadcast,
        "only buffers differ, such as BatchNorm's running statistics: each rank updates them from "
        "its own data, and DDP sends those of rank 0 to all ranks at the next forward",
        "use SyncBatchNorm if the statistics should cover the data of all ranks",
    ),
    Cause(
        "buffers",
        lambda facts: not facts.kinds,
        "only buffers differ, and no DDP was found that broadcasts them: each rank will evaluate "
        "with its own",
        "pass the DDP object, not the bare module; with broadcast_buffers=False use SyncBatchNorm, "
        "or broadcast the buffers before you evaluate and save",
    ),
    Cause(
        "no-gradients-seen",
        lambda facts: facts.all_parameters,
        "all parameters differ, and there are no gradients to find the reason, one of three: each "
        "rank initialised or loaded its own weights; gradients were not reduced; the ranks took "
        "different steps",
        "pass the optimizer; verify once before the first step, then after each optimizer.step() "
        "and before zero_grad()",
    ),
    Cause(
        "some-parameters",
        lambda facts: "parameter" in facts.kinds,
        "some parameters differ and others do not, for one of two reasons: some ranks changed them "
        "outside DDP and the optimizer; only some ranks train them",
        "find what these tensors have in common: a layer that some ranks skip, load or initialise "
        "again",
    ),
)


def find_cause(facts: Facts) -> Cause | None:
    """Return the first cause whose pattern applies; None if nothing differs or none applies."""
    if not facts.differences and not facts.mismatches:
        return None
    return next((cause for cause in CAUSES if cause.applies(facts)), None)
