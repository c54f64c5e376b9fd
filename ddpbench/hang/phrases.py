"""Parts of the sentences about a hang: ranks, lines, who waits where. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ddpbench.analysis.setup import spans
from ddpbench.hang.calls import call_number
from ddpbench.hang.status import Hang, RankStatus


def at_lines(lines: Iterable[str]) -> str:
    """ " at f (x.py:3)", of more than two lines the first."""
    known = sorted({line for line in lines if line})
    if not known:
        return ""
    return f" at {' and '.join(known) if len(known) < 3 else f'{known[0]} and elsewhere'}"


def where_else(words: RankStatus, group: str) -> str:
    """The place of a rank that is not in this group's collective."""
    for log in words.logs:
        if log.started > log.finished and log.group != group:
            call = f"{call_number(log.finished + 1, [log])} {log.group}".rstrip()
            return f"{call}, called from {words.place}"
    return f"{words.waits_in}, called from {words.place}" if words.waits_in else words.place


def each_place(words: Mapping[int, RankStatus], found: Sequence[Hang]) -> str:
    """What each says, the same ones together."""
    alike: dict[str, list[int]] = {}
    for rank, each in sorted(words.items()):
        text = f"{each.cause}, at {each.place}" if each.cause else f"in {where_else(each, '-')}"
        text += f", in {each.waits_in}" if each.cause and each.waits_in else ""
        before = [hang for hang in found if rank in hang.absent]
        text += f", before {before[0]}" if before else ""
        text += f" (in {each.phase})" if each.phase else ""
        alike.setdefault(text, []).append(rank)
    return "; ".join(f"{name_ranks(ranks)}: {text}" for text, ranks in alike.items())


def who_waits(ranks: Iterable[int], words: Mapping[int, RankStatus], left: bool = False) -> str:
    """left: they have waited for one that has left, and may have failed by now."""
    waiting = sorted(ranks)
    if not waiting:
        return ""
    verb = "waited for it" if left else "waits" if len(waiting) == 1 else "wait"
    return f"; {name_ranks(waiting)} {verb}{in_phase(waiting, words)}"


def in_phase(ranks: Sequence[int], words: Mapping[int, RankStatus]) -> str:
    phase = words[min(ranks)].phase
    return f" in {phase}" if phase else ""


def name_ranks(ranks: Sequence[int]) -> str:
    """ "rank 1", "ranks 0, 2, 3", of more than six "ranks 0–6, 8"."""
    if len(ranks) <= 6:
        return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"
    return f"ranks {spans(ranks).replace('-', '–')}"
