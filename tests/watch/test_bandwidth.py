"""Transfers of a watched job against stored runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from stored_runs import a_case, a_result, a_run, a_summary

from ddpbench.records import store
from ddpbench.watch.judging.bandwidth import compare_transfers, find_reference, read_reference
from ddpbench.watch.window import JoinedCall

RUN = a_run(
    a_result(a_case(nbytes=1000), summary=a_summary(1e-3)),
    a_result(a_case(nbytes=1000, in_place=False), summary=a_summary(2e-3)),
    a_result(a_case(nbytes=100_000), summary=a_summary(1e-1)),
    a_result(a_case(nbytes=10_000, issue="pipelined"), summary=a_summary(1e-6)),
    a_result(a_case(nbytes=10_000, dtype="float16"), summary=a_summary(1e-6)),
)


def a_call(nbytes: int, wire_ns: int, ranks: int = 2, operation: str = "all_reduce") -> JoinedCall:
    return JoinedCall("0 (0-1)", 1, operation, nbytes, 3, -1, 0, 0, 0, 1, ranks, wire_ns)


def test_transfers_are_compared_with_the_stored_run() -> None:
    """Between measured sizes the time is interpolated with both axes logarithmic; the fastest form
    counts, and pipelined calls, other dtypes, other groups and unmeasured sizes do not."""
    reference = read_reference(RUN, "gloo", (2,), "float32")
    assert reference is not None
    slow = [a_call(10_000, ns) for ns in (20_000_000, 5, 30_000_000)]
    other = [
        a_call(10, 5),
        a_call(10_000, 5, ranks=3),
        a_call(10_000, -1),
        a_call(9, 9, 2, "reduce"),
    ]
    (found,) = compare_transfers([*slow, *other], reference)
    assert (found.operation, found.nbytes, found.calls, found.run) == (
        "all_reduce",
        10_000,
        3,
        "a-run",
    )
    assert found.seconds == pytest.approx(20e-3)
    assert found.ratio == pytest.approx(0.5)


def test_the_newest_run_that_fits_is_taken(tmp_path: Path) -> None:
    """A newer run of another backend or placement, or a damaged one, is passed over."""
    for name, started, case in (
        ("old", "2026-01-01T00:00:00Z", a_case()),
        ("new", "2026-01-02T00:00:00Z", a_case()),
        ("mpi", "2026-01-03T00:00:00Z", a_case(backend="mpi")),
        ("spread", "2026-01-04T00:00:00Z", a_case(ranks_per_host=(1, 1))),
    ):
        store.create(tmp_path / name, replace(a_run(a_result(case)), started=started), "x")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "run.json").write_text("{")
    reference = find_reference("gloo", (2,), results=tmp_path)
    assert reference is not None
    assert reference.run == "new"
    assert find_reference("nccl", (2,), results=tmp_path) is None
