"""The arms of a DDP step, and where they wait for the device.

Two ranks over gloo play all cases and leave what they saw in files. They run this very file:
`python test_rounds.py FOLDER`. The CPU's events stand for a GPU's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_lines import run_command
from stored_steps import a_step_case
from torch import Tensor, nn
from warm_python import warm_python

from ddpbench.analysis import steps
from ddpbench.analysis.steps import Samples
from ddpbench.catalog.task import Task
from ddpbench.launch import placement, starters
from ddpbench.launch.placement import Placement
from ddpbench.measure.ddp_step import ARMS, DdpReplica, build_replica
from ddpbench.measure.rounds import Rounds
from ddpbench.runtime import devices
from ddpbench.runtime.world import World, join_world

CPU = torch.device("cpu")
IN_A_ROW, ROUNDS = 4, 6
EVERY = (0, 1, 3)  # steps between two verifications


def some_task(log: list[str]) -> Task:
    """A small net; each forward is noted in the log."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    data = torch.randn(8, 32)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        log.append("step")
        result: Tensor = model(batch).square().mean()
        return result

    return Task(model, lambda step: data, loss)


def some_replica(group: Any, log: list[str], switchable: bool) -> DdpReplica:
    """The net in DDP."""
    case = a_step_case(bucket_cap_mb=0.0005)
    return build_replica(some_task(log), case, 0.01, group, device=CPU, switchable=switchable)


# --- in the ranks ---------------------------------------------------------------------------------


class Device(devices.Cpu):
    """A CPU that is timed as a GPU is, and notes when it is waited for."""

    clock = "device"

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def synchronize(self, device: torch.device) -> None:
        self.log.append("wait")


class NotedRounds(Rounds):
    """Rounds that note the begin of each stretch, and of the end."""

    log: list[str]

    def _stretch(self, arm: str, count: int) -> Any:
        self.log.append(f"{arm} {count}")
        return super()._stretch(arm, count)

    def _gather(self) -> Samples | None:
        self.log.append("the end")
        return super()._gather()


def measure(world: World, group: Any, every: int) -> dict[str, Any]:
    """Measure all arms; return what was noted and which steps were verified."""
    log: list[str] = []
    verified: list[int] = []

    def verify(step: int) -> bool:
        log.append("verify")
        verified.append(step)
        return True

    devices.KINDS["cpu"] = Device(log)
    rounds = NotedRounds(
        world=world,
        main=some_replica(group, log, switchable=False),
        probe=some_replica(group, log, switchable=True),
        arms=ARMS,
        seconds=60.0,
        rounds=ROUNDS,
        in_a_row=IN_A_ROW,
        seed=1,
        verify=verify if every else None,
        every=every,
    )
    rounds.log = log
    samples = rounds.run().samples
    if samples is not None:
        assert_budget_adds_up(samples)
    return {"log": log, "verified": verified}


def assert_budget_adds_up(samples: Samples) -> None:
    """With the device's clock, the phases lie in the total of their stretch, and the parts of the
    budget make the step as they do with the host's."""
    for arm in ARMS:
        ns = samples.stamps[arm]
        assert ns.shape == (2, ROUNDS, IN_A_ROW, 4)
        assert (np.diff(ns, axis=3) > 0).all()
        steps_ns = (ns[..., 3] - ns[..., 0]).sum(axis=2)
        assert (steps_ns <= samples.walls[arm]).all()
    handed, reduced = np.moveaxis(np.array(samples.bucket_stamps), 3, 0)
    assert handed.shape == (2, ROUNDS, len(samples.buckets))
    assert len(samples.buckets) > 1
    assert (handed > 0).all()
    assert (handed < reduced).all()
    summary = steps.summarise(samples, 16, 4)
    part = {each.name: each.figure.value for each in summary.budget}
    whole = part[steps.COMPUTE] + part[steps.COPIES] + part[steps.EXPOSED]
    assert whole == pytest.approx(summary.step.value)
    assert part[steps.TRANSFER] + part[steps.OVERHEAD] == pytest.approx(part[steps.EXPOSED])
    assert part[steps.TRANSFER] + part[steps.HIDDEN] == pytest.approx(part[steps.COMMUNICATION])


def play(folder: Path) -> int:
    """Play all cases in this rank."""
    place = placement.read_placement()
    assert isinstance(place, Placement)
    with join_world(place) as world, world.agree_group("gloo") as group:
        seen = {str(every): measure(world, group, every) for every in EVERY}
    (folder / f"rank-{place.rank}").write_text(json.dumps(seen))
    return 0


# --- the tests ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each rank left; rank 0 has also checked the budget."""
    folder = tmp_path_factory.mktemp("rounds")
    done = run_command([*warm_python(), __file__, str(folder)], folder)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"rank-{rank}").read_text()) for rank in range(2)]


def stretches(log: list[str]) -> list[tuple[str, list[str]]]:
    """The arm of each measured stretch, and what happened in it."""
    found: list[tuple[str, list[str]]] = []
    for note in log:
        if " " in note:
            found.append((note, []))
        else:
            found[-1][1].append(note)
    measured = found[-ROUNDS * len(ARMS) - 1 : -1]
    assert all(arm.endswith(f" {IN_A_ROW}") for arm, _ in measured)
    return [(arm.removesuffix(f" {IN_A_ROW}"), notes) for arm, notes in measured]


@pytest.mark.parametrize("every", EVERY)
def test_all_arms_wait_for_the_device_at_the_same_places(seen: list[Any], every: int) -> None:
    """In a round, each arm waits before and after the same steps; only "ddp" is verified there.
    A GPU idles after such a wait, which must not look like a difference between arms."""
    for rank in seen:
        found = stretches(rank[str(every)]["log"])
        for first in range(0, len(found), len(ARMS)):
            of_round = found[first : first + len(ARMS)]
            assert sorted(arm for arm, _ in of_round) == sorted(ARMS)
            verified = {arm: notes.count("verify") for arm, notes in of_round}
            assert not any(count for arm, count in verified.items() if arm != "ddp")
            waits = {tuple(note for note in notes if note != "verify") for _, notes in of_round}
            assert len(waits) == 1
            (order,) = waits
            assert order[0] == order[-1] == "wait"
            if every == 1:  # behind each step, and before the next once the ranks have met again
                assert order == ("wait", "step", "wait") * IN_A_ROW


@pytest.mark.parametrize("every", EVERY[1:])
def test_every_nth_step_is_verified(seen: list[Any], every: int) -> None:
    """Whatever the number of steps in a row is: the steps with these numbers, warm-up included."""
    last = 4 + ROUNDS * IN_A_ROW
    for rank in seen:
        assert rank[str(every)]["verified"] == list(range(every, last + 1, every))
    assert not seen[0]["0"]["verified"]


if __name__ == "__main__":
    sys.exit(starters.run_forked(lambda: play(Path(sys.argv[1])), 2))
