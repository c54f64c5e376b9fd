"""Digests of whole tensors from their shards: the same however a tensor is sharded.

Each element contributes a mix of its bits and of its index in the whole tensor, flat and in
row-major order. The contributions are added up modulo 2^64, so the digest of a tensor is the sum of
those of its shards. The mix adds the bits to the index times an odd number, and then multiplies by
odd numbers and folds the upper half of the word into the lower one in turn, as the finalisers of
MurmurHash3 and splitmix64 do. All of that is invertible. So another value of one element always
changes the first sum; any other change is missed by both sums with a probability of about 2^-128.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ddpbench.replicas.digest import WORDS, fold, plain

# Elements whose words lie in memory at once, 24 bytes each. On a CPU they fit into its cache.
BLOCK_CPU, BLOCK_DEVICE = 1 << 17, 1 << 22


def _signed(number: int) -> int:
    """Return a number modulo 2^64 as int64 has it."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


_STEP = 0x9E3779B97F4A7C15  # between the words of two neighbours
_FIRST = tuple(map(_signed, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)))  # splitmix64's
_SECOND = _signed(0xFF51AFD7ED558CCD)  # MurmurHash3's


def digest_shard(shard: Tensor, shape: Sequence[int], offsets: Sequence[int]) -> Tensor:
    """Return what a shard contributes to the digest of a tensor: int64[2], on the shard's device.

    shard: a plain tensor; offsets: the index of its first element in the tensor of this shape.
    """
    if shard.is_complex():
        shard = torch.view_as_real(shard.resolve_conj())
        shape, offsets = [*shape, 2], [*offsets, 0]
    strides: list[int] = []
    size = 1
    for n in reversed(shape):
        strides.insert(0, size)
        size *= n
    start = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    total = torch.zeros(2, dtype=torch.int64, device=shard.device)
    for block, position, steps in _blocks(shard.detach(), start, strides):
        total += _mix(block, position, steps)
    return total


def _blocks(
    shard: Tensor, position: int, strides: Sequence[int]
) -> Iterator[tuple[Tensor, int, Sequence[int]]]:
    """Yield the parts of a shard, each with the flat index of its first element and strides."""
    most = BLOCK_CPU if shard.is_cpu else BLOCK_DEVICE
    if shard.numel() == 0:
        return
    if shard.numel() <= most:
        yield shard, position, strides
        return
    rows = most // (shard.numel() // len(shard))
    for i in range(0, len(shard), rows or 1):
        part = shard[i : i + rows] if rows else shard[i]
        yield from _blocks(part, position + i * strides[0], strides if rows else strides[1:])


def _mix(block: Tensor, position: int, strides: Sequence[int]) -> Tensor:
    """Return both sums over a block, int64[2]."""
    words = torch.full((1,), _signed(position * _STEP), device=block.device)
    for n, stride in _join(block.shape, strides):
        steps = torch.arange(n, device=block.device).mul_(_signed(stride * _STEP))
        words = (words[:, None] + steps).flatten()
    words += plain(block).view(-1).view(WORDS[block.itemsize])
    for factor in _FIRST:
        _scramble(words, factor)
    first = words.sum()
    _scramble(words, _SECOND)
    return torch.stack([first, words.sum()])


def _scramble(words: Tensor, factor: int) -> None:
    words.mul_(factor)
    fold(words)


def _join(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """Return (size, stride) of the dimensions, those joined that together step evenly."""
    joined: list[tuple[int, int]] = []
    for n, stride in zip(shape, strides, strict=True):
        if joined and joined[-1][1] == n * stride:
            joined[-1] = joined[-1][0] * n, stride
        else:
            joined.append((n, stride))
    return joined
