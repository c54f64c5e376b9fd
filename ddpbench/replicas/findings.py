"""What a verification found, in words: what is alike is folded into one finding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from ddpbench.records.schema import SEVERITIES, Finding
from ddpbench.replicas.causes import Cause, Facts
from ddpbench.replicas.compare import Comparison
from ddpbench.replicas.report import (
    Detail,
    Difference,
    Mismatch,
    NonFinite,
    NotCompared,
    Origin,
    Report,
    counted,
    few,
    ranks_text,
)

T = TypeVar("T")
_SHOWN = 8  # ranks of a tensor; the report has them all
_SIDES = 3  # sets of ranks that share values, told apart; what is left is one finding
Key = tuple[str, str, str]  # what is wrong, kind, name


@dataclass(frozen=True)
class History:
    """What a Verifier has reported since the replicas were last right."""

    first: Finding  # the first finding of the first report
    since: int  # its step
    known: frozenset[Key] | set[Key]


@dataclass(frozen=True)
class Verification:
    """What is told beside the differences themselves."""

    not_compared: tuple[NotCompared, ...]
    origins: tuple[Origin, ...]
    traced: bool  # whether local gradients are watched for NaN
    rng_equal: bool
    step: int | None
    compared: dict[str, int]


def keys(facts: Facts | Comparison | Report) -> set[Key]:
    """All that is wrong: what a later report need not tell again."""
    wrong = {("differs", d.kind, d.name) for d in facts.differences if d.kind != "buffer"}
    wrong |= {("unlike", m.kind, m.name) for m in facts.mismatches}
    not_finite = {("not finite", n.kind, n.name) for n in facts.nonfinite}
    return wrong | {key for key in not_finite if key[1] not in _HARMLESS}


def findings(
    facts: Facts, cause: Cause | None, history: History | None, verification: Verification
) -> tuple[Finding, ...]:
    """All of it, the worst first; the likely cause stands with what it explains.

    before: what was told since the replicas were last right. What differs since follows from that:
    it is told in one line, and after it only what has come since.
    """
    wrong = keys(facts)
    if history is not None and wrong:
        still = _still(history, wrong, verification.step)
        if wrong <= history.known:
            return (still,)
        found = [still, *_wrong(_fresh(facts, history), None, verification)]
    else:
        found = [*_wrong(facts, cause, verification), *_beside(facts, verification)]
    return tuple(sorted(found, key=lambda f: SEVERITIES.index(f.severity)))


def _still(history: History, wrong: set[Key], step: int | None) -> Finding:
    first, old = history.first, len(wrong & history.known)
    place = {"cause": first.code, "since": history.since}
    sentence = f"as in step {history.since}, see its report ({first.code}): {old} of its tensors"
    sentence += f" {'is' if old == 1 else 'are'} still different or not finite"
    return Finding("error", first.code, sentence, "", _place(step, **place))


def _fresh(facts: Facts, history: History) -> Facts:
    def new(what: str, those: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(t for t in those if (what, t.kind, t.name) not in history.known)

    return replace(
        facts,
        differences=new("differs", facts.differences),
        mismatches=new("unlike", facts.mismatches),
        nonfinite=new("not finite", facts.nonfinite),
    )


def _wrong(facts: Facts, cause: Cause | None, verification: Verification) -> Iterator[Finding]:
    """What differs, is not alike or is not finite, the part with the cause first."""
    shown = cause.shown(facts) if cause else None
    folds = [*_differences(facts, shown, verification), *_mismatches(facts, verification.step)]
    if cause is not None and folds:
        unlike = [f for f in folds if cause.unlike and f.place["kind"] in cause.unlike
                  and f.code == "structure-differs"]  # fmt: skip
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
    """What is no difference: gradients that are not there, what was not compared, and notes."""
    yield from _without_gradient(facts, verification.step)
    yield from _not_compared(verification.not_compared)
    if any(each.kind != "buffer" and not each.minority for each in facts.differences):
        yield Finding(
            "note",
            "no-majority",
            "no value has a majority of ranks, so nobody can say which is right",
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


def _severity(facts: Facts, kind: str) -> str:
    if kind != "buffer":
        return "error"
    return "note" if facts.rebroadcast else "warning"


def _differences(
    facts: Facts, shown: Difference | None, verification: Verification
) -> Iterator[Finding]:
    """One for all that differ between the same ranks; the one with `shown` first."""
    sides: dict[tuple[object, ...], list[Difference]] = {}
    for each in facts.differences:
        sides.setdefault((each.kind == "buffer", each.values), []).append(each)
    folds = sorted(sides.values(), key=lambda those: (shown not in those, -len(those)))
    kept, rest = folds[:_SIDES], [each for those in folds[_SIDES:] for each in those]
    for those in [*kept, *([rest] if rest else [])]:
        example = shown if shown in those else those[0]
        assert example is not None
        names = [example.name, *(d.name for d in those if d is not example)]
        yield Finding(
            min((_severity(facts, d.kind) for d in those), key=SEVERITIES.index),
            "replicas-differ",
            _folded(those, example, verification, same_sides=those is not rest),
            "",
            _place(verification.step, kind=example.kind, tensor=example.name, tensors=names,
                   ranks=sorted({rank for d in those for rank in d.minority})),
        )  # fmt: skip


def _folded(
    those: list[Difference], example: Difference, verification: Verification, same_sides: bool
) -> str:
    how = ". ".join(_how(example, detail) for detail in example.details[:_SHOWN])
    if len(those) == 1:
        return f"{named(example)} {_who(example)}" + (f". {how}" if how else "")
    counts = Counter(each.kind for each in those)
    some = [f"{n} of {counted(kind, verification.compared[kind])}" for kind, n in counts.items()]
    what = " and ".join([*([", ".join(some[:-1])] if some[1:] else []), some[-1]])
    who = _who(example, "differ") if same_sides else "differ between other ranks"
    if same_sides and example.minority:
        who = f"differ in {ranks_text(example.minority)}"
    # Buffers that DDP sends anew differ after each step, and are reported each time.
    known = verification.step is not None and example.kind != "buffer"
    when = f", first seen in step {verification.step}" if known else ""
    text = f"{what} {who}{when}: {example.name} and {len(those) - 1} more"
    return text + (f". For example {named(example)}: {how}" if how else "")


def named(each: Difference) -> str:
    """ "parameter fc.weight (float32 3x2)"."""
    shape = "x".join(map(str, each.shape))
    return f"{each.kind} {each.name} ({each.dtype}{' ' if shape else ''}{shape})"


def _who(each: Difference, verb: str = "differs") -> str:
    if each.minority and each.details:
        return verb  # in the ranks that are named next
    sides = [ranks_text(ranks) for ranks in each.values]
    *others, last = sides if len(sides) <= _SHOWN else [*sides[:_SHOWN], "others"]
    return f"{verb} between {', '.join(others)} and {last}"


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
    """One for all of a kind that the same ranks have otherwise."""
    sides: dict[tuple[object, ...], list[Mismatch]] = {}
    for each in facts.mismatches:
        key = each.kind, *((form == "absent", ranks) for form, ranks in each.forms)
        sides.setdefault(key, []).append(each)
    for those in _at_most(sides, lambda key: key[0]):
        first, names = those[0], few([each.name for each in those])
        absent = {
            r for each in those for form, ranks in each.forms if form == "absent" for r in ranks
        }
        forms = ", ".join(f"{form} in {ranks_text(ranks)}" for form, ranks in first.forms)
        sentence = f"{first.kind} {first.name}: {forms}"
        if first.kind == "gradient" and absent:
            what = counted("parameter", len(those))
            where = ranks_text(tuple(absent))
            sentence = f"{what} without a gradient in {where}, with one in others: {names}"
        elif len(those) > 1:
            what = counted(first.kind, len(those))
            sentence = f"{what} not in all ranks alike: {names}. For example {sentence}"
        place = _place(step, kind=first.kind, tensor=first.name, tensors=[d.name for d in those])
        yield Finding("error", "structure-differs", sentence, "", place)


def _at_most(sides: dict[Any, list[T]], kind_of: Callable[[Any], object]) -> Iterator[list[T]]:
    """The sets of some sides each, the first few of a kind; all others of the kind as one set."""
    rest: dict[object, list[T]] = {}
    told: Counter[object] = Counter()
    for key, those in sides.items():
        kind = kind_of(key)
        told[kind] += 1
        if told[kind] <= _SIDES:
            yield those
        else:
            rest.setdefault(kind, []).extend(those)
    yield from rest.values()


def _without_gradient(facts: Facts, step: int | None) -> Iterator[Finding]:
    """One for all that the same ranks have no gradient of."""
    sides: dict[tuple[bool, tuple[int, ...]], list[str]] = {}
    told = {each.name for each in facts.mismatches if each.kind == "gradient"}
    for each in facts.without_gradient:
        if each.name in told:
            continue
        sides.setdefault((each.zeros, each.ranks), []).append(each.name)
    for (zeros, ranks), names in sides.items():
        everywhere = len(ranks) == facts.world_size
        what = "with a gradient of zeros" if zeros else "without a gradient"
        sentence = f"{counted('parameter', len(names))} {what} in "
        sentence += f"{'any rank' if everywhere else ranks_text(ranks)}: {few(names)}"
        next_step = "" if everywhere else "find out why the loss of these ranks does not use them"
        place = _place(step, kind="parameter", tensor=names[0], tensors=names, ranks=list(ranks))
        severity = "note" if everywhere else "warning"
        yield Finding(severity, "without-gradient", sentence, next_step, place)


# A mask of -inf is an honest buffer, and a scaler of losses makes and skips infinite gradients.
_HARMLESS = {"buffer": "note", "gradient": "warning"}
_TRACE = (
    "trace it with `Verifier(..., trace_nonfinite=True)`, which names the rank that had it first"
)


def _nonfinite(facts: Facts, verification: Verification) -> Iterator[Finding]:
    """One for all of a kind in the same ranks."""
    sides: dict[tuple[str, tuple[int, ...]], list[NonFinite]] = {}
    for each in facts.nonfinite:
        sides.setdefault((each.kind, tuple(rank for rank, _ in each.counts)), []).append(each)
    origin = True  # it stands once, and so does the next step
    for those in _at_most(sides, lambda key: key[0]):
        kind, ranks = those[0].kind, tuple(sorted({r for each in those for r, _ in each.counts}))
        severity = _HARMLESS.get(kind, "error")
        numbers = sorted({count for each in those for _, count in each.counts})
        count = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
        elements = f"{count} element{'' if count == '1' else 's'}"
        names, where = [each.name for each in those], ranks_text(ranks)
        sentence = f"{kind} {names[0]}: {elements} NaN or infinite in {where}"
        if len(those) > 1:
            sentence = (
                f"{counted(kind, len(those))} with NaN or infinite elements in {where}: "
                f"{few(names)}; {elements} each"
            )
        next_step = ""
        if severity == "error" and origin:
            sentence, next_step = _origin(sentence, verification)
            origin = False
        place = _place(
            verification.step, kind=kind, tensor=names[0], tensors=names, ranks=list(ranks)
        )
        yield Finding(severity, "non-finite", sentence, next_step, place)


def _origin(sentence: str, verification: Verification) -> tuple[str, str]:
    """The sentence with where a NaN was first, and what to do."""
    if not verification.traced:
        return sentence, f"look at the step before: its loss, learning rate, dtype; {_TRACE}"
    if not verification.origins:
        return f"{sentence}. No output and no local gradient had one before", (
            "look at what runs between the reduction of the gradients and here: clipping, "
            "scaling, the optimizer (a learning rate that is too large), edits of weights"
        )
    told = []
    for each in verification.origins[:_SHOWN]:
        ago = each.steps_ago
        when = f", {ago} step{'' if ago == 1 else 's'} before this one" if ago else ""
        told.append(f"rank {each.rank} in {each.place}{when}")
    ranks = ranks_text(tuple(each.rank for each in verification.origins))
    return (
        f"{sentence}. First, before gradients were reduced: {'; '.join(told)}",
        f"look at the batch and the loss of {ranks} in that step",
    )


def _not_compared(those: Sequence[NotCompared]) -> Iterator[Finding]:
    """One a reason."""
    for reason in dict.fromkeys(each.reason for each in those):
        alike = [each for each in those if each.reason == reason]
        counts = Counter(each.kind for each in alike)
        what = ", ".join(counted(kind, count) for kind, count in counts.items())
        names = few(list(dict.fromkeys(each.name for each in alike)))
        yield Finding(
            "warning",
            "not-compared",
            f"not compared: {what} ({reason}): {names}",
            "nothing is proved about these; stop your loop on `report.failed`, which is False "
            "here unless something that was compared is wrong",
            {"tensors": [each.name for each in alike]},
        )
