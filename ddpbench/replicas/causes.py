"""What a pattern of differences makes likely: one entry of CAUSES each, the most special first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ddpbench.replicas.report import Difference, Mismatch, NonFinite, WithoutGradient
from ddpbench.replicas.state import is_option
from ddpbench.replicas.usage import FROZEN, EqualCounts


@dataclass(frozen=True)
class Facts:
    """The pattern, the same in every rank."""

    world_size: int
    differences: tuple[Difference, ...]
    mismatches: tuple[Mismatch, ...]
    nonfinite: tuple[NonFinite, ...]
    without_gradient: tuple[WithoutGradient, ...]
    parameters: int  # how many there are
    gradients: int  # how many were compared; 0: none were there, or none were asked for
    frozen: frozenset[str]  # parameters with requires_grad=False
    earlier: bool  # a verification before this one found all parameters equal
    unsynced: bool  # in some rank DDP's last forward was under no_sync (or no_grad)
    finds_unused: bool  # DDP looks for unused parameters itself
    rebroadcast: bool  # DDP sends rank 0's buffers before each forward
    optimizers: bool  # some were given
    stepped: bool  # in some rank an optimizer has state
    stateless: bool  # in some rank an optimizer keeps no state, so its steps leave no trace
    steps: int  # how many step counts the optimizers keep
    equal: EqualCounts

    def of(self, kind: str) -> list[Difference]:
        """The differences of a kind."""
        return [d for d in self.differences if d.kind == kind]

    @property
    def options(self) -> list[Difference]:
        """Differing options of the optimizer's groups, such as lr."""
        return [d for d in self.of("optimizer") if is_option(d.name)]

    @property
    def kinds(self) -> set[str]:
        """What differs, without buffers, which follow from all else."""
        return {d.kind for d in self.differences} - {"buffer"}

    @property
    def one(self) -> Difference | None:
        """The only tensor that differs, apart from buffers; else the only buffer."""
        main = [d for d in self.differences if d.kind != "buffer"] or list(self.differences)
        return main[0] if len(main) == 1 else None

    @property
    def all_parameters(self) -> bool:
        """Whether every parameter differs, of several, but for constants."""
        return len(self.of("parameter")) > 1 and not self.equal.parameters

    @property
    def all_gradients(self) -> bool:
        """Whether every gradient differs, of several, but for zeros."""
        return len(self.of("gradient")) > 1 and not self.equal.gradients

    @property
    def reduced(self) -> bool:
        """Whether gradients were compared and are equal in all ranks."""
        unlike = any(each.kind == "gradient" for each in self.mismatches)
        return self.gradients > 0 and not (unlike or self.of("gradient"))

    @property
    def redrawn(self) -> bool:
        """Whether most elements of each parameter that differs do: drawn anew, or loaded."""
        details = [detail for each in self.of("parameter") for detail in each.details]
        return bool(details) and all(2 * d.differing > d.elements for d in details)


@dataclass(frozen=True)
class Cause:
    """A pattern, what it tells and what to do."""

    code: str
    applies: Callable[[Facts], bool]
    sentence: str
    next_step: str
    # What to show of all that differs; None: the first parameter, else the first of all.
    evidence: Callable[[Facts], list[Difference]] | None = None
    unlike: tuple[str, ...] = ()  # the kinds of which what is not in all ranks alike is the example

    def shown(self, facts: Facts) -> Difference | None:
        """The difference to show as the example; None where there is none."""
        chosen = self.evidence(facts) if self.evidence else facts.of("parameter")
        return next(iter(chosen or facts.differences), None)


def _one_bit(facts: Facts) -> bool:
    return facts.one is not None and _flipped(facts.one)


def _one_bit_of_a_gradient(facts: Facts) -> bool:
    """And no parameter differs but the one that was stepped by it."""
    those = facts.of("gradient")
    stepped = {each.name for each in facts.of("parameter")}
    return len(those) == 1 and _flipped(those[0]) and stepped == {those[0].name}


def _flipped(one: Difference) -> bool:
    """One bit of one of its elements."""
    if "float" not in one.dtype or len(one.details) != 1:
        return False
    detail = one.details[0]
    # Of a single number, such as a step count, that one element alone differs tells nothing; and
    # the sign of a zero is arithmetic's.
    return (
        detail.elements > 1
        and detail.bit is not None
        and {detail.value, detail.reference_value} != {"0.0", "-0.0"}
    )


def _permuted(facts: Facts) -> bool:
    details = facts.one.details if facts.one else ()
    return bool(details) and all(detail.permuted for detail in details)


def _nonfinite_in_some(facts: Facts) -> bool:
    differing = {(d.kind, d.name) for d in facts.differences if d.kind == "parameter"}
    everywhere = {rank for d in facts.differences for ranks in d.values for rank in ranks}
    found = {(n.kind, n.name): {rank for rank, _ in n.counts} for n in facts.nonfinite}
    return bool(differing) and all(key in found and found[key] < everywhere for key in differing)


def _unused(facts: Facts) -> bool:
    # Under no_sync nothing is reduced either way; with find_unused_parameters nothing waits.
    excused = facts.unsynced or facts.finds_unused
    local = facts.gradients > 0 and not facts.reduced
    return bool(facts.without_gradient) and local and not excused


def _structure(facts: Facts) -> bool:
    return any(
        each.kind in ("parameter", "buffer") or is_option(each.name) for each in facts.mismatches
    )


def _frozen(facts: Facts) -> bool:
    return any(form == FROZEN for each in facts.mismatches for form, _ in each.forms)


def _missing_state(facts: Facts) -> bool:
    # Gradients that were not reduced explain state that is not there, too.
    local = facts.gradients > 0 and not facts.reduced
    return any(each.kind == "optimizer" for each in facts.mismatches) and not local


def _step_counts(facts: Facts) -> list[Difference]:
    return [d for d in facts.of("optimizer") if d.name.endswith(".step")]


def _uneven_steps(facts: Facts) -> bool:
    if "parameter" not in facts.kinds or any(m.kind == "optimizer" for m in facts.mismatches):
        return False
    return 0 < facts.steps == len(_step_counts(facts))


def _initialised(facts: Facts) -> bool:
    """Parameters differ as if drawn anew, and no step can have made them differ."""
    if facts.earlier or facts.kinds != {"parameter"} or not facts.redrawn:
        return False
    if facts.reduced:  # the same gradients, and as far as can be seen the same step
        return facts.equal.trained > 0 or (facts.stepped and not facts.stateless)
    if facts.gradients:
        return False
    unstepped = facts.optimizers and not (facts.stepped or facts.stateless)
    return unstepped or (facts.equal.trainable > 0 and not facts.stepped)


def _untrained(facts: Facts) -> bool:
    untrained = all(each.name in facts.frozen for each in facts.of("parameter"))
    return facts.kinds == {"parameter"} and untrained and facts.redrawn


def _bypassed(facts: Facts) -> bool:
    # Adam's first step goes by the gradients' signs: a parameter can stay equal by luck.
    local = facts.all_gradients and "parameter" in facts.kinds
    return local and not (facts.earlier or facts.unsynced)


def _changed_outside(facts: Facts) -> bool:
    same_step = facts.reduced and facts.stepped and not facts.stateless
    return facts.kinds == {"parameter"} and facts.all_parameters and same_step


# To add a cause: one entry. The first that applies is told.
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
        "the gradients were not reduced, because some ranks have no gradient for some "
        "parameters: DDP reduces a bucket once all its parameters have their gradients, so a "
        "parameter that a rank's loss does not use (an expert without tokens) holds up the "
        "others",
        "give DDP find_unused_parameters=True (--find-unused-parameters here), or let every "
        "rank's loss use every parameter, for example by adding 0 * the sum of the unused "
        "outputs",
        unlike=("gradient",),
    ),
    Cause(
        "missing-state",
        _missing_state,
        "some ranks' optimizers hold state that others do not: it was loaded, or stepped, in some "
        "ranks only",
        "load the optimizer's checkpoint in every rank, and let every rank take every step",
        unlike=("optimizer",),
    ),
    Cause(
        "different-options",
        lambda facts: bool(facts.options),
        "the ranks' optimizers have different options, such as learning rates or weight decay",
        "set them from what all ranks share (a scheduler stepped in one rank only, a learning "
        "rate computed from the rank or from its own loss?)",
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
        "one bit of one element differs: most likely a fault of memory or of a link; multiplying "
        "that element by -1 or a power of two, or rounding it otherwise, does the same",
        "restore from a checkpoint; if it comes again on one host, test or replace its memory or "
        "GPU (EDAC or `nvidia-smi -q -d ECC` counts errors)",
    ),
    Cause(
        "corrupted-result",
        _one_bit_of_a_gradient,
        "one bit of one reduced gradient differs, and its parameter with it: the result of a "
        "collective was corrupted on its way into those ranks or in their memory, or something "
        "edited that gradient after backward",
        "restore from a checkpoint; if it comes again on one host, read the error counters of its "
        "network adapter and its GPU or memory, and replace what counts",
        lambda facts: facts.of("gradient"),
    ),
    Cause(
        "permuted",
        _permuted,
        "the same elements in another order: the tensor was permuted, or loaded in another layout",
        "look for what reorders this tensor in some ranks only: transposing, sorting, shuffling, "
        "loading a checkpoint of another layout",
    ),
    Cause(
        "non-finite-in-some",
        _nonfinite_in_some,
        "every parameter that differs is not finite in some ranks and finite in the others: it "
        "arose after the gradients were reduced, or without their being reduced",
        "look at what those ranks alone do between backward and step: clipping, scaling, edits "
        "of .grad; with none of these, suspect the device",
    ),
    Cause(
        "untrained-parameters",
        _untrained,
        "only parameters that no gradient trains differ (requires_grad=False), one of: each "
        "rank initialised or loaded them by itself; some ranks alone update them (an average "
        "of the weights, a teacher)",
        "load them, and update them, in every rank",
    ),
    Cause(
        "different-initialisation",
        _initialised,
        "the ranks started from different weights: each rank initialised them with random "
        "numbers of its own, or some ranks alone loaded a checkpoint",
        "set the same seed in every rank before you build the model, or wrap it in DDP after "
        "the last initialisation and load (without init_sync=False): DDP then sends rank 0's "
        "weights to all",
    ),
    Cause(
        "never-synchronised",
        _bypassed,
        "gradients and parameters differ from the first verification on, one of: the forward "
        "bypassed DDP (it called `ddp.module(...)` or the bare module); the replicas were "
        "never synchronised",
        "call the DDP object itself in the training step, and wrap the module before the first "
        "step, with the same weights in every rank",
    ),
    Cause(
        "not-reduced",
        lambda facts: bool(
            facts.of("gradient") or any(m.kind == "gradient" for m in facts.mismatches)
        ),
        "gradients differ, one of: the last micro-batch ran under no_sync; its forward "
        "bypassed DDP by `ddp.module(...)`; some ranks changed gradients after backward",
        "call the DDP object itself, leave no_sync before the last micro-batch's forward (not "
        "only its backward), and do not change .grad by rank after backward",
    ),
    Cause(
        "changed-outside",
        _changed_outside,
        "parameters differ, and the gradients, the optimizer's options and its state are "
        "equal: some ranks changed the parameters outside the optimizer",
        "look for what only some ranks do: load_state_dict, averaging or clamping weights, "
        "initialising again",
    ),
    Cause(
        "different-updates",
        lambda facts: facts.all_parameters and facts.gradients > 0,
        "parameters differ, and the gradients of this step are equal, one of: the replicas "
        "differed before this step; their learning rates or optimizers differ; some ranks "
        "skipped the step",
        "verify after every step, once before the first, with every optimizer: `Verifier(ddp, "
        "optimizer)`",
    ),
    Cause(
        "one-tensor",
        lambda facts: facts.one is not None and facts.one.kind in ("parameter", "gradient"),
        "one tensor alone differs: some ranks changed it in place, outside the optimizer",
        "look for code that touches it under `if rank` or with the rank's own random numbers "
        "(re-initialising, clamping, weight tying, loading); one element alone may also be a fault "
        "of memory, some steps ago",
    ),
    Cause(
        "optimizer-state",
        lambda facts: facts.kinds == {"optimizer"},
        "the optimizer's state alone differs, and parameters will from the next step on: it was "
        "edited, or loaded in some ranks only",
        "load the optimizer's checkpoint in every rank",
    ),
    Cause(
        "rebroadcast-buffers",
        lambda facts: not facts.kinds and facts.rebroadcast,
        "only buffers differ, such as BatchNorm's running statistics: each rank updates them from "
        "its own data, and DDP sends rank 0's to all at the next forward",
        "use SyncBatchNorm if the statistics should be those of all ranks",
    ),
    Cause(
        "buffers",
        lambda facts: not facts.kinds,
        "only buffers differ, and nothing is seen that re-broadcasts them: each rank will evaluate "
        "with its own",
        "give the DDP object rather than the bare module; with broadcast_buffers=False use "
        "SyncBatchNorm, or broadcast them before evaluating and saving",
    ),
    Cause(
        "no-gradients-seen",
        lambda facts: facts.all_parameters,
        "all parameters differ, and no gradients are left to tell why, one of: each rank "
        "initialised or loaded weights of its own; gradients were not reduced; the ranks took "
        "different steps",
        "verify with the optimizer, once before the first step, then after each "
        "optimizer.step() and before zero_grad()",
    ),
    Cause(
        "some-parameters",
        lambda facts: "parameter" in facts.kinds,
        "some parameters differ and others do not, one of: some ranks changed them outside DDP "
        "and the optimizer; only some ranks train them",
        "look at what the tensors named have in common: a layer that some ranks skip, load or "
        "initialise again",
    ),
)  # fmt: skip


def likely(facts: Facts) -> Cause | None:
    """The first entry of the table whose pattern applies; None where nothing differs."""
    if not facts.differences and not facts.mismatches:
        return None
    return next((cause for cause in CAUSES if cause.applies(facts)), None)
