"""Findings of a verification: tensors that differ in the same way share one finding."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TypeVar

from ddpbench.records.schema import SEVERITIES, Finding
from ddpbench.records.wording import counted, list_all, list_kinds, spans
from ddpbench.replicas.causes import Facts, find_cause
from ddpbench.replicas.report import (
    Detail,
    Difference,
    Fault,
    Key,
    Mismatch,
    NonFinite,
    Report,
    count_by_kind,
    few,
    ranks_text,
)
from ddpbench.replicas.state import KINDS

T = TypeVar("T", Difference, Mismatch, NonFinite)
_SHOWN = 8  # sets of ranks in a sentence; the report has them all
_FOLDS = 4  # findings of a sort; the first line of the report counts all tensors


def list_findings(
    report: Report, facts: Facts, history: Mapping[Key, int], *, traced: bool
) -> tuple[Finding, ...]:
    """Return all findings, the worst first; the likely cause is part of the finding it explains.

    What earlier reports explained, and is still wrong, is summed up in one finding. In that case
    the other findings are about tensors that have newly become wrong.

    history: what is still wrong, with the step of the report that explained it. traced: local
    gradients are watched for NaN.
    """
    fresh = replace(
        report,
        differences=[d for d in report.differences if d.key not in history],
        mismatches=[m for m in report.mismatches if m.key not in history],
        nonfinite=[n for n in report.nonfinite if n.key not in history],
    )
    rows = [*_list_differences(fresh, facts, explain=not history)]
    rows += [*_list_mismatches(fresh), *_list_nonfinite(fresh, traced)]
    if not history:
        rows += _list_notes(report)
    else:
        rows = [_sum_up_history(history, report.step), *([] if report.repeated else rows)]
    return tuple(sorted(rows, key=lambda finding: SEVERITIES.index(finding.severity)))


def _sum_up_history(history: Mapping[Key, int], step: int | None) -> Finding:
    since, tensors = min(history.values()), {key[1:3] for key in history}
    sentence = f"reported in step {since} and still wrong: {few(sorted(map(' '.join, tensors)))}"
    return Finding("error", "still-wrong", sentence, "", {"since": since, "step": step})


# --- tensors with the same ranks in one finding


def _fold(faults: Sequence[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    """Put tensors with equal keys together."""
    folds: dict[Hashable, list[T]] = {}
    for fault in faults:
        folds.setdefault(key(fault), []).append(fault)
    return list(folds.values())[:_FOLDS]


def _make_place(
    report: Report, fold: Sequence[Fault], at: Sequence[int], **rest: object
) -> dict[str, object]:
    """Return the place of a finding on some tensors, with the coordinates of the ranks `at`."""
    first, names = fold[0], list(dict.fromkeys([fault.name for fault in fold]))
    place: dict[str, object] = {"kind": first.kind, "tensor": first.name, "tensors": names, **rest}
    if at and report.coordinates:
        place["coordinates"] = [_join(report.coordinates[rank]) for rank in at]
    if first.shard:
        place["shard"] = first.shard
    if report.step is not None:
        place["step"] = report.step
    return place


def _name_tensors(fold: Sequence[Fault]) -> str:
    """Return "parameter w (float32 2x2, shard 2 of 2) and 3 other tensors"."""
    first, more = fold[0], len({(fault.kind, fault.name) for fault in fold}) - 1
    notes = [first.shard] if first.shard else []
    if isinstance(first, Difference):
        notes.insert(0, " ".join(filter(None, [first.dtype, "x".join(map(str, first.shape))])))
    text = f"{first.kind} {first.name}"
    text += f" ({', '.join(notes)})" if notes else ""
    return f"{text} and {counted(more, 'other tensor')}" if more else text


def _list_differences(report: Report, facts: Facts, *, explain: bool) -> Iterator[Finding]:
    differences = report.differences
    cause, example = find_cause(facts) if explain and differences else (None, None)
    differences = sorted(differences, key=lambda difference: difference is not example)
    for fold in _fold(differences, lambda d: (d.kind == "buffer", d.sides)):
        first = fold[0]
        at = first.minority or [rank for side in first.sides for rank in side]
        severity = KINDS[first.kind].if_differs
        if first.kind == "buffer" and facts.resends_buffers:
            severity = "note"
        place = _make_place(report, fold, at, ranks=list(first.minority))
        finding = Finding(severity, "replicas-differ", _describe(fold, report), "", place)
        if cause is not None and example in fold:
            finding = replace(
                finding,
                code=cause.code,
                sentence=f"{finding.sentence}. Likely cause: {cause.sentence}",
                next_step=cause.next_step,
                place={**place, "cause": cause.code},
            )
        yield finding


def _describe(fold: Sequence[Difference], report: Report) -> str:
    first = fold[0]
    sides = [name_places(report, ranks) for ranks in first.sides[:_SHOWN]]
    where = f"between {list_all(sides)}"
    if first.minority:
        where = f"in {name_places(report, first.minority)}"
    elif len(first.sides) > _SHOWN:
        where += " and others"
    verb = "differs" if len(fold) == 1 else "differ"
    details = [_describe_detail(first, detail) for detail in first.details[:_SHOWN]]
    return ". ".join([f"{_name_tensors(fold)} {verb} {where}", *details])


def _describe_detail(difference: Difference, detail: Detail) -> str:
    index = f", first at [{', '.join(map(str, detail.index))}]" if detail.index else ""
    text = f"{ranks_text(detail.ranks).capitalize()}: {detail.differing} of {detail.elements} "
    text += f"elements{' of the shard' if difference.shard else ''}{index}: {detail.value} against "
    text += f"{detail.reference_value} in rank {detail.reference}"
    if detail.bit is not None:
        text += f", bit {detail.bit} alone"
    if detail.permuted:
        text += ", the same elements in another order"
    if detail.max_delta is not None:
        text += f", max |Δ| {detail.max_delta:.3g}"
    return text


def _list_mismatches(report: Report) -> Iterator[Finding]:
    def make_key(mismatch: Mismatch) -> Hashable:
        return mismatch.kind, mismatch.sides, *(form == "absent" for form in mismatch.forms)

    for fold in _fold(report.mismatches, make_key):
        first = fold[0]
        pairs = zip(first.forms, first.sides, strict=True)
        forms = list_all(f"{form} in {name_places(report, ranks)}" for form, ranks in pairs)
        at = first.minority or [rank for side in first.sides for rank in side]
        others = f"; not matching either: {few([each.name for each in fold[1:]])}"
        yield Finding(
            "error",
            "structure-differs",
            f"{first.kind} {first.name} is {forms}{others if len(fold) > 1 else ''}",
            "build model and optimizer from the same arguments in every rank; look for `if rank` "
            "around layers, requires_grad, load_state_dict or steps. Of a mesh with pipeline "
            'stages, compare one stage: `group=mesh["dp"]`',
            _make_place(report, fold, at),
        )


def _list_nonfinite(report: Report, traced: bool) -> Iterator[Finding]:
    def make_key(tensor: NonFinite) -> Hashable:
        return tensor.kind, *(rank for rank, _ in tensor.counts)

    origin, next_step = _explain_nonfinite(report, traced)
    for fold in _fold(report.nonfinite, make_key):
        severity = KINDS[fold[0].kind].if_nonfinite
        ranks = [rank for rank, _ in fold[0].counts]
        most = max(count for tensor in fold for _, count in tensor.counts)
        elements = f"{'up to ' * (len(fold) > 1)}{counted(most, 'NaN or infinite element')}"
        sentence = f"{_name_tensors(fold)}: {elements} in {name_places(report, ranks)}"
        place = _make_place(report, fold, ranks, ranks=ranks)
        if severity == "error":
            yield Finding(severity, "non-finite", sentence + origin, next_step, place)
            origin = next_step = ""  # they are given once
        else:
            yield Finding(severity, "non-finite", sentence, "", place)


def _explain_nonfinite(report: Report, traced: bool) -> tuple[str, str]:
    """Return where a NaN came from, as the end of a sentence, and a next step."""
    if not traced:
        return "", (
            "check the loss, the learning rate and the dtype of the step before. "
            "`Verifier(..., trace_nonfinite=True)` names the rank that had it first"
        )
    if not report.origins:
        return ". No output and no local gradient was NaN or infinite before", (
            "check what runs between the reduction of the gradients and this verification: "
            "clipping, scaling, the optimizer (a learning rate that is too large), edits of weights"
        )
    firsts = [f"rank {origin.rank} in {origin.place}" for origin in report.origins[:_SHOWN]]
    ago = report.origins[0].steps_ago  # the same in all: the earliest
    when = f", {counted(ago, 'step')} before this one" if ago else ""
    ranks = ranks_text([origin.rank for origin in report.origins])
    return (
        f". First, before gradients were reduced{when}: {'; '.join(firsts)}",
        f"look at the batch and the loss of {ranks} in that step",
    )


def _list_notes(report: Report) -> Iterator[Finding]:
    for reason in dict.fromkeys(skipped.reason for skipped in report.not_compared):
        fold = [skipped for skipped in report.not_compared if skipped.reason == reason]
        names = [tensor.name for tensor in fold]
        sentence = f"not compared: {list_kinds(count_by_kind(fold))} ({reason}): {few(names)}"
        next_step = "do not count these tensors as equal: stop a loop on `report.failed`"
        yield Finding("warning", "not-compared", sentence, next_step, {"tensors": names})
    if report.nothing_to_compare:
        sentence = (
            "no parameter is compared: each element of each parameter is in one rank only, as "
            "fully_shard intends. This is neither a proof nor a failure"
        )
        yield Finding("note", "nothing-to-compare", sentence)
    if any(d.kind != "buffer" and not d.minority for d in report.differences):
        sentence = "no value has a majority of ranks, so nobody can say which is right"
        yield Finding("note", "no-majority", sentence)


# --- places


def name_places(report: Report, ranks: Sequence[int]) -> str:
    """Return "dp_replicate=1 (ranks 4-7)", or "ranks 4-7" if no coordinates describe them."""
    where = report.coordinates
    names = where[ranks[0]] if where else {}
    values = {name: {where[rank][name] for rank in ranks} for name in names}
    if not values or len(ranks) == len(where) or prod(map(len, values.values())) != len(ranks):
        return ranks_text(ranks)
    every = {name: {each[name] for each in where.values()} for name in names}
    shown = {
        name: spans(sorted(each))
        for name, each in values.items()
        if len(ranks) == 1 or each != every[name]
    }
    return f"{_join(shown)} ({ranks_text(ranks)})"


def _join(coordinates: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in coordinates.items())
