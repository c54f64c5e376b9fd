"""Findings of a verification: tensors that differ in the same way share one finding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from ddpbench.records.schema import SEVERITIES, Finding
from ddpbench.records.wording import counted, list_all
from ddpbench.replicas.causes import Cause
from ddpbench.replicas.describe import describe_fold
from ddpbench.replicas.facts import Facts
from ddpbench.replicas.places import Places
from ddpbench.replicas.report import (
    NOT_REDUCED,
    Difference,
    Mismatch,
    NonFinite,
    NotCompared,
    Origin,
    Report,
    count_kind,
    few,
    ranks_text,
)

T = TypeVar("T")
_SHOWN = 8  # ranks in a sentence; the report has them all
_SIDES = 3  # findings per pattern of ranks; one more finding sums up the rest
Key = tuple[object, ...]  # fault, kind, name, and the ranks on each side
# What was wrong at the last check, with the step and the code of the report that explained it.
History = Mapping[Key, tuple[int, str]]


@dataclass(frozen=True)
class Verification:
    """Results of a verification other than the differences."""

    not_compared: tuple[NotCompared, ...]
    origins: tuple[Origin, ...]
    traced: bool  # whether local gradients are watched for NaN
    rng_equal: bool
    step: int | None
    compared: dict[str, int]
    coordinates: tuple[tuple[int, str], ...] = ()  # of each rank, if tensors lie on a mesh
    stages: tuple[str, ...] = ()  # dimensions of the mesh along which ranks hold other layers
    held_once: dict[str, int] = field(default_factory=dict)
    own_numbers: tuple[str, ...] = ()  # of the optimizer's state, that differ while all else agrees

    @cached_property
    def places(self) -> Places:
        """The names of the ranks."""
        return Places(self.coordinates)


def keys(facts: Facts | Report) -> set[Key]:
    """Return a key for everything that is wrong. A later report does not explain it again."""
    wrong = {_key(d) for d in facts.differences if d.kind != "buffer"}
    wrong |= {_key(m) for m in facts.mismatches}
    return wrong | {_key(n) for n in facts.nonfinite if n.severity == "error"}


def _key(wrong: Difference | Mismatch | NonFinite) -> Key:
    sides = getattr(wrong, "values", getattr(wrong, "forms", ()))
    return type(wrong).__name__, wrong.kind, wrong.name, sides


def findings(
    facts: Facts, cause: Cause | None, history: History, verification: Verification
) -> tuple[Finding, ...]:
    """Return all findings, the worst first; the likely cause is part of the finding it explains.

    history: what earlier reports explained, and is still wrong. It is summed up in one finding;
        the other findings are about tensors that have newly become wrong.
    """
    if history:
        reported = _reported(history, verification.step)
        if keys(facts) <= history.keys():
            return (reported,)
        rows = [reported, *_wrong(_fresh(facts, history), None, verification)]
    else:
        rows = [*_wrong(facts, cause, verification), *_beside(facts, verification)]
    return tuple(sorted(rows, key=lambda f: SEVERITIES.index(f.severity)))


def _reported(history: History, step: int | None) -> Finding:
    (since, code), count = min(history.values()), len({key[1:3] for key in history})
    verb = "differs or is" if count == 1 else "differ or are"
    sentence = f"{count} of the tensors reported from step {since} on ({code}) "
    sentence += f"still {verb} not finite"
    return Finding("error", code, sentence, "", _place(step, cause=code, since=since))


def _fresh(facts: Facts, history: History) -> Facts:
    """Return the facts without those that an earlier report has explained."""

    def new(tensors: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(tensor for tensor in tensors if _key(tensor) not in history)

    return replace(
        facts,
        differences=new(facts.differences),
        mismatches=new(facts.mismatches),
        nonfinite=new(facts.nonfinite),
    )


def _wrong(facts: Facts, cause: Cause | None, verification: Verification) -> Iterator[Finding]:
    shown = cause.choose_example(facts) if cause else None
    folds = [*_differences(facts, shown, verification), *_mismatches(facts, verification)]
    if cause is not None and folds:
        unlike = [
            fold
            for fold in folds
            if fold.code == "structure-differs" and fold.place["kind"] in cause.unlike
        ]
        chosen = (unlike or folds)[0]
        folds.remove(chosen)
        yield replace(
            chosen,
            code=cause.code,
            sentence=f"{chosen.sentence}. Likely cause: {cause.sentence}",
            next_step=cause.next_step,
            place={**chosen.place, "cause": cause.code},
        )
    yield from folds
    yield from _nonfinite(facts, verification)


def _beside(facts: Facts, verification: Verification) -> Iterator[Finding]:
    yield from _without_gradient(facts, verification)
    yield from _not_compared(verification.not_compared)
    yield from _not_shared(verification)
    if any(d.kind != "buffer" and not d.minority for d in facts.differences):
        yield Finding(
            "note",
            "no-majority",
            "no value has a majority of ranks, so nobody can say which is right",
        )
    if numbers := verification.own_numbers:
        yield Finding(
            "note",
            "own-numbers",
            f"{counted(len(numbers), 'number')} of the optimizer's state, such as a rank's own "
            f"loss, differ while parameters and tensors of the state are equal: {few(numbers)}",
            "",
            {"kind": "optimizer", "tensors": [*numbers]},
        )
    if not verification.rng_equal:
        yield Finding(
            "note",
            "rng-differs",
            "the ranks' random number generators are in different states; this is intended if "
            "dropout and augmentation differ by rank",
        )


def _place(step: int | None, **rest: object) -> dict[str, object]:
    return {**rest, **({} if step is None else {"step": step})}


def _on_mesh(shard: str, ranks: Sequence[int], places: Places) -> dict[str, object]:
    coordinates = places.list_coordinates(ranks)
    where: dict[str, object] = {"coordinates": coordinates} if coordinates else {}
    return {**where, **({"shard": shard} if shard else {})}


def _severity(facts: Facts, kind: str) -> str:
    if kind != "buffer":
        return "error"
    return "note" if facts.rebroadcast else "warning"


def _differences(
    facts: Facts, shown: Difference | None, verification: Verification
) -> Iterator[Finding]:
    sides: dict[tuple[object, ...], list[Difference]] = {}
    for difference in facts.differences:
        sides.setdefault((difference.kind == "buffer", difference.values), []).append(difference)
    folds = sorted(sides.values(), key=lambda fold: (shown not in fold, -len(fold)))
    rest = [difference for fold in folds[_SIDES:] for difference in fold]
    for fold in [*folds[:_SIDES], *([rest] if rest else [])]:
        example = shown if shown in fold else fold[0]
        assert example is not None
        names = [example.name, *(d.name for d in fold if d is not example)]
        ranks = sorted({rank for d in fold for rank in d.minority})
        sides_of_tie = [rank for side in example.values for rank in side]
        yield Finding(
            min((_severity(facts, d.kind) for d in fold), key=SEVERITIES.index),
            "replicas-differ",
            describe_fold(
                fold,
                example,
                verification.compared,
                places=verification.places,
                step=verification.step,
                same_sides=fold is not rest,
            ),
            "",
            _place(
                verification.step,
                kind=example.kind,
                tensor=example.name,
                tensors=list(dict.fromkeys(names)),
                ranks=ranks,
                **_on_mesh(example.shard, ranks or sides_of_tie, verification.places),
            ),
        )


def _mismatches(facts: Facts, verification: Verification) -> Iterator[Finding]:
    name_ranks = verification.places.name
    sides: dict[tuple[object, ...], list[Mismatch]] = {}
    for mismatch in facts.mismatches:
        key = mismatch.kind, *((form == "absent", ranks) for form, ranks in mismatch.forms)
        sides.setdefault(key, []).append(mismatch)
    for fold in _limit_folds(sides):
        first, names = fold[0], few([mismatch.name for mismatch in fold])
        absent = {r for m in fold for form, side in m.forms if form == "absent" for r in side}
        forms = ", ".join(f"{form} in {name_ranks(side)}" for form, side in first.forms)
        sentence = f"{first.kind} {first.name}: {forms}"
        if first.kind == "gradient" and absent:
            verb = "has" if len(fold) == 1 else "have"
            sentence = f"{counted(len(fold), 'parameter')} {verb} no gradient in "
            sentence += f"{name_ranks(sorted(absent))} and one in other ranks: {names}"
        elif len(fold) > 1:
            tensors = count_kind(first.kind, len(fold))
            sentence = f"{tensors} do not match between ranks: {names}. For example {sentence}"
        ranks = sorted({rank for m in fold for rank in m.minority})
        sides_of_tie = [rank for _, side in first.forms for rank in side]
        place = _place(
            verification.step,
            kind=first.kind,
            tensor=first.name,
            tensors=[m.name for m in fold],
            **_on_mesh("", ranks or sides_of_tie, verification.places),
        )
        yield Finding("error", "structure-differs", sentence, "", place)


def _limit_folds(sides: dict[Any, list[T]]) -> Iterator[list[T]]:
    """Yield up to _SIDES folds of each kind (the first item of a key), then its rest as one."""
    rest: dict[object, list[T]] = {}
    counts: Counter[object] = Counter()
    for (kind, *_), fold in sides.items():
        counts[kind] += 1
        if counts[kind] <= _SIDES:
            yield fold
        else:
            rest.setdefault(kind, []).extend(fold)
    yield from rest.values()


def _without_gradient(facts: Facts, verification: Verification) -> Iterator[Finding]:
    sides: dict[tuple[bool, tuple[int, ...]], list[str]] = {}
    mismatched = {mismatch.name for mismatch in facts.mismatches if mismatch.kind == "gradient"}
    for missing in facts.without_gradient:
        if missing.name not in mismatched:
            sides.setdefault((missing.zeros, missing.ranks), []).append(missing.name)
    for (zeros, ranks), names in sides.items():
        everywhere = len(ranks) == facts.world_size
        verb = "has" if len(names) == 1 else "have"
        gradient = "a gradient of zeros" if zeros else "no gradient"
        where = "any rank" if everywhere else verification.places.name(ranks)
        sentence = f"{counted(len(names), 'parameter')} {verb} {gradient} in {where}: {few(names)}"
        next_step = "" if everywhere else f"find out why the loss of {where} does not use them"
        place = _place(
            verification.step,
            kind="parameter",
            tensor=names[0],
            tensors=names,
            ranks=list(ranks),
            **_on_mesh("", () if everywhere else ranks, verification.places),
        )
        severity = "note" if everywhere else "warning"
        yield Finding(severity, "without-gradient", sentence, next_step, place)


def _nonfinite(facts: Facts, verification: Verification) -> Iterator[Finding]:
    sides: dict[tuple[str, str, tuple[int, ...]], list[NonFinite]] = {}
    for tensor in facts.nonfinite:
        key = tensor.kind, tensor.severity, tuple(rank for rank, _ in tensor.counts)
        sides.setdefault(key, []).append(tensor)
    explained = False  # the origin and the next step stand once
    for fold in _limit_folds(sides):
        kind, names = fold[0].kind, [tensor.name for tensor in fold]
        ranks = tuple(sorted({rank for tensor in fold for rank, _ in tensor.counts}))
        counts = sorted({count for tensor in fold for _, count in tensor.counts})
        span = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        elements = f"{span} element{'' if span == '1' else 's'}"
        where, shard = verification.places.name(ranks), fold[0].shard
        part = f", {shard}" if shard else ""
        sentence = f"{kind} {names[0]}{part}: {elements} NaN or infinite in {where}"
        if len(fold) > 1:
            sentence = f"{count_kind(kind, len(fold))} have NaN or infinite elements in {where}: "
            sentence += f"{few(names)}; {elements} each"
        severity, next_step = fold[0].severity, ""
        if severity == "error" and not explained:
            sentence, next_step = _explain_origin(sentence, verification)
            explained = True
        place = _place(
            verification.step,
            kind=kind,
            tensor=names[0],
            tensors=names,
            ranks=list(ranks),
            **_on_mesh(shard, ranks, verification.places),
        )
        yield Finding(severity, "non-finite", sentence, next_step, place)


def _explain_origin(sentence: str, verification: Verification) -> tuple[str, str]:
    if not verification.traced:
        return sentence, (
            "check the loss, the learning rate and the dtype of the step before. "
            "`Verifier(..., trace_nonfinite=True)` names the rank that had it first"
        )
    if not verification.origins:
        return f"{sentence}. No output and no local gradient was NaN or infinite before", (
            "check what runs between the reduction of the gradients and this verification: "
            "clipping, scaling, the optimizer (a learning rate that is too large), edits of weights"
        )
    origins = []
    for origin in verification.origins[:_SHOWN]:
        ago = origin.steps_ago
        when = f", {ago} step{'' if ago == 1 else 's'} before this one" if ago else ""
        origins.append(f"rank {origin.rank} in {origin.place}{when}")
    ranks = ranks_text(tuple(origin.rank for origin in verification.origins))
    return (
        f"{sentence}. First, before gradients were reduced: {'; '.join(origins)}",
        f"look at the batch and the loss of {ranks} in that step",
    )


def _not_compared(skipped: Sequence[NotCompared]) -> Iterator[Finding]:
    folds: dict[str, list[NotCompared]] = {}
    for tensor in skipped:
        folds.setdefault(tensor.reason, []).append(tensor)
    for reason, fold in folds.items():
        counts = Counter(tensor.kind for tensor in fold)
        tensors = ", ".join(count_kind(kind, count) for kind, count in counts.items())
        names = [tensor.name for tensor in fold]
        next_step = "do not count these tensors as equal. Stop a loop on `report.failed`, which "
        next_step += "ignores them"
        if reason.startswith(NOT_REDUCED):
            next_step = "sum the parts before you use them as a parameter: `tensor.redistribute("
            next_step += "placements=[...])` with Replicate() or Shard() in place of Partial()"
        yield Finding(
            "warning",
            "not-compared",
            f"not compared: {tensors} ({reason}): {few(list(dict.fromkeys(names)))}",
            next_step,
            {"tensors": names},
        )


def _not_shared(verification: Verification) -> Iterator[Finding]:
    if verification.held_once.get("parameter") and not verification.compared["parameter"]:
        yield Finding(
            "note",
            "nothing-to-compare",
            "no parameter is compared: each element of each parameter is in one rank only, as "
            "fully_shard intends. This is neither a proof nor a failure",
            "stop a loop on `report.failed`, which ignores this",
        )
    if verification.stages:
        names = list_all(verification.stages)
        yield Finding(
            "note",
            "pipeline-stages",
            f"ranks along {names} hold other layers, so they are not compared along {names}",
        )
