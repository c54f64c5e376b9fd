"""Why ranks wait for ever: one verdict for all, from the last words of each. No torch.

A rank that answers tells which collectives it has called; of one that cannot there is its last
heartbeat, which has numbers only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ddpbench.analysis.setup import spans

DIED, STOPPED, ALIVE = "has died", "is stopped (SIGSTOP)", "is alive but did not answer"
LEFT = "has left"  # its script has ended

# What ranks may rightly call with different sizes.
UNEVEN = ("all_to_all", "alltoall")


@dataclass(frozen=True)
class Call:
    """A collective of a group, counted from 1 there; what: "float32[1024]", "" if not known."""

    number: int
    name: str
    what: str = ""

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
    inside: what of torch.distributed that line has called, "" nothing; phase: what ddpbench does
    there; cause: why this rank ends, where it does by itself; late: because of a deadline; left:
    its script has ended; stack: of its main thread.
    """

    place: str
    inside: str = ""
    logs: tuple[Log, ...] = ()
    phase: str = ""
    cause: str = ""
    late: bool = False
    left: bool = False
    stack: str = ""


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
    found = hangs(words)
    blamed = _blamed(silent, together, any(each.late for each in words.values()))
    failed = {rank: each for rank, each in words.items() if each.cause and not each.late}
    # Of those that have left, the last word may still tell that they have called other things.
    parts = mismatches({**{s.rank: s.seen for s in silent if s.seen}, **words})
    blamed = [s for s in blamed if s.state != LEFT or not (parts or failed) or _owes(s, words)]
    if blamed:
        parts.append("; ".join(_silence(each, found) for each in blamed) + _wait(words, words))
    elif failed:
        waiting = {rank for hang in found for rank in hang.waiting}
        others = [r for r, each in words.items() if each.late or (r in waiting and r not in failed)]
        parts.append(_alike(failed, found) + _wait(others, words))
    elif not parts and together:
        parts = [sentence for hang in found for sentence in _absence(hang, words)]
        parts = parts or [_stuck(hang, words) for hang in found]
    sentence = "; ".join(parts) or _alike(words, found)
    if not together:
        sentence += (
            f"; the ranks' store does not answer, so this is what {_ranks([*words])} can see"
        )
    return sentence


def _blamed(silent: Sequence[Silent], together: bool, late: bool) -> list[Silent]:
    if together:
        return [each for each in silent if each.state != ALIVE or late]
    # Nobody can answer: those that are seen to be gone, else the rank where the store mostly lives.
    gone = [each for each in silent if each.state in (DIED, STOPPED, LEFT)]
    return gone or [each for each in silent if each.rank == 0]


def _owes(silent: Silent, words: Mapping[int, Words]) -> bool:
    """Whether a rank that has left was to call more, as the others have."""
    mine = {log.group: log.started for log in silent.seen.logs} if silent.seen else {}
    theirs = _by_group(words)
    return any(log.started > mine.get(g, 0) for g, logs in theirs.items() for log in logs.values())


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
                sentences.append(_mismatch(number, group, kinds, calls))
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


def _mismatch(
    number: int, group: str, kinds: list[tuple[Call, list[int]]], calls: dict[int, dict[int, Call]]
) -> str:
    (usual, most), *others = kinds
    first = True
    parts = []
    for call, ranks in others:
        verb = "calls" if len(ranks) == 1 else "call"
        text = f"{_ranks(ranks)} {verb} {f'{call} {group}'.rstrip() if first else call.text}"
        if first:
            text += f" where {_ranks(most)} {'calls' if len(most) == 1 else 'call'} {usual.text}"
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


def _silence(silent: Silent, found: Sequence[Hang]) -> str:
    """ "rank 1 (host, pid 7) is stopped (SIGSTOP), last seen in f (x.py:3), before #4 …"."""
    text = f"{silent.name} {silent.state}"
    if silent.seen is None:
        return text
    text += f", last seen in {silent.seen.place}"
    started = {log.group: log.started for log in silent.seen.logs}
    for hang in found:
        if hang.group in started and hang.exact:
            return f"{text}, {'in' if started[hang.group] >= hang.call.number else 'before'} {hang}"
    return text


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
    return f"{words.inside}, called from {words.place}" if words.inside else words.place


def _alike(words: Mapping[int, Words], found: Sequence[Hang]) -> str:
    """What each says, the same ones together."""
    alike: dict[str, list[int]] = {}
    for rank, each in sorted(words.items()):
        text = f"{each.cause}, at {each.place}" if each.cause else f"in {_where(each, '-')}"
        text += f", in {each.inside}" if each.cause and each.inside else ""
        before = [hang for hang in found if rank in hang.absent]
        text += f", before {before[0]}" if before else ""
        text += f" (in {each.phase})" if each.phase else ""
        alike.setdefault(text, []).append(rank)
    return "; ".join(f"{_ranks(ranks)}: {text}" for text, ranks in alike.items())


def _wait(ranks: Iterable[int], words: Mapping[int, Words]) -> str:
    waiting = sorted(ranks)
    if not waiting:
        return ""
    verb = "waits" if len(waiting) == 1 else "wait"
    return f"; {_ranks(waiting)} {verb}{_phase(waiting, words)}"


def _phase(ranks: Sequence[int], words: Mapping[int, Words]) -> str:
    phase = words[min(ranks)].phase
    return f" in {phase}" if phase else ""


def _ranks(ranks: Sequence[int]) -> str:
    """ "rank 1", "ranks 0, 2, 3", of more than six "ranks 0–6, 8"."""
    if len(ranks) <= 6:
        return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"
    return f"ranks {spans(ranks).replace('-', '–')}"
