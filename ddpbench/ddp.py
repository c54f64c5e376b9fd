"""Measure DDP steps: the workloads of a run, and one launch of it in one rank."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ddpbench.catalog import faults, workloads
from ddpbench.catalog.backends import Backend
from ddpbench.catalog.hooks import HOOKS
from ddpbench.catalog.optimizers import OPTIMIZERS
from ddpbench.catalog.workloads import WORKLOADS
from ddpbench.launch.placement import Placement, Refused
from ddpbench.records.schema import StepCase
from ddpbench.render.step_columns import STEP_COLUMNS
from ddpbench.runtime import control
from ddpbench.runtime.world import World
from ddpbench.session import launch_facts, launch_loop, options
from ddpbench.session.launch_loop import LaunchContext, Measure, Work
from ddpbench.session.recorder import Outcome
from ddpbench.session.step_options import DEFAULT
from ddpbench.session.step_options import Options as Options  # as each measuring command has it

if TYPE_CHECKING:
    from ddpbench.session.progress import Progress
    from ddpbench.session.recorder import Recorder

SETTINGS = tuple(dict.fromkeys(name for each in WORKLOADS.values() for name in each.settings))


class _Setting(argparse.Action):
    """Collects --width 512 and its like into `settings`."""

    def __call__(self, parser: Any, namespace: Any, value: Any, option: str | None = None) -> None:
        given = dict(namespace.settings)
        given[self.metavar_name] = value
        namespace.settings = tuple(given.items())

    @property
    def metavar_name(self) -> str:
        return self.option_strings[0].removeprefix("--")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command; imports no torch."""
    _add_workload(parser.add_argument_group("what is trained"))
    _add_ddp(parser.add_argument_group("DDP's options"))
    options.add_where(parser)
    _add_how(parser.add_argument_group("how it is measured"))
    options.add_repeats(parser, "of weights, data and the order of arms; default 0")
    parser.set_defaults(seed=0)  # data and weights are the same in every run
    options.add_shown(parser, STEP_COLUMNS)
    options.add_stored(parser)


def _add_workload(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--workload",
        "--model",
        type=_workloads,
        metavar="NAME,…",
        help=f"of: {', '.join(WORKLOADS)}, all; or package.module:function of your own, called "
        "with (rank, world_size, device), which returns (model, batch(step), loss(model, batch)); "
        f"default {DEFAULT['cpu'][0]}, on GPUs {DEFAULT['cuda'][0]}",
    )
    for name in SETTINGS:
        defaults = "; ".join(
            f"{each.name} {each.settings[name]['cpu']}"
            + ("" if _same(each.settings[name]) else f", on GPUs {each.settings[name]['cuda']}")
            for each in WORKLOADS.values()
            if name in each.settings
        )
        add(f"--{name}", dest="settings", action=_Setting, type=options.whole(1), default=(),
            metavar="N", help=f"of {defaults}")  # fmt: skip
    add(
        "--batch",
        type=options.whole(1),
        metavar="N",
        help="samples of one rank in one micro-batch; default: the workload's",
    )
    add("--optimizer", choices=tuple(OPTIMIZERS), help="default: the workload's")
    add("--learning-rate", type=options.positive, metavar="X", help="default: the workload's")
    add(
        "--accumulate",
        type=options.whole(1),
        default=1,
        metavar="N",
        help="micro-batches of a step, all but the last under no_sync; default 1",
    )
    add("--amp", choices=("bf16",), help="autocast of the forward")
    add(
        "--threads",
        type=options.whole(1),
        metavar="N",
        help="of compute in one rank; default OMP_NUM_THREADS, else cores / ranks of the host",
    )
    add("--epochs", type=options.whole(0), help="of regression's training; default 20")
    add("--checkpoint", metavar="FILE", help="where regression's training is saved each epoch")
    add("--resume", action="store_true", help="go on from --checkpoint")


def _add_ddp(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--bucket-cap-mb",
        type=options.positive,
        metavar="MB",
        help="default: DDP's own, 25 with a first bucket of 1; a number is that of all buckets",
    )
    add("--gradient-as-bucket-view", action="store_true", help="gradients lie in the buckets")
    add("--static-graph", action="store_true", help="the graph is the same in every step")
    add("--find-unused-parameters", action="store_true", help="search each graph for them")
    hooks = "; ".join(f"{hook.name}: {hook.help}" for hook in HOOKS.values())
    add("--comm-hook", choices=tuple(HOOKS), default="none", help=f"{hooks}")


def _add_how(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--seconds",
        type=options.positive,
        default=30.0,
        help="for one workload on one backend; at least ten rounds are measured; default 30",
    )
    add("--rounds", type=options.whole(1), metavar="N", help="this many, however long they take")
    add(
        "--in-a-row",
        type=options.whole(1),
        metavar="K",
        help="steps of an arm in a round; default 5, or 1 where they take over a second",
    )
    add(
        "--no-budget",
        action="store_true",
        help="DDP's own step only: no arms without communication, half the memory",
    )
    add(
        "--verify",
        type=_every,
        default=1,
        metavar="every|N|off",
        help="prove the replicas equal after every step (default), every N steps, or never",
    )
    add(
        "--on-mismatch",
        choices=("stop", "continue"),
        default="stop",
        help="what to do when replicas differ; default stop",
    )
    add(
        "--inject",
        type=options.fault(faults.IN_STEP),
        action="append",
        default=[],
        metavar="FAULT[:setting=value,…]",
        help=f"plant a fault, to see it found, from step {faults.STEP} on in the last rank, or "
        f":step=7,rank=0. {faults.listed(faults.IN_STEP)}",
    )


def _same(by_device: Mapping[str, int]) -> bool:
    return len(set(by_device.values())) == 1


def _workloads(text: str) -> tuple[str, ...]:
    """The type of `--workload`."""
    words = options.listed(text)
    if "all" in words:
        return tuple(WORKLOADS)
    for word in words:
        try:
            workloads.get(word)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return words


def _every(text: str) -> int:
    """The type of `--verify`: steps from one verification to the next, 0 for none."""
    if text in ("every", "off"):
        return int(text == "every")
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not every, off or a whole number from 1 on")
    return int(text)


def planned(asked: Options, backend: Backend) -> list[StepCase] | None:
    """The cases of a sweep on one backend, without what the models add; None: not known before."""
    found = []
    for name in asked.subjects:
        workload = workloads.get(name)
        batch = asked.batch or workload.batch.get(asked.device)
        if not batch:
            return None  # the user's own: as its batches are
        settings = asked.settings_of(workload)
        found.append(StepCase(
            workload=name, settings=tuple(f"{each}={n}" for each, n in settings.items()),
            parameters=0, parameter_nbytes=0, backend=backend.name, provider="",
            device=asked.device, batch=batch, accumulate=asked.accumulate,
            optimizer=asked.optimizer or workload.optimizer, amp=asked.amp,
            comm_hook=asked.comm_hook, threads=0, world_size=asked.nproc or 1,
            ranks_per_host=(asked.nproc or 1,), **asked.ddp_options(),
        ))  # fmt: skip
    return found


def run(asked: Options, place: Placement) -> int:
    """One rank's part over all backends and workloads; the exit code."""
    return launch_loop.run(asked, place, prepare)


def prepare(at: LaunchContext[Options]) -> Work[str]:
    """The workloads of one launch."""
    import torch

    from ddpbench.session.trial import Trial

    threads = at.asked.threads or launch_facts.agree_thread_count(at.world)
    torch.set_num_threads(threads)
    _require_hook(at.world, at.asked, at.backend)

    def begin(recorder: Recorder, progress: Progress) -> Measure[str]:
        trial = Trial(
            at.world, at.tested, at.backend, at.asked, at.plan, at.device, threads, at.index
        )

        def measure(name: str) -> tuple[Outcome, dict[str, Any] | None]:
            torch.manual_seed(at.plan.seed)  # what a model draws is the same in all ranks
            return trial.measure(workloads.get(name), progress)

        return measure

    return Work(
        at.asked.subjects,
        lambda name: f"the DDP step of {name} on {at.backend.name}",
        begin,
        {"threads": threads},
    )


def _require_hook(world: World, asked: Options, backend: Backend) -> None:
    """Refused in all ranks together where the hook, really tried elsewhere, does not work."""
    if asked.comm_hook == "none":
        return
    from ddpbench.measure import hook_probe

    world.watchdog.begin_phase(f"the trial of the communication hook {asked.comm_hook}")
    sentence = None
    if world.rank == 0:
        sentence = hook_probe.refusal(
            asked.comm_hook, backend.name, asked.device, 0.8 * asked.timeout,
            asked.ddp_options(), asked.modules,
        )  # fmt: skip
    sentence = control.broadcast_value(world, sentence)
    if sentence is not None:
        raise Refused(f"--comm-hook {sentence}; use --comm-hook none, or another backend")


if __name__ == "__main__":
    # `-m` loads this module as `__main__`. The command imports it by name: its classes exist once.
    from ddpbench.cli import main

    sys.exit(main(["ddp", *sys.argv[1:]]))
