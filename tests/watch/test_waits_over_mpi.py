"""Waits for calls over MPI, whether MPI is called at once or by a worker."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mpi_jobs import run_job, start_group
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpbench.watch.observe.phases import Observer
from ddpbench.watch.observe.steps import END, Marks
from ddpbench.watch.window import BLOCKED

pytestmark = pytest.mark.thorough


def job_watched(folder: Path) -> None:
    """Assert that each call adds the marks of waits alone."""
    start_group("mpi4py", folder)
    marks = Marks()
    observer = Observer(marks)
    model = nn.Linear(8, 8)
    torch.optim.SGD(model.parameters()).step()
    data, peer = torch.zeros(4), 1 - dist.get_rank()
    parts = [torch.zeros(4), torch.zeros(4)]
    calls: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(data),
        lambda: dist.broadcast(data, 0),
        lambda: dist.all_gather(parts, data),
        lambda: dist.gather(data, parts if peer else None),
        dist.barrier,
        lambda: dist.all_reduce(data, async_op=True).wait(),  # type: ignore[union-attr]
        lambda: dist.send(data, peer) if peer else dist.recv(data, peer),
        lambda: (dist.isend if peer else dist.irecv)(data, peer).wait(),  # type: ignore[union-attr]
        lambda: DistributedDataParallel(model),
    ]
    for number, call in enumerate(calls):
        marks.take()
        call()
        kinds = [mark[0] for mark in marks.take()]
        assert (kinds[0], kinds[-1]) == (BLOCKED, BLOCKED + END), (number, kinds)
        assert set(kinds) == {BLOCKED, BLOCKED + END}, (number, kinds)
    observer.close()
    dist.destroy_process_group()


def test_the_wait_of_each_call_has_a_begin_and_an_end(tmp_path: Path) -> None:
    process = run_job(job_watched, 2, tmp_path)
    assert process.returncode == 0, process.stderr


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
