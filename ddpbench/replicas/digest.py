"""64-bit digests of the bits of tensors.

Equal bits in the same order give equal digests. Comparing values would not do: -0.0 == 0.0, and
NaN != NaN.

`of_cpu` is xxh3 over memory. `weighted` is for devices whose memory xxh3 cannot read: it multiplies
every 32-bit word by an odd weight, folds it, and sums up in int64 on the device. Small tensors are
joined and large ones are divided, so that a device gets a few long kernels. The two digests are
different functions, so only digests from one kind of device can be compared. The kind of device is
therefore part of a replica's structure (state.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from ddpbench.catalog.payload import mix_bits

Digests = npt.NDArray[np.uint64]
Counts = npt.NDArray[np.int64]
Number = bool | int | float | complex

# Words or elements per block, where a block needs memory of its own. On a device the digest of one
# takes up to 20 bytes per word, and the weights 8: together 112 MiB. A tensor that is not
# contiguous is copied as well. The kernels of a block should take longer than their launch.
BLOCK = 1 << 22
CACHED = 1 << 18  # bytes of a CPU tensor that one core's cache holds
JOINED = 1 << 18  # words or elements up to which a piece shares its kernels with others
STEP = 0x9E3779B97F4A7C15  # odd, so multiplying by it loses no bits
_LOWER = (1 << 32) - 1


def of_bytes(content: Any) -> int:
    """Return the xxh3 digest of bytes or of any contiguous buffer: 0 … 2^64-1."""
    return xxhash.xxh3_64_intdigest(content)


def plain(tensor: Tensor) -> Tensor:
    """Return the tensor detached, contiguous and flat; it is copied only if necessary."""
    with torch._C.DisableTorchFunctionSubclass():  # torch joins no unrelated subclasses
        tensor = tensor.detach()
    # The memory of a lazily conjugated or negated tensor holds other values.
    return tensor.resolve_conj().resolve_neg().reshape(-1).contiguous()


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
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return of_cpu(tensor), False
    flat, size = plain(tensor), CACHED // tensor.itemsize
    memory = flat.view(torch.uint8).numpy().data
    digest, added = xxhash.xxh3_64(), 0.0
    for number, start in enumerate(range(0, flat.numel(), size)):
        digest.update(memory[number * CACHED : (number + 1) * CACHED])
        added += total(flat[start : start + size]).item()
    return digest.intdigest(), not math.isfinite(added)


# --- tensors on a device


@lru_cache(maxsize=16)
def _weights(device: torch.device, count: int) -> Tensor:
    """Return int64[count]: odd and pseudo-random (splitmix64), so no pattern of values cancels."""
    numbers = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(STEP)
    weights = mix_bits(numbers) | np.uint64(1)
    return torch.from_numpy(weights.view(np.int64)).to(device)


Pieces = list[tuple[int, Tensor]]  # a tensor's position, and some of its elements, flat


def _batches(flats: Iterable[tuple[int, Tensor]], unit: int) -> Iterator[Pieces]:
    """Yield small tensors joined, up to BLOCK in all, and each block of a large one alone.

    unit: elements that count as one.
    """
    batch: Pieces = []
    room = BLOCK
    for position, flat in flats:
        size = -(-flat.numel() // unit)
        if size > JOINED:
            yield from ([(position, part)] for part in flat.split(BLOCK * unit))
        elif size:
            if size > room:
                yield batch
                batch, room = [], BLOCK
            batch.append((position, flat))
            room -= size
    if batch:
        yield batch


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _as_words(parts: list[Tensor]) -> Tensor:
    """Return the bytes of all parts as int32, each part filled up to whole words by zeros."""
    if any(part.numel() % 4 or part.storage_offset() % 4 for part in parts):
        zeros = parts[0].new_zeros(4)
        filled = [(part, zeros.narrow(0, 0, -part.numel() % 4)) for part in parts]
        return torch.cat([part for pair in filled for part in pair]).view(torch.int32)
    return _join([part.view(torch.int32) for part in parts])


def fold(words: Tensor) -> None:
    """Fold the upper half of each int64 into its lower half, in place. No two words become one."""
    words.bitwise_xor_((words >> 32).bitwise_and_(_LOWER))  # >> copies the sign of int64


def _weigh_words(parts: list[Tensor]) -> Tensor:
    """Return int64[len(parts)]: the sums of the weighted words up to the end of each part."""
    sizes = [-(-part.numel() // 4) for part in parts]
    words = _as_words(parts)
    # Only two sizes of weights exist, so the cache holds few.
    table = _weights(words.device, JOINED if max(sizes) <= JOINED else BLOCK)
    weights = _join([table.narrow(0, 0, size) for size in sizes])
    terms = words * weights  # modulo 2^64
    del words, weights
    fold(terms)
    if len(sizes) == 1:
        return terms.sum().reshape(1)
    sums = terms.cumsum(0)
    return torch.cat([sums.narrow(0, end - 1, 1) for end in accumulate(sizes)])


def weigh_tensors(tensors: Sequence[Tensor]) -> tuple[Tensor, list[list[int]]]:
    """Return the sums of batches of pieces of tensors on one device, without waiting for it.

    Also returns the position of each piece's tensor, batch by batch.
    """
    flats = ((i, plain(tensor).view(torch.uint8)) for i, tensor in enumerate(tensors))
    sums, positions = [torch.empty(0, dtype=torch.int64, device=tensors[0].device)], []
    for batch in _batches(flats, unit=4):
        sums.append(_weigh_words([part for _, part in batch]))
        positions.append([position for position, _ in batch])
    return torch.cat(sums), positions


def weighted(tensors: Sequence[Tensor]) -> list[int]:
    """Return the digest of each of some tensors on one device: 0 … 2^64-1.

    It depends on the tensor's bits and their order alone. A change of one word always changes it:
    the weight is odd, and the fold and the step between blocks are invertible. Any other change is
    missed with a probability of about 2^-63. A tensor that is not contiguous is copied first.
    """
    if not tensors:
        return []
    sums, batches = weigh_tensors(tensors)
    ends = iter(sums.tolist())
    digests = [0] * len(tensors)
    for batch in batches:
        before = 0
        for position, end in zip(batch, ends, strict=False):
            digests[position] = (digests[position] * STEP + end - before) % (1 << 64)
            before = end
    return digests


def add_up(tensors: Sequence[Tensor]) -> tuple[Tensor, list[list[int]]]:
    """Return the totals of batches of floating-point tensors on one device, without waiting for it.

    Also returns the positions of the tensors, batch by batch.
    """
    dtypes: dict[torch.dtype, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if tensor.is_floating_point() or tensor.is_complex():
            dtypes.setdefault(tensor.dtype, []).append(i)
    totals, positions = [torch.empty(0, device=tensors[0].device)], []
    for dtype, members in dtypes.items():
        flats = ((i, plain(tensors[i])) for i in members)
        for batch in _batches(flats, unit=max(1, 4 // dtype.itemsize)):
            totals.append(total(_join([part for _, part in batch])).float().reshape(1))
            positions.append([i for i, _ in batch])
    return torch.cat(totals), positions


def find_suspects(tensors: Sequence[Tensor]) -> list[int]:
    """Return the positions of the tensors on one device that may have non-finite elements."""
    if not tensors:
        return []
    totals, batches = add_up(tensors)
    sums = zip(totals.tolist(), batches, strict=True)
    return sorted({i for value, batch in sums if not math.isfinite(value) for i in batch})


# --- values


def total(tensor: Tensor) -> Tensor:
    """Return the sum as a float scalar: not finite if an element is not, or if it overflows."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.itemsize > 2:
        return tensor.sum()
    if not tensor.is_cpu:
        return tensor.float().sum() if tensor.itemsize == 1 else tensor.sum(dtype=torch.float32)
    # A CPU widens a copy of all elements before it adds them up.
    sums = [block.float().sum() for block in tensor.reshape(-1).split(BLOCK)]
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


def _blocks(tensor: Tensor) -> Iterator[Tensor]:
    for block in plain(tensor).split(BLOCK):
        # torch cannot compare float8.
        yield block.float() if block.is_floating_point() and block.itemsize == 1 else block


def count_nonfinite(tensor: Tensor) -> int:
    """Count the NaN and infinite elements, block by block."""
    return sum(block.numel() - int(block.isfinite().sum()) for block in _blocks(tensor))


def is_constant(tensor: Tensor) -> bool:
    """Return whether all elements are equal to each other."""
    first = next(_blocks(tensor))[:1]
    return all(bool((block == first).all()) for block in _blocks(tensor))


def as_tensor(value: Tensor | Number) -> Tensor:
    """Return a tensor unchanged, and a number as a tensor of its `number_type`."""
    if isinstance(value, Tensor):
        return value
    return torch.tensor(value, dtype=getattr(torch, number_type(value)))


def number_type(value: Number) -> str:
    """Return the dtype that stands for a number: 1 and 1.0 are the same learning rate."""
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, complex):
        return "complex128"
    # float64 cannot represent all integers beyond 2^53.
    return "int64" if isinstance(value, int) and abs(value) > 1 << 53 else "float64"


# --- many values


def read(
    values: Sequence[Tensor | Number | None], searched: Sequence[int] = ()
) -> tuple[Digests, Counts]:
    """Return a digest, uint64[n], and a count of non-finite elements, int64[n], of each value.

    None has the digest 0. searched: positions of the tensors whose elements are counted; the other
    counts are 0. Waits for a device twice, after all its tensors, or once if none is searched.
    """
    digests, counts = [0] * len(values), np.zeros(len(values), np.int64)
    on_device: dict[torch.device, dict[int, Tensor]] = {}  # by position
    search = {*searched}
    with torch.no_grad():
        for i, value in enumerate(values):
            if isinstance(value, Tensor) and not value.is_cpu:
                on_device.setdefault(value.device, {})[i] = value
            elif isinstance(value, Tensor) and i in search:
                digests[i], suspect = _of_cpu_and_suspect(value)
                counts[i] = count_nonfinite(value) if suspect else 0
            elif value is not None:
                digests[i] = of_cpu(as_tensor(value))
        for tensors in on_device.values():
            for i, digest in zip(tensors, weighted([*tensors.values()]), strict=True):
                digests[i] = digest
            members = [i for i in tensors if i in search]
            for place in find_suspects([tensors[i] for i in members]):
                counts[members[place]] = count_nonfinite(tensors[members[place]])
    return np.array(digests, np.uint64), counts


def choose_share(nbytes: Sequence[int], part: int, parts: int) -> list[int]:
    """Return the positions of the tensors in which a rank looks for elements that are not finite.

    Of n ranks that must hold the same tensors, each looks at about as many bytes: rank i at the
    tensors whose middle byte is in the i-th of n parts of all bytes. nbytes: of each tensor.
    """
    sizes = np.array(nbytes, np.int64)
    middles = sizes.cumsum() - sizes / 2
    chosen: list[int] = np.flatnonzero(middles * parts // max(sizes.sum(), 1) == part).tolist()
    return chosen
