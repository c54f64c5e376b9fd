"""Why ranks wait for ever: one verdict for all, from the last words of each. No torch.

A rank that answers tells which collectives it has called; of one that cannot there is its last
heartbeat, which has numbers only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ddpbench.analysis.setup import spans

DIED, STOPPED, ALIVE = "has died", "is stopped (SIGSTOP)", "is alive but did not answer"
LEFT = "has left"  # its script has ended
# Of rank 0, where its store has gone: it has destroyed its process group, or its process is over.
ENDED, OVER = "has ended its process group", "has ended or died"

# What ranks may rightly call with different sizes.
UNEVEN = ("all_to_all", "alltoall")

# What gloo, NCCL and MPI say where another rank has gone: that one is the cause.
LOST = re.compile(
    r"(closed|reset) by peer|broken pipe|remote process|socket closed|connection (closed|lost)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Call:
    """A collective of a group, counted from 1 there; what: "float32[1024]"; place: the line that
    has called it, "f (data.py:22)"; both "" if not known."""

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

    def agrees(self, other: Call) -> bool:
        """Whether two ranks can have called the same collective."""
        if self.name != other.name:
            return False
        uneven = self.name.startswith(UNEVEN) or not (self.what and other.what)
        return uneven or self.what == other.what


@dataclass(frozen=True)
class Log:
    """What one rank has recorded of one group.

    group: as a phrase, "" the default one, "of group 3"; members: its ranks, as the default group
    counts them; started, finished: numbers of the last collectives that it has called, that have
    ended; calls: the latest, in order, () in a heartbeat; exact: heartbeats count alike in all
    ranks; moves: how often the group was asked for anything, sends and receives too, -1: not known.
    """

    group: str
    members: tuple[int, ...]
    started: int
    finished: int
    calls: tuple[Call, ...] = ()
    exact: bool = True
    moves: int = -1


@dataclass(frozen=True)
class Words:
    """What a rank says of itself.

    place: the innermost line of the program's own code in its main thread, "f (data.py:22)";
    inside: what of torch.distributed that line has called, "" nothing; source, destination: the
    rank of which it waits to receive, to which it waits to send, -1 none; phase: what ddpbench does
    there; cause: why this rank speaks first, where it does; late: because it has waited too long;
    still: because nothing has moved for long, which may be right; left: its script has ended;
    destroyed: it has ended its process groups; handles: the error that its main thread handles, as
    in a `finally`, and where that was raised; stack: of its main thread.
    """

    place: str
    inside: str = ""
    logs: tuple[Log, ...] = ()
    phase: str = ""
    cause: str = ""
    late: bool = False
    left: bool = False
    stack: str = ""
    source: int = -1
    destination: int = -1
    still: bool = False
    destroyed: bool = False
    handles: str = ""

    @property
    def waits_in(self) -> str:
        """ "all_reduce", "recv from rank 1", "" where it waits in nothing of torch.distributed."""
        if self.source >= 0:
            return f"recv from rank {self.source}"
        return f"send to rank {self.destination}" if self.destination >= 0 else self.inside


@dataclass(frozen=True)
class Silent:
    """A rank that gave no answer: its name "rank 3 (node2, pid 17)", what is seen of it, and its
    last heartbeat, if there was one."""

    rank: int
    name: str
    state: str
    seen: Words | None = None


@dataclass(frozen=True)
class Hang:
    """A collective of a group that does not end: who waits in it, who has not called it."""

    group: str
    call: Call
    waiting: tuple[int, ...]
    absent: tuple[int, ...]
    exact: bool = True

    def __str__(self) -> str:
        return f"{self.call} {self.group}".rstrip()


def verdict(silent: Sequence[Silent], words: Mapping[int, Words], together: bool = True) -> str:
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
    failed = {r: each for r, each in failed.items() if not LOST.search(each.cause)} or failed
    # Of those that have left, the last word may still tell that they have called other things.
    seen = {**{s.rank: s.seen for s in silent if s.seen}, **words}
    parts = mismatches(seen)
    excuse = parts or any(not LOST.search(each.cause) for each in failed.values())
    owing = {s.rank for s in blamed if _owed(s.rank, s.seen, words)}
    blamed = [s for s in blamed if s.state != LEFT or s.rank in owing or not (owing or excuse)]
    early = [] if blamed or excuse else _early(words, failed)
    if blamed:
        texts = [_silence(each, found, words) for each in blamed]
        waited = all(each.state in (LEFT, ENDED, OVER) for each in blamed)
        parts.append("; ".join(texts) + _wait(words, words, waited))
    elif early:
        others = [rank for rank in words if rank not in early]
        texts = [_destroyed(rank, words) for rank in early]
        parts.append("; ".join(texts) + _wait(others, words, True))
    elif failed:
        waiting = {rank for hang in found for rank in hang.waiting}
        waiting |= {rank for rank, each in words.items() if each.late or each.cause}
        rest = waiting - set(failed)
        over = all(words[rank].cause and not words[rank].late for rank in rest)
        parts.append(_alike(failed, found) + _wait(rest, words, over))
    elif not parts and together:
        parts = [sentence] if (sentence := _deadlock(found, words)) else []
        parts = parts or [sentence for hang in found for sentence in _absence(hang, words)]
        parts = parts or [_stuck(hang, words) for hang in found] or _messages(words)
    sentence = "; ".join(parts) or _alike(words, found)
    for rank, each in words.items():
        if each.handles and rank not in failed:
            sentence += f"; rank {rank} is handling {each.handles}"
    if not together:
        sentence += (
            f"; the ranks' store does not answer, so this is what {_ranks([*words])} can see"
        )
    return sentence


def _named_apart(
    words: Mapping[int, Words], silent: Sequence[Silent]
) -> tuple[dict[int, Words], list[Silent]]:
    """The same with the ranks of a group in its name where groups of other ranks have that name
    too, as the rows of a mesh have."""
    seen = [*words.values(), *(each.seen for each in silent if each.seen)]
    members: dict[str, set[tuple[int, ...]]] = {}
    for log in [log for each in seen for log in each.logs]:
        members.setdefault(log.group, set()).add(log.members)

    def rename(log: Log) -> Log:
        alone = len(members[log.group]) == 1 or not log.group
        return log if alone else replace(log, group=f"{log.group} ({_ranks(log.members)})")

    def told(words: Words) -> Words:
        return replace(words, logs=tuple(rename(log) for log in words.logs))

    apart = [replace(each, seen=told(each.seen)) if each.seen else each for each in silent]
    return {rank: told(each) for rank, each in words.items()}, apart


def is_notice(words: Mapping[int, Words]) -> bool:
    """Whether all that is known is that nothing moves: no reason to end the job."""
    causes = [each for each in words.values() if each.cause]
    return bool(causes) and all(each.still for each in causes)


def _notice(silent: Sequence[Silent], words: Mapping[int, Words]) -> str:
    cause = next(each.cause for each in words.values() if each.still)
    parts = [_silence(each, (), words) for each in silent]
    parts.append(_alike({rank: replace(each, cause="") for rank, each in words.items()}, ()))
    return f"{cause}: {'; '.join(parts)}; the job goes on"


def _blamed(silent: Sequence[Silent], together: bool, late: bool) -> list[Silent]:
    if together:
        return [each for each in silent if each.state != ALIVE or late]
    # Nobody can answer: those that are seen to be gone, else the rank where the store mostly lives.
    # Where that one has ended its store, all others end soon after.
    first = [each for each in silent if each.state in (ENDED, OVER)]
    gone = [each for each in silent if each.state in (DIED, STOPPED, LEFT)]
    return first or gone or [each for each in silent if each.rank == 0]


def _owed(rank: int, mine: Words | None, words: Mapping[int, Words]) -> str:
    """The first call that others have made and this rank, of the same group, has not, "" none."""
    started = {log.group: log.started for log in mine.logs} if mine else {}
    for group, logs in _by_group(words).items():
        if group not in started:  # it has called none there, or its last word came before
            continue
        number = started[group] + 1
        others = [log for each, log in logs.items() if each != rank and rank in log.members]
        if any(log.started >= number for log in others):
            return f"{_named(number, others)} {group}".rstrip()
    return ""


def _early(words: Mapping[int, Words], failed: Mapping[int, Words]) -> list[int]:
    """The ranks that have ended their process groups by themselves while others wait or fail."""
    left = [rank for rank, each in words.items() if each.destroyed and not each.cause]
    owing = [rank for rank in left if _owed(rank, words[rank], words)]
    return owing or (left if failed else [])


def _destroyed(rank: int, words: Mapping[int, Words]) -> str:
    call = _owed(rank, words[rank], words)
    before = f" before {call}" if call else ""
    return (
        f"rank {rank} has called destroy_process_group{before}; it is in {words[rank].place}"
        f"{_last_call(words[rank])}"
    )


def _last_call(words: Words) -> str:
    calls = [(log.calls[-1], log.group) for log in words.logs if log.calls]
    if not calls:
        return ""
    call, group = max(calls, key=lambda each: (not each[1], each[0].number))
    return f", after {f'{call} {group}'.rstrip()}{_at([call.place])}"


def hangs(words: Mapping[int, Words]) -> list[Hang]:
    """Each group's first collective that some have called and none has seen to its end."""
    found = []
    for group, logs in _by_group(words).items():
        waiting = {
            rank: log.finished + 1 for rank, log in logs.items() if log.started > log.finished
        }
        if not waiting:
            continue
        number = min(waiting.values())
        members = {rank for log in logs.values() for rank in log.members} & set(words)
        absent = [rank for rank in members if rank not in logs or logs[rank].started < number]
        call = _named(number, [logs[rank] for rank in waiting])
        exact = all(log.exact for log in logs.values())
        found.append(Hang(group, call, tuple(sorted(waiting)), tuple(sorted(absent)), exact))
    return found


def mismatches(words: Mapping[int, Words]) -> list[str]:
    """Each group's first collective in which ranks called different things, one sentence each."""
    sentences = []
    for group, logs in _by_group(words).items():
        calls = {rank: {call.number: call for call in log.calls} for rank, log in logs.items()}
        for number in sorted({number for each in calls.values() for number in each}):
            here = {rank: each[number] for rank, each in calls.items() if number in each}
            kinds = _kinds(here)
            if len(kinds) > 1:
                lines = {rank: _line(number, here[rank], words[rank], group) for rank in here}
                sentences.append(_mismatch(number, group, kinds, calls, lines))
                break
    return sentences


def _by_group(words: Mapping[int, Words]) -> dict[str, dict[int, Log]]:
    groups: dict[str, dict[int, Log]] = {}
    for rank, each in sorted(words.items()):
        for log in each.logs:
            groups.setdefault(log.group, {})[rank] = log
    return groups


def _named(number: int, logs: Iterable[Log]) -> Call:
    calls = [call for log in logs for call in log.calls if call.number == number]
    return calls[0] if calls else Call(number, "collective")


def _kinds(here: Mapping[int, Call]) -> list[tuple[Call, list[int]]]:
    """The different calls and the ranks of each, the one of most ranks first."""
    kinds: list[tuple[Call, list[int]]] = []
    for rank, call in sorted(here.items()):
        alike = next((ranks for kind, ranks in kinds if kind.agrees(call)), None)
        if alike is None:
            kinds.append((call, [rank]))
        else:
            alike.append(rank)
    return sorted(kinds, key=lambda kind: -len(kind[1]))


def _line(number: int, call: Call, words: Words, group: str) -> str:
    """The line that has made a call: as recorded, else that of a rank which waits in it."""
    waits = any(log.group == group and log.finished + 1 == number for log in words.logs)
    return call.place or (words.place if waits and words.inside else "")


def _at(lines: Iterable[str]) -> str:
    """ " at f (x.py:3)", of more than two lines the first."""
    known = sorted({line for line in lines if line})
    if not known:
        return ""
    return f" at {' and '.join(known) if len(known) < 3 else f'{known[0]} and elsewhere'}"


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
        text = f"{_ranks(ranks)} {verb} {f'{call} {group}'.rstrip() if first else call.text}"
        text += _at(lines[rank] for rank in ranks)
        if first:
            text += f" where {_ranks(most)} {'calls' if len(most) == 1 else 'call'} {usual.text}"
            text += _at(lines[rank] for rank in most)
        if how := _shift(calls[ranks[0]], calls[most[0]], number):
            text += f": {_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} {how} a collective"
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


def _silence(silent: Silent, found: Sequence[Hang], words: Mapping[int, Words]) -> str:
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


# --- ranks that wait for each other ---------------------------------------------------------------


@dataclass(frozen=True)
class Wait:
    """What a rank waits in, and for which others; message: a receive or a send, no collective."""

    what: str
    ranks: tuple[int, ...]
    message: bool


def _waiting(found: Sequence[Hang], words: Mapping[int, Words]) -> dict[int, Wait]:
    """Of each rank whose main thread waits for others that are known."""
    waits: dict[int, Wait] = {}
    for rank, each in words.items():
        if (other := max(each.source, each.destination)) >= 0:
            waits[rank] = Wait(each.waits_in.partition(" ")[0], (other,), True)
            continue
        mine = [hang for hang in found if rank in hang.waiting and hang.absent and each.inside]
        if len(mine) > 1:  # others may have been called with async_op: where is it now?
            calls = {(log.group, c.number): c.place for log in each.logs for c in log.calls}
            mine = [h for h in mine if calls.get((h.group, h.call.number)) == each.place]
        if mine:
            waits[rank] = Wait(str(mine[0]), mine[0].absent, False)
    return waits


def _deadlock(found: Sequence[Hang], words: Mapping[int, Words]) -> str:
    """Ranks that wait for each other in a circle, "" none."""
    waits = _waiting(found, words)
    circle = next((c for rank in sorted(waits) if (c := _circle(rank, waits))), [])
    if not circle:
        return ""
    kinds = {waits[rank].what for rank in circle}
    others = _wait([rank for rank in words if rank not in circle and rank in waits], words)
    at = _at(words[rank].place for rank in circle)
    if all(waits[rank].message for rank in circle) and len(kinds) == 1:
        word = "to" if kinds == {"send"} else "from"
        pairs = ", ".join(f"{rank} {word} {waits[rank].ranks[0]}" for rank in sorted(circle))
        told = f"{_ranks(sorted(circle))} wait in {kinds.pop()}{at} in a ring: {pairs}"
    else:
        parts = []
        for rank, following in zip(circle, [*circle[1:], circle[0]], strict=True):
            where = f"{waits[rank].what}{_at([words[rank].place])}"
            parts.append(f"rank {rank} waits in {where} for rank {following}")
        told = f"{'; '.join(parts)}: a deadlock"
    return told + others


def _circle(start: int, waits: Mapping[int, Wait]) -> list[int]:
    """The shortest way from a rank over those for which it waits back to itself, [] none."""
    paths, seen = [[start]], {start}
    for path in paths:
        for rank in waits[path[-1]].ranks:
            if rank == start:
                return path
            if rank in waits and rank not in seen:
                seen.add(rank)
                paths.append([*path, rank])
    return []


def _messages(words: Mapping[int, Words]) -> list[str]:
    """Where those are for whose messages others wait, then who waits."""
    waits = _waiting((), words)
    awaited = {rank for wait in waits.values() for rank in wait.ranks}
    first = {rank: words[rank] for rank in awaited - set(waits) if rank in words}
    alike: dict[str, list[int]] = {}
    for rank in waits:
        alike.setdefault(f"{words[rank].waits_in}{_at([words[rank].place])}", []).append(rank)
    told = [f"{_ranks(r)} wait{'s' if len(r) == 1 else ''} in {what}" for what, r in alike.items()]
    return [_alike({r: replace(w, cause="") for r, w in first.items()}, ()), *told] if first else []


# --- sentences ------------------------------------------------------------------------------------


def _absence(hang: Hang, words: Mapping[int, Words]) -> list[str]:
    """ "rank 1 never joined #4 …; it is in f (x.py:3); ranks 0, 2, 3 wait", if any is absent."""
    places: dict[str, list[int]] = {}
    for rank in hang.absent:
        places.setdefault(_where(words[rank], hang.group), []).append(rank)
    told = [
        f"{_ranks(ranks)} never joined {hang}; {'it is' if len(ranks) == 1 else 'they are'} in {at}"
        for at, ranks in places.items()
    ]
    return ["; ".join(told) + _wait(hang.waiting, words)] if told else []


def _stuck(hang: Hang, words: Mapping[int, Words]) -> str:
    joined = "alone" if len(hang.waiting) == 1 else "all"
    verb = "is" if len(hang.waiting) == 1 else "are"
    return (
        f"{_ranks(hang.waiting)} {verb} {joined} in {hang}, which does not end: the backend or the "
        f"network does not carry it{_phase(hang.waiting, words)}"
    )


def _where(words: Words, group: str) -> str:
    """The place of a rank that is not in this group's collective."""
    for log in words.logs:
        if log.started > log.finished and log.group != group:
            call = f"{_named(log.finished + 1, [log])} {log.group}".rstrip()
            return f"{call}, called from {words.place}"
    return f"{words.waits_in}, called from {words.place}" if words.waits_in else words.place


def _alike(words: Mapping[int, Words], found: Sequence[Hang]) -> str:
    """What each says, the same ones together."""
    alike: dict[str, list[int]] = {}
    for rank, each in sorted(words.items()):
        text = f"{each.cause}, at {each.place}" if each.cause else f"in {_where(each, '-')}"
        text += f", in {each.waits_in}" if each.cause and each.waits_in else ""
        before = [hang for hang in found if rank in hang.absent]
        text += f", before {before[0]}" if before else ""
        text += f" (in {each.phase})" if each.phase else ""
        alike.setdefault(text, []).append(rank)
    return "; ".join(f"{_ranks(ranks)}: {text}" for text, ranks in alike.items())


def _wait(ranks: Iterable[int], words: Mapping[int, Words], left: bool = False) -> str:
    """left: they have waited for one that has left, and may have failed by now."""
    waiting = sorted(ranks)
    if not waiting:
        return ""
    verb = "waited for it" if left else "waits" if len(waiting) == 1 else "wait"
    return f"; {_ranks(waiting)} {verb}{_phase(waiting, words)}"


def _phase(ranks: Sequence[int], words: Mapping[int, Words]) -> str:
    phase = words[min(ranks)].phase
    return f" in {phase}" if phase else ""


def _ranks(ranks: Sequence[int]) -> str:
    """ "rank 1", "ranks 0, 2, 3", of more than six "ranks 0–6, 8"."""
    if len(ranks) <= 6:
        return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"
    return f"ranks {spans(ranks).replace('-', '–')}"
