"""Findings of a verification: tensors that differ in the same way share one finding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TypeVar

import torch

from ddpbench.records.schema import SEVERITIES, Finding
from ddpbench.records.wording import counted, list_all, spans
from ddpbench.replicas.causes import find_cause
from ddpbench.replicas.report import (
    NOT_REDUCED,
    Detail,
    Difference,
    Key,
    Mismatch,
    NonFinite,
    Origin,
    Report,
    WithoutGradient,
    count_kind,
    few,
    ranks_text,
    read_coordinates,
)
from ddpbench.replicas.training import Facts

T = TypeVar("T", Difference, Mismatch, NonFinite, WithoutGradient)
_SHOWN = 8  # ranks or sets of ranks in a sentence; the report has them all
_FOLDS = 3  # findings per kind of a pattern; one more finding sums up the rest


def list_findings(
    report: Report,
    facts: Facts | None,
    *,
    history: Mapping[Key, tuple[int, str]],
    rebroadcasts: bool,
    traced: bool,
    stages: Sequence[str],
) -> tuple[Finding, ...]:
    """Return all findings, the worst first; the likely cause is part of the finding it explains.

    What earlier reports explained, and is still wrong, is summed up in one finding. Then the other
    findings are about tensors that have newly become wrong.

    facts: None if nothing differs or there is a history. history: what is still wrong, with the
    step and the code of the report that explained it. rebroadcasts: DDP sends rank 0's buffers
    before each forward. traced: local gradients are watched for NaN. stages: dimensions of the mesh
    along which ranks hold other layers.
    """
    if not history:
        rows = [*_list_wrong(report, facts, rebroadcasts, traced), *_list_notes(report, stages)]
    else:
        rows = [_sum_up_history(history, report.step)]
        if not report.wrong <= history.keys():
            fresh = replace(
                report,
                differences=tuple(d for d in report.differences if d.key not in history),
                mismatches=tuple(m for m in report.mismatches if m.key not in history),
                nonfinite=tuple(n for n in report.nonfinite if n.key not in history),
            )
            rows += _list_wrong(fresh, None, rebroadcasts, traced)
    return tuple(sorted(rows, key=lambda finding: SEVERITIES.index(finding.severity)))


def _sum_up_history(history: Mapping[Key, tuple[int, str]], step: int | None) -> Finding:
    (since, code), count = min(history.values()), len({key[1:3] for key in history})
    verb = "differs or is" if count == 1 else "differ or are"
    sentence = f"{count} of the tensors reported from step {since} on ({code}) "
    sentence += f"still {verb} not finite"
    place = {"cause": code, "since": since, **({} if step is None else {"step": step})}
    return Finding("error", code, sentence, "", place)


def _list_wrong(
    report: Report, facts: Facts | None, rebroadcasts: bool, traced: bool
) -> Iterator[Finding]:
    cause, example = find_cause(facts) if facts else None, None
    if facts and cause:
        example = next(iter(facts.select(cause.evidence) or report.differences), None)
    folds = [*_differences(report, example, rebroadcasts), *_mismatches(report)]
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
    yield from _nonfinite(report, traced)


# --- tensors with the same ranks in one finding


def _fold(
    tensors: Sequence[T],
    key: Callable[[T], tuple[Hashable, ...]],
    order: Callable[[list[T]], tuple[bool, int]] | None = None,
) -> list[list[T]]:
    """Put tensors with equal keys together, sorted by `order` if it is given.

    Of each first item of a key, up to _FOLDS folds are returned, and the rest as one more.
    """
    folds: dict[tuple[Hashable, ...], list[T]] = {}
    for tensor in tensors:
        folds.setdefault(key(tensor), []).append(tensor)
    ordered = sorted(folds.values(), key=order) if order else list(folds.values())
    shown: dict[Hashable, list[list[T]]] = {}
    for fold in ordered:
        alike = shown.setdefault(key(fold[0])[0], [])
        if len(alike) <= _FOLDS:
            alike.append(fold)
        else:
            alike[-1].extend(fold)
    return [fold for alike in shown.values() for fold in alike]


def _place(
    report: Report, fold: Sequence[T], at: Sequence[int], **rest: object
) -> dict[str, object]:
    """Return the place of a finding on some tensors, with the coordinates of the ranks `at`."""
    first, names = fold[0], list(dict.fromkeys([tensor.name for tensor in fold]))
    place: dict[str, object] = {"kind": first.kind, "tensor": first.name, "tensors": names, **rest}
    where = dict(report.coordinates)
    if at and where:
        place["coordinates"] = [where[rank] for rank in at]
    if first.shard:
        place["shard"] = first.shard
    if report.step is not None:
        place["step"] = report.step
    return place


def _list_ranks(fold: Sequence[Difference] | Sequence[Mismatch]) -> tuple[list[int], list[int]]:
    """Return the ranks in a minority, and the ranks to name: all of the first tensor for a tie."""
    ranks = sorted({rank for tensor in fold for rank in tensor.minority})
    return ranks, ranks or [rank for side in fold[0].sides for rank in side]


def _differences(
    report: Report, example: Difference | None, rebroadcasts: bool
) -> Iterator[Finding]:
    places = Places(report)
    severities = {"buffer": "note" if rebroadcasts else "warning"}
    folds = _fold(
        report.differences,
        lambda difference: ("", difference.kind == "buffer", difference.values),
        lambda fold: (example not in fold, -len(fold)),
    )
    for fold in folds:
        shown = example if example and example in fold else fold[0]
        ranks, at = _list_ranks(fold)
        severity = min((severities.get(d.kind, "error") for d in fold), key=SEVERITIES.index)
        sentence = _describe_fold(fold, shown, report, places)
        place = _place(report, [shown, *fold], at, ranks=ranks)
        yield Finding(severity, "replicas-differ", sentence, "", place)


def _mismatches(report: Report) -> Iterator[Finding]:
    places = Places(report)
    folds = _fold(
        report.mismatches,
        lambda m: (m.kind, *((form == "absent", ranks) for form, ranks in m.forms)),
    )
    for fold in folds:
        first, names = fold[0], few([mismatch.name for mismatch in fold])
        absent = {r for m in fold for form, side in m.forms if form == "absent" for r in side}
        forms = ", ".join(f"{form} in {places.name(side)}" for form, side in first.forms)
        sentence = f"{first.kind} {first.name}: {forms}"
        if first.kind == "gradient" and absent:
            sentence = f"{_count_parameters(fold)} no gradient in "
            sentence += f"{places.name(sorted(absent))} and one in other ranks: {names}"
        elif len(fold) > 1:
            tensors = count_kind(first.kind, len(fold))
            sentence = f"{tensors} do not match between ranks: {names}. For example {sentence}"
        place = _place(report, fold, _list_ranks(fold)[1])
        yield Finding("error", "structure-differs", sentence, "", place)


def _count_parameters(tensors: Sequence[object]) -> str:
    return f"{counted(len(tensors), 'parameter')} {'has' if len(tensors) == 1 else 'have'}"


def _without_gradient(report: Report) -> Iterator[Finding]:
    places = Places(report)
    mismatched = {mismatch.name for mismatch in report.mismatches if mismatch.kind == "gradient"}
    missing = [each for each in report.without_gradient if each.name not in mismatched]
    for fold in _fold(missing, lambda each: ((each.zeros, each.ranks),)):
        ranks, names = fold[0].ranks, few([each.name for each in fold])
        everywhere = len(ranks) == len(report.ranks)
        gradient = "a gradient of zeros" if fold[0].zeros else "no gradient"
        where = "any rank" if everywhere else places.name(ranks)
        yield Finding(
            "note" if everywhere else "warning",
            "without-gradient",
            f"{_count_parameters(fold)} {gradient} in {where}: {names}",
            "" if everywhere else f"find out why the loss of {where} does not use them",
            _place(report, fold, () if everywhere else ranks, ranks=list(ranks)),
        )


def _nonfinite(report: Report, traced: bool) -> Iterator[Finding]:
    places = Places(report)
    explained = False  # the origin and the next step are given once
    folds = _fold(
        report.nonfinite,
        lambda each: (each.kind, each.severity, *(rank for rank, _ in each.counts)),
    )
    for fold in folds:
        first = fold[0]
        ranks = sorted({rank for tensor in fold for rank, _ in tensor.counts})
        counts = sorted({count for tensor in fold for _, count in tensor.counts})
        span = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        elements, where = f"{span} element{'' if span == '1' else 's'}", places.name(ranks)
        part = f", {first.shard}" if first.shard else ""
        sentence = f"{first.kind} {first.name}{part}: {elements} NaN or infinite in {where}"
        if len(fold) > 1:
            names = few([tensor.name for tensor in fold])
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
        ago = origin.steps_ago
        when = f", {ago} step{'' if ago == 1 else 's'} before this one" if ago else ""
        firsts.append(f"rank {origin.rank} in {origin.place}{when}")
    ranks = ranks_text([origin.rank for origin in origins])
    return (
        f". First, before gradients were reduced: {'; '.join(firsts)}",
        f"look at the batch and the loss of {ranks} in that step",
    )


# --- notes beside what is wrong


def _list_notes(report: Report, stages: Sequence[str]) -> Iterator[Finding]:
    yield from _without_gradient(report)
    yield from _not_compared(report)
    if report.nothing_to_compare:
        yield Finding(
            "note",
            "nothing-to-compare",
            "no parameter is compared: each element of each parameter is in one rank only, as "
            "fully_shard intends. This is neither a proof nor a failure",
            "stop a loop on `report.failed`, which ignores this",
        )
    if stages:
        names = list_all(stages)
        yield Finding(
            "note",
            "pipeline-stages",
            f"ranks along {names} hold other layers, so they are not compared along {names}",
        )
    if any(d.kind != "buffer" and not d.minority for d in report.differences):
        yield Finding(
            "note",
            "no-majority",
            "no value has a majority of ranks, so nobody can say which is right",
        )
    if not report.rng_equal:
        yield Finding(
            "note",
            "rng-differs",
            "the ranks' random number generators are in different states; this is intended if "
            "dropout and augmentation differ by rank",
        )


def _not_compared(report: Report) -> Iterator[Finding]:
    for reason in dict.fromkeys(skipped.reason for skipped in report.not_compared):
        fold = [skipped for skipped in report.not_compared if skipped.reason == reason]
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


# --- sentences on differences


class Places:
    """Names sets of ranks by their coordinates on a mesh, if there is one, else by numbers."""

    def __init__(self, report: Report) -> None:
        self._where = read_coordinates(report.coordinates)
        self.known = bool(self._where)

    def name(self, ranks: Sequence[int]) -> str:
        """Return "dp_replicate=1 (ranks 4-7)", or "ranks 4-7" if no coordinates describe them."""
        values, everywhere = self._values(ranks), self._values(list(self._where))
        narrowed = {name: values[name] for name in values if values[name] != everywhere[name]}
        if not narrowed or prod(map(len, values.values())) != len(ranks):
            return ranks_text(ranks)
        shown = values if len(ranks) == 1 else narrowed
        return f"{_join(shown)} ({ranks_text(ranks)})"

    def contrast(self, ranks: Sequence[int], others: Sequence[int]) -> str:
        """Name ranks by the coordinates in which they are not like the others."""
        values, against = self._values(ranks), self._values(others)
        unlike = {name: values[name] for name in values if values[name] != against[name]}
        if not unlike or prod(map(len, values.values())) != len(ranks):
            return self.name(ranks)
        return _join(unlike)

    def _values(self, ranks: Sequence[int]) -> dict[str, set[int]]:
        if not ranks or any(rank not in self._where for rank in ranks):
            return {}
        return {name: {self._where[r][name] for r in ranks} for name in self._where[ranks[0]]}


def _join(values: Mapping[str, set[int]]) -> str:
    return ", ".join(f"{name}={spans(sorted(each))}" for name, each in values.items())


def _describe_fold(
    fold: list[Difference], example: Difference, report: Report, places: Places
) -> str:
    details = ". ".join(_describe_detail(example, d) for d in example.details[:_SHOWN])
    shape = "x".join(map(str, example.shape))
    tensor = f"{example.kind} {example.name} ({example.dtype}{' ' if shape else ''}{shape})"
    tensor += f", {example.shard}" if example.shard else ""
    if len(fold) == 1:
        text = _describe_sides(tensor, example, places)
        return text + (f". {details}" if details else "")
    names: dict[str, set[str]] = {}  # a tensor may differ in several ways, one for each shard
    for difference in fold:
        names.setdefault(difference.kind, set()).add(difference.name)
    counts = (f"{len(each)} of {count_kind(k, report.compared[k])}" for k, each in names.items())
    tensors = list_all(counts)
    if len({difference.values for difference in fold}) > 1:
        sides = f"{tensors} differ between other ranks"
    elif example.minority and not places.known:
        sides = f"{tensors} differ in {ranks_text(example.minority)}"
    else:
        sides = _describe_sides(tensors, example, places, verb="differ")
    # Buffers that DDP sends again differ after each step, and are reported each time.
    dated = report.step is not None and example.kind != "buffer"
    when = f", first seen in step {report.step}" if dated else ""
    more = sum(map(len, names.values())) - 1
    text = f"{sides}{when}: {example.name}" + (f" and {more} more" if more else "")
    return text + (f". For example {tensor}: {details}" if details else "")


def _describe_sides(
    subject: str, difference: Difference, places: Places, verb: str = "differs"
) -> str:
    """Name the ranks that differ: "dp_replicate=1: parameter w differs from dp_replicate=0"."""
    first, *rest = difference.values
    comma = "," if difference.shard and verb == "differs" else ""
    if places.known and len(rest) == 1:
        reference = places.contrast(first, rest[0])
        return f"{places.name(rest[0])}: {subject}{comma} {verb} from {reference}"
    if not places.known and difference.minority and difference.details:
        return f"{subject} {verb}"  # the details name the ranks
    sides = [places.name(ranks) for ranks in difference.values]
    *others, last = sides if len(sides) <= _SHOWN else [*sides[:_SHOWN], "others"]
    return f"{subject}{comma} {verb} between {', '.join(others)} and {last}"


def _describe_detail(difference: Difference, detail: Detail) -> str:
    where = f" at [{', '.join(map(str, detail.index))}]" if detail.index else ""
    text = ranks_text(detail.ranks)
    text = text[0].upper() + text[1:]
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
