"""Collectives of the control group, which always uses gloo, never the measured backend."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ddpbench.launch.placement import Refused

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class Membership(Protocol):
    """The part of a World that these collectives need."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...


def gather_values(world: Membership, value: Any) -> list[Any]:
    """Return every rank's JSON-able value, in order of rank, on every rank."""
    import torch
    import torch.distributed as dist

    content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    length = torch.tensor([content.numel()])
    lengths = [torch.empty_like(length) for _ in range(world.world_size)]
    dist.all_gather(lengths, length)
    padded = torch.zeros(max(map(int, lengths)), dtype=torch.uint8)
    padded[: content.numel()] = content
    rows = [torch.empty_like(padded) for _ in range(world.world_size)]
    dist.all_gather(rows, padded)
    return [
        json.loads(row[: int(size)].numpy().tobytes())
        for row, size in zip(rows, lengths, strict=True)
    ]


def broadcast_value(world: Membership, value: Any) -> Any:
    """Return rank 0's JSON-able value on every rank."""
    import torch
    import torch.distributed as dist

    text = json.dumps(value if world.rank == 0 else None)
    content = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    length = broadcast_decision(world, content.numel())
    if world.rank != 0:
        content = torch.empty(length, dtype=torch.uint8)
    dist.broadcast(content, src=0)
    return json.loads(content.numpy().tobytes())


def broadcast_decision(world: Membership, value: int) -> int:
    """Return rank 0's integer on every rank; cheap enough between repetitions."""
    import torch
    import torch.distributed as dist

    cell = torch.tensor([value], dtype=torch.int64)
    dist.broadcast(cell, src=0)
    return int(cell.item())


def send_number(peer: int, value: int) -> None:
    """Send an integer to a rank that calls `receive_number`."""
    import torch
    import torch.distributed as dist

    dist.send(torch.tensor([value], dtype=torch.int64), peer)


def receive_number(peer: int) -> int:
    """Return the integer that this rank sends with `send_number`."""
    import torch
    import torch.distributed as dist

    cell = torch.zeros(1, dtype=torch.int64)
    dist.recv(cell, peer)
    return int(cell.item())


def barrier_all() -> None:
    """Wait until all ranks have called this.

    A broadcast does not wait for all: a rank receives it from one other rank.
    """
    import torch.distributed as dist

    dist.barrier()


def agree_any(value: bool) -> bool:
    """Return whether the value is true on any rank; one reduction, cheaper than `gather_values`."""
    import torch
    import torch.distributed as dist

    cell = torch.tensor([value], dtype=torch.uint8)
    dist.all_reduce(cell, dist.ReduceOp.MAX)
    return bool(cell.item())


def gather_to_rank_0(
    world: Membership, array: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64] | None:
    """Gather arrays of one shape from all ranks: int64[world, …] on rank 0, None elsewhere."""
    import numpy as np
    import torch
    import torch.distributed as dist

    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if world.rank:
        dist.gather(tensor, dst=0)
        return None
    rows = torch.empty((world.world_size, *tensor.shape), dtype=tensor.dtype)
    dist.gather(tensor, list(rows.unbind()), dst=0)
    return rows.numpy()


def agree_objection(world: Membership, objection: str | None) -> str | None:
    """Return the lowest rank's objection, with all ranks that object; None if no rank does."""
    if not agree_any(objection is not None):
        return None
    objections = {
        rank: text for rank, text in enumerate(gather_values(world, objection)) if text is not None
    }
    text: str = objections[min(objections)]
    if len(objections) == world.world_size:
        return text
    return f"{text} (rank {', '.join(map(str, objections))})"


@contextlib.contextmanager
def agree_refusal(world: Membership) -> Iterator[None]:
    """Raise the Refused of a block in all ranks together, even if only some ranks raise it."""
    objection = None
    try:
        yield
    except Refused as refused:
        objection = str(refused)
    if (sentence := agree_objection(world, objection)) is not None:
        raise Refused(sentence)


def first_line(error: BaseException, length: int = 200) -> str:
    """Return the first line of an error's message, cut to this length."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:length]


def find_differing_option(options_of_ranks: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a sentence on the first option that differs from rank 0's; None if all agree."""
    first = options_of_ranks[0]
    for rank, options in enumerate(options_of_ranks):
        for name in ("device", *first):  # the default backend depends on the device
            own, other = (_format_option(each.get(name)) for each in (options, first))
            if own != other:
                hint = "; with auto, a rank that sees no GPU uses the CPU" * (name == "device")
                return (
                    f"rank {rank} has --{name} {own}, rank 0 has {other}: start all ranks with "
                    f"the same options{hint}"
                )
    return None


def _format_option(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
