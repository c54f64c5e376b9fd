"""What each operation passes to torch, seen below torch's own functions.

torch's `fake` group takes the calls of any one rank of any world, and checks little. So what
reaches it is compared with what torch documents: shapes, lengths of lists, roots and peers.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from simulated_gpu import fake_group
from stored_runs import a_case
from torch.utils._python_dispatch import TorchDispatchMode

from ddpbench.catalog.operations import OPERATIONS
from ddpbench.measure import loop
from ddpbench.records.schema import Case

CPU = torch.device("cpu")
WORLDS = (2, 3, 1000)
BARRIERS_TENSOR = "aten.empty.memory_format"  # torch's, which tells the group the device
FORMED = [(name, form) for name, entry in OPERATIONS.items() for form in entry.forms]


class Recorded(TorchDispatchMode):
    """The calls that reach a process group, and all other operations."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.others: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removesuffix(".default")
        if name.startswith("c10d."):
            self.calls.append((name, args))
        else:
            self.others.append(name)
        return func(*args, **(kwargs or {}))


def cases(name: str, form: str, n: int, counts: tuple[int, ...]) -> Iterator[Case]:
    """An operation in one form: in and out of place, with the first roots and the last one."""
    operation = OPERATIONS[name]
    roots = sorted({0, 1, n - 1}) if operation.rooted else [None]
    for place, root, count in product(operation.places, roots, counts):
        size = 4 * count * (n if operation.blocks else 1)
        yield a_case(
            operation=name, form=form, world_size=n, root=root, in_place=place == "in",
            reduce_op="sum" if operation.reduces else None,
            count=count if operation.sized else 0, nbytes=size if operation.sized else 0,
        )  # fmt: skip


def documented(case: Case, rank: int) -> list[tuple[str, Any]]:
    """The calls of one rank: the name in torch, and elements of its tensors, root or peer."""
    n, c, root = case.world_size, case.count, case.root
    one, every, single = [c], [[c] * n], case.form == "tensor"
    partner = rank + 1 if rank % 2 == 0 else rank - 1
    send, recv = ("c10d.send", (one, partner)), ("c10d.recv_", (one, partner))
    by_name: dict[str, list[tuple[str, Any]]] = {
        "all_reduce": [("c10d.allreduce_", (one,))],
        "broadcast": [("c10d.broadcast_", (one, root))],
        "reduce": [("c10d.reduce_", (one, root))],
        "all_gather": [
            ("c10d._allgather_base_", (n * c, c)) if single else ("c10d.allgather_", (every, one))
        ],
        "reduce_scatter": [
            ("c10d._reduce_scatter_base_", (c, n * c))
            if single
            else ("c10d.reduce_scatter_", (one, every))
        ],
        "all_to_all": [
            ("c10d.alltoall_base_", (n * c, n * c))
            if single
            else ("c10d.alltoall_", ([c] * n, [c] * n))
        ],
        "gather": [("c10d.gather_", (every if rank == root else [], one, root))],
        "scatter": [("c10d.scatter_", (one, every if rank == root else [], root))],
        "barrier": [("c10d.barrier", ())],
        "send_recv": [send, recv] if rank % 2 == 0 else [recv, send],
        "bidirectional": [send, recv] if rank % 2 == 0 else [recv, send],
    }
    idle = OPERATIONS[case.operation].paired and partner >= n
    return [] if idle else by_name[case.operation]


def sizes(value: Any) -> Any:
    """The elements of each tensor in an argument."""
    return value.numel() if isinstance(value, torch.Tensor) else [sizes(part) for part in value]


def seen(call: tuple[str, tuple[Any, ...]]) -> tuple[str, Any]:
    """A recorded call in the words of `documented`."""
    name, args = call
    roots = {"c10d.broadcast_": 2, "c10d.reduce_": 3, "c10d.gather_": 3, "c10d.scatter_": 3}
    roots |= {"c10d.send": 2, "c10d.recv_": 2}
    if name == "c10d.barrier":
        return name, ()
    tensors = [arg for arg in args if isinstance(arg, (torch.Tensor, list, tuple))]
    if name in ("c10d.alltoall_base_",):
        assert [len(split) for split in tensors[2:]] == [0, 0]  # blocks of one size
        tensors = tensors[:2]
    root = [int(args[roots[name]])] if name in roots else []
    return name, (*map(sizes, tensors), *root)


@pytest.mark.parametrize("n", WORLDS)
def test_each_rank_passes_what_torch_documents(n: int) -> None:
    """In worlds of 2 to 1000 ranks, in all forms, in and out of place, with small counts: each rank
    passes tensors of the documented sizes, lists of one tensor per rank, lists at the root only,
    and the right root or peer; the call itself does nothing else."""
    for rank in sorted({0, 1, n // 2, n - 1}):
        with fake_group(rank, n) as group:
            for name, form in FORMED:
                for case in cases(name, form, n, (1, 3)):
                    operation = OPERATIONS[name]
                    buffers = loop._allocate(case, operation, rank, CPU)
                    call = operation.bind(case, buffers, group, rank)
                    with Recorded() as recorded:
                        call()
                    assert list(map(seen, recorded.calls)) == documented(case, rank), (case, rank)
                    assert recorded.others in ([], [] if operation.sized else [BARRIERS_TENSOR])


def test_in_place_means_as_nccl_has_it() -> None:
    """In place, the smaller buffer of a rank is its own block of the larger one."""
    for rank, (name, form) in product(range(3), FORMED):
        for case in (c for c in cases(name, form, 3, (5,)) if c.in_place):
            buffers = loop._allocate(case, OPERATIONS[name], rank, CPU)
            a, b = buffers.input, buffers.output
            assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
            smaller, larger = sorted((a, b), key=torch.Tensor.numel)
            offset = rank * case.count if a.numel() != b.numel() else 0
            assert smaller.data_ptr() == larger.data_ptr() + 4 * offset
