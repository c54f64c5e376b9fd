"""Kinds of devices for tensors. All code that depends on the kind of a device is here.

To add a kind, add an entry to KINDS.

The methods take a torch.device of their kind. Until `select`, none of them creates a context on a
device. An event of the CPU reads the host's clock, so code that times with events also runs without
a GPU. Importing this module does not import torch.
"""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ddpbench.records.wording import explain_unknown
from ddpbench.runtime import cpu

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")
WARM_SECONDS = 0.05  # of work in which an idle GPU raises its clocks
NO_DEVICE = re.compile(r"Found no .*driver|No \w+ GPUs are available")  # torch, with no device
HIDING = {"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"}


class Event(Protocol):
    """A stamp that `record` takes when the device has done all work enqueued so far."""

    def record(self) -> None: ...

    def synchronize(self) -> None:
        """Wait until the stamp is taken."""

    def query(self) -> bool:
        """Return whether the stamp is taken."""

    def elapsed_time(self, later: Any) -> float:
        """Return the milliseconds from this stamp to a later one; both must be taken."""


class HostEvent:
    """An event of the CPU, which does its work in the order of the calls."""

    ns = 0

    def record(self) -> None:
        self.ns = time.perf_counter_ns()

    def synchronize(self) -> None:
        """Return at once: the stamp is taken by `record`."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: HostEvent) -> float:
        return (later.ns - self.ns) * 1e-6


def elapsed_ns(first: Event, later: Event) -> int:
    """Return the ns between two events that are taken."""
    return round(first.elapsed_time(later) * 1e6)


def time_call(device: torch.device, call: Callable[[], object]) -> float:
    """Return the seconds of a call to its end, on the clock of its device.

    A GPU's clock leaves out what the host does before and after.
    """
    kind = of(device)
    begin, end = kind.event(device), kind.event(device)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return elapsed_ns(begin, end) * 1e-9


class Cpu:
    """The host's processors and memory, the same for all ranks of a host."""

    name = "cpu"
    memory = "host"  # name of the memory of its tensors, for messages
    clock = "host"  # that times operations and steps; "device": events
    event_step_seconds = 0.0  # resolution of events; 0: the clock's resolution
    forks = True  # whether processes that use such devices can be forked
    refuses = False  # whether an allocation beyond its memory raises torch.OutOfMemoryError
    defaults = "cpu"  # key of the default sizes and batches in the catalog's tables

    def unusable(self) -> str | None:
        """Return None, or why no device of this kind can be used, as the end of a sentence."""
        return None

    def broken(self) -> bool:
        """Return whether devices exist but do not work. Do not treat this as having none."""
        return False

    def installed(self) -> int:
        """Return how many devices the host's driver lists, except those that the user hides.

        The process may see fewer. 0 if the host does not report it.
        """
        return 0

    def count(self) -> int:
        """Return how many devices of this kind this process sees."""
        return 1

    def usual_ranks(self) -> int:
        """Return how many ranks to start on this host by default."""
        return 2

    def identity(self, index: int) -> str | None:
        """Return a name that is unique over all hosts; None if all ranks may share the device."""
        return None

    def in_use(self) -> int | None:
        """Return the index of the device that this process has begun to use; None if none is."""
        return None

    def properties(self, index: int) -> Any:
        """Return torch's properties of a device, such as its name and PCI bus; None without any."""
        return None

    def select(self, index: int) -> torch.device:
        """Make a device this process's current one. Return it."""
        import torch

        return torch.device("cpu")

    def current(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return a context in which a device is this thread's current one. The default is 0."""
        return nullcontext()

    def current_stream(self, device: torch.device) -> Any:
        """Return the stream on which this thread enqueues work; None if there are no streams."""
        return None

    def event(self, device: torch.device) -> Event:
        """Return an event, to be recorded while the device is current, on its current stream."""
        return HostEvent()

    def synchronize(self, device: torch.device) -> None:
        """Wait until the device has done all enqueued work."""

    def synchronize_stream(self, device: torch.device) -> None:
        """Wait until the current stream has done all enqueued work."""

    def capturing(self) -> bool:
        """Return whether the current stream records work into a graph instead of running it."""
        return False

    def sleep(self, device: torch.device, seconds: float) -> None:
        """Keep the current stream busy for about this time."""
        time.sleep(seconds)

    def free_nbytes(self, device: torch.device) -> int | None:
        """Return the memory that can be allocated now; None if it is unknown."""
        return cpu.free_memory_nbytes()

    def total_nbytes(self, device: torch.device) -> int:
        """Return the memory of the device that one process can allocate; 0: not limited by it."""
        return 0

    def reset_peak(self, device: torch.device) -> bool:
        """Reset `peak_nbytes`; return whether that worked."""
        return cpu.reset_peak()

    def peak_nbytes(self, device: torch.device) -> int:
        """Return the peak of this process's memory since `reset_peak`; 0: unknown.

        The CPU's is resident memory, with Python and its libraries; a GPU's is that of tensors.
        """
        return cpu.peak_nbytes()

    def release_memory(self) -> None:
        """Release torch's cache of memory from freed tensors."""

    def group_options(self, device: torch.device, backend: str) -> dict[str, Any]:
        """Return the arguments with which dist.new_group binds a group to this device."""
        return {}

    def barrier_options(self, device: torch.device, group: dist.ProcessGroup) -> dict[str, Any]:
        """Return the arguments with which dist.barrier uses this device."""
        return {}

    def ddp_device_ids(self, device: torch.device) -> list[torch.device] | None:
        """Return DistributedDataParallel's `device_ids` for a model on this device."""
        return None


class Cuda(Cpu):
    """NVIDIA's GPUs, and AMD's, which torch also calls cuda."""

    name = "cuda"
    memory = "GPU"
    clock = "device"
    event_step_seconds = 0.5e-6  # as CUDA documents it
    forks = False
    refuses = True
    defaults = "cuda"
    _cycles_per_second = 0.0

    @property
    def _module(self) -> Any:
        import torch

        return torch.cuda

    def count(self) -> int:
        return int(self._module.device_count())

    def usual_ranks(self) -> int:
        return max(1, self.count())

    def identity(self, index: int) -> str | None:
        return f"GPU-{self.properties(index).uuid}"  # as nvidia-smi writes it

    def in_use(self) -> int | None:
        return int(self._module.current_device()) if self._module.is_initialized() else None

    def properties(self, index: int) -> Any:
        return self._module.get_device_properties(index)

    def select(self, index: int) -> torch.device:
        import torch

        self._module.set_device(index)
        return torch.device(self.name, index)

    def current(self, device: torch.device) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._module.device(device)
        return context

    def current_stream(self, device: torch.device) -> Any:
        return self._module.current_stream(device)

    def event(self, device: torch.device) -> Event:
        event: Event = self._module.Event(enable_timing=True)
        return event

    def synchronize(self, device: torch.device) -> None:
        self._module.synchronize(device)

    def synchronize_stream(self, device: torch.device) -> None:
        self._module.current_stream(device).synchronize()

    def free_nbytes(self, device: torch.device) -> int | None:
        return int(self._module.mem_get_info(device)[0])

    def total_nbytes(self, device: torch.device) -> int:
        return int(self._module.mem_get_info(device)[1])

    def reset_peak(self, device: torch.device) -> bool:
        self._module.reset_peak_memory_stats(device)
        return True

    def peak_nbytes(self, device: torch.device) -> int:
        return int(self._module.max_memory_allocated(device))

    def release_memory(self) -> None:
        self._module.empty_cache()

    def ddp_device_ids(self, device: torch.device) -> list[torch.device] | None:
        return [device]

    def unusable(self) -> str | None:
        """Return CUDA's error, so that an old driver is not reported as a missing GPU.

        torch.cuda.is_available hides the error, and may count devices through NVML that CUDA cannot
        use (PYTORCH_NVML_BASED_CUDA_CHECK). This starts CUDA but creates no context. A process that
        forks ranks must not call it, unless there is no device.
        """
        import torch

        cuda, hip = torch.version.cuda, torch.version.hip
        if not (cuda or hip):
            return "this torch is a CPU build"
        if (error := _start_cuda()) is None:
            return None
        hidden = [f"{name}={shlex.quote(os.environ[name])}" for name in HIDING & os.environ.keys()]
        place = f" with {' '.join(hidden)}" if hidden and NO_DEVICE.search(error) else ""
        # CUDA's own number and text, else the first sentence.
        line = error.strip().splitlines()[0]
        own = re.search(r"Error \d+: .*", line)
        shown = own[0] if own else re.split(r"\. (?=[A-Z])", line)[0].rstrip(".")
        return f'{f"HIP {hip}" if hip else f"CUDA {cuda}"} reports "{shown}"{place}'

    def broken(self) -> bool:
        import torch

        error = _start_cuda() if torch.version.cuda or torch.version.hip else None
        return error is not None and not NO_DEVICE.search(error)

    def installed(self) -> int:
        if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
            return 0
        return sum(1 for _ in NVIDIA_GPUS.glob("*"))

    def capturing(self) -> bool:
        return bool(self._module.is_current_stream_capturing())

    def sleep(self, device: torch.device, seconds: float) -> None:
        import torch

        if not self._cycles_per_second:
            self._cycles_per_second = self._measure_cycles(device)
        torch.cuda._sleep(round(seconds * self._cycles_per_second))

    def _measure_cycles(self, device: torch.device, cycles: int = 1_000_000) -> float:
        """Return the highest rate of `torch.cuda._sleep`, in cycles per second, in WARM_SECONDS.

        While the clock is lower, a sleep lasts longer than requested, but never shorter.
        """
        import torch

        begin, end = self.event(device), self.event(device)
        spans: list[float] = []  # the first also loads the kernel
        while sum(spans) < WARM_SECONDS:
            begin.record()
            torch.cuda._sleep(cycles)
            end.record()
            end.synchronize()
            spans.append(begin.elapsed_time(end) * 1e-3)
        return cycles / min(spans)

    def group_options(self, device: torch.device, backend: str) -> dict[str, Any]:
        """Bind nccl to the device where it would otherwise bind itself to a guessed one.

        Since torch 2.15, nccl connects while the group is created, on a GPU that it guesses from
        LOCAL_RANK or the rank. Earlier versions connect at the first operation, on the GPU of its
        tensor, or the one that `barrier_options` names. They are not changed: torch 2.7.0 makes
        a bound group's calls non-blocking, which may hang in NCCL 2.26.
        """
        import torch

        # NVIDIA's containers call their torch 2.15.0a0.
        guesses = backend.startswith("nccl") and torch.__version__ >= "2.15.0a0"
        return {"device_id": device} if guesses else {}

    def barrier_options(self, device: torch.device, group: dist.ProcessGroup) -> dict[str, Any]:
        """Name the device to nccl. Otherwise nccl may guess one from the rank's number."""
        import torch.distributed as dist

        # Other backends ignore the argument, or refuse it up to torch 2.7.
        is_nccl = dist.get_backend(group).startswith("nccl")
        return {"device_ids": [device.index]} if is_nccl else {}


def _start_cuda() -> str | None:
    """Return None, or torch's error, even if called again."""
    import torch

    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError, torch.cuda.DeferredCudaCallError) as error:
        return str(error)
    return None


KINDS: dict[str, Cpu] = {kind.name: kind for kind in (Cpu(), Cuda())}


def get(name: str) -> Cpu:
    """Return the kind of devices with this name in torch. Raises ValueError if there is none."""
    if name not in KINDS:
        raise ValueError(explain_unknown("device", name, KINDS))
    return KINDS[name]


def of(device: torch.device) -> Cpu:
    """Return the kind of a device."""
    return get(device.type)
