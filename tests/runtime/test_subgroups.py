"""Who works together inside hosts and between them, and what follows for data, figures, names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from frozen import Frozen

from ddpbench.analysis import stats
from ddpbench.measure.host_limits import Rates
from ddpbench.runtime.subgroups import divide_ranks

TWO = [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("name", "hosts", "teams", "ranks_per_host"),
    [
        ("world", [[0, 1], [2]], ((0, 1, 2),), (2, 1)),
        ("host", TWO, ((0, 1), (2, 3)), (2,)),
        ("cross", TWO, ((0, 2), (1, 3)), (1, 1)),
        ("cross", [[0, 1], [2], [3]], ((0, 2, 3),), (1, 1, 1)),
        ("cross", [[0, 3], [1, 2]], ((0, 1), (2, 3)), (1, 1)),
        ("host", [[0, 1]], ((0, 1),), (2,)),
    ],
)
def test_ranks_are_divided(
    name: str, hosts: list[list[int]], teams: tuple[tuple[int, ...], ...], ranks_per_host: object
) -> None:
    """All as one; those of each host; the first of all hosts, the second, as far as every host has
    one, in ascending order as torch has the ranks of a group."""
    found = divide_ranks(name, hosts)
    assert (found.subgroups, found.ranks_per_host, found.objection) == (teams, ranks_per_host, None)


@pytest.mark.parametrize(
    ("name", "hosts"),
    [("host", [[0, 1], [2], [3]]), ("host", [[0], [1]]), ("cross", [[0, 1]])],
)
def test_what_cannot_be_divided_says_why(frozen: Frozen, name: str, hosts: list[list[int]]) -> None:
    """Unequal hosts, hosts with nothing inside, one host."""
    frozen.text(divide_ranks(name, hosts).objection or "")


def some_stamps() -> stats.Stamps:
    """Two repetitions of ranks 0+2 and 1+3, and of 4, which is in no group and slower than all."""
    entry = np.array([[0, 10], [5, 10], [2, 12], [9, 13], [0, 0]])
    spent = np.array([[10, 30], [20, 20], [12, 28], [16, 25], [99, 99]])
    return np.stack([entry, entry + spent, np.full_like(entry, -1)], axis=2)


def test_of_groups_at_once_the_slowest_tells() -> None:
    """Its slowest rank is the time of a repetition, its entries and exits the bracket, not those of
    the other group; means and least are over the ranks of both. Ranks in none do not count."""
    found = stats.over_ranks(some_stamps(), ((0, 2), (1, 3)))
    assert found.slowest.tolist() == [20, 30]
    assert (found.first_in.tolist(), found.last_in.tolist()) == ([5, 10], [9, 12])
    assert found.last_out.tolist() == [25, 40]
    assert (found.mean.tolist(), found.fastest.tolist()) == ([14.5, 25.75], [10, 20])


def test_each_kind_of_group_has_its_own_limit() -> None:
    """Inside a host, over shared memory: copies. Over TCP: the streams that were measured in just
    these groups, and none where they were not."""
    rates = Rates({64: 5.0}, {64: 7.0}, 9.0, 1.0, 2.0, {"host": (3.0, 4.0), "cross": (None, None)})

    def rate(*asked: Any) -> float | None:
        found = rates.limit(*asked)
        return found.bytes_per_second if found else None

    assert [rate("memory", 64, way, True, "host") for way in (False, True)] == [5.0, 7.0]
    assert [rate("tcp", 64, way, True, "host") for way in (False, True)] == [3.0, 4.0]
    assert rate("tcp", 64, False, False, "cross") is None
    assert rate("tcp", 64, True, False, "world") == 2.0
