"""The table of operations against brute force: each is played through, element by element."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from stored_runs import a_case

from ddpbench.catalog import payload
from ddpbench.catalog.dtypes import DTYPES, REDUCE_OPS
from ddpbench.catalog.operations import OPERATIONS, Piece
from ddpbench.measure import loop
from ddpbench.records.schema import Case

Array = npt.NDArray[np.float64]
COMBINE = {
    "sum": lambda parts: np.sum(parts, axis=0), "avg": lambda parts: np.mean(parts, axis=0),
    "prod": lambda parts: np.prod(parts, axis=0), "min": lambda parts: np.min(parts, axis=0),
    "max": lambda parts: np.max(parts, axis=0),
}  # fmt: skip


def played(case: Case, inputs: list[Array]) -> list[Array | None]:
    """Each rank's output as torch.distributed documents the operation; None: it says nothing."""
    n, count, root = case.world_size, case.count, case.root
    block = [[x[r * count : (r + 1) * count] for r in range(n)] for x in inputs]
    total = COMBINE[case.reduce_op](inputs) if case.reduce_op else np.zeros(0)
    pairs = {r: r + 1 if r % 2 == 0 else r - 1 for r in range(n)}
    by_name: dict[str, Callable[[int], Array | None]] = {
        "all_reduce": lambda r: total,
        "reduce": lambda r: total if r == root else None,
        "broadcast": lambda r: inputs[root or 0],
        "all_gather": lambda r: np.concatenate(inputs),
        "gather": lambda r: np.concatenate(inputs) if r == root else None,
        "scatter": lambda r: block[root or 0][r],
        "reduce_scatter": lambda r: total[r * count : (r + 1) * count],
        "all_to_all": lambda r: np.concatenate([block[source][r] for source in range(n)]),
        "barrier": lambda r: None,
        "send_recv": lambda r: inputs[pairs[r]] if pairs[r] < n else None,
        "bidirectional": lambda r: inputs[pairs[r]] if pairs[r] < n else None,
    }
    return [by_name[case.operation](rank) for rank in range(n)]


def cases(counts: tuple[int, ...], worlds: range) -> Iterator[Case]:
    """Every operation in every world, with every root and reduce op it has."""
    for operation, n, count in itertools.product(OPERATIONS.values(), worlds, counts):
        size = DTYPES["float32"].nbytes * count * (n if operation.blocks else 1)
        for root, reduce_op in itertools.product(
            range(n) if operation.rooted else (None,), REDUCE_OPS if operation.reduces else (None,)
        ):
            yield a_case(
                operation=operation.name, world_size=n, count=count if operation.sized else 0,
                nbytes=size if operation.sized else 0, root=root, reduce_op=reduce_op,
            )  # fmt: skip


def filled(case: Case) -> list[Array]:
    """Every rank's input: its table over and over, as many elements as the operation says."""
    elements = OPERATIONS[case.operation].elements
    tables = [
        payload.table(r, 4, case.dtype, case.reduce_op, case.world_size)
        for r in range(case.world_size)
    ]
    return [np.resize(table, elements(case, r)[0]) for r, table in enumerate(tables)]


def pieced(
    case: Case, pieces: tuple[Piece, ...], length: int
) -> tuple[Array, npt.NDArray[np.int_]]:
    """The output that the pieces describe, and how often each element is described."""
    n, op = case.world_size, case.reduce_op
    output, times = np.full(length, np.nan), np.zeros(length, dtype=int)
    for piece in pieces:
        table = (
            payload.reduced(4, case.dtype, op or "", n)
            if piece.rank is None
            else payload.table(piece.rank, 4, case.dtype, op, n)
        )
        for i in range(piece.length):
            output[piece.start + i] = table[(piece.offset + i) % payload.PERIOD]
            times[piece.start + i] += 1
    return output, times


@pytest.mark.parametrize("name", OPERATIONS)
def test_expected_results_are_those_of_the_operation(name: str) -> None:
    """For 1 to 5 ranks, all roots and reduce ops, short blocks and blocks beyond a period: what
    `expected` describes is, element by element, what playing the operation gives, each element is
    described once, and a rank that receives nothing has nothing to check."""
    for case in (c for c in cases((1, 3, 700), range(1, 6)) if c.operation == name):
        operation, inputs = OPERATIONS[name], filled(case)
        for rank, wanted in enumerate(played(case, inputs)):
            pieces = operation.expected(case, rank)
            if wanted is None:
                assert pieces == ()
                continue
            length = operation.elements(case, rank)[1]
            output, times = pieced(case, pieces, length)
            assert len(wanted) == length
            assert (times == 1).all()
            assert (output == wanted).all(), (case, rank)


def test_sizes_count_what_lies_in_the_buffers() -> None:
    """S is the largest buffer that any rank has, input or output, as nccl-tests counts it."""
    for case in cases((1, 3), range(1, 6)):
        operation = OPERATIONS[case.operation]
        largest = max(max(operation.elements(case, rank)) for rank in range(case.world_size))
        assert largest * DTYPES[case.dtype].nbytes == case.nbytes


def test_in_place_means_as_nccl_has_it() -> None:
    """In place, the smaller buffer of a rank is its own block of the larger one."""
    cpu = torch.device("cpu")
    for case, rank in itertools.product(cases((5,), range(3, 4)), range(3)):
        operation = OPERATIONS[case.operation]
        if "in" not in operation.places:
            continue
        buffers = loop._allocate(replace(case, in_place=True), operation, rank, cpu)
        smaller, larger = sorted((buffers.input, buffers.output), key=torch.Tensor.numel)
        assert smaller.untyped_storage().data_ptr() == larger.untyped_storage().data_ptr()
        offset = rank * case.count if smaller.numel() != larger.numel() else 0
        assert smaller.data_ptr() == larger.data_ptr() + 4 * offset


@pytest.mark.parametrize("n", [1, 2, 3, 8, 1000])
def test_bus_factors_are_those_of_nccl_tests(n: int) -> None:
    """busbw over algbw, as in doc/PERFORMANCE.md and src/*.cu (GetBw)."""
    factors = {name: operation.bus_factor(n) for name, operation in OPERATIONS.items()}
    assert factors["all_reduce"] == pytest.approx(2 * (n - 1) / n)
    for name in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        assert factors[name] == pytest.approx((n - 1) / n)
    assert factors["broadcast"] == factors["reduce"] == factors["send_recv"] == 1


def moved(case: Case) -> int:
    """Elements that the busiest rank must send or receive, found by changing every input element
    and seeing which ranks' outputs depend on it."""
    n, operation = case.world_size, OPERATIONS[case.operation]
    sizes = [operation.elements(case, rank) for rank in range(n)]
    draw = np.random.default_rng(0)
    inputs = [draw.uniform(1, 2, size[0]) for size in sizes]
    before = played(case, inputs)
    received = [set[int]() for _ in range(n)]
    sent = [set[int]() for _ in range(n)]
    for source, index in ((r, i) for r in range(n) for i in range(sizes[r][0])):
        changed = [x.copy() for x in inputs]
        changed[source][index] += 1.0
        for rank, (old, new) in enumerate(zip(before, played(case, changed), strict=True)):
            if rank != source and old is not None and new is not None and (old != new).any():
                sent[source].add(index)
                received[rank].update(np.flatnonzero(old != new).tolist())
    return max(map(len, received + sent))


def test_the_least_bytes_are_what_some_rank_must_move() -> None:
    """least_nbytes equals the elements of one rank's input that others need, or of its output that
    it needs from others, whichever is more in any rank: no algorithm moves less."""
    for case in cases((1, 4), range(1, 5)):
        if case.reduce_op in (None, "sum"):
            least = OPERATIONS[case.operation].least_nbytes(case)
            assert least == pytest.approx(moved(case) * 4, rel=1e-12), case
