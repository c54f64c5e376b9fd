"""The collectives that ranks have called: which do not end. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ddpbench.hang.status import Call, Hang, Log, RankStatus


def hangs(words: Mapping[int, RankStatus]) -> list[Hang]:
    """Each group's first collective that some have called and none has seen to its end."""
    found = []
    for group, logs in logs_by_group(words).items():
        waiting = {
            rank: log.finished + 1 for rank, log in logs.items() if log.started > log.finished
        }
        if not waiting:
            continue
        number = min(waiting.values())
        members = {rank for log in logs.values() for rank in log.members} & set(words)
        absent = [rank for rank in members if rank not in logs or logs[rank].started < number]
        call = call_number(number, [logs[rank] for rank in waiting])
        exact = all(log.exact for log in logs.values())
        found.append(Hang(group, call, tuple(sorted(waiting)), tuple(sorted(absent)), exact))
    return found


def logs_by_group(words: Mapping[int, RankStatus]) -> dict[str, dict[int, Log]]:
    groups: dict[str, dict[int, Log]] = {}
    for rank, each in sorted(words.items()):
        for log in each.logs:
            groups.setdefault(log.group, {})[rank] = log
    return groups


def call_number(number: int, logs: Iterable[Log]) -> Call:
    calls = [call for log in logs for call in log.calls if call.number == number]
    return calls[0] if calls else Call(number, "collective")
