"""Exchange between the ranks of a group, through public calls of torch.distributed.

Every call here is made by all ranks of the group in the same order, because what is called next
depends only on what all of them know. Each wait is bounded by the group's own timeout, and what
then is raised is the group's error.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

Int64 = npt.NDArray[np.int64]


def choose_device(kinds: Sequence[str], tensors: Iterable[torch.Tensor]) -> torch.device:
    """Return the device of a group's messages: the CPU if the group takes its tensors.

    Otherwise the first device of these kinds that holds one of the tensors. The current device may
    be another rank's, because a script that passes devices around need not set it.
    """
    if "cpu" in kinds:
        return torch.device("cpu")
    own = (tensor.device for tensor in tensors if tensor.device.type in kinds)
    return next(own, torch.device(kinds[0]))  # without a number: the current one


class Channel:
    """A process group and the device of its messages; without a group, this process alone."""

    def __init__(self, group: dist.ProcessGroup | None, module: torch.nn.Module) -> None:
        self.group = group
        self.ranks, self.rank = [0], 0  # global ranks, in the group's order; this one's place
        self.device = torch.device("cpu")
        self.alone = not (dist.is_available() and dist.is_initialized())
        if self.alone:
            return
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise ValueError("this rank is not in the group: call it in the ranks of the group")
        self.ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        kinds = [part.split(":")[0] for part in dist.get_backend_config(group).split(",")]
        self.device = choose_device(kinds, chain(module.parameters(), module.buffers()))

    def gather_extremes(self, vector: Int64) -> tuple[Int64, Int64]:
        """The least and the greatest over the ranks of each of int64[n], n the same in all.

        One all_reduce: complementing turns the order of int64 round, without overflow.
        """
        if self.alone or vector.size == 0:
            return vector, vector
        both = torch.from_numpy(np.concatenate([vector, ~vector])).to(self.device)
        dist.all_reduce(both, dist.ReduceOp.MIN, self.group)
        least, most = both.cpu().numpy().reshape(2, -1)
        return least, ~most

    def gather_rows(self, vector: Int64) -> Int64:
        """int64[ranks, n]: every rank's int64[n], n the same in all."""
        if self.alone:
            return vector[None]
        own = torch.from_numpy(np.ascontiguousarray(vector)).to(self.device)
        parts = [torch.empty_like(own) for _ in self.ranks]
        dist.all_gather(parts, own, self.group)
        return torch.stack(parts).cpu().numpy()

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's value as JSON keeps it."""
        content = np.frombuffer(json.dumps(value).encode(), np.uint8)
        sizes = self.gather_rows(np.array([content.size], np.int64))[:, 0]
        room = np.zeros(-(-int(sizes.max()) // 8) * 8, np.uint8)
        room[: content.size] = content
        rows = self.gather_rows(room.view(np.int64)).view(np.uint8)
        return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def broadcast_bytes(self, content: npt.NDArray[np.uint8], source: int) -> npt.NDArray[np.uint8]:
        """The bytes uint8[n] of the rank at this place of the group; n the same in all."""
        if self.alone:
            return content
        # The caller's memory may be the replica's own: it is sent from, never written to.
        tensor = torch.from_numpy(content.copy()).to(self.device)
        dist.broadcast(tensor, self.ranks[source], self.group)
        return tensor.cpu().numpy()
