"""Torch's own meaning over mpi4py: operation x dtype x reduce op x form x number of ranks.

One MPI job for each number of ranks runs the matrix, a gloo group beside the mpi4py groups; pytest
then reports it item by item. What must come out is computed here in exact numbers: each call must
give these bits, and leave all other bytes alone. The job of four ranks runs the usual dtypes alone.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import cache, partial, reduce
from itertools import accumulate, product
from pathlib import Path
from typing import Any, NamedTuple

import mpi_jobs
import pytest
import torch
import torch.distributed as dist
from mpi_jobs import OP, Group
from mpi_jobs import all_gather_single as gather_single
from mpi_jobs import reduce_scatter_single as scatter_single
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager as coalescing

from ddpbench import mpi
from ddpbench.mpi_backend import library as mpi_library
from ddpbench.mpi_backend.tensors import UNDIVIDED

SIZES = (4, 1, 3)
MARKS: dict[int, Any] = {1: pytest.mark.thorough, 3: [pytest.mark.thorough, pytest.mark.nightly]}
SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
COMPLEX = [torch.complex64, torch.complex128]
EIGHTHS = [torch.float8_e4m3fn, torch.float8_e5m2]
REAL = [*FLOATS, *SIGNED, *UNSIGNED, torch.bool]
MOVED = [*REAL, *COMPLEX, *EIGHTHS]
FOLDS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    OP.SUM: torch.add,
    OP.PRODUCT: torch.mul,
    OP.MIN: torch.minimum,
    OP.MAX: torch.maximum,
    OP.BAND: torch.bitwise_and,
    OP.BOR: torch.bitwise_or,
    OP.BXOR: torch.bitwise_xor,
}
WAYS = ("synchronous", "wait", "future")
GUARD = 0xA5
CPU = torch.device("cpu")


# --- the memory that an operation is given


def _bits(tensor: Tensor) -> Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    return flat.clone(memory_format=torch.contiguous_format).view(torch.uint8)


class Memory:
    """Tensors of one layout, in bytes that nobody may touch, and what must stand in each."""

    def __init__(self, layout: str) -> None:
        self.layout = layout
        self.contents: list[tuple[Tensor, Tensor]] = []
        self.around: list[tuple[Tensor, Tensor]] = []

    def _carve(self, like: Sequence[Tensor]) -> Iterator[Tensor]:
        """Places in one row of guarded memory; "strided": every other element, transposed."""
        step, item = 2 if self.layout == "strided" else 1, like[0].itemsize
        ends = list(accumulate((step * each.numel() for each in like), initial=1))
        raw = torch.full((ends[-1] + 1, item), GUARD, dtype=torch.uint8)
        guards = torch.ones(ends[-1] + 1, dtype=torch.bool)
        guards[1 : ends[-1] : step] = False
        self.around.append((raw, guards))
        row = raw.view(-1).view(like[0].dtype)
        for each, begin, end in zip(like, ends, ends[1:], strict=False):
            place = (
                row[begin:end:step].view(each.shape[::-1]).permute(tuple(range(each.ndim))[::-1])
            )
            if step == 1:
                place = row[begin:end].view(each.shape)
            if self.layout == "lazy":
                place = place.conj() if place.is_complex() else torch._neg_view(place)
            yield place

    def rooms(self, wanted: Sequence[Tensor]) -> list[Tensor]:
        """Tensors without values of their own, which must become these."""
        rows = [wanted] if self.layout == "adjacent" else [[each] for each in wanted]
        rooms = [room for row in rows for room in self._carve(row)]
        self.contents += zip(rooms, wanted, strict=True)
        return rooms

    def all_given(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Tensors with these values, which must keep them."""
        return [room.copy_(each) for room, each in zip(self.rooms(values), values, strict=True)]

    def room(self, wanted: Tensor) -> Tensor:
        return self.rooms([wanted])[0]

    def given(self, values: Tensor, wanted: Tensor | None = None) -> Tensor:
        """A tensor with these values, which must keep them or become `wanted`."""
        return self.room(values if wanted is None else wanted).copy_(values)

    def faults(self) -> Iterator[str]:
        for got, wanted in self.contents:
            if not torch.equal(_bits(got), _bits(wanted)):
                yield f"got {got}, not {wanted}"
        for raw, guards in self.around:
            if not (raw[guards] == GUARD).all():
                yield f"bytes outside of the tensors were written: {raw}"


@cache
def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Small whole numbers but 0, others in each rank."""
    turns = torch.arange(torch.Size(shape).numel()).view(shape) * (rank + 1) + rank
    if dtype.is_complex:  # no product of these has a part that is 0, whose sign may vary
        return torch.tensor([2 + 1j, -1 + 2j, -2 - 1j, 1 - 2j])[turns % 4].to(dtype)
    numbers = torch.tensor([1, -2, 3, -1, 2, -3, 1])[turns % 7]
    if dtype in EIGHTHS:
        return numbers.to(torch.int8).view(dtype)
    if dtype == torch.bool:
        return numbers > 0
    return (numbers.abs() if dtype in UNSIGNED else numbers).to(dtype)


class At(NamedTuple):
    """One case of the matrix, seen from one rank of a group."""

    rank: int
    size: int
    dtype: torch.dtype = torch.float32
    op: Any = OP.SUM
    shape: tuple[int, ...] = (3, 2)
    root: int = 0
    tag: int = 0

    def of(self, rank: int, rows: int = 1) -> Tensor:
        """What a rank puts in, `rows` times the shape."""
        shape = (rows * self.shape[0], *self.shape[1:]) if self.shape else ()
        return values(rank, shape, self.dtype)

    def mine(self, rows: int = 1) -> Tensor:
        return self.of(self.rank, rows)

    def every(self, rows: int = 1) -> list[Tensor]:
        return [self.of(rank, rows) for rank in range(self.size)]

    def total(self, rows: int = 1) -> Tensor:
        """All ranks' values reduced: in complex or whole numbers, no order matters."""
        wide = torch.complex128 if self.dtype.is_complex else torch.int64
        fold = FOLDS[OP.SUM if self.op == OP.AVG else self.op]
        whole = reduce(fold, [each.to(wide) for each in self.every(rows)])
        if self.dtype == torch.bool:
            return whole != 0
        if self.op != OP.AVG:
            return whole.to(self.dtype)
        if self.dtype in SIGNED + UNSIGNED:
            return torch.div(whole, self.size, rounding_mode="trunc").to(self.dtype)
        if self.dtype.is_complex:
            return torch.view_as_complex(torch.view_as_real(whole.to(self.dtype)) / self.size)
        return whole.to(self.dtype) / self.size

    def dealt(self, values: Tensor, counts: Sequence[int]) -> list[Tensor]:
        return list(values.split([count * self.shape[0] for count in counts]))

    def deals(self, uneven: bool) -> list[list[Tensor]]:
        """What each rank sends to each: as much to all or, uneven, nothing from 0 to itself."""
        every = range(self.size)
        counts = [[sender + to if uneven else 1 for to in every] for sender in every]
        return [self.dealt(self.of(r, sum(row)), row) for r, row in enumerate(counts)]


# --- the operations: each makes its tensors and gives back the call that is left to be made

Make = Callable[..., Callable[..., Any]]


def all_reduce(at: At, memory: Memory) -> Any:
    return partial(dist.all_reduce, memory.given(at.mine(), at.total()), at.op)


def reduce_to_root(at: At, memory: Memory) -> Any:
    wanted = at.total() if at.rank == at.root else at.mine()
    return partial(dist.reduce, memory.given(at.mine(), wanted), op=at.op, group_dst=at.root)


def broadcast(at: At, memory: Memory) -> Any:
    return partial(dist.broadcast, memory.given(at.mine(), at.of(at.root)), group_src=at.root)


def all_gather(at: At, memory: Memory, uneven: bool = False) -> Any:
    parts = [at.of(rank, rank if uneven else 1) for rank in range(at.size)]
    return partial(dist.all_gather, memory.rooms(parts), memory.given(parts[at.rank]))


def all_gather_single(at: At, memory: Memory, in_place: bool = False) -> Any:
    whole = memory.room(torch.cat(at.every()))
    part = at.dealt(whole, [1] * at.size)[at.rank] if in_place else memory.room(at.mine())
    return partial(gather_single, whole, part.copy_(at.mine()))


def gather(at: At, memory: Memory) -> Any:
    parts = memory.rooms(at.every()) if at.rank == at.root else None
    return partial(dist.gather, memory.given(at.mine()), parts, group_dst=at.root)


def scatter(at: At, memory: Memory) -> Any:
    parts = memory.all_given(at.every()) if at.rank == at.root else None
    return partial(dist.scatter, memory.room(at.mine()), parts, group_src=at.root)


def reduce_scatter(at: At, memory: Memory, uneven: bool = False) -> Any:
    counts = [rank if uneven else 1 for rank in range(at.size)]
    parts = memory.all_given(at.dealt(at.mine(sum(counts)), counts))
    output = memory.room(at.dealt(at.total(sum(counts)), counts)[at.rank])
    return partial(dist.reduce_scatter, output, parts, at.op)


def reduce_scatter_single(at: At, memory: Memory, in_place: bool = False) -> Any:
    once, wanted = [1] * at.size, at.mine(at.size).clone()
    part = at.dealt(at.total(at.size), once)[at.rank]
    if in_place:
        at.dealt(wanted, once)[at.rank].copy_(part)
    source = memory.given(at.mine(at.size), wanted)
    output = at.dealt(source, once)[at.rank] if in_place else memory.room(part)
    return partial(scatter_single, output, source, at.op)


def all_to_all(at: At, memory: Memory, uneven: bool = False) -> Any:
    deals = at.deals(uneven)
    outputs = memory.rooms([deal[at.rank] for deal in deals])
    return partial(dist.all_to_all, outputs, memory.all_given(deals[at.rank]))


def all_to_all_single(at: At, memory: Memory, uneven: bool = False, in_place: bool = False) -> Any:
    deals = at.deals(uneven)
    coming, going = [deal[at.rank] for deal in deals], deals[at.rank]
    splits = [[len(part) for part in parts] for parts in (coming, going)] if uneven else []
    source = memory.given(torch.cat(going), torch.cat(coming) if in_place else None)
    output = source if in_place else memory.room(torch.cat(coming))
    return partial(dist.all_to_all_single, output, source, *splits)


def pass_on(at: At, memory: Memory, batch: bool = False) -> Any:
    """To the rank on the right, from the one on the left, with a tag."""
    right, left = (at.rank + 1) % at.size, (at.rank - 1) % at.size
    going, coming = memory.given(at.mine()), memory.room(at.of(left))

    def call(group: Group, async_op: bool) -> Any:
        if batch:
            sides = (dist.irecv, coming, left), (dist.isend, going, right)
            ops = [dist.P2POp(f, t, group=group, tag=at.tag, group_peer=r) for f, t, r in sides]
            works = dist.batch_isend_irecv(ops)
            return works if async_op else finish(works)
        together = async_op or at.size == 1  # torch lets no rank send to itself synchronously
        send = partial(dist.isend if together else dist.send, going, group=group, tag=at.tag)
        recv = partial(dist.irecv if together else dist.recv, coming, group=group, tag=at.tag)
        steps = [partial(send, group_dst=right), partial(recv, group_src=left)]
        works = [step() for step in (steps if at.rank == 0 else steps[::-1])]
        return works if async_op else finish(works if together else [])

    return call


def barrier(at: At, memory: Memory) -> Any:
    return dist.barrier


def coalesced(at: At, memory: Memory, device: torch.device | None = None, make: Any = None) -> Any:
    """Three calls of other shapes in a coalescing manager; `async_op` is the manager's."""
    shapes = [at.shape, (1, *at.shape), (5,)]
    calls = [make(at._replace(shape=shape), memory) for shape in shapes]

    def call(group: Group, async_op: bool) -> Any:
        with coalescing(group, device, async_op) as manager:
            for each in calls:
                each(group=group, async_op=async_op)
        return manager if async_op else None

    return call


# --- the matrix


def ops_of(dtype: torch.dtype, row: Row) -> list[Any]:
    """The reduce ops of a dtype; torch hands complex tensors of some calls over as real ones."""
    if not row.reduces:
        return [OP.SUM]
    if dtype.is_complex:
        return [OP.SUM, OP.AVG, *([OP.PRODUCT] if row.direct else [])]
    ops = list(FOLDS)[:4] if dtype.is_floating_point else list(FOLDS)
    return ops if dtype in UNDIVIDED else [*ops, OP.AVG]


SHAPES = ((0,), (1,), (3, 2), (1000,))
FEW = ((0,), (3, 2))
ONE, MANY = ("apart", "strided"), ("apart", "adjacent", "strided")


class Row(NamedTuple):
    """An operation, and what of the matrix it has."""

    make: Make
    dtypes: Sequence[torch.dtype] = MOVED
    layouts: tuple[str, ...] = ONE
    shapes: tuple[tuple[int, ...], ...] = SHAPES
    roots: bool = False
    reduces: bool = False
    direct: bool = False  # complex tensors reach the backend as such


NUMBERS = [*REAL, *COMPLEX]
SOME = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
USUAL = (torch.float32, torch.int64)  # of four ranks
fewer = partial(Row, dtypes=SOME, shapes=FEW)
ROWS: dict[str, Row] = {
    "all_reduce": Row(all_reduce, NUMBERS, shapes=((), *SHAPES), reduces=True),
    "reduce": Row(reduce_to_root, NUMBERS, roots=True, reduces=True, direct=True),
    "broadcast": Row(broadcast, shapes=((), *SHAPES), roots=True),
    "all_gather": Row(all_gather, layouts=MANY),
    "all_gather_uneven": Row(partial(all_gather, uneven=True), layouts=MANY),
    "all_gather_single": Row(all_gather_single),
    "all_gather_single_in_place": fewer(partial(all_gather_single, in_place=True)),
    "gather": Row(gather, layouts=MANY, roots=True),
    "scatter": Row(scatter, layouts=MANY, roots=True),
    "reduce_scatter": Row(reduce_scatter, NUMBERS, MANY, FEW, reduces=True, direct=True),
    "reduce_scatter_uneven": Row(
        partial(reduce_scatter, uneven=True), NUMBERS, MANY, FEW, reduces=True, direct=True
    ),
    "reduce_scatter_single": Row(
        reduce_scatter_single, NUMBERS, ONE, FEW, reduces=True, direct=True
    ),
    "reduce_scatter_single_in_place": fewer(
        partial(reduce_scatter_single, in_place=True), reduces=True, direct=True
    ),
    "all_to_all": Row(all_to_all, layouts=MANY),
    "all_to_all_uneven": Row(partial(all_to_all, uneven=True), layouts=MANY),
    "all_to_all_single": Row(all_to_all_single),
    "all_to_all_single_uneven": Row(partial(all_to_all_single, uneven=True)),
    "all_to_all_single_in_place": fewer(partial(all_to_all_single, in_place=True)),
    "send_recv": Row(pass_on),
    "batch_isend_irecv": Row(partial(pass_on, batch=True)),
    "barrier": Row(barrier, [torch.float32], shapes=((1,),)),
}
for _name in ("all_reduce", "all_gather_single", "reduce_scatter_single"):
    for _device in (None, CPU):
        ROWS[f"coalescing_{_name}" + ("_on_device" if _device else "")] = ROWS[_name]._replace(
            make=partial(coalesced, device=_device, make=ROWS[_name].make),
            dtypes=SOME,
            shapes=FEW,
        )


def faults(row: Row, at: At, layout: str, way: str, group: Group) -> Iterator[str]:
    """Make one call in one way on one layout, and say what came out wrong."""
    memory = Memory(layout)
    work = row.make(at, memory)(group=group, async_op=way != "synchronous")
    if way != "synchronous":
        finish(work, way)
    elif work is not None:
        yield f"{at}, {layout}: a synchronous call gave back {work}"
    yield from (f"{at}, {layout}, {way}: {fault}" for fault in memory.faults())


def finish(work: Any, way: str = "wait") -> None:
    if isinstance(work, list):  # sends and receives, which have no futures
        assert all(each.wait() for each in work)
    elif way == "future" and isinstance(work, dist.Work):
        work.get_future().wait()
    else:
        work.wait()


def cases(row: Row, dtype: torch.dtype, rank: int, size: int) -> list[At]:
    """Every op with every shape and root; where there are both, the shapes take turns."""
    roots = size if row.roots else 1
    ops = enumerate(ops_of(dtype, row))
    turns = product(ops, range(max(roots, len(row.shapes))))
    return [
        At(rank, size, dtype, op, row.shapes[(i + j) % len(row.shapes)], j % roots)
        for (i, op), j in turns
    ]


def survey(group: Group, row: Row, dtypes: Sequence[torch.dtype], layouts: Any = ()) -> list[str]:
    """Try all cases of a row, with every layout in all ways by turns.

    A case of SOME dtypes is tried in all layouts, another one in one of them by turns.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    layouts, found = layouts or row.layouts, []
    for dtype in dtypes:
        turns = product(enumerate(cases(row, dtype, rank, size)), enumerate(layouts))
        for (i, at), (j, layout) in turns:
            if dtype in SOME:
                found += faults(row, at, layout, WAYS[(i + j) % 3], group)
            elif i % len(layouts) == j:
                found += faults(row, at, layout, WAYS[(i // len(layouts) + j) % 3], group)
    return found


def none(found: Sequence[str]) -> None:
    assert not found, f"{len(found)} faults:\n" + "\n".join(found[:5])


def check_row(row: Row, group: Group, rank: int, size: int) -> None:
    """mpi4py gives the expected bits in every way and layout."""
    none(survey(group, row, [dtype for dtype in row.dtypes if size != 4 or dtype in USUAL]))


# --- what is no cell of the matrix: these checks run in every rank too


def check_barrier(group: Group, rank: int, size: int) -> None:
    """No rank's barrier ends before every rank has come to it."""
    store = dist.PrefixStore("barrier", dist.distributed_c10d._get_default_store())
    for turn in range(6):
        store.set(f"{turn} {rank}", "here")
        if turn % 2:
            dist.barrier(group)
        else:
            dist.barrier(group, async_op=True).wait()
        assert store.check([f"{turn} {other}" for other in range(size)])


def check_lazy_views(group: Group, rank: int, size: int) -> None:
    """What torch conjugates or negates lazily arrives conjugated and negated."""
    direct = [ROWS[n] for n in ("reduce", "gather", "reduce_scatter", "reduce_scatter_single")]
    others = [ROWS[n] for n in ("all_gather", "scatter", "all_to_all", "all_to_all_single")]
    found = [f for row in direct for f in survey(group, row, [*COMPLEX, torch.float32], ["lazy"])]
    found += [f for row in others for f in survey(group, row, [torch.float32], ["lazy"])]
    none(found)


def check_sub_groups(group: Group, rank: int, size: int) -> None:
    """Every operation is right in groups of some ranks, two at once where there are four; torch's
    global ranks are translated."""
    evens, odds = ([r for r in range(size) if r % 2 == odd] for odd in (0, 1))
    found: list[str] = []
    for members in filter(None, (evens, odds, list(range(1, size)))):
        part = dist.new_group(members, backend=mpi.NAME)
        if rank in members:
            for row in ROWS.values():
                found += survey(part, row._replace(shapes=((3, 2),)), [torch.float32])
            tensor = torch.tensor([rank])
            dist.broadcast(tensor, members[-1], part)
            assert tensor.item() == members[-1]
            dist.destroy_process_group(part)
    none(found)


def check_interleaved(group: Group, rank: int, size: int) -> None:
    """300 asynchronous calls of all kinds on two groups are right in any order of waiting."""
    alike, own = random.Random(size), random.Random(rank)
    groups = [group, dist.new_group(backend=mpi.NAME)]
    flights, found = [], []
    for tag in range(300):
        row = alike.choice(list(ROWS.values()))
        at = alike.choice(cases(row, alike.choice(row.dtypes), rank, size))._replace(tag=tag)
        memory = Memory(alike.choice(row.layouts))
        work = row.make(at, memory)(group=alike.choice(groups), async_op=True)
        flights.append((work, memory, at))
    own.shuffle(flights)
    for work, memory, at in flights:
        finish(work, own.choice(WAYS[1:]))
        found += [f"{at}: {fault}" for fault in memory.faults()]
    none(found)


Check = Callable[[Group, int, int], None]
CHECKS: dict[str, Check] = {name: partial(check_row, row) for name, row in ROWS.items()}
CHECKS |= {
    name: check
    for name, check in globals().items()
    if name.startswith("check_") and name != "check_row"
}


# --- the job that runs them


def job_matrix(folder: Path) -> None:
    """The matrix on a group of all ranks beside gloo; of four, torch's ranks are not MPI's."""
    rank, size = mpi_library.world()
    rank = size - 1 - rank if size == 4 else rank
    store = dist.FileStore(str(folder / "store"), size)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    group = dist.new_group(backend=mpi.NAME, timeout=limit)
    with (folder / f"{rank}.jsonl").open("w", buffering=1) as lines:
        for name, check in CHECKS.items():
            try:
                check(group, rank, size)
                outcome = "passed"
            except Exception:
                outcome = traceback.format_exc()
            print(json.dumps([name, outcome]), file=lines)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[Any]]:
    """Each rank's outcomes of the job with so many ranks, and the job's last words."""

    @cache
    def run(size: int) -> list[Any]:
        folder = tmp_path_factory.mktemp(f"matrix{size}")
        try:
            words = mpi_jobs.run_job(job_matrix, size, folder).stderr
        except subprocess.TimeoutExpired as late:
            words = str(late)
        reports = [folder / f"{rank}.jsonl" for rank in range(size)]
        lines = [report.read_text().splitlines() if report.exists() else [] for report in reports]
        return [*[dict(map(json.loads, each)) for each in lines], words]

    return run


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("size", [pytest.param(size, marks=MARKS.get(size, ())) for size in SIZES])
def test_matrix(outcomes: Callable[[int], list[Any]], size: int, name: str) -> None:
    """This operation on all dtypes, or this further check, holds in every rank."""
    *ranks, words = outcomes(size)
    for found in ranks:
        assert found.get(name, f"did not run: {words}") == "passed"


if __name__ == "__main__":
    job_matrix(Path(sys.argv[2]))
