"""The options that every measuring command has, parsed and resolved."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, ClassVar, TypeVar

from ddpbench.catalog import backends
from ddpbench.launch.placement import Placement, Refused
from ddpbench.records.schema import Plan
from ddpbench.records.terminal_text import tell
from ddpbench.runtime import devices

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T", bound="RunOptions")


@dataclass(frozen=True)
class RunOptions:
    """Options of every measuring command. None: the default depends on device or launcher."""

    command: ClassVar[str]
    usual_launches: ClassVar[int] = 1  # if ddpbench starts the ranks

    backend: tuple[str, ...]
    device: str
    ranks: int | None
    modules: tuple[str, ...]
    share_gpu: bool
    timeout: int
    watchdog: str
    launches: int | None
    seed: int | None
    format: str
    columns: tuple[str, ...] | None
    quiet: bool
    output: str | None
    join: str | None  # the folder of the run, in ranks that ddpbench started
    launch: int  # number of the launch in the run
    paced: bool  # each launch waits for a line on stdin and writes its exit code to stdout

    @classmethod
    def of(cls, namespace: argparse.Namespace) -> Self:
        values = {field.name: getattr(namespace, field.name) for field in fields(cls)}
        lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return cls(**values | lists)

    @property
    def subjects(self) -> tuple[str, ...]:
        """Return the names of what is measured."""
        raise NotImplementedError

    def plan(self, seed: int) -> Plan:
        """Return the protocol as it is stored with the run."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise Refused for options that exclude each other."""

    def named(self) -> dict[str, object]:
        """Return the values that must be equal in all ranks, by the names of the options."""
        names = {"async_op": "async", "modules": "import"}
        return {names.get(k, k.replace("_", "-")): v for k, v in asdict(self).items()}


def resolve(options: T, placement: Placement | None) -> T:
    """Return the options with device, backends, ranks and launches decided.

    placement: of this rank; None if ddpbench starts the ranks. Raises Refused if this host lacks a
    device or backend, and as `RunOptions.check`.
    """
    warn = tell if placement is None or placement.local_rank == 0 else lambda sentence: None
    device = backends.choose_device(options.backend, options.device, warn)
    names = backends.choose(options.backend, device, placement.launcher if placement else None)
    launches = options.launches or (options.usual_launches if placement is None else 1)
    if placement is not None and launches > 1:
        raise Refused(
            "--launches needs ddpbench to start the ranks: leave out the launcher and type "
            f"ddpbench {options.command} -n {placement.world_size} --launches {launches} …"
        )
    ranks = placement.world_size if placement else options.ranks
    ranks = ranks or devices.get(device).usual_ranks()
    options = replace(options, device=device, backend=names, launches=launches, ranks=ranks)
    options.check()
    return options
