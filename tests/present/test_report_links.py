"""Measured links on a page: matrices of what each rank or host sends to each other one."""

from typing import Any

import numpy as np
import pytest
from drawn import values

from ddpbench.present.document import Chart
from ddpbench.present.examinations import draw_links


def figures(ranks: int, hosts: int = 1, *again: dict[str, Any], **other: Any) -> dict[str, Any]:
    """What the doctor stores of links at about 1 GB/s, half of that when all send at once."""
    rate = np.random.default_rng(0).uniform(0.9e9, 1.1e9, (ranks, ranks)).tolist()
    return {
        "ends": [[rank, f"host{rank * hosts // ranks}"] for rank in range(ranks)],
        "kind": "ranks", "pairs": ranks * (ranks - 1) // 2, "rounds": ranks, "seconds": 0.1,
        "halved": False, "again": list(again),
        "cells": [[a, b, rate[a][b], rate[a][b] / 2, 5e-5]
                  for a in range(ranks) for b in range(ranks) if a != b],
        **other,
    }  # fmt: skip


def slow(kind: str, one: list[int], other: list[int], ways: str = "both") -> dict[str, Any]:
    """A confirmed suspect, as the doctor stores it."""
    return {"kind": kind, "one": one, "other": other, "ways": ways, "confirmed": True}


def charts(measured: dict[str, Any]) -> list[Chart]:
    """The charts of what the doctor stored."""
    return list(draw_links(measured, "", "gloo"))


def outlined(chart: Chart) -> set[tuple[str, str]]:
    """The ways that a chart outlines."""
    return {(cell["from"], cell["to"]) for cell in values(chart) if cell["_marked"]}


@pytest.mark.parametrize(
    ("suspect", "ways"),
    [
        (slow("rank", [0], [3], "receives"), {("3", "0")}),
        (slow("rank", [2], [], "sends"), {("2", "0"), ("2", "1"), ("2", "3")}),
        (slow("host", [0], [2]), {(a, b) for a in "01" for b in "23"}
         | {(b, a) for a in "01" for b in "23"}),
        ({**slow("rank", [0], [3]), "confirmed": False}, set()),
    ],
)  # fmt: skip
def test_what_the_doctor_confirmed_is_outlined(
    suspect: dict[str, Any], ways: set[tuple[str, str]]
) -> None:
    """A link, one direction, an end, or all ranks of two hosts; the table says "slow" there."""
    names = {str(r): f"{r} host{r // 2}" for r in range(4)}
    bandwidth, latency = charts(figures(4, 2, suspect))
    assert outlined(bandwidth) == {(names[a], names[b]) for a, b in ways}
    assert ("Outlined" in bandwidth.caption) == bool(ways)
    marked = [cell for row in bandwidth.table.rows for cell in row if str(cell).endswith("slow")]
    assert len(marked) == len(ways)
    assert outlined(latency) == set()
