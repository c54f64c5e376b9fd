"""Why ranks wait for ever: one verdict for all, from the last words of each. No torch.

A rank that answers tells which collectives it has called; of one that cannot there is its last
heartbeat, which has numbers only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ddpbench.hang.calls import call_number, hangs, logs_by_group
from ddpbench.hang.deadlock import deadlock, messages
from ddpbench.hang.mismatch import mismatches
from ddpbench.hang.phrases import (
    at_lines,
    each_place,
    in_phase,
    name_ranks,
    where_else,
    who_waits,
)
from ddpbench.hang.status import (
    ALIVE,
    DIED,
    ENDED,
    LEFT,
    OVER,
    STOPPED,
    Hang,
    Log,
    RankStatus,
    Silent,
)  # fmt: skip

# Errors with which a backend reacts to another rank: that one has gone, or does not come.
SYMPTOM = re.compile(
    r"(closed|reset) by peer|broken pipe|remote process|socket closed|connection (closed|lost)"
    r"|timed out waiting \d+ ?ms for|timeout caused pair closure|collective operation timeout"
    r"|on rank \d+ has not ended within",
    re.IGNORECASE,
)


def verdict(
    silent: Sequence[Silent], words: Mapping[int, RankStatus], together: bool = True
) -> str:
    """One sentence: which rank is to blame, where it is, who waits for it.

    words: of every rank that answered, at least one; together: whether the store answers by which
    they did. A silent rank that lives is to blame only where a deadline is over: it should have
    spoken.
    """
    words, silent = _named_apart(words, silent)
    if is_notice(words):
        return _notice(silent, words)
    found = hangs(words)
    blamed = _blamed(silent, together, any(each.late for each in words.values()))
    failed = {rank: each for rank, each in words.items() if each.cause and not each.late}
    failed = {r: each for r, each in failed.items() if not SYMPTOM.search(each.cause)} or failed
    # Of those that have left, the last word may still tell that they have called other things.
    seen = {**{s.rank: s.seen for s in silent if s.seen}, **words}
    parts = mismatches(seen)
    excuse = parts or any(not SYMPTOM.search(each.cause) for each in failed.values())
    owing = {s.rank for s in blamed if _owed(s.rank, s.seen, words)}
    blamed = [s for s in blamed if s.state != LEFT or s.rank in owing or not (owing or excuse)]
    early = [] if blamed or excuse else _early(words, failed)
    absent = [] if blamed or excuse or early else _absent(words, failed)
    if blamed:
        texts = [_silence(each, found, words) for each in blamed]
        waited = all(each.state in (LEFT, ENDED, OVER) for each in blamed)
        parts.append("; ".join(texts) + who_waits(words, words, waited))
    elif early:
        others = [rank for rank in words if rank not in early]
        texts = [_destroyed(rank, words) for rank in early]
        parts.append("; ".join(texts) + who_waits(others, words, True))
    elif absent:
        parts += absent
    elif failed:
        waiting = {rank for hang in found for rank in hang.waiting}
        waiting |= {rank for rank, each in words.items() if each.late or each.cause}
        rest = waiting - set(failed)
        over = all(words[rank].cause and not words[rank].late for rank in rest)
        parts.append(each_place(failed, found) + who_waits(rest, words, over))
    elif not parts and together:
        parts = [sentence] if (sentence := deadlock(found, words)) else []
        parts = parts or [sentence for hang in found for sentence in _absence(hang, words)]
        parts = parts or [_stuck(hang, words) for hang in found] or messages(words)
    sentence = "; ".join(parts) or each_place(words, found)
    for rank, each in words.items():
        if each.handles and rank not in failed:
            sentence += f"; rank {rank} is handling {each.handles}"
    if not together:
        sentence += (
            f"; the ranks' store does not answer, so this is what {name_ranks([*words])} can see"
        )
    return sentence


def _named_apart(
    words: Mapping[int, RankStatus], silent: Sequence[Silent]
) -> tuple[dict[int, RankStatus], list[Silent]]:
    """The same with the ranks of a group in its name where groups of other ranks have that name
    too, as the rows of a mesh have."""
    seen = [*words.values(), *(each.seen for each in silent if each.seen)]
    members: dict[str, set[tuple[int, ...]]] = {}
    for log in [log for each in seen for log in each.logs]:
        members.setdefault(log.group, set()).add(log.members)

    def rename(log: Log) -> Log:
        alone = len(members[log.group]) == 1 or not log.group
        return log if alone else replace(log, group=f"{log.group} ({name_ranks(log.members)})")

    def told(words: RankStatus) -> RankStatus:
        return replace(words, logs=tuple(rename(log) for log in words.logs))

    apart = [replace(each, seen=told(each.seen)) if each.seen else each for each in silent]
    return {rank: told(each) for rank, each in words.items()}, apart


def is_notice(words: Mapping[int, RankStatus]) -> bool:
    """Whether all that is known is that nothing moves: no reason to end the job."""
    causes = [each for each in words.values() if each.cause]
    return bool(causes) and all(each.still for each in causes)


def _notice(silent: Sequence[Silent], words: Mapping[int, RankStatus]) -> str:
    cause = next(each.cause for each in words.values() if each.still)
    parts = [_silence(each, (), words) for each in silent]
    parts.append(each_place({rank: replace(each, cause="") for rank, each in words.items()}, ()))
    return f"{cause}: {'; '.join(parts)}; the job goes on"


def _blamed(silent: Sequence[Silent], together: bool, late: bool) -> list[Silent]:
    if together:
        return [each for each in silent if each.state != ALIVE or late]
    # Nobody can answer: those that are seen to be gone, else the rank where the store mostly lives.
    # Where that one has ended its store, all others end soon after.
    first = [each for each in silent if each.state in (ENDED, OVER)]
    gone = [each for each in silent if each.state in (DIED, STOPPED, LEFT)]
    return first or gone or [each for each in silent if each.rank == 0]


def _owed(rank: int, mine: RankStatus | None, words: Mapping[int, RankStatus]) -> str:
    """The first call that others have made and this rank, of the same group, has not, "" none."""
    started = {log.group: log.started for log in mine.logs} if mine else {}
    for group, logs in logs_by_group(words).items():
        if group not in started:  # it has called none there, or its last word came before
            continue
        number = started[group] + 1
        others = [log for each, log in logs.items() if each != rank and rank in log.members]
        if any(log.started >= number for log in others):
            return f"{call_number(number, others)} {group}".rstrip()
    return ""


def _early(words: Mapping[int, RankStatus], failed: Mapping[int, RankStatus]) -> list[int]:
    """The ranks that have ended their process groups by themselves while others wait or fail."""
    left = [rank for rank, each in words.items() if each.destroyed and not each.cause]
    owing = [rank for rank in left if _owed(rank, words[rank], words)]
    return owing or (left if failed else [])


def _absent(words: Mapping[int, RankStatus], failed: Mapping[int, RankStatus]) -> list[str]:
    """Sentences on the ranks whose part of a collective is missing, where others only show it."""
    owed: dict[tuple[str, str], list[int]] = {}
    for rank, each in words.items():
        if rank not in failed and (call := _owed(rank, each, failed)):
            owed.setdefault((call, each.place), []).append(rank)
    rest = set(words) - {rank for ranks in owed.values() for rank in ranks}
    texts = [_joined(ranks, call, place) for (call, place), ranks in owed.items()]
    return ["; ".join(texts) + who_waits(rest, words, True)] if texts else []


def _joined(ranks: Sequence[int], call: str, place: str) -> str:
    return (
        f"{name_ranks(ranks)} never joined {call}; "
        f"{'it is' if len(ranks) == 1 else 'they are'} in {place}"
    )


def _destroyed(rank: int, words: Mapping[int, RankStatus]) -> str:
    call = _owed(rank, words[rank], words)
    before = f" before {call}" if call else ""
    return (
        f"rank {rank} has called destroy_process_group{before}; it is in {words[rank].place}"
        f"{_last_call(words[rank])}"
    )


def _last_call(words: RankStatus) -> str:
    calls = [(log.calls[-1], log.group) for log in words.logs if log.calls]
    if not calls:
        return ""
    call, group = max(calls, key=lambda each: (not each[1], each[0].number))
    return f", after {f'{call} {group}'.rstrip()}{at_lines([call.place])}"


def _silence(silent: Silent, found: Sequence[Hang], words: Mapping[int, RankStatus]) -> str:
    """ "rank 1 (host, pid 7) is stopped (SIGSTOP), last seen in f (x.py:3), before #4 …"."""
    text = f"{silent.name} {silent.state}"
    if silent.seen is None:
        return text
    call = _owed(silent.rank, silent.seen, words) if silent.state == LEFT else ""
    if call and (last := _last_call(silent.seen)):
        return f"{text} before {call}{last}"
    text += f", last seen in {silent.seen.place}"
    if call:
        return f"{text}, before {call}"
    started = {log.group: log.started for log in silent.seen.logs}
    for hang in found:
        if hang.group in started and hang.exact:
            return f"{text}, {'in' if started[hang.group] >= hang.call.number else 'before'} {hang}"
    return text


def _absence(hang: Hang, words: Mapping[int, RankStatus]) -> list[str]:
    """ "rank 1 never joined #4 …; it is in f (x.py:3); ranks 0, 2, 3 wait", if any is absent."""
    places: dict[str, list[int]] = {}
    for rank in hang.absent:
        places.setdefault(where_else(words[rank], hang.group), []).append(rank)
    told = [_joined(ranks, str(hang), at) for at, ranks in places.items()]
    return ["; ".join(told) + who_waits(hang.waiting, words)] if told else []


def _stuck(hang: Hang, words: Mapping[int, RankStatus]) -> str:
    joined = "alone" if len(hang.waiting) == 1 else "all"
    verb = "is" if len(hang.waiting) == 1 else "are"
    return (
        f"{name_ranks(hang.waiting)} {verb} {joined} in {hang}, which does not end: the backend or "
        f"the network does not carry it{in_phase(hang.waiting, words)}"
    )
