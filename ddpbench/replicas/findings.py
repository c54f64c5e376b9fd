"""Findings of a verification: tensors that differ in the same way share one finding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ddpbench.records.schema import SEVERITIES, Finding
from ddpbench.records.wording import counted, list_all
from ddpbench.replicas.causes import Cause
from ddpbench.replicas.describe import describe_fold
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
class Aside:
    """What findings need beside the report."""

    cause: Cause | None
    example: Difference | None  # the difference that shows the cause
    history: History
    rebroadcast: bool  # whether DDP sends rank 0's buffers before each forward
    traced: bool  # whether local gradients are watched for NaN
    stages: tuple[str, ...]  # dimensions of the mesh along which ranks hold other layers
    own_numbers: tuple[str, ...]  # of the optimizer's state, that differ while all else agrees


def keys(report: Report) -> set[Key]:
    """Return a key for everything that is wrong. A later report does not explain it again."""
    wrong = {_key(d) for d in report.differences if d.kind != "buffer"}
    wrong |= {_key(m) for m in report.mismatches}
    return wrong | {_key(n) for n in report.nonfinite if n.severity == "error"}


def _key(wrong: Difference | Mismatch | NonFinite) -> Key:
    sides = getattr(wrong, "values", getattr(wrong, "forms", ()))
    return type(wrong).__name__, wrong.kind, wrong.name, sides


def findings(report: Report, aside: Aside) -> tuple[Finding, ...]:
    """Return all findings, the worst first; the likely cause is part of the finding it explains.

    What earlier reports explained, and is still wrong, is summed up in one finding. Then the other
    findings are about tensors that have newly become wrong.
    """
    history = aside.history
    if history:
        reported = _reported(history, report.step)
        if keys(report) <= history.keys():
            return (reported,)
        fresh = _drop_reported(report, history)
        rows = [reported, *_wrong(fresh, replace(aside, cause=None, example=None))]
    else:
        rows = [*_wrong(report, aside), *_beside(report, aside)]
    return tuple(sorted(rows, key=lambda f: SEVERITIES.index(f.severity)))


def _reported(history: History, step: int | None) -> Finding:
    (since, code), count = min(history.values()), len({key[1:3] for key in history})
    verb = "differs or is" if count == 1 else "differ or are"
    sentence = f"{count} of the tensors reported from step {since} on ({code}) "
    sentence += f"still {verb} not finite"
    return Finding("error", code, sentence, "", _place(step, cause=code, since=since))


def _drop_reported(report: Report, history: History) -> Report:
    def new(tensors: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(tensor for tensor in tensors if _key(tensor) not in history)

    return replace(
        report,
        differences=new(report.differences),
        mismatches=new(report.mismatches),
        nonfinite=new(report.nonfinite),
    )


def _wrong(report: Report, aside: Aside) -> Iterator[Finding]:
    cause = aside.cause
    folds = [*_differences(report, aside), *_mismatches(report)]
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
    yield from _nonfinite(report, aside)


def _beside(report: Report, aside: Aside) -> Iterator[Finding]:
    yield from _without_gradient(report)
    yield from _not_compared(report.not_compared)
    yield from _not_shared(report, aside)
    if any(d.kind != "buffer" and not d.minority for d in report.differences):
        yield Finding(
            "note",
            "no-majority",
            "no value has a majority of ranks, so nobody can say which is right",
        )
    if numbers := aside.own_numbers:
        yield Finding(
            "note",
            "own-numbers",
            f"{counted(len(numbers), 'number')} of the optimizer's state, such as a rank's own "
            f"loss, differ while parameters and tensors of the state are equal: {few(numbers)}",
            "",
            {"kind": "optimizer", "tensors": [*numbers]},
        )
    if not report.rng_equal:
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


def _differences(report: Report, aside: Aside) -> Iterator[Finding]:
    shown, places = aside.example, Places(report.coordinates)
    severities = {"buffer": "note" if aside.rebroadcast else "warning"}
    sides: dict[tuple[object, ...], list[Difference]] = {}
    for difference in report.differences:
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
            min((severities.get(d.kind, "error") for d in fold), key=SEVERITIES.index),
            "replicas-differ",
            describe_fold(
                fold,
                example,
                report.compared,
                places=places,
                step=report.step,
                same_sides=fold is not rest,
            ),
            "",
            _place(
                report.step,
                kind=example.kind,
                tensor=example.name,
                tensors=list(dict.fromkeys(names)),
                ranks=ranks,
                **_on_mesh(example.shard, ranks or sides_of_tie, places),
            ),
        )


def _mismatches(report: Report) -> Iterator[Finding]:
    places = Places(report.coordinates)
    sides: dict[tuple[object, ...], list[Mismatch]] = {}
    for mismatch in report.mismatches:
        key = mismatch.kind, *((form == "absent", ranks) for form, ranks in mismatch.forms)
        sides.setdefault(key, []).append(mismatch)
    for fold in _limit_folds(sides):
        first, names = fold[0], few([mismatch.name for mismatch in fold])
        absent = {r for m in fold for form, side in m.forms if form == "absent" for r in side}
        forms = ", ".join(f"{form} in {places.name(side)}" for form, side in first.forms)
        sentence = f"{first.kind} {first.name}: {forms}"
        if first.kind == "gradient" and absent:
            verb = "has" if len(fold) == 1 else "have"
            sentence = f"{counted(len(fold), 'parameter')} {verb} no gradient in "
            sentence += f"{places.name(sorted(absent))} and one in other ranks: {names}"
        elif len(fold) > 1:
            tensors = count_kind(first.kind, len(fold))
            sentence = f"{tensors} do not match between ranks: {names}. For example {sentence}"
        ranks = sorted({rank for m in fold for rank in m.minority})
        sides_of_tie = [rank for _, side in first.forms for rank in side]
        place = _place(
            report.step,
            kind=first.kind,
            tensor=first.name,
            tensors=[m.name for m in fold],
            **_on_mesh("", ranks or sides_of_tie, places),
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


def _without_gradient(report: Report) -> Iterator[Finding]:
    places = Places(report.coordinates)
    sides: dict[tuple[bool, tuple[int, ...]], list[str]] = {}
    mismatched = {mismatch.name for mismatch in report.mismatches if mismatch.kind == "gradient"}
    for missing in report.without_gradient:
        if missing.name not in mismatched:
            sides.setdefault((missing.zeros, missing.ranks), []).append(missing.name)
    for (zeros, ranks), names in sides.items():
        everywhere = len(ranks) == len(report.ranks)
        verb = "has" if len(names) == 1 else "have"
        gradient = "a gradient of zeros" if zeros else "no gradient"
        where = "any rank" if everywhere else places.name(ranks)
        sentence = f"{counted(len(names), 'parameter')} {verb} {gradient} in {where}: {few(names)}"
        next_step = "" if everywhere else f"find out why the loss of {where} does not use them"
        place = _place(
            report.step,
            kind="parameter",
            tensor=names[0],
            tensors=names,
            ranks=list(ranks),
            **_on_mesh("", () if everywhere else ranks, places),
        )
        severity = "note" if everywhere else "warning"
        yield Finding(severity, "without-gradient", sentence, next_step, place)


def _nonfinite(report: Report, aside: Aside) -> Iterator[Finding]:
    places = Places(report.coordinates)
    sides: dict[tuple[str, str, tuple[int, ...]], list[NonFinite]] = {}
    for tensor in report.nonfinite:
        key = tensor.kind, tensor.severity, tuple(rank for rank, _ in tensor.counts)
        sides.setdefault(key, []).append(tensor)
    explained = False  # the origin and the next step stand once
    for fold in _limit_folds(sides):
        kind, names = fold[0].kind, [tensor.name for tensor in fold]
        ranks = tuple(sorted({rank for tensor in fold for rank, _ in tensor.counts}))
        counts = sorted({count for tensor in fold for _, count in tensor.counts})
        span = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        elements = f"{span} element{'' if span == '1' else 's'}"
        where, shard = places.name(ranks), fold[0].shard
        part = f", {shard}" if shard else ""
        sentence = f"{kind} {names[0]}{part}: {elements} NaN or infinite in {where}"
        if len(fold) > 1:
            sentence = f"{count_kind(kind, len(fold))} have NaN or infinite elements in {where}: "
            sentence += f"{few(names)}; {elements} each"
        severity, next_step = fold[0].severity, ""
        if severity == "error" and not explained:
            sentence, next_step = _explain_origin(sentence, report.origins, aside.traced)
            explained = True
        place = _place(
            report.step,
            kind=kind,
            tensor=names[0],
            tensors=names,
            ranks=list(ranks),
            **_on_mesh(shard, ranks, places),
        )
        yield Finding(severity, "non-finite", sentence, next_step, place)


def _explain_origin(sentence: str, origins: Sequence[Origin], traced: bool) -> tuple[str, str]:
    if not traced:
        return sentence, (
            "check the loss, the learning rate and the dtype of the step before. "
            "`Verifier(..., trace_nonfinite=True)` names the rank that had it first"
        )
    if not origins:
        return f"{sentence}. No output and no local gradient was NaN or infinite before", (
            "check what runs between the reduction of the gradients and this verification: "
            "clipping, scaling, the optimizer (a learning rate that is too large), edits of weights"
        )
    firsts = []
    for origin in origins[:_SHOWN]:
        ago = origin.steps_ago
        when = f", {ago} step{'' if ago == 1 else 's'} before this one" if ago else ""
        firsts.append(f"rank {origin.rank} in {origin.place}{when}")
    ranks = ranks_text(tuple(origin.rank for origin in origins))
    return (
        f"{sentence}. First, before gradients were reduced: {'; '.join(firsts)}",
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


def _not_shared(report: Report, aside: Aside) -> Iterator[Finding]:
    if report.nothing_to_compare:
        yield Finding(
            "note",
            "nothing-to-compare",
            "no parameter is compared: each element of each parameter is in one rank only, as "
            "fully_shard intends. This is neither a proof nor a failure",
            "stop a loop on `report.failed`, which ignores this",
        )
    if aside.stages:
        names = list_all(aside.stages)
        yield Finding(
            "note",
            "pipeline-stages",
            f"ranks along {names} hold other layers, so they are not compared along {names}",
        )
