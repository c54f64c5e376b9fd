"""Facts that may explain lost time, from this very process."""

import gc
import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ddpbench.watch.observe import facts
from ddpbench.watch.observe.facts import Facts


@pytest.fixture
def watched() -> Iterator[Facts]:
    """Facts of this process from now on."""
    started = Facts()
    yield started
    started.close()


def test_a_garbage_collection_is_counted_with_its_time(watched: Facts) -> None:
    """One collection shows as one pause with its duration, the next read shows none, and after
    `close` Python's callbacks are as before."""
    callbacks = len(gc.callbacks)
    gc.disable()
    began = time.perf_counter()
    gc.collect()
    elapsed = time.perf_counter() - began
    first, second = watched.read(), watched.read()
    gc.enable()
    assert (first["gc_pauses"], second["gc_pauses"]) == (1, 0)
    assert 0 < first["gc_seconds"] == first["gc_longest_seconds"] <= elapsed
    watched.close()
    watched.close()
    assert len(gc.callbacks) == callbacks - 1


def test_compilations_are_counted_without_importing_the_compiler(watched: Facts) -> None:
    """A second shape with another number of dimensions compiles again, a known one does not."""
    assert watched.read()["compiles"] == 0
    twice = torch.compile(lambda tensor: tensor * 2, backend="eager")
    twice(torch.ones(2))
    twice(torch.ones(2, 2))
    twice(torch.ones(2))
    compiled = watched.read()
    assert compiled["compiles"] == 2
    assert compiled["compile_seconds"] > 0
    assert watched.read()["compiles"] == 0


def burn(seconds: float) -> None:
    """Use a core for so long."""
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def test_the_time_of_workers_counts_while_they_live_and_after(watched: Facts) -> None:
    """Processes that a rank starts are the job's: they are not other users of its host."""
    worker = multiprocessing.get_context("fork").Process(target=burn, args=(0.2,))
    worker.start()
    worker.join()
    own = watched.read()
    assert own["worker_seconds"] >= 0.15
    assert own["cpu_seconds"] < own["worker_seconds"]


def test_counters_of_rdma_adapters_are_added_up(tmp_path: Path) -> None:
    """Data are counted in words of four bytes; a port without a counter is left out."""
    for number, sent in enumerate((100, 23)):
        port = tmp_path / f"sys/class/infiniband/mlx5_{number}/ports/1/counters"
        port.mkdir(parents=True)
        (port / "port_xmit_data").write_text(f"{sent}\n")
    (port / "port_xmit_wait").write_text("7\n")
    assert facts.read_rdma(tmp_path) == {"rdma_sent_nbytes": 4 * 123, "rdma_wait_ticks": 7}
    assert facts.read_rdma(tmp_path / "none") == {}
