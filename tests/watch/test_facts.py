"""Facts that may explain lost time, from this very process."""

import gc
import multiprocessing
import time
from collections.abc import Iterator

import pytest
import torch

from ddpbench.watch.observe.facts import Facts


@pytest.fixture
def watched() -> Iterator[Facts]:
    """Facts of this process from now on. They leave Python's callbacks as before."""
    callbacks = [*gc.callbacks]
    started = Facts()
    yield started
    started.close()
    assert gc.callbacks == callbacks


def test_a_garbage_collection_is_counted_with_its_time(watched: Facts) -> None:
    """One collection shows with its duration, and the next read shows none."""
    gc.disable()
    try:
        watched.read()  # Python may have collected since the watch began
        began = time.perf_counter()
        gc.collect()
        elapsed = time.perf_counter() - began
        first, second = watched.read(), watched.read()
    finally:
        gc.enable()
    assert second["gc_seconds"] == 0
    assert 0 < first["gc_seconds"] <= elapsed <= first["seconds"]


def test_compilations_are_counted_without_importing_the_compiler(watched: Facts) -> None:
    """Another number of dimensions compiles again, a known shape does not."""
    assert watched.read()["compile_seconds"] == 0
    twice = torch.compile(lambda tensor: tensor * 2, backend="eager")
    twice(torch.ones(2))
    assert watched.read()["compile_seconds"] > 0
    twice(torch.ones(2, 2))
    assert watched.read()["compile_seconds"] > 0
    twice(torch.ones(2))
    assert watched.read()["compile_seconds"] == 0


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
