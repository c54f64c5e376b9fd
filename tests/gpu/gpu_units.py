"""Checks of single parts on a device, each in a process of its own: `gpu_units.py CHECK DEVICE`.

A check that fails raises; its output is for the reader. The device is cuda, or cpu in a rehearsal.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from patience import wait_until
from two_replicas import flip_bit, locate_bit, make_values

from ddpbench.catalog import payload
from ddpbench.catalog.dtypes import DTYPES, REDUCE_OPS
from ddpbench.catalog.operations import Piece
from ddpbench.hang.flight_recorder import Flight
from ddpbench.replicas import digest
from ddpbench.runtime import devices, gpu_facts
from ddpbench.runtime.devices import elapsed_ns

EXACT = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.complex64, torch.bool, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip


def check_facts(device: torch.device) -> None:
    """Print the facts that the tests need, as JSON: versions, devices, recorders."""
    kind = devices.of(device)
    nccl = torch.cuda.nccl.version() if dist.is_nccl_available() else ()
    recorders = [name for name in dir(torch._C._distributed_c10d) if name.startswith("_dump_")]
    facts: dict[str, Any] = {
        "unusable": kind.unusable(), "nccl": list(nccl), "count": 0, "uuids": [], "contexts": [],
        "recorders": recorders,
    }  # fmt: skip
    if facts["unusable"] is None:
        facts["count"] = kind.count()
        facts["uuids"] = [kind.identity(index) for index in range(kind.count())]
        if torch.version.cuda:
            contexts = map(torch._C._cuda_hasPrimaryContext, range(kind.count()))
            facts["contexts"] = [index for index, exists in enumerate(contexts) if exists]
    print(json.dumps(facts))


def check_payload(device: torch.device) -> None:
    """Fill, poison and find_wrong return the same on the device and on the CPU, in all dtypes."""
    period = payload.PERIOD
    piece = Piece(5, 2 * period, 1, offset=5)
    for dtype, reduce_op in product(DTYPES, (None, *REDUCE_OPS)):
        values = payload.table(1, 3, dtype, reduce_op, 2)
        results: list[Any] = []
        for place in (torch.device("cpu"), device):
            buffer = torch.zeros(2 * period + 7, dtype=getattr(torch, dtype), device=place)
            payload.poison(buffer)
            poisoned = buffer.cpu().view(torch.uint8).clone()
            payload.fill(buffer, values)
            filled = buffer.cpu().view(torch.uint8).clone()
            right = [payload.find_wrong(buffer, piece, values, t) for t in (0.0, 2.0**-6)]
            buffer[period + 60] = 0
            wrong = [payload.find_wrong(buffer, piece, values, t) for t in (0.0, 2.0**-6)]
            results.append((poisoned.tolist(), filled.tolist(), right, wrong))
        assert results[0] == results[1], (dtype, reduce_op, results[0][2:], results[1][2:])
        assert results[1][2] == [None, None], (dtype, reduce_op)
        assert all(one and one[0] == period + 60 for one in results[1][3]), (dtype, reduce_op)
    print(f"{len(DTYPES)} dtypes")


def check_digest(device: torch.device) -> None:
    """The digest is the same as on the CPU. It differs after a flipped bit, which is located, and
    after an exchange."""
    for dtype in EXACT:
        content = make_values(dtype)
        swapped = content.clone()
        swapped[1], swapped[2] = content[2].clone(), content[1].clone()
        tensors = [content, flip_bit(content, 4321), swapped, content.reshape(50, 100).t()]
        near = [digest.weigh_words(tensor).item() for tensor in tensors]
        far = [digest.weigh_words(tensor.to(device)).item() for tensor in tensors]
        assert near == far, (dtype, near, far)
        assert len(set(far)) == 4, (dtype, far)
        again = digest.read([content.to(device), content.to(device)])[0]
        assert again[0] == again[1], dtype
        if content.is_floating_point() or content.is_complex():
            bad = content.clone()
            bad[7] = float("nan")
            counts = digest.read([content.to(device), bad.to(device)], (0, 1))[1].tolist()
            assert counts == [0, 1], (dtype, counts)
        flipped = flip_bit(content, 4321)
        located = locate_bit(content.to(device), flipped)
        assert located == locate_bit(content, flipped), (dtype, located)
        assert (located[0].differing, located[0].bit) == (1, 0), (dtype, located)
    print(f"{len(EXACT)} dtypes")


def check_events(device: torch.device) -> None:
    """Events measure what the device does; one that is recorded behind a sleep is not taken yet."""
    kind = devices.of(device)
    first, later = kind.event(device), kind.event(device)
    for _ in range(2):  # the first sleep may measure the device's clock
        began = time.perf_counter_ns()
        first.record()
        kind.sleep(device, 0.02)
        later.record()
        taken = later.query()
        later.synchronize()
        host = time.perf_counter_ns() - began
    between = elapsed_ns(first, later)
    print(f"asked for 20 ms: events {between * 1e-6:.2f} ms, host {host * 1e-6:.2f} ms")
    assert later.query()
    assert taken == (device.type == "cpu")
    assert 5e6 < between <= host + 1e6, (between, host)
    kind.sleep(device, 0.02)
    kind.synchronize_stream(device)
    kind.synchronize(device)


@contextmanager
def group_of_one(device: torch.device) -> Any:
    """Make a default group of this process alone, on the backend for the device."""
    backend = "gloo" if device.type == "cpu" else "nccl"
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        try:
            yield dist.group.WORLD
        finally:
            dist.destroy_process_group()


def check_gpu_facts(device: torch.device) -> None:
    """NVML finds torch's GPU: its clocks, the errors of its memory, its links."""
    torch.zeros(1, device=device)
    facts = {**gpu_facts.gpu(), **gpu_facts.gpu_links(), **gpu_facts.gpu_health()}
    state = gpu_facts.gpu_state()
    print(json.dumps([facts, state], indent=1))
    if device.type == "cpu":
        assert state is None
    else:
        assert facts["gpu_bus"]
        if find_spec("pynvml") is not None:
            assert state is not None, "NVML does not know the GPU by torch's UUID"
            assert state["sm_clock_hertz"]
            assert state["throttle_reasons"] is not None


def check_recorder(device: torch.device) -> None:
    """Batches of sends leave the numbers of collectives alone; an all_reduce that waits is open."""
    flight, kind = Flight(), devices.of(device)
    tensor, other = torch.ones(4, device=device), torch.ones(4, device=device)
    kind.sleep(device, 0.01)  # the first may measure the device's clock
    with group_of_one(device) as group:
        dist.all_reduce(tensor)
        for _ in range(10 if device.type == "cuda" else 0):  # gloo has no batches
            group._start_coalescing(device)
            group.send([tensor], 0, 0)
            group.recv([other], 0, 0)
            group._end_coalescing(device).wait()
        kind.synchronize(device)
        kind.sleep(device, 2.0)
        dist.all_reduce(tensor)
        (log,) = flight.read_logs("", whole=True)
        print([str(call) for call in log.calls], log.started, log.finished)
        assert [call.name for call in log.calls] == ["all_reduce", "all_reduce"]
        assert device.type == "cpu" or (log.started, log.finished) == (2, 1)
        kind.synchronize(device)
        wait_until(lambda: flight.read_logs("", whole=True)[0].finished == 2, "the second call")


def check_capture(device: torch.device) -> None:
    """Threads of ours that dump nccl's recorder break no CUDA graph that another one captures."""
    kind, over, dumps = devices.of(device), threading.Event(), 0
    flight = Flight()

    def dump() -> None:
        nonlocal dumps
        while not over.is_set():
            dumps += len(flight.read_logs("", whole=True))

    tensor = torch.ones(1024, device=device)
    kind.sleep(device, 0.01)
    with group_of_one(device):
        dist.all_reduce(tensor)
        flight.read_logs("", whole=True)
        thread = threading.Thread(target=dump)
        thread.start()
        try:
            for _ in range(50):
                kind.sleep(device, 0.01)
                dist.all_reduce(tensor)  # its event is not taken during the capture
                if device.type == "cuda":
                    capture_double(tensor)
        finally:
            over.set()
            thread.join()
        kind.synchronize(device)
    print(f"{dumps} dumps during 50 captures")
    assert dumps


def capture_double(tensor: torch.Tensor) -> None:
    """Capture a graph, without the wait for the device that torch.cuda.graph begins with."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        doubled = tensor * 2
        time.sleep(0.005)
        graph.capture_end()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(doubled, tensor * 2)


CHECKS: dict[str, Callable[[torch.device], None]] = {
    "payload": check_payload, "digest": check_digest, "events": check_events,
    "gpu facts": check_gpu_facts,
    "capture": check_capture, "recorder": check_recorder,
}  # fmt: skip


def main(name: str, kind: str) -> None:
    """Run a check on the first device of a kind."""
    if name == "facts":
        check_facts(torch.device(kind, 0))
    else:
        CHECKS[name](devices.get(kind).select(0))


if __name__ == "__main__":
    main(*sys.argv[1:])
