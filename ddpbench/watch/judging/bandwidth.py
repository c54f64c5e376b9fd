"""Compare the transfers of a watched job with a stored `collectives` run. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from ddpbench.records import store
from ddpbench.records.schema import Finding, Run
from ddpbench.watch.judging.history import History

FEWEST = 6  # transfers that are compared
NEWEST = 8  # stored runs that are looked at
Curve = Mapping[int, float]  # message size in bytes → seconds


@dataclass(frozen=True)
class Reference:
    """The times of a stored run, by operation, of groups of `ranks` ranks."""

    run: str  # its id
    ranks: int
    curves: Mapping[str, Curve]

    def estimate_seconds(self, operation: str, nbytes: int) -> float | None:
        """Interpolate between the measured sizes, both axes logarithmic; None outside of them."""
        curve = self.curves.get(operation, {})
        sizes = sorted(curve)
        if not sizes or not sizes[0] <= nbytes <= sizes[-1]:
            return None
        seconds = [curve[size] for size in sizes]
        return float(np.exp(np.interp(np.log(nbytes), np.log(sizes), np.log(seconds))))


def find_reference(
    backend: str,
    ranks_per_host: Sequence[int],
    dtype: str = "float32",
    results: Path = Path("results"),
) -> Reference | None:
    """Return the newest stored run of this backend, dtype and placement of ranks, if there is one.

    Looks at the NEWEST runs only, because a job waits meanwhile. Damaged runs are passed over.
    """
    runs = sorted(results.glob("*/run.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for folder in (path.parent for path in runs[:NEWEST]):
        if "-watch-" in folder.name:
            continue
        try:
            reference = read_reference(store.read(folder), backend, ranks_per_host, dtype)
        except store.InvalidRun:
            continue
        if reference is not None:
            return reference
    return None


def read_reference(
    run: Run, backend: str, ranks_per_host: Sequence[int], dtype: str
) -> Reference | None:
    """Return a run's times for this backend, dtype and placement of ranks, if it has any.

    Of several forms of an operation, and several launches, the fastest counts.
    """
    ranks = sum(ranks_per_host)
    curves: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for result in run.results:
        case, summary = result.case, result.summary
        placed = case.ranks_per_host in ((), tuple(ranks_per_host))
        alike = (case.backend, case.dtype, case.world_size) == (backend, dtype, ranks)
        # Pipelined calls overlap, so their time is not that of a call.
        single = case.issue == "isolated" and case.group == "world" and case.nbytes > 0
        if alike and placed and single and summary is not None and summary.median_seconds > 0:
            curve = curves[case.operation]
            seconds = summary.median_seconds
            curve[case.nbytes] = min(seconds, curve.get(case.nbytes, seconds))
    return Reference(run.id, ranks, dict(curves)) if curves else None


def judge_transfers(history: History, reference: Reference) -> Iterator[Finding]:
    """Yield a note for each kind of call whose transfers are known here and in the stored run."""
    for (group, operation, nbytes), calls in history.calls.items():
        expected = reference.estimate_seconds(operation, nbytes)
        if expected is None or calls.ranks != reference.ranks:
            continue
        if len(wires := calls.wires) < FEWEST:
            continue
        seconds = median(wires)
        share = expected / seconds
        yield Finding(
            "note",
            "transfers",
            f"the transfer of {operation}, {nbytes / 1e3:.4g} kB on group {group}, takes "
            f"{seconds * 1e3:.3g} ms in this job and {expected * 1e3:.3g} ms in run "
            f"{reference.run}: {share:.0%} of that run's bandwidth",
            "a transfer is slower while ranks also compute; see what that run measured: python -m "
            f"ddpbench show {reference.run}"
            if share < 1
            else "",
            {"operation": operation, "nbytes": nbytes, "seconds": seconds, "ratio": share},
        )
