"""The job that is watched, as it is stored: its script, its ranks and the backend that it uses."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ddpbench.catalog import backends
from ddpbench.launch import placement
from ddpbench.mpi_backend.base import NAME
from ddpbench.records import redact, store
from ddpbench.records.launched import Launch
from ddpbench.records.schema import StepCase
from ddpbench.runtime import devices, environment

TIME = "from the end of an optimizer step to the end of the next"  # other than that of `ddp`


@dataclass(frozen=True)
class Job:
    """What is known of a job before its first report."""

    case: StepCase
    launch: Launch
    verify: int = 0

    def placed(self, hosts: Mapping[str, int]) -> Job:
        """Return the job with its hosts: name → number of ranks there."""
        case = replace(self.case, ranks_per_host=tuple(hosts.values()))
        ranks = [{"hostname": host} for host, count in hosts.items() for _ in range(count)]
        return replace(self, case=case, launch=replace(self.launch, ranks=tuple(ranks)))


def identify_job(script: str, verify: int, name: str, world_size: int) -> Job:
    """Return the job of this process. Runs in rank 0.

    script: its name for titles, or "" for that of the running program. name: of its default
    process group's backend, in torch; world_size: the number of its ranks.
    """
    kind = devices.preferred()
    device = "cpu" if kind.in_use() is None else kind.name
    backend = backends.get("mpi" if name == NAME else name)
    launch = Launch(
        index=0,
        backend=backend.name,
        provider=backend.provider(device),
        library=backend.library(),
        launcher=placement.name_launcher(),
        world_size=world_size,
        facts=environment.run_facts(),
        started=store.format_now(),
        cases=1,
    )
    case = StepCase(
        workload=Path(script or sys.argv[0]).name,
        settings=tuple(redact.arguments(sys.argv[1:])),
        parameters=0,
        parameter_nbytes=0,
        backend=launch.backend,
        provider=launch.provider,
        device=device,
        batch=0,
        accumulate=0,
        optimizer="",
        amp=None,
        bucket_cap_mb=None,
        gradient_as_bucket_view=False,
        static_graph=False,
        find_unused_parameters=False,
        comm_hook="",
        threads=torch.get_num_threads(),
        world_size=launch.world_size,
        ranks_per_host=(),
        time_definition=TIME,
        rank_reduction="median",
    )
    return Job(case, launch, verify)
