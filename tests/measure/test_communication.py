"""The collectives of a sharded step, switched off or timed, on four ranks over gloo.

The ranks play all ways once and leave what they saw in files. They run this very file:
`python test_communication.py FOLDER`.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from command_lines import run_command
from simulated_gpu import fake_group
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from warm_python import warm_python

from ddpbench.analysis.steps import Span
from ddpbench.launch import placement, starters
from ddpbench.launch.placement import Placement
from ddpbench.measure.communication import Communication
from ddpbench.measure.sharded_step import set_prefetch
from ddpbench.runtime.devices import HostEvent

WORLD, WIDTH, OUT = 4, 16, 6
WAYS = {
    "fsdp": {"dp_shard": 4},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "tp": {"tp": 4},
    "fsdp+tp": {"dp_shard": 2, "tp": 2},
}
BLOCKS = ("blocks.0", "blocks.1")
NAMES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")


class Block(nn.Module):
    """A block as in a transformer's feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        return values + self.down(self.up(values).relu())


class Net(nn.Module):
    """Two blocks and a layer whose rows four ranks cannot divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in BLOCKS)
        self.out = nn.Linear(WIDTH, OUT)

    def forward(self, values: Tensor) -> Tensor:
        for block in self.blocks:
            values = block(values)
        return self.out(values)


# --- in the ranks ---------------------------------------------------------------------------------


def build(way: str) -> Net:
    """The net, divided as the way says; the same weights each time."""
    sizes = WAYS[way]
    torch.manual_seed(0)
    net = Net()
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if "tp" in sizes:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in net.blocks:
            parallelize_module(block, mesh["tp"], plan)
    names = tuple(name for name in sizes if name != "tp")
    if names:
        over = mesh[names] if "tp" in sizes else mesh
        for module in (*net.blocks, net):
            fully_shard(module, mesh=over)
    return net


class Trainer:
    """A net that steps with the communication in some mode."""

    def __init__(self, way: str, prefetch: bool | None = None) -> None:
        self.net = build(way)
        self.communication = Communication(self.net, torch.device("cpu"), list(self.net.blocks))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.data = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
        if prefetch is not None:
            set_prefetch(self.net, prefetch)

    def step(self, mode: str) -> list[Span]:
        """Take one step; return its spans."""
        self.communication.mode = mode
        self.optimizer.zero_grad()
        with self.communication.around():
            self.net(self.data).square().mean().backward()
            self.optimizer.step()
        return self.communication.spans

    def parts(self) -> list[Tensor]:
        """The rank's own parts of the parameters."""
        return [getattr(p, "_local_tensor", p).detach() for p in self.net.parameters()]

    def bits(self) -> list[str]:
        """Those parts, exactly."""
        return [float(number).hex() for part in self.parts() for number in part.flatten()]


def look_up() -> list[int]:
    """What the names of torch stand for now."""
    operators = [getattr(torch.ops._c10d_functional, name) for name in (*NAMES, "wait_tensor")]
    return [id(each) for each in (*(getattr(dist, name) for name in NAMES), *operators)]


def play(way: str) -> dict[str, Any]:
    """All that a way shows."""
    plain, timed = Trainer(way), Trainer(way)
    before = look_up()
    for _ in range(3):
        plain.step("plain")
        spans = timed.step("timed")
    seen: dict[str, Any] = {
        "spans": [vars(span) for span in spans],
        "equal": plain.bits() == timed.bits(),
        "as before": before == look_up(),
    }
    with CommDebugMode() as counted:
        timed.step("plain")
    seen["calls"] = int(counted.get_total_counts())
    if dist.get_rank() == 0:  # the other ranks do not step: a collective would hang
        shapes = [part.shape for part in timed.parts()]
        timed.step("noop")
        seen["noop"] = [part.shape for part in timed.parts() if part.isfinite().all()] == shapes
    return seen


def main(folder: Path) -> int:
    """Play all ways; leave what this rank saw in a file."""
    place = placement.read_placement()
    assert isinstance(place, Placement)
    rank = place.rank
    torch.set_num_threads(1)
    store = f"file://{folder / 'meeting'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD)
    seen: dict[str, Any] = {way: play(way) for way in WAYS}
    for prefetch in (True, False):
        trainer = Trainer("fsdp", prefetch)
        trainer.step("plain")
        spans = [vars(span) for span in trainer.step("timed")]
        seen[f"prefetch {prefetch}"] = {"spans": spans, "bits": trainer.bits()}
    (folder / f"{rank}.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()
    return 0


# --- the tests ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw."""
    folder = tmp_path_factory.mktemp("ranks")
    done = run_command([*warm_python(), __file__, str(folder)], folder)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]


def key(span: dict[str, Any]) -> tuple[str, str, str]:
    """What a span is of."""
    return span["operation"], span["layers"], span["phase"]


Seen = list[dict[str, Any]]


@pytest.mark.parametrize("way", WAYS)
def test_every_collective_has_a_span_and_a_mode_changes_nothing_else(seen: Seen, way: str) -> None:
    """Spans are as many as torch's own CommDebugMode counts, in all ranks in the same order, one
    after the other, and none is exposed before it begins. Timed, each rank has the parameters of a
    model that is not timed; with "noop", a rank steps alone, and they keep their shapes. The names
    that were replaced are torch's own again."""
    for rank in seen:
        spans = rank[way]["spans"]
        assert rank[way]["equal"]
        assert rank[way]["as before"]
        assert len(spans) == rank[way]["calls"] > 0
        assert list(map(key, spans)) == list(map(key, seen[0][way]["spans"]))
        begins = [span["begin_ns"] for span in spans]
        assert begins == sorted(begins)
        assert begins[0] >= 0
        assert all(span["exposed_ns"] > 0 for span in spans)
        assert all(span["end_ns"] >= span["begin_ns"] for span in spans)
    assert seen[0][way]["noop"]


def test_tensor_parallel_reduces_in_the_layer_that_needs_it(seen: Seen) -> None:
    """Each block's output in forward; in backward its input's gradient, but the data's."""
    keys = [key(span) for span in seen[0]["tp"]["spans"]]
    assert keys == [
        ("all_reduce", "blocks.0", "forward"),
        ("all_reduce", "blocks.1", "forward"),
        ("all_reduce", "blocks.1", "backward"),
    ]
    assert {span["nbytes"] for span in seen[0]["tp"]["spans"]} == {8 * WIDTH * 4}


def test_prefetch_gathers_the_next_layers_before_it_reduces(seen: Seen) -> None:
    """Switched off, blocks.0 is gathered for backward when blocks.1 is done; the result is the
    same."""
    gather, scatter = ("all_gather", "blocks.0", "backward"), "reduce_scatter"
    early, late = (
        [key(span) for span in seen[0][f"prefetch {on}"]["spans"]] for on in (True, False)
    )
    assert early.index(gather) < early.index((scatter, "blocks.1", "backward"))
    assert late.index(gather) > late.index((scatter, "blocks.1", "backward"))
    assert Counter(early) == Counter(late)
    assert seen[0]["prefetch True"]["bits"] == seen[0]["prefetch False"]["bits"]


# --- streams, as on a GPU


class Stream:
    """A stream on which a wait takes 1 ms; everything else takes a stamp's 1 ns."""

    ns = 0

    @classmethod
    def stamp(cls) -> HostEvent:
        event = HostEvent()
        cls.ns += 1
        event.ns = cls.ns
        return event

    def record_event(self, event: object = None) -> object:
        return event or object()

    def wait_event(self, event: object) -> None:
        Stream.ns += 1_000_000


def test_exposed_is_what_the_stream_of_the_step_waits() -> None:
    """Not how long the collective takes on its own stream, nor a wait for anything else."""
    step, side = Stream(), Stream()
    streams = SimpleNamespace(Stream=Stream, now=step)
    streams.current_stream = lambda: streams.now
    communication = Communication(nn.Linear(2, 2), torch.device("cpu"))
    communication._streams, communication._stamp = streams, Stream.stamp
    communication.mode = "timed"
    with fake_group(0, 2), communication.around():
        streams.now = side
        dist.all_reduce(torch.ones(4))
        reduced = side.record_event()
        streams.now = step
        step.wait_event(object())
        step.wait_event(reduced)
        side.wait_event(reduced)
        dist.all_reduce(torch.ones(2))
    hidden, own = communication.spans
    assert hidden.exposed_ns == pytest.approx(1_000_000, abs=10)
    assert own.exposed_ns == pytest.approx(own.end_ns - own.begin_ns, abs=1)
    assert 0 < own.exposed_ns < 10
    assert Stream.wait_event.__qualname__ == "Stream.wait_event"


if __name__ == "__main__":
    sys.exit(starters.run_forked(lambda: main(Path(sys.argv[1])), WORLD))
