"""Measure where the time of a DDP step goes, and prove after each step that all replicas are equal.

ddpbench ddp --backend gloo,mpi -n 2              starts the ranks itself
torchrun --nproc-per-node 4 -m ddpbench.ddp --workload transformer --layers 4 --width 256
mpirun -n 4 python -m ddpbench.ddp --backend mpi
srun -n 4 python -m ddpbench.ddp --workload mypackage.model:build
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddpbench.catalog import workloads
from ddpbench.catalog.hooks import HOOKS
from ddpbench.launch.placement import Refused
from ddpbench.session import launches
from ddpbench.session.launches import LaunchContext
from ddpbench.session.recorder import Recorder
from ddpbench.session.step_options import Options as Options
from ddpbench.session.step_options import add_arguments as add_arguments

if TYPE_CHECKING:
    from ddpbench.measure.sharded_step import Meshes
GROUP = "measure"
HELP = "measure where the time of a DDP step goes; prove the replicas equal after each step"
IMPORTS = True


def run(namespace: argparse.Namespace, words: Sequence[str]) -> int:
    """Measure all launches, or this rank's part of one; return the exit code. Raises Refused."""
    return launches.run(Options, measure_launch, namespace, words)


def measure_launch(context: LaunchContext[Options]) -> Recorder:
    """Measure the workloads of one launch, in all ranks together."""
    import torch

    from ddpbench.session.trial import Trial

    options = context.options
    threads = context.world.agree_thread_count()
    torch.set_num_threads(threads)
    if why := HOOKS[options.comm_hook].fails.get(context.backend.name):
        raise Refused(
            f"--comm-hook {options.comm_hook} on {context.backend.name} {why}: "
            "use --comm-hook none, or another --backend"
        )
    meshes = _agree_meshes(context)
    recorder = context.gather_recorder(len(options.subjects), threads=threads)
    trial = Trial(context, threads, meshes)
    step = "DDP step" if meshes is None else f"{options.parallel} step"

    def describe(name: str) -> str:
        return f"the {step} of {name} on {context.backend.name}"

    for name in recorder.agree_cases(options.subjects, describe):
        torch.manual_seed(context.plan.seed)  # models draw the same numbers in all ranks
        recorder.add(*trial.measure(workloads.get(name), recorder.progress))
    return recorder


def _agree_meshes(context: LaunchContext[Options]) -> Meshes | None:
    """Arrange the ranks in the mesh of --parallel; None for DDP.

    Raises Refused in all ranks if they do not fit the mesh, or the backend does not support it.
    """
    world, options = context.world, context.options
    shape = options.lay_out([len(host) for host in world.hosts.values()])
    if not shape:
        return None
    world.watchdog.begin_phase("the import of torch's parallel training")
    from ddpbench.measure import sharded_step

    made = sharded_step.agree_meshes(
        world,
        options.way,
        shape,
        torch_name=context.name,
        whole=context.tested,
        device=context.device,
        closing=context.closing,
    )
    world.watchdog.begin_phase(f"the trial of --parallel {options.parallel}")
    refusal = sharded_step.find_refusal(world, made, context.backend.name)
    if refusal is not None:
        raise Refused(refusal)
    return made


if __name__ == "__main__":
    # `-m` loads this module as `__main__`. Import it by name so that its classes exist only once.
    from ddpbench.cli import main

    sys.exit(main(["ddp", *sys.argv[1:]]))
