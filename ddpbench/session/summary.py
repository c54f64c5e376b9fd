"""Convert the samples of a case to what is stored: the summary and the columns of samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ddpbench.analysis import clocks, stats, steps
from ddpbench.analysis.stats import Kept
from ddpbench.records.schema import LAUNCH_HIDDEN, Result
from ddpbench.records.store import SAMPLE_COLUMNS

if TYPE_CHECKING:
    from ddpbench.measure.repetitions import Samples


def summarise_result(
    result: Result, samples: Samples, clock_off_seconds: float | None
) -> tuple[Result, dict[str, Any] | None]:
    """Return the result with its summary, and the columns of its samples, if there are any.

    clock_off_seconds: largest error between stamps of different ranks, as in `Result`.
    """
    if not samples.timed.repetitions:
        return result, None
    assert samples.cold is not None
    single = result.case.issue == "isolated" and samples.calls == samples.cold_calls
    over = stats.join_repetitions(samples.timed.over)
    common_clock = clocks.comparable(clock_off_seconds, float(np.median(over.times(1))))
    result = replace(
        result,
        calls=samples.calls,
        batch=samples.calls // samples.cold_calls,
        cold_seconds=float(stats.over_ranks(samples.cold).times(samples.cold_calls)[0]),
        warm_up=samples.warm_up.repetitions,
        stop_reason=samples.stop_reason,
        checks=samples.checks,
        measuring_seconds=samples.measuring_seconds,
        summary=stats.summary(
            over,
            samples.calls,
            common_clock,
            single,
            hidden_launch=result.case.time_definition in LAUNCH_HIDDEN,
        ),
        clock_off_seconds=clock_off_seconds,
    )
    cold = Kept(samples.timed.subgroups)
    cold.add(samples.cold)
    return result, operation_columns(
        result.case.key,
        result.launch,
        cold=cold.rows(),
        warm_up=samples.warm_up.rows(),
        timed=samples.timed.rows(),
        warm_ups=samples.warm_up.repetitions,
    )


def step_columns(case: str, launch: int, samples: steps.Samples) -> dict[str, Any]:
    """Return the SAMPLE_COLUMNS of a DDP step, with entry and exit in ns.

    "CASE/ARM/PHASE" counts from the first step of the round, "CASE/bucket/INDEX" from the begin of
    backward, "CASE/verify" from the begin of the verification. Of the collectives of a sharded
    step, in the order of the calls, "CASE/collective/INDEX/OPERATION/LAYERS/PHASE" counts from the
    begin of the step, and "CASE/exposed/INDEX" is how long the compute waited.
    """
    spans: dict[str, npt.NDArray[np.int64]] = {}  # name → [world, repetition, (entry, exit)]
    for arm, stamps in samples.stamps.items():
        flat = stamps.reshape(stamps.shape[0], -1, 4)
        for i, phase in enumerate(("forward", "backward", "optimizer")):
            spans[f"{case}/{arm}/{phase}"] = flat[:, :, i : i + 2]
    if samples.bucket_stamps is not None:
        for i in range(samples.bucket_stamps.shape[2]):
            spans[f"{case}/bucket/{i}"] = samples.bucket_stamps[:, :, i]
    if samples.timed is not None:
        for i, span in enumerate(samples.timed.spans):
            begin, exposed, end = (samples.timed.ns[:, :, i, column] for column in range(3))
            place = f"{span.operation}/{span.layers}/{span.phase}"
            spans[f"{case}/collective/{i}/{place}"] = np.stack([begin, end], axis=2)
            spans[f"{case}/exposed/{i}"] = np.stack([np.zeros_like(exposed), exposed], axis=2)
    if samples.verify.size:
        spans[f"{case}/verify"] = np.stack([np.zeros_like(samples.verify), samples.verify], axis=2)
    return span_columns(spans, launch)


def operation_columns(
    case: str,
    launch: int,
    *,
    cold: npt.NDArray[Any],
    warm_up: npt.NDArray[Any],
    timed: npt.NDArray[Any],
    warm_ups: int,
) -> dict[str, Any]:
    """Return SAMPLE_COLUMNS of one case. Warm-ups have repetitions below 0, the cold call first.

    cold, warm_up, timed: int64[row, 5] of (repetition, rank, entry, exit, device time or -1) in ns.
    warm_ups: their number, stored or not. Renumbers the rows of cold and warm_up in place.
    """
    import pyarrow as pa

    cold[:, 0] -= 1 + warm_ups
    warm_up[:, 0] -= warm_ups
    repetition, rank, entry, exits, device = np.concatenate([cold, warm_up, timed]).T
    return {
        "case": pa.DictionaryArray.from_arrays(np.zeros(len(rank), np.int32), [case]),
        "launch": np.full(len(rank), launch, dtype=np.int32),
        "repetition": repetition.astype(np.int32),
        "rank": rank.astype(np.int32),
        "entry_ns": entry,
        "exit_ns": exits,
        "device_ns": device,
        "warm_up": repetition < 0,
    }


def span_columns(spans: Mapping[str, npt.NDArray[Any]], launch: int) -> dict[str, Any]:
    """Return SAMPLE_COLUMNS of named spans: int64[world, repetition, 2] of entry and exit in ns."""
    parts = []
    for name, span in spans.items():
        world, count, _ = span.shape
        part = {
            "case": np.full(world * count, name, dtype=object),
            "launch": np.full(world * count, launch, dtype=np.int32),
            "repetition": np.tile(np.arange(count, dtype=np.int32), world),
            "rank": np.repeat(np.arange(world, dtype=np.int32), count),
            "entry_ns": span[:, :, 0].ravel(),
            "exit_ns": span[:, :, 1].ravel(),
            "device_ns": np.full(world * count, -1, dtype=np.int64),
            "warm_up": np.zeros(world * count, dtype=bool),
        }
        parts.append(part)
    return {name: np.concatenate([part[name] for part in parts]) for name in SAMPLE_COLUMNS}
