"""The timing loop on a GPU, which torch simulates: what lies between the events of a repetition."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simulated_gpu import CUDA, OnGpu, SimulatedGpu, fake_group
from stored_runs import a_case
from torch.utils._pytree import tree_leaves

from ddpbench.catalog.operations import OPERATIONS
from ddpbench.measure.loop import Bench
from ddpbench.measure.start import STARTS
from ddpbench.records.schema import EVENTS, HIDDEN_LAUNCH, Case, Plan
from ddpbench.runtime import devices
from ddpbench.runtime.subgroups import Partition, Subgroup

pytestmark = pytest.mark.thorough  # the simulation needs a compiler

FORMED = [(name, form) for name, entry in OPERATIONS.items() for form in entry.forms]
RANKS = 3


class MarkedEvent(devices.HostEvent):
    """An event that leaves a mark among the operations of the GPU."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self.gpu = gpu

    def record(self) -> None:
        super().record()
        self.gpu.called.append("event")


@pytest.fixture
def gpu(simulated_gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> SimulatedGpu:
    """The simulated GPU, whose events leave marks."""
    kind = devices.KINDS["cuda"]
    monkeypatch.setattr(kind, "event", lambda device: MarkedEvent(simulated_gpu))
    return simulated_gpu


def a_gpu_case(name: str, form: str, **other: Any) -> Case:
    """A small case of an operation on CUDA tensors between three ranks."""
    operation, count = OPERATIONS[name], 5 if OPERATIONS[name].sized else 0
    fields: dict[str, Any] = {
        "operation": name, "form": form, "device": "cuda", "world_size": RANKS, "count": count,
        "nbytes": 4 * count * (RANKS if operation.blocks else 1), "backend": "nccl",
        "root": 1 if operation.rooted else None, "in_place": operation.places[0] == "in",
        "reduce_op": "avg" if operation.reduces else None, "ranks_per_host": (RANKS,),
        "time_definition": EVENTS, "clock": "device",
    }  # fmt: skip
    return a_case(**{**fields, **other})


def a_bench(case: Case, group: Any, rank: int) -> Bench:
    """The case set up in one rank of the fake group."""
    ranks = tuple(range(RANKS))
    subgroup = Subgroup(Partition("world", (ranks,), (RANKS,)), group, group, 0, rank)
    world: Any = SimpleNamespace(rank=rank, world_size=RANKS)
    return Bench(case, Plan(), world, subgroup, CUDA)


def spans(called: list[str]) -> list[list[str]]:
    """What was called between each first and second event."""
    marks = [i for i, name in enumerate(called) if name == "event"]
    assert len(marks) % 2 == 0
    return [called[a + 1 : b] for a, b in zip(marks[::2], marks[1::2], strict=True)]


WAYS: dict[str, dict[str, Any]] = {
    "isolated": {}, "async": {"async_op": True}, "pipelined": {"issue": "pipelined", "depth": 3},
    "hidden": {"time_definition": HIDDEN_LAUNCH},
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "form"), FORMED)
def test_nothing_but_the_operation_lies_between_the_events(
    gpu: SimulatedGpu, name: str, form: str, way: str
) -> None:
    """However a case is issued: between the events of a repetition lie calls to the group alone, no
    copy, no wait and no read; the whole repetition reads nothing from the device; buffers and
    starts are on the GPU."""
    for rank, start in zip(range(RANKS), STARTS, strict=True):
        with fake_group(rank, RANKS) as group:
            case = replace(a_gpu_case(name, form, start=start), **WAYS[way])
            bench = a_bench(case, group, rank)
            for buffers in bench.buffers:
                assert isinstance(buffers.input, OnGpu)
                assert isinstance(buffers.output, OnGpu)
            bench.rest()
            bench.begin()
            gpu.called.clear()
            gpu.collectives.clear()
            stamps = bench.repeat(2, batch=2)
            assert stamps.shape == (2, 3)
            assert gpu.reads == []
            sent = [args for call, args in gpu.collectives if call != "c10d.barrier"]
            tensors = [one for one in tree_leaves(sent) if isinstance(one, torch.Tensor)]
            assert {tensor.device for tensor in tensors} <= {CUDA}
            timed = spans(gpu.called)[-2:]
            extra = set() if OPERATIONS[name].sized else {"aten.empty.memory_format"}
            for span in timed:
                assert {one for one in span if not one.startswith("c10d.")} <= extra
            assert timed[0] == timed[1]
            assert gpu.called[-1] == "wait"  # before the next repetition
            assert ("sleep" in gpu.called) == (way == "hidden")
