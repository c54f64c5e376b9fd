"""Which device each rank uses, from what all ranks see: pure functions of the gathered lists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ddpbench.records.wording import name_ranks


def choose_indices(visible: Sequence[Sequence[str]]) -> list[int]:
    """Return each rank's index among the devices that it sees.

    visible: by rank, the identities of these devices, as no other device has them. So it does not
    matter where a rank runs: a container may see a part of its machine's devices, and a task of
    Slurm only its own. Each rank takes the device that the fewest ranks have, ranks with the least
    choice first. Ranks that see the same devices take them in order of rank.
    """
    users = Counter[str]()
    chosen = [0] * len(visible)
    for rank in sorted(range(len(visible)), key=lambda rank: len(visible[rank])):
        devices = visible[rank]
        chosen[rank] = min(range(len(devices)), key=lambda index: users[devices[index]])
        users[devices[chosen[rank]]] += 1
    return chosen


def explain_sharing(used: Sequence[str], allowed: bool) -> str | None:
    """Return a sentence if too many ranks use one device.

    used: identities, by rank. allowed: whether two ranks may share one.
    """
    users, most = Counter(used), 2 if allowed else 1
    shared = [rank for rank, device in enumerate(used) if users[device] > most]
    if not shared:
        return None
    advice = "two ranks per GPU" if allowed else "one rank per GPU, or add --share-gpu for two"
    return f"{name_ranks(shared, 3)} would share GPUs: start at most {advice}"
