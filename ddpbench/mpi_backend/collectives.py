"""Torch's collectives as calls of MPI, on whole tensors and lists of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddpbench.mpi_backend import tensors as mpi_tensors
from ddpbench.mpi_backend.library import NAME, mpi
from ddpbench.mpi_backend.tensors import (
    DEVICES,
    finish,
    flatten,
    is_plain,
    join,
    keep_apart,
    on_device,
    require,
    room_for,
    rooms_for,
)
from ddpbench.mpi_backend.work import Call, CallQueue, JoinedWork, Work

TensorList = list[Tensor]
TensorLists = list[list[Tensor]]
_ProcessGroup: Any = dist.ProcessGroup  # untyped: its overloads conflict with the methods here


# Newer torch does not expect a work from a synchronous call; older torch calls its wait().
_ENDED = JoinedWork("a call that has ended", -1, [])
SYNCED: Any = None if hasattr(dist.AllreduceOptions(), "asyncOp") else _ENDED


UNKNOWN: mpi_tensors.Reduction = (None, None, True)  # a reduction that MPI cannot do


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
        # For the plain cases of the most frequent calls, where each look-up takes time.
        self._queued, self._taken = queue.calls, queue.turn.locked
        self._in_place, self._byte = mpi().IN_PLACE, mpi().BYTE
        self._memory, self._reductions = mpi().buffer.fromaddress, mpi_tensors.reductions()

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

    def _is_free(self, opts: Any) -> bool:
        """Return whether the caller waits for the result, and no other call is queued before it."""
        try:
            return not (opts.asyncOp or self._queued or self._taken())
        except AttributeError:
            return False  # without options, or with those of older torch, it may not wait

    def _issue(
        self,
        name: str,
        opts: Any,
        run: Callable[[], Any],
        like: Tensor | None = None,
        *,
        outputs: Sequence[Tensor] = (),
        flats: Sequence[Tensor] = (),
        keep: Tensor | None = None,
        mean: bool = False,
        noted: Tensor | None = None,
    ) -> Any:
        """Make an MPI call now, or queue it if the caller does not wait or other calls are queued.

        like: for the device of the user's tensors. flats: results, to be copied to the outputs.
        keep: the source, whose memory MPI knows by address only. noted: for the dtype and size by
        which ranks compare their calls; like if None.
        """
        noted = like if noted is None else noted
        dtype, nbytes = (None, 0) if noted is None else (noted.dtype, noted.nbytes)
        divisor = self._size if mean else 0

        def call(_: Tensor | None = keep) -> None:
            self._queue.call(name, dtype, nbytes, run)
            finish(outputs, flats, divisor)

        made = call if like is None else on_device(call, like)
        if self._is_free(opts):
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

    def _message(self, flat: Tensor, kind: Any = None) -> Any:
        """Return a contiguous tensor as mpi4py takes it; the tensor must outlive the call.

        kind: MPI's datatype, bytes if None.
        """
        return self._memory(flat.data_ptr(), flat.nbytes), kind or self._byte

    def _reduction(self, name: str, tensor: Tensor, opts: Any) -> mpi_tensors.Reduction:
        reduction = self._reductions.get(tensor.dtype, {}).get(hash(opts.reduceOp), UNKNOWN)
        op = "" if reduction[0] else str(opts.reduceOp.op).rpartition(".")[2]
        require(name, reduction is not UNKNOWN, f"{op} cannot reduce {tensor.dtype}")
        return reduction

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

    def allreduce(self, tensors: TensorList, opts: Any = None) -> Any:
        """Reduce all ranks' tensors[0] into tensors[0] of every rank."""
        name, tensor = "all_reduce", self._single("all_reduce", tensors)
        # The plain case needs no preparation. At 4 bytes that saves half of the time that the group
        # adds to torch and MPI; the same holds for broadcast and all_gather_single.
        if self._is_free(opts) and is_plain(tensor):
            dtype, nbytes = tensor.dtype, tensor.nbytes
            kind, op, mean = self._reductions.get(dtype, {}).get(hash(opts.reduceOp), UNKNOWN)
            if not mean:
                message = self._memory(tensor.data_ptr(), nbytes), kind
                comm = self._comm
                self._queue.call(name, dtype, nbytes, comm.Allreduce, self._in_place, message, op)
                return SYNCED
        opts = opts or dist.AllreduceOptions()
        flat = flatten(name, tensor)
        kind, op, mean = self._reduction(name, flat, opts)
        message = self._message(flat, kind)
        run = partial(self._comm.Allreduce, self._in_place, message, op)
        return self._issue(name, opts, run, tensor, outputs=tensors, flats=(flat,), mean=mean)

    def reduce(self, tensors: TensorList, opts: Any = None) -> Any:
        """Reduce all ranks' tensors[0] into tensors[0] of the root."""
        name, opts, tensor = "reduce", opts or dist.ReduceOptions(), self._single("reduce", tensors)
        flat, root = flatten(name, tensor), opts.rootRank
        kind, op, mean = self._reduction(name, flat, opts)
        message = self._message(flat, kind)
        if root != self._rank:
            run = partial(self._comm.Reduce, message, None, op, root)
            return self._issue(name, opts, run, tensor, keep=flat)
        run = partial(self._comm.Reduce, self._in_place, message, op, root)
        return self._issue(name, opts, run, tensor, outputs=tensors, flats=(flat,), mean=mean)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> Any:
        """Reduce all ranks' sources; part r of the result becomes the output of rank r."""
        name = "reduce_scatter"
        self._require_whole(name, source, output)
        return self._reduce_scatter(opts, output, flatten(name, source), [output.numel()])

    def reduce_scatter(self, outputs: TensorList, inputs: TensorLists, opts: Any = None) -> Any:
        """Reduce all ranks' inputs[0][r] into outputs[0] of rank r; sizes may differ by r."""
        name = "reduce_scatter"
        (parts,), output = inputs, self._single(name, outputs)
        counts = self._counts(name, parts, output, even=False)
        require(name, counts[self._rank] == output.numel(), "output and input sizes differ")
        return self._reduce_scatter(opts, output, join(name, parts), counts)

    def _reduce_scatter(self, opts: Any, output: Tensor, whole: Tensor, counts: list[int]) -> Any:
        """Reduce and scatter `whole`. counts: elements per rank, a single one if all are equal."""
        name, opts = "reduce_scatter", opts or dist.ReduceScatterOptions()
        target = room_for(name, output)
        whole = keep_apart(whole, target)
        kind, op, mean = self._reduction(name, target, opts)
        sides = self._message(whole, kind), self._message(target, kind)
        if len(set(counts)) > 1:
            run = partial(self._comm.Reduce_scatter, *sides, counts, op)
        else:
            run = partial(self._comm.Reduce_scatter_block, *sides, op)
        results: dict[str, Any] = {"outputs": (output,), "flats": (target,), "mean": mean}
        return self._issue(name, opts, run, output, keep=whole, noted=whole, **results)

    # --- from one rank to all and back

    def broadcast(self, tensors: TensorList, opts: Any = None) -> Any:
        """Copy the root's tensors[0] to every rank."""
        name, tensor = "broadcast", self._single("broadcast", tensors)
        if self._is_free(opts) and is_plain(tensor):
            dtype, nbytes = tensor.dtype, tensor.nbytes
            message = self._memory(tensor.data_ptr(), nbytes), self._byte
            self._queue.call(name, dtype, nbytes, self._comm.Bcast, message, opts.rootRank)
            return SYNCED
        opts = opts or dist.BroadcastOptions()
        at_root = opts.rootRank == self._rank
        flat = (flatten if at_root else room_for)(name, tensor)
        run = partial(self._comm.Bcast, self._message(flat), opts.rootRank)
        flats = () if at_root else (flat,)
        return self._issue(name, opts, run, tensor, outputs=tensors, flats=flats, keep=flat)

    def scatter(self, outputs: TensorList, inputs: TensorLists, opts: Any = None) -> Any:
        """Copy the root's inputs[0][r] to outputs[0] of rank r; other ranks pass no inputs."""
        name, opts = "scatter", opts or dist.ScatterOptions()
        output = self._single(name, outputs)
        target, root, whole, source = room_for(name, output), opts.rootRank, None, None
        if root == self._rank:
            self._counts(name, inputs[0], output, even=True)
            whole = keep_apart(join(name, inputs[0]), target)
            source = self._message(whole)
        run = partial(self._comm.Scatter, source, self._message(target), root)
        return self._issue(name, opts, run, output, outputs=outputs, flats=(target,), keep=whole)

    def gather(self, outputs: TensorLists, inputs: TensorList, opts: Any = None) -> Any:
        """Copy inputs[0] of rank r to the root's outputs[0][r]; other ranks pass no outputs."""
        name, opts = "gather", opts or dist.GatherOptions()
        tensor = self._single(name, inputs)
        source, root, target = flatten(name, tensor), opts.rootRank, None
        targets: Sequence[Tensor] = ()
        parts: Sequence[Tensor] = ()
        if root == self._rank:
            targets = outputs[0]
            self._counts(name, targets, tensor, even=True)
            whole, parts = rooms_for(name, targets)
            source = keep_apart(source, whole)
            target = self._message(whole)
        run = partial(self._comm.Gather, self._message(source), target, root)
        return self._issue(name, opts, run, tensor, outputs=targets, flats=parts, keep=source)

    # --- from all ranks to all

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> Any:
        """Gather all ranks' sources, in rank order, into the output of every rank."""
        name = "all_gather"
        if self._is_free(opts) and is_plain(output) and is_plain(source):
            dtype, nbytes, total = source.dtype, source.nbytes, output.nbytes
            start, begin = output.data_ptr(), source.data_ptr()
            fits = total == nbytes * self._size and output.dtype == dtype
            if fits and (begin >= start + total or begin + nbytes <= start):
                message = self._memory(begin, nbytes), self._byte
                room = self._memory(start, total), self._byte
                self._queue.call(name, dtype, total, self._comm.Allgather, message, room)
                return SYNCED
        self._require_whole(name, output, source)
        whole = room_for(name, output)
        return self._all_gather(opts, source, [source.numel()] * self._size, whole, [output])

    def allgather(self, outputs: TensorLists, inputs: TensorList, opts: Any = None) -> Any:
        """Copy inputs[0] of rank r to outputs[0][r] of every rank; sizes may differ by r."""
        name = "all_gather"
        (parts,), source = outputs, self._single(name, inputs)
        counts = self._counts(name, parts, source, even=False)
        require(name, counts[self._rank] == source.numel(), "output and input sizes differ")
        whole, rooms = rooms_for(name, parts)
        return self._all_gather(opts, source, counts, whole, parts, rooms)

    def _all_gather(
        self,
        opts: Any,
        source: Tensor,
        counts: list[int],
        whole: Tensor,
        outputs: list[Tensor],
        parts: Sequence[Tensor] = (),
    ) -> Any:
        """Gather into `whole`; its parts, or itself if there are none, become the outputs."""
        name, flat = "all_gather", flatten("all_gather", source)
        in_place = flat.data_ptr() == whole.data_ptr() + sum(counts[: self._rank]) * flat.itemsize
        flat = flat if in_place else keep_apart(flat, whole)
        # MPI requires all ranks in place or none; each library here reads only its own choice.
        message = self._in_place if in_place else self._message(flat)
        if len(set(counts)) == 1:
            target = self._message(whole)
            run = partial(self._comm.Allgather, message, target)
        else:
            memory, kind = self._message(whole)
            nbytes = [count * flat.itemsize for count in counts]
            run = partial(self._comm.Allgatherv, message, (memory, nbytes, kind))
        flats = parts or (whole,)
        return self._issue(
            name, opts, run, source, outputs=outputs, flats=flats, keep=flat, noted=whole
        )

    def all_to_all_single(
        self, output: Tensor, source: Tensor, to: list[int], of: list[int], opts: Any = None
    ) -> Any:
        """Send part r of the source to rank r.

        to, of: rows of the output and of the source per rank, [] for even parts; all ranks pass
        them or none does.
        """
        name = "all_to_all"
        require(name, output.dtype == source.dtype, "output and input dtypes differ")
        target = room_for(name, output)
        whole = keep_apart(flatten(name, source), target)
        nbytes = self._rows(name, whole, of), self._rows(name, target, to)
        uneven = bool(of or to)
        require(name, uneven or nbytes[0] == nbytes[1], "output and input sizes differ")
        shares = nbytes if uneven else None
        return self._all_to_all(opts, whole, target, shares, [output], [target])

    def alltoall(self, outputs: TensorList, inputs: TensorList, opts: Any = None) -> Any:
        """Send inputs[r] to rank r, whose outputs[this rank] it becomes; sizes may differ."""
        name = "all_to_all"
        require(name, len(inputs) == self._size, f"the list must contain {self._size} tensors")
        for tensors in (inputs, outputs):
            self._counts(name, tensors, inputs[0], even=False)
        nbytes = [tensor.nbytes for tensor in inputs], [tensor.nbytes for tensor in outputs]
        target, parts = rooms_for(name, outputs)
        whole = keep_apart(join(name, inputs), target)
        return self._all_to_all(opts, whole, target, nbytes, outputs, parts)

    def _all_to_all(
        self,
        opts: Any,
        source: Tensor,
        target: Tensor,
        shares: tuple[list[int], list[int]] | None,
        outputs: Sequence[Tensor],
        flats: Sequence[Tensor],
    ) -> Any:
        """Exchange parts. shares: bytes per rank, out and in; None in all ranks: even parts."""
        name = "all_to_all"
        sides = self._message(source), self._message(target)
        if shares is None:
            run = partial(self._comm.Alltoall, *sides)
        else:
            (memory, kind), (room, _) = sides
            run = partial(self._comm.Alltoallv, (memory, shares[0], kind), (room, shares[1], kind))
        return self._issue(name, opts, run, outputs[0], outputs=outputs, flats=flats, keep=source)

    def barrier(self, opts: Any = None) -> Any:
        """Wait until every rank has issued this barrier."""
        return self._issue("barrier", opts, self._comm.Barrier)

    # Their names in torch before 2.13 and after it.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
