"""Explain why ranks wait forever, in one sentence from the statuses of all. No torch.

A rank that answers reports the collectives that it has called. For a silent rank there is only its
last heartbeat, with their numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ddpbench.hang.phrases import (
    format_lines,
    format_phase,
    format_place,
    format_places,
    format_ranks,
    format_waiting,
)
from ddpbench.hang.status import (
    ALIVE,
    DIED,
    ENDED,
    LEFT,
    OVER,
    STOPPED,
    Call,
    Hang,
    Log,
    RankStatus,
    SilentRank,
    find_call,
    find_hangs,
    group_logs,
)

Statuses = Mapping[int, RankStatus]
# Errors with which a backend reacts to another rank that has ended or does not come.
SYMPTOM = re.compile(
    r"(closed|reset) by peer|broken pipe|remote process|socket closed|connection (closed|lost)"
    r"|timed out waiting \d+ ?ms for|timeout caused pair closure|collective operation timeout"
    r"|on rank \d+ has not ended within",
    re.IGNORECASE,
)
BY_SIGNAL = "ended by "  # the cause of a rank that a signal asked to end begins with this


def explain_hang(
    silent: Sequence[SilentRank], statuses: Statuses, store_answers: bool = True
) -> str:
    """Return which rank causes the hang, where it is, and which ranks wait, in one sentence.

    statuses: of every rank that answered, at least one; store_answers: whether their store still
    answers. A silent rank that is alive is a cause only after a deadline, when it should have
    answered.
    """
    statuses, silent = _qualify_groups(statuses, silent)
    if is_notice(statuses):
        cause = next(status.cause for status in statuses.values() if status.still)
        parts = [_silence(rank, (), statuses) for rank in silent]
        parts.append(format_places({r: replace(s, cause="") for r, s in statuses.items()}, ()))
        return f"{cause}: {'; '.join(parts)}; the job goes on"
    case = _Case(silent, statuses, store_answers)
    parts = case.mismatches + (
        case.describe_silent() or case.describe_missing() or case.describe_failed()
    )
    if not parts and store_answers:
        sentence = _describe_deadlock(case.hangs, statuses)
        parts = [sentence] if sentence else [s for h in case.hangs for s in _absence(h, statuses)]
        parts = parts or [_stuck(h, statuses) for h in case.hangs if h.exact]
        parts = parts or _describe_messages(statuses)
    sentence = "; ".join(parts) or format_places(statuses, case.hangs)
    for rank, status in statuses.items():
        if status.handles and rank not in case.failed:
            sentence += f"; rank {rank} is handling {status.handles}"
    if not store_answers:
        viewers = format_ranks([*statuses])
        sentence += f"; the ranks' store does not answer, so this is what {viewers} can see"
    return sentence


def is_interrupted(statuses: Statuses) -> bool:
    """Return whether no cause is a missed deadline or an error: only signals, and symptoms."""
    causes = [status.cause for status in statuses.values() if status.cause]
    return all(cause.startswith(BY_SIGNAL) or SYMPTOM.search(cause) for cause in causes)


def is_notice(statuses: Statuses) -> bool:
    """Return whether ranks only do not move, which is not a reason to end the job."""
    causes = [status for status in statuses.values() if status.cause]
    return bool(causes) and all(status.still for status in causes)


@dataclass(frozen=True)
class _Case:
    """The evidence: silent ranks, statuses, and conclusions from both."""

    silent: Sequence[SilentRank]
    statuses: Statuses
    store_answers: bool

    @cached_property
    def hangs(self) -> list[Hang]:
        return find_hangs(self.statuses)

    @cached_property
    def mismatches(self) -> list[str]:
        # The last heartbeat of a rank that has left may show that it called other things.
        left = {rank.rank: rank.seen for rank in self.silent if rank.seen}
        return describe_mismatches({**left, **self.statuses})

    @cached_property
    def failed(self) -> dict[int, RankStatus]:
        """The ranks with errors, except errors that are only symptoms of other ranks' errors."""
        failed = {r: s for r, s in self.statuses.items() if s.cause and not s.late}
        return {r: s for r, s in failed.items() if not SYMPTOM.search(s.cause)} or failed

    @cached_property
    def explained(self) -> bool:
        """Whether a mismatch or an error of a rank's own is the cause."""
        own = (not SYMPTOM.search(status.cause) for status in self.failed.values())
        return bool(self.mismatches) or any(own)

    @cached_property
    def silent_causes(self) -> list[SilentRank]:
        causes = self._select_silent()
        owing = [r.rank for r in causes if _owed_call(r.rank, r.seen, self.statuses)]
        excused = bool(owing) or self.explained
        return [r for r in causes if r.state != LEFT or r.rank in owing or not excused]

    def _select_silent(self) -> list[SilentRank]:
        if self.store_answers:
            late = any(status.late for status in self.statuses.values())
            return [rank for rank in self.silent if rank.state != ALIVE or late]
        # No rank can answer: name the ranks that are visibly gone, else rank 0, which usually has
        # the store. If rank 0 has ended the store, all other ranks end soon after.
        ended = [rank for rank in self.silent if rank.state in (ENDED, OVER)]
        gone = [rank for rank in self.silent if rank.state in (DIED, STOPPED, LEFT)]
        return ended or gone or [rank for rank in self.silent if rank.rank == 0]

    def describe_silent(self) -> list[str]:
        """Return a sentence on the silent ranks that cause the hang, if there are any."""
        if not self.silent_causes:
            return []
        texts = [_silence(rank, self.hangs, self.statuses) for rank in self.silent_causes]
        ended = all(rank.state in (LEFT, ENDED, OVER) for rank in self.silent_causes)
        return ["; ".join(texts) + format_waiting(self.statuses, self.statuses, ended)]

    def describe_missing(self) -> list[str]:
        """Return a sentence on living ranks that did not take part and made others fail."""
        if self.explained:
            return []
        destroyed = [r for r, s in self.statuses.items() if s.destroyed and not s.cause]
        owing = [r for r in destroyed if _owed_call(r, self.statuses[r], self.statuses)]
        if missing := owing or (destroyed if self.failed else []):
            texts = [_destroyed(rank, self.statuses) for rank in missing]
        else:
            places: dict[tuple[str, str], list[int]] = {}
            for rank, status in self.statuses.items():
                call = _owed_call(rank, status, self.failed)
                if call and rank not in self.failed:
                    places.setdefault((call, status.place), []).append(rank)
            missing = [rank for ranks in places.values() for rank in ranks]
            texts = [_never_joined(ranks, *key) for key, ranks in places.items()]
        rest = [rank for rank in self.statuses if rank not in missing]
        return ["; ".join(texts) + format_waiting(rest, self.statuses, True)] if texts else []

    def describe_failed(self) -> list[str]:
        """Return a sentence on the ranks with errors, if there are any."""
        if not self.failed:
            return []
        waiting = {rank for hang in self.hangs for rank in hang.waiting}
        waiting |= {rank for rank, status in self.statuses.items() if status.late or status.cause}
        rest = [self.statuses[rank] for rank in waiting - set(self.failed)]
        ended = all(status.cause and not status.late for status in rest)
        text = format_places(self.failed, self.hangs)
        return [text + format_waiting(waiting - set(self.failed), self.statuses, ended)]


def _qualify_groups(
    statuses: Statuses, silent: Iterable[SilentRank]
) -> tuple[dict[int, RankStatus], list[SilentRank]]:
    """Add the ranks of a group to its name if another group has the same name, as the rows of a
    mesh do."""
    members: dict[str, set[tuple[int, ...]]] = {}
    for status in [*statuses.values(), *(rank.seen for rank in silent if rank.seen)]:
        for log in status.logs:
            members.setdefault(log.group, set()).add(log.members)

    def rename(log: Log) -> Log:
        alone = len(members[log.group]) == 1 or not log.group
        return log if alone else replace(log, group=f"{log.group} ({format_ranks(log.members)})")

    def qualify(status: RankStatus) -> RankStatus:
        return replace(status, logs=tuple(rename(log) for log in status.logs))

    ranks = [replace(rank, seen=qualify(rank.seen)) if rank.seen else rank for rank in silent]
    return {rank: qualify(status) for rank, status in statuses.items()}, ranks


def _owed_call(rank: int, status: RankStatus | None, statuses: Statuses) -> str:
    """Return the first call that other ranks of a group made and this rank did not; "": none."""
    started = {log.group: log.started for log in status.logs} if status else {}
    for group, logs in group_logs(statuses).items():
        if group not in started:  # it made no call there, or its last heartbeat is older
            continue
        number = started[group] + 1
        others = [log for r, log in logs.items() if r != rank and rank in log.members]
        if any(log.started >= number for log in others):
            return f"{find_call(number, others)} {group}".rstrip()
    return ""


def _destroyed(rank: int, statuses: Statuses) -> str:
    status = statuses[rank]
    call = _owed_call(rank, status, statuses)
    before = f" before {call}" if call else ""
    return (
        f"rank {rank} has called destroy_process_group{before}; it is in {status.place}"
        f"{_last_call(status)}"
    )


def _last_call(status: RankStatus) -> str:
    calls = [(log.calls[-1], log.group) for log in status.logs if log.calls]
    if not calls:
        return ""
    call, group = max(calls, key=lambda pair: (not pair[1], pair[0].number))
    return f", after {f'{call} {group}'.rstrip()}{format_lines([call.place])}"


def _silence(rank: SilentRank, hangs: Sequence[Hang], statuses: Statuses) -> str:
    """ "rank 1 (host, pid 7) is stopped (SIGSTOP), last seen in f (x.py:3), before #4 …"."""
    text = f"{rank.name} {rank.state}"
    if rank.seen is None:
        return text
    call = _owed_call(rank.rank, rank.seen, statuses) if rank.state == LEFT else ""
    if call and (last := _last_call(rank.seen)):
        return f"{text} before {call}{last}"
    text += f", last seen in {rank.seen.place}"
    if call:
        return f"{text}, before {call}"
    started = {log.group: log.started for log in rank.seen.logs}
    for hang in hangs:
        if hang.group in started and hang.exact:
            return f"{text}, {'in' if started[hang.group] >= hang.call.number else 'before'} {hang}"
    return text


def _absence(hang: Hang, statuses: Statuses) -> list[str]:
    """ "rank 1 never joined #4 …; it is in f (x.py:3); ranks 0, 2, 3 wait", if any is absent."""
    places: dict[str, list[int]] = {}
    for rank in hang.absent:
        places.setdefault(format_place(statuses[rank], hang.group), []).append(rank)
    texts = [_never_joined(ranks, str(hang), place) for place, ranks in places.items()]
    return ["; ".join(texts) + format_waiting(hang.waiting, statuses)] if texts else []


def _never_joined(ranks: Sequence[int], call: str, place: str) -> str:
    verb = "it is" if len(ranks) == 1 else "they are"
    return f"{format_ranks(ranks)} never joined {call}; {verb} in {place}"


def _stuck(hang: Hang, statuses: Statuses) -> str:
    verb, joined = ("is", "alone") if len(hang.waiting) == 1 else ("are", "all")
    return (
        f"{format_ranks(hang.waiting)} {verb} {joined} in {hang}, which does not end: the backend "
        f"or the network does not complete it{format_phase(hang.waiting, statuses)}"
    )


# --- ranks that wait for each other in a circle, and messages that do not come


@dataclass(frozen=True)
class _Wait:
    """The operation in which a rank waits, and the ranks it waits for; message: receive or send."""

    what: str
    ranks: tuple[int, ...]
    message: bool


def _find_waits(hangs: Sequence[Hang], statuses: Mapping[int, RankStatus]) -> dict[int, _Wait]:
    waits: dict[int, _Wait] = {}
    for rank, status in statuses.items():
        if (other := max(status.source, status.destination)) >= 0:
            waits[rank] = _Wait(status.waits_in.partition(" ")[0], (other,), True)
            continue
        own = [h for h in hangs if rank in h.waiting and h.absent and status.inside]
        if len(own) > 1:  # some may have been called with async_op: use the current one
            calls = {(log.group, c.number): c.place for log in status.logs for c in log.calls}
            own = [h for h in own if calls.get((h.group, h.call.number)) == status.place]
        if own:
            waits[rank] = _Wait(str(own[0]), own[0].absent, False)
    return waits


def _describe_deadlock(hangs: Sequence[Hang], statuses: Mapping[int, RankStatus]) -> str:
    """Return a sentence on ranks that wait for each other in a circle; "": none."""
    waits = _find_waits(hangs, statuses)
    circle = next((c for rank in sorted(waits) if (c := _circle(rank, waits))), [])
    if not circle:
        return ""
    kinds = {waits[rank].what for rank in circle}
    others = format_waiting([r for r in waits if r not in circle], statuses)
    at = format_lines(statuses[rank].place for rank in circle)
    if all(waits[rank].message for rank in circle) and len(kinds) == 1:
        word = "to" if kinds == {"send"} else "from"
        pairs = ", ".join(f"{rank} {word} {waits[rank].ranks[0]}" for rank in sorted(circle))
        sentence = f"{format_ranks(sorted(circle))} wait in {kinds.pop()}{at} in a ring: {pairs}"
    else:
        parts = []
        for rank, following in zip(circle, [*circle[1:], circle[0]], strict=True):
            where = f"{waits[rank].what}{format_lines([statuses[rank].place])}"
            parts.append(f"rank {rank} waits in {where} for rank {following}")
        sentence = f"{'; '.join(parts)}: a deadlock"
    return sentence + others


def _circle(start: int, waits: Mapping[int, _Wait]) -> list[int]:
    paths, seen = [[start]], {start}
    for path in paths:
        for rank in waits[path[-1]].ranks:
            if rank == start:
                return path
            if rank in waits and rank not in seen:
                seen.add(rank)
                paths.append([*path, rank])
    return []


def _describe_messages(statuses: Mapping[int, RankStatus]) -> list[str]:
    """Return where the ranks are that owe a message, then which ranks wait."""
    waits = _find_waits((), statuses)
    awaited = {rank for wait in waits.values() for rank in wait.ranks}
    first = {rank: statuses[rank] for rank in awaited - set(waits) if rank in statuses}
    alike: dict[str, list[int]] = {}
    for rank in waits:
        alike.setdefault(
            f"{statuses[rank].waits_in}{format_lines([statuses[rank].place])}", []
        ).append(rank)
    if not first:
        return []
    waiting = [
        f"{format_ranks(r)} wait{'s' if len(r) == 1 else ''} in {what}" for what, r in alike.items()
    ]
    return [format_places({r: replace(s, cause="") for r, s in first.items()}, ()), *waiting]


# --- the first collective in which ranks called different things


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
    """Return how a rank's calls from this number are shifted against those of the other ranks."""
    known = dict(most)
    if number + 1 not in known and number in known:  # they wait: use what followed last time
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
