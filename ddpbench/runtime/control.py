"""How ranks agree, over the control group (gloo), never over the backend that is measured."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Protocol

from ddpbench.launch.placement import Refused

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class Membership(Protocol):
    """A rank among all ranks: the part of World that an agreement needs."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...


def gather_values(world: Membership, mine: Any) -> list[Any]:
    """Every rank's JSON-able value, in order of rank, in every rank."""
    import torch
    import torch.distributed as dist

    content = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
    length = torch.tensor([content.numel()])
    lengths = [torch.empty_like(length) for _ in range(world.world_size)]
    dist.all_gather(lengths, length)
    room = torch.zeros(max(map(int, lengths)), dtype=torch.uint8)
    room[: content.numel()] = content
    rows = [torch.empty_like(room) for _ in range(world.world_size)]
    dist.all_gather(rows, room)
    return [
        json.loads(row[: int(size)].numpy().tobytes())
        for row, size in zip(rows, lengths, strict=True)
    ]


def broadcast_value(world: Membership, value: Any) -> Any:
    """Rank 0's JSON-able value, in every rank."""
    content = json.dumps(value).encode() if world.rank == 0 else b""
    return json.loads(broadcast_bytes(world, content))


def broadcast_bytes(world: Membership, content: bytes) -> bytes:
    """Rank 0's bytes, in every rank."""
    import torch
    import torch.distributed as dist

    length = broadcast_decision(world, len(content))
    tensor = torch.empty(length, dtype=torch.uint8)
    if world.rank == 0 and length:
        tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    if length:
        dist.broadcast(tensor, src=0)
    return tensor.numpy().tobytes()


def broadcast_decision(world: Membership, value: int) -> int:
    """Rank 0's whole number, in every rank: the cheap one, made between repetitions."""
    import torch
    import torch.distributed as dist

    cell = torch.tensor([value], dtype=torch.int64)
    dist.broadcast(cell, src=0)
    return int(cell.item())


def barrier_all() -> None:
    """No rank goes on before all have come. After a decision some may: a rank hears it from one
    other, and waits for nobody else."""
    import torch.distributed as dist

    dist.barrier()


def agree_any(mine: bool) -> bool:
    """Whether `mine` is true in any rank: one reduction, cheaper than `gather_values`."""
    import torch
    import torch.distributed as dist

    cell = torch.tensor([mine], dtype=torch.uint8)
    dist.all_reduce(cell, dist.ReduceOp.MAX)
    return bool(cell.item())


def gather_to_rank_0(
    world: Membership, mine: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64] | None:
    """Arrays of one shape from all ranks: int64[world, …] in rank 0, None elsewhere."""
    import numpy as np
    import torch
    import torch.distributed as dist

    tensor = torch.from_numpy(np.ascontiguousarray(mine))
    if world.rank:
        dist.gather(tensor, dst=0)
        return None
    whole = torch.empty((world.world_size, *tensor.shape), dtype=tensor.dtype)
    dist.gather(tensor, list(whole.unbind()), dst=0)
    return whole.numpy()


def agree_objection(world: Membership, mine: str | None) -> str | None:
    """None when no rank objects; else the lowest objecting rank's sentence, naming the ranks."""
    if not agree_any(mine is not None):
        return None
    objections = {r: text for r, text in enumerate(gather_values(world, mine)) if text is not None}
    text: str = objections[min(objections)]
    if len(objections) == world.world_size:
        return text
    return f"{text} (rank {', '.join(map(str, objections))})"


def first_line(error: BaseException, most: int = 200) -> str:
    """What an error says, for an objection: its first line, `most` characters of it."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:most]


def agree_same_options(world: Membership, mine: dict[str, Any]) -> None:
    """Raises Refused, naming the rank and the option, when a rank was started differently."""
    sentence = find_differing_option(gather_values(world, mine))
    if sentence is not None:
        raise Refused(sentence)


def find_differing_option(everyone: list[dict[str, Any]]) -> str | None:
    """A sentence naming the rank and the option that is not as rank 0's; None when all agree."""
    for rank, options in enumerate(everyone):
        for name, value in everyone[0].items():
            if options.get(name) != value:
                return (
                    f"rank {rank} was started with --{name} "
                    f"{_shown(options.get(name))}, rank 0 with {_shown(value)}: "
                    "start all ranks with the same options"
                )
    return None


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
