"""What a verification found, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import torch

from ddpbench.records.schema import Finding
from ddpbench.replicas.causes import Cause, Facts
from ddpbench.replicas.report import Detail, Difference, NonFinite, counted, few, ranks_text

_SHOWN = 8  # ranks of a tensor, names of a kind; the report has them all


def findings(
    facts: Facts,
    cause: Cause | None,
    first: Finding | None,
    skipped: Mapping[str, str],
    rng_equal: bool,
    step: int | None,
) -> tuple[Finding, ...]:
    """All of it, the worst first, the likely cause before what it explains.

    first: the cause told when the replicas first differed. What differs since follows from that:
    it is told again, and no other.
    """
    found = [
        *_differences(facts, step), *_mismatches(facts, step), *_nonfinite(facts, step),
        *_skipped(facts, skipped),
    ]  # fmt: skip
    if any(each.kind != "buffer" and not each.minority for each in facts.differences):
        found.append(
            Finding(
                "note",
                "no-majority",
                "where as many ranks hold one value as another, nobody can say which is right",
            )
        )
    if not rng_equal:
        found.append(
            Finding(
                "note",
                "rng-differs",
                "the ranks' random number generators are in different states, as is meant where "
                "dropout and augmentation differ by rank",
            )
        )
    order = ("error", "warning", "note")
    found.sort(key=lambda f: order.index(f.severity))
    if cause is None:
        return tuple(found)
    severity = next(f.severity for f in found if f.code in ("replicas-differ", "structure-differs"))
    if first is not None and severity == "error":
        return (_as_before(first, step), *found)
    sentence = f"likely cause: {cause.sentence}"
    told = Finding(severity, cause.code, sentence, cause.next_step, _place(step, cause=cause.code))
    return (told, *found)


def _as_before(first: Finding, step: int | None) -> Finding:
    since = first.place["step"]
    sentence = f"first differed at step {since}, see that report; its {first.sentence}"
    place = _place(step, cause=first.code, since=since)
    return Finding("error", first.code, sentence, first.next_step, place)


def _place(step: int | None, **rest: object) -> dict[str, object]:
    return {**rest, **({} if step is None else {"step": step})}


def _severity(facts: Facts, kind: str) -> str:
    if kind != "buffer":
        return "error"
    return "note" if facts.rebroadcast else "warning"


def _differences(facts: Facts, step: int | None) -> Iterator[Finding]:
    """One a located tensor, and one for the rest of each kind."""
    rest: dict[str, list[Difference]] = {}
    for each in sorted(facts.differences, key=lambda d: d not in facts.options):
        if not each.details:
            rest.setdefault(each.kind, []).append(each)
            continue
        yield Finding(
            _severity(facts, each.kind),
            "replicas-differ",
            f"{named(each)} {_who(each)}. "
            + ". ".join(_how(each, detail) for detail in each.details[:_SHOWN]),
            "",
            _place(step, kind=each.kind, tensor=each.name, ranks=list(each.minority)),
        )
    for kind, those in rest.items():
        yield Finding(
            _severity(facts, kind),
            "replicas-differ",
            f"not equal, not compared in full: {counted(kind, len(those))}: "
            + few([each.name for each in those]),
            "",
            _place(step, kind=kind, tensors=[each.name for each in those]),
        )


def named(each: Difference) -> str:
    """ "parameter fc.weight (float32 3x2)"."""
    shape = "x".join(map(str, each.shape))
    return f"{each.kind} {each.name} ({each.dtype}{' ' if shape else ''}{shape})"


def _who(each: Difference) -> str:
    if each.minority:
        return "differs"  # in the ranks that are told next
    sides = [ranks_text(ranks) for ranks in each.values]
    *others, last = sides if len(sides) <= _SHOWN else [*sides[:_SHOWN], "others"]
    return f"differs between {', '.join(others)} and {last}"


def _how(each: Difference, detail: Detail) -> str:
    where = f" at [{', '.join(map(str, detail.index))}]" if detail.index else ""
    text = ranks_text(detail.ranks)
    text = text[0].upper() + text[1:]
    if each.shape:
        text += f": {detail.differing} of {detail.elements} elements"
    if detail.differing > 1:
        text += ", first"
    text += f"{where}: {detail.value} against {detail.reference_value} in rank {detail.reference}"
    if detail.bit is not None:
        text += f", bit {detail.bit}{_part(each.dtype, detail.bit)} alone"
    if detail.permuted:
        text += ", the same elements in another order"
    if detail.max_delta is not None:
        text += f", max |Δ| {detail.max_delta:.3g}"
    return text


def _part(dtype: str, bit: int) -> str:
    """The part of a floating-point number that a bit is in; "" of any other."""
    if "float" not in dtype and "complex" not in dtype:
        return ""
    form = torch.finfo(getattr(torch, dtype))
    bit %= form.bits  # of a complex number's real or imaginary part
    if bit == form.bits - 1:
        return " (the sign)"
    return " (of the fraction)" if 2.0**bit * form.eps < 1 else " (of the exponent)"


def _mismatches(facts: Facts, step: int | None) -> Iterator[Finding]:
    """One each, up to a number of a kind, and one for the rest of it."""
    kinds = dict.fromkeys(each.kind for each in facts.mismatches)
    for kind in kinds:
        those = [each for each in facts.mismatches if each.kind == kind]
        for each in those[:_SHOWN]:
            forms = ", ".join(f"{form} in {ranks_text(ranks)}" for form, ranks in each.forms)
            sentence = f"{kind} {each.name}: {forms}"
            place = _place(step, kind=kind, tensor=each.name)
            yield Finding("error", "structure-differs", sentence, "", place)
        if those[_SHOWN:]:
            names = [each.name for each in those[_SHOWN:]]
            sentence = f"{kind}: not in all ranks alike are also {few(names)}"
            yield Finding(
                "error", "structure-differs", sentence, "", _place(step, kind=kind, tensors=names)
            )


def _nonfinite(facts: Facts, step: int | None) -> Iterator[Finding]:
    for each in facts.nonfinite:
        yield _one_nonfinite(each, step)


def _one_nonfinite(each: NonFinite, step: int | None) -> Finding:
    # A mask of -inf is an honest buffer, and a scaler of losses makes and skips infinite gradients.
    severity = {"buffer": "note", "gradient": "warning"}.get(each.kind, "error")
    ranks = tuple(rank for rank, _ in each.counts)
    numbers = sorted({count for _, count in each.counts})
    count = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
    elements = "element" if count == "1" else "elements"
    return Finding(
        severity,
        "non-finite",
        f"{each.kind} {each.name}: {count} {elements} NaN or infinite in {ranks_text(ranks)}",
        "look at the step before: the loss, the learning rate, the range of the dtype"
        if severity == "error"
        else "",
        _place(step, kind=each.kind, tensor=each.name, ranks=list(ranks)),
    )


def _skipped(facts: Facts, skipped: Mapping[str, str]) -> Iterator[Finding]:
    """One a reason; and an error where nothing of the model is left."""
    if facts.parameters == 0 and any(key.startswith("parameter ") for key in skipped):
        yield Finding(
            "error",
            "nothing-compared",
            "no parameter can be compared, so nothing is proved about the model",
            "verify where every rank holds all of the parameters, as under DDP",
        )
    for reason in dict.fromkeys(skipped.values()):
        those = [key.split(" ", 1) for key, why in skipped.items() if why == reason]
        counts = Counter(kind for kind, _ in those)
        what = ", ".join(counted(kind, count) for kind, count in counts.items())
        names = few(list(dict.fromkeys(name for _, name in those)))
        yield Finding("note", "not-compared", f"not compared: {what} ({reason}): {names}")
