"""Findings of a verification: tensors that differ in the same way share one finding."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TypeVar

import torch

from ddpbench.records.schema import SEVERITIES, Finding
from ddpbench.records.wording import counted, list_all, spans
from ddpbench.replicas.causes import Cause, find_cause
from ddpbench.replicas.report import (
    Detail,
    Difference,
    Fault,
    Key,
    Mismatch,
    NonFinite,
    Origin,
    Report,
    WithoutGradient,
    count_by_kind,
    count_kind,
    few,
    listed_kinds,
    ranks_text,
)
from ddpbench.replicas.state import KINDS, NOT_REDUCED
from ddpbench.replicas.training import Facts

T = TypeVar("T", Difference, Mismatch, NonFinite, WithoutGradient)
_SHOWN = 8  # ranks or sets of ranks in a sentence; the report has them all
_FOLDS = 3  # findings per pattern; one more finding sums up the rest


def list_findings(
    report: Report,
    facts: Facts | None,
    history: Mapping[Key, tuple[int, str]],
    stages: Sequence[str],
    *,
    traced: bool,
) -> tuple[Finding, ...]:
    """Return all findings, the worst first; the likely cause is part of the finding it explains.

    What earlier reports explained, and is still wrong, is summed up in one finding. In that case
    the other findings are about tensors that have newly become wrong.

    facts: None if nothing differs. history: what is still wrong, with the step and the code of the
    report that explained it. stages: dimensions of the mesh along which ranks hold other layers.
    traced: local gradients are watched for NaN.
    """
    fresh = replace(
        report,
        differences=[d for d in report.differences if d.key not in history],
        mismatches=[m for m in report.mismatches if m.key not in history],
        nonfinite=[n for n in report.nonfinite if n.key not in history],
    )
    rebroadcasts = facts is not None and not facts.totals["keeps_buffers"]
    cause = None if facts is None or history else find_cause(facts)
    example = None
    if facts is not None and cause is not None:
        example = next(iter(facts.select(cause.evidence) or report.differences), None)
    rows = [*_list_differences(fresh, example, rebroadcasts), *_list_mismatches(fresh)]
    if cause is not None and rows:
        _add_cause(rows, cause)
    rows += _list_nonfinite(fresh, traced)
    if not history:
        rows += _list_notes(report, stages)
    else:
        rows = [_sum_up_history(history, report.step), *([] if report.repeated else rows)]
    return tuple(sorted(rows, key=lambda finding: SEVERITIES.index(finding.severity)))


def _add_cause(rows: list[Finding], cause: Cause) -> None:
    """Add the cause to the finding that it explains, and put that first."""
    structure = (row for row in rows if row.code == "structure-differs")
    chosen = next((row for row in structure if row.place["kind"] in cause.unlike), rows[0])
    rows.remove(chosen)
    explained = replace(
        chosen,
        code=cause.code,
        sentence=f"{chosen.sentence}. Likely cause: {cause.sentence}",
        next_step=cause.next_step,
        place={**chosen.place, "cause": cause.code},
    )
    rows.insert(0, explained)


def _sum_up_history(history: Mapping[Key, tuple[int, str]], step: int | None) -> Finding:
    (since, code), count = min(history.values()), len({key[1:3] for key in history})
    verb = "differs or is" if count == 1 else "differ or are"
    sentence = f"{count} of the tensors reported from step {since} on ({code}) "
    sentence += f"still {verb} not finite"
    place = {"cause": code, "since": since, **({} if step is None else {"step": step})}
    return Finding("error", code, sentence, "", place)


# --- tensors with the same ranks in one finding


def _fold(
    tensors: Sequence[T], key: Callable[[T], tuple[Hashable, ...]], example: Fault | None = None
) -> list[list[T]]:
    """Put tensors with equal keys together, those of the example first, then the most.

    Of each first item of a key, up to _FOLDS folds are returned, and the rest as one more.
    """
    patterns: dict[Hashable, dict[Hashable, list[T]]] = {}
    for tensor in tensors:
        pattern, *rest = key(tensor)
        patterns.setdefault(pattern, {}).setdefault(tuple(rest), []).append(tensor)
    shown: list[list[T]] = []
    for folds in patterns.values():
        ordered = sorted(folds.values(), key=lambda fold: (example not in fold, -len(fold)))
        shown += ordered[:_FOLDS]
        if len(ordered) > _FOLDS:
            shown.append([tensor for fold in ordered[_FOLDS:] for tensor in fold])
    return shown


def _place(
    report: Report, fold: Sequence[Fault], at: Sequence[int], **rest: object
) -> dict[str, object]:
    """Return the place of a finding on some tensors, with the coordinates of the ranks `at`."""
    first, names = fold[0], list(dict.fromkeys([tensor.name for tensor in fold]))
    place: dict[str, object] = {"kind": first.kind, "tensor": first.name, "tensors": names, **rest}
    if at and report.coordinates:
        place["coordinates"] = [_join(report.coordinates[rank]) for rank in at]
    if first.shard:
        place["shard"] = first.shard
    if report.step is not None:
        place["step"] = report.step
    return place


def _list_ranks(fold: Sequence[Fault]) -> tuple[list[int], list[int]]:
    """Return the ranks in a minority, and the ranks to name: all of the first tensor for a tie."""
    ranks = sorted({rank for tensor in fold for rank in tensor.minority})
    return ranks, ranks or [rank for side in fold[0].sides for rank in side]


def _list_differences(
    report: Report, example: Difference | None, rebroadcasts: bool
) -> Iterator[Finding]:
    for fold in _fold(report.differences, lambda d: ("", d.kind == "buffer", d.sides), example):
        shown = example if example and example in fold else fold[0]
        ranks, at = _list_ranks(fold)
        severities = [KINDS[difference.kind].if_differs for difference in fold]
        severity = min(severities, key=SEVERITIES.index)
        if shown.kind == "buffer" and rebroadcasts:
            severity = "note"
        place = _place(report, [shown, *fold], at, ranks=ranks)
        sentence = _describe_fold(fold, shown, report)
        yield Finding(severity, "replicas-differ", sentence, "", place)


def _list_mismatches(report: Report) -> Iterator[Finding]:
    def list_keys(mismatch: Mismatch) -> tuple[Hashable, ...]:
        return mismatch.kind, *((form == "absent", ranks) for form, ranks in mismatch.pairs)

    places = Places(report)
    for fold in _fold(report.mismatches, list_keys):
        first, names = fold[0], few([mismatch.name for mismatch in fold])
        forms = ", ".join(f"{form} in {places.name(ranks)}" for form, ranks in first.pairs)
        sentence = f"{first.kind} {first.name}: {forms}"
        if len(fold) > 1:
            tensors = count_kind(first.kind, len(fold))
            sentence = f"{tensors} do not match between ranks: {names}. For example {sentence}"
        place = _place(report, fold, _list_ranks(fold)[1])
        yield Finding("error", "structure-differs", sentence, "", place)


def _list_without_gradient(report: Report) -> Iterator[Finding]:
    places = Places(report)
    mismatched = {mismatch.name for mismatch in report.mismatches if mismatch.kind == "gradient"}
    missing = [each for each in report.without_gradient if each.name not in mismatched]
    for fold in _fold(missing, lambda each: ((each.zeros, each.ranks),)):
        ranks, names = fold[0].ranks, few([each.name for each in fold])
        everywhere = len(ranks) == len(report.ranks)
        verb = "has" if len(fold) == 1 else "have"
        gradient = "a gradient of zeros" if fold[0].zeros else "no gradient"
        where = "any rank" if everywhere else places.name(ranks)
        yield Finding(
            "note" if everywhere else "warning",
            "without-gradient",
            f"{counted(len(fold), 'parameter')} {verb} {gradient} in {where}: {names}",
            "" if everywhere else f"find out why the loss of {where} does not use them",
            _place(report, fold, () if everywhere else ranks, ranks=list(ranks)),
        )


def _list_nonfinite(report: Report, traced: bool) -> Iterator[Finding]:
    def list_keys(tensor: NonFinite) -> tuple[Hashable, ...]:
        return tensor.kind, tensor.severity, *(rank for rank, _ in tensor.counts)

    explained = False  # the origin and the next step are given once
    for fold in _fold(report.nonfinite, list_keys):
        first, names = fold[0], few([tensor.name for tensor in fold])
        ranks = sorted({rank for tensor in fold for rank, _ in tensor.counts})
        counts = sorted({count for tensor in fold for _, count in tensor.counts})
        elements = counted(counts[-1], "element")
        if len(counts) > 1:
            elements = f"{counts[0]} to {elements}"
        where, part = Places(report).name(ranks), f", {first.shard}" if first.shard else ""
        sentence = f"{first.kind} {first.name}{part}: {elements} NaN or infinite in {where}"
        if len(fold) > 1:
            sentence = f"{count_kind(first.kind, len(fold))} have NaN or infinite elements in "
            sentence += f"{where}: {names}; {elements} each"
        next_step = ""
        if first.severity == "error" and not explained:
            origin, next_step = _explain_origin(report.origins, traced)
            sentence, explained = sentence + origin, True
        place = _place(report, fold, ranks, ranks=ranks)
        yield Finding(first.severity, "non-finite", sentence, next_step, place)


def _explain_origin(origins: Sequence[Origin], traced: bool) -> tuple[str, str]:
    """Return where a NaN came from, as the end of a sentence, and a next step."""
    if not traced:
        return "", (
            "check the loss, the learning rate and the dtype of the step before. "
            "`Verifier(..., trace_nonfinite=True)` names the rank that had it first"
        )
    if not origins:
        return ". No output and no local gradient was NaN or infinite before", (
            "check what runs between the reduction of the gradients and this verification: "
            "clipping, scaling, the optimizer (a learning rate that is too large), edits of weights"
        )
    firsts = []
    for origin in origins[:_SHOWN]:
        ago = counted(origin.steps_ago, "step")
        when = f", {ago} before this one" if origin.steps_ago else ""
        firsts.append(f"rank {origin.rank} in {origin.place}{when}")
    ranks = ranks_text([origin.rank for origin in origins])
    return (
        f". First, before gradients were reduced: {'; '.join(firsts)}",
        f"look at the batch and the loss of {ranks} in that step",
    )


# --- notes


def _list_notes(report: Report, stages: Sequence[str]) -> Iterator[Finding]:
    yield from _list_without_gradient(report)
    yield from _list_not_compared(report)
    notes = {}
    if report.nothing_to_compare:
        notes["nothing-to-compare"] = (
            "no parameter is compared: each element of each parameter is in one rank only, as "
            "fully_shard intends. This is neither a proof nor a failure"
        )
    if stages:
        names = list_all(stages)
        notes["pipeline-stages"] = (
            f"ranks along {names} hold other layers, so they are not compared along {names}"
        )
    if any(d.kind != "buffer" and not d.minority for d in report.differences):
        notes["no-majority"] = "no value has a majority of ranks, so nobody can say which is right"
    if not report.rng_equal:
        notes["rng-differs"] = (
            "the ranks' random number generators are in different states; this is intended if "
            "dropout and augmentation differ by rank"
        )
    yield from (Finding("note", code, sentence) for code, sentence in notes.items())


def _list_not_compared(report: Report) -> Iterator[Finding]:
    for reason in dict.fromkeys(skipped.reason for skipped in report.not_compared):
        fold = [skipped for skipped in report.not_compared if skipped.reason == reason]
        names = [tensor.name for tensor in fold]
        next_step = (
            "sum the parts before you use them: `tensor.redistribute(placements=[...])`"
            if reason.startswith(NOT_REDUCED)
            else "do not count these tensors as equal: stop a loop on `report.failed`"
        )
        tensors = listed_kinds(count_by_kind(fold))
        sentence = f"not compared: {tensors} ({reason}): {few(list(dict.fromkeys(names)))}"
        yield Finding("warning", "not-compared", sentence, next_step, {"tensors": names})


# --- sentences on differences


class Places:
    """Names sets of ranks by their coordinates on a mesh, if there is one, else by numbers."""

    def __init__(self, report: Report) -> None:
        self._where = report.coordinates

    def name(self, ranks: Sequence[int], others: Sequence[int] = ()) -> str:
        """Return "dp_replicate=1 (ranks 4-7)", or "ranks 4-7" if no coordinates describe them.

        If other ranks are given: "dp_replicate=1", the coordinates in which they are unlike those.
        """
        values = self._find_values(ranks)
        against = self._find_values(others or list(self._where))
        unlike = {name: values[name] for name in values if values[name] != against.get(name)}
        if not unlike or prod(map(len, values.values())) != len(ranks):
            return self.name(ranks) if others else ranks_text(ranks)
        shown = values if len(ranks) == 1 and not others else unlike
        text = _join({name: spans(sorted(each)) for name, each in shown.items()})
        return text if others else f"{text} ({ranks_text(ranks)})"

    def _find_values(self, ranks: Sequence[int]) -> dict[str, set[int]]:
        if not ranks or any(rank not in self._where for rank in ranks):
            return {}
        return {name: {self._where[r][name] for r in ranks} for name in self._where[ranks[0]]}


def _join(coordinates: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in coordinates.items())


def _describe_fold(fold: list[Difference], example: Difference, report: Report) -> str:
    details = ". ".join(_describe_detail(example, d) for d in example.details[:_SHOWN])
    shape = "x".join(map(str, example.shape))
    tensor = f"{example.kind} {example.name} ({example.dtype}{' ' if shape else ''}{shape})"
    tensor += f", {example.shard}" if example.shard else ""
    if len(fold) == 1:
        text = f"{tensor}{',' if example.shard else ''} differs"
        if report.coordinates or not (example.minority and details):  # the details name the ranks
            text = _describe_sides(text, example, report)
        return text + (f". {details}" if details else "")
    # A tensor may differ in several ways, one for each shard.
    counts = count_by_kind({(d.kind, d.name): d for d in fold}.values())
    tensors = list_all(f"{n} of {count_kind(k, report.compared[k])}" for k, n in counts.items())
    text = f"{tensors} differ between other ranks"
    if len({difference.sides for difference in fold}) == 1:
        text = _describe_sides(f"{tensors} differ", example, report)
    # Buffers that DDP sends again differ after each step, and are reported each time.
    if report.step is not None and example.kind != "buffer":
        text += f", first seen in step {report.step}"
    text += f": {example.name}"
    more = counts.total() - 1
    text += f" and {more} more" if more else ""
    return text + (f". For example {tensor}: {details}" if details else "")


def _describe_sides(predicate: str, difference: Difference, report: Report) -> str:
    """Name the ranks that differ: "dp_replicate=1: parameter w differs from dp_replicate=0"."""
    places, (first, *rest) = Places(report), difference.sides
    if report.coordinates and len(rest) == 1:
        return f"{places.name(rest[0])}: {predicate} from {places.name(first, rest[0])}"
    if not report.coordinates and difference.minority:
        return f"{predicate} in {ranks_text(difference.minority)}"
    sides = [places.name(ranks) for ranks in difference.sides]
    shown = sides if len(sides) <= _SHOWN else [*sides[:_SHOWN], "others"]
    return f"{predicate} between {list_all(shown)}"


def _describe_detail(difference: Difference, detail: Detail) -> str:
    where = f" at [{', '.join(map(str, detail.index))}]" if detail.index else ""
    text = ranks_text(detail.ranks).capitalize()
    if difference.shape:
        text += f": {detail.differing} of {detail.elements} elements"
        text += " of the shard" if difference.shard else ""
    if detail.differing > 1:
        text += ", first"
    text += f"{where}: {detail.value} against {detail.reference_value} in rank {detail.reference}"
    if detail.bit is not None:
        text += f", bit {detail.bit}{name_part(difference.dtype, detail.bit)} alone"
    if detail.permuted:
        text += ", the same elements in another order"
    if detail.max_delta is not None:
        text += f", max |Δ| {detail.max_delta:.3g}"
    return text


def name_part(dtype: str, bit: int) -> str:
    """Return the part of a floating-point number that a bit belongs to; "" for other dtypes."""
    if "float" not in dtype and "complex" not in dtype:
        return ""
    form = torch.finfo(getattr(torch, dtype))
    bit %= form.bits  # of a complex number's real or imaginary part
    if bit == form.bits - 1:
        return " (the sign)"
    return " (of the fraction)" if 2.0**bit * form.eps < 1 else " (of the exponent)"
