"""Compare the tensors whose digests differ, element by element.

One rank sends its bits in pieces. Every other rank compares its own bits with them and keeps a few
numbers. So no rank holds more than a piece, and each rank contributes one row of numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ddpbench.replicas.channel import Channel, Int64
from ddpbench.replicas.digest import WORDS
from ddpbench.replicas.report import Detail

PIECE_NBYTES = 4 << 20
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Form:
    """What a rank holds of a tensor: all of it or a shard."""

    dtype: torch.dtype
    shape: tuple[int, ...]  # of the shard
    offsets: tuple[int, ...] | None  # of the shard in the tensor; None: it does not lie together


def by_value(digests: Int64) -> list[list[int]]:
    """Group the places of equal digests of int64[ranks]: largest first, then by lowest place."""
    places: dict[int, list[int]] = {}
    for place, digest in enumerate(digests.tolist()):
        places.setdefault(digest, []).append(place)
    return sorted(places.values(), key=lambda group: (-len(group), group[0]))


def gather_details(
    channel: Channel, tensor: Tensor, form: Form, values: list[list[int]]
) -> tuple[Detail, ...]:
    """Compare the elements with those of the first rank of `values`.

    Every rank of the channel calls it with a tensor of the same size, in `values` or not.
    """
    reference = values[0][0]
    rows = channel.gather_rows(_broadcast_and_compare(channel, tensor, reference))
    return tuple(
        _detail(channel, form, places, reference, rows[places[0]]) for places in values[1:]
    )


def _piece(tensor: Tensor, start: int, stop: int) -> Bytes:
    """Return the bytes of elements start … stop-1 in order, for any strides and device."""
    if tensor.is_contiguous():
        part = tensor.view(-1)[start:stop]
    else:  # reshape would copy the whole
        if not tensor.is_complex():  # torch takes no float8 and few unsigned dtypes
            tensor = tensor.resolve_neg().view(WORDS[tensor.itemsize])
        part = tensor.take(torch.arange(start, stop, device=tensor.device))
    part = part.resolve_conj().resolve_neg().cpu().contiguous()
    return cast(Bytes, part.view(torch.uint8).numpy())


_FIELDS = ("differing", "first", "max_delta", "multiset", "own", "own2", "other", "other2")


def _broadcast_and_compare(channel: Channel, tensor: Tensor, source: int) -> Int64:
    """Compare this rank's elements with those of the rank at `source`: int64[8], as _FIELDS."""
    tensor = tensor.detach()
    # Each element is compared in several arrays of eight bytes.
    count = PIECE_NBYTES // max(tensor.itemsize, 8)
    differing, first, most, multiset = 0, -1, -1.0, 0
    ends = np.zeros((2, 16), np.uint8)
    for start in range(0, tensor.numel(), count):
        own = _piece(tensor, start, min(start + count, tensor.numel()))
        other = channel.broadcast_bytes(own, source)
        elements = [a.reshape(-1, tensor.itemsize) for a in (own, other)]
        words = [_words(a) for a in elements]
        places = np.flatnonzero((words[0] != words[1]).any(axis=1))
        if places.size == 0:
            continue
        if first < 0:
            first = start + int(places[0])
            for end, rows in zip(ends, elements, strict=True):
                end[: tensor.itemsize] = rows[places[0]]
        differing += places.size
        changed = [a[places] for a in elements]
        multiset += sum(
            sign * int(_mixed(_words(a)).sum(dtype=np.uint64))
            for sign, a in zip((1, -1), changed, strict=True)
        )
        most = max(most, _max_delta(changed, tensor.dtype))
    tail = ends.view(np.int64).reshape(-1).tolist()
    delta = int(np.float64(most).view(np.int64))
    return np.array([differing, first, delta, int(multiset % (1 << 64) != 0), *tail], np.int64)


def _words(elements: Bytes) -> npt.NDArray[Any]:
    """View uint8[n, itemsize] as unsigned words of up to 64 bits: [n, 1], or [n, 2] of 16 bytes."""
    size = min(8, elements.shape[1])
    return np.ascontiguousarray(elements).view(f"u{size}")


def _mixed(words: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Hash words[n, k] to uint64[n]; the sum of the hashes identifies a set of elements."""
    with np.errstate(over="ignore"):
        z = np.zeros(len(words), np.uint64)
        for column in words.T.astype(np.uint64):
            z = (z ^ column) + np.uint64(0x9E3779B97F4A7C15)
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            z ^= z >> np.uint64(31)
    return z


def _max_delta(elements: Sequence[Bytes], dtype: torch.dtype) -> float:
    """Return the largest |Δ| of elements that are finite in both, in float64; -1 if none is."""
    wide = torch.complex128 if dtype.is_complex else torch.float64
    a, b = (torch.from_numpy(e.reshape(-1)).view(dtype).to(wide) for e in elements)
    deltas = (a - b).abs()
    deltas = deltas[a.isfinite() & b.isfinite()]
    return float(deltas.max()) if deltas.numel() else -1.0


def _detail(channel: Channel, form: Form, places: list[int], reference: int, row: Int64) -> Detail:
    fields = dict(zip(_FIELDS, row.tolist(), strict=True))
    size, dtype = form.dtype.itemsize, form.dtype
    own, other = row[4:6].tobytes()[:size], row[6:8].tobytes()[:size]
    changed = int.from_bytes(own, "little") ^ int.from_bytes(other, "little")
    one = fields["differing"] == 1 and changed.bit_count() == 1
    texts = text(own, dtype), text(other, dtype)
    if texts[0] == texts[1] or "nan" in texts[0] + texts[1]:
        texts = f"{texts[0]} ({_hex(own)})", f"{texts[1]} ({_hex(other)})"
    index: tuple[Any, ...] = ()
    if form.shape and form.offsets is not None:
        index = np.unravel_index(max(0, fields["first"]), form.shape)
    delta = float(row[2:3].view(np.float64)[0])
    return Detail(
        ranks=tuple(channel.ranks[place] for place in places),
        reference=channel.ranks[reference],
        elements=math.prod(form.shape),
        differing=fields["differing"],
        index=tuple(int(i) + start for i, start in zip(index, form.offsets or (), strict=True)),
        value=texts[0],
        reference_value=texts[1],
        max_delta=None if delta < 0 else delta,
        bit=changed.bit_length() - 1 if one else None,
        permuted=fields["differing"] > 1 and fields["multiset"] == 0,
    )


def text(element: bytes, dtype: torch.dtype) -> str:
    """Return the value of an element, in the fewest digits that identify it in its dtype."""
    value = torch.frombuffer(bytearray(element), dtype=dtype)[0]
    if dtype == torch.float32:
        return str(np.float32(value.item()))
    return repr(value.item())


def _hex(element: bytes) -> str:
    return f"0x{int.from_bytes(element, 'little'):0{2 * len(element)}x}"
