"""What torch finds in the environment, and in the store, when a rank makes its groups."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import torch.distributed as dist
from command_lines import clean_environment
from patience import PATIENCE_SECONDS

from ddpbench.hang import torch_settings
from ddpbench.launch.placement import free_port, read_placement
from ddpbench.runtime.meeting import Rendezvous
from ddpbench.runtime.world import join_world

NAMES = (*torch_settings.BUFFER_SIZES, torch_settings.HEARTBEAT)


def settings() -> dict[str, str]:
    """Those that are set now."""
    return {name: os.environ[name] for name in NAMES if name in os.environ}


def job(path: Path) -> None:
    """One rank, which makes a group."""
    placement = read_placement()
    assert placement is not None
    inside = []
    make = dist.new_group

    def new_group(*words: object, **options: object) -> object:
        inside.append(settings())
        return make(*words, **options)

    rendezvous = Rendezvous(timeout_seconds=500)
    with (
        join_world(placement, rendezvous) as world,
        mock.patch.object(dist, "new_group", new_group),
    ):
        with world.agree_group("gloo"):
            pass
        store = dist.distributed_c10d._get_default_store()
        seen = [*inside, settings(), store.timeout.total_seconds()]
        path.write_text(json.dumps(seen))


def test_torch_records_groups_and_lets_the_watchdog_come_first(tmp_path: Path) -> None:
    """While a rank makes a group, the recorder is on and nccl's monitor patient; afterwards the
    environment is the user's again. Waits in the store end with the group's time-out only."""
    meeting = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    environment = {**clean_environment(), **meeting, "MASTER_PORT": str(free_port())}
    path = tmp_path / "seen"
    done = subprocess.run(
        [sys.executable, __file__, str(path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    inside, after, store_seconds = json.loads(path.read_text())
    assert inside.pop(torch_settings.HEARTBEAT) == "590"
    assert [*inside.values()] == [torch_settings.ENTRIES]
    assert after == {}
    assert store_seconds == 530


if __name__ == "__main__":
    job(Path(sys.argv[1]))
