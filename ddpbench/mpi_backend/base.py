"""What every call of the process group shares: its communicator, and how a call is issued."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddpbench.mpi_backend import types as mpi_types
from ddpbench.mpi_backend.library import mpi, thread_level
from ddpbench.mpi_backend.tensors import after_stream, finish, require
from ddpbench.mpi_backend.work import Call, Lane, Work, failure

NAME = "mpi4py"
# Newer torch does not ask a synchronous call for a work; older torch calls its wait().
_ENDED = Call((0, "a call that has ended", None, 0), -1, [], int, None)  # type: ignore[arg-type]
_ENDED.run()
SYNCED: Any = None if hasattr(dist.AllreduceOptions(), "asyncOp") else _ENDED
DEVICES = ["cpu", "cuda"]
_ProcessGroup: Any = dist.ProcessGroup  # its overloads of every method would all be in the way


class GroupBase(_ProcessGroup):  # type: ignore[misc]
    """A process group over an MPI communicator, without its operations."""

    group_name = ""  # torch's own asks a C++ backend, which this group has not
    supports_coalescing = supports_splitting = supports_shrinking = False  # so does newer torch

    def __init__(self, comm: Any, name: str, lane: Lane) -> None:
        self._rank, self._size = comm.Get_rank(), comm.Get_size()
        super().__init__(self._rank, self._size)
        self.group_name = name
        self._comm, self._lane = comm, lane
        self._coalescing: list[Work] | None = None
        # Below THREAD_MULTIPLE only one thread at a time may call MPI, and with a lock around
        # calls that block, one thread's waiting could stop the call that the peer waits for. So
        # there is no worker then: asynchronous calls run at once, on the caller's thread.
        self._threaded = thread_level() == "MULTIPLE"
        # For the plain cases of the commonest calls, where each look-up counts.
        self._queued, self._taken = lane.calls, lane.turn.locked
        self._count, self._keep = lane.count, lane.past.append
        self._in_place, self._memory, self._byte = (
            mpi().IN_PLACE,
            mpi().buffer.fromaddress,
            mpi().BYTE,
        )
        self._sums: Any = {
            dtype: {key: found[:2] for key, found in ops.items() if not found[2]}
            for dtype, ops in mpi_types.reductions().items()
        }

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices whose tensors the group takes; torch takes the first where any will do."""
        # torch registers devices for backends in C++ only. While a group is being made, torch 2.15
        # also tells by them whether C++ can record it.
        made = self in dist.distributed_c10d._world.pg_map
        return [torch.device(device) for device in DEVICES] if made else []

    def _get_backend(self, _: Any) -> GroupBase:
        return self

    def supports_tensor_alloc(self, _: Any) -> bool:
        return False

    def shutdown(self) -> None:
        """Serve what is queued, end the thread, free the communicator."""
        if why := self._lane.close():
            raise dist.DistBackendError(f"{why}: cannot shut down")
        if self._comm and not mpi().Is_finalized():
            self._comm.Free()

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # Older torch shuts down its own backends only. A group that outlives the main program, in
        # a trainer's reference cycle, has had its thread ended; the names it would use are gone.
        if not ending():
            self.shutdown()

    def _free(self, opts: Any) -> bool:
        """Whether the caller waits, and for nothing but MPI.

        Without options, or with older torch's, the caller may count on not waiting.
        """
        return not (getattr(opts, "asyncOp", True) or self._queued or self._taken())

    def _issue(
        self,
        name: str,
        opts: Any,
        run: Callable[[], Any],
        like: Tensor | None = None,
        outputs: Sequence[Tensor] = (),
        flats: Sequence[Tensor] = (),
        mean: bool = False,
        noted: Tensor | None = None,
    ) -> Any:
        """Make an MPI call or, where the caller does not wait or others wait already, queue it.

        run makes the call and keeps alive what MPI knows by address only; `flats` are its results;
        `like` tells the device of the user's tensors; `noted`, by default `like`, the dtype and the
        size by which ranks compare their calls.
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
        work = Call(this, self._rank, list(outputs), call, lane)
        if self._threaded:
            lane.submit(work)
        else:
            lane.inside = this
            try:
                work.run()
            finally:
                lane.inside = None
        if not getattr(opts, "asyncOp", True):
            work.wait()
            return SYNCED
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _single(self, name: str, tensors: Sequence[Tensor]) -> Tensor:
        if len(tensors) != 1:
            raise ValueError(f"{name} over mpi4py: one tensor a rank, not {len(tensors)}")
        return tensors[0]

    def _counts(self, name: str, tensors: Sequence[Tensor], part: Tensor, even: bool) -> list[int]:
        """The sizes of a list with one tensor a rank, of the dtype (and the size) of this part."""
        counts = [tensor.numel() for tensor in tensors if tensor.dtype == part.dtype]
        fits = len(counts) == len(tensors) == self._size
        fits = fits and (set(counts) == {part.numel()} if even else True)
        size = f" of {part.numel()}" if even else ""
        require(name, fits, f"the list must hold {self._size} tensors{size}, {part.dtype}")
        return counts

    def _shares(self, name: str, whole: Tensor, part: Tensor) -> None:
        fits = whole.dtype == part.dtype and whole.numel() == self._size * part.numel()
        require(name, fits, f"the large tensor must be {self._size} x {part.numel()} {part.dtype}")

    def _rows(self, name: str, tensor: Tensor, rows: list[int]) -> list[int]:
        """Elements a rank, of a tensor dealt by rows; without numbers of rows, evenly."""
        length = len(tensor) if tensor.ndim else 1
        rows = list(rows) or [length // self._size] * self._size
        fits = len(rows) == self._size and sum(rows) == length
        require(name, fits, f"splits {rows} do not deal {length} rows to {self._size} ranks")
        return [count * (tensor.numel() // max(length, 1)) for count in rows]

    def _reduction(self, name: str, tensor: Tensor, opts: Any) -> mpi_types.Reduction:
        found = mpi_types.reductions().get(tensor.dtype, {}).get(hash(opts.reduceOp))
        if found is None:
            op = str(opts.reduceOp.op).rpartition(".")[2]
            raise ValueError(f"{name} over mpi4py: {op} cannot reduce {tensor.dtype}")
        return found
