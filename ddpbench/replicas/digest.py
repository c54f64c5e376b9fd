"""64 bits for the bits of a tensor.

Equal bits in the same order give equal digests. What `==` calls equal is not enough (-0.0 == 0.0),
and what it calls different is too much (NaN != NaN).

`of_cpu` is xxh3 over memory as it lies there. `weighted` is for where xxh3 cannot read: every
32-bit word times an odd weight of its own, folded, summed in int64 on the tensor's device, block
after block, so that the memory it needs is bounded. Both see a permutation. They are different
functions: digests can be compared only among tensors on one kind of device, which is therefore part
of a replica's structure (state.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

Digests = npt.NDArray[np.uint64]
Counts = npt.NDArray[np.int64]

BLOCK = 1 << 20  # words, or elements, that are worked on at once where memory is needed for them
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# numpy knows these by name; any other dtype is looked at as whole numbers of its size.
IN_NUMPY = {
    torch.float32, torch.float64, torch.float16, torch.complex64, torch.complex128, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
}  # fmt: skip
_xxh3 = xxhash.xxh3_64_intdigest
_STEP = 0x9E3779B97F4A7C15 | 1  # odd: multiplying by it loses nothing
_SIGNED_STEP = _STEP - (1 << 64)


def of_bytes(content: Any) -> int:
    """xxh3 of bytes, or of any contiguous buffer: 0 … 2^64-1."""
    return _xxh3(content)


def plain(tensor: Tensor) -> Tensor:
    """The tensor's elements in order in memory, without its history; itself where it is so."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():  # the memory is still to be conjugated or negated
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def of_cpu(tensor: Tensor) -> int:
    """xxh3 of a CPU tensor's elements in order, of any dtype and strides: 0 … 2^64-1.

    Contiguous memory is read where it lies; else one copy of the tensor is made and dropped.
    """
    tensor = plain(tensor)
    if tensor.dtype not in IN_NUMPY:
        tensor = tensor.view(WORDS[tensor.itemsize])
    if tensor.numel() == 0:
        return _xxh3(b"")
    return _xxh3(tensor.numpy().data)


@lru_cache(maxsize=16)
def _weights(device: torch.device, count: int) -> Tensor:
    """int64[count]: odd, and random enough that no pattern of values cancels (splitmix64)."""
    with np.errstate(over="ignore"):
        z = (np.arange(1, count + 1, dtype=np.uint64)) * np.uint64(_STEP)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(z.view(np.int64)).to(device)


def _blocks(flat: Tensor) -> Iterator[Tensor]:
    """A flat tensor's parts of up to BLOCK elements."""
    for start in range(0, flat.numel(), BLOCK):
        yield flat[start : start + BLOCK]


def weighted(tensor: Tensor) -> Tensor:
    """int64, no dimensions, on the tensor's device: the digest of any tensor there; no waiting.

    A change of one word always changes it: the weight is odd, the fold and the step from block to
    block can be undone. Any other change is missed with a chance of about 2^-63.
    """
    flat = plain(tensor).reshape(-1)
    words = flat.view(WORDS[min(flat.itemsize, 4)])
    digest = torch.zeros((), dtype=torch.int64, device=tensor.device)
    # Few sizes, so that few sets of weights are kept: small tensors share one.
    weights = _weights(tensor.device, 1 << 12 if words.numel() <= 1 << 12 else BLOCK)
    for block in _blocks(words):
        terms = block * weights[: block.numel()]  # int64, modulo 2^64
        terms = terms.bitwise_xor_(terms >> 32)
        digest = digest * _SIGNED_STEP + terms.sum()
    return digest


# --- values that are no numbers


def total(tensor: Tensor) -> Tensor:
    """A float, no dimensions: not finite if an element is not finite, or else if it overflows."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.itemsize == 1:
        return tensor.float().sum()
    return tensor.sum(dtype=torch.float32) if tensor.itemsize == 2 else tensor.sum()


def count_nonfinite(tensor: Tensor) -> int:
    """How many elements are NaN or infinite, counted block by block."""
    flat = plain(tensor).reshape(-1)
    total = 0
    for block in _blocks(flat):
        wide = block.float() if block.itemsize == 1 else block  # float8 has no isfinite
        total += wide.numel() - int(wide.isfinite().sum())
    return total


def constant(tensor: Tensor, value: float | None = None) -> bool:
    """Whether all elements are equal to each other, or to this value."""
    flat = plain(tensor).reshape(-1)
    if flat.is_floating_point() and flat.itemsize == 1:
        flat = flat.float()  # float8 cannot be compared
    return flat.numel() == 0 or bool((flat == (flat[0] if value is None else value)).all())


# --- many tensors


def read(values: Sequence[Any], finite: bool) -> tuple[Digests, Counts]:
    """Of each tensor or number: its digest, uint64[n], and how many elements of it are not finite,
    int64[n] (0 where `finite` is false, and for numbers: an option may well be infinite).

    A device is waited for once, after all its tensors.
    """
    digests, counts = [0] * len(values), np.zeros(len(values), np.int64)
    away: dict[torch.device, list[int]] = {}
    with torch.no_grad():
        for i, value in enumerate(values):
            if not isinstance(value, Tensor):
                digests[i] = _xxh3(number_bytes(value))
            elif value.is_cpu:
                digests[i] = of_cpu(value)
                if finite and _may_be_nonfinite(value):
                    counts[i] = count_nonfinite(value)
            else:
                away.setdefault(value.device, []).append(i)
        for places in away.values():
            for i, digest, suspect in zip(
                places, *_read_on_device([values[i] for i in places], finite), strict=True
            ):
                digests[i] = digest
                counts[i] = count_nonfinite(values[i]) if suspect else 0
    return np.array(digests, np.uint64), counts


def _may_be_nonfinite(value: Tensor) -> bool:
    # Summing is forty times faster than torch.isfinite, and whatever is not finite stays in a sum.
    if not (value.is_floating_point() or value.is_complex()):
        return False
    return not math.isfinite(total(value).item())


def _read_on_device(tensors: list[Tensor], finite: bool) -> tuple[list[int], list[bool]]:
    """Digests, and whether something may not be finite, of tensors on one device."""
    digests = torch.stack([weighted(t) for t in tensors]).cpu().numpy().view(np.uint64)
    floats = [i for i, t in enumerate(tensors) if t.is_floating_point() or t.is_complex()]
    suspects = [False] * len(tensors)
    if finite and floats:
        sums = [total(tensors[i]).float() for i in floats]
        for i, fine in zip(floats, torch.stack(sums).isfinite().tolist(), strict=True):
            suspects[i] = not fine
    return digests.tolist(), suspects


def as_tensor(value: Any) -> Tensor:
    """What a value is in memory: itself, or a number as bool, float64 or complex128."""
    if isinstance(value, Tensor):
        return value
    return torch.from_numpy(np.frombuffer(number_bytes(value), dtype=number_type(value)).copy())[0]


def number_type(value: bool | int | float | complex) -> str:
    """The dtype as which a number is taken: 1 and 1.0 are the same learning rate."""
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, complex):
        return "complex128"
    # Whole numbers beyond 2^53 are not all there in float64.
    return "int64" if isinstance(value, int) and abs(value) > 1 << 53 else "float64"


def number_bytes(value: bool | int | float | complex) -> bytes:
    """A number's bytes in memory, by `number_type`."""
    return np.array(value, number_type(value)).tobytes()
