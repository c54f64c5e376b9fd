"""Replicas in the shape of real models: a fault is named by its own cause, a healthy one passes.

One job of two ranks plays all of them and leaves the reports in files, as in test_replicas.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import mesh_training
import pytest
import torch
import torch.distributed as dist
from frozen import Frozen
from mesh_training import VOCABULARY, Language, facts_of, report_as_json, without_figures
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from warm_python import warm_python

import ddpbench
from ddpbench.replicas import state

SIZE = 2


class Experts(nn.Module):
    """A mixture of experts, of which a batch goes to the ones it names; forward: the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.outer = nn.Linear(8, 1)

    def forward(self, batch: Tensor, *chosen: int) -> Tensor:
        hidden = self.inner(batch)
        mixed = torch.stack([self.experts[expert](hidden) for expert in chosen]).sum(0)
        return self.outer(mixed).square().mean()  # type: ignore[no-any-return]


class Normed(nn.Module):
    """BatchNorm and dropout; forward: the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 1)
        )

    def forward(self, batch: Tensor) -> Tensor:
        return self.layers(batch).square().mean()  # type: ignore[no-any-return]


def words() -> Tensor:
    """This rank's own batch of a language model."""
    return torch.randint(VOCABULARY, (2, 8))


def batch() -> Tensor:
    return torch.randn(4, 6)


def alike(make: Callable[[], nn.Module], **ddp: Any) -> Any:
    """DDP around a model that all ranks have initialised alike; then each rank draws its own."""
    torch.manual_seed(0)
    wrapped = DistributedDataParallel(make(), **ddp)
    torch.manual_seed(dist.get_rank())
    return wrapped


def adam(module: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), **{"lr": 1e-3, **options})


def step(model: Callable[..., Tensor], optimizer: torch.optim.Optimizer, *inputs: Any) -> None:
    optimizer.zero_grad()
    model(*inputs).backward()
    optimizer.step()


LAST = SIZE - 1


# --- faults


def different_seeds() -> Any:
    """Before DDP wraps it; LayerNorm's ones and the zero biases agree."""
    torch.manual_seed(dist.get_rank())
    return ddpbench.verify_replicas(Language())


def unused_experts() -> Any:
    """Each rank's tokens go to an expert of its own."""
    ddp = alike(Experts)
    optimizer = adam(ddp)
    verifier = ddpbench.Verifier(ddp, optimizer)
    assert verifier.check(0).ok
    step(ddp, optimizer, batch(), dist.get_rank())
    return verifier.check(1)


def skipped_step() -> Any:
    """One rank leaves out a step, as after a NaN check of its own loss."""
    ddp = alike(Language)
    optimizer = adam(ddp)
    verifier = ddpbench.Verifier(ddp, optimizer)
    for number in (1, 2):
        optimizer.zero_grad()
        ddp(words()).backward()
        if (number, dist.get_rank()) != (2, LAST):
            optimizer.step()
        report = verifier.check(number)
    return report


def frozen_in_one_rank() -> Any:
    """requires_grad differs and nothing else does."""
    torch.manual_seed(0)
    model = Language()
    if dist.get_rank() == LAST:
        model.norm.requires_grad_(False)
    return ddpbench.verify_replicas(model)


def two_optimizers() -> Any:
    """The state of each is named by its place; the second one's learning rate differs."""
    ddp = alike(Experts)
    both = [
        torch.optim.Adam(ddp.module.experts.parameters()),
        torch.optim.SGD(ddp.module.outer.parameters(), 0.1 * (1 + dist.get_rank()), 0.9),
    ]
    verifier = ddpbench.Verifier(ddp, both)
    return verifier.check(1)


# --- not finite


def traced(where: str) -> Any:
    """The last rank has a NaN in the third of five steps, and all verify after the fifth."""
    ddp = alike(Language)
    optimizer = adam(ddp)
    verifier = ddpbench.Verifier(ddp, optimizer, trace_nonfinite=True)
    for number in range(1, 6):
        optimizer.zero_grad()
        bad = (number, dist.get_rank()) == (3, LAST)
        if bad and where == "output":
            with torch.no_grad():
                ddp.module.norm.bias[0] = math.nan
        loss = ddp(words())
        (loss * math.nan if bad and where == "loss" else loss).backward()
        optimizer.step()
        if number == 1:
            assert verifier.check(number).ok
    report = verifier.check(5)
    verifier.close()
    assert not ddp._forward_hooks
    return report


# --- what is healthy


def healthy(name: str) -> Any:
    """Some steps of each, verified after each step, with gradients: nothing is wrong."""
    kinds: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], dict[str, Any]]] = {
        "language": (Language, {"gradient_as_bucket_view": True}, {"foreach": True}),
        "experts": (Experts, {"find_unused_parameters": True}, {}),
        "normed": (Normed, {}, {}),
        "compiled": (lambda: torch.compile(Language(), backend="eager"), {}, {}),  # type: ignore[dict-item]
        "scaled": (Normed, {}, {}),
    }
    make, options, settings = kinds[name]
    ddp = alike(make, **options)
    trained = [p for p in ddp.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, 1e-3, **settings)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, enabled=name == "scaled")
    verifier = ddpbench.Verifier(ddp, optimizer, gradients=True, trace_nonfinite=name == "scaled")
    for number in range(1, 5):
        optimizer.zero_grad()
        for micro in range(2):
            with ddp.no_sync() if micro == 0 and name == "normed" else nullcontext():
                if name == "experts":
                    loss = ddp(batch(), (dist.get_rank() + number) % 3)
                else:
                    loss = ddp(words() if "token" in str(ddp) else batch())
                scaler.scale(loss * 1e3).backward()
                if name != "normed":
                    break
        scaler.step(optimizer)
        scaler.update()
        report = verifier.check(number)
        assert report.ok, str(report)
        assert not report.failed
    verifier.close()
    return report


HEALTHY = ["language", "experts", "normed", "compiled", "scaled"]


# --- what is not compared


def fully_sharded() -> Any:
    """A loop that goes on until something `failed`."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.manual_seed(0)
    device = torch.device("cpu")
    model = FullyShardedDataParallel(Language(), use_orig_params=True, device_id=device)
    optimizer = adam(model)
    verifier = ddpbench.Verifier(model, optimizer)
    for number in (1, 2, 3):
        step(model, optimizer, words())
        report = verifier.check(number)
        if report.failed:
            break
    return {**report_as_json(report), "summary": verifier.summary()}


FAULTS: dict[str, Callable[[], Any]] = {
    "different_seeds": different_seeds,
    "unused_experts": unused_experts,
    "skipped_step": skipped_step,
    "frozen_in_one_rank": frozen_in_one_rank,
    "two_optimizers": two_optimizers,
    "nan_of_a_loss": partial(traced, "loss"),
    "nan_of_an_output": partial(traced, "output"),
}
PLAYS: dict[str, Callable[[], Any]] = {
    **FAULTS,
    "fully_sharded": fully_sharded,
    **{name: partial(healthy, name) for name in HEALTHY},
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """The report of a play, which all ranks have alike."""
    folder = tmp_path_factory.mktemp("models")
    outcomes = mesh_training.run_ranks([*warm_python(), __file__], SIZE, folder)
    return partial(mesh_training.agree, outcomes)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_a_real_model(reports: Callable[[str], Any], name: str, frozen: Frozen) -> None:
    """It has its own cause, in one finding with the number of tensors, and a next step. The
    rank that had a NaN first, in its loss or its output, is named, with the steps since."""
    report = reports(name)
    assert report["failed"]
    assert not report["ok"]
    assert report["findings"][0]["next_step"]
    mismatches = [[each["name"], each["forms"], each["sides"]] for each in report["mismatches"]]
    origins = [[each["rank"], each["steps_ago"]] for each in report["origins"]]
    frozen.facts([*facts_of(report, "tensors"), mismatches, origins])
    frozen.text(without_figures(report["text"]))


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_model_passes(reports: Callable[[str], Any], name: str, frozen: Frozen) -> None:
    """Own data in each rank, dropout, accumulation, skipped steps of a GradScaler, experts that
    DDP finds, a compiled model: `ok`, and at most notes."""
    report = reports(name)
    assert report["ok"]
    assert {each["severity"] for each in report["findings"]} <= {"note"}
    frozen.facts([report["step"], *facts_of(report)])
    frozen.text(without_figures(report["text"]))


def test_what_is_not_compared_is_neither_ok_nor_failed(
    reports: Callable[[str], Any], frozen: Frozen
) -> None:
    """FullyShardedDataParallel: the tensors are in the report, with the reason, and in its text."""
    report = reports("fully_sharded")
    assert (report["ok"], report["failed"], report["equal"]) == (False, False, False)
    assert report["not_compared"]
    assert {each["reason"] for each in report["not_compared"]} == {state.SHARDED}
    frozen.facts([report["step"], len(report["not_compared"]), *facts_of(report, "tensors")])
    frozen.text(without_figures(f"{report['text']}\n{report['summary']}"))


if __name__ == "__main__":
    mesh_training.play_in_rank(lambda rank, size: PLAYS)
