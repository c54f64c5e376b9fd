"""A model divided over a mesh, in one rank: fully_shard, tensor parallel, or both; and the mesh."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ddpbench.analysis.steps import Span, Timed
from ddpbench.catalog.parallel import REPLICATE, SHARD, TENSOR, WAYS, Way, format_mesh
from ddpbench.catalog.task import OPTIMIZERS, Task
from ddpbench.measure.communication import GATHERS, SCATTERS, Communication
from ddpbench.measure.step import Replica
from ddpbench.runtime import control

if TYPE_CHECKING:
    from ddpbench.catalog.parallel import Plan
    from ddpbench.records.schema import StepCase
    from ddpbench.runtime.world import World


@dataclass(kw_only=True, eq=False)
class ShardedReplica(Replica):
    """A model divided over a mesh."""

    communication: Communication

    def choose_arm(self, arm: str) -> None:
        """Switch the communication, and the prefetch of the next layer's parameters."""
        self.communication.mode = arm if arm in ("noop", "timed") else "plain"
        if self.case.prefetch is not None:
            other = arm in ("no_prefetch", "prefetch")
            set_prefetch(self.wrapped, self.case.prefetch != other)

    def communicating(self) -> AbstractContextManager[Any]:
        return self.communication.around()

    @contextlib.contextmanager
    def without_sync(self) -> Iterator[None]:
        """Let fully_shard reduce no gradients in here. Tensor parallel has none to reduce."""
        root = self.wrapped if isinstance(self.wrapped, FSDPModule) else None
        if root is not None:
            root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            if root is not None:
                root.set_requires_gradient_sync(True)

    def read_timed_step(self) -> list[Span]:
        return self.communication.spans

    def gather_timed_steps(self, world: World, steps: Sequence[Any]) -> dict[str, Any]:
        timed = _gather_timed(world, steps) if steps else None
        return {"buckets": [], "bucket_stamps": None, "timed": timed}


def build_sharded(
    task: Task,
    case: StepCase,
    plan: Plan,
    learning_rate: float,
    *,
    mesh: DeviceMesh,
    device: torch.device,
    group: dist.ProcessGroup,
) -> ShardedReplica:
    """Divide the task's model over the mesh, as the case and the workload's plan define.

    All ranks call it together, with the same weights. A model on the CPU is moved to the device
    layer by layer. Raises torch's errors.
    """
    way, model = WAYS[case.parallel], task.model
    layers = plan.layers(model)
    if way.splits:
        kinds = {"column": ColwiseParallel, "row": RowwiseParallel}
        styles = {name: kinds[style]() for name, style in plan.splits(model).items()}
        # Without a source, each rank takes a part of its own weights, and no data is sent.
        parallelize_module(model, mesh[TENSOR], styles, src_data_rank=None)
    if way.shards:
        names = tuple(name for name in way.dimensions if name != TENSOR)
        over = mesh if names == way.dimensions else mesh[names]
        for layer in layers:
            fully_shard(layer, mesh=over, reshard_after_forward=case.reshard_after_forward)
        fully_shard(model, mesh=over)  # torch's default: the root stays gathered
        set_prefetch(model, bool(case.prefetch))
    model.to(device)
    # One group per mesh: on a GPU, an optimizer handles all tensors of a group at once.
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    parameters = [{"params": members} for members in groups.values()]
    optimizer = OPTIMIZERS[case.optimizer].make(parameters, learning_rate)
    switch = () if case.prefetch is None else ("no_prefetch" if case.prefetch else "prefetch",)
    return ShardedReplica(
        task=task,
        case=case,
        wrapped=model,
        optimizer=optimizer,
        device=device,
        group=group,
        arms=("ddp", "noop", *switch, "timed"),
        mesh=mesh,
        communication=Communication(model, device, layers),
    )


def count_own_nbytes(model: nn.Module, plan: Plan, case: StepCase) -> int:
    """Return the bytes of parameters that one rank will store after a whole model is divided."""
    sizes = dict(zip(WAYS[case.parallel].dimensions, case.mesh, strict=True))
    split = sum(
        parameter.nbytes
        for name in plan.splits(model)
        for parameter in model.get_submodule(name).parameters()
    )
    ranks = sizes.get(TENSOR, 1)
    left = case.parameter_nbytes - split + split // ranks
    return left // sizes.get(SHARD, 1)


def set_prefetch(model: nn.Module, on: bool) -> None:
    """Let each layer group start the all_gather of the next one, or none; before the first step.

    on: the next group in forward and the previous one in backward, by fully_shard's explicit
    prefetch and asynchronous calls. Without these, an all_gather on the CPU blocks in the call, and
    prefetch hides nothing.
    off: a layer group's all_gather starts when its compute needs it. An empty list would keep
    fully_shard's own prefetch in backward; a module that prefetches itself, when it is already
    gathered, switches it off. Asynchronous calls then keep the all_gather on the stream of the
    compute: fully_shard's own streams would start it early on a GPU.

    The reduce_scatter of fully_shard is synchronous in both cases: on the CPU it is always exposed.
    The modules run in the order in which they are registered. Does nothing without fully_shard.
    """
    forward: list[Any] = [each for each in model.modules() if isinstance(each, FSDPModule)]
    root = forward[: isinstance(model, FSDPModule)]
    backward = [*root, *reversed(forward[len(root) :])]
    following = dict(itertools.pairwise(backward)) if on else {}
    for number, module in enumerate(forward, 1):
        module._set_unshard_async_op(True)
        module.set_modules_to_forward_prefetch(forward[number : number + 1] if on else [])
        module.set_modules_to_backward_prefetch([following.get(module, module)])


def _gather_timed(world: World, rounds: Sequence[Sequence[Span]]) -> Timed | None:
    """Gather the spans of the steps that were timed, one step per round, in rank 0.

    None on other ranks, and if steps or ranks have different collectives.
    """
    calls = [[[s.operation, s.layers, s.phase, s.nbytes] for s in spans] for spans in rounds]
    groups = [span.ranks for span in rounds[0]]
    own = [calls[0], groups] if all(each == calls[0] for each in calls) else None
    every = control.gather_values(world, own)
    if any(each is None or each[0] != every[0][0] for each in every):
        return None
    times = [[(s.begin_ns, s.exposed_ns, s.end_ns) for s in spans] for spans in rounds]
    ns = control.gather_to_rank_0(world, np.array(times, np.int64))
    if ns is None:
        return None
    groups_of_spans = zip(*(each[1] for each in every), strict=True)
    distinct = [tuple(dict.fromkeys(map(tuple, groups))) for groups in groups_of_spans]
    return Timed(tuple(rounds[0]), distinct, ns)


# --- the meshes of a launch: of groups on the measured backend, and of control groups -------------


@dataclass(frozen=True)
class Meshes:
    """All ranks in the shape of a way's mesh.

    tested   trains: its groups are on the measured backend
    control  the same ranks over gloo, so that the proof of replicas is independent of the backend
    """

    way: Way
    shape: tuple[int, ...]
    tested: DeviceMesh
    control: DeviceMesh

    @property
    def ranks_per_batch(self) -> int:
        """The number of ranks that share a batch: neighbours, because tp is the last dimension."""
        return self.shape[-1] if self.way.splits else 1


def agree_meshes(
    world: World,
    way: Way,
    shape: tuple[int, ...],
    *,
    torch_name: str,
    whole: dist.ProcessGroup,
    device: torch.device,
    closing: ExitStack,
) -> Meshes:
    """Make both meshes; all ranks together.

    torch_name: of the measured backend. whole: its group of all ranks. closing: ends the groups.
    """
    meshes = []
    grid = torch.arange(world.world_size).view(shape)
    for name, group, where in (
        (torch_name, whole, device),
        ("gloo", dist.group.WORLD, torch.device("cpu")),
    ):
        assert group is not None
        groups = [group]
        if len(shape) > 1:
            groups = []
            for dimension, size in enumerate(shape):
                # All groups of a dimension are made; this rank is in one of them.
                for line in grid.movedim(dimension, -1).reshape(-1, size).tolist():
                    made = closing.enter_context(world.agree_group(name, line, where))
                    if world.rank in line:
                        groups.append(made)
        meshes.append(
            DeviceMesh.from_group(groups, where.type, grid, mesh_dim_names=way.dimensions)
        )
    return Meshes(way, shape, *meshes)


def find_refusal(world: World, meshes: Meshes, backend: str) -> str | None:
    """Return one sentence, in all ranks, if the backend cannot average as fully_shard does.

    It tries one small collective of each kind along the dimensions of data parallelism, and checks
    the result: gloo of torch 2.7 always sums in reduce_scatter.
    """
    objection = None
    device = torch.device(meshes.tested.device_type)
    for dimension, operation, average in AVERAGES:
        if dimension not in meshes.way.dimensions or objection is not None:
            continue
        group = meshes.tested.get_group(dimension)
        expected = (group.size() + 1) / 2
        try:
            result = average(group, torch.tensor([group.rank() + 1.0], device=device))
            failure = f"returns {result:g} instead of {expected:g}"
            if math.isclose(result, expected, rel_tol=1e-3):  # 1 / size is rounded
                continue
        except (RuntimeError, NotImplementedError) as error:
            failure = f"fails: {control.first_line(error, 200)}"
        objection = (
            f"--parallel {meshes.way.name} on mesh {format_mesh(meshes.shape)} averages "
            f"gradients with {operation}, and {backend} of torch {torch.__version__} "
            f"{failure}; choose --parallel ddp or tp, or another --backend"
        )
    return control.agree_objection(world, objection)


def _scatter(group: dist.ProcessGroup, own: torch.Tensor) -> float:
    """Gather and scatter as fully_shard does, by the names that this torch prefers."""
    whole, average = own.new_empty(group.size()), torch.empty_like(own)
    gather, scatter = (
        next(getattr(dist, name) for name in names if hasattr(dist, name))
        for names in (GATHERS, SCATTERS)
    )
    gather(whole, own, group=group)
    scatter(average, own.repeat(group.size()), op=dist.ReduceOp.AVG, group=group)
    return average.item()


def _reduce(group: dist.ProcessGroup, own: torch.Tensor) -> float:
    dist.all_reduce(own, op=dist.ReduceOp.AVG, group=group)
    return own.item()


# Dimension of a mesh, operation along it, function that returns the average of all ranks' numbers.
AVERAGES = ((SHARD, "reduce_scatter", _scatter), (REPLICATE, "all_reduce", _reduce))
