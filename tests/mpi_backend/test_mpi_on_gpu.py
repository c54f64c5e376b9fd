"""Tensors of a GPU over MPI, in real MPI jobs; the GPU and its streams are simulated.

A rank runs this very file: `mpirun -n 2 python test_mpi_on_gpu.py JOB FOLDER`.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from mpi_jobs import OP, run_job, start_group
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from ddpbench import mpi
from ddpbench.mpi_backend import library as mpi_library

DEVICE = torch.device("cuda", 1)
COPY, CHANGES, NEW = Tensor.copy_, (Tensor.copy_, Tensor.div_), (Tensor.clone, torch.cat)


class Stream:
    """Work that is done only when somebody waits for it."""

    def __init__(self) -> None:
        self.work: list[Callable[[], object]] = []

    def synchronize(self) -> None:
        work, self.work = self.work, []
        for each in work:
            each()


class Gpu:
    """Stands for torch.cuda: each thread has a stream."""

    def __init__(self) -> None:
        self.thread = threading.local()

    def current_stream(self, device: torch.device) -> Stream:
        assert device == DEVICE
        if not hasattr(self.thread, "stream"):
            self.thread.stream = Stream()
        stream: Stream = self.thread.stream
        return stream

    def device(self, device: torch.device) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()


GPU = Gpu()


class GpuTensor(Tensor):
    """Memory that claims to be a GPU's. Copies and divisions wait on the thread's stream."""

    is_cpu, is_cuda, device = False, True, DEVICE

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def run() -> Any:
            return Tensor.__torch_function__.__func__(cls, func, types, args, kwargs or {})

        stream = GPU.current_stream(DEVICE)
        if func in CHANGES:
            stream.work.append(run)
            crosses = not all(isinstance(each, cls) for each in args[:2])
            if func is COPY and crosses and not (kwargs or {}).get("non_blocking"):
                stream.synchronize()
            return args[0]
        result = run()
        if func in NEW:  # its memory is there at once, its content is not
            stream.work.append(lambda: result.data.copy_(run()))
        return result


def on_gpu(values: Tensor, strided: bool = False) -> Tensor:
    """A tensor that has these values once its stream has done its work."""
    base = torch.zeros(*values.shape[::-1], dtype=values.dtype)
    held = base.t() if strided else torch.zeros_like(values)
    GPU.current_stream(DEVICE).work.append(lambda: held.copy_(values))
    return held.as_subclass(GpuTensor)


def held(tensor: Tensor) -> Tensor:
    """What the memory of a tensor holds now."""
    return tensor.as_subclass(Tensor)


def all_values(size: int, dtype: torch.dtype) -> list[Tensor]:
    return [(torch.arange(12).view(3, 4) + rank).to(dtype) for rank in range(size)]


def options(kind: Any, later: bool) -> Any:
    made = kind()
    made.asyncOp = later
    return made


def check(group: Any, dtype: torch.dtype, later: bool, strided: bool) -> None:
    """Calls in place, into a whole and into parts, and messages; MPI reads after the stream, and a
    result is in memory when the call or its wait returns."""
    rank, size = mpi_library.world()
    every = all_values(size, dtype)
    total = every[0] + every[1]

    def end(work: Any, outputs: Any, wanted: Any) -> None:
        if later:
            work.wait()
        for output, want in zip(outputs, wanted, strict=True):
            assert torch.equal(held(output), want), (dtype, later, strided, held(output), want)

    for op, wanted in ((OP.SUM, total), (OP.AVG, total / 2)):
        tensor = on_gpu(every[rank], strided)
        opts = options(dist.AllreduceOptions, later)
        opts.reduceOp = op
        work = group.allreduce([tensor], opts)
        end(work, [tensor], [wanted])
    whole = on_gpu(torch.zeros(6, 4, dtype=dtype))
    source = on_gpu(every[rank], strided)
    work = group.all_gather_single(whole, source, options(AllgatherOptions, later))
    end(work, [whole], [torch.cat(every)])
    target = on_gpu(torch.ones(3, 4, dtype=dtype), strided)
    sent = group.send([on_gpu(every[rank], strided)], 1 - rank)
    group.recv([target], 1 - rank).wait()
    sent.wait()
    assert torch.equal(held(target), every[1 - rank])
    parts = [on_gpu(torch.zeros(count, dtype=dtype)) for count in (5, 3)]
    mine = on_gpu(every[rank].view(-1)[: 5 - 2 * rank].clone())
    work = group.allgather([parts], [mine], options(AllgatherOptions, later))
    end(work, parts, [every[0].view(-1)[:5], every[1].view(-1)[:3]])


def job_gpu(folder: Path) -> None:
    start_group(mpi.NAME, folder)
    group: Any = dist.group.WORLD
    empty, pinned = torch.empty, []

    def pin(*shape: Any, pin_memory: bool = False, **settings: Any) -> Tensor:
        pinned.append(pin_memory)
        return empty(*shape, **settings)

    with (
        mock.patch.object(torch, "get_device_module", return_value=GPU),
        mock.patch.object(torch, "empty", pin),
    ):
        for aware in (True, False):
            mpi_library.cuda_aware.cache_clear()
            library = mock.Mock(MPIX_Query_cuda_support=lambda aware=aware: int(aware))
            with mock.patch.object(ctypes, "CDLL", return_value=library):
                assert mpi_library.cuda_aware() == aware
            for dtype in (torch.float32, torch.float16):
                pinned.clear()
                for strided in (False, True):
                    for later in (False, True):
                        check(group, dtype, later, strided)
                # What MPI takes from the GPU itself needs no memory of the host.
                assert any(pinned) == (not aware or dtype == torch.float16)
    dist.destroy_process_group()
    (folder / f"ended{mpi_library.world()[0]}").touch()


@pytest.mark.thorough
def test_tensors_of_a_gpu_are_read_and_written_in_the_order_of_its_streams(tmp_path: Path) -> None:
    """With an MPI that knows GPUs and one that does not: MPI reads after the caller's stream, and a
    result is in memory when the call ends."""
    done = run_job(job_gpu, 2, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in tmp_path.glob("ended*")} == {"ended0", "ended1"}


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
