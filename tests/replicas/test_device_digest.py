"""The digest of tensors on a GPU: computed on the CPU, and followed on a device without memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ddpbench.replicas import digest

MIB = 1 << 20
MOST_NBYTES = 112 * MIB + 1024  # as digest.py states beside BLOCK, and scalars


class Kernels(TorchDispatchMode):
    """Counts the kernels that a GPU would be given, and the memory that they need at most."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.most_nbytes = 0, 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and not func.is_view:
            self.count += 1
            for tensor in tree_leaves(result):
                storage = tensor.untyped_storage()
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._made = {at: made for at, made in self._made.items() if not made[0].expired()}
        self.most_nbytes = max(self.most_nbytes, sum(nbytes for _, nbytes in self._made.values()))
        return result


def follow(tensor: Tensor) -> Kernels:
    """Weigh and add up a tensor of a device as a verification does, up to where it waits."""
    digest._make_weights.cache_clear()
    with Kernels() as kernels:
        results = digest.weigh_words(tensor), digest.total(tensor)
    digest._make_weights.cache_clear()
    assert {each.device for each in results} == {tensor.device}
    return kernels


def test_a_tensor_takes_few_kernels() -> None:
    """A small tensor of any size takes a dozen: weights, words, fold, sums."""
    assert follow(torch.empty(1001, dtype=torch.bfloat16, device="meta")).count <= 12


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex128])
def test_a_large_tensor_takes_a_bounded_memory(dtype: torch.dtype) -> None:
    """1 GiB in one tensor, aligned to words or not."""
    items = 1024 * MIB // dtype.itemsize
    flat = torch.empty(items + 1, dtype=dtype, device="meta")
    for tensor in (flat.narrow(0, 1, items), flat):
        kernels = follow(tensor)
        assert kernels.most_nbytes <= MOST_NBYTES
        assert kernels.count <= 2048


class Dose(Tensor):
    """A tensor with a meaning of its own."""


def test_tensors_of_a_subclass_have_the_digest_of_their_bits() -> None:
    """A model may have parameters of several kinds."""
    ones = torch.ones(3)
    for tensor in (ones.as_subclass(Dose), nn.Parameter(ones)):
        assert digest.weigh_words(tensor) == digest.weigh_words(ones)
        assert type(digest.total(tensor)) is Tensor


@pytest.mark.parametrize("size", [0, 1, 3, 5, 31, 32, 33, 67, 129])
def test_each_byte_and_each_exchange_changes_the_digest(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the begin, in the middle, at the end of a block and in the bytes beyond whole words, also
    of a view that is not aligned to words."""
    monkeypatch.setattr(digest, "BLOCK", 8)
    raw = (torch.arange(size + 1) * 37 % 251).to(torch.uint8)[1:]
    digests = {int(digest.weigh_words(raw))}
    for byte in range(size):
        raw[byte] ^= 1 << byte % 8
        digests.add(int(digest.weigh_words(raw)))
        raw[byte] ^= 1 << byte % 8
    words = torch.arange(size, dtype=torch.int32)
    for other in range(1, size):
        swapped = words.clone()
        swapped[0], swapped[other] = words[other], words[0]
        digests.add(int(digest.weigh_words(swapped)))
    assert len(digests) == 1 + size + max(0, size - 1)


def test_the_fold_gives_different_words_different_values() -> None:
    """Also a word and its inverse, which a shift that copies the sign would give the same value."""
    words = torch.tensor([0, 1, 5, 1 << 31, 1 << 32, (1 << 62) + 7])
    folded = torch.cat([words, ~words])
    digest.fold(folded)
    assert len(set(folded.tolist())) == 12


def test_elements_that_are_not_finite_are_counted() -> None:
    """Of every floating-point dtype and layout; of a sum that overflows, no element is counted."""
    kinds = [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64]
    bad = [torch.tensor([math.nan], dtype=dtype) for dtype in kinds]
    bad += [torch.tensor([math.inf, -math.inf]), torch.ones(7, 9, dtype=torch.float64).t()]
    bad[-1][3, 3] = math.inf
    good = [torch.ones(3, dtype=torch.int8), torch.empty(0), torch.ones(2, dtype=torch.float16)]
    huge = torch.full((9,), torch.finfo(torch.float32).max)
    tensors = [*good, *bad, huge]
    assert digest.read(tensors, range(10))[1].tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 1, 0]
    floats = {i: tensor for i, tensor in enumerate(tensors) if digest.may_be_nonfinite(tensor)}
    assert digest.find_suspects(floats) == [3, 4, 5, 6, 7, 8, 9]
