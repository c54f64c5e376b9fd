"""torch's collectives as MPI's, on whole tensors and lists of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ddpbench.mpi_backend import tensors as mpi_tensors
from ddpbench.mpi_backend.base import SYNCED, GroupBase
from ddpbench.mpi_backend.tensors import (
    flatten,
    is_plain,
    join,
    keep_apart,
    memory,
    require,
    room_for,
    rooms_for,
)
from ddpbench.mpi_backend.work import failure

TensorList = list[Tensor]
TensorLists = list[list[Tensor]]


class Collectives(GroupBase):
    """The collectives, by the names that torch calls."""

    # --- reductions

    def allreduce(self, tensors: TensorList, opts: Any = None) -> Any:
        """tensors[0] of every rank becomes the reduction of all ranks' tensors[0]."""
        name, lane, tensor = "all_reduce", self._lane, self._single("all_reduce", tensors)
        # The plain case is written out, here and in other calls that trainers wait for. At 4 bytes
        # this saves half of the time that the group adds to torch and MPI.
        if self._free(opts) and is_plain(tensor):
            reduction = self._sums.get(dtype := tensor.dtype)
            reduction = reduction and reduction.get(hash(opts.reduceOp))
            if reduction and (nbytes := tensor.nbytes) <= mpi_tensors.most:
                lane.inside = this = (self._count(), name, dtype, nbytes)
                self._keep(this)
                try:
                    message = self._memory(tensor.data_ptr(), nbytes), reduction[0]
                    self._comm.Allreduce(self._in_place, message, reduction[1])
                except Exception as error:
                    raise failure(name, self._rank, error) from error
                finally:
                    lane.inside = None
                return SYNCED
        opts = opts or dist.AllreduceOptions()
        flat = flatten(name, tensor)
        kind, op, mean = self._reduction(name, flat, opts)
        self._require_countable(name, flat.numel(), "elements")

        def run() -> None:
            self._comm.Allreduce(self._in_place, (memory(flat), kind), op)

        return self._issue(name, opts, run, tensor, outputs=tensors, flats=(flat,), mean=mean)

    def reduce(self, tensors: TensorList, opts: Any = None) -> Any:
        """tensors[0] of the root becomes the reduction of all ranks' tensors[0]."""
        name, opts, tensor = "reduce", opts or dist.ReduceOptions(), self._single("reduce", tensors)
        flat, root = flatten(name, tensor), opts.rootRank
        kind, op, mean = self._reduction(name, flat, opts)
        self._require_countable(name, flat.numel(), "elements")
        at_root = root == self._rank
        flats = (flat,) if at_root else ()

        def run() -> None:
            message = memory(flat), kind
            sides = (self._in_place, message) if at_root else (message, None)
            self._comm.Reduce(*sides, op, root)

        return self._issue(
            name, opts, run, tensor, outputs=tensors, flats=flats, mean=mean and at_root
        )

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> Any:
        """output of rank r becomes part r of the reduction of all ranks' sources (size × it)."""
        name, opts = "reduce_scatter", opts or dist.ReduceScatterOptions()
        self._shares(name, source, output)
        target = room_for(name, output)
        whole = keep_apart(flatten(name, source), target)
        counts = [output.numel()] * self._size
        return self._reduce_scatter(opts, output, target, whole, counts)

    def reduce_scatter(self, outputs: TensorList, inputs: TensorLists, opts: Any = None) -> Any:
        """outputs[0] of rank r becomes the reduction of all inputs[0][r]; sizes may differ by r."""
        name, opts = "reduce_scatter", opts or dist.ReduceScatterOptions()
        (parts,), output = inputs, self._single(name, outputs)
        counts = self._counts(name, parts, output, even=False)
        require(name, counts[self._rank] == output.numel(), "output and input sizes differ")
        target = room_for(name, output)
        whole = keep_apart(join(name, parts), target)
        return self._reduce_scatter(opts, output, target, whole, counts)

    def _reduce_scatter(
        self, opts: Any, output: Tensor, target: Tensor, whole: Tensor, counts: list[int]
    ) -> Any:
        name = "reduce_scatter"
        kind, op, mean = self._reduction(name, target, opts)
        self._require_countable(name, whole.numel(), "elements")

        def run() -> None:
            sides = (memory(whole), kind), (memory(target), kind)
            if len(set(counts)) > 1:
                self._comm.Reduce_scatter(*sides, counts, op)
            else:
                self._comm.Reduce_scatter_block(*sides, op)

        return self._issue(
            name, opts, run, output, outputs=(output,), flats=(target,), mean=mean, noted=whole
        )

    # --- from one rank to all and back

    def broadcast(self, tensors: TensorList, opts: Any = None) -> Any:
        """tensors[0] of every rank becomes the root's."""
        name, lane, tensor = "broadcast", self._lane, self._single("broadcast", tensors)
        if self._free(opts) and is_plain(tensor) and (nbytes := tensor.nbytes) <= mpi_tensors.most:
            lane.inside = this = (self._count(), name, tensor.dtype, nbytes)
            self._keep(this)
            try:
                message = self._memory(tensor.data_ptr(), nbytes), self._byte
                self._comm.Bcast(message, opts.rootRank)
            except Exception as error:
                raise failure(name, self._rank, error) from error
            finally:
                lane.inside = None
            return SYNCED
        opts = opts or dist.BroadcastOptions()
        root = opts.rootRank
        flat = (flatten if root == self._rank else room_for)(name, tensor)
        self._require_countable(name, flat.nbytes)
        flats = () if root == self._rank else (flat,)

        def run() -> None:
            self._comm.Bcast((memory(flat), self._byte), root)

        return self._issue(name, opts, run, tensor, outputs=tensors, flats=flats)

    def scatter(self, outputs: TensorList, inputs: TensorLists, opts: Any = None) -> Any:
        """outputs[0] of rank r becomes the root's inputs[0][r]; other ranks pass no inputs."""
        name, opts = "scatter", opts or dist.ScatterOptions()
        output = self._single(name, outputs)
        target, root, whole = room_for(name, output), opts.rootRank, None
        if root == self._rank:
            self._counts(name, inputs[0], output, even=True)
            whole = keep_apart(join(name, inputs[0]), target)
        self._require_countable(name, target.nbytes)

        def run() -> None:
            message = None if whole is None else (memory(whole), self._byte)
            self._comm.Scatter(message, (memory(target), self._byte), root)

        return self._issue(name, opts, run, output, outputs=outputs, flats=(target,))

    def gather(self, outputs: TensorLists, inputs: TensorList, opts: Any = None) -> Any:
        """outputs[0][r] of the root becomes rank r's inputs[0]; other ranks pass no outputs."""
        name, opts = "gather", opts or dist.GatherOptions()
        tensor = self._single(name, inputs)
        source, root, whole = flatten(name, tensor), opts.rootRank, None
        self._require_countable(name, source.nbytes)
        targets: Sequence[Tensor] = ()
        parts: Sequence[Tensor] = ()
        if root == self._rank:
            targets = outputs[0]
            self._counts(name, targets, tensor, even=True)
            whole, parts = rooms_for(name, targets)
            source = keep_apart(source, whole)

        def run() -> None:
            message = None if whole is None else (memory(whole), self._byte)
            self._comm.Gather((memory(source), self._byte), message, root)

        return self._issue(name, opts, run, tensor, outputs=targets, flats=parts)

    # --- from all ranks to all

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> Any:
        """output (size × the source) becomes all ranks' sources in rank order."""
        name, lane = "all_gather", self._lane
        if self._free(opts) and is_plain(output) and is_plain(source):
            nbytes, total = source.nbytes, output.nbytes
            start, begin = output.data_ptr(), source.data_ptr()
            fits = total == nbytes * self._size <= mpi_tensors.most and output.dtype == source.dtype
            if fits and (begin >= start + total or begin + nbytes <= start):
                lane.inside = this = (self._count(), name, source.dtype, total)
                self._keep(this)
                try:
                    self._comm.Allgather(
                        (self._memory(begin, nbytes), self._byte),
                        (self._memory(start, total), self._byte),
                    )
                except Exception as error:
                    raise failure(name, self._rank, error) from error
                finally:
                    lane.inside = None
                return SYNCED
        self._shares(name, output, source)
        counts = [source.numel()] * self._size
        return self._all_gather(opts, source, counts, room_for(name, output), outputs=[output])

    def allgather(self, outputs: TensorLists, inputs: TensorList, opts: Any = None) -> Any:
        """outputs[0][r] of every rank becomes rank r's inputs[0]; sizes may differ by r."""
        name = "all_gather"
        (parts,), source = outputs, self._single(name, inputs)
        counts = self._counts(name, parts, source, even=False)
        require(name, counts[self._rank] == source.numel(), "output and input sizes differ")
        whole, rooms = rooms_for(name, parts)
        return self._all_gather(opts, source, counts, whole, outputs=parts, parts=rooms)

    def _all_gather(
        self,
        opts: Any,
        source: Tensor,
        counts: list[int],
        whole: Tensor,
        *,
        outputs: list[Tensor],
        parts: Sequence[Tensor] = (),
    ) -> Any:
        """Gather into `whole`; its parts, or itself if there are none, become the outputs."""
        name, flat = "all_gather", flatten("all_gather", source)
        in_place = flat.data_ptr() == whole.data_ptr() + sum(counts[: self._rank]) * flat.itemsize
        flat = flat if in_place else keep_apart(flat, whole)
        even = len(set(counts)) == 1
        self._require_countable(name, (flat if even else whole).nbytes)

        def run() -> None:
            # MPI requires all ranks in place or none; each library here reads only its own choice.
            message = self._in_place if in_place else (memory(flat), self._byte)
            if even:
                self._comm.Allgather(message, (memory(whole), self._byte))
            else:
                nbytes = [count * flat.itemsize for count in counts]
                self._comm.Allgatherv(message, (memory(whole), nbytes, self._byte))

        return self._issue(
            name, opts, run, source, outputs=outputs, flats=parts or (whole,), noted=whole
        )

    def all_to_all_single(
        self, output: Tensor, source: Tensor, to: list[int], of: list[int], opts: Any = None
    ) -> Any:
        """Every rank r gets part r of the source.

        to, of: rows of the output and of the source per rank, [] for even parts; all ranks pass
        them or none does.
        """
        name = "all_to_all"
        require(name, output.dtype == source.dtype, "output and input dtypes differ")
        target = room_for(name, output)
        whole = keep_apart(flatten(name, source), target)
        out, into = self._rows(name, whole, of), self._rows(name, target, to)
        require(name, bool(of or to) or out == into, "output and input sizes differ")
        even = not of and not to
        deals = out, into
        return self._all_to_all(
            opts, whole, target, deals, outputs=[output], flats=[target], even=even
        )

    def alltoall(self, outputs: TensorList, inputs: TensorList, opts: Any = None) -> Any:
        """outputs[r] becomes rank r's inputs[this rank]; sizes may differ."""
        name = "all_to_all"
        require(name, len(inputs) == self._size, f"the list must contain {self._size} tensors")
        out = self._counts(name, inputs, inputs[0], even=False)
        into = self._counts(name, outputs, inputs[0], even=False)
        target, parts = rooms_for(name, outputs)
        whole = keep_apart(join(name, inputs), target)
        return self._all_to_all(opts, whole, target, (out, into), outputs=outputs, flats=parts)

    def _all_to_all(
        self,
        opts: Any,
        source: Tensor,
        target: Tensor,
        deals: tuple[list[int], list[int]],
        *,
        outputs: Sequence[Tensor],
        flats: Sequence[Tensor],
        even: bool = False,
    ) -> Any:
        """Exchange parts. deals: elements per rank, out and in; `even` must agree on all ranks."""
        name, tensors = "all_to_all", (source, target)
        most = source.nbytes // self._size if even else max(source.nbytes, target.nbytes)
        self._require_countable(name, most)

        def run() -> None:
            if even:
                self._comm.Alltoall(*[(memory(flat), self._byte) for flat in tensors])
                return
            sides = [
                (memory(flat), [count * flat.itemsize for count in deal], self._byte)
                for flat, deal in zip(tensors, deals, strict=True)
            ]
            self._comm.Alltoallv(*sides)

        return self._issue(name, opts, run, outputs[0], outputs=outputs, flats=flats)

    def barrier(self, opts: Any = None) -> Any:
        """No rank's barrier ends before every rank has issued it."""
        return self._issue("barrier", opts, self._comm.Barrier)

    # Their names in torch before 2.13 and after it.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
