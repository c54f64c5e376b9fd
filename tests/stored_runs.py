"""Stored runs of operations: complete and without faults, unless a test changes a field."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ddpbench.records.launched import Launch
from ddpbench.records.schema import Case, Interval, Plan, Result, Run, Summary


def a_case(**other: Any) -> Case:
    """An all_reduce of 4 KiB on gloo between two ranks."""
    fields: dict[str, Any] = {
        "operation": "all_reduce", "form": "tensor", "backend": "gloo", "provider": "native",
        "device": "cpu", "dtype": "float32", "reduce_op": "sum", "root": None, "nbytes": 4096,
        "count": 1024, "in_place": True, "async_op": False, "issue": "isolated",
        "start": "barrier", "depth": 1, "world_size": 2, "ranks_per_host": (2,),
    }  # fmt: skip
    return Case(**{**fields, **other})


def a_summary(seconds: float = 1e-3, width: float | None = 0.01, **other: Any) -> Summary:
    """A median of `seconds` with an interval of ± `width` of it; None: without interval."""
    interval = (
        None
        if width is None
        else Interval(seconds * (1 - width), seconds * (1 + width), 0.95, "median of 6 medians")
    )
    fields: dict[str, Any] = {
        "repetitions": 400, "median_seconds": seconds, "interval": interval,
        "mean_seconds": seconds * 1.125, "min_seconds": seconds / 2, "max_seconds": seconds * 4,
        "percentiles_seconds": {"p50": seconds, "p90": seconds * 2, "p99": seconds * 3},
        "rank_mean_seconds": seconds * 0.75, "rank_min_seconds": seconds * 0.5,
        "skew_seconds": seconds / 64, "last_in_seconds": seconds * 0.9375,
        "global_seconds": seconds * 1.0625, "outliers": 3, "far_outliers": 1,
    }  # fmt: skip
    return Summary(**{**fields, **other})


def a_result(
    case: Case | None = None, launch: int = 0, summary: Summary | None = None, **other: Any
) -> Result:
    """A measured case, without any fault."""
    case = case or a_case()
    fields: dict[str, Any] = {
        "bus_factor": 1.0, "least_nbytes": float(case.nbytes), "requested_nbytes": case.nbytes,
        "checks": 3, "cold_seconds": 0.01, "warm_up": 50, "stop_reason": "precision",
        "summary": summary or a_summary(),
    }  # fmt: skip
    return Result(case, launch, **{**fields, **other})


def a_launch(index: int = 0, backend: str = "gloo", **other: Any) -> Launch:
    """Two ranks of one host with two cores each."""
    facts = {"ddpbench": "0.1.0", "torch": "2.13.0", "python": "3.11.7", "cpuset": "0-3"}
    ranks = tuple({"hostname": "node", "threads": 1, **facts} for _ in range(2))
    fields: dict[str, Any] = {
        "provider": "native", "library": f"lib{backend} 1.2", "launcher": "torchrun",
        "world_size": 2, "facts": {**facts, "kernel": "6.1", "cpu_model": "CPU X",
                                   "cores_logical": 4}, "ranks": ranks,
    }  # fmt: skip
    return Launch(index, backend, **{**fields, **other})


def a_run(*results: Result, **other: Any) -> Run:
    """A complete run of these results, a launch for each index and backend in them."""
    launches = dict.fromkeys((r.launch, r.case.backend) for r in results)
    fields: dict[str, Any] = {
        "id": "a-run", "command": "collectives", "command_line": ("ddpbench", "collectives"),
        "plan": Plan(), "started": "2026-01-01T00:00:00Z", "state": "complete", "exit_code": 0,
        "operations": tuple(dict.fromkeys(r.case.operation for r in results)),
        "launches": tuple(a_launch(index, backend) for index, backend in launches),
        "results": results,
    }  # fmt: skip
    return Run(**{**fields, **other})


def sample_columns(case: str, launch: int, count: int, seed: int) -> dict[str, Any]:
    """Return columns of samples as a command stores them: the case's name as a dictionary."""
    import pyarrow as pa

    draw = np.random.default_rng(seed)
    return {
        "case": pa.array([case] * count).dictionary_encode(),
        "launch": np.full(count, launch, dtype=np.int32),
        "repetition": np.arange(count, dtype=np.int32) - 2,
        "rank": (np.arange(count) % 2).astype(np.int32),
        "entry_ns": draw.integers(0, 2**62, count),
        "exit_ns": draw.integers(0, 2**62, count),
        "device_ns": np.full(count, -1),
        "warm_up": np.arange(count) < 2,
    }


Floats = npt.NDArray[np.float64]


def launch_medians(count: int, middle: float = 1e-3, noise: float = 0.005, seed: int = 0) -> Floats:
    """Return launch medians around `middle` seconds with this relative noise."""
    draw = np.random.default_rng(seed)
    return np.asarray(middle * np.exp(draw.normal(0, noise, count)), dtype=np.float64)


def launch_results(
    seconds: float, case: Case | None = None, launches: int = 6, noise: float = 0.002,
    seed: int = 0, **other: Any,
) -> list[Result]:  # fmt: skip
    """Return results of one case in launches whose medians lie around `seconds`."""
    launch_seconds = launch_medians(launches, seconds, noise, seed)
    return [a_result(case, n, a_summary(float(t)), **other) for n, t in enumerate(launch_seconds)]


def base_and_new(factor: float, noise: float = 0.002, launches: int = 6) -> tuple[Run, Run]:
    """Return a run of one case of 1 ms, and a run in which it takes `factor` times as long."""
    return (
        a_run(*launch_results(1e-3, launches=launches, noise=noise, seed=1)),
        a_run(*launch_results(1e-3 * factor, launches=launches, noise=noise, seed=2)),
    )


def with_facts(run: Run, facts: dict[str, Any], rank: dict[str, Any], **launch: Any) -> Run:
    """Return the run with these facts of its hosts and ranks, as if from another environment."""
    launches = tuple(
        replace(
            before,
            facts={**before.facts, **facts},
            ranks=tuple({**rank_before, **rank} for rank_before in before.ranks),
            **launch,
        )
        for before in run.launches
    )
    return replace(run, launches=launches)
