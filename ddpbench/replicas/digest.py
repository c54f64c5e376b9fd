"""64-bit digests of the bits of tensors.

Equal bits in the same order give equal digests. Comparing values would not do: -0.0 == 0.0, and
NaN != NaN.

`of_cpu` is xxh3 over memory. `weighted` is for devices whose memory xxh3 cannot read: it multiplies
every 32-bit word by an odd weight, folds it, and sums up in int64 on the device. It works block by
block, which bounds its memory. Both digests change with the order of elements. They are different
functions, so only digests from one kind of device can be compared. The kind of device is therefore
part of a replica's structure (state.py).
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

BLOCK = 1 << 20  # words or elements per block, where a block needs memory of its own
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Tensors of other dtypes are viewed as integers of the same size.
IN_NUMPY = {
    torch.float32,
    torch.float64,
    torch.float16,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
}
_xxh3 = xxhash.xxh3_64_intdigest
_STEP = 0x9E3779B97F4A7C15 | 1  # odd, so multiplying by it loses no bits
_SIGNED_STEP = _STEP - (1 << 64)


def of_bytes(content: Any) -> int:
    """Return the xxh3 digest of bytes or of any contiguous buffer: 0 … 2^64-1."""
    return _xxh3(content)


def plain(tensor: Tensor) -> Tensor:
    """Return the tensor detached and contiguous; it is copied only if necessary."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():  # its memory holds other values
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def of_cpu(tensor: Tensor) -> int:
    """Return the xxh3 digest of a CPU tensor of any dtype and strides: 0 … 2^64-1.

    A tensor that is not contiguous is copied first.
    """
    tensor = plain(tensor)
    if tensor.dtype not in IN_NUMPY:
        tensor = tensor.view(WORDS[tensor.itemsize])
    if tensor.numel() == 0:
        return _xxh3(b"")
    return _xxh3(tensor.numpy().data)


@lru_cache(maxsize=16)
def _weights(device: torch.device, count: int) -> Tensor:
    """Return int64[count]: odd and pseudo-random (splitmix64), so no pattern of values cancels."""
    with np.errstate(over="ignore"):
        z = (np.arange(1, count + 1, dtype=np.uint64)) * np.uint64(_STEP)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(z.view(np.int64)).to(device)


def _blocks(flat: Tensor) -> Iterator[Tensor]:
    """Yield the parts of a flat tensor, of up to BLOCK elements."""
    for start in range(0, flat.numel(), BLOCK):
        yield flat[start : start + BLOCK]


def weighted(tensor: Tensor) -> Tensor:
    """Return the digest as an int64 scalar on the tensor's device, without waiting for it.

    A change of one word always changes the digest: the weight is odd, and the fold and the step
    between blocks are invertible. Any other change is missed with a probability of about 2^-63.
    """
    flat = plain(tensor).reshape(-1)
    words = flat.view(WORDS[min(flat.itemsize, 4)])
    digest = torch.zeros((), dtype=torch.int64, device=tensor.device)
    # Only two sizes of weights exist, so the cache holds few.
    weights = _weights(tensor.device, 1 << 12 if words.numel() <= 1 << 12 else BLOCK)
    for block in _blocks(words):
        terms = block * weights[: block.numel()]  # int64, modulo 2^64
        terms = terms.bitwise_xor_(terms >> 32)
        digest = digest * _SIGNED_STEP + terms.sum()
    return digest


# --- values that are not finite


def total(tensor: Tensor) -> Tensor:
    """Return the sum as a float scalar: not finite if an element is not, or if it overflows."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.itemsize == 1:
        return tensor.float().sum()
    return tensor.sum(dtype=torch.float32) if tensor.itemsize == 2 else tensor.sum()


def count_nonfinite(tensor: Tensor) -> int:
    """Count the NaN and infinite elements, block by block."""
    flat = plain(tensor).reshape(-1)
    total = 0
    for block in _blocks(flat):
        wide = block.float() if block.itemsize == 1 else block  # float8 has no isfinite
        total += wide.numel() - int(wide.isfinite().sum())
    return total


def constant(tensor: Tensor, value: float | None = None) -> bool:
    """Return whether all elements are equal to each other, or to `value`."""
    flat = plain(tensor).reshape(-1)
    if flat.is_floating_point() and flat.itemsize == 1:
        flat = flat.float()  # float8 cannot be compared
    return flat.numel() == 0 or bool((flat == (flat[0] if value is None else value)).all())


# --- many tensors


def read(values: Sequence[Any], finite: bool) -> tuple[Digests, Counts]:
    """Return a digest, uint64[n], and a non-finite count, int64[n], of each tensor or number.

    The count is 0 if `finite` is false, and for numbers, because an option may be infinite. Waits
    for a device once, after all its tensors.
    """
    digests, counts = [0] * len(values), np.zeros(len(values), np.int64)
    on_device: dict[torch.device, list[int]] = {}  # positions
    with torch.no_grad():
        for i, value in enumerate(values):
            if not isinstance(value, Tensor):
                digests[i] = _xxh3(number_bytes(value))
            elif value.is_cpu:
                digests[i] = of_cpu(value)
                if finite and _may_be_nonfinite(value):
                    counts[i] = count_nonfinite(value)
            else:
                on_device.setdefault(value.device, []).append(i)
        for positions in on_device.values():
            rows = _read_on_device([values[i] for i in positions], finite)
            for i, digest, suspect in zip(positions, *rows, strict=True):
                digests[i] = digest
                counts[i] = count_nonfinite(values[i]) if suspect else 0
    return np.array(digests, np.uint64), counts


def _may_be_nonfinite(value: Tensor) -> bool:
    # A sum is forty times faster than torch.isfinite, and keeps NaN and infinity.
    if not (value.is_floating_point() or value.is_complex()):
        return False
    return not math.isfinite(total(value).item())


def _read_on_device(tensors: list[Tensor], finite: bool) -> tuple[list[int], list[bool]]:
    """Return digests of tensors on one device, and whether each may have non-finite elements."""
    digests = torch.stack([weighted(t) for t in tensors]).cpu().numpy().view(np.uint64)
    floats = [i for i, t in enumerate(tensors) if t.is_floating_point() or t.is_complex()]
    suspects = [False] * len(tensors)
    if finite and floats:
        sums = [total(tensors[i]).float() for i in floats]
        for i, finite_sum in zip(floats, torch.stack(sums).isfinite().tolist(), strict=True):
            suspects[i] = not finite_sum
    return digests.tolist(), suspects


def as_tensor(value: Any) -> Tensor:
    """Return a tensor unchanged, and a number as a tensor of its `number_type`."""
    if isinstance(value, Tensor):
        return value
    return torch.from_numpy(np.frombuffer(number_bytes(value), dtype=number_type(value)).copy())[0]


def number_type(value: bool | int | float | complex) -> str:
    """Return the dtype that stands for a number: 1 and 1.0 are the same learning rate."""
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, complex):
        return "complex128"
    # float64 cannot represent all integers beyond 2^53.
    return "int64" if isinstance(value, int) and abs(value) > 1 << 53 else "float64"


def number_bytes(value: bool | int | float | complex) -> bytes:
    """Return the bytes of a number in memory, as its `number_type`."""
    return np.array(value, number_type(value)).tobytes()
