"""Replicas in the shape of real models: a fault is named by its own cause, a healthy one passes.

One job of two ranks plays all of them and leaves the reports in files, as in test_replicas.py.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import mesh_training
import pytest
import torch
import torch.distributed as dist
from frozen import Frozen
from replica_reports import facts_of, pairs_of, report_as_json, without_figures
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from warm_python import warm_python

import ddpbench
from ddpbench.replicas import state

SIZE = 2
WIDTH, VOCABULARY = 8, 16


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = self.attention(self.before(hidden)).chunk(3, -1)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.project(mixed)
        return hidden + self.down(functional.gelu(self.up(self.between(hidden))))  # type: ignore[no-any-return]


class Language(nn.Module):
    """A small language model with tied weights, normal weights, zero biases; forward: the loss."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.last = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.tokens(words)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.last(hidden))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())


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


class Adapter(nn.Module):
    """A frozen layer with a low-rank update: one factor random, the other zero."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(6, 2))
        self.down_again = nn.Parameter(torch.randn(6, 2))
        self.up = nn.Parameter(torch.zeros(2, 6))

    def forward(self, batch: Tensor) -> Tensor:
        low = batch @ (self.down + self.down_again) @ self.up
        return (self.base(batch) + low).square().mean()  # type: ignore[no-any-return]


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


def average(module: nn.Module) -> None:
    """Average gradients, as a loop without DDP does between backward and step."""
    for parameter in module.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


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


def different_seeds_averaged() -> Any:
    """A loop that averages gradients by itself, after a step."""
    torch.manual_seed(dist.get_rank())
    model = Language()
    optimizer = adam(model)
    model(words()).backward()
    average(model)
    optimizer.step()
    return ddpbench.verify_replicas(model, optimizer)


def loaded_later() -> Any:
    """A checkpoint that rank 0 alone loads between two verifications."""
    ddp = alike(Language)
    optimizer = adam(ddp)
    verifier = ddpbench.Verifier(ddp, optimizer)
    step(ddp, optimizer, words())
    assert verifier.check(1).ok
    if dist.get_rank() == 0:
        with torch.no_grad():
            for parameter in ddp.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
    step(ddp, optimizer, words())
    return verifier.check(2)


def different_adapters() -> Any:
    """The base is frozen and agrees, one factor is drawn by rank."""
    torch.manual_seed(0)
    model = Adapter()
    torch.manual_seed(dist.get_rank())
    nn.init.normal_(model.down)
    nn.init.normal_(model.down_again)
    return ddpbench.verify_replicas(model)


def unused_experts() -> Any:
    """Each rank's tokens go to an expert of its own."""
    ddp = alike(Experts)
    optimizer = adam(ddp)
    verifier = ddpbench.Verifier(ddp, optimizer)
    assert verifier.check(0).ok
    step(ddp, optimizer, batch(), dist.get_rank())
    return verifier.check(1)


def unused_experts_of_zeros() -> Any:
    """The same with an optimizer that has no state, after a step that uses all, with gradients that
    are zeroed and stay."""
    ddp = alike(Experts)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    verifier = ddpbench.Verifier(ddp, optimizer)
    step(ddp, optimizer, batch(), 0, 1, 2, 3)
    assert verifier.check(1).ok
    optimizer.zero_grad(set_to_none=False)
    ddp(batch(), dist.get_rank(), 2, 3).backward()
    optimizer.step()
    return verifier.check(2)


def unused_experts_bypassed() -> Any:
    """DDP finds unused parameters, and the forward goes by it."""
    ddp = alike(Experts, find_unused_parameters=True)
    optimizer = adam(ddp)
    step(ddp.module, optimizer, batch(), dist.get_rank())
    return ddpbench.verify_replicas(ddp, optimizer)


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
        model.last.requires_grad_(False)
    return ddpbench.verify_replicas(model)


def teacher_in_one_rank() -> Any:
    """A copy of the weights, within the model that is trained, which rank 0 alone updates."""
    torch.manual_seed(0)
    student = Adapter()
    ddp = alike(lambda: nn.ModuleDict({"student": student, "teacher": copy.deepcopy(student)}))
    ddp.module["teacher"].requires_grad_(False)
    optimizer = torch.optim.AdamW(student.parameters())
    student(batch()).backward()
    average(student)
    optimizer.step()
    if dist.get_rank() == 0:
        for parameter in ddp.module["teacher"].parameters():
            parameter.add_(1)
    return ddpbench.verify_replicas(ddp, optimizer)


def scheduler_in_one_rank() -> Any:
    """The learning rate differs from the second step on."""
    ddp = alike(Language)
    optimizer = adam(ddp)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for _ in range(2):
        step(ddp, optimizer, words())
        if dist.get_rank() == LAST:
            scheduler.step()
    return ddpbench.verify_replicas(ddp, optimizer)


def copies_outside_the_module() -> Any:
    """State of parameters that are not the module's is no option of the optimizer."""
    model = alike(lambda: nn.Linear(6, 6)).module
    copies = [nn.Parameter(p.detach().double()) for p in model.parameters()]
    optimizer = torch.optim.Adam(copies)
    for each in copies:
        each.grad = torch.ones_like(each)
    optimizer.step()
    if dist.get_rank() == LAST:
        optimizer.state[copies[0]]["exp_avg"][0, 0] = 5
    return ddpbench.verify_replicas(model, optimizer)


def two_optimizers() -> Any:
    """The state of each is named by its place; the second one's learning rate differs."""
    ddp = alike(Experts)
    both = [
        torch.optim.Adam(ddp.module.experts.parameters()),
        torch.optim.SGD(ddp.module.outer.parameters(), 0.1 * (1 + dist.get_rank()), 0.9),
    ]
    verifier = ddpbench.Verifier(ddp, both)
    names = [entry.name for entry in state.read_state(ddp, both, True).entries["optimizer"]]
    assert len(names) == len(set(names))
    return verifier.check(1)


FAULTS: list[Callable[[], Any]] = [
    different_seeds, different_seeds_averaged, loaded_later, different_adapters, unused_experts,
    unused_experts_of_zeros, unused_experts_bypassed, skipped_step, frozen_in_one_rank,
    teacher_in_one_rank, scheduler_in_one_rank, copies_outside_the_module, two_optimizers,
]  # fmt: skip


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
                ddp.module.last.bias[0] = math.nan
        loss = ddp(words())
        (loss * math.nan if bad and where == "loss" else loss).backward()
        optimizer.step()
        if number == 1:
            assert verifier.check(number).ok
    report = verifier.check(5)
    verifier.close()
    assert not ddp._forward_hooks
    return report


def nan_of_a_loss() -> Any:
    return traced("loss")


def nan_of_an_output() -> Any:
    return traced("output")


def nan_untraced() -> Any:
    ddp = alike(Language)
    optimizer = adam(ddp)
    optimizer.zero_grad()
    (ddp(words()) * (math.nan if dist.get_rank() == LAST else 1)).backward()
    optimizer.step()
    return ddpbench.verify_replicas(ddp, optimizer)


# --- what is healthy


def healthy(name: str) -> Any:
    """Some steps of each, verified after each step, with gradients: nothing is wrong."""
    kinds: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], dict[str, Any]]] = {
        "language": (Language, {}, {}),
        "foreach": (Language, {"gradient_as_bucket_view": True}, {"foreach": True}),
        "experts": (Experts, {"find_unused_parameters": True}, {}),
        "adapter": (Adapter, {}, {}),
        "normed": (Normed, {}, {}),
        "compiled": (lambda: torch.compile(Language(), backend="eager"), {}, {}),  # type: ignore[dict-item]
        "scaled": (Normed, {}, {}),
    }
    make, options, settings = kinds[name]
    ddp = alike(make, **options)
    if name == "compiled":  # torch.compile leaves no mark on names
        names = [entry.name for entry in state.read_state(ddp, (), True).entries["parameter"]]
        assert names == [name for name, _ in ddp.module._orig_mod.named_parameters()]
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


HEALTHY = ["language", "foreach", "experts", "adapter", "normed", "compiled", "scaled"]


# --- what is not compared


def fully_sharded(original: bool) -> Any:
    """A loop that goes on until something `failed`."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.manual_seed(0)
    device = torch.device("cpu")
    model = FullyShardedDataParallel(Language(), use_orig_params=original, device_id=device)
    optimizer = adam(model)
    verifier = ddpbench.Verifier(model, optimizer)
    for number in (1, 2, 3):
        step(model, optimizer, words())
        report = verifier.check(number)
        if report.failed:
            break
    return {**report_as_json(report), "summary": verifier.summary()}


def sharded_flat() -> Any:
    return fully_sharded(original=False)


def sharded_as_they_were() -> Any:
    return fully_sharded(original=True)


def sharded_state() -> Any:
    """An optimizer of which each rank keeps the state of a part of the parameters."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp = alike(Language)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=1e-3)
    step(ddp, optimizer, words())
    return ddpbench.verify_replicas(ddp, optimizer)


NOT_COMPARED = [sharded_flat, sharded_as_they_were]
OTHERS = [nan_of_a_loss, nan_of_an_output, nan_untraced]
PLAYS: dict[str, Callable[[], Any]] = {
    **{play.__name__: play for play in (*FAULTS, *OTHERS, *NOT_COMPARED, sharded_state)},
    **{name: partial(healthy, name) for name in HEALTHY},
}


def job(folder: Path, rank: int, size: int) -> None:
    """All plays, one after the other; outcomes in a file."""

    mesh_training.start_group(folder, rank, size)
    mesh_training.play_all(folder, rank, PLAYS)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """The report of a play, which all ranks have alike."""
    folder = tmp_path_factory.mktemp("models")
    outcomes = mesh_training.run_ranks([*warm_python(), __file__], SIZE, folder)
    return partial(mesh_training.agree, outcomes)


@pytest.mark.parametrize("fault", [*FAULTS, *OTHERS], ids=lambda fault: fault.__name__)
def test_a_fault_of_a_real_model(reports: Callable[[str], Any], fault: Any, frozen: Frozen) -> None:
    """It has its own cause, in one finding with the number of tensors, and a next step. The
    rank that had a NaN first, in its loss or its output, is named, with the steps since; untraced,
    the report says how to find it."""
    report = reports(fault.__name__)
    assert report["failed"]
    assert not report["ok"]
    assert report["findings"][0]["next_step"]
    counts = [len(found["place"].get("tensors", ())) for found in report["findings"]]
    mismatches = [[each["name"], pairs_of(each)] for each in report["mismatches"]]
    origins = [[each["rank"], each["steps_ago"]] for each in report["origins"]]
    frozen.facts([*facts_of(report, "tensors"), counts, mismatches, origins])
    frozen.text(without_figures(report["text"]))


def test_the_first_values_that_differ(reports: Callable[[str], Any], frozen: Frozen) -> None:
    """Of options and of step counters, which no arithmetic of a processor changes."""
    exact = (skipped_step, scheduler_in_one_rank, two_optimizers)
    first = {play.__name__: reports(play.__name__)["findings"][0]["place"] for play in exact}
    frozen.facts(
        {
            name: [
                [detail["ranks"], detail["value"], detail["reference_value"]]
                for difference in reports(name)["differences"]
                for detail in difference["details"]
                if difference["name"] == place["tensor"]
            ]
            for name, place in first.items()
        }
    )


def test_parameters_without_a_gradient_are_named(reports: Callable[[str], Any]) -> None:
    """Of some ranks and of all, in a faulty and in a healthy mixture of experts."""
    report = reports("unused_experts")
    found = {each["name"]: each["ranks"] for each in report["without_gradient"]}
    assert found["experts.0.weight"] == [1]
    assert found["experts.1.weight"] == [0]
    assert found["experts.3.bias"] == [0, 1]
    assert len(reports("experts")["without_gradient"]) == 4
    assert reports("language")["without_gradient"] == []


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_model_passes(reports: Callable[[str], Any], name: str, frozen: Frozen) -> None:
    """Own data in each rank, dropout, accumulation, skipped steps of a GradScaler, experts that
    DDP finds, a compiled model: `ok`, and at most notes."""
    report = reports(name)
    assert report["ok"]
    assert {each["severity"] for each in report["findings"]} <= {"note"}
    frozen.facts([report["step"], *facts_of(report)])
    frozen.text(without_figures(report["text"]))


@pytest.mark.parametrize("play", NOT_COMPARED, ids=lambda play: play.__name__)
def test_what_is_not_compared_is_neither_ok_nor_failed(
    reports: Callable[[str], Any], play: Any, frozen: Frozen
) -> None:
    """Both forms of FullyShardedDataParallel: the tensors are in the report, with the reason, and
    in its text."""
    report = reports(play.__name__)
    assert (report["ok"], report["failed"], report["equal"]) == (False, False, False)
    assert report["not_compared"]
    assert {each["reason"] for each in report["not_compared"]} == {state.SHARDED}
    assert report["without_gradient"] == []
    frozen.facts([report["step"], len(report["not_compared"]), *facts_of(report, "tensors")])
    frozen.text(without_figures(f"{report['text']}\n{report['summary']}"))


def test_state_that_one_rank_alone_holds_needs_no_proof(
    reports: Callable[[str], Any], frozen: Frozen
) -> None:
    """The parameters and options beside a ZeroRedundancyOptimizer's state are compared."""
    report = reports("sharded_state")
    assert report["ok"]
    assert (report["compared"]["parameter"], report["held_once"]) == (27, {"optimizer": 27})
    frozen.text(without_figures(report["headline"]))


if __name__ == "__main__":
    job(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
