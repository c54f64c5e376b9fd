"""Compare the tensors whose digests differ, element by element.

One rank sends its bits in pieces. Every other rank compares its own bits with them and keeps a few
numbers. Therefore no rank holds more than a piece, and each rank contributes one row of numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ddpbench.catalog.payload import mix_bits
from ddpbench.replicas.channel import Channel
from ddpbench.replicas.digest import STEP, plain
from ddpbench.replicas.report import Detail

PIECE_NBYTES = 4 << 20
Bytes = npt.NDArray[np.uint8]


class Part(NamedTuple):
    """A rank's part of a tensor, which it sends to the other ranks: the whole tensor or a shard."""

    dtype: str  # "float32"
    shape: Sequence[int]
    offsets: Sequence[int] | None  # in the tensor; None: the shard's elements are not contiguous
    whole: Sequence[int] = ()  # shape of the tensor
    shard: int = 1  # its number, from 1; 0 outside of the tensor's mesh
    shards: int = 1
    ranks: Sequence[int] = ()  # the scope
    digest: int = 0
    nonfinite: int = 0  # number of elements


def gather_details(
    channel: Channel, tensor: Tensor | None, part: Part, sides: list[list[int]]
) -> tuple[Detail, ...]:
    """Compare the elements with those of the first rank of `sides`, which are places of ranks.

    Every rank of the channel calls it, with the tensor of `part` if it is in `sides`, else with
    None. Returns a detail for each of the other sides.
    """
    reference = sides[0][0]
    rows = channel.gather_objects(_broadcast_and_compare(channel, tensor, part, reference))
    return tuple(
        Detail(
            ranks=tuple(channel.ranks[place] for place in places),
            reference=channel.ranks[reference],
            elements=math.prod(part.shape),
            **{**rows[places[0]], "index": tuple(rows[places[0]]["index"])},
        )
        for places in sides[1:]
    )


def _broadcast_and_compare(
    channel: Channel, tensor: Tensor | None, part: Part, source: int
) -> dict[str, Any]:
    """Compare this rank's elements with those of the rank at `source`: fields of a Detail."""
    dtype: torch.dtype = getattr(torch, part.dtype)
    size, length = dtype.itemsize, math.prod(part.shape)
    flat = None if tensor is None else plain(tensor).view(torch.uint8)
    count = PIECE_NBYTES // max(size, 8)  # each element is compared in several arrays of 8 bytes
    differing, first, ends = 0, 0, (bytes(size), bytes(size))
    multiset, deltas = 0, [-1.0]
    for start in range(0, length, count):
        own: Bytes = np.zeros((min(count, length - start), size), np.uint8)
        if flat is not None:
            piece = flat[start * size : start * size + own.size]
            own = piece.cpu().numpy().reshape(own.shape)
        other = channel.broadcast_bytes(own.reshape(-1), source).reshape(own.shape)
        places = np.flatnonzero((own != other).any(axis=1))
        if places.size == 0:
            continue
        own, other = own[places], other[places]
        if not differing:
            first, ends = start + int(places[0]), (own[0].tobytes(), other[0].tobytes())
        differing += places.size
        multiset += _mix(own) - _mix(other)
        deltas.append(_max_delta(own, other, dtype))
    index: tuple[Any, ...] = ()
    if part.shape and part.offsets is not None:
        index = np.unravel_index(first, part.shape)
    changed = int.from_bytes(ends[0], "little") ^ int.from_bytes(ends[1], "little")
    one_bit = differing == 1 and changed.bit_count() == 1
    value, reference_value = _format_elements(ends, dtype)
    return {
        "differing": differing,
        "index": [int(i) + begin for i, begin in zip(index, part.offsets or (), strict=True)],
        "value": value,
        "reference_value": reference_value,
        "max_delta": None if max(deltas) < 0 else max(deltas),
        "bit": changed.bit_length() - 1 if one_bit else None,
        "permuted": differing > 1 and multiset % (1 << 64) == 0,
    }


def _mix(elements: Bytes) -> int:
    """Hash uint8[n, itemsize] to a number modulo 2^64 that does not depend on their order."""
    words = np.ascontiguousarray(elements).view(f"u{min(8, elements.shape[1])}")
    mixed = np.zeros(len(elements), np.uint64)
    for column in words.T.astype(np.uint64):
        mixed = mix_bits((mixed ^ column) + np.uint64(STEP))
    return int(mixed.sum(dtype=np.uint64))


def _max_delta(own: Bytes, other: Bytes, dtype: torch.dtype) -> float:
    """Return the largest |Δ| of elements that are finite in both, in float64; -1 if none is."""
    wide = torch.complex128 if dtype.is_complex else torch.float64
    a, b = (torch.from_numpy(each.reshape(-1)).view(dtype).to(wide) for each in (own, other))
    deltas = (a - b).abs()
    deltas = deltas[a.isfinite() & b.isfinite()]
    return float(deltas.max()) if deltas.numel() else -1.0


def _format_elements(elements: Sequence[bytes], dtype: torch.dtype) -> list[str]:
    """Return elements in the fewest digits that identify them; if need be with their bits."""
    texts = []
    for element in elements:
        value = torch.frombuffer(bytearray(element), dtype=dtype)[0].item()
        texts.append(str(np.float32(value)) if dtype == torch.float32 else repr(value))
    if len({*texts}) == 1 or any("nan" in text for text in texts):
        pairs = zip(texts, elements, strict=True)
        return [f"{text} (0x{element[::-1].hex()})" for text, element in pairs]
    return texts
