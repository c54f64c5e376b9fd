"""Find the collectives that do not end, in the logs of all ranks. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ddpbench.hang.status import Call, Hang, Log, RankStatus


def find_hangs(statuses: Mapping[int, RankStatus]) -> list[Hang]:
    """Return each group's first collective that some ranks have called and that has not ended."""
    hangs = []
    for group, logs in group_logs(statuses).items():
        waiting = {
            rank: log.finished + 1 for rank, log in logs.items() if log.started > log.finished
        }
        if not waiting:
            continue
        number = min(waiting.values())
        members = {rank for log in logs.values() for rank in log.members} & set(statuses)
        absent = [rank for rank in members if rank not in logs or logs[rank].started < number]
        call = find_call(number, [logs[rank] for rank in waiting])
        exact = all(log.exact for log in logs.values())
        hangs.append(Hang(group, call, tuple(sorted(waiting)), tuple(sorted(absent)), exact))
    return hangs


def group_logs(statuses: Mapping[int, RankStatus]) -> dict[str, dict[int, Log]]:
    """Return the logs by group and rank."""
    groups: dict[str, dict[int, Log]] = {}
    for rank, status in sorted(statuses.items()):
        for log in status.logs:
            groups.setdefault(log.group, {})[rank] = log
    return groups


def find_call(number: int, logs: Iterable[Log]) -> Call:
    """Return the call with this number, as far as the logs have it."""
    calls = [call for log in logs for call in log.calls if call.number == number]
    return calls[0] if calls else Call(number, "collective")
