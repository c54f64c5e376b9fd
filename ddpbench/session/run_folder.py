"""The folder of a run: created once, known to every rank."""

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


def broadcast_run_folder(world: World, asked: RunOptions) -> tuple[Path, Plan]:
    """The run's folder, made by rank 0 unless it exists already, and its plan."""
    found: dict[str, Any] = {}
    if world.rank == 0:
        try:
            folder = (
                Path(asked.join)
                if asked.join
                else create_run(asked, world.world_size, sys.argv[1:])
            )
            found = {"folder": str(folder.resolve()), "plan": asdict(store.read(folder).plan)}
        except (OSError, store.InvalidRun) as error:
            found = {"error": explain_unwritable(error)}
    found = control.broadcast_value(world, found)
    if "error" in found:
        raise Refused(str(found["error"]))
    return Path(found["folder"]), Plan(**found["plan"])


def create_run(asked: RunOptions, world_size: int, words: Sequence[str]) -> Path:
    """Make the folder of a new run that `words` asked for. Raises OSError when it cannot."""
    seed = random.SystemRandom().randrange(2**31) if asked.seed is None else asked.seed
    record = Run(
        id="",
        command=asked.command,
        command_line=("ddpbench", asked.command, *words),
        plan=asked.plan(seed),
        started=store.format_now(),
        operations=asked.subjects,
        backends=asked.backend,
    )
    label = f"{asked.command}-{'+'.join(asked.backend)}-w{world_size}"
    return store.create(Path(asked.output) if asked.output else None, record, label)


def explain_unwritable(error: Exception) -> str:
    """The sentence for a results folder that cannot be made."""
    if isinstance(error, OSError) and error.strerror:
        return (
            f"results cannot be written to {error.filename} ({error.strerror}): "
            "name a folder that can with --output"
        )
    return str(error)
