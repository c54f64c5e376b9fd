"""Each rank gets a GPU of its own wherever it runs, or one sentence says which ranks would share.

Run as a program, this module is ranks that see GPUs of a made-up machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from command_lines import clean_environment
from frozen import Frozen
from patience import PATIENCE_SECONDS
from warm_python import warm_python

from ddpbench.launch import starters
from ddpbench.launch.placement import Refused, read_placement
from ddpbench.runtime.world import World, join_world


def choose(world: World, share_gpu: bool) -> list[object]:
    """Agree on devices in one rank of a machine that has two GPUs."""
    selected: list[object] = []
    answers = {
        "device_count": lambda: 2,
        "get_device_properties": lambda index: SimpleNamespace(name="GPU", uuid="ab"[index]),
        "set_device": selected.append,
    }
    with mock.patch.multiple(torch.cuda, **answers):
        try:
            asked = replace(world, share_gpu=share_gpu, gpu_mates=[])
            device = asked.agree_device("cuda")
        except Refused as refused:
            return [str(refused), selected, []]
    return [str(device), selected, asked.gpu_mates, os.environ.pop("NCCL_HOSTID")]


def run_job(folder: Path) -> int:
    """Agree on devices in one rank, as often as there are ways to ask; write the answers down."""
    placement = read_placement()
    assert placement is not None
    with join_world(placement, 60) as world:
        found = [choose(world, share_gpu) for share_gpu in (False, True)]
        (folder / str(world.rank)).write_text(json.dumps(found))
    return 0


def test_ranks_agree_on_their_gpus_or_are_refused_together(frozen: Frozen, tmp_path: Path) -> None:
    """Three ranks on two GPUs: without --share-gpu all are refused before any has a GPU; with it,
    ranks 0 and 2 share, and know it, and NCCL takes each rank for another host."""
    done = subprocess.run(
        [*warm_python(), __file__, str(tmp_path)],
        env=clean_environment(), capture_output=True, text=True, timeout=PATIENCE_SECONDS,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)]
    sentences = set()
    for rank, (alone, shared) in enumerate(answers):
        assert alone[1:] == [[], []]
        sentences.add(alone[0])
        assert shared[:3] == [f"cuda:{rank % 2}", [rank % 2], [[0, 2], [1], [0, 2]][rank]]
    assert len({shared[3] for _, shared in answers}) == 3
    (sentence,) = sentences
    frozen.text(sentence)


if __name__ == "__main__":
    sys.exit(starters.run_forked(lambda: run_job(Path(sys.argv[1])), 3))
