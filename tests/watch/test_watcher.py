"""The whole watch in real ranks: what it finds, and that it never gets in the way."""

import contextlib
import io
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from command_lines import run_command
from frozen import Frozen
from patience import PATIENCE_SECONDS, wait_until
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from warm_python import warm_python

import ddpbench
from ddpbench.launch import starters
from ddpbench.records import store
from ddpbench.watch import watcher

STEPS = 40


def train(model: nn.Module, steps: int) -> list[float]:
    """Train, and return the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        loss = model(torch.full((4, 8), step / steps)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def make_model(rank: int) -> nn.Module:
    """A layer whose forward takes rank 1 longer: more than a busy host delays a step."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 8)
    layer.register_forward_pre_hook(lambda *_: time.sleep(0.06 if rank else 0.01))
    return DistributedDataParallel(layer)


def watch_a_straggler(rank: int, folder: Path) -> dict[str, Any]:
    """Watch a job with a late rank."""
    reports: list[dict[str, Any]] = []
    with ddpbench.watch(output=folder / "results", on_report=reports.append):
        losses = train(make_model(rank), STEPS)
    last = reports[-1] if reports else None
    return {"losses": losses, "last": last, "folder": str(folder / "results")}


def watch_with_an_error(rank: int) -> dict[str, Any]:
    """Watch a job while the links of rank 1 cannot be read."""
    error = OSError("no such socket") if rank else None
    stderr, links = io.StringIO(), mock.patch.object(watcher.Links, "read", side_effect=error)
    with links as read, contextlib.redirect_stderr(stderr):
        read.return_value = []
        with ddpbench.watch(output=None):
            losses = train(make_model(rank), STEPS)
    return {"losses": losses, "shown": stderr.getvalue()}


def end_a_job_at_once(rank: int, folder: Path) -> None:
    """Destroy the process group while rank 0 still sets up its watch."""
    begun, ended, identify = threading.Event(), threading.Event(), watcher.identify_job

    def identify_late(*words: Any) -> Any:
        begun.set()
        assert ended.wait(PATIENCE_SECONDS)
        return identify(*words)

    watcher.identify_job = identify_late
    with ddpbench.watch(output=folder / "short"):
        assert rank or begun.wait(PATIENCE_SECONDS)
        dist.destroy_process_group()
        ended.set()


def list_threads() -> list[str]:
    """Return ddpbench's threads; one that `close` does not wait for any longer ends later."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("ddpbench")]


def run_rank(folder: Path) -> int:
    """Play all jobs, and store what each showed in this rank."""
    rank = int(os.environ["DDPBENCH_RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    results: dict[str, Any] = {"bare": train(make_model(rank), STEPS)}
    backward = torch.autograd.backward
    results["straggler"] = watch_a_straggler(rank, folder)
    results["error"] = watch_with_an_error(rank)
    results["restored"] = torch.autograd.backward is backward
    results["ended"] = wait_until(lambda: not list_threads(), "the end of the watch's threads")
    end_a_job_at_once(rank, folder)
    (folder / f"{rank}.json").write_text(json.dumps(results))
    return 0


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks saw."""
    folder = tmp_path_factory.mktemp("watcher")
    done = run_command([*warm_python(), __file__, str(folder)], folder)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_the_late_rank_is_found_with_its_phase(
    frozen: Frozen, results: list[dict[str, Any]]
) -> None:
    """The last report names rank 1 and forward; only rank 0 gets reports."""
    report = results[0]["straggler"]["last"]
    warnings = [f for f in report["findings"] if f["code"] == "straggler"]
    frozen.facts([[f["severity"], f["place"]["rank"], f["place"]["phase"]] for f in warnings])
    assert report["world_size"] == 2
    assert results[1]["straggler"]["last"] is None


def test_a_job_that_is_over_at_once_is_complete(results: list[dict[str, Any]]) -> None:
    """The stored run says so, although the group was gone before its watch was set up."""
    results_folder = Path(results[0]["straggler"]["folder"]).with_name("short")
    (run,) = map(store.read, results_folder.iterdir())
    assert run.state == "complete"


def test_a_watched_job_computes_the_same(results: list[dict[str, Any]]) -> None:
    """All losses are bit-equal to those without a watch, also when the watch fails."""
    for one in results:
        assert one["straggler"]["losses"] == one["bare"]
        assert one["error"]["losses"] == one["bare"]


def test_an_error_ends_the_watch_of_its_rank_in_one_line(results: list[dict[str, Any]]) -> None:
    """The job goes on, and the rank says once what failed."""
    assert results[1]["error"]["shown"].count("no such socket") == 1
    assert "the job continues" in results[1]["error"]["shown"]
    assert "no such socket" not in results[0]["error"]["shown"]


def test_nothing_is_left_after_a_watch(results: list[dict[str, Any]]) -> None:
    """No thread is left, and torch.autograd.backward is its own again."""
    for one in results:
        assert one["ended"]
        assert one["restored"]


if __name__ == "__main__":
    sys.exit(starters.run_forked(lambda: run_rank(Path(sys.argv[1])), 2))
