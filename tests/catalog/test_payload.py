"""Inputs and expected results: exact in any order, and no wrong result passes for a right one."""

import itertools
import random
from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
import torch

from ddpbench.catalog import payload
from ddpbench.catalog.dtypes import DTYPES, REDUCE_OPS
from ddpbench.catalog.operations import Piece
from ddpbench.catalog.payload import PERIOD

WORLDS = (1, 2, 3, 7, 16, 200)
COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add, "avg": torch.add, "prod": torch.mul,
    "min": torch.minimum, "max": torch.maximum,
}  # fmt: skip
Table = npt.NDArray[np.float64]


@cache
def inputs(dtype: str, reduce_op: str | None, world: int, generation: int) -> tuple[Table, ...]:
    """Every rank's period."""
    return tuple(payload.table(r, generation, dtype, reduce_op, world) for r in range(world))


def tensor(values: Table, dtype: str) -> torch.Tensor:
    """The values in a dtype; they must survive that."""
    made = torch.from_numpy(values).to(getattr(torch, dtype))
    assert (made.double().numpy() == values).all()
    return made


def combined(dtype: str, reduce_op: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """One step of a reduction in the dtype itself; torch adds float8 in float32 and rounds."""
    if DTYPES[dtype].nbytes == 1 and DTYPES[dtype].floating:
        return COMBINE[reduce_op](a.float(), b.float()).to(a.dtype)
    return COMBINE[reduce_op](a, b)


def in_some_order(dtype: str, reduce_op: str, world: int, seed: int) -> torch.Tensor:
    """Ring, tree or anything between: partial results in the dtype, combined in random pairs."""
    draw = random.Random(seed)
    parts = [tensor(t, dtype) for t in inputs(dtype, reduce_op, world, 3)]
    while len(parts) > 1:
        first, second = (parts.pop(draw.randrange(len(parts))) for _ in range(2))
        parts.append(combined(dtype, reduce_op, first, second))
    if reduce_op != "avg":
        return parts[0]
    if DTYPES[dtype].floating:
        return (parts[0].double() / world).to(parts[0].dtype)
    return (parts[0].long() // world).to(parts[0].dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_order_of_reduction_gives_the_expected_result(dtype: str) -> None:
    """Sums, averages, products, minima, maxima of up to 200 ranks, computed in the dtype itself in
    two random orders, equal `reduced` bit for bit."""
    for reduce_op, world in itertools.product(REDUCE_OPS, WORLDS):
        expected = payload.reduced(3, dtype, reduce_op, world)
        for seed in range(2):
            got = in_some_order(dtype, reduce_op, world, seed)
            assert first_wrong_of(got, expected) is None, (reduce_op, world)
        if reduce_op != "avg" or world <= DTYPES[dtype].exact:
            tensor(expected, dtype)  # not even rounded when it is stored


def first_wrong_of(got: torch.Tensor, expected: Table) -> tuple[int, str, str] | None:
    """The first wrong element of one whole period."""
    return payload.find_wrong(got, Piece(0, len(got), 0), expected)


def stretch(values: Table, dtype: str, start: int, length: int) -> torch.Tensor:
    """`length` elements of the endless repetition of a table from `start` on."""
    return torch.from_numpy(np.resize(np.roll(values, -start), length)).to(getattr(torch, dtype))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "uint8", "int64"])
def test_a_block_in_the_wrong_place_is_seen(dtype: str) -> None:
    """Block b delivered where block a belongs is wrong for every size of 32 elements and more that
    is no multiple of the period: of another rank (all_gather), or of another place in the sum, or
    in the product where the dtype has room for several."""
    world = 4
    tables = inputs(dtype, None, world, 1)
    roomy = dtype in ("float32", "bfloat16", "int64")
    totals = [payload.reduced(1, dtype, op, world) for op in ("sum", "prod")[: 1 + roomy]]
    for count in (32, 64, 255, 1000, 1020, 1022, 4096):
        for a, b in itertools.permutations(range(world), 2):
            of_other_rank = stretch(tables[b], dtype, 0, count)
            assert payload.find_wrong(of_other_rank, Piece(0, count, a), tables[a]) is not None
            piece = Piece(0, count, None, offset=a * count)
            for total in totals:
                of_other_place = stretch(total, dtype, b * count, count)
                assert payload.find_wrong(of_other_place, piece, total) is not None


def result(dtype: str, reduce_op: str | None, world: int, generation: int) -> Table:
    """What a rank receives: rank 0's table, or the reduction."""
    if reduce_op is None:
        return payload.table(0, generation, dtype, None, world)
    return payload.reduced(generation, dtype, reduce_op, world)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_untouched_output_is_seen_from_its_first_element_on(dtype: str) -> None:
    """No expected result has the poison anywhere: an output nobody wrote is wrong at index 0, and
    so is one of which only the last element was left out."""
    buffer = torch.empty(PERIOD, dtype=getattr(torch, dtype))
    for reduce_op, world in itertools.product((None, *REDUCE_OPS), WORLDS):
        expected = result(dtype, reduce_op, world, 1)
        for tolerance in (0.0, 2.0**-6):
            piece = Piece(0, PERIOD, None)
            payload.poison(buffer)
            found = payload.find_wrong(buffer, piece, expected, tolerance)
            assert found is not None
            assert found[0] == 0
            payload.fill(buffer[:-1], expected)
            found = payload.find_wrong(buffer, piece, expected, tolerance)
            assert found is not None
            assert found[0] == PERIOD - 1


LENGTHS = (0, 1, 2, 1020, 1021, 1022, 2042, 2043, 5000)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_first_wrong_element_is_named(dtype: str) -> None:
    """In pieces of any start, length and offset, right data are right, and of several wrong
    elements the first one's index in the buffer, the expected and the got value are told."""
    draw = random.Random(dtype)
    values = payload.table(1, 1, dtype, "sum", 2)
    for length in (*LENGTHS[1:], *(draw.randint(1, 4000) for _ in range(20))):
        start, offset = draw.randint(0, 50), draw.randint(0, 10**7)
        buffer = torch.zeros(start + length + 5, dtype=getattr(torch, dtype))
        piece = Piece(start, length, 0, offset)
        buffer[start : start + length] = stretch(values, dtype, offset % PERIOD, length)
        assert payload.find_wrong(buffer, piece, values) is None
        assert payload.find_wrong(buffer, piece, values, 2.0**-6) is None
        bad = sorted(draw.sample(range(length), min(length, 3)))
        for index in bad:
            right = values[(offset + index) % PERIOD]
            buffer[start + index] = 1.0 if right != 1.0 else 2.0
        for tolerance in (0.0, 2.0**-6):
            found = payload.find_wrong(buffer, piece, values, tolerance)
            assert found is not None
            right = values[(offset + bad[0]) % PERIOD]
            assert (found[0], float(found[1])) == (start + bad[0], right)
            assert float(found[2]) == (1.0 if right != 1.0 else 2.0)
