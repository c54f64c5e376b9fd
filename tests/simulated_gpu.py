"""CUDA tensors without a GPU: torch's own rules for devices, and values computed on the CPU.

FakeTensorMode computes the device and the shape of each result as on a GPU, and raises an error
where devices are mixed, but a fake tensor has no values. Here each operation is tried with fake
tensors first, and then done with the CPU's. So code for GPUs runs to its end, and its results can
be compared with the CPU's.

This cannot find an operation or a dtype without a CUDA kernel, nor errors of streams and time.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from ddpbench.runtime import devices

CUDA = torch.device("cuda", 0)
# A CPU build of torch has nothing that selects a GPU, and then refuses to index or copy even a fake
# CUDA tensor. A CUDA build has a guard, which asks the driver. This one does nothing.
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>)
"""
# The results of these depend on values: fake tensors refuse them, and the host waits.
READS = ("aten._local_scalar_dense", "aten.nonzero", "aten.equal", "aten.is_nonzero")


@cache
def load_guard() -> None:
    """Compile and load the guard; skip the test without a compiler, or with a GPU."""
    if devices.get("cuda").installed():
        pytest.skip("a GPU is not simulated where there is one")
    if (compiler := shutil.which("g++") or shutil.which("c++")) is None:
        pytest.skip("there is no C++ compiler, which simulated CUDA tensors need")
    root = Path(torch.__file__).parent
    folder = tempfile.TemporaryDirectory()
    source, library = Path(folder.name, "guard.cpp"), Path(folder.name, "guard.so")
    source.write_text(GUARD)
    paths = [f"-I{root}/include", f"-L{root}/lib", "-lc10", f"-Wl,-rpath,{root}/lib"]
    words = [compiler, "-std=c++20", "-shared", "-fPIC", str(source), *paths, "-o", str(library)]
    subprocess.run(words, check=True, capture_output=True, text=True)
    # The first backward of a process starts a thread per device that it finds, and after that no
    # forked process may have a backward. The guard is such a device, so the first one comes before.
    torch.ones(1, requires_grad=True).backward()
    torch.ops.load_library(str(library))
    folder.cleanup()


class OnGpu(torch.Tensor):
    """A tensor whose device is a GPU. Its values are in `held`, on the CPU."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor, device: torch.device) -> OnGpu:
        made: OnGpu = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(),
            dtype=held.dtype, device=device,
        )  # fmt: skip
        made.held = held
        return made

    def tolist(self) -> Any:  # torch refuses it for all subclasses
        return self.cpu().tolist()

    def __repr__(self, **settings: Any) -> str:
        return f"OnGpu({self.held!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} outside of SimulatedGpu")


class SimulatedGpu(TorchDispatchMode):
    """A mode in which tensors with device="cuda" are OnGpu; `called` lists all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []
        self.collectives: list[tuple[str, tuple[Any, ...]]] = []  # name, arguments
        self._fake = FakeTensorMode(allow_non_fake_inputs=False)
        # dist.broadcast asks a GPU, whether there is one or not.
        self._asked = mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0))

    @property
    def reads(self) -> list[str]:
        """The operations for which the host waits for the device."""
        return [name for name in self.called if name.endswith("→cpu")]

    def __enter__(self) -> SimulatedGpu:
        self._asked.start()
        self._fake.__enter__()  # below this mode; it keeps torch from initialising CUDA
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._fake.__exit__(*error)
        self._asked.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = str(func).removesuffix(".default"), kwargs or {}
        if name.startswith("c10d."):
            return self._communicate(name, func, args, kwargs)
        before = {id(t.held): t for t in tree_leaves((args, kwargs)) if isinstance(t, OnGpu)}
        on_gpu = bool(before)
        if name in READS or not on_gpu:
            named = [value for value in kwargs.values() if isinstance(value, torch.device)]
            device = next((device for device in named if device.type == "cuda"), None)
            self.called.append(name + ("→cpu" if on_gpu else ""))
            results = _compute(func, args, kwargs)
            return tree_map(lambda r: _wrapped(r, device), results) if device else results
        fake_args, fake_kwargs = tree_map(_fake, (args, kwargs))
        tried = tree_leaves(func(*fake_args, **fake_kwargs))  # raises what torch raises
        devices = [r.device if isinstance(r, torch.Tensor) else None for r in tried]
        results = _compute(func, args, kwargs)
        leaves = tree_leaves(results)
        assert len(leaves) == len(devices)
        places = dict(zip(map(id, leaves), devices, strict=True))
        moved = any(d is not None and d.type == "cpu" for d in devices)
        crossed = name == "aten.copy_" and not isinstance(args[0], OnGpu)
        self.called.append(name + ("→cpu" if moved or crossed else ""))

        def place(result: Any) -> Any:
            key = id(result)
            return before[key] if key in before else _wrapped(result, places.get(key))

        return tree_map(place, results)

    def _communicate(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        self.called.append(name)
        self.collectives.append((name, args))
        result = _compute(func, args, kwargs)
        return (args[0], result[1]) if isinstance(result, tuple) else result


def _held(value: Any) -> Any:
    return value.held if isinstance(value, OnGpu) else value


def _on_cpu(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) else _held(value)


def _compute(func: Any, args: Any, kwargs: Any) -> Any:
    """Do the operation on the CPU."""
    with _disable_current_modes():
        return func(*tree_map(_held, args), **tree_map(_on_cpu, kwargs))


def _wrapped(value: Any, device: torch.device | None) -> Any:
    on_gpu = isinstance(value, torch.Tensor) and device is not None and device.type == "cuda"
    return OnGpu(value, torch.device("cuda", device.index or 0)) if on_gpu and device else value


def _fake(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)


class PretendedKind(devices.Cuda):
    """CUDA devices without CUDA, with the host's clock, and without streams."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        super().__init__()
        self.gpu = gpu

    def event(self, device: torch.device) -> devices.Event:
        return devices.HostEvent()

    def synchronize(self, device: torch.device) -> None:
        self.gpu.called.append("wait")


@contextlib.contextmanager
def fake_group(rank: int, world_size: int) -> Iterator[Any]:
    """Make torch's `fake` group the default: it accepts all calls of a rank, and moves nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
