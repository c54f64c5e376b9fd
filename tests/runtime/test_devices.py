"""The table of devices: the CPU's entry does what the other entries do, with the host's clock."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from frozen import Frozen

from ddpbench.measure import step
from ddpbench.runtime import devices
from ddpbench.runtime.devices import KINDS, elapsed_ns

CPU = torch.device("cpu")


def test_events_of_the_cpu_read_the_hosts_clock() -> None:
    """Between two events of the CPU lies the time that the host's clock measured."""
    kind = devices.of(CPU)
    first, later = kind.event(CPU), kind.event(CPU)
    before = time.perf_counter_ns()
    first.record()
    kind.sleep(CPU, 0.01)
    later.record()
    later.synchronize()
    most = time.perf_counter_ns() - before
    assert 10_000_000 <= elapsed_ns(first, later) <= most


def test_an_unknown_kind_is_refused_with_the_kinds_that_exist(frozen: Frozen) -> None:
    """The sentence names what was typed and what is allowed."""
    with pytest.raises(ValueError, match="cpud") as caught:
        devices.get("cpud")
    frozen.text(str(caught.value))


def test_asking_what_is_in_use_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU is in use once torch has started to use CUDA, not by the question."""
    assert KINDS["cpu"].in_use() is None
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert KINDS["cuda"].in_use() is None
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert KINDS["cuda"].in_use() == 3


class ManyGpus(threading.local):
    """Stands for torch.cuda: in each new thread, GPU 0 is the current one."""

    index = 0

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.index = self.index, device.index
        yield
        self.index = before

    def Event(self, enable_timing: bool) -> SimpleNamespace:  # noqa: N802
        event = SimpleNamespace(index=None)
        event.record = lambda: setattr(event, "index", self.index)
        return event


def test_a_stamp_is_one_of_its_device_in_any_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo and mpi end DDP's reductions in threads of their own, where GPU 0 is current. An event
    there has no time in common with the events of the rank's own GPU."""
    gpus, stamps = ManyGpus(), list[Any]()
    monkeypatch.setattr(devices.Cuda, "_module", gpus)
    thread = threading.Thread(target=lambda: stamps.append(step.stamp(torch.device("cuda", 1))))
    thread.start()
    thread.join()
    assert [stamp.index for stamp in stamps] == [1]
