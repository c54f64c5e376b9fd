"""Status of the ranks, and why they wait forever, in one sentence from all of them. No torch.

A rank that answers reports the collectives that it has called. For a silent rank there is only its
last heartbeat, with their numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ddpbench.records.wording import spans

DIED, STOPPED, ALIVE = "has died", "is stopped (SIGSTOP)", "is alive but did not answer"
LEFT = "has left"  # its script has ended
ENDED = "has ended its process group or died"  # rank 0, if it has closed the store

# Ranks may call these with different sizes.
UNEVEN = ("all_to_all", "alltoall")
# Errors with which a backend reacts to another rank that has ended or does not come.
SYMPTOM = re.compile(
    r"(closed|reset) by peer|broken pipe|remote process|socket closed|connection (closed|lost)"
    r"|timed out waiting \d+ ?ms for|timeout caused pair closure|collective operation timeout"
    r"|on rank \d+ has not ended within",
    re.IGNORECASE,
)
BY_SIGNAL = "ended by "  # the cause of a rank that a signal asked to end begins with this


@dataclass(frozen=True)
class Call:
    """A collective of a group.

    number: counted from 1 in its group; what: "float32[1024]"; place: the line that called it,
    "f (data.py:22)". The last two are "" if unknown.
    """

    number: int
    name: str
    what: str = ""
    place: str = ""

    def __str__(self) -> str:
        return f"#{self.number} {self.text}"

    @property
    def text(self) -> str:
        """Without its number: "all_reduce float32[1024]"."""
        return f"{self.name} {self.what}".rstrip()


@dataclass(frozen=True)
class Log:
    """One rank's record of one group.

    group: a phrase, "of group 3", "" for the default group; members: global ranks; started,
    finished: numbers of the last collectives that the rank called, and that ended (in a heartbeat,
    a lower bound); calls: the latest, in order, () in a heartbeat; moves: a number that changes
    with the requests to the group, -1 if unknown.
    """

    group: str
    members: tuple[int, ...]
    started: int
    finished: int
    calls: tuple[Call, ...] = ()
    moves: int = -1

    @property
    def is_open(self) -> bool:
        """Return whether a collective that the rank called has not ended."""
        return self.started > self.finished


@dataclass(frozen=True)
class RankStatus:
    """The state that a rank reports.

    place: the innermost line of the program's own code in the main thread, "f (data.py:22)";
    inside: the function of torch.distributed that this line called, "": none; phase: the step of a
    ddpbench command; cause: why this rank raises the alarm, "": it does not; late: it has waited
    too long; stack: of the main thread.
    """

    place: str
    inside: str = ""
    logs: tuple[Log, ...] = ()
    phase: str = ""
    cause: str = ""
    late: bool = False
    stack: str = ""


@dataclass(frozen=True)
class SilentRank:
    """A rank that did not answer.

    name: "rank 3 (node2, pid 17)"; state: a constant of this module, or another phrase with a verb;
    seen: its last heartbeat, if there was one.
    """

    rank: int
    name: str
    state: str
    seen: RankStatus | None = None


@dataclass(frozen=True)
class Hang:
    """A collective that does not end: the ranks in it, and those that have not called it."""

    group: str
    call: Call
    waiting: tuple[int, ...]
    absent: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.call} {self.group}".rstrip()


Statuses = Mapping[int, RankStatus]


def explain_hang(
    silent: Sequence[SilentRank], statuses: Statuses, store_answers: bool = True
) -> str:
    """Return which rank causes the hang, where it is, and which ranks wait, in one sentence.

    statuses: of every rank that answered, at least one; store_answers: whether their store still
    answers. A silent rank that is alive is a cause only after a deadline, when it should have
    answered.
    """
    hangs = find_hangs(statuses)
    errors = {rank: status for rank, status in statuses.items() if status.cause and not status.late}
    own = {rank: status for rank, status in errors.items() if not SYMPTOM.search(status.cause)}
    failed = own or errors
    # The last heartbeat of a rank that has left may show that it called other things.
    left = {rank.rank: rank.seen for rank in silent if rank.seen}
    parts = describe_mismatches({**left, **statuses})
    explained = bool(parts or own)
    if causes := _find_silent_causes(silent, statuses, explained, store_answers):
        texts = [_describe_silent(rank, hangs, statuses) for rank in causes]
        parts.append("; ".join(texts) + _format_waiting(statuses, statuses))
    elif missing := {} if explained else _find_missing(failed, statuses):
        parts.append(_describe_absent(missing, statuses.keys() - missing, statuses))
    elif failed:
        parts.append(_describe_failed(failed, hangs, statuses))
    if not parts and store_answers:
        for hang in hangs:
            owed = dict.fromkeys(hang.absent, str(hang))
            if owed:
                parts.append(_describe_absent(owed, hang.waiting, statuses, hang.group))
        parts = parts or [_describe_stuck(hang, statuses) for hang in hangs]
    sentence = "; ".join(parts) or format_places(statuses, hangs)
    if not store_answers:
        viewers = format_ranks([*statuses])
        sentence += f"; the ranks' store does not answer, so this is what {viewers} can see"
    return sentence


def is_interrupted(statuses: Statuses) -> bool:
    """Return whether no cause is a missed deadline or an error: only signals, and symptoms."""
    causes = [status.cause for status in statuses.values() if status.cause]
    return all(cause.startswith(BY_SIGNAL) or SYMPTOM.search(cause) for cause in causes)


# --- silent ranks, and ranks that did not take part


def _find_silent_causes(
    silent: Sequence[SilentRank], statuses: Statuses, explained: bool, store_answers: bool
) -> list[SilentRank]:
    """Return the silent ranks that cause the hang.

    explained: whether a mismatch or an error of a rank's own is a cause already.
    """
    if store_answers:
        late = any(status.late for status in statuses.values())
        causes = [rank for rank in silent if rank.state != ALIVE or late]
    else:
        # No rank can answer: name the ranks that are visibly gone, else rank 0, which usually has
        # the store. If rank 0 has ended the store, all other ranks end soon after.
        gone = [rank for rank in silent if rank.state in (DIED, STOPPED, LEFT, ENDED)]
        causes = [rank for rank in gone if rank.state == ENDED] or gone
        causes = causes or [rank for rank in silent if rank.rank == 0]
    owing = [r.rank for r in causes if _find_owed_call(r.rank, r.seen, statuses)]
    return [r for r in causes if r.state != LEFT or r.rank in owing or not (explained or owing)]


def _find_owed_call(rank: int, status: RankStatus | None, statuses: Statuses) -> str:
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


def _describe_silent(rank: SilentRank, hangs: Sequence[Hang], statuses: Statuses) -> str:
    """ "rank 1 (host, pid 7) is stopped (SIGSTOP), last seen in f (x.py:3), before #4 …"."""
    text, seen = f"{rank.name} {rank.state}", rank.seen
    if seen is None:
        return text
    call = _find_owed_call(rank.rank, seen, statuses) if rank.state == LEFT else ""
    made = [(log.calls[-1], log.group) for log in seen.logs if log.calls]
    if call and made:
        last, group = max(made, key=lambda pair: (not pair[1], pair[0].number))
        return (
            f"{text} before {call}, after {f'{last} {group}'.rstrip()}{_format_lines([last.place])}"
        )
    text += f", last seen in {seen.place}"
    started = {log.group: log.started for log in seen.logs}
    for hang in hangs:
        if hang.group in started:
            return f"{text}, {'in' if started[hang.group] >= hang.call.number else 'before'} {hang}"
    return text


def _find_missing(failed: Statuses, statuses: Statuses) -> dict[int, str]:
    """Return the calls that living ranks have not made and in which others failed, by rank."""
    owed = {rank: _find_owed_call(rank, status, failed) for rank, status in statuses.items()}
    return {rank: call for rank, call in owed.items() if call and rank not in failed}


def _describe_failed(failed: Statuses, hangs: Sequence[Hang], statuses: Statuses) -> str:
    waiting = {rank for hang in hangs for rank in hang.waiting}
    waiting |= {rank for rank, status in statuses.items() if status.cause}
    return format_places(failed, hangs) + _format_waiting(waiting - set(failed), statuses)


def _describe_absent(
    owed: Mapping[int, str], waiting: Iterable[int], statuses: Statuses, group: str = "-"
) -> str:
    """Return "rank 1 never joined #4 …; it is in f (x.py:3); ranks 0, 2, 3 wait".

    owed: the call by the rank that has not made it; group: that of the call.
    """
    places: dict[tuple[str, str], list[int]] = {}
    for rank, call in owed.items():
        places.setdefault((call, _format_place(statuses[rank], group)), []).append(rank)
    texts = []
    for (call, place), ranks in places.items():
        verb = "it is" if len(ranks) == 1 else "they are"
        texts.append(f"{format_ranks(ranks)} never joined {call}; {verb} in {place}")
    return "; ".join(texts) + _format_waiting(waiting, statuses)


def _describe_stuck(hang: Hang, statuses: Statuses) -> str:
    return (
        f"{format_ranks(hang.waiting)} joined {hang}, which does not end: the backend or the "
        f"network does not complete it{_format_phase(hang.waiting, statuses)}"
    )


# --- the first collective in which ranks called different things


def describe_mismatches(statuses: Statuses) -> list[str]:
    """Return one sentence for each group in which ranks called different collectives."""
    sentences = []
    for group, logs in group_logs(statuses).items():
        calls: dict[int, dict[int, Call]] = {}  # number → rank → call
        for rank, log in logs.items():
            for call in log.calls:
                calls.setdefault(call.number, {})[rank] = call
        for number, by_rank in sorted(calls.items()):
            kinds = _group_equal_calls(by_rank)
            if len(kinds) > 1:
                sentences.append(_describe_mismatch(number, group, kinds, statuses))
                break
    return sentences


def _group_equal_calls(by_rank: Mapping[int, Call]) -> list[dict[int, Call]]:
    """Return the calls that can be of one collective, by rank; the most frequent first."""
    calls = by_rank.values()
    of_any_size = {call.name for call in calls if not call.what or call.name.startswith(UNEVEN)}
    kinds: dict[str, dict[int, Call]] = {}
    for rank, call in sorted(by_rank.items()):
        kind = call.name if call.name in of_any_size else call.text
        kinds.setdefault(kind, {})[rank] = call
    return sorted(kinds.values(), key=len, reverse=True)


def _describe_mismatch(
    number: int, group: str, kinds: list[dict[int, Call]], statuses: Statuses
) -> str:
    def describe(kind: Mapping[int, Call], prefix: str = "", suffix: str = "") -> str:
        verb = "calls" if len(kind) == 1 else "call"
        text = f"{prefix}{next(iter(kind.values())).text} {suffix}".rstrip()
        lines = [call.place or find_wait(rank) for rank, call in kind.items()]
        return f"{format_ranks([*kind])} {verb} {text}{_format_lines(lines)}"

    def find_wait(rank: int) -> str:
        status = statuses[rank]
        waits = any(log.group == group and log.finished + 1 == number for log in status.logs)
        return status.place if waits and status.inside else ""

    usual, first, *others = kinds
    parts = [f"{describe(first, f'#{number} ', group)} where {describe(usual)}"]
    return "; ".join([*parts, *map(describe, others)])


# --- parts of sentences


def format_places(statuses: Statuses, hangs: Sequence[Hang]) -> str:
    """Return the causes and places of all ranks, equal ones together; first those that do not wait
    in torch.distributed."""
    texts: dict[str, list[int]] = {}
    for rank, status in sorted(statuses.items(), key=lambda pair: (bool(pair[1].inside), pair[0])):
        if status.cause:
            text = f"{status.cause}, at {status.place}"
            text += f", in {status.inside}" if status.inside else ""
        else:
            text = f"in {_format_place(status, '-')}"
        before = [hang for hang in hangs if rank in hang.absent]
        text += f", before {before[0]}" if before else ""
        text += f" (in {status.phase})" if status.phase else ""
        texts.setdefault(text, []).append(rank)
    return "; ".join(f"{format_ranks(ranks)}: {text}" for text, ranks in texts.items())


def format_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 1" or "ranks 0, 2, 3"; more than six as "ranks 0–6, 8"."""
    if len(ranks) <= 6:
        return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"
    return f"ranks {spans(ranks).replace('-', '–')}"


def _format_place(status: RankStatus, group: str) -> str:
    """Return the place of a rank that is not in this group's collective."""
    for log in status.logs:
        if log.is_open and log.group != group:
            call = f"{find_call(log.finished + 1, [log])} {log.group}".rstrip()
            return f"{call}, called from {status.place}"
    return f"{status.inside}, called from {status.place}" if status.inside else status.place


def _format_lines(lines: Iterable[str]) -> str:
    """Return " at f (x.py:3)"; of several lines only the first."""
    known = sorted({line for line in lines if line})
    elsewhere = " and elsewhere" if len(known) > 1 else ""
    return f" at {known[0]}{elsewhere}" if known else ""


def _format_waiting(ranks: Iterable[int], statuses: Statuses) -> str:
    """Return "; ranks 0, 2 wait"."""
    waiting = sorted(ranks)
    if not waiting:
        return ""
    verb = "waits" if len(waiting) == 1 else "wait"
    return f"; {format_ranks(waiting)} {verb}{_format_phase(waiting, statuses)}"


def _format_phase(ranks: Sequence[int], statuses: Statuses) -> str:
    """Return " in PHASE", the step of a command in which the first of these ranks is."""
    phase = statuses[min(ranks)].phase
    return f" in {phase}" if phase else ""


# --- collectives that do not end


def find_hangs(statuses: Statuses) -> list[Hang]:
    """Return each group's first collective that some ranks have called and that has not ended."""
    hangs = []
    for group, logs in group_logs(statuses).items():
        waiting = {rank: log.finished + 1 for rank, log in logs.items() if log.is_open}
        if not waiting:
            continue
        number = min(waiting.values())
        members = {rank for log in logs.values() for rank in log.members} & set(statuses)
        absent = [rank for rank in members if rank not in logs or logs[rank].started < number]
        call = find_call(number, [logs[rank] for rank in waiting])
        hangs.append(Hang(group, call, tuple(sorted(waiting)), tuple(sorted(absent))))
    return hangs


def group_logs(statuses: Statuses) -> dict[str, dict[int, Log]]:
    """Return the logs by group and rank."""
    groups: dict[str, dict[int, Log]] = {}
    for rank, status in sorted(statuses.items()):
        for log in status.logs:
            groups.setdefault(log.group, {})[rank] = log
    return groups


def find_call(number: int, logs: Iterable[Log]) -> Call:
    """Return the call with this number, with the details that the logs contain."""
    calls = [call for log in logs for call in log.calls if call.number == number]
    return calls[0] if calls else Call(number, "collective")
