"""64-bit digests of the bits of tensors.

Equal bits in the same order give equal digests. Comparing values would not do: -0.0 == 0.0, and
NaN != NaN.

`of_cpu` is xxh3 over memory. `weigh_words` is for devices whose memory xxh3 cannot read: it
multiplies every 32-bit word by an odd weight, folds it, and sums up in int64 on the device. The two
digests are different functions, so only digests from one kind of device can be compared. The kind
of device is therefore part of a replica's structure (state.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from ddpbench.catalog.payload import mix_bits

Digests = npt.NDArray[np.uint64]
Counts = npt.NDArray[np.int64]

# Words or elements per block, where a block needs memory of its own. On a device the digest of one
# takes up to 20 bytes per word, and the weights 8: together 112 MiB. A tensor that is not
# contiguous is copied as well. The kernels of a block should take longer than their launch.
BLOCK = 1 << 22
CACHED = 1 << 18  # bytes of a CPU tensor that one core's cache holds
STEP = 0x9E3779B97F4A7C15  # odd, so multiplying by it loses no bits
_LOWER = (1 << 32) - 1


def of_bytes(content: Any) -> int:
    """Return the xxh3 digest of bytes or of any contiguous buffer: 0 … 2^64-1."""
    return xxhash.xxh3_64_intdigest(content)


def _detach(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():  # torch joins no unrelated subclasses
        return tensor.detach()


def plain(tensor: Tensor) -> Tensor:
    """Return the tensor detached, contiguous and flat; it is copied only if necessary."""
    tensor = _detach(tensor)
    if tensor.is_conj() or tensor.is_neg():  # its memory holds other values
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.contiguous().view(-1)


def of_cpu(tensor: Tensor) -> int:
    """Return the xxh3 digest of a CPU tensor of any dtype and strides: 0 … 2^64-1.

    A tensor that is not contiguous is copied first.
    """
    return of_bytes(plain(tensor).view(torch.uint8).numpy().data)


def _of_cpu_and_suspect(tensor: Tensor) -> tuple[int, bool]:
    """Return the digest, and whether an element may be NaN or infinite, reading memory once.

    Each block is added up while it is in the cache. A sum is forty times faster than
    torch.isfinite, and keeps NaN and infinity.
    """
    if not may_be_nonfinite(tensor):
        return of_cpu(tensor), False
    flat, size = plain(tensor), CACHED // tensor.itemsize
    memory = flat.view(torch.uint8).numpy().data
    digest, added = xxhash.xxh3_64(), 0.0
    for number, start in enumerate(range(0, flat.numel(), size)):
        digest.update(memory[number * CACHED : (number + 1) * CACHED])
        added += _add_up(flat[start : start + size]).item()
    return digest.intdigest(), not math.isfinite(added)


@lru_cache(maxsize=16)
def _make_weights(device: torch.device, count: int) -> Tensor:
    """Return int64[count]: odd and pseudo-random (splitmix64), so no pattern of values cancels."""
    numbers = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(STEP)
    weights = mix_bits(numbers) | np.uint64(1)
    return torch.from_numpy(weights.view(np.int64)).to(device)


def fold(words: Tensor) -> None:
    """Fold the upper half of each int64 into its lower half, in place. No two words become one."""
    words.bitwise_xor_((words >> 32).bitwise_and_(_LOWER))  # >> copies the sign of int64


def weigh_words(tensor: Tensor) -> Tensor:
    """Return the digest of a tensor on any device as an int64 scalar there, without waiting for it.

    It depends on the tensor's bits and their order alone. A change of one word always changes it:
    the weight is odd, and the fold and the step between blocks are invertible. Any other change is
    missed with a probability of about 2^-63. A tensor that is not contiguous is copied first.
    """
    digest: Any = None
    for block in plain(tensor).view(torch.uint8).split(4 * BLOCK):
        if block.numel() % 4 or block.storage_offset() % 4:
            block = torch.cat([block, block.new_zeros(-block.numel() % 4)])
        words = block.view(torch.int32)
        # Few sizes of weights exist, so the cache holds few.
        size = min(BLOCK, max(1 << 16, 1 << (words.numel() - 1).bit_length()))
        terms = words * _make_weights(words.device, size)[: words.numel()]  # modulo 2^64
        fold(terms)
        total = terms.sum()
        digest = total if digest is None else digest * (STEP - (1 << 64)) + total
    result: Tensor = digest  # an empty tensor has an empty block
    return result


# --- values


def may_be_nonfinite(tensor: Tensor) -> bool:
    """Return whether the dtype has NaN and infinity."""
    return tensor.is_floating_point() or tensor.is_complex()


def total(tensor: Tensor) -> Tensor:
    """Return the sum as a float scalar: not finite if an element is not, or if it overflows."""
    return _add_up(_detach(tensor))


def _add_up(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.itemsize > 2:
        return tensor.sum()
    if tensor.itemsize == 2 and not tensor.is_cpu:
        return tensor.sum(dtype=torch.float32)
    # Widen blocks, not a copy of all elements.
    sums = [block.float().sum() for block in tensor.reshape(-1).split(BLOCK)]
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


def count_nonfinite(tensor: Tensor) -> int:
    """Count the NaN and infinite elements, block by block."""
    count = 0
    for block in plain(tensor).split(BLOCK):
        wide = block.float() if block.itemsize == 1 else block  # torch cannot compare float8
        count += wide.numel() - int(wide.isfinite().sum())
    return count


def as_tensor(value: bool | int | float | complex) -> Tensor:
    """Return a number as a tensor: 1 and 1.0 are the same learning rate."""
    if isinstance(value, (bool, complex)):
        return torch.tensor(value)
    return torch.tensor(value, dtype=torch.float64)


# --- many tensors


def read(tensors: Sequence[Tensor | None], searched: Sequence[int] = ()) -> tuple[Digests, Counts]:
    """Return a digest, uint64[n], and a count of non-finite elements, int64[n], of each tensor.

    None has the digest 0. searched: positions of the tensors whose elements are counted; the other
    counts are 0. Waits for a device twice, after all its tensors, or once if none is searched.
    """
    digests, counts = [0] * len(tensors), np.zeros(len(tensors), np.int64)
    on_device: dict[torch.device, list[int]] = {}  # positions
    search = {*searched}
    with torch.no_grad():
        for i, tensor in enumerate(tensors):
            if tensor is None:
                continue
            if not tensor.is_cpu:
                on_device.setdefault(tensor.device, []).append(i)
            elif i in search:
                digests[i], suspect = _of_cpu_and_suspect(tensor)
                counts[i] = count_nonfinite(tensor) if suspect else 0
            else:
                digests[i] = of_cpu(tensor)
        for places in on_device.values():
            members = {i: cast(Tensor, tensors[i]) for i in places}
            found = torch.stack([*map(weigh_words, members.values())])
            for i, digest in zip(members, found.tolist(), strict=True):
                digests[i] = digest % (1 << 64)
            floats = {i: t for i, t in members.items() if i in search and may_be_nonfinite(t)}
            for i in find_suspects(floats):
                counts[i] = count_nonfinite(floats[i])
    return np.array(digests, np.uint64), counts


def find_suspects(tensors: Mapping[int, Tensor]) -> list[int]:
    """Return the keys of the tensors on one device that may have non-finite elements."""
    if not tensors:
        return []
    totals = torch.stack([total(tensor).float() for tensor in tensors.values()])
    finite = zip(tensors, totals.isfinite().tolist(), strict=True)
    return [key for key, is_finite in finite if not is_finite]
