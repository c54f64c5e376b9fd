"""A torch.distributed backend "mpi4py": collectives and point-to-point over MPI, on CPU tensors.

    mpi.register()
    dist.init_process_group("mpi4py", store=store, rank=rank, world_size=size)    # or, beside gloo:
    group = dist.new_group(backend="mpi4py")

MPI starts with the first group or the first call of a function below, not with the import. As on
every backend, all ranks issue a group's operations in one order, each from one thread at a time.
"""

from __future__ import annotations

import atexit
import re
import sys
import threading
import time
import weakref
import zlib
from array import array
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache, partial
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NAME = "mpi4py"
_Tensors = list[Tensor]
_Lists = list[list[Tensor]]
_HUNG = 5  # the exit code of a rank that hung
_WORKERS: weakref.WeakSet[_Worker] = weakref.WeakSet()
_DROPPED: list[_Request] = []
_MUTEX = threading.Lock()  # guards every call's future: held so briefly that one will do


@cache
def _mpi() -> Any:
    """mpi4py's MPI module; the first call starts MPI and arranges for its end."""
    from mpi4py import MPI

    atexit.register(_leave)
    return MPI


def register() -> None:
    """Make "mpi4py" a backend name of torch.distributed. Calling again changes nothing."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def library() -> str:
    """The MPI library in one line, such as "Open MPI 5.0.11"."""
    first = _mpi().Get_library_version().strip("\0 \n").splitlines()[0].split(",")[0]
    return " ".join(re.sub(r"\bv(?=\d)|\bVersion:", "", first).split())


def thread_level() -> str:
    """The thread support that MPI granted: SINGLE, FUNNELED, SERIALIZED or MULTIPLE."""
    names = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
    return {getattr(_mpi(), f"THREAD_{name}"): name for name in names}[_mpi().Query_thread()]


def world() -> tuple[int, int]:
    """This process's rank in MPI's COMM_WORLD and the number of ranks there."""
    return _mpi().COMM_WORLD.Get_rank(), _mpi().COMM_WORLD.Get_size()


def broadcast_text(text: str | None) -> str:
    """The text of MPI rank 0, in every rank of COMM_WORLD; all of them must call."""
    data = bytearray((text or "").encode() if world()[0] == 0 else b"")
    length = array("q", [len(data)])
    _mpi().COMM_WORLD.Bcast(length)
    data = data or bytearray(length[0])
    _mpi().COMM_WORLD.Bcast(data)
    return data.decode()


def abort(code: int) -> None:
    """End every process of the MPI job with this exit code, at once and without clean-up."""
    sys.stdout.flush()
    sys.stderr.flush()
    _mpi().COMM_WORLD.Abort(code)


def _leave() -> None:
    """Before MPI is finalised: stop the workers, or abort where finalising could only hang."""
    for worker in list(_WORKERS):
        if not worker.close():
            print(f"mpi4py: {worker.running} has not ended: aborting the job", file=sys.stderr)
            abort(_HUNG)
    # The others may wait in a collective for a rank that dies of an exception, and MPI's end
    # would wait for them.
    if getattr(sys, "last_type", None) is not None and world()[1] > 1:
        abort(1)


class _Work(dist.Work):
    """What calls and requests share: which operation on which rank, whether it ended, and how."""

    def __init__(self, name: str, rank: int) -> None:
        super().__init__()
        self.name, self.rank = name, rank
        self.ended = False
        self.error: Exception | None = None

    def is_completed(self) -> bool:
        return self.ended

    def exception(self) -> Exception | None:
        return self.error

    def _outcome(self, timeout: timedelta | None) -> bool:
        """True, the operation's error, or the error that it has not ended in time."""
        if not self.ended:
            text = f"{self.name} on rank {self.rank} has not ended within {timeout}"
            raise dist.DistBackendError(text)
        if self.error is not None:
            raise self.error
        return True


class _Call(_Work):
    """A collective on its way through the worker's queue, or ended before it was returned."""

    def __init__(self, name: str, rank: int, outputs: list[Tensor], *steps: Any) -> None:
        super().__init__(name, rank)
        # Call, finish, and what must live as long, because MPI knows it by address only.
        self._outputs, self._steps = outputs, steps
        self._futures: tuple[torch.futures.Future[Any], torch.futures.Future[Any]] | None = None
        self._gate = threading.Lock()  # taken until the end: far cheaper than an Event
        self._gate.acquire()

    def run(self) -> None:
        try:
            self._steps[0]()
            self._steps[1]()
        except Exception as error:
            self.error = _failure(self.name, self.rank, error)
        self._steps = ()
        with _MUTEX:
            self.ended, futures = True, self._futures
        if futures is not None:
            futures[0].set_result(None)

    def release(self) -> None:
        self._gate.release()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self.ended and self._gate.acquire(timeout=_seconds(timeout)):
            self._gate.release()
        return self._outcome(timeout)

    def get_future(self) -> torch.futures.Future[Any]:
        # Future.set_exception is for Python's eyes only: DDP would take the exception for a list
        # of tensors and crash. An exception raised in a chained callback is a failure in C++ too.
        with _MUTEX:
            due = self.ended and self._futures is None
            if self._futures is None:
                first: torch.futures.Future[Any] = torch.futures.Future()
                self._futures = first, first.then(self._result)
        if due:
            self._futures[0].set_result(None)
        return self._futures[1]

    def _result(self, _: Any) -> list[Tensor]:
        if self.error is not None:
            raise self.error
        return self._outputs


class _Request(_Work):
    """A send or a receive, posted on the caller's thread. It has no future, as on gloo.

    The worker, which takes calls in order, would deadlock where both ranks receive first.
    """

    def __init__(self, name: str, rank: int, tensor: Tensor, flat: Tensor, request: Any) -> None:
        super().__init__(name, rank)
        self._tensor, self._flat, self._request = tensor, flat, request
        self._status = _mpi().Status()

    def wait(self, timeout: timedelta | None = None) -> bool:
        seconds = _seconds(timeout)
        if not self.ended and seconds < 0:
            self._advance(self._request.Wait)
        end = time.monotonic() + seconds
        while not self.is_completed() and time.monotonic() < end:
            time.sleep(1e-4)
        return self._outcome(timeout)

    def is_completed(self) -> bool:
        if not self.ended:
            self._advance(self._request.Test)
        return self.ended

    def _advance(self, step: Callable[[Any], bool]) -> None:
        try:
            if not step(self._status):
                return
            if self.name == "recv":
                got, room = self._status.Get_count(_mpi().BYTE), self._flat.nbytes
                if got != room:
                    raise ValueError(f"{got} bytes came, the tensor holds {room}")
                _finish((self._tensor,), (self._flat,), 0)
        except Exception as error:
            self.error = _failure(self.name, self.rank, error)
        self.ended = True

    def source_rank(self) -> int:
        self.wait()
        return int(self._status.Get_source())

    _source_rank = source_rank

    def __del__(self) -> None:
        if not self.is_completed():  # dropped without a wait: MPI still needs the memory
            _DROPPED[:] = [request for request in _DROPPED if not request.is_completed()] + [self]

    def get_future(self) -> torch.futures.Future[Any]:
        raise NotImplementedError(f"{self.name} over mpi4py has no future: use wait()")


class _Worker:
    """A group's queue and the thread that serves it, which starts with the first queued call."""

    def __init__(self, timeout: timedelta) -> None:
        self.submitted = self.completed = 0
        self.running = "nothing"
        self._queue: SimpleQueue[_Call | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._timeout = timeout
        _WORKERS.add(self)

    def submit(self, work: _Call) -> None:
        if self._thread is threading.current_thread():
            # A future's callback issued it: in the queue it would wait for its own issuer.
            work.run()
            return work.release()
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="mpi4py worker", daemon=True)
            self._thread.start()
        self.submitted += 1
        return self._queue.put(work)

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            self.running = work.name
            work.run()
            self.completed += 1  # before its waiter wakes, whose next call then need not queue
            work.release()
            del work

    def close(self) -> bool:
        """Serve what is queued and end the thread; False if that takes longer than the timeout."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        self._queue.put(None)
        thread.join(self._timeout.total_seconds())
        if not thread.is_alive():
            self._thread = None
        return self._thread is None


def _seconds(timeout: timedelta | None) -> float:
    """Seconds to wait, -1 for ever; zero is C++'s kNoTimeout."""
    return timeout.total_seconds() if timeout else -1.0


def _failure(name: str, rank: int, error: Exception) -> Exception:
    text = error.Get_error_string() if isinstance(error, _mpi().Exception) else str(error)
    text = "; ".join(text.splitlines())
    failure = dist.DistBackendError(f"{name} failed on rank {rank}: {text}")
    failure.__cause__ = error
    return failure


_DONE = _Call("a call that has ended", -1, [], int, int)  # what the caller's own thread returns
_DONE.run()


@cache
def _moved() -> dict[int, Any]:
    """Item size → MPI datatype: moving takes no arithmetic, so that the size says all."""
    mpi = _mpi()
    kinds = (mpi.BYTE, mpi.INT16_T, mpi.INT32_T, mpi.INT64_T, mpi.C_DOUBLE_COMPLEX)
    return dict(zip((1, 2, 4, 8, 16), kinds, strict=True))


@cache
def _reduced() -> dict[tuple[int, torch.dtype], tuple[Any, Any, bool]]:
    """(hash of torch's reduce op, dtype) → MPI datatype, MPI op, whether to divide afterwards.

    The hash, because finding a ReduceOp in a dict costs more than the MPI call.
    """
    mpi, op = _mpi(), dist.ReduceOp
    floating = {op.SUM: mpi.SUM, op.PRODUCT: mpi.PROD, op.MIN: mpi.MIN, op.MAX: mpi.MAX}
    integer = floating | {op.BAND: mpi.BAND, op.BOR: mpi.BOR, op.BXOR: mpi.BXOR}
    logical = dict.fromkeys((op.SUM, op.MAX, op.BOR), mpi.LOR) | {op.BXOR: mpi.LXOR}
    logical |= dict.fromkeys((op.PRODUCT, op.MIN, op.BAND), mpi.LAND)
    table = {torch.bool: (mpi.C_BOOL, logical)}
    table |= {torch.float32: (mpi.FLOAT, floating), torch.float64: (mpi.DOUBLE, floating)}
    for name in ("int8", "int16", "int32", "int64", "uint8"):
        table[getattr(torch, name)] = getattr(mpi, f"{name.upper()}_T"), integer
    functions = {op.SUM: torch.add, op.PRODUCT: torch.mul}
    functions |= {op.MIN: torch.minimum, op.MAX: torch.maximum}
    for dtype in (torch.float16, torch.bfloat16):
        own = {key: mpi.Op.Create(_combine(f, dtype), True) for key, f in functions.items()}
        table[dtype] = mpi.INT16_T, own
    found: dict[tuple[int, torch.dtype], tuple[Any, Any, bool]] = {}
    for dtype, (kind, ops) in table.items():
        found |= {(hash(op(key)), dtype): (kind, ops[key], False) for key in ops}
        if dtype != torch.bool:
            found[hash(op(op.AVG)), dtype] = kind, ops[op.SUM], True
    return found


def _combine(function: Any, dtype: torch.dtype) -> Callable[[Any, Any, Any], None]:
    """The function that MPI calls to reduce a dtype for which it has no arithmetic."""

    def combine(source: Any, target: Any, _: Any) -> None:
        if len(target):
            total = torch.frombuffer(target, dtype=dtype)
            function(torch.frombuffer(source, dtype=dtype), total, out=total)

    return combine


def _require(name: str, true: bool, rule: str) -> None:
    if not true:
        raise ValueError(f"{name} over mpi4py: {rule}")


def _flat(name: str, tensor: Tensor) -> Tensor:
    """The tensor itself or, where its elements do not lie in order, a copy in which they do."""
    try:
        if tensor.is_cpu:
            return tensor if tensor.is_contiguous() else tensor.detach().contiguous()
    except RuntimeError:
        pass  # only dense tensors can say
    where = f"{tensor.layout} on {tensor.device}"
    raise ValueError(f"{name} over mpi4py: a tensor must be dense and on the CPU, not {where}")


def _joined(name: str, tensors: Sequence[Tensor]) -> Tensor:
    """A new tensor with the elements of all, in order."""
    return torch.cat([_flat(name, tensor).detach().view(-1) for tensor in tensors])


def _split(whole: Tensor, counts: list[int]) -> Sequence[Tensor]:
    return torch.split(whole, counts)


def _apart(source: Tensor, target: Tensor) -> Tensor:
    """The source or, where it shares memory with the target, which MPI forbids, a copy."""
    start, other = source.data_ptr(), target.data_ptr()
    shared = start < other + target.nbytes and other < start + source.nbytes
    return source.detach().clone() if shared else source


def _finish(outputs: Sequence[Tensor], flats: Sequence[Tensor], divisor: int) -> None:
    """Divide what MPI has summed, copy it to the outputs that MPI could not write itself."""
    for output, flat in zip(outputs, flats, strict=False):
        if divisor:
            rounding = None if flat.is_floating_point() else "trunc"
            torch.div(flat.detach(), divisor, rounding_mode=rounding, out=flat.detach())
        if flat is not output:
            output.detach().copy_(flat.view(output.shape))


_ProcessGroup: Any = dist.ProcessGroup  # its overloads of every method would all be in the way


class ProcessGroupMPI4PY(_ProcessGroup):  # type: ignore[misc]
    """A process group on an MPI communicator of its own; the methods are those that torch calls.

    Tensors may have any shape and strides. Every dtype can be moved. SUM, AVG, PRODUCT, MIN, MAX
    take float16/32/64, bfloat16, int8/16/32/64 and uint8 (AVG of integers truncates), BAND, BOR,
    BXOR the integers; on bool, SUM and MAX are "or", PRODUCT and MIN "and", AVG is not there.
    What cannot be done is a ValueError before anything is sent; what MPI reports, a
    DistBackendError with the operation and the rank.
    """

    group_name = ""  # torch's own asks a C++ backend, which this group has not

    def __init__(self, comm: Any, name: str, timeout: timedelta) -> None:
        self._rank, self._size = comm.Get_rank(), comm.Get_size()
        super().__init__(self._rank, self._size)
        self.group_name = name
        self._comm, self._worker = comm, _Worker(timeout)
        self._plain = {key: found[:2] for key, found in _reduced().items() if not found[2]}
        self._in_place, self._memory = _mpi().IN_PLACE, _mpi().buffer.fromaddress
        # Below THREAD_MULTIPLE only one thread at a time may call MPI, and with a lock around
        # calls that block, one thread's waiting could stop the call that the peer waits for. So
        # there is no worker then: asynchronous calls run at once, on the caller's thread.
        self._threaded = thread_level() == "MULTIPLE"

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def shutdown(self) -> None:
        """Serve what is queued, end the thread, free the communicator."""
        if not self._worker.close():
            text = f"{self._worker.running} on rank {self._rank} has not ended: cannot shut down"
            raise dist.DistBackendError(text)
        if self._comm and not _mpi().Is_finalized():
            self._comm.Free()

    def __del__(self) -> None:
        self.shutdown()  # older torch shuts down its own backends only

    def _issue(
        self,
        name: str,
        opts: Any,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        outputs: Sequence[Tensor] = (),
        flats: Sequence[Tensor] = (),
        mean: bool = False,
        keep: Any = None,
    ) -> dist.Work:
        """Run an MPI call or, for a caller that does not wait or behind others that wait, queue it.

        `flats` are the contiguous results, `keep` is whatever else MPI knows by address only.
        """
        worker = self._worker
        try:
            waits = not opts.asyncOp
        except AttributeError:  # older torch, or no options: the caller may count on not waiting
            waits = False
        if waits and worker.submitted == worker.completed:
            try:
                function(*arguments)
                if mean or (flats and flats[0] is not outputs[0]):
                    _finish(outputs, flats, self._size if mean else 0)
            except Exception as error:
                raise _failure(name, self._rank, error) from error
            return _DONE
        then = partial(_finish, outputs, flats, self._size if mean else 0)
        work = _Call(name, self._rank, list(outputs), partial(function, *arguments), then, keep)
        if self._threaded:
            worker.submit(work)
        else:
            work.run()
        if waits:
            work.wait()
        return work

    def _message(self, flat: Tensor, kind: Any = None, counts: Any = None) -> tuple[Any, ...]:
        """What mpi4py takes: memory, uneven counts, datatype (to be moved only: by item size)."""
        memory, kind = self._memory(flat.data_ptr(), flat.nbytes), kind or _moved()[flat.itemsize]
        return (memory, kind) if counts is None else (memory, counts, kind)

    def _single(self, name: str, tensors: Sequence[Tensor]) -> Tensor:
        if len(tensors) != 1:
            raise ValueError(f"{name} over mpi4py: one tensor a rank, not {len(tensors)}")
        return _flat(name, tensors[0])

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

    def _reduction(self, name: str, tensor: Tensor, opts: Any) -> tuple[Any, Any, bool]:
        """MPI's datatype, MPI's op, and whether to divide afterwards."""
        found = _reduced().get((hash(opts.reduceOp), tensor.dtype))
        if found is None:
            op = str(opts.reduceOp.op).rpartition(".")[2]
            raise ValueError(f"{name} over mpi4py: {op} cannot reduce {tensor.dtype}")
        return found

    def allreduce(self, tensors: _Tensors, opts: Any = None) -> dist.Work:
        """tensors[0] of every rank becomes the reduction of all ranks' tensors[0]."""
        name, opts, worker = "all_reduce", opts or dist.AllreduceOptions(), self._worker
        flat = self._single(name, tensors)
        # What follows, written out for the plain case: that saves a tenth of the time at 4 bytes.
        plain = self._plain.get((hash(opts.reduceOp), flat.dtype))
        waits = flat is tensors[0] and not getattr(opts, "asyncOp", True)
        if plain and waits and worker.submitted == worker.completed:
            message = self._memory(flat.data_ptr(), flat.nbytes), plain[0]
            try:
                self._comm.Allreduce(self._in_place, message, plain[1])
            except Exception as error:
                raise _failure(name, self._rank, error) from error
            return _DONE
        kind, op, mean = self._reduction(name, flat, opts)
        arguments = self._in_place, self._message(flat, kind), op
        return self._issue(name, opts, self._comm.Allreduce, arguments, tensors, (flat,), mean)

    def reduce(self, tensors: _Tensors, opts: Any = None) -> dist.Work:
        """tensors[0] of the root becomes the reduction of all ranks'; the others keep theirs."""
        name, opts = "reduce", opts or dist.ReduceOptions()
        flat, reduce = self._single(name, tensors), self._comm.Reduce
        kind, op, mean = self._reduction(name, flat, opts)
        message, root = self._message(flat, kind), opts.rootRank
        if root != self._rank:
            return self._issue(name, opts, reduce, (message, None, op, root), tensors, keep=flat)
        arguments = self._in_place, message, op, root
        return self._issue(name, opts, reduce, arguments, tensors, (flat,), mean)

    def broadcast(self, tensors: _Tensors, opts: Any = None) -> dist.Work:
        """tensors[0] of every rank becomes the root's."""
        name, opts = "broadcast", opts or dist.BroadcastOptions()
        flat = self._single(name, tensors)
        arguments = self._message(flat), opts.rootRank
        return self._issue(name, opts, self._comm.Bcast, arguments, tensors, (flat,))

    def barrier(self, opts: Any = None) -> dist.Work:
        """No rank's barrier ends before every rank has issued it."""
        return self._issue("barrier", opts, self._comm.Barrier, ())

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> dist.Work:
        """output (size × the source) becomes all ranks' sources in rank order."""
        name = "all_gather"
        self._shares(name, output, source)
        target, source = _flat(name, output), _flat(name, source)
        message = self._in_place
        if source.data_ptr() != target.data_ptr() + self._rank * source.nbytes:
            source = _apart(source, target)
            message = self._message(source)
        arguments = message, self._message(target)
        call = self._comm.Allgather
        return self._issue(name, opts, call, arguments, (output,), (target,), keep=source)

    def allgather(self, outputs: _Lists, inputs: _Tensors, opts: Any = None) -> dist.Work:
        """outputs[0][r] of every rank becomes rank r's inputs[0]; sizes may differ by r."""
        name = "all_gather"
        (parts,), source = outputs, self._single(name, inputs)
        counts = self._counts(name, parts, source, even=False)
        _require(name, counts[self._rank] == source.numel(), "output and input sizes differ")
        whole = source.new_empty(sum(counts))
        even = len(set(counts)) == 1
        call = self._comm.Allgather if even else self._comm.Allgatherv
        arguments = self._message(source), self._message(whole, None, None if even else counts)
        return self._issue(name, opts, call, arguments, parts, _split(whole, counts), keep=source)

    def gather(self, outputs: _Lists, inputs: _Tensors, opts: Any = None) -> dist.Work:
        """outputs[0][r] of the root becomes rank r's inputs[0]; the others give no outputs."""
        name, opts = "gather", opts or dist.GatherOptions()
        source, call, root = self._single(name, inputs), self._comm.Gather, opts.rootRank
        if root != self._rank:
            return self._issue(name, opts, call, (self._message(source), None, root), keep=source)
        counts = self._counts(name, outputs[0], source, even=True)
        whole = source.new_empty(sum(counts))
        arguments = self._message(source), self._message(whole), root
        parts = _split(whole, counts)
        return self._issue(name, opts, call, arguments, outputs[0], parts, keep=source)

    def scatter(self, outputs: _Tensors, inputs: _Lists, opts: Any = None) -> dist.Work:
        """outputs[0] of rank r becomes the root's inputs[0][r]; the others give no inputs."""
        name, opts = "scatter", opts or dist.ScatterOptions()
        target, message, whole = self._single(name, outputs), None, None
        if opts.rootRank == self._rank:
            self._counts(name, inputs[0], target, even=True)
            whole = _joined(name, inputs[0])
            message = self._message(whole)
        call, arguments = self._comm.Scatter, (message, self._message(target), opts.rootRank)
        return self._issue(name, opts, call, arguments, outputs, (target,), keep=whole)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> dist.Work:
        """output of rank r becomes part r of the reduction of all ranks' sources (size × it)."""
        name, opts = "reduce_scatter", opts or dist.ReduceScatterOptions()
        self._shares(name, source, output)
        target = _flat(name, output)
        source = _apart(_flat(name, source), target)
        kind, op, mean = self._reduction(name, target, opts)
        arguments = self._message(source, kind), self._message(target, kind), op
        call = self._comm.Reduce_scatter_block
        return self._issue(name, opts, call, arguments, (output,), (target,), mean, source)

    def reduce_scatter(self, outputs: _Tensors, inputs: _Lists, opts: Any = None) -> dist.Work:
        """outputs[0] of rank r becomes the reduction of all inputs[0][r]; sizes may differ by r."""
        name, opts = "reduce_scatter", opts or dist.ReduceScatterOptions()
        (parts,), target = inputs, self._single(name, outputs)
        counts = self._counts(name, parts, target, even=False)
        _require(name, counts[self._rank] == target.numel(), "output and input sizes differ")
        kind, op, mean = self._reduction(name, target, opts)
        whole = _joined(name, parts)
        sides = self._message(whole, kind), self._message(target, kind)
        call = partial(self._comm.Reduce_scatter_block, *sides)
        if len(set(counts)) > 1:
            call = partial(self._comm.Reduce_scatter, *sides, counts)
        return self._issue(name, opts, call, (op,), outputs, (target,), mean, whole)

    def all_to_all_single(
        self, output: Tensor, source: Tensor, to: list[int], of: list[int], opts: Any = None
    ) -> dist.Work:
        """Every rank r gets part r of the source; `of`, `to`: rows a rank, [] for even parts."""
        name = "all_to_all"
        _require(name, output.dtype == source.dtype, "output and input dtypes differ")
        target = _flat(name, output)
        source = _apart(_flat(name, source), target)
        out, into = self._rows(name, source, of), self._rows(name, target, to)
        call, arguments = self._comm.Alltoall, (self._message(source), self._message(target))
        if of or to:
            call = self._comm.Alltoallv
            arguments = self._message(source, None, out), self._message(target, None, into)
        else:
            _require(name, out == into, "output and input sizes differ")
        return self._issue(name, opts, call, arguments, (output,), (target,), keep=source)

    def alltoall(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> dist.Work:
        """outputs[r] becomes rank r's inputs[this rank]; sizes may differ."""
        name, source = "all_to_all", _joined("all_to_all", inputs)
        out = self._counts(name, inputs, source, even=False)
        into = self._counts(name, outputs, source, even=False)
        whole, call = source.new_empty(sum(into)), self._comm.Alltoallv
        arguments = self._message(source, None, out), self._message(whole, None, into)
        return self._issue(name, opts, call, arguments, outputs, _split(whole, into), keep=source)

    def _post(self, name: str, tensors: _Tensors, start: Any, peer: int, tag: int) -> dist.Work:
        flat = self._single(name, tensors)
        try:
            request = start(self._message(flat), peer, tag)
        except Exception as error:
            raise _failure(name, self._rank, error) from error
        return _Request(name, self._rank, tensors[0], flat, request)

    def send(self, tensors: _Tensors, peer: int, tag: int = 0) -> dist.Work:
        """Send tensors[0] to a rank of this group."""
        return self._post("send", tensors, self._comm.Isend, peer, tag)

    def recv(self, tensors: _Tensors, peer: int, tag: int = 0) -> dist.Work:
        """Receive into tensors[0], from a rank of this group, as many bytes as it holds."""
        return self._post("recv", tensors, self._comm.Irecv, peer, tag)

    def recv_anysource(self, tensors: _Tensors, tag: int = 0) -> dist.Work:
        """Receive from any rank; the work's _source_rank() says from which."""
        return self._post("recv", tensors, self._comm.Irecv, _mpi().ANY_SOURCE, tag)

    # What torch before 2.13 calls them.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single


def _create(given: Any, _: Any) -> dist.ProcessGroup:
    """The backend's creator: torch calls it in every member of a new group, and only there."""
    comm, size = _mpi().COMM_WORLD, given.group_size
    # torch's ranks need not be MPI's: the store tells which process is where. Read by all, it
    # also shows all of them when mpirun did not start them: none is left waiting for the others.
    given.store.set(f"mpi{given.group_rank}", str(world()[0]))
    ranks = [int(text) for text in given.store.multi_get([f"mpi{rank}" for rank in range(size)])]
    if len(set(ranks)) != size:
        text = f"{size} ranks of torch are MPI's ranks {ranks}: start them with mpirun"
        raise ValueError(f"a group over mpi4py: {text}")
    if ranks == list(range(world()[1])):
        comm = comm.Dup()
    else:
        tag = zlib.crc32(str(given.group_id).encode()) % 32768  # MPI allows every tag below that
        comm = comm.Create_group(comm.Get_group().Incl(ranks), tag)
    comm.Set_errhandler(_mpi().ERRORS_RETURN)
    return ProcessGroupMPI4PY(comm, str(given.group_id), given.timeout)
