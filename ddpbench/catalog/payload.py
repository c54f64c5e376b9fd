"""Inputs whose results are known exactly, in any order of the reduction.

Element i of rank r's buffer in generation g is `table(r, g)[i % PERIOD]`: small integers (products:
powers of two), chosen so that every partial result is exact in the dtype. PERIOD is a prime, so
data that is shifted by a block differs. Each checked repetition has a new generation, so a stale
output is detected. Outputs are poisoned first, so an output without a write is detected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ddpbench.catalog.dtypes import DTYPES
from ddpbench.catalog.operations import Piece

if TYPE_CHECKING:
    import torch

PERIOD = 1021
STRETCH = 2**14  # periods compared at once


def table(
    rank: int, generation: int, dtype: str, reduce_op: str | None, world_size: int
) -> npt.NDArray[np.float64]:
    """Return one period of a rank's input, float64[PERIOD], exact in `dtype`.

    Every element affects the result: no summand is 0 and no factor of a floating type is 1. If the
    world is too large for the dtype, the ranks take turns with such elements.
    """
    kind = DTYPES[dtype]
    index = np.arange(PERIOD, dtype=np.uint64)
    mixed: Any = mix_bits(index + np.uint64(PERIOD * (rank + 1)) + np.uint64(generation * 2**40))
    if reduce_op == "prod":
        turns = -(-world_size // kind.doublings)
        active = (index + np.uint64(rank + generation)) % np.uint64(turns) == 0
        most = np.uint64(max(1, kind.doublings // world_size))
        exponent = ((mixed >> np.uint64(1)) % most).astype(np.float64) + 1.0
        sign = np.where((mixed & np.uint64(1) == 0) & kind.floating, -1.0, 1.0)
        return np.where(active, np.exp2(sign * exponent), 1.0)
    if reduce_op not in ("sum", "avg"):
        numbers: npt.NDArray[np.float64] = 1.0 + mixed % np.uint64(kind.exact - 1)
        return numbers
    # An average over n ranks is exact if all inputs are multiples of n, or n is a power of two.
    shifts = kind.floating and world_size & (world_size - 1) == 0
    unit = world_size if reduce_op == "avg" and not shifts else 1
    if world_size * unit <= kind.exact:
        most = np.uint64(kind.exact // (world_size * unit))
        multiples: npt.NDArray[np.float64] = (1.0 + mixed % most) * unit
        return multiples
    turns = -(-world_size // kind.exact)
    return np.where((index + np.uint64(rank + generation)) % np.uint64(turns) == 0, 1.0, 0.0)


def reduced(
    generation: int, dtype: str, reduce_op: str, world_size: int
) -> npt.NDArray[np.float64]:
    """Return one period of the reduction over all ranks, float64[PERIOD], exact in any order."""
    total = table(0, generation, dtype, reduce_op, world_size)
    combine: Any = {"sum": np.add, "avg": np.add, "prod": np.multiply, "min": np.minimum}.get(
        reduce_op, np.maximum
    )
    for rank in range(1, world_size):
        total = combine(total, table(rank, generation, dtype, reduce_op, world_size))
    return np.divide(total, world_size) if reduce_op == "avg" else total


def mix_bits(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Map neighbouring numbers, uint64[…], to unrelated ones, with the finaliser of splitmix64.

    Sums and products are modulo 2^64.
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed


def fill(buffer: torch.Tensor, values: npt.NDArray[np.float64]) -> None:
    """Fill `buffer` with repetitions of `values`: any dtype, one dimension, any device."""
    period = _tensor(values, buffer)
    whole = buffer.numel() // PERIOD
    buffer[: whole * PERIOD].view(-1, PERIOD).copy_(period)
    buffer[whole * PERIOD :].copy_(period[: buffer.numel() - whole * PERIOD])


def poison(buffer: torch.Tensor) -> None:
    """Fill with a value that no result contains: NaN, -1 for integers, 0 for unsigned ones."""
    kind = DTYPES[str(buffer.dtype).removeprefix("torch.")]
    buffer.fill_(float("nan") if kind.floating else 0 if buffer.dtype.is_signed is False else -1)


def find_wrong(
    buffer: torch.Tensor, piece: Piece, values: npt.NDArray[np.float64], tolerance: float = 0.0
) -> tuple[int, str, str] | None:
    """Find the first element of `piece` that differs from `values`: (index, expected, got).

    The index counts in the buffer. Numbers are compared bit by bit; none is 0 or NaN. `tolerance`
    is relative. Averages need it if the number of ranks is not a power of two: a backend may scale
    before it sums.
    """
    period = _tensor(np.roll(values, -(piece.offset % PERIOD)), buffer)
    part = buffer[piece.start : piece.start + piece.length]
    whole = part.numel() // PERIOD
    body = part[: whole * PERIOD].view(-1, PERIOD)
    # Compare in stretches: the memory that a comparison takes must not grow with the buffer.
    stretches = [(row * PERIOD, body[row : row + STRETCH]) for row in range(0, whole, STRETCH)]
    for base, got in [*stretches, (whole * PERIOD, part[whole * PERIOD :])]:
        if got.numel() == 0:
            continue
        expected = period.expand_as(got) if got.dim() == 2 else period[: got.numel()]
        index = _first_difference(got, expected, tolerance)
        if index is not None:
            flat = base + index
            return (
                piece.start + flat,
                f"{float(period[flat % PERIOD]):.16g}",
                f"{float(part[flat]):.16g}",
            )
    return None


def _first_difference(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> int | None:
    import torch

    if tolerance:
        same = (got.double() - expected.double()).abs() <= tolerance * expected.double().abs()
    elif got.dtype.itemsize == 1 and got.dtype.is_floating_point:
        same = got.view(torch.uint8) == expected.view(torch.uint8)
    else:
        same = got == expected
    if bool(same.all()):
        return None
    return int((~same).reshape(-1).to(dtype=torch.uint8).argmax())


def _tensor(values: npt.NDArray[np.float64], like: torch.Tensor) -> torch.Tensor:
    import torch

    # Converted on the CPU: not every kind of device has float64.
    return torch.from_numpy(values).to(like.dtype).to(like.device)
