"""What threads of ours ask of CUDA, with a library that stands in for CUDA's runtime."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpbench.hang import cuda, flight_recorder
from ddpbench.hang.flight_recorder import Flight, Recorder

GLOBAL, RELAXED = 0, 2


class Modes:
    """The capture mode of each thread, as the runtime keeps it."""

    def __init__(self) -> None:
        self.by_thread: dict[int, int] = defaultdict(lambda: GLOBAL)
        self.exchanges = 0

    @property
    def own(self) -> int:
        return self.by_thread[threading.get_ident()]

    def exchange(self, pointer: Any) -> int:
        """As cudaThreadExchangeStreamCaptureMode."""
        own, self.exchanges = self.own, self.exchanges + 1
        self.by_thread[threading.get_ident()], pointer._obj.value = pointer._obj.value, own
        return 0


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> Modes:
    """A CUDA that is in use."""
    made = Modes()
    library = SimpleNamespace(cudaThreadExchangeStreamCaptureMode=made.exchange)
    monkeypatch.setattr(cuda, "open_library", lambda name: library)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    return made


def in_thread(work: Callable[[], Any]) -> None:
    """Run it in a thread, as the watchdog and the watch do."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_every_dump_is_made_with_a_relaxed_capture_mode(
    modes: Modes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the thread that dumps and in no other; each thread has its own mode afterwards."""
    seen: list[int] = []

    def dump(**_: Any) -> bytes:
        seen.append(modes.own)
        raise RuntimeError

    recorder = Recorder(status=lambda **_: b"{}", entries=dump)
    monkeypatch.setattr(
        flight_recorder, "find_recorders", lambda *_: {"_dump_nccl_trace": recorder}
    )
    flight = Flight()
    in_thread(lambda: flight.read_logs("", whole=True))
    flight.read_logs("", whole=True)  # as after an exception of the main thread
    assert seen == [RELAXED] * 2
    assert set(modes.by_thread.values()) == {GLOBAL}


def test_without_cuda_in_use_nothing_is_asked(
    modes: Modes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that has not started CUDA has no capture, and must not start it."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    with cuda.relaxed_capture():
        assert modes.exchanges == 0


def test_a_torch_without_the_function_dumps_all_the_same(
    modes: Modes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the library or its function is missing, the dump is not lost."""
    monkeypatch.setattr(cuda, "open_library", lambda name: SimpleNamespace())
    with cuda.relaxed_capture():
        assert modes.own == GLOBAL
