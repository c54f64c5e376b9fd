"""The operations that can be measured. To add one, add an entry to OPERATIONS.

Sizes follow nccl-tests: S is the size of the total buffer. If S consists of n blocks (`blocks`),
`count` is the number of elements in one block. Bus factors (busbw = algbw × factor) are those of
nccl-tests, doc/PERFORMANCE.md. Every algorithm takes at least the time that a rank needs to move
`least_nbytes`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddpbench.records.schema import Case
from ddpbench.runtime import devices

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    Call = Callable[[], dist.Work | None]


@dataclass(frozen=True)
class Piece:
    """Expected content of one stretch of an output.

    The `length` elements from `start` on must equal the table of `rank` (None: the reduction over
    all ranks, see payload.py), beginning at the table's element `offset`.
    """

    start: int
    length: int
    rank: int | None
    offset: int = 0


@dataclass
class Buffers:
    """Flat tensors that one rank's call reads and writes. They share memory when in place."""

    input: torch.Tensor
    output: torch.Tensor


def _ring(n: int) -> float:
    return (n - 1) / n


# The factor of an operation whose total buffer has a block per rank.
BLOCKS: dict[str, Any] = {"bus_factor": _ring, "least": _ring, "blocks": True}


def _with_two_ranks(n: int) -> bool:
    return n == 2  # with more ranks, those in between forward the data


@dataclass(frozen=True)
class Operation:
    """One operation, named as in torch.distributed.

    elements   (case, rank) → (elements of the input, of the output); 0 if the rank has none
    bind       (case, buffers, group, rank) → the call to time, with all arguments bound
    expected   (case, rank) → the pieces that the output must consist of afterwards

    `rank` and `case.root` count within `group`, which may be smaller than the world.
    """

    name: str
    help: str
    elements: Callable[[Case, int], tuple[int, int]]
    bind: Callable[[Case, Buffers, dist.ProcessGroup, int], Call]
    expected: Callable[[Case, int], tuple[Piece, ...]]
    bus_factor: Callable[[int], float] = lambda n: 1.0
    least: Callable[[int], float] = lambda n: 1.0  # least bytes over S
    forms: tuple[str, ...] = ("tensor",)  # the first is the default
    places: tuple[str, ...] = ("in",)  # "in" and "out" of place; the first is the default
    reduces: bool = False
    rooted: bool = False
    blocks: bool = False
    sized: bool = True
    one_way: Callable[[int], bool] = lambda n: False  # each rank either sends or receives
    messages: int = 1  # sent one after the other in one call; the time is divided by this
    personal: bool = False  # each rank has different data for each other rank
    paired: bool = False  # between ranks 0-1, 2-3, …: no async_op, needs two ranks

    def least_nbytes(self, case: Case) -> float:
        """Return the bytes that some rank must send or receive with any algorithm."""
        return case.nbytes * self.least(case.world_size) if case.world_size > 1 else 0.0


def _same(case: Case, rank: int) -> tuple[int, int]:
    return case.count, case.count


def _all_counts(case: Case) -> int:
    return case.count * case.world_size


def _all_reduced(case: Case, rank: int) -> tuple[Piece, ...]:
    return (Piece(0, case.count, None),)


def _all_blocks(case: Case, rank: int) -> tuple[Piece, ...]:
    return tuple(Piece(r * case.count, case.count, r) for r in range(case.world_size))


def _from_partner(case: Case, rank: int) -> tuple[Piece, ...]:
    partner = _partner(case, rank)
    return () if partner is None else (Piece(0, case.count, partner),)


# --- the calls ------------------------------------------------------------------------------------


def _dist(*names: str) -> Any:
    """Return the first of these functions that this torch has: torch 2.13 renamed some."""
    import torch.distributed as dist

    return next(getattr(dist, name) for name in names if hasattr(dist, name))


def _op(case: Case) -> Any:
    import torch.distributed as dist

    name = "PRODUCT" if case.reduce_op == "prod" else str(case.reduce_op).upper()
    return getattr(dist.ReduceOp, name)


def _blocks(tensor: torch.Tensor, case: Case) -> list[torch.Tensor]:
    return list(tensor.view(case.world_size, case.count).unbind())


# Arguments are positional: keywords cost 0.4 µs in torch's decorator, and a call may take 5 µs.


def _all_reduce(case: Case, b: Buffers, group: dist.ProcessGroup, rank: int) -> Call:
    call, tensor, op, later = _dist("all_reduce"), b.output, _op(case), case.async_op
    return lambda: call(tensor, op, group, later)


def _broadcast(case: Case, b: Buffers, group: dist.ProcessGroup, rank: int) -> Call:
    call, tensor, root, later = _dist("broadcast"), b.output, case.root, case.async_op
    return lambda: call(tensor, None, group, later, root)


def _reduce(case: Case, b: Buffers, group: dist.ProcessGroup, rank: int) -> Call:
    call, tensor, op = _dist("reduce"), b.output, _op(case)
    root, later = case.root, case.async_op
    return lambda: call(tensor, None, op, group, later, root)


def _all_gather(case: Case, b: Buffers, group: dist.ProcessGroup, rank: int) -> Call:
    later, tensor, output = case.async_op, b.input, b.output
    if case.form == "list":
        call, outputs = _dist("all_gather"), _blocks(output, case)
        return lambda: call(outputs, tensor, group, later)
    single = _dist("all_gather_single", "all_gather_into_tensor")
    return lambda: single(output, tensor, group, later)


def _reduce_scatter(case: Case, b: Buffers, group: dist.ProcessGroup, rank: int) -> Call:
    op, later, tensor, output = _op(case), case.async_op, b.input, b.output
    if case.form == "list":
        call, inputs = _dist("reduce_scatter"), _blocks(tensor, case)
        return lambda: call(output, inputs, op, group, later)
    single = _dist("reduce_scatter_single", "reduce_scatter_tensor")
    return lambda: single(output, tensor, op, group, later)


def _all_to_all(case: Case, b: Buffers, group: dist.ProcessGroup, rank: int) -> Call:
    later, tensor, output = case.async_op, b.input, b.output
    if case.form == "list":
        call, outputs, inputs = _dist("all_to_all"), _blocks(output, case), _blocks(tensor, case)
        return lambda: call(outputs, inputs, group, later)
    single = _dist("all_to_all_single")
    return lambda: single(output, tensor, None, None, group, later)


def _gather(case: Case, b: Buffers, group: dist.ProcessGroup, rank: int) -> Call:
    call, tensor, root, later = _dist("gather"), b.input, case.root, case.async_op
    outputs = _blocks(b.output, case) if rank == root else None
    return lambda: call(tensor, outputs, None, group, later, root)


def _scatter(case: Case, b: Buffers, group: dist.ProcessGroup, rank: int) -> Call:
    call, tensor, root, later = _dist("scatter"), b.output, case.root, case.async_op
    inputs = _blocks(b.input, case) if rank == root else None
    return lambda: call(tensor, inputs, None, group, later, root)


def _barrier(case: Case, b: Buffers, group: dist.ProcessGroup, rank: int) -> Call:
    call, later, device = _dist("barrier"), case.async_op, b.output.device
    device_ids = devices.of(device).barrier_options(device, group).get("device_ids")
    return lambda: call(group, later, device_ids)


def _partner(case: Case, rank: int) -> int | None:
    """Return the other rank of the pair 0-1, 2-3, …; None for the last of an odd number."""
    partner = rank ^ 1
    return partner if partner < case.world_size else None


def idle() -> None:
    """Do nothing: the call of a rank that takes no part in an operation."""


def _send_recv(case: Case, b: Buffers, group: dist.ProcessGroup, rank: int) -> Call:
    import torch.distributed as dist

    partner = _partner(case, rank)
    if partner is None:
        return idle

    def ping() -> None:
        dist.send(b.input, group_dst=partner, group=group)
        dist.recv(b.output, group_src=partner, group=group)

    def pong() -> None:
        dist.recv(b.output, group_src=partner, group=group)
        dist.send(b.input, group_dst=partner, group=group)

    return ping if rank < partner else pong


def _bidirectional(case: Case, b: Buffers, group: dist.ProcessGroup, rank: int) -> Call:
    import torch.distributed as dist

    partner = _partner(case, rank)
    if partner is None:
        return idle

    def both() -> None:
        # The lower rank issues its send first, the higher rank its receive.
        ops = [
            dist.P2POp(dist.isend, b.input, group=group, group_peer=partner),
            dist.P2POp(dist.irecv, b.output, group=group, group_peer=partner),
        ]
        for work in dist.batch_isend_irecv(ops if rank < partner else ops[::-1]):
            work.wait()

    return both


OPERATIONS: dict[str, Operation] = {
    entry.name: entry
    for entry in (
        Operation(
            name="all_reduce",
            help="every rank gets the reduction over all ranks",
            elements=_same,
            bind=_all_reduce,
            expected=_all_reduced,
            bus_factor=lambda n: 2 * (n - 1) / n,
            reduces=True,
        ),
        Operation(
            name="all_gather",
            help="every rank gets every rank's block",
            elements=lambda case, rank: (case.count, _all_counts(case)),
            bind=_all_gather,
            expected=_all_blocks,
            **BLOCKS,
            forms=("tensor", "list"),
            places=("out", "in"),
        ),
        Operation(
            name="broadcast",
            help="every rank gets the root's tensor",
            elements=_same,
            bind=_broadcast,
            expected=lambda case, rank: (Piece(0, case.count, case.root),),
            one_way=_with_two_ranks,
            rooted=True,
        ),
        Operation(
            name="reduce",
            help="the root gets the reduction over all ranks",
            elements=_same,
            bind=_reduce,
            expected=lambda case, rank: _all_reduced(case, rank) if rank == case.root else (),
            one_way=_with_two_ranks,
            reduces=True,
            rooted=True,
        ),
        Operation(
            name="reduce_scatter",
            help="every rank gets its block of the reduction",
            elements=lambda case, rank: (_all_counts(case), case.count),
            bind=_reduce_scatter,
            expected=lambda case, rank: (Piece(0, case.count, None, offset=rank * case.count),),
            **BLOCKS,
            forms=("tensor", "list"),
            places=("out", "in"),
            reduces=True,
        ),
        Operation(
            name="all_to_all",
            help="every rank sends a different block to each rank",
            elements=lambda case, rank: (_all_counts(case), _all_counts(case)),
            bind=_all_to_all,
            expected=lambda case, rank: tuple(
                Piece(r * case.count, case.count, r, offset=rank * case.count)
                for r in range(case.world_size)
            ),
            personal=True,
            **BLOCKS,
            forms=("tensor", "list"),
            places=("out",),
        ),
        Operation(
            name="gather",
            help="the root gets every rank's block",
            elements=lambda case, rank: (case.count, _all_counts(case) if rank == case.root else 0),
            bind=_gather,
            expected=lambda case, rank: _all_blocks(case, rank) if rank == case.root else (),
            one_way=lambda n: True,
            **BLOCKS,
            forms=("list",),
            places=("out",),
            rooted=True,
        ),
        Operation(
            name="scatter",
            help="every rank gets its block of the root's tensor",
            elements=lambda case, rank: (_all_counts(case) if rank == case.root else 0, case.count),
            bind=_scatter,
            expected=lambda case, rank: (Piece(0, case.count, case.root, rank * case.count),),
            one_way=lambda n: True,
            **BLOCKS,
            forms=("list",),
            places=("out",),
            rooted=True,
        ),
        Operation(
            name="barrier",
            help="every rank waits until all have entered; no data",
            elements=lambda case, rank: (0, 0),
            bind=_barrier,
            expected=lambda case, rank: (),
            least=lambda n: 0.0,
            sized=False,
        ),
        Operation(
            name="send_recv",
            help="ping-pong between ranks 0-1, 2-3, …; the time is half the round trip",
            elements=_same,
            bind=_send_recv,
            expected=_from_partner,
            one_way=lambda n: True,
            places=("out",),
            messages=2,
            paired=True,
        ),
        Operation(
            name="bidirectional",
            help="ranks 0-1, 2-3, … send to each other at the same time",
            elements=_same,
            bind=_bidirectional,
            expected=_from_partner,
            places=("out",),
            paired=True,
        ),
    )
}
