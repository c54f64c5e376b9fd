"""What a pattern of differences makes likely: one entry of CAUSES each, the most special first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ddpbench.replicas.report import Difference, Mismatch, NonFinite


@dataclass(frozen=True)
class Facts:
    """The pattern, the same in every rank."""

    differences: tuple[Difference, ...]
    mismatches: tuple[Mismatch, ...]
    nonfinite: tuple[NonFinite, ...]
    parameters: int  # how many there are
    gradients: int  # how many were compared; 0: none were there, or none were asked for
    earlier: bool  # a verification before this one found all parameters equal
    wrapped: bool  # DDP was given, not a bare module
    unsynced: bool  # in some rank DDP's last forward was under no_sync (or no_grad)
    unused: bool  # in every rank some parameter that could have a gradient has none
    rebroadcast: bool  # DDP sends rank 0's buffers before each forward

    def of(self, kind: str) -> list[Difference]:
        """The differences of a kind."""
        return [d for d in self.differences if d.kind == kind]

    @property
    def options(self) -> list[Difference]:
        """Differing options of the optimizer's groups, such as lr."""
        return [d for d in self.of("optimizer") if d.name.startswith("param_groups[")]

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
        """Whether every parameter differs, of several."""
        return 1 < self.parameters == len(self.of("parameter"))

    @property
    def all_gradients(self) -> bool:
        """Whether every gradient differs, of several."""
        return 1 < self.gradients == len(self.of("gradient"))


@dataclass(frozen=True)
class Cause:
    """A pattern, what it tells and what to do."""

    code: str
    applies: Callable[[Facts], bool]
    sentence: str
    next_step: str


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


def _bypassed(facts: Facts) -> bool:
    # Adam's first step goes by the gradients' signs: a parameter can stay equal by luck.
    local = facts.all_gradients if facts.gradients else facts.all_parameters
    return local and "parameter" in facts.kinds and not (facts.earlier or facts.unsynced)


# To add a cause: one entry. The first that applies is told.
CAUSES = (
    Cause(
        "different-structure",
        lambda facts: any(
            m.kind in ("parameter", "buffer") or m.name.startswith("param_groups[")
            for m in facts.mismatches
        ),
        "the ranks have built different models or optimizers",
        "build both from the same arguments in every rank; look for `if rank == 0` around layers, "
        "requires_grad, param_groups or load_state_dict",
    ),
    Cause(
        "missing-state",
        lambda facts: any(m.kind == "optimizer" for m in facts.mismatches),
        "some ranks' optimizers hold state that others do not: it was loaded, or stepped, in some "
        "ranks only",
        "load the optimizer's checkpoint in every rank, and let every rank take every step",
    ),
    Cause(
        "different-options",
        lambda facts: bool(facts.options),
        "the ranks' optimizers have different options, such as learning rates",
        "set them from what all ranks share (a scheduler stepped in one rank only, a learning rate "
        "computed from the rank or from its own loss?)",
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
        "unused-parameters",
        lambda facts: facts.wrapped and facts.unused and bool(facts.of("gradient")),
        "gradients differ, and some parameters have none at all: DDP reduces a bucket once all its "
        "parameters have their gradients, so one that the loss does not use keeps the others from "
        "being reduced",
        "give DDP find_unused_parameters=True (--find-unused-parameters here), or leave out what "
        "the loss does not use",
    ),
    Cause(
        "never-synchronised",
        _bypassed,
        "parameters differ everywhere from the first verification on: the forward bypassed DDP (it "
        "called `ddp.module(...)` or the bare module), or the replicas were never synchronised",
        "call the DDP object itself in the training step, and wrap the module before the first "
        "step, with the same weights in every rank",
    ),
    Cause(
        "not-reduced",
        lambda facts: bool(
            facts.of("gradient") or any(m.kind == "gradient" for m in facts.mismatches)
        ),
        "gradients differ: a backward went without reduction (the last micro-batch ran under "
        "no_sync, or its forward bypassed DDP by `ddp.module(...)`), or some ranks changed them "
        "after it",
        "call the DDP object itself, leave no_sync before the last micro-batch's forward (not only "
        "its backward), and do not change .grad by rank after backward",
    ),
    Cause(
        "different-updates",
        lambda facts: facts.all_parameters and facts.gradients > 0,
        "all parameters differ, and the gradients of this step are equal: learning rates or "
        "optimizers differ, or the replicas were not equal before the step",
        "give the optimizer to the verification too, and verify after every step, once before the "
        "first",
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
        "all parameters differ, and there were no gradients left to tell why",
        "verify after optimizer.step() and before zero_grad()",
    ),
    Cause(
        "some-parameters",
        lambda facts: "parameter" in facts.kinds,
        "some parameters differ and others do not: they were changed outside DDP and the "
        "optimizer, or are trained in some ranks only",
        "look at what the tensors named have in common: a layer that some ranks freeze, skip, "
        "load or re-initialise",
    ),
)  # fmt: skip


def likely(facts: Facts) -> Cause | None:
    """The first entry of the table whose pattern applies; None where nothing differs."""
    if not facts.differences and not facts.mismatches:
        return None
    return next((cause for cause in CAUSES if cause.applies(facts)), None)
