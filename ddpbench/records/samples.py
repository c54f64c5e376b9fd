"""Lay out raw samples: one row per rank and repetition."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy.typing as npt

SAMPLE_COLUMNS = (
    "case",
    "launch",
    "repetition",
    "rank",
    "entry_ns",
    "exit_ns",
    "device_ns",
    "warm_up",
)


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
    import numpy as np
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
    import numpy as np

    parts = [_columns_of_span(name, span, launch) for name, span in spans.items()]
    return {name: np.concatenate([part[name] for part in parts]) for name in SAMPLE_COLUMNS}


def _columns_of_span(name: str, spans: npt.NDArray[Any], launch: int) -> dict[str, Any]:
    import numpy as np

    world, count, _ = spans.shape
    return {
        "case": np.full(world * count, name, dtype=object),
        "launch": np.full(world * count, launch, dtype=np.int32),
        "repetition": np.tile(np.arange(count, dtype=np.int32), world),
        "rank": np.repeat(np.arange(world, dtype=np.int32), count),
        "entry_ns": spans[:, :, 0].ravel(),
        "exit_ns": spans[:, :, 1].ravel(),
        "device_ns": np.full(world * count, -1, dtype=np.int64),
        "warm_up": np.zeros(world * count, dtype=bool),
    }
