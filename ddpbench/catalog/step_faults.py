"""Faults of a training step. To add one, write a function and add it to STEP_FAULTS, below.

A function changes one rank's measure.step.Replica. The first sentence of its docstring is the
fault's help text. Importing this module imports no torch.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from typing import Any

import psutil

from ddpbench.catalog.parallel import REPLICATE, SHARD, TENSOR
from ddpbench.catalog.planting import Fault, Settings
from ddpbench.runtime import devices

ELEMENTS = 1024  # of the metric that the user's step reduces over the ranks


def read_local(tensor: Any) -> Any:
    """Return the memory of a tensor; of a DTensor, this rank's shard."""
    return getattr(tensor, "_local_tensor", tensor)


def find_first(replica: Any) -> Any:
    """Return the memory of the first parameter of which this rank has a part."""
    parts = (read_local(parameter.data) for parameter in replica.module.parameters())
    return next(part for part in parts if part.numel())


def flip(flat: Any, index: int, bit: float) -> None:
    """Flip one bit of an element of a flat floating-point tensor."""
    import torch

    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    flat.view(bits[flat.element_size()])[index] ^= 1 << int(bit)


def _require(holds: Callable[[Any], bool], why: str) -> Callable[[Any], str | None]:
    """Return a check of the replica that returns None if `holds` is true, else the sentence."""
    return lambda replica: None if holds(replica) else why


require_ddp = _require(
    lambda replica: replica.case.parallel == "ddp",
    "the faults bypass, no-sync and slow-link change what DDP does: use --parallel ddp",
)
require_state = _require(
    lambda replica: replica.case.optimizer != "sgd",
    "the fault optimizer-state needs an optimizer with state: use --optimizer adam",
)
require_buffer = _require(
    lambda replica: any(True for _ in replica.module.buffers()),
    "the fault buffer needs a workload with buffers: use --workload convnet",
)


# --- faults that change the replica ---------------------------------------------------------------


def bit_flip(replica: Any, settings: Settings) -> None:
    """Flip one bit of one parameter."""
    flat = find_first(replica).view(-1)
    flip(flat, flat.numel() // 2, settings["bit"])


def corrupted_result(replica: Any, settings: Settings) -> None:
    """Flip one bit of one reduced gradient, in one step. The optimizer sees it as if a bad link,
    adapter or GPU had delivered it.
    """
    if replica.steps != settings["step"]:
        return

    def spoil(*_: Any) -> None:
        hook.remove()
        gradients = (read_local(parameter.grad) for parameter in replica.module.parameters())
        flat = next(gradient.view(-1) for gradient in gradients if gradient.numel())
        flip(flat, int(flat.abs().argmax()), settings["bit"])

    hook = replica.optimizer.register_step_pre_hook(spoil)


def bypass(replica: Any, settings: Settings) -> None:
    """Let the forward bypass DDP."""
    replica.through = replica.module


def no_sync(replica: Any, settings: Settings) -> None:
    """Run the last micro-batch under no_sync too."""
    replica.sync_last = False


def learning_rate(replica: Any, settings: Settings) -> None:
    """Change the learning rate in one rank."""
    for group in replica.optimizer.param_groups:
        group["lr"] = settings["lr"]


def permute(replica: Any, settings: Settings) -> None:
    """Reverse the elements of one parameter."""
    tensor = find_first(replica)
    tensor.copy_(tensor.flatten().flip(0).view_as(tensor))


def nan(replica: Any, settings: Settings) -> None:
    """Set one element of one parameter to NaN."""
    find_first(replica).view(-1)[0] = float("nan")


def optimizer_state(replica: Any, settings: Settings) -> None:
    """Change one element of the optimizer's state."""
    import torch

    for state in replica.optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.dim():
                read_local(value).view(-1)[0] += 1
                return


def buffer(replica: Any, settings: Settings) -> None:
    """Change one element of a buffer."""
    import torch

    for tensor in replica.module.buffers():
        if torch.is_floating_point(tensor):
            tensor.view(-1)[0] += 1
            return


# --- faults that slow or stop the rank ------------------------------------------------------------


def slow_rank(replica: Any, settings: Settings) -> None:
    """Delay one rank's forward."""
    replica.delay_seconds = settings["ms"] / 1e3


def slow_link(replica: Any, settings: Settings) -> None:
    """Delay the reduction of the last bucket."""
    replica.link_seconds = settings["ms"] / 1e3


def raise_(replica: Any, settings: Settings) -> None:
    """Raise an error in one rank."""
    raise RuntimeError("planted error")


def hang(replica: Any, settings: Settings) -> None:
    """Let one rank sleep instead of stepping. The others wait in a collective."""
    time.sleep(settings["seconds"])


def stop(replica: Any, settings: Settings) -> None:
    """Stop one rank (SIGSTOP). A debugger or a batch system does this."""
    os.kill(os.getpid(), signal.SIGSTOP)


def kill(replica: Any, settings: Settings) -> None:
    """Kill one rank (SIGKILL). The kernel does this when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def out_of_memory(replica: Any, settings: Settings) -> None:
    """Let an allocation fail in one rank. On the CPU it is twice the address space that the process
    may still use, on a GPU more than all of its memory.
    """
    import torch

    nbytes = int(settings["mb"] * 2**20) + devices.of(replica.device).total_nbytes(replica.device)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    most = psutil.Process().memory_info().vms + nbytes // 2
    resource.setrlimit(resource.RLIMIT_AS, (most, limits[1]))
    try:
        torch.empty(nbytes, dtype=torch.uint8, device=replica.device)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


# --- faults in a collective that the user's step calls in addition to DDP's -----------------------


def sum_metric(replica: Any, settings: Settings) -> None:
    """Call all_reduce on a metric, as all ranks should."""
    _sum(replica, ELEMENTS, "float32")


def wrong_shape(replica: Any, settings: Settings) -> None:
    """Sum a metric of another shape in one rank. gloo then ends a neighbour of that rank."""
    _sum(replica, 2 * ELEMENTS, "float32")


def wrong_dtype(replica: Any, settings: Settings) -> None:
    """Sum a metric of another dtype in one rank. A Python float becomes a float64."""
    _sum(replica, ELEMENTS, "float64")


def _sum(replica: Any, elements: int, dtype: str) -> None:
    import torch
    import torch.distributed as dist

    metric = torch.zeros(elements, dtype=getattr(torch, dtype), device=replica.device)
    dist.all_reduce(metric, group=replica.group)


def gather_metric(replica: Any, settings: Settings) -> None:
    """Call all_gather on a metric, as all ranks should."""
    import torch
    import torch.distributed as dist

    group = replica.group
    metric = torch.zeros(ELEMENTS, device=replica.device)
    dist.all_gather([metric.clone() for _ in range(group.size())], metric, group=group)


def skipped(replica: Any, settings: Settings) -> None:
    """Let one rank skip the all_gather of a metric. An `if rank == 0` around it does this."""


def sum_then_gather(replica: Any, settings: Settings) -> None:
    """Sum a metric, then gather it, as all ranks should."""
    sum_metric(replica, settings)
    gather_metric(replica, settings)


def wrong_order(replica: Any, settings: Settings) -> None:
    """Gather and sum a metric in the other order in one rank."""
    gather_metric(replica, settings)
    sum_metric(replica, settings)


# --- faults of a model that is divided over a mesh: fully_shard, HSDP, tensor parallel ------------


def _has_ranks(replica: Any, dimension: str) -> bool:
    """Return whether the replica's mesh has a dimension of two ranks or more."""
    mesh: Any = getattr(replica, "mesh", None)
    names = mesh.mesh_dim_names if mesh else ()
    return dimension in names and mesh.size(names.index(dimension)) > 1


require_replicas = _require(
    lambda replica: _has_ranks(replica, REPLICATE),
    "this fault needs shards with copies on other ranks: use --parallel hsdp with two ranks or "
    "more along dp_replicate",
)
require_whole = _require(
    lambda replica: _has_ranks(replica, TENSOR) and _find_whole(replica) is not None,
    "this fault needs parameters that tensor parallelism leaves whole: use --parallel tp with two "
    "ranks or more along tp",
)


def _line(replica: Any, rank: int, dimension: str) -> tuple[Any, bool]:
    """Return the group of this rank along a dimension, and whether a global rank is in it."""
    import torch.distributed as dist

    group = replica.mesh.get_group(dimension)
    return group, rank % dist.get_world_size() in dist.get_process_group_ranks(group)


def other_seed(replica: Any, settings: Settings) -> None:
    """Initialise one HSDP replica with another seed, in all ranks of that replica."""
    import torch

    _, is_chosen = _line(replica, int(settings["rank"]), SHARD)  # the ranks of one HSDP replica
    if replica.steps != settings["step"] or not is_chosen:
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(settings["seed"]))
        for parameter in replica.module.parameters():
            if parameter.dim() > 1:  # other parameters begin as constants
                local = read_local(parameter.data)
                local.copy_(torch.randn(local.shape) * local.std().item())


def missed_sync(replica: Any, settings: Settings) -> None:
    """Skip the all_reduce of gradients in one step, in all ranks with the same shard."""
    import torch.distributed as dist

    group, is_chosen = _line(replica, int(settings["rank"]), REPLICATE)
    if replica.steps != settings["step"] or not is_chosen:
        return
    all_reduce, skips = dist.all_reduce, [True]

    def skip(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if skips and kwargs.get("group") is group:
            return None
        return all_reduce(tensor, *args, **kwargs)

    def restore(*_: Any) -> None:
        hook.remove()
        skips.clear()  # something else may have wrapped `skip` by now
        if dist.all_reduce is skip:
            dist.all_reduce = all_reduce

    dist.all_reduce = skip
    hook = replica.optimizer.register_step_pre_hook(restore)


def one_rank_update(replica: Any, settings: Settings) -> None:
    """Update a parameter that tensor parallelism leaves whole in one rank only."""


def skip_update(replica: Any, settings: Settings) -> None:
    """Undo the update of that parameter, in the other ranks that share the layer."""
    _, is_chosen = _line(replica, int(settings["rank"]), TENSOR)
    if replica.steps != settings["step"] or not is_chosen:
        return
    local = read_local(_find_whole(replica).data)
    before = local.clone()

    def undo(*_: Any) -> None:
        hook.remove()
        local.copy_(before)

    hook = replica.optimizer.register_step_post_hook(undo)


def _find_whole(replica: Any) -> Any:
    return next((one for one in replica.module.parameters() if not _is_divided(one, TENSOR)), None)


def _is_divided(parameter: Any, dimension: str) -> bool:
    mesh = getattr(parameter, "device_mesh", None)
    names = () if mesh is None else mesh.mesh_dim_names
    return dimension in names and not parameter.placements[names.index(dimension)].is_replicate()


def flipped_shard(replica: Any, settings: Settings) -> None:
    """Flip one bit of one shard that another HSDP replica has, too."""
    bit_flip(replica, settings)


STEP_FAULTS = (
    Fault(bit_flip, {"bit": 12}),
    Fault(permute),
    Fault(nan),
    Fault(optimizer_state, needs=require_state),
    Fault(buffer, needs=require_buffer),
    Fault(learning_rate, {"lr": 0.05}, before=True),
    Fault(corrupted_result, {"bit": 20}, before=True),
    Fault(bypass, before=True, all_ranks=True, needs=require_ddp),
    Fault(no_sync, before=True, all_ranks=True, needs=require_ddp),
    Fault(slow_rank, {"ms": 30}, before=True, in_all_arms=True),
    Fault(slow_link, {"ms": 30}, before=True, all_ranks=True, in_all_arms=True, needs=require_ddp),
    Fault(raise_, before=True),
    Fault(hang, {"seconds": 3600}, before=True),
    Fault(stop, before=True),
    Fault(kill, before=True),
    Fault(out_of_memory, {"mb": 1024}, before=True),
    Fault(wrong_shape, before=True, others=sum_metric),
    Fault(wrong_dtype, before=True, others=sum_metric),
    Fault(wrong_order, before=True, others=sum_then_gather),
    Fault(skipped, before=True, others=gather_metric),
    Fault(
        other_seed, {"step": 1, "seed": 1}, before=True, others=other_seed, needs=require_replicas
    ),
    Fault(missed_sync, before=True, others=missed_sync, needs=require_replicas),
    Fault(one_rank_update, before=True, others=skip_update, needs=require_whole),
    Fault(flipped_shard, {"bit": 12}, needs=require_replicas),
)
