"""The process group: torch's calls as calls of MPI, on a communicator of its own.

As on every backend, all ranks issue a group's operations in one order, each from one thread at a
time. See ddpbench/mpi.py for its use, and work.py for the order of calls.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddpbench.mpi_backend.calls import SYNCED, Collectives, TensorList
from ddpbench.mpi_backend.library import NAME as NAME
from ddpbench.mpi_backend.library import mpi, world
from ddpbench.mpi_backend.tensors import DEVICES, finish, flatten, on_device, room_for
from ddpbench.mpi_backend.work import CallQueue, JoinedWork, Request, failure


def register() -> None:
    """Make "mpi4py" a backend name of torch.distributed. Calling again changes nothing."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=DEVICES)


class ProcessGroupMPI4PY(Collectives):
    """A process group over an MPI communicator; the methods are those that torch calls.

    Tensors may have any shape and strides. Every dtype can be moved. SUM, AVG, PRODUCT, MIN, MAX
    support float16/32/64, bfloat16 and all integers (AVG truncates); BAND, BOR, BXOR the integers;
    SUM, AVG, PRODUCT complex64/128. On bool, SUM and MAX are "or", PRODUCT and MIN "and". AVG
    supports neither bool nor uint16/32/64. An impossible call raises ValueError before sending; an
    error of MPI raises a DistBackendError with the operation and the rank.
    """

    # --- point to point

    def _post(self, name: str, tensors: TensorList, start: Any, peer: int, tag: int) -> Request:
        (tensor,) = tensors
        flat = (room_for if name == "recv" else flatten)(name, tensor)
        message = self._message(flat)
        self._queue.posted += 1
        try:
            request = on_device(partial(start, message, peer, tag), tensor)()
        except Exception as error:
            raise failure(name, self._rank, error) from error

        def finish_receive(status: Any) -> None:
            if name == "recv":
                received = status.Get_count(mpi().BYTE)
                if received != flat.nbytes:
                    raise ValueError(f"received {received} bytes, but the tensor has {flat.nbytes}")
                on_device(partial(finish, (tensor,), (flat,), 0), tensor)()

        work = Request(
            name, self._rank, tensor, request, finish=finish_receive, timeout=self._queue.timeout
        )
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def send(self, tensors: TensorList, peer: int, tag: int = 0) -> Request:
        """Send tensors[0] to a rank of this group."""
        return self._post("send", tensors, self._comm.Isend, peer, tag)

    def recv(self, tensors: TensorList, peer: int, tag: int = 0) -> Request:
        """Receive into tensors[0], from a rank of this group, exactly its number of bytes."""
        return self._post("recv", tensors, self._comm.Irecv, peer, tag)

    # --- several calls as one

    def _make_each(self, call: Callable[..., Any], arguments: Iterable[Any], opts: Any) -> Any:
        works = [call(*each, opts) for each in arguments]
        waits = not getattr(opts, "asyncOp", True)
        return SYNCED if waits else JoinedWork(works)

    def allreduce_coalesced(self, tensors: TensorList, opts: Any) -> Any:
        """Make an allreduce of each tensor."""
        return self._make_each(self.allreduce, ([[tensor]] for tensor in tensors), opts)

    def all_gather_single_coalesced(
        self, outputs: TensorList, inputs: TensorList, opts: Any
    ) -> Any:
        """Make an all_gather_single of each pair."""
        return self._make_each(self.all_gather_single, zip(outputs, inputs, strict=True), opts)

    def reduce_scatter_single_coalesced(
        self, outputs: TensorList, inputs: TensorList, opts: Any
    ) -> Any:
        """Make a reduce_scatter_single of each pair."""
        return self._make_each(self.reduce_scatter_single, zip(outputs, inputs, strict=True), opts)

    def _start_coalescing(self, _: torch.device) -> None:
        self._coalescing = []

    def _end_coalescing(self, _: torch.device) -> Any:
        works, self._coalescing = self._coalescing or [], None
        return JoinedWork(works)

    # Their names in torch before 2.13 and after it.
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    start_coalescing = _start_coalescing
    end_coalescing = _end_coalescing


def _create(request: Any, _: Any) -> dist.ProcessGroup:
    """Create a group; torch calls this on every member of a new group, and only there."""
    size = request.group_size
    # torch's ranks need not be MPI's: the store maps them. All ranks read it, so if mpirun did not
    # start them, all notice and none keeps waiting.
    request.store.set(f"mpi{request.group_rank}", str(world()[0]))
    keys = [f"mpi{rank}" for rank in range(size)]
    try:
        ranks = [int(text) for text in request.store.multi_get(keys)]
    except RuntimeError as error:
        absent = [rank for rank in range(size) if not request.store.check([keys[rank]])]
        text = f"of its {size} ranks, these did not join: {', '.join(map(str, absent))}"
        raise dist.DistBackendError(f"a group over mpi4py: {text}") from error
    if len(set(ranks)) != size:
        script = Path(sys.argv[0]).name or "script.py"
        raise ValueError(
            f"a group over mpi4py: {size} ranks of torch are MPI's ranks {ranks}: start them with "
            f"MPI's own launcher: mpirun -n {size} python {script}"
        )
    if mpi().Query_thread() < mpi().THREAD_MULTIPLE:
        raise ValueError(
            "a group over mpi4py: MPI does not provide THREAD_MULTIPLE, but several threads call "
            "it: leave mpi4py.rc.thread_level at its default, or use another MPI"
        )
    name = str(request.group_id)
    queue = CallQueue(request.group_rank, request.timeout, name)
    queue.running = (0, "new_group", None, 0)
    try:
        comm = _agree_communicator(ranks, name)
    finally:
        queue.running = None
    comm.Set_errhandler(mpi().ERRORS_RETURN)
    return ProcessGroupMPI4PY(comm, name, queue)


def _agree_communicator(ranks: list[int], name: str) -> Any:
    """Create a communicator of these ranks of MPI's world, in this order."""
    comm = mpi().COMM_WORLD
    if ranks == list(range(comm.Get_size())):
        return comm.Dup()
    world_group = comm.Get_group()
    members = world_group.Incl(ranks)
    tag = zlib.crc32(name.encode()) % 32768  # MPI allows every tag below that
    comm = comm.Create_group(members, tag)
    members.Free()
    world_group.Free()
    return comm
