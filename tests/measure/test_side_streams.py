"""Collectives on a stream of fully_shard's own, as on a GPU, with stand-ins for streams."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from ddpbench.measure.communication import Communication
from ddpbench.runtime.devices import HostEvent


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


@pytest.fixture
def group() -> Iterator[None]:
    """A default group of two ranks that sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_exposed_is_what_the_stream_of_the_step_waits() -> None:
    """Not how long the collective takes on its own stream, nor a wait for anything else."""
    step, side = Stream(), Stream()
    streams = SimpleNamespace(Stream=Stream, now=step)
    streams.current_stream = lambda: streams.now
    communication = Communication(nn.Linear(2, 2), torch.device("cpu"))
    communication._streams, communication._stamp = streams, Stream.stamp
    communication.mode = "timed"
    with communication.around():
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
