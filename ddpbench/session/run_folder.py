"""The folder of a run. It is created once, and every rank knows it."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ddpbench.launch.placement import Refused
from ddpbench.records import store
from ddpbench.records.schema import Plan, Run
from ddpbench.runtime import control
from ddpbench.runtime.world import World
from ddpbench.session.run_options import RunOptions


def broadcast_run_folder(world: World, options: RunOptions) -> tuple[Path, Plan]:
    """Return the run's folder and plan in all ranks. Rank 0 creates the folder if needed."""
    value: dict[str, Any] = {}
    if world.rank == 0:
        try:
            if options.join:
                folder = Path(options.join)
                plan = store.read(folder).plan
            else:
                folder, plan = create_run(options, world.world_size, sys.argv[1:])
            value = {"folder": str(folder.resolve()), "plan": asdict(plan)}
        except (OSError, store.InvalidRun) as error:
            value = {"error": explain_unwritable(error)}
    value = control.broadcast_value(world, value)
    if "error" in value:
        raise Refused(str(value["error"]))
    return Path(value["folder"]), Plan(**value["plan"])


def create_run(options: RunOptions, world_size: int, arguments: Sequence[str]) -> tuple[Path, Plan]:
    """Choose a seed and create the folder of a new run. Raises OSError."""
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    record = Run(
        id="",
        command=options.command,
        command_line=("ddpbench", options.command, *arguments),
        plan=options.plan(seed),
        started=store.format_now(),
        operations=options.subjects,
        backends=options.backend,
        label=options.label or "",
    )
    label = f"{options.command}-{'+'.join(options.backend)}-w{world_size}"
    folder = store.create(Path(options.output) if options.output else None, record, label)
    return folder, record.plan


def explain_unwritable(error: Exception) -> str:
    """Explain in one sentence why a results folder cannot be created."""
    if isinstance(error, OSError) and error.strerror:
        return (
            f"results cannot be written to {error.filename} ({error.strerror}): "
            "choose a writable folder with --output"
        )
    return str(error)
