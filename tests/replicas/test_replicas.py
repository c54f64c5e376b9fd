"""Planted faults of replicas, found in real process groups.

One job plays every fault below in all its ranks and leaves the reports in files; pytest then looks
at them one by one. A rank runs this very file: `python test_replicas.py FOLDER RANK SIZE`.
"""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import mesh_training
import pytest
import torch
import torch.distributed as dist
from frozen import Frozen
from mesh_training import facts_of, report_as_json, without_figures
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from warm_python import warm_python

import ddpbench
from ddpbench.records.schema import Finding


def test_without_a_process_group() -> None:
    """A single process gets a report on itself: equal, with what is not finite."""
    module = nn.Linear(2, 2)
    assert ddpbench.verify_replicas(module).ok
    with torch.no_grad():
        module.bias[1] = math.inf
    report = ddpbench.verify_replicas(module)
    assert report.equal
    assert not report.ok
    assert report.nonfinite[0].counts == ((0, 1),)


class Odd(nn.Module):
    """A module with rare kinds of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.lazy = nn.LazyLinear(3)
        self.real = nn.Linear(2, 2)
        self.register_buffer("sparse", torch.eye(3).to_sparse())
        self.register_buffer("void", torch.empty(3, device="meta"))


def test_what_cannot_be_read_is_named() -> None:
    """Lazy, sparse and meta tensors are named with a reason, and the rest is compared: the answer
    is neither `ok` nor `failed`."""
    report = ddpbench.verify_replicas(Odd())
    assert (report.ok, report.failed, report.equal, report.differs) == (False,) * 4
    assert report.compared["parameter"] == 2
    assert {f"{n.kind} {n.name}": n.reason for n in report.not_compared} == {
        "parameter lazy.weight": "not initialised yet",
        "parameter lazy.bias": "not initialised yet",
        "buffer sparse": "its layout is torch.sparse_coo, its dtype torch.float32",
        "buffer void": "it has no memory",
    }


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"module": [nn.Linear(1, 1)]}, "module must be a torch.nn.Module, not list"),
        ({"optimizer": list(nn.Linear(1, 1).parameters())}, "optimizer must be .*, not Parameter"),
    ],
)
def test_arguments_of_wrong_types(wrong: dict[str, Any], message: str) -> None:
    """One sentence says which argument it is, what it must be and what was given."""
    with pytest.raises(TypeError, match=message):
        ddpbench.verify_replicas(**{"module": nn.Linear(1, 1), **wrong})


# --- faults: each is played in every rank of a group and returns the report


class Net(nn.Module):
    """Two layers, BatchNorm where asked for, and a buffer."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 8)
        self.norm = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout()) if norm else nn.Identity()
        self.out = nn.Linear(8, 3)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, batch: Tensor) -> Tensor:
        result: Tensor = self.out(self.norm(self.fc(batch)).relu())
        return result


class Play:
    """A rank's replica in a group, and its steps."""

    def __init__(
        self, group: Any, *, norm: bool = False, lr: float = 0.01, sgd: bool = False, **ddp: Any
    ) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        self.ddp = DistributedDataParallel(Net(norm), process_group=group, **ddp)
        self.net: Any = self.ddp.module
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(self.ddp.parameters(), lr, momentum=0.9)
            if sgd
            else torch.optim.Adam(self.ddp.parameters(), lr)
        )
        self.verifier = ddpbench.Verifier(self.ddp, self.optimizer)
        self.last = self.rank == self.size - 1
        self.steps = 0
        torch.manual_seed(self.rank)

    def step(self, model: Any = None, unsynced: int = 0, synced: int = 1) -> None:
        """A training step of micro-batches, the first ones under no_sync."""
        self.optimizer.zero_grad()
        for i in range(unsynced + synced):
            with self.ddp.no_sync() if i < unsynced else nullcontext():
                (model or self.ddp)(torch.randn(4, 6)).square().mean().backward()
        self.optimizer.step()
        self.steps += 1

    def healthy(self, steps: int = 2) -> Play:
        for _ in range(steps):
            self.step()
            assert self.verifier.check(self.steps).ok
        return self

    def report(self, **options: Any) -> Any:
        return ddpbench.verify_replicas(self.ddp, self.optimizer, **options)


# Edits of the last rank's replica.


def flip_bit(play: Play) -> None:
    play.net.fc.weight.data.view(torch.int32)[2, 3] ^= 1 << 20


def permute(play: Play) -> None:
    play.net.out.weight.data.copy_(play.net.out.weight.data.flip(0))


def put_nan(play: Play) -> None:
    play.net.out.weight.data[1, 2:4] = math.nan


def edit_state(play: Play) -> None:
    state = play.optimizer.state[play.net.fc.weight]
    state["exp_avg" if "exp_avg" in state else "momentum_buffer"][1, 2] += 0.3


def edit_mean(play: Play) -> None:
    play.net.norm[0].running_mean[1] += 1


# A tensor of a replica, and the value of its elements in the last rank.
EDITS: dict[str, tuple[Callable[[Play], Tensor], Any, float]] = {
    "fault_count": (lambda play: play.optimizer.state[play.net.out.bias]["step"], (), 3.0),
    "fault_buffer": (lambda play: play.net.scale, 1, 5.0),
    "fault_gradient": (lambda play: play.net.fc.weight.grad, (0, 1), 9.0),
    "fault_nan_everywhere": (lambda play: play.net.out.bias.data, 1, math.inf),
}  # fmt: skip


def edited(name: str, group: Any) -> Any:
    """The report after one of EDITS."""
    play = Play(group).healthy()
    find, place, value = EDITS[name]
    if play.last or name == "fault_nan_everywhere":
        find(play)[place] = value
    return play.report(gradients=name == "fault_gradient")


def fault_structure(group: Any) -> Any:
    last = dist.get_rank() == dist.get_world_size() - 1
    torch.manual_seed(0)
    module = Net()
    if last:
        module.extra = nn.Linear(2, 2)
        module.out = nn.Linear(8, 4)
        module.scale = module.scale.double()
    return ddpbench.verify_replicas(module, group=group)


def fault_all_ranks(group: Any) -> Any:
    module = nn.Linear(2, 2)
    nn.init.constant_(module.weight, float(dist.get_rank()))
    nn.init.zeros_(module.bias)
    return ddpbench.verify_replicas(module, group=group)


def play_subgroup(group: Any) -> None:
    """A group of some ranks names global ranks; another rank gets an error."""
    ranks = list(range(1, dist.get_world_size()))
    part = dist.new_group(ranks, backend=dist.get_backend(group))
    module = nn.Linear(2, 2)
    if dist.get_rank() == 0:
        with pytest.raises(ValueError, match="group"):
            ddpbench.verify_replicas(module, group=part)
        return
    nn.init.constant_(module.weight, 1.0)
    nn.init.constant_(module.bias, float(dist.get_rank() == 1))
    report = ddpbench.verify_replicas(module, group=part)
    assert report.ranks == (1, 2)
    assert [each.sides for each in report.differences] == [((1,), (2,))]


def play_arguments(group: Any) -> Any:
    """Different arguments are a ValueError in every rank, and the group goes on."""
    with pytest.raises(ValueError, match=r"arguments: step=0, .* in rank 0; step=1, .* in rank 1"):
        ddpbench.verify_replicas(nn.Linear(2, 2), group=group, step=dist.get_rank())
    gradients = dist.get_rank() == 1
    with pytest.raises(ValueError, match=r"gradients=True, .* in rank 1"):
        ddpbench.verify_replicas(nn.Linear(2, 2), group=group, gradients=gradients)


def play_memory(group: Any) -> Any:
    """The first bad step of each tensor is kept, and so is the first report."""
    play = Play(group).healthy()
    for step in (3, 4):
        if play.last:
            play.net.fc.weight.data += 1
            play.net.out.bias.data += step == 4
        report = play.verifier.check(step)
    assert play.verifier.first_bad == {("parameter", "fc.weight"): 3, ("parameter", "out.bias"): 4}
    assert play.verifier.first_report is not None
    assert play.verifier.first_report.step == 3
    assert [bool(d.details) for d in report.differences] == [False, True]
    assert not report.repeated
    again = play.verifier.check(5)
    assert again.repeated
    summary = play.verifier.summary()
    assert str(play.verifier.first_report) in summary
    return {**report_as_json(report), "again": report_as_json(again), "summary": summary}


def play_no_trace(group: Any) -> Any:
    """Module, gradients, optimizer and generators are bit for bit as they were, found a
    difference or not, in train and in eval."""
    play = Play(group, norm=True)
    play.step()
    if play.last:
        play.net.fc.weight.data[0, 0] += 1
    for train in (True, False):
        play.ddp.train(train)
        before = save_bits(play)
        ddpbench.verify_replicas(play.ddp, play.optimizer, gradients=True)
        play.report()
        assert save_bits(play) == before
        assert play.ddp.training is train


def save_bits(play: Play) -> bytes:
    """Return all bits of a replica, its optimizer and generator, and how often each was written."""
    gradients = [parameter.grad for parameter in play.ddp.parameters()]
    parts = play.ddp.state_dict(), gradients, play.optimizer.state_dict(), torch.get_rng_state()
    versions = [each._version for each in tree_leaves(parts) if isinstance(each, Tensor)]
    file = io.BytesIO()
    torch.save((parts, versions), file)
    return file.getvalue()


def play_traffic(group: Any) -> Any:
    """Healthy replicas cost one collective, with one tensor as with hundreds."""
    count = group._get_sequence_number_for_group
    torch.manual_seed(0)
    for layers in (1, 200):
        module = nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))
        before = count()
        assert ddpbench.verify_replicas(module, gradients=True).ok
        assert count() == before + 1


def play_absent(group: Any) -> Any:
    """The last: a rank that does not come ends with the time-out of the group."""
    hasty = dist.new_group(backend="gloo")
    dist.barrier(hasty)  # ranks meet with a long time-out
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), hasty)
    if dist.get_rank() != dist.get_world_size() - 1:
        with pytest.raises(RuntimeError, match=r"(?i)timed out|closed by peer"):
            ddpbench.verify_replicas(nn.Linear(2, 2), group=hasty)


# --- faults at a step of a training that is verified step after step


def bypass(play: Play) -> None:
    play.step(model=play.net)


def leave_unsynced(play: Play) -> None:
    play.step(unsynced=2, synced=0)


def change_rates(play: Play) -> None:
    play.optimizer.param_groups[0]["lr"] = 0.01 * (1 + play.rank)
    play.step()


def step_and(edit: Callable[[Play], None]) -> Callable[[Play], None]:
    """Return a step after which the last rank edits its replica."""

    def step(play: Play) -> None:
        play.step()
        if play.last:
            edit(play)

    return step


@dataclasses.dataclass
class Planted:
    """A fault from step `at` on, and as what it must be found there."""

    plant: Callable[[Play], None]
    cause: str
    at: int = 3
    once: bool = True  # healthy steps follow
    every: int = 1  # steps between verifications
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


NORM = {"norm": True}
PLANTED = {
    "bit": Planted(step_and(flip_bit), "bit-flip"),
    "bit, seldom looked for": Planted(step_and(flip_bit), "one-tensor or bit-flip", at=4, every=3),
    "bypass": Planted(bypass, "never-synchronised", at=1, once=False),
    "bypass later": Planted(bypass, "not-reduced", once=False),
    "no_sync": Planted(leave_unsynced, "not-reduced"),
    "no_sync, seldom looked for": Planted(leave_unsynced, "different-updates", at=4, every=3),
    "rates": Planted(change_rates, "different-options", at=1),
    "permuted": Planted(step_and(permute), "permuted"),
    "nan": Planted(step_and(put_nan), "non-finite-in-some"),
    "state": Planted(step_and(edit_state), "optimizer-state"),
    "buffer": Planted(step_and(edit_mean), "rebroadcast-buffers", options=NORM),
    "own buffer": Planted(
        step_and(edit_mean), "buffers", options={**NORM, "broadcast_buffers": False}
    ),
}


def train(group: Any, planted: Planted, sgd: bool) -> Any:
    """The report of the step at which the fault is to be found; the others are looked at here."""
    play = Play(group, sgd=sgd, **planted.options)
    found = -(-planted.at // planted.every) * planted.every
    reports = {}
    for step in range(1, 7):
        faulty = step == planted.at or (step > planted.at and not planted.once)
        (planted.plant if faulty else Play.step)(play)
        if step % planted.every == 0:
            reports[step] = report = play.verifier.check(step)
            assert report.ok or step >= found, str(report)
            if step > found and not report.equal and not reports[found].equal:
                assert "still-wrong" in {each.code for each in report.findings}
                assert report.since == found
    if not reports[found].equal:
        assert play.verifier.first_report is reports[found]
    return reports[found]


PLAYS = {n: f for n, f in globals().items() if n.startswith(("fault_", "play_"))}
PLAYS |= {name: partial(edited, name) for name in EDITS}
TRAININGS = {
    f"{name}, {optimizer}": partial(train, planted=planted, sgd=optimizer == "SGD")
    for name, planted in PLANTED.items()
    for optimizer in ("Adam", "SGD")
}


def list_plays(rank: int, size: int) -> dict[str, Callable[[], Any]]:
    return {name: partial(play, dist.group.WORLD) for name, play in {**TRAININGS, **PLAYS}.items()}


SIZE = 3


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of each rank."""
    folder = tmp_path_factory.mktemp("replicas")
    return mesh_training.run_ranks([*warm_python(), __file__], SIZE, folder)


FOUND: dict[str, dict[str, Any]] = {  # details of the first tensor
    "bit, Adam": {"bit": 20, "index": [2, 3], "differing": 1},
    "fault_count": {"value": "3.0", "reference_value": "2.0"},
    "fault_buffer": {"index": [1], "value": "5.0"},
    "fault_gradient": {"index": [0, 1], "value": "9.0"},
}  # fmt: skip


Outcomes = list[dict[str, Any]]


@pytest.mark.parametrize("name", FOUND)
def test_a_fault_in_the_last_rank(outcomes: Outcomes, name: str, frozen: Frozen) -> None:
    """Each is found with its tensor, its rank, its place and its cause, in every rank alike."""
    report = mesh_training.agree(outcomes, name)
    whole = ("equal", "step", "equal_until", "minority", "faults", "minorities")
    frozen.facts([{key: report[key] for key in whole}, *facts_of(report)])
    first = report["differences"][0]
    assert first["sides"] == [[0, 1], [2]]
    (detail,) = first["details"]
    assert detail | FOUND[name] == detail
    assert (detail["ranks"], detail["reference"]) == ([2], 0)


@pytest.mark.parametrize("optimizer", ["Adam", "SGD"])
@pytest.mark.parametrize("name", PLANTED)
def test_a_fault_at_a_step(outcomes: Outcomes, name: str, optimizer: str, frozen: Frozen) -> None:
    """Verified after every step, or every third, a fault is found at the first look after it, with
    its cause; later looks name no other cause, and earlier ones nothing."""
    report, planted = mesh_training.agree(outcomes, f"{name}, {optimizer}"), PLANTED[name]
    assert report["cause"] in planted.cause.split(" or "), report["text"]
    severity, _, place = facts_of(report, "tensors", "cause")[0]
    until = [report["equal"], report["step"], report["equal_until"]]
    frozen.facts([severity, planted.cause, place, *until])


def test_the_first_bad_step_is_kept(outcomes: Outcomes, frozen: Frozen) -> None:
    """Later reports name it, with what has differed only since, and the summary counts."""
    report = mesh_training.agree(outcomes, "play_memory")
    frozen.facts([facts_of(report), facts_of(report["again"])])
    texts = [report["text"], report["again"]["text"], report["summary"]]
    frozen.text(without_figures("\n".join(texts)))
    assert "5 verifications" in report["summary"]
    assert "3 failed" in report["summary"]


def test_different_structures(outcomes: Outcomes, frozen: Frozen) -> None:
    """Tensors that are absent or have other shapes are named by rank; the rest is compared."""
    report = mesh_training.agree(outcomes, "fault_structure")
    frozen.facts(facts_of(report))
    found = {(m["kind"], m["name"]): m["forms"] for m in report["mismatches"]}
    assert found == {
        ("parameter", "out.weight"): ["float32 (3, 8) cpu", "float32 (4, 8) cpu"],
        ("parameter", "out.bias"): ["float32 (3,) cpu", "float32 (4,) cpu"],
        ("parameter", "extra.weight"): ["absent", "float32 (2, 2) cpu"],
        ("parameter", "extra.bias"): ["absent", "float32 (2,) cpu"],
        ("buffer", "scale"): ["float32 (4,) cpu", "float64 (4,) cpu"],
    }
    assert all(mismatch["sides"] == [[0, 1], [2]] for mismatch in report["mismatches"])
    assert report["compared"]["parameter"] == 2
    assert report["differences"] == []


def test_nonfinite_elements_are_a_finding_of_their_own(outcomes: Outcomes, frozen: Frozen) -> None:
    """With their ranks and number; alike in all ranks they leave the replicas equal."""
    (found,) = mesh_training.agree(outcomes, "nan, Adam")["nonfinite"]
    assert (found["name"], found["counts"]) == ("out.weight", [[2, 2]])
    report = mesh_training.agree(outcomes, "fault_nan_everywhere")
    assert report["nonfinite"][0]["counts"] == [[rank, 1] for rank in range(3)]
    assert (report["equal"], report["ok"], report["cause"]) == (True, False, None)
    frozen.facts(facts_of(report))
    frozen.text(report["findings"][0]["sentence"])


def test_each_rank_another_value(outcomes: Outcomes, frozen: Frozen) -> None:
    """Where every rank has its own value there is no minority, and each is shown."""
    report = mesh_training.agree(outcomes, "fault_all_ranks")
    (only,) = report["differences"]
    assert only["sides"] == [[0], [1], [2]]
    assert report["minorities"] == [[]]
    assert [d["value"] for d in only["details"]] == ["1.0", "2.0"]
    frozen.findings(Finding(**found) for found in report["findings"])


OTHERS = [name for name in PLAYS if name.startswith("play_")]


@pytest.mark.parametrize("name", OTHERS)
def test_play(outcomes: Outcomes, name: str) -> None:
    """Holds in every rank: first bad steps, no trace, wrong arguments, an absent rank."""
    mesh_training.agree(outcomes, name)


if __name__ == "__main__":
    mesh_training.play_in_rank(list_plays)
