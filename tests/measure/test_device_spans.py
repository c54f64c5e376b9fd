"""Times of a device's clock: the launch of a call is hidden, or is reported as seen."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command_lines import read_stored_run, run_ddpbench

from ddpbench import collectives
from ddpbench.catalog import backends
from ddpbench.measure.loop import HiddenLaunch
from ddpbench.records import store
from ddpbench.records.schema import EVENTS, EXIT_ENTRY, HIDDEN_LAUNCH, TWO_STREAMS
from ddpbench.runtime import devices
from ddpbench.runtime.subgroups import Partition

CPU = torch.device("cpu")
LAUNCH_MS = 3


# --- the whole path -------------------------------------------------------------------------------


@pytest.mark.thorough
def test_the_launch_is_in_its_own_figure_and_not_in_the_time(tmp_path: Path) -> None:
    """Each call takes 3 ms to launch. The host's stamps show it in each repetition, and it is the
    launch of the summary. The device's time of a repetition can be less: it holds no launch."""
    words = ["--import", "stream_backend", "--backend", "stream", "-n", "2", "--sizes", "8"]
    # On a busy host, few of the calls are quick.
    words += ["--op", "all_reduce", "--case-time", "1", "--timeout", "60", "--launches", "1"]
    done = run_ddpbench(tmp_path, "collectives", *words, LAUNCH_MS=str(LAUNCH_MS))
    assert done.returncode == 0, done.stderr
    folder, run = read_stored_run(tmp_path)
    samples = store.read_samples(folder)
    for result in run.results:
        assert (result.case.time_definition, result.case.clock) == (HIDDEN_LAUNCH, "device")
        own = samples[(samples["case"] == result.case.key) & ~samples["warm_up"]]
        launch_ns = own["exit_ns"] - own["entry_ns"]
        assert (launch_ns >= LAUNCH_MS * 1e6).all()
        assert 0 < own["device_ns"].min() < LAUNCH_MS * 1e6
        summary = result.summary
        assert summary is not None
        slowest = launch_ns.groupby(own["repetition"]).max().median() * 1e-9
        assert summary.launch_seconds == pytest.approx(slowest)
        slowest = own["device_ns"].groupby(own["repetition"]).max().median() * 1e-9
        assert summary.median_seconds == pytest.approx(slowest)
        assert result.unhidden_share is not None
        assert result.checks >= 2
        assert not result.wrong


# --- what is hidden -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "device", "changed", "definition"),
    [
        ("nccl", "cuda", {}, HIDDEN_LAUNCH),
        ("nccl", "cuda", {"async_op": True}, EVENTS),
        ("nccl", "cuda", {"mode": "pipelined"}, EVENTS),
        ("nccl", "cuda", {"op": ("barrier",)}, EVENTS),
        ("nccl", "cuda", {"op": ("send_recv",)}, TWO_STREAMS),
        ("nccl", "cuda", {"op": ("bidirectional",)}, TWO_STREAMS),
        ("gloo", "cuda", {}, EVENTS),
        ("gloo", "cpu", {}, EXIT_ENTRY),
    ],
)
def test_each_case_names_what_its_time_is(
    backend: str,
    device: str,
    changed: dict[str, Any],
    definition: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only an isolated call that returns before the device begins can be launched out of sight.
    nccl's sends and receives run on a stream of their own: the time includes two waits for each."""
    monkeypatch.setitem(
        backends.BACKENDS, backend, replace(backends.get(backend), provider=lambda _: "native")
    )
    parser = argparse.ArgumentParser()
    collectives.add_arguments(parser)
    options = collectives.Options.of(parser.parse_args([]))
    options = replace(options, **{"device": device, "op": ("all_reduce",), "ranks": 2, **changed})
    world = [Partition("world", ((0, 1),), (2,))]
    ((case, _), *_) = collectives.list_cases(options, backends.get(backend), options.plan(0), world)
    assert case.time_definition == definition
    assert case.clock == devices.get(device).clock


# --- the sleep ------------------------------------------------------------------------------------


class ScriptedDevice(devices.Cpu):
    """A device that notes how long it must sleep, and whose launches are hidden as told."""

    clock = "device"

    def __init__(self, is_hidden: Callable[[float], bool]) -> None:
        self.slept: list[float] = []
        self.is_hidden = is_hidden

    def event(self, device: torch.device) -> devices.Event:
        """Return an event that is taken at once if the latest launch is not hidden."""
        event = devices.HostEvent()
        event.query = lambda: not self.is_hidden(self.slept[-1])  # type: ignore[method-assign]
        return event

    def sleep(self, device: torch.device, seconds: float) -> None:
        """Note the sleep, and do not sleep."""
        self.slept.append(seconds)


def test_the_device_sleeps_before_its_start_and_the_events_enclose_the_call_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The hosts start together, then the device sleeps, the devices start together, and the events
    are issued right around the call. Only then does the host wait."""
    done: list[str] = []
    kind = ScriptedDevice(lambda seconds: True)
    event = SimpleNamespace(record=lambda: done.append("event"), query=lambda: False)
    monkeypatch.setattr(kind, "event", lambda device: event)
    monkeypatch.setattr(kind, "sleep", lambda device, seconds: done.append("sleep"))
    monkeypatch.setattr(kind, "synchronize_stream", lambda device: done.append("wait"))
    monkeypatch.setitem(devices.KINDS, "cpu", kind)
    hidden = HiddenLaunch(CPU, lambda: done.append("start of devices"))
    hidden.pairs(1)
    done.clear()
    hidden.stamped(1, lambda: done.append("start"), lambda: done.append("call"), 1)
    assert done == ["start", "sleep", "start of devices", "event", "call", "event", "wait"]


@pytest.mark.parametrize(
    ("needed_us", "calls", "slept_us", "unhidden"),
    [
        (350, 1, [100, 200, 400, 400], [10, 10, 0, 0]),
        (0, 3, [300, 300], [0, 0]),
        (10**9, 1, [100, 200, 400, 800, 1600, 3200, 5000, 5000], [10] * 8),
    ],
    ids=["grow", "a batch", "have an end"],
)
def test_sleeps_grow_until_launches_are_hidden(
    needed_us: float,
    calls: int,
    slept_us: list[float],
    unhidden: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each burst with visible launches makes the sleeps twice as long, up to some ms; a batch
    sleeps for all its calls."""
    kind = ScriptedDevice(lambda seconds: seconds > needed_us * 1e-6)
    monkeypatch.setitem(devices.KINDS, "cpu", kind)
    hidden, nothing = HiddenLaunch(CPU, lambda: None), lambda: None
    counts = [hidden.stamped(10, nothing, nothing, calls)[2] for _ in slept_us]
    assert counts == unhidden
    assert [seconds * 1e6 for seconds in kind.slept[1::10]] == pytest.approx(slept_us)


# --- the group


def test_nccl_is_bound_where_it_would_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    """From torch 2.15 on, new_group gets the device. Before, a bound group would change NCCL's
    mode. Other backends and the CPU are never bound. NVIDIA's containers call theirs an alpha."""
    version = type(torch.__version__)
    device = torch.device("cuda", 3)
    bound = {}
    for number in ("2.7.0", "2.14.1+cu130", "2.15.0a0+1a2b3c4", "2.15.0"):
        monkeypatch.setattr(torch, "__version__", version(number))
        bound[number] = devices.of(device).group_options(device, "nccl")
        assert devices.of(device).group_options(device, "gloo") == {}
        assert devices.get("cpu").group_options(torch.device("cpu"), "nccl") == {}
    new = {name for name, options in bound.items() if options == {"device_id": device}}
    assert new == {"2.15.0a0+1a2b3c4", "2.15.0"}
    assert bound["2.7.0"] == bound["2.14.1+cu130"] == {}
