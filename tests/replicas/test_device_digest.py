"""The digest of tensors on a GPU: computed on the CPU, and followed on a device without memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ddpbench.replicas import digest
from ddpbench.replicas.origin import Tracer

MIB = 1 << 20
MOST_NBYTES = 112 * MIB  # as digest.py states beside BLOCK
CAT_TENSORS = 128  # that torch joins in one kernel: CAT_ARRAY_BATCH_SIZE of its Shape.cu


class Kernels(TorchDispatchMode):
    """Counts the kernels that a GPU would be given, and the memory that they need at most."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.most_nbytes = 0, 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and not func.is_view:
            joined = func is torch.ops.aten.cat.default
            self.count += -(-len(args[0]) // CAT_TENSORS) if joined else 1
            for tensor in tree_leaves(result):
                storage = tensor.untyped_storage()
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._made = {at: made for at, made in self._made.items() if not made[0].expired()}
        self.most_nbytes = max(self.most_nbytes, sum(nbytes for _, nbytes in self._made.values()))
        return result


@pytest.fixture
def gpu() -> Iterator[torch.device]:
    """A device whose tensors have no memory: kernels are checked, not run, and nothing is read."""
    digest._weights.cache_clear()
    yield torch.device("meta")
    digest._weights.cache_clear()


def follow(tensors: list[Tensor]) -> Kernels:
    """Weigh tensors of a device as a verification does, up to the moment that it waits."""
    with Kernels() as kernels:
        sums, batches = digest.weigh_tensors(tensors)
        totals, _ = digest.add_up(tensors)
    assert {each.device for each in (sums, totals)} == {tensors[0].device}
    assert len(sums) == sum(map(len, batches))
    return kernels


def test_a_model_of_a_thousand_tensors_takes_some_dozens_of_kernels(gpu: torch.device) -> None:
    """Digests and sums of small tensors share their kernels, with odd sizes and several dtypes."""
    kinds = (torch.float32, torch.bfloat16, torch.int64)
    tensors = [torch.empty(1 + i, dtype=kinds[i % 3], device=gpu) for i in range(1000)]
    assert follow(tensors).count <= 60


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex128])
def test_a_large_tensor_takes_a_bounded_memory(gpu: torch.device, dtype: torch.dtype) -> None:
    """1 GiB in one tensor, aligned to words or not, and tensors that are just small enough."""
    items = 1024 * MIB // dtype.itemsize
    flat = torch.empty(items + 1, dtype=dtype, device=gpu)
    small = [torch.empty(MIB // dtype.itemsize, dtype=dtype, device=gpu)] * 64
    for tensors in ([flat.narrow(0, 1, items)], [flat], small):
        kernels = follow(tensors)
        assert kernels.most_nbytes <= MOST_NBYTES
        assert kernels.count <= 1024


# --- digests of many tensors -------------------------------------------------------------------


def mixed() -> list[Tensor]:
    """Tensors of all sizes around words and blocks, of several dtypes, strides and offsets."""
    sizes = [0, 1, 3, 4, 5, 16, 17, 31, 32, 33, 35, 64, 67, 129]
    flat = [(torch.arange(size) * 37 % 251).to(torch.uint8) for size in sizes]
    floats = torch.arange(60.0).view(6, 10)
    halves = floats.to(torch.bfloat16).view(-1)
    views = [floats.t(), floats[:, ::3], halves[1:], halves[3:8], halves[2], halves.view(6, 10).t()]
    complexes = torch.complex(floats, -floats)
    return [*flat, floats, *views, complexes.conj(), complexes.conj().imag, floats > 20]


@pytest.fixture(params=[(8, 4), (digest.BLOCK, digest.JOINED)])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks so small that the tensors of `mixed` have many, and those of a verification."""
    monkeypatch.setattr(digest, "BLOCK", request.param[0])
    monkeypatch.setattr(digest, "JOINED", request.param[1])


@pytest.mark.usefixtures("blocks")
def test_a_digest_does_not_depend_on_other_tensors() -> None:
    """Ranks that lack a tensor, or lay it out in another way, agree on the digests of the rest."""
    tensors = mixed()
    together = digest.weighted(tensors)
    assert together == [digest.weighted([tensor])[0] for tensor in tensors]
    assert together == digest.weighted(tensors[::-1])[::-1]
    assert together == digest.weighted([t.resolve_conj().clone().contiguous() for t in tensors])
    assert digest.weighted([]) == []


class Dose(Tensor):
    """A tensor with a meaning of its own."""


class Distance(Tensor):
    """Another."""


def test_tensors_of_unrelated_subclasses_are_joined() -> None:
    """A model may have parameters of several kinds, which torch refuses to join."""
    ones = torch.ones(3)
    kinds = [ones.as_subclass(Dose), ones.as_subclass(Distance), nn.Parameter(ones)]
    assert digest.weighted(kinds) == digest.weighted([ones] * 3)
    assert digest.find_suspects(kinds) == []


@pytest.mark.usefixtures("blocks")
def test_each_byte_changes_the_digest_of_its_tensor_alone() -> None:
    """At the begin, in the middle, at the end of a block and in the bytes beyond whole words."""
    tensors = [t for t in mixed() if t.is_contiguous() and not (t.is_conj() or t.is_neg())]
    before = digest.weighted(tensors)
    for i, tensor in enumerate(tensors):
        raw = tensor.reshape(-1).view(torch.uint8)
        for byte in range(raw.numel()):
            raw[byte] ^= 1 << byte % 8
            after = digest.weighted(tensors)
            raw[byte] ^= 1 << byte % 8
            changed = [j for j in range(len(tensors)) if before[j] != after[j]]
            shares = [j for j in changed if tensors[j].data_ptr() != tensor.data_ptr()]
            assert i in changed
            assert all(tensors[j].dtype == torch.bfloat16 for j in shares)  # views of one memory


@pytest.mark.usefixtures("blocks")
def test_a_permutation_within_and_between_tensors_is_seen() -> None:
    """Two words exchanged, also across blocks, and two whole blocks exchanged."""
    words = torch.arange(70, dtype=torch.int32)
    digests = [digest.weighted([words, words])[0]]
    for other in range(1, 70):
        swapped = words.clone()
        swapped[0], swapped[other] = words[other], words[0]
        digests.append(digest.weighted([words, swapped])[1])
    rolled = torch.cat([words[8:16], words[:8], words[16:]])
    digests.append(digest.weighted([words, rolled])[1])
    assert len(set(digests)) == len(digests)


def test_the_fold_gives_different_words_different_values() -> None:
    """Also a word and its inverse, which a shift that copies the sign would give the same value."""
    words = torch.tensor([0, 1, 5, 1 << 31, 1 << 32, (1 << 62) + 7])
    folded = torch.cat([words, ~words])
    digest.fold(folded)
    assert len(set(folded.tolist())) == 12


def test_tensors_with_elements_that_are_not_finite_are_suspected() -> None:
    """Also joined with healthy ones; integers and an empty tensor never are. Of a sum that
    overflows, no element is counted."""
    kinds = [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64]
    bad = [torch.tensor([math.nan], dtype=dtype) for dtype in kinds]
    bad += [torch.tensor([math.inf, -math.inf]), torch.ones(7, 9, dtype=torch.float64).t()]
    bad[-1][3, 3] = math.inf
    good = [torch.ones(3, dtype=torch.int8), torch.empty(0), torch.ones(2, dtype=torch.float16)]
    suspects = digest.find_suspects([*good, *bad])
    assert suspects == [3, 4, 5, 6, 7, 8]
    assert digest.find_suspects(good) == []
    huge = torch.full((9,), torch.finfo(torch.float32).max)
    assert digest.read([*good, *bad, huge], range(10))[1].tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 1, 0]


class OnBoth(nn.Linear):
    """A layer whose output is on the CPU and, without memory, on another device."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), torch.empty(2, device="meta")


def test_a_step_may_have_outputs_on_several_devices() -> None:
    """Where outputs are traced, the sums of a step are kept together on the device."""
    layer = OnBoth(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    tracer = Tracer(layer, (optimizer,))
    layer(torch.ones(1, 2))[0].sum().backward()
    optimizer.step()
    ((places, values),) = tracer._steps
    assert len(places) == len(values) == 4  # outputs and gradients
    assert values.is_meta
    tracer.close()
