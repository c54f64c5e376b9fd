"""Stored runs of a DDP step, and samples of a step whose times are known."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from ddpbench.analysis import sharded_steps, steps
from ddpbench.analysis.steps import BucketInfo, Samples, Span, Timed
from ddpbench.records.launched import Launch
from ddpbench.records.schema import Plan, Replicas, Run, StepCase, StepResult, StepSummary

Ints = npt.NDArray[np.int64]
MS = 1_000_000  # ns


def step_samples(
    world: int = 2, rounds: int = 24, in_a_row: int = 5, *, compute: float = 60.0,
    copies: float = 1.0, exposed: float = 18.0, hook: float = 0.5, late: tuple[int, float] = (0, 0),
    noise: float = 0.002, buckets: int = 4, wire: float = 8.0, seed: int = 0,
) -> Samples:  # fmt: skip
    """Samples of ranks whose arms take these milliseconds, with this relative noise.

    late: a rank and the milliseconds that its forward takes longer than the others'.
    """
    draw = np.random.default_rng(seed)
    rank, delay = late

    def around(value: float, *shape: int) -> npt.NDArray[np.float64]:
        return value * MS * draw.normal(1, noise, shape)

    def arm(extra: float, waits: bool) -> Ints:
        shape = (world, rounds, in_a_row)
        forward, backward = around(compute * 0.25, *shape), around(compute * 0.72 + extra, *shape)
        forward[rank] += delay * MS
        if waits:
            backward += forward.max(axis=0) - forward
        marks = np.stack([0 * forward, forward, backward, around(compute * 0.03, *shape)], axis=3)
        clocks = draw.integers(0, 10**15, (world, 1, 1, 1))
        return np.asarray(marks.cumsum(axis=3) + clocks, dtype=np.int64)

    stamps = {
        "ddp": arm(copies + exposed, True), "noop": arm(copies, False), "no_sync": arm(0, False),
        "timed": arm(copies + exposed + hook, True),
    }  # fmt: skip
    walls = {
        name: (each[..., 3] - each[..., 0]).sum(axis=2) + 10_000 for name, each in stamps.items()
    }
    handed = np.arange(1, buckets + 1) * compute * 0.72 / max(1, buckets)
    late_ms = np.where(np.arange(world) == rank, delay, 0.0)[:, None, None]
    first = (handed + late_ms) * MS * draw.normal(1, noise, (world, rounds, buckets))
    took = (wire + delay - late_ms) * MS * draw.normal(1, noise, (world, rounds, buckets))
    layers = [f"layers.{buckets - i}" for i in range(buckets)]  # from the last one to the first
    return Samples(
        stamps=stamps,
        walls=walls,
        buckets=[
            BucketInfo(i, 4_000_000, 2, f"{layer}.weight", f"{layer}.bias")
            for i, layer in enumerate(layers)
        ],
        bucket_stamps=np.stack([first, first + took], axis=3).astype(np.int64),
        verify=around(4.5, world, 30).astype(np.int64),
    )


def a_step_case(**other: Any) -> StepCase:
    """A perceptron on gloo between two ranks."""
    fields: dict[str, Any] = {
        "workload": "mlp", "settings": ("width=1024", "depth=8"), "parameters": 8_396_800,
        "parameter_nbytes": 33_587_200, "backend": "gloo", "provider": "native", "device": "cpu",
        "batch": 64, "accumulate": 1, "optimizer": "sgd", "amp": None, "bucket_cap_mb": None,
        "gradient_as_bucket_view": False, "static_graph": False, "find_unused_parameters": False,
        "comm_hook": "none", "threads": 1, "world_size": 2, "ranks_per_host": (2,),
    }  # fmt: skip
    return StepCase(**{**fields, **other})


@functools.cache
def a_step_summary(batch: int = 128, **samples: Any) -> StepSummary:
    """The summary of `step_samples` with these arguments."""
    return steps.summarise(step_samples(**samples), batch, 16)


def some_replicas(**other: Any) -> Replicas:
    """Equal after each of 136 steps."""
    fields: dict[str, Any] = {
        "verified": 136, "last_step": 136, "equal": True, "ok": True, "nbytes": 33_587_200,
        "compared": {"parameter": 16, "optimizer": 16, "buffer": 0},
        "cost": steps.figure(np.full(30, 4.5e-3)), "share": 0.056, "equal_until": 136,
        "text": "step 136: replicas equal in ranks 0, 1: 16 parameters",
    }  # fmt: skip
    return Replicas(**{**fields, **other})


def a_step_result(
    case: StepCase | None = None, launch: int = 0, summary: StepSummary | None = None, **other: Any
) -> StepResult:
    """A measured step, without any fault."""
    fields: dict[str, Any] = {
        "cold_seconds": 0.2, "stop_reason": "time slice", "replicas": some_replicas(),
        "losses": (1.021, 0.9835), "others_share": 0.01, "wall_seconds": 20.0,
    }  # fmt: skip
    return StepResult(
        case or a_step_case(), launch, summary=summary or a_step_summary(), **{**fields, **other}
    )


def a_step_run(*results: StepResult, **other: Any) -> Run:
    """A complete run of these results, a launch for each index and backend in them."""
    facts = {"ddpbench": "0.1.0", "torch": "2.13.0", "python": "3.11.7", "kernel": "6.1",
             "cpu_model": "AMD EPYC", "cores_logical": 2}  # fmt: skip
    rank = {"hostname": "node", "threads": 1, "cpuset": "0-1", **facts}
    kinds = dict.fromkeys((r.launch, r.case.backend, r.case.world_size) for r in results)
    launches = tuple(
        Launch(index, backend, "native", f"lib{backend} 1.2", "torchrun", world, facts,
               (rank,) * world)
        for index, backend, world in kinds
    )  # fmt: skip
    fields: dict[str, Any] = {
        "id": "a-run", "command": "ddp", "command_line": ("ddpbench", "ddp"), "plan": Plan(seed=7),
        "started": "2026-01-01T00:00:00Z", "state": "complete", "exit_code": 0,
        "operations": tuple(dict.fromkeys(r.case.workload for r in results)),
        "backends": tuple(dict.fromkeys(r.case.backend for r in results)),
        "launches": launches, "steps": results,
    }  # fmt: skip
    return Run(**{**fields, **other})


def sharded_samples(
    world: int = 4, rounds: int = 24, in_a_row: int = 5, *, compute: float = 60.0,
    blocks: int = 2, gather: tuple[float, float] = (4.0, 1.0), scatter: float = 6.0,
    reduce: float = 0.0, overhead: float = 1.5,
    late: tuple[int, float] = (0, 0), noise: float = 0.002, seed: int = 0,
) -> Samples:  # fmt: skip
    """Samples of fully_shard, whose blocks gather twice a step, and a root.

    gather: milliseconds of each all_gather that are exposed, and hidden. reduce: of each all_reduce
    between two groups of half of the ranks. late: a rank, and the milliseconds that
    it computes longer.
    """
    draw = np.random.default_rng(seed)
    rank, delay = late
    calls = _sharded_calls(blocks, gather, scatter, reduce, world)
    exposed = sum(blocked for _, blocked, _ in calls)

    def arm(extra: float, waits: bool) -> Ints:
        shape = (world, rounds, in_a_row)
        forward, backward, update = (
            share * compute * MS * draw.normal(1, noise, shape) for share in (0.25, 0.72, 0.03)
        )
        forward[rank] += delay * MS
        backward += extra * MS
        if waits:
            backward += forward.max(axis=0) - forward
        marks = np.stack([0 * forward, forward, backward, update], axis=3)
        return np.asarray(marks.cumsum(axis=3), dtype=np.int64)

    arms = {"ddp": exposed + overhead, "timed": exposed + overhead + 0.5}
    stamps = {"noop": arm(0.0, False), **{name: arm(extra, True) for name, extra in arms.items()}}
    walls = {
        name: (each[..., 3] - each[..., 0]).sum(axis=2) + 10_000 for name, each in stamps.items()
    }
    waits = np.where(np.arange(world) == rank, 0.0, delay)[:, None]
    ns = np.empty((world, rounds, len(calls), 3))
    for number, (_, blocked, hidden) in enumerate(calls):
        wait = waits if number == 0 else 0 * waits  # the others wait in the first collective
        took = blocked * draw.normal(1, noise, (world, rounds)) + wait
        begin = np.full((world, rounds), 10.0 * number)
        ns[:, :, number] = np.stack([begin, took, begin + took + hidden], axis=2) * MS
    half = (tuple(range(world // 2)), tuple(range(world // 2, world)))
    return Samples(
        stamps=stamps, walls=walls, buckets=[], bucket_stamps=None,
        verify=np.empty((world, 0), np.int64),
        timed=Timed(
            [span for span, _, _ in calls],
            [half if span.operation == "all_reduce" else (tuple(range(world)),)
             for span, _, _ in calls],
            ns.astype(np.int64),
        ),
        peak_nbytes=np.arange(1, world + 1) * 100_000_000,
    )  # fmt: skip


def _sharded_calls(
    blocks: int, gather: tuple[float, float], scatter: float, reduce: float, world: int
) -> list[tuple[Span, float, float]]:
    """The collectives of a step, each with its exposed and its hidden milliseconds."""
    ranks, names = tuple(range(world)), ["root", *(f"blocks.{i}" for i in range(blocks))]

    def call(operation: str, layers: str, phase: str) -> Span:
        nbytes = 8_000 if layers == "root" else 4_000_000
        return Span(operation, layers, phase, nbytes, 0, 0, 0, ranks)

    calls = [(call("all_gather", name, "forward"), *gather) for name in names]
    for name in reversed(names):
        if name != "root":
            calls.append((call("all_gather", name, "backward"), *gather))
        calls.append((call("reduce_scatter", name, "backward"), scatter, 0.0))
        if reduce:
            calls.append((call("all_reduce", name, "backward"), reduce, 0.0))
    return calls


def a_sharded_case(**other: Any) -> StepCase:
    """The perceptron under fully_shard between four ranks."""
    fields = {"parallel": "fsdp", "mesh": (4,), "world_size": 4, "ranks_per_host": (4,)}
    return a_step_case(**{**fields, "prefetch": True, "reshard_after_forward": True, **other})


@functools.cache
def a_sharded_summary(batch: int = 256, **samples: Any) -> StepSummary:
    """The summary of `sharded_samples` with these arguments."""
    return sharded_steps.summarise(sharded_samples(**samples), batch, 16)
