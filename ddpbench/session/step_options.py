"""The options of `ddpbench ddp`, validated. No torch."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ddpbench.catalog import faults, workloads
from ddpbench.catalog.hooks import HOOKS
from ddpbench.catalog.parallel import TENSOR, WAYS, Hosts, Way, parse_mesh
from ddpbench.catalog.planting import IN_STEP, STEP
from ddpbench.catalog.task import OPTIMIZERS, Workload
from ddpbench.catalog.workloads import SETTINGS, WORKLOADS
from ddpbench.launch.placement import Refused
from ddpbench.present.steps.columns import STEP_COLUMNS
from ddpbench.records.schema import Plan
from ddpbench.records.wording import list_choices
from ddpbench.runtime import devices
from ddpbench.session import options
from ddpbench.session.options import RunOptions

SECONDS, SHORT_SECONDS = 30.0, 5.0  # of a single launch, and of each of several
# Options with the same name in StepCase, and those with the same name in DistributedDataParallel.
SAME = ("device", "accumulate", "amp", "comm_hook", "parallel")
DDP_OPTIONS = (
    "bucket_cap_mb",
    "gradient_as_bucket_view",
    "static_graph",
    "find_unused_parameters",
    "broadcast_buffers",
)
DEFAULT = {"cpu": ("mlp",), "cuda": ("transformer",)}


@dataclass(frozen=True)
class Options(RunOptions):
    """The options of a DDP step. None: the default depends on the workload or the device."""

    command = "ddp"

    workload: tuple[str, ...] | None
    settings: tuple[tuple[str, int], ...]
    batch: int | None
    optimizer: str | None
    accumulate: int
    amp: str | None
    parallel: str
    mesh: tuple[int, ...]
    no_prefetch: bool
    reshard_after_forward: str | None
    bucket_cap_mb: float | None
    gradient_as_bucket_view: bool
    static_graph: bool
    find_unused_parameters: bool
    broadcast_buffers: bool
    comm_hook: str
    case_time: float | None
    rounds: int | None
    steps_per_round: int | None
    no_breakdown: bool
    verify: int
    inject: tuple[str, ...]

    @property
    def subjects(self) -> tuple[str, ...]:
        return self.workload or DEFAULT[self._sizes]

    def plan(self, seed: int) -> Plan:
        return Plan(
            slice_seconds=self.case_time or (SECONDS if self.launches == 1 else SHORT_SECONDS),
            verify=self.verify,
            timeout_seconds=self.timeout,
            seed=seed,
        )

    def settings_of(self, workload: Workload) -> dict[str, int]:
        """Return the workload's settings: the user's, else the defaults for the device."""
        chosen = dict(self.settings)
        return {
            name: chosen.get(name, by_device[self._sizes])
            for name, by_device in workload.settings.items()
        }

    def batch_of(self, workload: Workload) -> int:
        """Return the samples of a batch; 0 if only the user's own workload knows them."""
        return self.batch or workload.batch[self._sizes]

    @property
    def _sizes(self) -> str:
        return devices.get("cpu" if self.device == "auto" else self.device).defaults

    def case_values(self, workload: Workload) -> dict[str, Any]:
        """Return the values of a StepCase that follow from the options alone."""
        settings = self.settings_of(workload)
        return {
            "workload": workload.name,
            "settings": tuple(f"{name}={value}" for name, value in settings.items()),
            "optimizer": self.optimizer or workload.optimizer,
            "prefetch": not self.no_prefetch if self.way.shards else None,
            "reshard_after_forward": (
                self.reshard_after_forward != "no" if self.way.shards else None
            ),
            **{name: getattr(self, name) for name in (*SAME, *DDP_OPTIONS)},
        }

    @property
    def way(self) -> Way:
        return WAYS[self.parallel]

    def lay_out(self, hosts: Hosts) -> tuple[int, ...]:
        """Return the mesh of these ranks per host; () for DDP.

        Raises Refused, with one sentence, if it does not fit the ranks, the way or the models.
        """
        try:
            mesh = self.way.lay_out(self.mesh, hosts)
        except ValueError as error:
            raise Refused(str(error)) from None
        ranks = mesh[self.way.dimensions.index(TENSOR)] if self.way.splits else 1
        for name in self.subjects if ranks > 1 else ():
            workload = WORKLOADS[name]
            assert workload.plan is not None
            objection = workload.plan.objection(self.settings_of(workload), ranks)
            if objection is not None:
                raise Refused(objection)
        return mesh

    def check(self) -> None:
        self._check_owners()
        planned = [each.name for each in WORKLOADS.values() if each.plan is not None]
        for name in self.subjects if self.way.dimensions else ():
            if name not in planned:
                raise Refused(
                    f"--parallel {self.parallel} cannot divide the workload {name}: "
                    f"choose --workload {list_choices(planned)}, or --parallel ddp"
                )
        if self.ranks or self.mesh:
            self.lay_out((self.ranks or math.prod(self.mesh),))
        if self.static_graph and self.accumulate > 1:
            raise Refused(
                "--static-graph and --accumulate cannot be combined: torch's reducer fails under "
                "no_sync with a static graph. Leave out one of them"
            )

    def _check_owners(self) -> None:
        """Raise Refused for an option that no chosen workload, or the way of training, has."""
        for name, _ in self.settings:
            owners = [each.name for each in WORKLOADS.values() if name in each.settings]
            if not set(owners).intersection(self.subjects):
                raise Refused(
                    f"--{name} does not apply to {', '.join(self.subjects)}: "
                    f"it belongs to --workload {list_choices(owners)}"
                )
        sharded = tuple(way.name for way in WAYS.values() if way.shards)
        ways_of = {
            **dict.fromkeys(("no_prefetch", "reshard_after_forward"), sharded),
            **dict.fromkeys((*DDP_OPTIONS, "comm_hook"), ("ddp",)),
        }
        del ways_of["broadcast_buffers"]  # it is True by default, and sharded models have none
        for name, ways in ways_of.items():
            if getattr(self, name) not in (None, False, "none") and self.parallel not in ways:
                raise Refused(
                    f"--{name.replace('_', '-')} does not apply to --parallel {self.parallel}: it "
                    f"belongs to --parallel {list_choices(ways)}"
                )
        own = [name for name in self.subjects if name not in WORKLOADS]
        if self.batch and own:
            raise Refused(f"--batch does not apply to {own[0]}: its batch(step) sets the size")


OPTIONS = """
--workload     workloads to measure: {workloads}, all, or package.module:function of your own,
               called with (rank, world_size, device), which returns (model, batch(step),
               loss(model, batch)) (default: {cpu}; {cuda} on GPUs)
--batch        samples per rank in a micro-batch (default: the workload's own)
--optimizer    optimizer of the step (default: the workload's own)
--accumulate   micro-batches per step; all but the last run under no_sync
--amp          run the forward under autocast to this type (default: off)
--parallel     way of parallel training (default: ddp). {ways}
--mesh         ranks along each dimension of the mesh, as 2x4 (default: {meshes})
--no-prefetch  let each layer gather its parameters when it computes, not while the layer before
               computes
--reshard-after-forward  free the gathered parameters of each layer after its forward and gather
               them again for its backward (default: yes)
--bucket-cap-mb  size of every gradient bucket (default: DDP's own: 25, with a first bucket of 1)
--gradient-as-bucket-view  let gradients share the memory of the buckets
--static-graph  tell DDP that the graph is the same in every step
--find-unused-parameters  let DDP search each graph for unused parameters
--no-broadcast-buffers  do not broadcast rank 0's buffers before each forward
--comm-hook    how to reduce the gradients. {hooks}
--case-time    time for one workload on one backend in a launch; at least ten rounds are measured
               (default: 30; 5 with several launches)
--rounds       number of rounds, instead of --case-time; each round measures every arm: the complete
               step, and variants that show where its time goes (default: as many as fit)
--steps-per-round  steps of one arm in a round (default: 5, or 1 if five steps take over a second)
--no-breakdown  measure only the complete step, not the other arms; needs half the memory
--verify       prove that the replicas are equal: after every step, after every N steps, or never
               (off); a difference ends the run (default: every)
--inject       inject a fault in the last rank from step {step} on, or in the rank and step that
               :step=7,rank=0 names; can be repeated (default: none). {faults}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command; imports no torch."""
    meshes = {
        way.name: f"{' x '.join(way.dimensions)} = {way.default_help}"
        for way in WAYS.values()
        if way.dimensions
    }
    texts = OPTIONS.format(
        workloads=", ".join(WORKLOADS),
        cpu=",".join(DEFAULT["cpu"]),
        cuda=",".join(DEFAULT["cuda"]),
        ways=_join((way.name, way.help) for way in WAYS.values()),
        meshes=_join(meshes.items()),
        hooks=_join((hook.name, hook.help) for hook in HOOKS.values()),
        step=STEP,
        faults=faults.list_faults(IN_STEP),
    )
    add = options.add_group(parser, "what is trained", texts)
    add("--workload", kind=options.checked(parse_workloads), metavar="NAME,…")
    add("--batch", kind=options.whole(1), metavar="N")
    add("--optimizer", choices=tuple(OPTIMIZERS))
    add("--accumulate", kind=options.whole(1), default=1, metavar="N")
    add("--amp", choices=("bf16",))
    _add_settings(parser)
    add = options.add_group(parser, "how the model is divided among ranks", texts)
    add("--parallel", default="ddp", choices=tuple(WAYS))
    add("--mesh", kind=options.checked(parse_mesh), default=(), metavar="NxM")
    add("--no-prefetch", action="store_true")
    add("--reshard-after-forward", choices=("yes", "no"))
    add = options.add_group(parser, "DDP's options", texts)
    add("--bucket-cap-mb", kind=options.positive, metavar="MB")
    for flag in ("--gradient-as-bucket-view", "--static-graph", "--find-unused-parameters"):
        add(flag, action="store_true")
    add("--no-broadcast-buffers", action="store_false", dest="broadcast_buffers", default=True)
    add("--comm-hook", default="none", choices=tuple(HOOKS))
    add = options.add_group(parser, "how it is measured", texts)
    add("--case-time", kind=options.positive, metavar="SECONDS")
    add("--rounds", kind=options.whole(1), metavar="N")
    add("--steps-per-round", kind=options.whole(1), metavar="K")
    add("--no-breakdown", action="store_true")
    add("--verify", kind=parse_interval, default=1, metavar="every|N|off")
    fault, metavar = options.fault(IN_STEP), "FAULT[:setting=value,…]"
    add("--inject", kind=fault, default=[], action="append", metavar=metavar)
    seeded = "weights, data and the order of the arms"
    options.add_measuring(parser, STEP_COLUMNS, seeded, seed=0)


def _join(texts: Iterable[tuple[str, str]]) -> str:
    return "; ".join(f"{name}: {text}" for name, text in texts)


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """Add an option for each setting of a workload. `settings` collects their names and values."""
    group = parser.add_argument_group("settings of the workload")
    for name in dict.fromkeys(name for each in WORKLOADS.values() for name in each.settings):
        defaults = []
        for each in WORKLOADS.values():
            if name in each.settings:
                cpu, cuda = each.settings[name]["cpu"], each.settings[name]["cuda"]
                other = "" if cpu == cuda else f", {cuda} on GPUs"
                defaults.append(f"{each.name} {cpu}{other}")
        meaning = SETTINGS.get(name, "setting of the workload")
        group.add_argument(
            f"--{name}",
            dest="settings",
            action="append",
            default=[],
            type=partial(_parse_setting, name),
            metavar="N",
            help=f"{meaning} (default: {'; '.join(defaults)})",
        )


def _parse_setting(name: str, text: str) -> tuple[str, int]:
    return name, options.whole(1)(text)


def parse_workloads(text: str) -> tuple[str, ...]:
    """Parse the value of `--workload`. Raises ValueError for an unknown one."""
    names = options.listed(text)
    if "all" in names:
        return tuple(WORKLOADS)
    for name in names:
        workloads.get(name)
    return names


def parse_interval(text: str) -> int:
    """Parse the value of `--verify`: steps between two verifications, 0 for none."""
    if text in ("every", "off"):
        return int(text == "every")
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r}: must be every, off or an integer of at least 1"
        )
    return int(text)
