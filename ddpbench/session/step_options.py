"""The options of `ddpbench ddp`, validated. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ddpbench.catalog.task import Workload
from ddpbench.catalog.workloads import WORKLOADS
from ddpbench.launch.placement import Refused
from ddpbench.records.schema import Plan
from ddpbench.session.run_options import RunOptions

DEFAULT = {"cpu": ("mlp",), "cuda": ("transformer",)}


@dataclass(frozen=True)
class Options(RunOptions):
    """What was asked for; None: as the workload or the device has it."""

    command = "ddp"

    workload: tuple[str, ...] | None
    settings: tuple[tuple[str, int], ...]
    batch: int | None
    optimizer: str | None
    learning_rate: float | None
    accumulate: int
    amp: str | None
    threads: int | None
    bucket_cap_mb: float | None
    gradient_as_bucket_view: bool
    static_graph: bool
    find_unused_parameters: bool
    comm_hook: str
    seconds: float
    rounds: int | None
    in_a_row: int | None
    no_budget: bool
    verify: int
    on_mismatch: str
    inject: tuple[str, ...]
    epochs: int | None
    checkpoint: str | None
    resume: bool

    @property
    def subjects(self) -> tuple[str, ...]:
        """The workloads."""
        return self.workload or DEFAULT.get(self.device, DEFAULT["cpu"])

    def plan(self, seed: int) -> Plan:
        """The protocol as it is stored with the run."""
        return Plan(
            slice_seconds=self.seconds,
            verify=self.verify,
            timeout_seconds=self.timeout,
            seed=seed,
        )

    def ddp_options(self) -> dict[str, Any]:
        """What DistributedDataParallel is given."""
        return {
            "bucket_cap_mb": self.bucket_cap_mb,
            "gradient_as_bucket_view": self.gradient_as_bucket_view,
            "static_graph": self.static_graph,
            "find_unused_parameters": self.find_unused_parameters,
        }

    def settings_of(self, workload: Workload) -> dict[str, int]:
        """The workload's settings: the user's, else its defaults for the device."""
        given = dict(self.settings)
        return {
            name: given.get(name, by_device[self.device])
            for name, by_device in workload.settings.items()
        }

    def check(self) -> None:
        """Raises Refused, with one sentence, for options that do not go together."""
        taken = {name for each in self.subjects if each in WORKLOADS
                 for name in WORKLOADS[each].settings}  # fmt: skip
        for name, _ in self.settings:
            if name not in taken:
                those = [each.name for each in WORKLOADS.values() if name in each.settings]
                raise Refused(
                    f"--{name} means nothing to {', '.join(self.subjects)}: "
                    f"it belongs to --workload {' or '.join(those)}"
                )
        if self.static_graph and self.accumulate > 1:
            raise Refused(
                "--static-graph and --accumulate exclude each other: torch's reducer fails under "
                "no_sync with a static graph; leave out one of them"
            )
        own = [name for name in self.subjects if name not in WORKLOADS]
        if self.batch and own:
            raise Refused(f"--batch means nothing to {own[0]}: its batch(step) says how many")
        trains = [name for name in self.subjects if name in WORKLOADS and WORKLOADS[name].trains]
        if (self.checkpoint or self.resume or self.epochs) and len(trains) != 1:
            raise Refused("--epochs, --checkpoint and --resume are for --workload regression")
        if self.resume and not self.checkpoint:
            raise Refused("--resume needs --checkpoint FILE, the file to go on from")
