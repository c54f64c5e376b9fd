"""Transfers of a watched job against stored runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from frozen import Frozen
from stored_runs import a_case, a_result, a_run, a_summary

from ddpbench.records import store
from ddpbench.watch.judging.bandwidth import find_reference, judge_transfers, read_reference
from ddpbench.watch.judging.history import Calls, History
from ddpbench.watch.window import JoinedCall

RUN = a_run(
    a_result(a_case(nbytes=1000), summary=a_summary(1e-3)),
    a_result(a_case(nbytes=1000, in_place=False), summary=a_summary(2e-3)),
    a_result(a_case(nbytes=100_000), summary=a_summary(1e-1)),
    a_result(a_case(nbytes=10_000, issue="pipelined"), summary=a_summary(1e-6)),
    a_result(a_case(nbytes=10_000, dtype="float16"), summary=a_summary(1e-6)),
)


def test_transfers_are_compared_with_the_stored_run(frozen: Frozen) -> None:
    """Between measured sizes the time is interpolated with both axes logarithmic; the fastest form
    counts, and pipelined calls, other dtypes, other groups and unmeasured sizes do not."""
    reference = read_reference(RUN, "gloo", (2,), "float32")
    assert reference is not None
    history = History()
    kinds = {
        ("0 (0-1)", "all_reduce", 10_000): Calls(ranks=2),
        ("1 (0-2)", "all_reduce", 10_000): Calls(ranks=3),
        ("0 (0-1)", "all_reduce", 10): Calls(ranks=2),
        ("0 (0-1)", "reduce", 10_000): Calls(ranks=2),
    }
    for calls in kinds.values():
        for ms in (20, 1, 30, 1, 30, 20, 20):
            calls.newest.append(JoinedCall("", 0, "", 0, 0, 0, 0, 0, 0, 2, ms * 10**6))
    history.calls.update(kinds)
    (finding,) = judge_transfers(history, reference)
    frozen.findings([finding])


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
