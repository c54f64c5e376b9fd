"""Check whether a step fits in a rank's memory: run a forward and a backward without DDP.

In a step with DDP, a rank that runs out of memory leaves the other ranks waiting in a collective.
Therefore each rank first tries alone, with empty tensors in place of gradient buckets and the
optimizer's state. The ranks can then agree on what to do. Only devices that refuse an allocation
need this. A host whose memory is full kills a process instead.

The memory of the backend, of a communication hook and of the optimizer's temporary tensors is not
checked. If a loss communicates and one rank runs out of memory, the other ranks wait here, too.
"""

from __future__ import annotations

import contextlib
import gc
import re
from typing import TYPE_CHECKING

import torch

from ddpbench.catalog.task import OPTIMIZERS, Task
from ddpbench.measure import memory
from ddpbench.measure.step import autocast
from ddpbench.records.wording import list_choices
from ddpbench.runtime import devices

# The first two sentences of torch's message, which has many.
REFUSED = re.compile(r"(.* out of memory)\. Tried (to allocate [\d.]+ \w+)")

if TYPE_CHECKING:
    from ddpbench.records.schema import StepCase


def find_shortage(task: Task, case: StepCase, device: torch.device, replicas: int) -> str | None:
    """Return None if a step fits in this rank's memory, else why not, and what to do.

    task: not yet in DDP. replicas: how many this rank will have; all others are in DDP already and
    have not stepped. Parameters, buffers and random state do not change.
    """
    buffers = [(buffer, buffer.clone()) for buffer in task.model.buffers()]
    shortage = None
    seeded = devices.of(device).seeded_devices(device)
    try:
        with torch.random.fork_rng(seeded, device_type=device.type):
            _run_alone(task, case, device, replicas)
    except Exception as error:  # the first real step raises other errors again
        shortage = describe_shortage(error, case)
    task.model.zero_grad(set_to_none=True)
    for buffer, saved in buffers:
        buffer.copy_(saved)
    release_memory(device)
    return shortage


def _run_alone(task: Task, case: StepCase, device: torch.device, replicas: int) -> None:
    """Run a forward and a backward, with all tensors of a later step in memory.

    These are the optimizer's states, the buckets of this replica, and the gradients of the other
    replicas, unless they are views of their buckets.
    """
    views = case.gradient_as_bucket_view
    copies = OPTIMIZERS[case.optimizer].copies * replicas + (1 if views else replicas)
    trained = [parameter for parameter in task.model.parameters() if parameter.requires_grad]
    resident = [torch.empty_like(parameter) for parameter in trained for _ in range(copies)]
    with contextlib.ExitStack() as hooks:
        for parameter in trained if views else ():
            hooks.enter_context(parameter.register_post_accumulate_grad_hook(_drop_gradient))
        with autocast(case, device):
            loss = task.loss(task.model, task.batch(0))
        loss.backward()
    del resident


def _drop_gradient(parameter: torch.Tensor) -> None:
    """Free a gradient that DDP would move to its bucket."""
    parameter.grad = None


def describe_shortage(error: Exception, case: StepCase) -> str | None:
    """Describe an out-of-memory error, and what to do; None for any other error."""
    line = next(filter(memory.OUT_OF_MEMORY.search, str(error).splitlines()), None)
    if line is None and not isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return None
    where = devices.get(case.device).memory
    refused = REFUSED.match(line or "")
    detail = (line or type(error).__name__)[:200]
    if refused:
        detail = f"{refused[1]} (tried {refused[2]})"
    return f"a step does not fit in the memory of the {where}: {detail}; {advise(case)}"


def advise(case: StepCase) -> str:
    """Return which options make a case fit in memory."""
    if ":" in case.workload:
        return "use a smaller batch or a smaller model"
    settings = (setting.partition("=") for setting in case.settings)
    sizes = [name for name, _, value in settings if value.isdecimal()]
    return f"use a smaller {list_choices(f'--{name}' for name in ['batch', *sizes])}"


def release_memory(device: torch.device) -> None:
    """Release unused memory if the device refuses allocations beyond its memory."""
    if devices.of(device).refuses:
        gc.collect()
        devices.of(device).release_memory()
