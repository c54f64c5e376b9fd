"""Digests of tensors, also as a GPU computes them, and elements that differ."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from simulated_gpu import CUDA, SimulatedGpu, fake_group
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from two_replicas import flip_bit, locate_bit, make_values

from ddpbench.replicas import digest, locate
from ddpbench.replicas.channel import Channel

FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
COMPLEX = [torch.complex64, torch.complex128]
DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, *FLOAT8, *COMPLEX, torch.bool,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32,
    torch.uint64,
]  # fmt: skip


def on_device(tensor: Tensor) -> int:
    """The digest that a tensor on a GPU gets, of one on the CPU."""
    return int(digest.weigh_words(tensor))


FORMULAS = [digest.of_cpu, on_device]
Formula = Callable[[Tensor], int]


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_digest_is_of_bits(formula: Formula, dtype: torch.dtype) -> None:
    """Of every dtype: equal bits give equal digests, and each single bit flipped another one."""
    tensor = make_values(dtype, 12)
    whole = formula(tensor)
    assert formula(tensor.clone()) == whole
    raw = tensor.view(torch.uint8)
    digests = {whole}
    for byte in range(raw.numel()):
        for bit in range(8):
            raw[byte] ^= 1 << bit
            digests.add(formula(tensor))
            raw[byte] ^= 1 << bit
    assert len(digests) == 1 + 8 * raw.numel()
    assert formula(tensor) == whole


@pytest.mark.parametrize("formula", FORMULAS)
def test_memory_layout_does_not_count(formula: Formula) -> None:
    """The elements in order are what is digested: strided, lazily conjugated or negated."""
    base = torch.arange(24.0).view(4, 6)
    for view in (base.t(), base[:, ::2], base[1:3, 1:4], base[:1].expand(3, 6)):
        assert formula(view) == formula(view.clone(memory_format=torch.contiguous_format))
    lazy = torch.tensor([1 + 2j, 3 - 4j]).conj()
    assert formula(lazy) == formula(lazy.resolve_conj().clone())
    assert formula(lazy.imag) == formula(torch.tensor([-2.0, 4.0]))
    nhwc = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert formula(nhwc) == formula(nhwc.contiguous())


# --- on a GPU

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


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex128])
def test_a_large_tensor_takes_a_bounded_memory(dtype: torch.dtype) -> None:
    """1 GiB in one tensor, aligned to words or not."""
    items = 1024 * MIB // dtype.itemsize
    flat = torch.empty(items + 1, dtype=dtype, device="meta")
    for tensor in (flat.narrow(0, 1, items), flat):
        digest._make_weights.cache_clear()
        with Kernels() as kernels:
            digest.weigh_words(tensor)
            digest.total(tensor)
        digest._make_weights.cache_clear()
        assert kernels.most_nbytes <= MOST_NBYTES
        assert kernels.count <= 2048


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


# --- located elements


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (torch.float32, ("3.0", "2.0")),
        (torch.float8_e5m2, ("3.0", "2.0")),
        (torch.complex64, ("(3+0j)", "(2+0j)")),
        (torch.bool, ("False", "True")),
        (torch.uint64, ("3", "2")),
    ],
)
def test_the_first_differing_element_is_located(
    dtype: torch.dtype, values: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces, with its index and both values."""
    monkeypatch.setattr(locate, "PIECE_NBYTES", 64)
    other = make_values(dtype, 700).reshape(70, 10)
    own = other.clone()
    own[7, 2] = own[7, 3]  # the number 73 % 7 instead of 72 % 7
    (detail,) = locate_bit(own, other)
    assert (detail.value, detail.reference_value) == values
    assert (detail.index, detail.differing, detail.max_delta) == ((7, 2), 1, 1.0)


# --- on a simulated GPU, for which a compiler is needed: simulated_gpu.py


@pytest.mark.thorough
@pytest.mark.parametrize("sizes", [[1], [1, 0, 9, 5000], [3] * 40, [1 << 20, 7, (1 << 20) + 1]])
def test_digests_of_many_tensors_wait_once(simulated_gpu: SimulatedGpu, sizes: list[int]) -> None:
    """However many tensors there are, the host waits for the GPU once for their digests and once to
    learn that all are finite; a digest does not depend on the tensors beside it."""
    tensors = [torch.full((size,), 1.0 + i).to("cuda") for i, size in enumerate(sizes)]
    simulated_gpu.called.clear()
    digests, counts = digest.read(tensors, range(len(tensors)))
    assert len(simulated_gpu.reads) <= 2
    assert not counts.any()
    alone = [int(digest.read([tensor])[0][0]) for tensor in tensors]
    assert digests.tolist() == alone


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", [lambda t: t, lambda t: t.reshape(50, 100).t()])
def test_a_flipped_bit_on_a_gpu_is_located(
    simulated_gpu: SimulatedGpu,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    layout: Callable[[Tensor], Tensor],
) -> None:
    """Of a tensor on a GPU, in pieces and in any layout, the flipped bit and its index are named as
    of the CPU's, and the host waits once for each piece."""
    monkeypatch.setattr(locate, "PIECE_NBYTES", 4096)
    content = make_values(dtype)
    reference = layout(flip_bit(content, 4321))
    near = locate_bit(layout(content), reference)
    far = layout(content.to("cuda"))
    simulated_gpu.called.clear()
    details = locate_bit(far, reference)
    piece = 4096 // max(content.itemsize, 8)
    assert len(simulated_gpu.reads) == -(-content.numel() // piece)
    assert details == near
    assert details[0].differing == 1
    assert details[0].bit == 0


@pytest.mark.thorough
def test_messages_about_replicas_are_sent_from_the_gpu(
    simulated_gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a group that moves CUDA tensors only, as nccl does, every exchange sends a tensor of the
    GPU that holds the parameters, and each waits for the GPU once."""
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: "cuda:nccl")
    vector = np.arange(5, dtype=np.int64)
    with fake_group(0, 2):
        channel = Channel(None, nn.Linear(3, 2, device="cuda"))
        simulated_gpu.called.clear()
        # The fake group moves nothing.
        assert channel.gather_sums([0, 1], [2, 3]) == ([True, False], [2, 3])
        assert channel.gather_rows(vector).shape == (2, 5)
        assert channel.broadcast_bytes(vector.view(np.uint8), 0).size == vector.nbytes
    assert len(simulated_gpu.reads) == 3
    sent = [t for _, args in simulated_gpu.collectives for t in tree_leaves(args)]
    tensors = [one for one in sent if isinstance(one, Tensor)]
    assert {tensor.device for tensor in tensors} == {CUDA}
