"""The process group: torch's calls as MPI's, on a communicator of its own.

As on every backend, all ranks issue a group's operations in one order, each from one thread at a
time. How it is used stands in mpi.py, how calls wait in mpi_work.py.
"""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddpbench.mpi_backend import types as mpi_types
from ddpbench.mpi_backend.library import cuda_aware, mpi, thread_level, world
from ddpbench.mpi_backend.types import block, memory, pieces, unit
from ddpbench.mpi_backend.work import Call, Lane, Request, Together, Work, failure

NAME = "mpi4py"
_Tensors = list[Tensor]
_Lists = list[list[Tensor]]


def register() -> None:
    """Make "mpi4py" a backend name of torch.distributed. Calling again changes nothing."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=_DEVICES)


def _require(name: str, true: bool, rule: str) -> None:
    if not true:
        raise ValueError(f"{name} over mpi4py: {rule}")


def _checked(name: str, tensor: Tensor) -> Tensor:
    if tensor.layout == torch.strided and (tensor.is_cpu or tensor.is_cuda):
        return tensor
    where = f"{tensor.layout} on {tensor.device}"
    raise ValueError(
        f"{name} over mpi4py: a tensor must be dense and on the CPU or a GPU, not {where}"
    )


def _plain(tensor: Tensor) -> bool:
    """Whether MPI can take the tensor's memory as it is."""
    try:
        # A negated view can be contiguous: its memory is still to be negated.
        lazy = tensor.is_neg() or tensor.is_conj()
        return tensor.is_cpu and tensor.is_contiguous() and not lazy
    except RuntimeError:
        return False  # only dense tensors can say


def _staged(tensor: Tensor) -> bool:
    """Whether MPI needs the tensor in host memory; torch reduces halves there, at MPI's call."""
    return tensor.is_cuda and (tensor.itemsize == 2 or not cuda_aware())


def _space(like: Tensor, shape: Sequence[int]) -> Tensor:
    """New memory in which MPI can read and write, in place of such a tensor."""
    if _staged(like):  # pinned memory that is given back torch keeps for the next call
        return torch.empty(shape, dtype=like.dtype, pin_memory=True)
    return like.new_empty(shape)


def _direct(tensor: Tensor) -> bool:
    """Whether the tensor's memory is its elements in order, where MPI can take them."""
    lazy = tensor.is_conj() or tensor.is_neg()  # the memory is still to be conjugated or negated
    return tensor.is_contiguous() and not lazy and not _staged(tensor)


def _room(name: str, tensor: Tensor) -> Tensor:
    """Where MPI can write what is to come: the tensor or, where it cannot, memory of that size."""
    if _direct(_checked(name, tensor)):
        return tensor
    return _space(tensor, tensor.shape)


def _flat(name: str, tensor: Tensor) -> Tensor:
    """Like `_room`, with the tensor's elements; on a GPU not before the stream gets there."""
    room = _room(name, tensor)
    return tensor if room is tensor else room.copy_(tensor.detach(), non_blocking=True)


def _row(tensors: Sequence[Tensor]) -> Tensor | None:
    """One flat tensor on the memory of these, if they lie there one behind the other."""
    first = tensors[0]
    place, storage = first.storage_offset(), first.untyped_storage().data_ptr()
    for tensor in tensors:
        near = tensor.storage_offset() == place and tensor.untyped_storage().data_ptr() == storage
        if not near or not _direct(tensor):
            return None
        place += tensor.numel()
    start = first.storage_offset()
    return first.detach().as_strided((place - start,), (1,), start)


def _joined(name: str, tensors: Sequence[Tensor]) -> Tensor:
    """A flat tensor with the elements of all, in order."""
    row = _row([_checked(name, tensor) for tensor in tensors])
    if row is None:
        row = _flat(name, torch.cat([tensor.detach().reshape(-1) for tensor in tensors]))
    return row


def _rooms(name: str, tensors: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
    """A flat tensor with room for all of these, and its part for each."""
    row = _row([_checked(name, tensor) for tensor in tensors])
    if row is not None:
        return row, tensors
    counts = [tensor.numel() for tensor in tensors]
    whole = _space(tensors[0], (sum(counts),))
    return whole, torch.split(whole, counts)


def _apart(source: Tensor, target: Tensor) -> Tensor:
    """The source or, where it shares memory with the target, which MPI forbids, a copy."""
    start, other = source.data_ptr(), target.data_ptr()
    shared = start < other + target.nbytes and other < start + source.nbytes
    return source.detach().clone() if shared else source


def _finish(outputs: Sequence[Tensor], flats: Sequence[Tensor], divisor: int) -> None:
    """Divide what MPI has summed, copy it to the outputs that MPI could not write itself."""
    for output, flat in zip(outputs, flats, strict=False):
        if divisor:
            mpi_types.mean(flat, divisor)
        if flat is not output:
            output.detach().copy_(flat.view(output.shape))


def _after_stream(call: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """The call, held until the GPU has done what its stream now has; what it starts there ends."""
    ready = torch.cuda.current_stream(device).record_event()

    def whole() -> None:
        with torch.cuda.device(device):
            ready.synchronize()
            call()
            torch.cuda.current_stream().synchronize()

    return whole


# Newer torch does not ask a synchronous call for a work; older torch calls its wait().
_ENDED = Call((0, "a call that has ended", None, 0), -1, [], int, None)  # type: ignore[arg-type]
_ENDED.run()
_SYNCED: Any = None if hasattr(dist.AllreduceOptions(), "asyncOp") else _ENDED
_DEVICES = ["cpu", "cuda"]
_ProcessGroup: Any = dist.ProcessGroup  # its overloads of every method would all be in the way


class ProcessGroupMPI4PY(_ProcessGroup):  # type: ignore[misc]
    """A process group over an MPI communicator; the methods are those that torch calls.

    Tensors may have any shape and strides. Every dtype can be moved. SUM, AVG, PRODUCT, MIN, MAX
    take float16/32/64, bfloat16 and all integers (AVG truncates), BAND, BOR, BXOR the integers;
    SUM, AVG, PRODUCT complex64/128; on bool, SUM and MAX are "or", PRODUCT and MIN "and", and AVG
    is not there. What cannot be done is a ValueError before anything is sent; what MPI reports, a
    DistBackendError with the operation and the rank.
    """

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
        return [torch.device(device) for device in _DEVICES] if made else []

    def _get_backend(self, _: Any) -> ProcessGroupMPI4PY:
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
            _finish(outputs, flats, divisor)

        if like is not None and not like.is_cpu:
            call = _after_stream(call, like.device)

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
            return _SYNCED
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
            return _SYNCED
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
        _require(name, fits, f"the list must hold {self._size} tensors{size}, {part.dtype}")
        return counts

    def _shares(self, name: str, whole: Tensor, part: Tensor) -> None:
        fits = whole.dtype == part.dtype and whole.numel() == self._size * part.numel()
        _require(name, fits, f"the large tensor must be {self._size} x {part.numel()} {part.dtype}")

    def _rows(self, name: str, tensor: Tensor, rows: list[int]) -> list[int]:
        """Elements a rank, of a tensor dealt by rows; without numbers of rows, evenly."""
        length = len(tensor) if tensor.ndim else 1
        rows = list(rows) or [length // self._size] * self._size
        fits = len(rows) == self._size and sum(rows) == length
        _require(name, fits, f"splits {rows} do not deal {length} rows to {self._size} ranks")
        return [count * (tensor.numel() // max(length, 1)) for count in rows]

    def _reduction(self, name: str, tensor: Tensor, opts: Any) -> mpi_types.Reduction:
        found = mpi_types.reductions().get(tensor.dtype, {}).get(hash(opts.reduceOp))
        if found is None:
            op = str(opts.reduceOp.op).rpartition(".")[2]
            raise ValueError(f"{name} over mpi4py: {op} cannot reduce {tensor.dtype}")
        return found

    # --- reductions

    def allreduce(self, tensors: _Tensors, opts: Any = None) -> Any:
        """tensors[0] of every rank becomes the reduction of all ranks' tensors[0]."""
        name, lane, tensor = "all_reduce", self._lane, self._single("all_reduce", tensors)
        # What follows, written out for the plain case, here and in the other calls that trainers
        # wait for: at 4 bytes it saves half of what this group adds to torch and MPI.
        if self._free(opts) and _plain(tensor):
            found = self._sums.get(dtype := tensor.dtype)
            found = found and found.get(hash(opts.reduceOp))
            if found and (nbytes := tensor.nbytes) <= mpi_types.most:
                lane.inside = this = (self._count(), name, dtype, nbytes)
                self._keep(this)
                try:
                    message = self._memory(tensor.data_ptr(), nbytes), found[0]
                    self._comm.Allreduce(self._in_place, message, found[1])
                except Exception as error:
                    raise failure(name, self._rank, error) from error
                finally:
                    lane.inside = None
                return _SYNCED
        opts = opts or dist.AllreduceOptions()
        flat = _flat(name, tensor)
        kind, op, mean = self._reduction(name, flat, opts)

        def run() -> None:
            for piece in pieces(flat):
                self._comm.Allreduce(self._in_place, (piece, kind), op)

        return self._issue(name, opts, run, tensor, tensors, (flat,), mean)

    def reduce(self, tensors: _Tensors, opts: Any = None) -> Any:
        """tensors[0] of the root becomes the reduction of all ranks'; the others keep theirs."""
        name, opts, tensor = "reduce", opts or dist.ReduceOptions(), self._single("reduce", tensors)
        flat, root = _flat(name, tensor), opts.rootRank
        kind, op, mean = self._reduction(name, flat, opts)
        mine = root == self._rank
        run = partial(self._reduce, flat, flat if mine else None, kind, op, root)
        return self._issue(name, opts, run, tensor, tensors, (flat,) if mine else (), mean and mine)

    def _reduce(self, source: Tensor, target: Tensor | None, kind: Any, op: Any, root: int) -> None:
        """MPI's Reduce, in pieces; the root has a target, which may be its source."""
        rooms = [] if target is None else list(pieces(target))
        for i, piece in enumerate(pieces(source)):
            given = self._in_place if target is source else (piece, kind)
            self._comm.Reduce(given, (rooms[i], kind) if rooms else None, op, root)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> Any:
        """output of rank r becomes part r of the reduction of all ranks' sources (size × it)."""
        name, opts = "reduce_scatter", opts or dist.ReduceScatterOptions()
        self._shares(name, source, output)
        target = _room(name, output)
        whole = _apart(_flat(name, source), target)
        counts = [output.numel()] * self._size
        return self._reduce_scatter(name, opts, output, target, whole, counts)

    def reduce_scatter(self, outputs: _Tensors, inputs: _Lists, opts: Any = None) -> Any:
        """outputs[0] of rank r becomes the reduction of all inputs[0][r]; sizes may differ by r."""
        name, opts = "reduce_scatter", opts or dist.ReduceScatterOptions()
        (parts,), output = inputs, self._single(name, outputs)
        counts = self._counts(name, parts, output, even=False)
        _require(name, counts[self._rank] == output.numel(), "output and input sizes differ")
        target = _room(name, output)
        whole = _apart(_joined(name, parts), target)
        return self._reduce_scatter(name, opts, output, target, whole, counts)

    def _reduce_scatter(
        self, name: str, opts: Any, output: Tensor, target: Tensor, whole: Tensor, counts: list[int]
    ) -> Any:
        kind, op, mean = self._reduction(name, target, opts)

        def run() -> None:
            if whole.numel() > mpi_types.most:
                parts = torch.split(whole.detach().view(-1), counts)
                for root, part in enumerate(parts):
                    self._reduce(part, target if root == self._rank else None, kind, op, root)
                return
            sides = (memory(whole), kind), (memory(target), kind)
            if len(set(counts)) > 1:
                self._comm.Reduce_scatter(*sides, counts, op)
            else:
                self._comm.Reduce_scatter_block(*sides, op)

        return self._issue(name, opts, run, output, (output,), (target,), mean, whole)

    # --- from one rank to all and back

    def broadcast(self, tensors: _Tensors, opts: Any = None) -> Any:
        """tensors[0] of every rank becomes the root's."""
        name, lane, tensor = "broadcast", self._lane, self._single("broadcast", tensors)
        if self._free(opts) and _plain(tensor) and (nbytes := tensor.nbytes) <= mpi_types.most:
            lane.inside = this = (self._count(), name, tensor.dtype, nbytes)
            self._keep(this)
            try:
                message = self._memory(tensor.data_ptr(), nbytes), self._byte
                self._comm.Bcast(message, opts.rootRank)
            except Exception as error:
                raise failure(name, self._rank, error) from error
            finally:
                lane.inside = None
            return _SYNCED
        opts = opts or dist.BroadcastOptions()
        root = opts.rootRank
        flat = (_flat if root == self._rank else _room)(name, tensor)
        run = partial(self._bcast, flat, root)
        flats = () if root == self._rank else (flat,)
        return self._issue(name, opts, run, tensor, tensors, flats)

    def _bcast(self, flat: Tensor, root: int) -> None:
        self._comm.Bcast((memory(flat), unit(flat.nbytes)), root)

    def scatter(self, outputs: _Tensors, inputs: _Lists, opts: Any = None) -> Any:
        """outputs[0] of rank r becomes the root's inputs[0][r]; the others give no inputs."""
        name, opts, output = (
            "scatter",
            opts or dist.ScatterOptions(),
            self._single("scatter", outputs),
        )
        target, root, whole = _room(name, output), opts.rootRank, None
        if root == self._rank:
            self._counts(name, inputs[0], output, even=True)
            whole = _apart(_joined(name, inputs[0]), target)
        kind = unit(target.nbytes)

        def run() -> None:
            message = None if whole is None else (memory(whole), kind)
            self._comm.Scatter(message, (memory(target), kind), root)

        return self._issue(name, opts, run, output, outputs, (target,))

    def gather(self, outputs: _Lists, inputs: _Tensors, opts: Any = None) -> Any:
        """outputs[0][r] of the root becomes rank r's inputs[0]; the others give no outputs."""
        name, opts, given = "gather", opts or dist.GatherOptions(), self._single("gather", inputs)
        source, root = _flat(name, given), opts.rootRank
        kind = unit(source.nbytes)
        if root != self._rank:
            return self._issue(
                name, opts, lambda: self._comm.Gather((memory(source), kind), None, root), given
            )
        self._counts(name, outputs[0], given, even=True)
        whole, parts = _rooms(name, outputs[0])
        source = _apart(source, whole)
        return self._issue(
            name,
            opts,
            lambda: self._comm.Gather((memory(source), kind), (memory(whole), kind), root),
            given,
            outputs[0],
            parts,
        )

    # --- from all ranks to all

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> Any:
        """output (size × the source) becomes all ranks' sources in rank order."""
        name, lane = "all_gather", self._lane
        if self._free(opts) and _plain(output) and _plain(source):
            nbytes, total = source.nbytes, output.nbytes
            start, given = output.data_ptr(), source.data_ptr()
            fits = total == nbytes * self._size <= mpi_types.most and output.dtype == source.dtype
            if fits and (given >= start + total or given + nbytes <= start):
                lane.inside = this = (self._count(), name, source.dtype, total)
                self._keep(this)
                try:
                    self._comm.Allgather(
                        (self._memory(given, nbytes), self._byte),
                        (self._memory(start, total), self._byte),
                    )
                except Exception as error:
                    raise failure(name, self._rank, error) from error
                finally:
                    lane.inside = None
                return _SYNCED
        self._shares(name, output, source)
        counts = [source.numel()] * self._size
        return self._all_gather(opts, [output], _room(name, output), [], source, counts)

    def allgather(self, outputs: _Lists, inputs: _Tensors, opts: Any = None) -> Any:
        """outputs[0][r] of every rank becomes rank r's inputs[0]; sizes may differ by r."""
        name = "all_gather"
        (parts,), source = outputs, self._single(name, inputs)
        counts = self._counts(name, parts, source, even=False)
        _require(name, counts[self._rank] == source.numel(), "output and input sizes differ")
        whole, rooms = _rooms(name, parts)
        return self._all_gather(opts, parts, whole, rooms, source, counts)

    def _all_gather(
        self,
        opts: Any,
        outputs: list[Tensor],
        whole: Tensor,
        parts: Sequence[Tensor],
        source: Tensor,
        counts: list[int],
    ) -> Any:
        """Gather into `whole`, of which `parts` (none: itself) become the outputs."""
        name, flat = "all_gather", _flat("all_gather", source)
        place = whole.data_ptr() + sum(counts[: self._rank]) * flat.itemsize
        there = flat.data_ptr() == place
        flat = flat if there else _apart(flat, whole)

        def run() -> None:
            # MPI wants all ranks to say "in place", or none; each library here only reads its own.
            message = self._in_place if there else (memory(flat), unit(flat.nbytes))
            if len(set(counts)) == 1:
                target = memory(whole), unit(flat.nbytes)
                self._comm.Allgather(message, target)
            elif whole.nbytes <= mpi_types.most:
                nbytes = [count * flat.itemsize for count in counts]
                self._comm.Allgatherv(message, (memory(whole), nbytes, self._byte))
            else:
                rows = torch.split(whole.detach().view(-1), counts)
                if not there:
                    rows[self._rank].copy_(flat.view(-1))
                for root, row in enumerate(rows):
                    self._bcast(row, root)

        return self._issue(name, opts, run, source, outputs, parts or (whole,), noted=whole)

    def all_to_all_single(
        self, output: Tensor, source: Tensor, to: list[int], of: list[int], opts: Any = None
    ) -> Any:
        """Every rank r gets part r of the source; `of`, `to`: rows a rank, [] for even parts.

        All ranks give such splits, or none does.
        """
        name = "all_to_all"
        _require(name, output.dtype == source.dtype, "output and input dtypes differ")
        target = _room(name, output)
        whole = _apart(_flat(name, source), target)
        out, into = self._rows(name, whole, of), self._rows(name, target, to)
        _require(name, bool(of or to) or out == into, "output and input sizes differ")
        even = not of and not to
        deals = out, into
        return self._all_to_all(opts, whole, target, deals, [output], [target], even)

    def alltoall(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> Any:
        """outputs[r] becomes rank r's inputs[this rank]; sizes may differ."""
        name = "all_to_all"
        _require(name, len(inputs) == self._size, f"the list must hold {self._size} tensors")
        out = self._counts(name, inputs, inputs[0], even=False)
        into = self._counts(name, outputs, inputs[0], even=False)
        target, parts = _rooms(name, outputs)
        whole = _apart(_joined(name, inputs), target)
        return self._all_to_all(opts, whole, target, (out, into), outputs, parts)

    def _all_to_all(
        self,
        opts: Any,
        source: Tensor,
        target: Tensor,
        deals: tuple[list[int], list[int]],
        outputs: Sequence[Tensor],
        flats: Sequence[Tensor],
        even: bool = False,
    ) -> Any:
        """Exchange parts of so many elements. `even` must be the same in all ranks."""
        name, both = "all_to_all", (source, target)
        sides: list[Any] = []
        for flat, deal in zip(both, deals, strict=True):
            nbytes, item = [count * flat.itemsize for count in deal], 1
            if flat.nbytes > mpi_types.most:  # a rank alone may be that large: one way for all
                item = math.gcd(*nbytes)
                rule = f"parts of {flat.nbytes} bytes need a common divisor that MPI can count by"
                _require(name, flat.nbytes // item <= mpi_types.most, rule)
            kind = self._byte if item == 1 else block(item)
            sides.append((memory(flat), [count // item for count in nbytes], kind))

        def run() -> None:
            if even:
                kind = unit(source.nbytes // self._size)
                self._comm.Alltoall(*[(memory(flat), kind) for flat in both])
            else:
                self._comm.Alltoallv(*sides)

        return self._issue(name, opts, run, outputs[0], outputs, flats)

    def barrier(self, opts: Any = None) -> Any:
        """No rank's barrier ends before every rank has issued it."""
        return self._issue("barrier", opts, self._comm.Barrier)

    # --- point to point

    def _post(self, name: str, tensors: _Tensors, start: Any, peer: int, tag: int) -> Request:
        tensor = self._single(name, tensors)
        flat = (_room if name == "recv" else _flat)(name, tensor)
        self._lane.posted += 1
        if not tensor.is_cpu:
            torch.cuda.current_stream(tensor.device).synchronize()
        try:
            request = start((memory(flat), unit(flat.nbytes)), peer, tag)
        except Exception as error:
            raise failure(name, self._rank, error) from error

        def finish(status: Any) -> None:
            if name == "recv":
                got = status.Get_elements(mpi().BYTE)  # Get_count ends at an int
                if got != flat.nbytes:
                    raise ValueError(f"{got} bytes came, the tensor holds {flat.nbytes}")
                _finish((tensor,), (flat,), 0)

        work = Request(name, self._rank, tensor, request, finish, self._lane.timeout)
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def send(self, tensors: _Tensors, peer: int, tag: int = 0) -> Request:
        """Send tensors[0] to a rank of this group."""
        return self._post("send", tensors, self._comm.Isend, peer, tag)

    def recv(self, tensors: _Tensors, peer: int, tag: int = 0) -> Request:
        """Receive into tensors[0], from a rank of this group, as many bytes as it holds."""
        return self._post("recv", tensors, self._comm.Irecv, peer, tag)

    def recv_anysource(self, tensors: _Tensors, tag: int = 0) -> Request:
        """Receive from any rank; the work's _source_rank() says from which."""
        return self._post("recv", tensors, self._comm.Irecv, mpi().ANY_SOURCE, tag)

    # --- several calls as one

    def _together(self, name: str, works: list[Any]) -> Any:
        _require(name, bool(works), "there must be a tensor")
        return Together(name, self._rank, works) if isinstance(works[0], Work) else _SYNCED

    def allreduce_coalesced(self, tensors: _Tensors, opts: Any = None) -> Any:
        """allreduce of each tensor."""
        works = [self.allreduce([tensor], opts) for tensor in tensors]
        return self._together("all_reduce_coalesced", works)

    def allgather_coalesced(self, outputs: _Lists, inputs: _Tensors, opts: Any = None) -> Any:
        """outputs[r][k] of every rank becomes rank r's inputs[k]."""
        parts = zip(*outputs, strict=True)
        works = [self.allgather([list(p)], [t], opts) for p, t in zip(parts, inputs, strict=True)]
        return self._together("all_gather_coalesced", works)

    def all_gather_single_coalesced(
        self, outputs: _Tensors, inputs: _Tensors, opts: Any = None
    ) -> Any:
        """all_gather_single of each pair."""
        pairs = zip(outputs, inputs, strict=True)
        works = [self.all_gather_single(*pair, opts) for pair in pairs]
        return self._together("all_gather_coalesced", works)

    def reduce_scatter_single_coalesced(
        self, outputs: _Tensors, inputs: _Tensors, opts: Any = None
    ) -> Any:
        """reduce_scatter_single of each pair."""
        pairs = zip(outputs, inputs, strict=True)
        works = [self.reduce_scatter_single(output, source, opts) for output, source in pairs]
        return self._together("reduce_scatter_coalesced", works)

    def _start_coalescing(self, _: torch.device) -> None:
        self._coalescing = []

    def _end_coalescing(self, _: torch.device) -> Any:
        works, self._coalescing = self._coalescing or [], None
        return Together("coalesced calls", self._rank, works)

    # What torch before 2.13 calls them, and after it.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    recvAnysource = recv_anysource  # noqa: N815
    start_coalescing = _start_coalescing
    end_coalescing = _end_coalescing


def _create(given: Any, _: Any) -> dist.ProcessGroup:
    """The backend's creator: torch calls it in every member of a new group, and only there."""
    size = given.group_size
    # torch's ranks need not be MPI's: the store tells which process is where. Read by all, it
    # also shows all of them when mpirun did not start them: none is left waiting for the others.
    given.store.set(f"mpi{given.group_rank}", str(world()[0]))
    keys = [f"mpi{rank}" for rank in range(size)]
    try:
        ranks = [int(text) for text in given.store.multi_get(keys)]
    except RuntimeError as error:
        absent = [rank for rank in range(size) if not given.store.check([keys[rank]])]
        text = f"these of its {size} ranks did not come: {', '.join(map(str, absent))}"
        raise dist.DistBackendError(f"a group over mpi4py: {text}") from error
    if len(set(ranks)) != size:
        script = Path(sys.argv[0]).name or "script.py"
        raise ValueError(
            f"a group over mpi4py: {size} ranks of torch are MPI's ranks {ranks}: start them with "
            f"MPI's own launcher: mpirun -n {size} python {script}"
        )
    if thread_level() in ("SINGLE", "FUNNELED"):
        raise ValueError(
            f"a group over mpi4py: MPI grants no more than THREAD_{thread_level()}, and the "
            "threads of autograd will call it: leave mpi4py.rc.thread_level at its default, or "
            "use another MPI"
        )
    lane = Lane(given.group_rank, given.timeout, str(given.group_id))
    lane.inside = (0, "new_group", None, 0)
    try:
        comm = _communicator(ranks, str(given.group_id))
    finally:
        lane.inside = None
    comm.Set_errhandler(mpi().ERRORS_RETURN)
    return ProcessGroupMPI4PY(comm, str(given.group_id), lane)


def _communicator(ranks: list[int], name: str) -> Any:
    """A new communicator of these ranks of MPI's world, in this order; all of them must call."""
    comm = mpi().COMM_WORLD
    if ranks == list(range(comm.Get_size())):
        return comm.Dup()
    everyone = comm.Get_group()
    members = everyone.Incl(ranks)
    tag = zlib.crc32(name.encode()) % 32768  # MPI allows every tag below that
    comm = comm.Create_group(members, tag)
    members.Free()
    everyone.Free()
    return comm
