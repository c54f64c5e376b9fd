"""Torch's collectives as calls of MPI, on whole tensors and lists of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddpbench.mpi_backend.library import NAME, mpi
from ddpbench.mpi_backend.tensors import (
    DEVICES,
    Reduction,
    finish,
    flatten,
    is_plain,
    join,
    keep_apart,
    on_device,
    reductions,
    require,
    room_for,
    rooms_for,
)
from ddpbench.mpi_backend.work import Call, CallQueue, JoinedWork, Work

TensorList = list[Tensor]
TensorLists = list[list[Tensor]]
_ProcessGroup: Any = dist.ProcessGroup  # untyped: its overloads conflict with the methods here

# Newer torch does not expect a work from a synchronous call; older torch calls its wait().
_ENDED = JoinedWork([])
SYNCED: Any = None if hasattr(dist.AllreduceOptions(), "asyncOp") else _ENDED


class GroupBase(_ProcessGroup):  # type: ignore[misc]
    """A process group over an MPI communicator, without its operations."""

    # torch's own properties ask a C++ backend, which this group does not have.
    group_name = ""
    supports_coalescing = supports_splitting = supports_shrinking = False

    def __init__(self, comm: Any, name: str, queue: CallQueue) -> None:
        self._rank, self._size = comm.Get_rank(), comm.Get_size()
        super().__init__(self._rank, self._size)
        self.group_name = name
        self._comm, self._queue = comm, queue
        self._coalescing: list[Work] | None = None
        # Bound once: each look-up takes time in the smallest calls.
        self._queued, self._taken = queue.calls, queue.turn.locked
        self._in_place, self._byte = mpi().IN_PLACE, mpi().BYTE
        self._memory, self._reductions = mpi().buffer.fromaddress, reductions()

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
        return self._queue.recorded()[0]

    def supports_tensor_alloc(self, _: Any) -> bool:
        return False

    def shutdown(self) -> None:
        """Run the queued calls, end the thread, free the communicator."""
        if reason := self._queue.close():
            raise dist.DistBackendError(f"{reason}: cannot shut down")
        if self._comm and not mpi().Is_finalized():
            self._comm.Free()

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # Older torch shuts down its own backends only. If a trainer's reference cycle keeps a group
        # alive beyond the main program, its thread and the names it would use no longer exist.
        if not ending():
            self.shutdown()

    # --- how a call is issued

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
        nbytes: int | None = None,
    ) -> Any:
        """Make an MPI call now, or queue it if the caller does not wait or other calls are queued.

        like: one of the user's tensors. flats: memory that MPI knows by address only; the results
        come first, and are copied to the outputs. nbytes: the size by which ranks compare their
        calls; the size of `like` if None.
        """
        dtype = None if like is None else like.dtype
        if nbytes is None:
            nbytes = 0 if like is None else like.nbytes

        def call() -> None:
            self._queue.call(None, name, dtype, nbytes, run)
            finish(outputs, flats, self._size if mean else 0)

        made = call if like is None else on_device(call, like)
        if not (getattr(opts, "asyncOp", True) or self._queued or self._taken()):
            made()
            return SYNCED
        work = Call(name, self._queue, made, list(outputs))
        self._queue.submit(work)
        if not getattr(opts, "asyncOp", True):
            work.wait()
            return SYNCED
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _exchange(
        self,
        name: str,
        opts: Any,
        call: Callable[..., Any],
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        *,
        last: Sequence[Any] = (),
        shares: Sequence[Sequence[int]] = ((), ()),
        rooted: bool = False,
        own: int | None = None,
        kind: Any = None,
        mean: bool = False,
    ) -> Any:
        """Issue an MPI call from the memory of all inputs to the memory of all outputs.

        last: the call's arguments after these. shares: bytes per rank of the inputs and of the
        outputs, where they can differ. rooted: only the root has both. own: the elements before
        this rank's own part of the outputs, which may be the input. kind: MPI's datatype.
        """
        source = join(name, inputs) if inputs else None
        target, parts = rooms_for(name, outputs) if outputs else (None, [])
        begin = None
        if source is not None and target is not None:
            begin = None if own is None else target.data_ptr() + own * target.itemsize
            source = source if source.data_ptr() == begin else keep_apart(source, target)
        # MPI requires all ranks in place or none; each library here reads only its own choice.
        send = self._in_place
        if source is None or source.data_ptr() != begin:
            send = self._message(source, kind, shares[0])
        receive = self._message(target, kind, shares[1])
        sides = [side for side in (source, target) if side is not None]
        return self._issue(
            name,
            opts,
            partial(call, send, receive, *last),
            (inputs or outputs)[0],
            outputs=outputs,
            flats=(*parts, *sides),
            mean=mean,
            nbytes=(min if rooted else max)(side.nbytes for side in sides),
        )

    def _message(self, flat: Tensor | None, kind: Any = None, counts: Sequence[int] = ()) -> Any:
        """Return a contiguous tensor as mpi4py takes it; the tensor must outlive the call.

        kind: MPI's datatype, bytes if None. counts: per rank, in a call where they can differ.
        """
        if flat is None:
            return None
        memory = self._memory(flat.data_ptr(), flat.nbytes)
        return (memory, counts, kind or self._byte) if counts else (memory, kind or self._byte)

    def _reduction(self, name: str, dtype: torch.dtype, opts: Any) -> Reduction:
        try:
            return self._reductions[dtype][hash(opts.reduceOp)]
        except KeyError:
            op = str(opts.reduceOp.op).rpartition(".")[2]
            raise ValueError(f"{name} over mpi4py: {op} cannot reduce {dtype}") from None

    def _counts(self, name: str, tensors: Sequence[Tensor], part: Tensor, even: bool) -> list[int]:
        """Return the sizes of a list with a tensor per rank, of part's dtype and, if even, size."""
        counts = [tensor.numel() for tensor in tensors if tensor.dtype == part.dtype]
        fits = len(counts) == len(tensors) == self._size
        fits = fits and (not even or set(counts) == {part.numel()})
        size = f" of {part.numel()}" if even else ""
        require(name, fits, f"the list must contain {self._size} tensors{size}, {part.dtype}")
        return counts

    def _require_whole(self, name: str, whole: Tensor, part: Tensor) -> None:
        fits = whole.dtype == part.dtype and whole.numel() == self._size * part.numel()
        require(name, fits, f"the large tensor must be {self._size} x {part.numel()} {part.dtype}")

    def _rows(self, name: str, tensor: Tensor, rows: list[int]) -> list[int]:
        """Return the bytes per rank of a tensor divided by rows; evenly if no rows are given."""
        length = len(tensor) if tensor.ndim else 1
        rows = list(rows) or [length // self._size] * self._size
        fits = len(rows) == self._size and sum(rows) == length
        require(name, fits, f"splits {rows} do not fit {length} rows and {self._size} ranks")
        return [count * (tensor.nbytes // max(length, 1)) for count in rows]


class Collectives(GroupBase):
    """The collectives, by the names that torch calls. A watch takes each of them for a wait."""

    # --- reductions

    def allreduce(self, tensors: TensorList, opts: Any) -> Any:
        """Reduce all ranks' tensors[0] into tensors[0] of every rank."""
        name, (tensor,) = "all_reduce", tensors
        kind, op, mean = self._reduction(name, tensor.dtype, opts)
        plain = is_plain(tensor) and not mean
        flat = tensor if plain else flatten(name, tensor)
        nbytes = flat.nbytes
        message = self._memory(flat.data_ptr(), nbytes), kind
        comm, own, dtype = self._comm, self._in_place, tensor.dtype
        if plain and self._queue.call(opts, name, dtype, nbytes, comm.Allreduce, own, message, op):
            return SYNCED
        run = partial(comm.Allreduce, own, message, op)
        return self._issue(name, opts, run, tensor, outputs=tensors, flats=(flat,), mean=mean)

    def reduce(self, tensors: TensorList, opts: Any) -> Any:
        """Reduce all ranks' tensors[0] into tensors[0] of the root."""
        name, (tensor,), root = "reduce", tensors, opts.rootRank
        flat = flatten(name, tensor)
        kind, op, mean = self._reduction(name, tensor.dtype, opts)
        message, outputs = self._message(flat, kind), tensors
        sides = self._in_place, message
        if root != self._rank:
            sides, outputs = (message, None), []
        run = partial(self._comm.Reduce, *sides, op, root)
        return self._issue(name, opts, run, tensor, outputs=outputs, flats=(flat,), mean=mean)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any) -> Any:
        """Reduce all ranks' sources; part r of the result becomes the output of rank r."""
        self._require_whole("reduce_scatter", source, output)
        return self._reduce_scatter(opts, output, [source], [output.numel()])

    def reduce_scatter(self, outputs: TensorList, inputs: TensorLists, opts: Any) -> Any:
        """Reduce all ranks' inputs[0][r] into outputs[0] of rank r; sizes may differ by r."""
        name, (output,), (parts,) = "reduce_scatter", outputs, inputs
        counts = self._counts(name, parts, output, even=False)
        require(name, counts[self._rank] == output.numel(), "output and input sizes differ")
        return self._reduce_scatter(opts, output, parts, counts)

    def _reduce_scatter(
        self, opts: Any, output: Tensor, inputs: Sequence[Tensor], counts: list[int]
    ) -> Any:
        """Reduce and scatter the inputs. counts: elements per rank, one if all are equal."""
        name = "reduce_scatter"
        kind, op, mean = self._reduction(name, output.dtype, opts)
        call, last = self._comm.Reduce_scatter_block, [op]
        if len(set(counts)) > 1:
            call, last = self._comm.Reduce_scatter, [counts, op]
        return self._exchange(name, opts, call, inputs, [output], last=last, kind=kind, mean=mean)

    # --- from one rank to all and back

    def broadcast(self, tensors: TensorList, opts: Any) -> Any:
        """Copy the root's tensors[0] to every rank."""
        name, (tensor,), root = "broadcast", tensors, opts.rootRank
        plain, flat, outputs = is_plain(tensor), tensor, tensors
        if not plain:
            flat = (flatten if root == self._rank else room_for)(name, tensor)
            outputs = tensors if root != self._rank else []
        nbytes = flat.nbytes
        message = self._memory(flat.data_ptr(), nbytes), self._byte
        call = self._comm.Bcast
        if plain and self._queue.call(opts, name, tensor.dtype, nbytes, call, message, root):
            return SYNCED
        run = partial(call, message, root)
        return self._issue(name, opts, run, tensor, outputs=outputs, flats=(flat,))

    def scatter(self, outputs: TensorList, inputs: TensorLists, opts: Any) -> Any:
        """Copy the root's inputs[0][r] to outputs[0] of rank r; other ranks pass no inputs."""
        name, (output,), root, parts = "scatter", outputs, opts.rootRank, []
        if root == self._rank:
            (parts,) = inputs
            self._counts(name, parts, output, even=True)
        call = self._comm.Scatter
        return self._exchange(name, opts, call, parts, outputs, last=[root], rooted=True)

    def gather(self, outputs: TensorLists, inputs: TensorList, opts: Any) -> Any:
        """Copy inputs[0] of rank r to the root's outputs[0][r]; other ranks pass no outputs."""
        name, (source,), root, parts = "gather", inputs, opts.rootRank, []
        if root == self._rank:
            (parts,) = outputs
            self._counts(name, parts, source, even=True)
        call = self._comm.Gather
        return self._exchange(name, opts, call, inputs, parts, last=[root], rooted=True)

    # --- from all ranks to all

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any) -> Any:
        """Gather all ranks' sources, in rank order, into the output of every rank."""
        name = "all_gather"
        if is_plain(output) and is_plain(source):
            dtype, nbytes, total = source.dtype, source.nbytes, output.nbytes
            start, begin = output.data_ptr(), source.data_ptr()
            fits = total == nbytes * self._size and output.dtype == dtype
            if fits and (begin >= start + total or begin + nbytes <= start):
                message = self._memory(begin, nbytes), self._byte
                room = self._memory(start, total), self._byte
                call = self._comm.Allgather
                if self._queue.call(opts, name, dtype, total, call, message, room):
                    return SYNCED
        self._require_whole(name, output, source)
        return self._all_gather(opts, [output], source, [source.numel()] * self._size)

    def allgather(self, outputs: TensorLists, inputs: TensorList, opts: Any) -> Any:
        """Copy inputs[0] of rank r to outputs[0][r] of every rank; sizes may differ by r."""
        name, (parts,), (source,) = "all_gather", outputs, inputs
        counts = self._counts(name, parts, source, even=False)
        require(name, counts[self._rank] == source.numel(), "output and input sizes differ")
        return self._all_gather(opts, parts, source, counts)

    def _all_gather(
        self, opts: Any, outputs: Sequence[Tensor], source: Tensor, counts: list[int]
    ) -> Any:
        call, shares, own = self._comm.Allgather, [], sum(counts[: self._rank])
        if len(set(counts)) > 1:
            call, shares = self._comm.Allgatherv, [count * source.itemsize for count in counts]
        return self._exchange(
            "all_gather", opts, call, [source], outputs, shares=([], shares), own=own
        )

    def all_to_all_single(
        self, output: Tensor, source: Tensor, to: list[int], of: list[int], opts: Any
    ) -> Any:
        """Send part r of the source to rank r.

        to, of: rows of the output and of the source per rank, [] for even parts; all ranks pass
        them or none does.
        """
        name = "all_to_all"
        require(name, output.dtype == source.dtype, "output and input dtypes differ")
        shares = self._rows(name, source, of), self._rows(name, output, to)
        if of or to:
            call = self._comm.Alltoallv
            return self._exchange(name, opts, call, [source], [output], shares=shares)
        require(name, shares[0] == shares[1], "output and input sizes differ")
        return self._exchange(name, opts, self._comm.Alltoall, [source], [output])

    def alltoall(self, outputs: TensorList, inputs: TensorList, opts: Any) -> Any:
        """Send inputs[r] to rank r, whose outputs[this rank] it becomes; sizes may differ."""
        name = "all_to_all"
        require(name, len(inputs) == self._size, f"the list must contain {self._size} tensors")
        for tensors in (inputs, outputs):
            self._counts(name, tensors, inputs[0], even=False)
        shares = [[tensor.nbytes for tensor in tensors] for tensors in (inputs, outputs)]
        return self._exchange(name, opts, self._comm.Alltoallv, inputs, outputs, shares=shares)

    def barrier(self, opts: Any) -> Any:
        """Wait until every rank has issued this barrier."""
        return self._issue("barrier", opts, self._comm.Barrier)

    # Their names in torch before 2.13 and after it.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
