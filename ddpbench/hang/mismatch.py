"""Describe the first collective in which ranks called different things. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from ddpbench.hang.phrases import format_lines, format_ranks
from ddpbench.hang.status import Call, RankStatus, group_logs


def describe_mismatches(statuses: Mapping[int, RankStatus]) -> list[str]:
    """Return one sentence for each group in which ranks called different collectives."""
    sentences = []
    for group, logs in group_logs(statuses).items():
        calls = {rank: {call.number: call for call in log.calls} for rank, log in logs.items()}
        for number in sorted({number for numbers in calls.values() for number in numbers}):
            here = {r: numbers[number] for r, numbers in calls.items() if number in numbers}
            kinds = _kinds(here)
            if len(kinds) > 1:
                lines = {rank: _line(number, here[rank], statuses[rank], group) for rank in here}
                sentences.append(_mismatch(number, group, kinds, calls, lines))
                break
    return sentences


def _kinds(here: Mapping[int, Call]) -> list[tuple[Call, list[int]]]:
    kinds: list[tuple[Call, list[int]]] = []
    for rank, call in sorted(here.items()):
        alike = next((ranks for kind, ranks in kinds if kind.agrees(call)), None)
        if alike is None:
            kinds.append((call, [rank]))
        else:
            alike.append(rank)
    return sorted(kinds, key=lambda kind: -len(kind[1]))


def _line(number: int, call: Call, status: RankStatus, group: str) -> str:
    waits = any(log.group == group and log.finished + 1 == number for log in status.logs)
    return call.place or (status.place if waits and status.inside else "")


def _mismatch(
    number: int,
    group: str,
    kinds: list[tuple[Call, list[int]]],
    calls: dict[int, dict[int, Call]],
    lines: Mapping[int, str],
) -> str:
    (usual, most), *others = kinds
    first = True
    parts = []
    for call, ranks in others:
        verb = "calls" if len(ranks) == 1 else "call"
        text = f"{format_ranks(ranks)} {verb} {f'{call} {group}'.rstrip() if first else call.text}"
        text += format_lines(lines[rank] for rank in ranks)
        if first:
            text += (
                f" where {format_ranks(most)} {'calls' if len(most) == 1 else 'call'} {usual.text}"
            )
            text += format_lines(lines[rank] for rank in most)
        if how := _shift(calls[ranks[0]], calls[most[0]], number):
            text += (
                f": {format_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} {how} a collective"
            )
        parts.append(text)
        first = False
    return "; ".join(parts)


def _shift(mine: Mapping[int, Call], most: Mapping[int, Call], number: int) -> str:
    """Whether, from this number on, a rank's calls are the others' next ones or previous ones."""
    known = dict(most)
    if number + 1 not in known and number in known:  # they wait: what followed this call last time?
        before = [n for n in known if n < number and known[n].agrees(known[number])]
        if before and max(before) + 1 < number:
            known[number + 1] = known[max(before) + 1]

    def fits(by: int) -> bool:
        pairs = [(call, known.get(n + by)) for n, call in mine.items() if n >= number]
        both = [(call, other) for call, other in pairs if other is not None]
        return number + by in known and all(call.agrees(other) for call, other in both)

    hows = [how for how, by in (("skipped", 1), ("doubled", -1)) if fits(by)]
    if hows == ["doubled"] and number + 1 not in most:  # the others wait: their next is a guess
        hows = ["skipped", "doubled"]
    return " or ".join(hows)
